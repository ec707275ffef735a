"""What is shown of names that come from outside."""

from __future__ import annotations

import io
import json
import logging
import time
import unicodedata
from collections.abc import Iterator

import pytest

from reshard.pipeline.text import guard_logs, printable, printable_json, printable_lines, without_secrets

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
    guard_logs()
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


SIGNED = "https://cdn.example/a/b"
TOKEN = "hf_" + "aB3" * 11
SHOWN = {
    f"GET {SIGNED}?X-Amz-Signature=0f3e&x=1 HTTP/1.1": f"GET {SIGNED}?... HTTP/1.1",
    f"url ({SIGNED}?0f3e)": f"url ({SIGNED}?...",
    f"(b'Location', b'{SIGNED}?sig=0f3e')": f"(b'Location', b'{SIGNED}?...')",
    json.dumps({"url": f"{SIGNED}?a=0f3e", "said": '"quoted"'}): json.dumps(
        {"url": f"{SIGNED}?...", "said": '"quoted"'}
    ),
    '"GET /a/b?sig=0f3e HTTP/1.1" 200': '"GET /a/b?... HTTP/1.1" 200',
    "Signature=0f3e, x-goog-signature=0f3e&b": "Signature=..., x-goog-signature=...&b",
    "redis://:0f3e@10.0.0.5:6379/0": "redis://...@10.0.0.5:6379/0",
    f"https://{TOKEN[3:]}@hub.example/a": "https://...@hub.example/a",
    "HTTPS://me:0f3e/0f3e@0f3e@hub.example/a/b": "HTTPS://...@hub.example/a/b",
    "b'rediss://:0f3e/'0f3e:@10.0.0.5:6379/0'": "b'rediss://...@10.0.0.5:6379/0'",
    f"{SIGNED}?x='0f3e'&y=0f3e": f"{SIGNED}?...",
    f"'GET {SIGNED}?x=''0f3e', 1": f"'GET {SIGNED}?...', 1",
    "X-Amz-Security-Token: 0f3e": "X-Amz-Security-Token: ...",
    "{'x-amz-signature': '0f3e', 'a': 1}": "{'x-amz-signature': '...', 'a': 1}",
    json.dumps({"said": json.dumps({"access_token": "0f3e"})}): json.dumps(
        {"said": json.dumps({"access_token": "..."})}
    ),
    "Authorization: token 0f3e": "Authorization: token ...",
    "Authorization: 0f3e": "Authorization: ...",
    "Authorization: AWS4-HMAC-SHA256 Credential=0f3e/us, Signature=0f3e": (
        "Authorization: AWS4-HMAC-SHA256 ..., Signature=..."
    ),
    "Bearer\t0f3e": "Bearer ...",
    json.dumps("Bearer\t0f3e"): '"Bearer ..."',
    "{'Authorization': 'Bearer 0f3e.0f3e'}": "{'Authorization': 'Bearer ...'}",
    f"a token, {TOKEN}, and rsh_{'0f3e' * 10 + '_-x'}": "a token, hf_..., and rsh_...",
}


@pytest.mark.parametrize("said", SHOWN)
def test_no_signature_password_or_token_is_logged(lines: io.StringIO, said: str) -> None:
    log = logging.getLogger("hostile")
    log.warning("%s", said)
    assert lines.getvalue() == f"{SHOWN[said]}\n"
    try:
        raise ValueError(said)
    except ValueError:
        log.exception("failed")
    assert lines.getvalue().endswith(f"ValueError: {SHOWN[said]}\n")


def test_what_only_looks_a_little_like_a_secret_is_logged_whole() -> None:
    for said in (
        "is it there? no=1",
        "hf://them/model@main",
        "https://hub.example/them/model/tree/main",
        "'what?', 'no'",
        "no token: ",
        "hf_transfer is gone",
        "12 tokens, bearer of news",
        "a?b",
    ):
        assert without_secrets(said) == said


_PARTS = ["://", "://a:", "?a", "?", "x-amz-a-", "token", "bearer ", "hf_", "a", "a.", "a=", "http://", "http://@"]
_PARTS += [
    "'",
    "?'a",
    "token: ",
    "token'",
    "authorization: ",
    "authorization:\t",
    "bearer\t",
    "bearer\\t",
    "bearer",
    " ",
    "\\",
]


@pytest.mark.parametrize("part", _PARTS)
def test_no_text_takes_long_to_be_logged(part: str) -> None:
    """Processor time: eight times the text takes at most about eight times as long."""
    short, long = (min(_spent(part * (size // len(part))) for _ in range(3)) for size in (25_000, 200_000))
    assert long < 30 * max(short, 0.001)


def _spent(text: str) -> float:
    before = time.process_time()
    without_secrets(text)
    return time.process_time() - before
