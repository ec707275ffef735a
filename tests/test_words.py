"""Everything that people read keeps to docs/contributing/words.md, as far as a test can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from reshard.cli.main import COMMANDS, app
from reshard.client.operations import operations
from reshard.pipeline.errors import GO_ON, by_code
from reshard.web.app import ROOT as API
from reshard.web.openapi import openapi

HERE = Path(__file__).parents[1]
SUMMARY_MAX = 60  # characters
SENTENCE_MAX = 25  # words of a sentence in an error or a hint
WORDS = "docs/contributing/words.md"  # which names what it bans

BANNED = re.compile(
    r"""\b(
    what\ (is|was|are|were)\b(?!\?) | who\ (asks|asked|may|is|has|was) | whoever | nobody | thereof | amid
    | so\ does\ it | of\ (this|these)(?=[.,;:)]|$) | (is|are)\ no\ (?!longer|more\ than)\w+ | behind\ the\ first
    | heed(s|ed)? | mend(s|ed|ing)? | anew | blanks? | bear | asked(?!\ questions) | sealed? | seals | taps?
    | (may|might)\ (see|read|write|act|not)\b | be\ (let|lent) | (is|are)\ to\ be | as\ delivered | attest(s|ed)?
    | nights? | units?\ (of\ work|that|is|are|was) | its\ owner's | lets?\ (be|it) | there\ for | in\ vain
    | (some|every)body | unasked | (tells?|told|says|said)\ of | hangs?\ on | in\ (its|their)\ turn
    | takes?\ (it|them)\ up | already\ (has|had)\ this | plain\ weights | of\ one's\ own | (is|are)\ not\ one(?!\ of)
    | the\ Hub's\ limit | picture | form\ of\ the\ answer | notice(?!\ (missing|that))s?
    | (?<!reshard\ )(?<!remote\ )(?<!\.)control(?!\ (process|killed|character|or\ bidi))
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
# As errors, notes and logs of pipeline/ and worker/ do without, too; not yet all others.
STRICT = re.compile(
    r"""\b(
    exclude\ each\ other | (is|are|was|were)\ (not\ there|there,\ too) | (leave|leaves|left)\ (it\ |them\ )?out
    | by\ (itself|themselves) | gives?\ way | known\ here | takes?\ (no|it|every|them|at\ most) | comes?\ to | stands
    | tells?\ whether(?!\ %s) | goes?\ on | says?\ (nothing|so|otherwise|something) | names?\ no | no\ room
    | somebody | another\ (cut|text|header|object) | other\ (bytes|words) | makes?\ (one|no) | at\ (work|hand)
    | carr(y|ies) | where\ the\ work\ is\ done | handed\ in | rests? | resting | aims? | for\ good
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
BRITISH = re.compile(
    r"\b\w*(quantis|recognis|serialis|organis|initialis|normalis|optimis|summaris|colour|behaviour|favour|licence|centre|"
    r"catalogue|cancelling|labelled|grey)\w*",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"^(The same\b|As (?!a |an |soon)|So (?!that)|Nothing of|Whatever\b)")


def plain(text: str) -> str:
    """Without code, placeholders, links and quotes, which are not prose."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`|\{\w*[^}]*\}|\]\([^)]*\)|https?://\S+|<[^>]+>", " ", text)
    return re.sub(r"[\"'“][^\"'”\n]{0,80}[\"'”](?=\W|$)", " ", text)


def wrong(text: str, *more: re.Pattern[str]) -> Iterator[str]:
    """What breaks the rules, and ``more`` of them, in its sentence."""
    for sentence in re.split(r"(?<=[.;:!?])\s+|\n\s*\n|\n(?=[*|#-])", plain(text)):
        said = " ".join(sentence.split())
        for rule in (BANNED, BRITISH, OPENINGS, *more):
            for found in rule.finditer(said):
                yield f"{found[0]!r} in {said[:120]!r}"


# ------------------------------------------------------------------------------------------- where texts come from


def of_errors() -> Iterator[tuple[str, str]]:
    for kind in by_code().values():
        for text in (kind.message, kind.hint, *kind.defaults.values()):
            yield kind.code, text
    for name, texts in GO_ON.items():
        yield from ((f"{{{name}}}", text) for text in texts)


FACTS = frozenset({"what", "why", "cure", "fix", "found", "more", "whose", "need"})


def of_facts() -> Iterator[tuple[str, str]]:
    """Sentences that errors are raised with and what is logged; of pipeline/ and worker/ all that is no help text."""
    for path, tree in sources():
        if path.parts[0] in {"pipeline", "worker"}:
            yield from ((f"{path}:{node.lineno}", text) for node, text in sentences(tree))
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg in FACTS:
                    yield from ((f"{path}:{node.lineno}", text) for text in literals(keyword.value))
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in {"log", "output"}:
                for argument in node.args[:1]:
                    yield from ((f"{path}:{node.lineno}", text) for text in literals(argument))


OF_HELP = frozenset({"_option", "Field"})  # what declares options, arguments and fields of the API


def sentences(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Texts of three words or more that are neither docstrings, nor what an assertion says, nor help."""
    apart: set[int] = set()
    for node in ast.walk(tree):
        below: list[ast.AST] = []
        match node:
            case ast.Expr(value=ast.Constant()):
                below = [node]
            case ast.Assert(msg=ast.expr() as said):
                below = [said]
            case ast.Call(func=ast.Name(id=name)) if name in OF_HELP:
                below = [node]
            case ast.JoinedStr():
                below = list(node.values)
        apart |= {id(each) for root in below for each in ast.walk(root)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in apart:
            yield from ((node, text) for text in literals(node) if len(text.split()) > 2)


def literals(node: ast.expr) -> Iterator[str]:
    """The text of a string, with placeholders for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        case ast.IfExp():
            yield from (*literals(node.body), *literals(node.orelse))


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    rooms = ("pipeline", "worker", "client", "web", "cli")
    return [
        (path.relative_to(HERE), ast.parse(path.read_text()))
        for room in rooms
        for path in sorted((HERE / room).rglob("*.py"))
    ]


def of_help() -> Iterator[tuple[str, str]]:
    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        yield name, command.help or ""
        for parameter in command.params:
            yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
        for child, one in getattr(command, "commands", {}).items():
            yield from walk(one, f"{name} {child}")

    return walk(get_command(app), "reshard")


def of_api() -> Iterator[tuple[str, str]]:
    def walk(value: Any, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for name, one in value.items():
                if name in {"summary", "description"} and isinstance(one, str):
                    yield where, one
                else:
                    yield from walk(one, f"{where}/{name}")
        elif isinstance(value, list):
            for one in value:
                yield from walk(one, where)

    return walk(openapi(API, operations()), "")


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.texts += [value for name, value in attrs if name in {"title", "aria-label", "placeholder"} and value]


def of_pages() -> Iterator[tuple[str, str]]:
    for path in sorted((HERE / "web" / "pages" / "templates").glob("*.html")):
        source = path.read_text()
        yield from ((path.name, text) for text in re.findall(r'"([^"\n]* [^"\n]*\.)"', source))
        parser = _Text()
        parser.feed(re.sub(r"\{%.*?%\}", "\n", re.sub(r"\{\{.*?\}\}", "{}", source, flags=re.DOTALL), flags=re.DOTALL))
        yield from ((path.name, text) for text in parser.texts)


def of_docs() -> Iterator[tuple[str, str]]:
    generated = {"docs/reference/cli.md", "docs/reference/errors.md", "docs/reference/json.md", "docs/reference/api.md"}
    for path in sorted([*HERE.glob("*.md"), *HERE.glob("docs/**/*.md")]):
        name = str(path.relative_to(HERE))
        if name not in generated | {WORDS}:
            yield name, path.read_text()


AREAS = {"errors": of_errors, "facts": of_facts, "help": of_help, "api": of_api, "pages": of_pages, "docs": of_docs}


@pytest.mark.parametrize("area", AREAS)
def test_no_text_has_a_word_that_our_english_does_without(area: str) -> None:
    more = [STRICT] if area in {"errors", "facts"} else []
    found = [f"{where}: {problem}" for where, text in AREAS[area]() for problem in wrong(text, *more)]
    assert not found, f"{len(found)} of them\n" + "\n".join(found)


def test_summaries_fit_a_line() -> None:
    assert {name: len(one.summary) for name, one in COMMANDS.items() if len(one.summary) > SUMMARY_MAX} == {}


@pytest.mark.parametrize("kind", by_code().values(), ids=by_code().keys())
def test_an_error_says_one_thing_in_a_sentence(kind: Any) -> None:
    for text in (kind.message, kind.hint):
        for sentence in re.split(r"[.;:] ", re.sub(r"`[^`]*`", "x", text)):
            assert len(sentence.split()) <= SENTENCE_MAX, sentence


def test_what_is_banned_is_found() -> None:
    assert list(wrong("who asks is not known here"))
    assert list(wrong("Make quantised weights plain"))
    assert list(wrong("Without control, no notice is sent")) and not list(
        wrong("The control process sends a notification")
    )
    assert list(wrong("the file is no checkpoint"))
    assert list(wrong("it is not there", STRICT)) and not list(wrong("it is not there"))
    assert not list(wrong("`nobody` and {nobody} are code; the file is no longer there"))
