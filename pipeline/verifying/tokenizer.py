"""Whether two repositories have the same tokenizer: the same files, or else files that behave the same.

Equal bytes prove it. Where they differ (a re-save writes other files with the same meaning), the reload child loads
both without remote code and compares what they do to difficult text.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from reshard.pipeline.verifying.meta_load import Reload

# What tokenizers of transformers read, by file name; `chat_template.json` is a processor's.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "*-vocab.json",
    "merges.txt",
    "*.model",
    "*.spm",
    "tekken.json",
    "chat_template.jinja",
)
PROCESSOR_FILES = ("*processor_config.json", "chat_template.json")


@dataclass(frozen=True, slots=True)
class TokenizerCheck:
    """``equal_files``: the same bytes; ``equal_behaviour``: other bytes, the same ids, decoding, specials and template;
    ``loads``: nothing to compare with, and it loads; ``failed``: it differs, or no longer loads where the source does.
    """

    result: Literal["equal_files", "equal_behaviour", "loads", "failed", "inconclusive", "skipped"]
    reason: str
    differing: tuple[str, ...] = ()  # files that are not the same on both sides
    seconds: float = 0.0
    peak_rss: int = 0  # bytes


def tokenizer_files(paths: Iterable[str]) -> list[str]:
    """Those of a repository's paths that its tokenizer is made of."""
    return _named(paths, TOKENIZER_FILES)


def processor_files(paths: Iterable[str]) -> list[str]:
    """Those of a repository's paths that say how it takes images, sound and chats."""
    return _named(paths, PROCESSOR_FILES)


def _named(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(path for path in paths if any(fnmatchcase(PurePosixPath(path).name, like) for like in patterns))


def check_tokenizer(reload: Reload, output: Path, source: Path | None = None) -> TokenizerCheck:
    """Whether ``output``'s tokenizer is ``source``'s; both are folders with (at least) the files of one tokenizer.

    Without ``source``: whether it loads. Never raises for what it checks.
    """
    ours = _relative(output)
    if not ours and (source is None or not _relative(source)):
        return TokenizerCheck("skipped", "there are no tokenizer files")
    differing: tuple[str, ...] = ()
    if source is not None:
        differing = tuple(_differing(source, output))
        if not differing:
            return TokenizerCheck("equal_files", f"{len(ours)} files are the same byte for byte")
    folders = [str(folder.resolve()) for folder in (source, output) if folder is not None]
    answer: dict[str, Any] = reload.ask("tokenizers", json.dumps({"folders": folders}))
    return TokenizerCheck(**answer, differing=differing)


def _relative(folder: Path) -> list[str]:
    return tokenizer_files(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _differing(source: Path, output: Path) -> list[str]:
    names = sorted({*_relative(source), *_relative(output)})
    _, mismatch, errors = filecmp.cmpfiles(source, output, names, shallow=False)
    return sorted([*mismatch, *errors])
