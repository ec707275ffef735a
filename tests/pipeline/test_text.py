"""What is shown of names that come from outside."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from collections.abc import Iterator

import pytest

from reshard.pipeline.text import escape_logs, printable, printable_json, printable_lines

HOSTILE = "a\x1b]0;title\x07b\x00\x9b2J\x7f\u202ec\u2066d\u200f\u2028e\ud800\r"


def obeyed(text: str) -> list[str]:
    """The characters that a terminal does something at."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp", "Cf") and c != "\n"]


def test_nothing_that_a_terminal_obeys_is_left_and_nothing_else_is_changed() -> None:
    assert obeyed(printable(HOSTILE + "\n")) == [] and "\n" not in printable("a\nb")
    assert obeyed(printable_lines(f"{HOSTILE}\nb")) == [] and printable_lines("a\nb\tc") == "a\nb\tc"
    plain = "Modell für 日本語 🙂 'x' \\x1b {b} [red]"
    assert printable(plain) == printable_lines(plain) == printable_json(plain) == plain


def test_a_json_document_means_the_same_afterwards() -> None:
    document = json.dumps({HOSTILE: [HOSTILE]}, ensure_ascii=False)
    assert obeyed(printable_json(document)) == []
    assert json.loads(printable_json(document)) == {HOSTILE: [HOSTILE]}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler writes from now on."""
    factory, stream = logging.getLogRecordFactory(), io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("hostile").addHandler(handler)
    escape_logs()
    yield stream
    logging.setLogRecordFactory(factory)
    logging.getLogger("hostile").removeHandler(handler)


def test_a_log_line_is_one_line_that_nothing_obeys(lines: io.StringIO) -> None:
    log = logging.getLogger("hostile")
    log.warning("job %s of %s\nINFO forged", 7, HOSTILE)
    assert lines.getvalue().count("\n") == 1 and obeyed(lines.getvalue()) == []
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    assert "Traceback" in lines.getvalue() and obeyed(lines.getvalue()) == []
