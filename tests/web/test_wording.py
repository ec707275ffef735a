"""What pages say: no option outside of a command, each error as a sentence, and links to what is there."""

from __future__ import annotations

import ast
import html
import re
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reshard.pipeline.errors import BadBody, NoSuchPage, Oversize, ReshardError, ScopeMissing, UnsafeName, by_code
from reshard.pipeline.errors.base import GO_ON
from reshard.pipeline.request import Options, Request
from reshard.web.app import pages
from reshard.web.pages.render import TEMPLATES
from reshard.web.pages.wording import COPY, sentence, told
from reshard.worker.queue.jobs import JobStore, new_id
from tests.support.models import save_single
from tests.web.conftest import Site, signed_in
from tests.worker.conftest import another, claimed

ROOT = Path(__file__).parents[2]
OPTION = re.compile(r"(?<![\w/.-])--[a-z]")
JOB = new_id()
KINDS = list(by_code().values())


def shown(text: str) -> str:
    """What is read of a page, without what stands in commands."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<code>.*?</code>", "", text)))


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def each(kind: type[ReshardError]) -> Iterator[ReshardError]:
    """One as a request raises it, and one as a job keeps it."""
    names = (
        fields(kind.message) | fields(kind.hint) | {name for text in kind.defaults.values() for name in fields(text)}
    )
    facts = {name: name.upper() for name in names - GO_ON.keys() - {"job", "command"}} | kind.defaults
    facts |= {name: name.upper() for name in fields(kind.message) & GO_ON.keys()}
    yield kind(**facts, **({"job": JOB} if "job" in fields(kind.message) else {}))
    yield kind(**{**facts, "job": JOB})


def said(error: ReshardError) -> tuple[str, str]:
    kept = error.to_dict()
    return sentence(kept["message"], kept["code"]), sentence(kept["hint"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_each_error_is_a_sentence_of_the_page(kind: type[ReshardError]) -> None:
    for error in each(kind):
        for text in filter(None, said(error)):
            assert not OPTION.search(shown(text)), text
            assert text.endswith((".", COPY)), text
            words = shown(text)
            assert not re.match("[a-z]+ ", words) or kind.message.startswith("{"), words
            assert "`" not in text and "openapi" not in words and "--help" not in text


def test_the_page_of_an_error_speaks_of_the_page() -> None:
    assert said(NoSuchPage(method="GET", path="/x")) == ("Page not found.", 'Go to <a href="/">the overview</a>.')
    message, hint = said(ScopeMissing(name="ada", what="POST /jobs"))
    assert message == "ada has read-only access."
    assert hint == f"Ask the operator for a token with that scope: <code>reshard token ada --act</code>{COPY}"
    assert said(BadBody(where="request.options.size", why="unknown unit"))[0] == "“Maximum file size”: unknown unit."


def test_hints_of_a_job_lead_to_its_buttons() -> None:
    for code, words in (
        ("target.drift", f'<a href="/jobs/{JOB}#do-retry">Retry with “Also replace files” selected</a>.'),
        ("job.under_way", f'<a href="/jobs/{JOB}#do-cancel">Cancel</a> first'),
    ):
        _, kept = each(by_code()[code])
        assert words in said(kept)[1]
    of_a_catalog = sentence("then `reshard retry JOB --anew`")
    assert of_a_catalog == "Then Retry with “Plan again” selected.", "it is for many jobs, which are linked below it"


@pytest.mark.parametrize("name", Options.model_fields)
def test_the_form_tells_of_options_as_fields(name: str) -> None:
    assert not OPTION.search(shown(sentence(Options.model_fields[name].description or "")))


def test_names_are_not_taken_for_options_and_not_for_commands() -> None:
    assert told("/data/models--a--b and us/x--y") == "/data/models--a--b and us/x--y"
    wicked = "`reshard up; rm -rf ~` `git clone http://evil` `<b>`"
    for text in (told(wicked), said(UnsafeName(file="a", tensor=wicked))[0]):
        assert "button" not in text and "<b>" not in text and "<code>&lt;b&gt;</code>" in text


def test_commands_that_help_can_be_copied() -> None:
    install = "run `/x/bin/python -m pip install '/srv/reshard[cloud]'`, or `uv tool install reshard`"
    for text, number in (
        ("start both with `reshard up`", 1),
        ("fetch it with `git lfs pull`", 1),
        ("stopped: `kill -CONT 12` lets it go on, `reshard up --restart` replaces it", 2),
        (install, 2),
        ("a list as `- '^a': b`", 0),
    ):
        assert told(text).count(COPY) == number, text


def texts(path: Path) -> Iterator[str]:
    """What a module of pages may show: its texts, but for those that say how others are told."""
    tree = ast.parse(path.read_text())
    told = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and path.name == "wording.py"]
    quoted = {id(child) for node in told for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quoted:
            yield node.value


def test_no_page_names_an_option_outside_of_a_command() -> None:
    found = {path.name: path.read_text() for path in TEMPLATES.glob("*.html")}
    found |= {path.name: "\n".join(texts(path)) for path in (ROOT / "web" / "pages").glob("*.py")}
    assert len(found) > 20
    plain = {name: re.sub("`[^`]+`|<code>.*?</code>|<!--", "", text) for name, text in found.items()}
    assert [name for name, text in plain.items() if OPTION.search(text)] == []


def test_pages_of_a_job_name_no_option(site: Site, store: JobStore, tmp_path: Path) -> None:
    """Its error, its events, its notes, and those of a plan."""
    save_single(tmp_path / "model", {"module.w": np.zeros(1000, np.float32)})
    job = store.submit(Request.of("a/b", "us/b")).id
    error = Oversize(tensor="w", bytes=9, size=5, job=job).to_dict()
    worker = another(store)
    assert worker.fail(claimed(worker, job, "plan"), error) == "ok"
    typed = {"source": str(tmp_path / "model"), "size": "300B"}
    with signed_in(site) as client:
        pages = [client.get(path).text for path in (f"/jobs/{job}", "/", "/jobs", f"/jobs?code={Oversize.code}")]
        pages += [client.post("/plan", data=typed | more).text for more in ({}, {"oversize": "fail"})]
    assert pages[0].count("over “Maximum file size” 5") == 2 and "gets its own file" in pages[4]
    assert [OPTION.findall(shown(page)) for page in pages] == [[]] * len(pages)


def test_links_of_hints_lead_to_pages(site: Site, store: JobStore) -> None:
    linked = {
        html.unescape(link)
        for kind in KINDS
        for error in each(kind)
        for text in said(error)
        for link in re.findall('href="([^"]+)"', text)
    }
    assert len(linked) >= 8
    with site.client("read") as client:
        for link in linked:
            assert NoSuchPage.code not in client.get(link).text, link
    posted = {path for method, path, _ in pages.PAGES if method == "POST"}
    assert {f"/jobs/{{job}}/{link.partition('#do-')[2]}" for link in linked if "#do-" in link} <= posted
