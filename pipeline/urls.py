"""URLs as people type them: taken apart, and shown without what they may keep secret."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit


def split_url(url: str) -> SplitResult:
    """Raises ValueError for a URL with a password; what is none has no scheme."""
    parts = urlsplit(url if re.match(r"\w+://", url) else "")
    if "@" in parts.netloc:
        raise ValueError("remove the user name or password from the URL; it would be stored and published")
    return parts


def is_http(url: str) -> bool:
    """Whether ``url`` is one that calls can be sent to."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def shown(text: str) -> str:
    """A place for messages: of a URL neither a password nor the query, which may be a signature.

    >>> shown("s3://bucket/a?sig=secret")
    's3://bucket/a?...'
    """
    path, mark, _ = text.partition("?")
    return redacted(path) + (mark and "?...") if "://" in text else text


def redacted(url: str) -> str:
    """``url`` without the user name and password that it may hold, to be printed.

    >>> redacted("https://me:secret@hub.example/a")
    'https://***@hub.example/a'
    """
    return re.sub(r"(^|//)[^/]*@", r"\1***@", url)
