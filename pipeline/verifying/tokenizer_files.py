"""Which files a tokenizer and a processor are made of, by their names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from posixpath import basename

# What tokenizers of transformers read; `chat_template.json` is a processor's.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "*-vocab.json", "merges.txt", "*.model", "*.spm", "tekken.json", "chat_template.jinja",
)  # fmt: skip
_PROCESSOR_FILES = ("*processor_config.json", "chat_template.json")


def tokenizer_files(paths: Iterable[str]) -> list[str]:
    """Those of a repository's paths that its tokenizers are made of, sorted."""
    return sorted(path for path in paths if named_like(path, TOKENIZER_FILES))


def processor_files(paths: Iterable[str]) -> list[str]:
    """Those of a repository's paths that say how it takes images, sound and chats, sorted."""
    return sorted(path for path in paths if named_like(path, _PROCESSOR_FILES))


def named_like(path: str, patterns: Iterable[str]) -> bool:
    """Whether the file's own name, whatever its folder, matches one of the globs."""
    return any(fnmatchcase(basename(path), pattern) for pattern in patterns)
