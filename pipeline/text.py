"""Names come from outside: what they may hold to become a path, and how they are shown on a terminal or in a log."""

from __future__ import annotations

import logging
from pathlib import PureWindowsPath
from typing import Any

from reshard.pipeline.limits import COMPONENT_MAX

_BIDIRECTIONAL = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# What moves a terminal's cursor, changes the order of what is read, or ends a line.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *_BIDIRECTIONAL, 0x2028, 0x2029, *range(0xD800, 0xE000)]
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_LINES = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    r"""``text`` on one line, with every character escaped that would do something rather than be shown.

    >>> printable("a\x1b[2Jb\nc\u202e")
    'a\\x1b[2Jb\\x0ac\\u202e'
    """
    return text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """As ``printable``, of a text whose own line breaks and tabs stay."""
    return text.translate(_LINES)


def printable_json(document: str) -> str:
    """A JSON document that means the same, with such characters as escapes of JSON's own."""
    return document.translate(_JSON)


class _LogRecord(logging.LogRecord):
    """A record whose message, names and all, is printable; of a traceback the line breaks stay."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.exc_info and self.exc_info[0]:
            self.exc_text = printable_lines(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return printable(super().getMessage())


def escape_logs() -> None:
    """From now on, every log line of this process is printable, whatever writes it."""
    logging.setLogRecordFactory(_LogRecord)


def unsafe_path(path: object, *, published: bool = True) -> str:
    """Why a path must not be put into a URL or a commit; empty for one that may.

    A path that is only read, and not ``published``, may have bidirectional marks: what is printed of it is escaped.

    >>> unsafe_path("unet/model.safetensors"), unsafe_path("../../other/repo/resolve/main/secret")
    ('', 'leaves the repository')
    """
    if not isinstance(path, str) or not path:
        return "is not a path"
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or PureWindowsPath(path).drive:
        return "leaves the repository"
    if "" in parts or "." in parts:
        return "has an empty component"
    shown = path if published else path.translate(dict.fromkeys(_BIDIRECTIONAL))
    if "\\" in path or printable(shown) != shown:
        return "has a character that no path may have"
    if max(len(part.encode()) for part in parts) > COMPONENT_MAX:
        return f"has a component of more than {COMPONENT_MAX} bytes"
    return ""
