"""docs/operations.md says what an operator meets: every state, every family of errors, and for every code a hint."""

from __future__ import annotations

import re

from reshard.pipeline.errors import by_code
from reshard.worker.queue.states import ENDED, TRANSITIONS, JobState
from tests.hub.process import ROOT

OPERATIONS = (ROOT / "docs/operations.md").read_text()


def section(title: str) -> str:
    return OPERATIONS.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_column(title: str) -> set[str]:
    cells = re.findall(r"^\| ([^|]+) \|", section(title), re.MULTILINE)
    return {cell.strip().strip("`") for cell in cells[2:]}


def test_the_diagram_is_the_state_machine_and_the_table_has_every_state() -> None:
    drawn = section("The life of a job").partition("```mermaid\n")[2].partition("\n```")[0]
    arrows = [f"    {t.source or '[*]'} --> {t.target}" + (f": {t.why}" if t.why else "") for t in TRANSITIONS]
    assert drawn == "\n".join(["stateDiagram-v2", *arrows, "    done --> [*]"])
    assert first_column("The life of a job") == {str(state) for state in JobState}


def test_every_state_leads_to_an_end_and_none_leads_out_of_done() -> None:
    reached = {JobState.done}
    while more := {t.source for t in TRANSITIONS if t.source and t.target in reached} - reached:
        reached |= more
    assert reached == set(JobState)
    assert {JobState.done, JobState.failed, JobState.cancelled, JobState.published_unverified} == ENDED
    assert not [t for t in TRANSITIONS if t.source == JobState.done]


def test_every_code_has_a_hint_and_its_family_a_word_for_the_operator() -> None:
    reference = (ROOT / "docs/reference/errors.md").read_text()
    hints = dict(re.findall(r"^\| `([a-z_.]+)` \| (?:yes|no) \|.*\| ([^|]+) \|$", reference, re.MULTILINE))
    assert {code for code in by_code() if not hints.get(code, "").strip()} == set()
    assert {code.partition(".")[0] for code in by_code()} == first_column("What to do about an error")
