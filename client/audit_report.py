"""An audit as a document, and as one page of HTML without scripts, to be printed or mailed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reshard.client.models.audits import Audit, AuditedModel
from reshard.client.text import count
from reshard.pipeline.errors import ExtraMissing
from reshard.pipeline.text import printable

if TYPE_CHECKING:
    from reshard.pipeline.auditing.examine import Audited

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Audit of {{ found.audited }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } tr { break-inside: avoid }
th, td { border-bottom: 1px solid #ccc; padding: .35rem .6rem; text-align: left; vertical-align: top }
td { overflow-wrap: anywhere } code { font-size: .9em }
.critical, .error { font-weight: 600 } .critical { color: #b00020 }
</style>
<h1>Audit of {{ found.audited }}</h1>
<p>{{ summary }}</p>
<table><thead><tr><th>Model<th>Severity<th>Finding<th>Count<th>First<th>Next</tr></thead><tbody>
{%- for model in found.entries -%}{%- for one in model.findings %}
<tr><td>{% if loop.first %}{{ model.place }}{% if model.source %}<br><small>made from {{ model.source }}
{%- if model.source_by == "manifest" %} (by its manifest){% endif %}</small>{% endif %}{% endif -%}
<td class="{{ one.severity }}">{{ one.severity }}<td>{{ one.kind }}<td>{{ one.count }}<td>{{ one.first -}}
<td>{% if one.next.startswith("reshard ") %}<code>{{ one.next }}</code>{% else %}{{ one.next }}{% endif %}</tr>
{%- endfor -%}{%- endfor %}
</tbody></table>
</html>
"""


def report_of(audited: str, against: str | None, models: Sequence[Audited], calls: int) -> Audit:
    """What was found of ``models``, which are sorted, the worst first."""
    entries = [
        AuditedModel.of(model, severity=model.findings[0].severity if model.findings else None)
        for model in models
        if model.weights
    ]
    worst = Counter(entry.severity for entry in entries)
    failed = worst["critical"] + worst["error"]
    return Audit(
        audited=audited,
        against=against,
        result="failed" if failed else "inconclusive" if worst["warning"] else "passed",
        models=len(entries),
        critical=worst["critical"],
        errors=worst["error"],
        warnings=worst["warning"],
        calls=calls,
        without_weights=[model.place for model in models if not model.weights],
        entries=entries,
    )


def summary(found: Audit) -> str:
    """``12 models: critical 1, error 2, warning 3, no findings 6; from headers only; 40 Hub calls``."""
    clean = found.models - found.critical - found.errors - found.warnings
    worst = {"critical": found.critical, "error": found.errors, "warning": found.warnings, "no findings": clean}
    ends = [f"{count(found.models, 'model')}: {', '.join(f'{how} {number:,}' for how, number in worst.items())}"]
    if found.without_weights:
        ends.append(f"no weights in {count(len(found.without_weights), 'other repository')}")
    deep = sum(entry.deep for entry in found.entries)
    ends.append(f"read every byte of {count(deep, 'model')}" if deep else "from headers only")
    ends.append(count(found.calls, "Hub call"))
    return "; ".join(ends)


def require_pages() -> None:
    """Raises ExtraMissing unless pages can be made."""
    if not find_spec("jinja2"):
        raise ExtraMissing(package="jinja2", extra="web", who="an HTML report")


def page(found: Audit) -> str:
    """The audit as HTML. Names come from outside: all of them are escaped."""
    from jinja2 import Environment, StrictUndefined

    shown = Environment(autoescape=True, undefined=StrictUndefined, finalize=lambda value: printable(str(value)))
    return shown.from_string(PAGE).render(found=found, summary=summary(found)) + "\n"
