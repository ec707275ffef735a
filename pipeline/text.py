"""Names come from outside: what they may hold to become a path, and how they are shown on a terminal or in a log."""

from __future__ import annotations

import logging
import os
import re
from pathlib import PureWindowsPath
from typing import Any

from reshard.pipeline.limits import COMPONENT_MAX

_BIDIRECTIONAL = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# What moves a terminal's cursor, changes the order of what is read, or ends a line.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *_BIDIRECTIONAL, 0x2028, 0x2029, *range(0xD800, 0xE000)]
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_LINES = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}


# Verbs in the singular whose plural is another word; all others lose their s.
_PLURAL_VERBS = {"is": "are", "has": "have"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """A number and its noun, and what follows it, in agreement.

    >>> counted(1, "file"), counted(2048, "file"), counted(2, "copy"), counted(0, "key")
    ('1 file', '2,048 files', '2 copies', '0 keys')
    >>> counted(1, "tensor", "is cast"), counted(2, "tensor", "is cast"), counted(2, "name", "loses it")
    ('1 tensor is cast', '2 tensors are cast', '2 names lose it')
    """
    if number != 1:
        noun = re.sub(r"(?<![aeou])y$", "ie", noun) + "s"
        first, *rest = verb.split(" ")
        verb = " ".join([_PLURAL_VERBS.get(first, first.removesuffix("s")), *rest])
    return f"{number:,} {noun} {verb}".rstrip()


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


_WORD = re.compile(r"[^\s\"<>\\]+")  # a URL has none of these
_URL = re.compile(r"(?i)((?:http|redis)s?://)([^\s\"<>\\?]*)")  # taken whole, so that time stays linear
_BETWEEN = r"[\\\"' ]*[=:][\\\"' ]*"  # a name and its value, in a query, a header, a dict or JSON
_NAMES = r"\w*signature|\w*token|x-(?:amz|goog)-[\w-]{1,40}"
_SECRETS = [
    (re.compile(r"(://)[^\s\"'<>\\/@:]*:[^\s\"'<>\\/@]+@"), r"\1...@"),
    (re.compile(rf"(?i)\b((?:{_NAMES}){_BETWEEN})[^\s\"'<>\\&,;]+"), r"\1..."),
    (re.compile(rf"(?i)\b(authorization{_BETWEEN}(?:[\w-]+[ \t]+)?)[^\s\"'<>\\&,;]+"), r"\1..."),
    (re.compile(r"(?i)\b(bearer|basic)(?: +(?=[\w.~+/=-]{8})|(?: *(?:\t|\\t))+ *)[\w.~+/=-]+"), r"\1 ..."),
    (re.compile(r"\b(hf_|rsh_)[A-Za-z0-9_-]{30,}"), r"\1..."),
]


def without_secrets(text: str) -> str:
    """``text`` without the queries of URLs, which may be signed, and without passwords and tokens that look like such.

    >>> without_secrets("GET https://cdn.example/a/b?X-Amz-Signature=0f3e 'Bearer abcdefgh'")
    "GET https://cdn.example/a/b?... 'Bearer ...'"
    """
    if "?" in text:
        text = _WORD.sub(_without_query, text)
    text = _URL.sub(_without_user, text)
    for secret, shown in _SECRETS:
        text = secret.sub(shown, text)
    return text


def _without_query(word: re.Match[str]) -> str:
    """Of a URL, and of a path whose query says what something is; the quote that ends it stays."""
    before, mark, query = word[0].partition("?")
    if not mark or ("://" not in word[0] and "=" not in query):
        return word[0]
    _, quote, end = query[len(query.rstrip("')]},;:.")) :].partition("'")
    return f"{before}?...{quote}{end}"


def _without_user(url: re.Match[str]) -> str:
    """Up to the last @ before the query, wherever the password ends."""
    _, mark, place = url[2].rpartition("@")
    return f"{url[1]}...@{place}" if mark else url[0]


class _LogRecord(logging.LogRecord):
    """A record whose message holds no secret and, names and all, is printable; of a traceback the line breaks stay."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.exc_info and self.exc_info[0]:
            self.exc_text = printable_lines(without_secrets(logging.Formatter().formatException(self.exc_info)))

    def getMessage(self) -> str:
        return printable(without_secrets(super().getMessage()))


def guard_logs() -> None:
    """From now on, every log line of this process is printable and holds no secret, whatever writes it.

    hf_xet logs past Python, from Rust and with whole URLs: it logs nothing.
    """
    logging.setLogRecordFactory(_LogRecord)
    os.environ["RUST_LOG"] = "off"


def unsafe_path(path: object, *, published: bool = True) -> str:
    """Why a path must not be put into a URL or a commit; empty for one that may.

    A path that is only read, and not ``published``, may have bidirectional marks: what is printed of it is escaped.

    >>> unsafe_path("unet/model.safetensors"), unsafe_path("../../other/repo/resolve/main/secret")
    ('', 'points outside the repository')
    """
    if not isinstance(path, str) or not path:
        return "is not a path"
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or PureWindowsPath(path).drive:
        return "points outside the repository"
    if "" in parts or "." in parts:
        return "has an empty component"
    shown = path if published else path.translate(dict.fromkeys(_BIDIRECTIONAL))
    if "\\" in path or printable(shown) != shown:
        return "has a character that is not allowed in a path"
    if max(len(part.encode()) for part in parts) > COMPONENT_MAX:
        return f"has a component of more than {COMPONENT_MAX} bytes"
    return ""
