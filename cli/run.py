"""`reshard run`: the whole job in this process, without a broker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reshard.cli.arguments import read_output, read_request, takes
from reshard.cli.output import Output, lines
from reshard.cli.progress import Bar, bar
from reshard.pipeline.request import Request

if TYPE_CHECKING:
    from reshard.pipeline.plan import Plan
    from reshard.pipeline.reshard import Report

STEPS = {"plan": "planning", "copy": "copying", "check": "checking", "publish": "publishing", "confirm": "confirming"}


@takes(request=read_request, output=read_output)
def run(request: Request, output: Output) -> None:
    """Reshard SRC into DST now, in this process; needs no broker."""
    from reshard.pipeline import reshard
    from reshard.pipeline.stores.open import Context

    with bar(output) as shown:
        view = _View(request, output, shown)
        watcher = reshard.Watcher(planned=view.planned, moved=view.moved, step=view.step)
        report = reshard.run(request, Context.from_env(), watcher)
    facts = report_facts(request, report) | {"seconds": round(time.monotonic() - view.started, 3)}
    output.result(facts, lines(outcome(facts)), report.published.commit)


class _View:
    """What a person sees while the pipeline works."""

    def __init__(self, request: Request, output: Output, shown: Bar) -> None:
        self.started = time.monotonic()
        self._request, self._output, self._bar = request, output, shown
        self._step, self._done, self._total = "", 0, 0

    def planned(self, plan: Plan) -> None:
        from reshard.cli.describe import plan_facts, plan_text

        self._total = sum(file.size for file in plan.files)
        facts = plan_facts(self._request, plan)
        if self._output.json:
            self._output.document({"plan": facts})
        self._bar.say(plan_text(facts))

    def step(self, name: str) -> None:
        self._step = STEPS[name]
        self._show()

    def moved(self, count: int) -> None:
        self._done += count
        self._show()

    def _show(self) -> None:
        copying = self._step == STEPS["copy"]
        self._bar.show(self._step, self._done if copying else 0, self._total if copying else 0)


def report_facts(request: Request, report: Report) -> dict[str, Any]:
    """How a run ended, JSON-able."""
    read = {file.path for file in report.plan.files}
    return {
        "state": "done",
        "target": str(request.target),
        "commit": report.published.commit,
        "ref": report.published.ref,
        "found": report.published.found,
        "checks": [check.to_dict() for check in report.checks],
        "attested": list(report.attested),
        "as_delivered": [] if report.plan.published else sorted(read - set(report.attested)),
    }


def outcome(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The end of a job for people, one ``what, figure`` after the other."""
    told = [check_line(check) for check in facts["checks"]]
    for how, key in (("checked", "attested"), ("as delivered", "as_delivered")):
        if facts.get(key):
            told.append(("source bytes", f"{how}: {', '.join(facts[key])}"))
    ref = f", {facts['ref']}" if facts["ref"] else ""
    found = " was there already: nothing was done" if facts["found"] else ""
    return [*told, ("commit", f"{facts['commit']}{ref}{found}"), ("where", facts["target"])]


def check_line(check: dict[str, Any]) -> tuple[str, str]:
    """One check for people: what was found, at which level, and why not more."""
    figures = ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in check["figures"].items())
    said = [f"{check['result']} ({check['level']})", check["reason"], figures]
    return check["name"], "; ".join(part for part in said if part)


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)
