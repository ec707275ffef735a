"""`reshard audit`: which of many models are wrong, the worst first."""

from __future__ import annotations

import os
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from reshard.cli.arguments import argument, takes, value
from reshard.cli.catalog import read_catalog
from reshard.cli.output import Output, count, lines, refuse_unwritable, write
from reshard.cli.progress import bar
from reshard.client.audit_report import page, report_of, require_pages, summary
from reshard.client.models.audits import Audit, AuditedModel
from reshard.pipeline.errors import AuditFailed, UsageError, shortened
from reshard.pipeline.limits import AUDIT_JOBS, JOBS_MAX
from reshard.pipeline.text import printable

if TYPE_CHECKING:
    from reshard.pipeline.auditing.examine import Subject
    from reshard.pipeline.catalogs.definition import Catalog
    from reshard.pipeline.stores.connect import Context
    from reshard.pipeline.stores.observed import Call

MODELS_SHOWN = 50  # --json has them all


@takes()
def audit(
    what: Annotated[str, argument("OWNER|CATALOG", "An owner on the Hub, a catalog file, or a folder of models.")],
    output: Output,
    against: Annotated[
        str | None,
        value("MAP", "Source of each model: a catalog file or a template (default: from its manifest)."),
    ] = None,
    deep: Annotated[
        str | None, value("all|N", "Also read and check every byte, either of all models or of a sample of N.")
    ] = None,
    html: Annotated[Path | None, value("FILE", "Also write an HTML report to FILE.")] = None,
    jobs: Annotated[
        int, value("N", f"Number of models to examine at once (default: {AUDIT_JOBS}).", min=1, max=JOBS_MAX)
    ] = AUDIT_JOBS,
) -> None:
    """Check many models and list their problems, worst first.

    Without --deep, reads only file listings and headers. Exits with 6 if a finding is critical or an error, and with 0
    otherwise.

    Example: reshard audit models.yaml --deep 10 --html audit.html
    """
    from reshard.pipeline.auditing.audit import audit as audit_all
    from reshard.pipeline.stores.connect import Context, own_limiters

    if html is not None:
        refuse_unwritable(html, "--html")
        require_pages()
    wanted = _wanted(deep)
    calls: list[Call] = []
    with bar(output) as shown, closing(Context.from_env(own_limiters(shown.waits))) as context:
        context = replace(context, observe=calls.append)
        shown.show("listing models")
        subjects = _subjects(what, against, context)

        def progress(phase: str, done: int, total: int) -> None:
            shown.show(phase, figures=f"{done:,} of {total:,}")

        models = audit_all(subjects, context, jobs, wanted, progress)
    found = report_of(what, against, models, sum(call.on_hub for call in calls))
    failed = [entry for entry in found.entries if entry.severity in {"critical", "error"}]
    output.listing([found], _text(found), [entry.place for entry in failed])
    if html is not None:
        write(html, page(found))
    if failed:
        worst = failed[0].findings[0]
        raise AuditFailed(what=what, failed=len(failed), models=found.models, place=failed[0].place, first=worst.first)


def _wanted(deep: str | None) -> int:
    """How many models are read whole; raises UsageError."""
    if deep is None or deep == "all":
        return sys.maxsize if deep else 0
    if not re.fullmatch("[1-9][0-9]{0,8}", deep):
        raise UsageError(what=f"--deep {deep}: use all, or a number of models")
    return int(deep)


def _subjects(what: str, against: str | None, context: Context) -> list[Subject]:
    from reshard.pipeline.auditing.subjects import of_catalog, of_folder, of_owner

    file = _file(what)
    if _is_catalog(what):
        if against is not None:
            raise UsageError(what=f"{what} names the sources itself; remove --against")
        return of_catalog(read_catalog(file)[1], context)
    by: Catalog | str | None = against
    if against is not None and "{" not in against:
        if not _is_catalog(against):
            raise UsageError(
                what=f"--against {shortened(against)}: use a catalog file, or a template such as mistralai/{{name}}"
            )
        by = read_catalog(_file(against))[1]
    if what.startswith(("./", "../", "/", "~/")) or what in {".", ".."}:
        if by is not None and not isinstance(by, str):
            raise UsageError(what="for a folder of models, --against accepts a template such as ./sources/{name}")
        return of_folder(file, by)
    return of_owner(what, by, context)


def _is_catalog(typed: str) -> bool:
    return typed.endswith((".yaml", ".yml")) or os.path.isfile(_file(typed))  # noqa: PTH113 -- see _file


def _file(typed: str) -> Path:
    """os.path, as Path raises for a user that is not there, and for a name that is too long."""
    return Path(os.path.expanduser(typed))  # noqa: PTH111


def _text(found: Audit) -> str:
    """A row for each model with findings, the worst of which is told, and how many there are."""
    wrong = [entry for entry in found.entries if entry.findings]
    rows = [cells for entry in wrong[:MODELS_SHOWN] for cells in _rows(entry)]
    table = [lines([("SEVERITY", "MODEL", "FINDINGS", "FIRST"), *rows])] if rows else []
    hidden = len(wrong) - MODELS_SHOWN
    more = [f"{count(hidden, 'more model')}; use --json to show all"] if hidden > 0 else []
    return "\n".join([*table, *more, f"{printable(found.audited)}: {summary(found)}"])


def _rows(entry: AuditedModel) -> list[tuple[str, str, str, str]]:
    worst = entry.findings[0]
    kinds = ", ".join(f"{one.kind} {one.count:,}" if one.count > 1 else one.kind for one in entry.findings)
    return [(worst.severity, entry.place, kinds, worst.first), ("", "", "", f"next: {worst.next}")]
