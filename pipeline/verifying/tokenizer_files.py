"""Which files a tokenizer and a processor are made of, by their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from posixpath import dirname

from reshard.pipeline.checkpoint.discover import is_weights
from reshard.pipeline.checkpoint.kinds import foreign_format, named_like

# What tokenizers of transformers read; `chat_template.json` is a processor's.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "*-vocab.json", "merges.txt", "*.model", "*.spm", "tekken.json", "chat_template.jinja",
)  # fmt: skip
# What says how a repository takes images, sound and chats.
PROCESSOR_FILES = ("*processor_config.json", "chat_template.json")


def tokenizer_files(paths: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> those of the paths in it that its tokenizer is made of, sorted; ``vocab.pt`` has weights or data."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(path for path in paths if named_like(path, TOKENIZER_FILES)):
        if not (foreign_format(path) or is_weights(path)):
            found[dirname(path)].append(path)
    return found
