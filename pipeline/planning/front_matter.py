"""The YAML at the head of a model card. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

# What the Hub takes for front matter, also behind a byte order mark or blank lines; closed by the end of the file too.
_OPENING = re.compile(rb"\A(?:\xef\xbb\xbf|\s)*---[ \t]*(?:\r\n?|\n)")
_CLOSING = re.compile(rb"^---\r?$", re.MULTILINE)
_LICENCE = re.compile(
    rb"""^["']?license["']?[ \t]*:[ \t]*(?:\r?\n[ \t]*-[ \t]+)?([^ \t\r\n#-][^\r\n#]*)""", re.MULTILINE
)


class FrontMatter(NamedTuple):
    yaml: bytes
    stop: int | None  # where the line that closes it begins; None where the file ends first


def front_matter(card: bytes) -> FrontMatter | None:
    opening = _OPENING.match(card)
    if opening is None:
        return None
    closing = _CLOSING.search(card, opening.end())
    stop = closing.start() if closing else None
    return FrontMatter(card[opening.end() : stop], stop)


def licence(card: bytes) -> str | None:
    """What a card states in its front matter."""
    front = front_matter(card)
    match = _LICENCE.search(front.yaml) if front else None
    return match[1].rstrip().decode(errors="replace") if match else None
