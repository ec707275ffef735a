"""Templates, and how figures and times are written in them. Whatever a template shows is escaped and printable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reshard.client.facts import into, page
from reshard.client.text import human_bytes, lasted
from reshard.pipeline.text import printable

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, shown: Mapping[str, Any]) -> str:
    return _environment().get_template(template).render(shown)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "bytes": human_bytes, "when": when, "clock": clock, "lasted": lasted, "words": words, "figure": figure,
    }  # fmt: skip
    made.globals |= {"into": into, "where": page}
    return made


def _shown(value: Any) -> Any:
    """Names come from outside: none may reorder or hide what stands around it. Markup is our own."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else printable(str(value))


def when(moment: float | None) -> str:
    """``3 min ago`` or ``in 2 h``, with the exact time in its title; ``moment`` in seconds since the epoch."""
    if not moment:
        return ""
    exact, distance = datetime.fromtimestamp(moment, UTC), round(time.time() - moment)
    text = f"in {_long(-distance)}" if distance < 0 else f"{_long(distance)} ago"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        f"{exact:%Y-%m-%dT%H:%M:%SZ}", f"{exact:%Y-%m-%d %H:%M:%S} UTC", text
    )


def _long(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def clock(moment: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """``2026-06-01 22:00:07``, by UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime(form)


def words(name: object) -> str:
    """``published_unverified`` as people read it."""
    return str(name).replace("_", " ")


def figure(value: object) -> str:
    """One figure of a check."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)
