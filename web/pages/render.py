"""Templates, and how figures and times are written in them. Whatever a template shows is escaped and printable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reshard.client.facts import HELD, into, page
from reshard.client.queue import moment
from reshard.client.text import clock, count, expected, figure, human_bytes, lasted, long
from reshard.pipeline.text import printable
from reshard.web.pages.wording import options_text, sentence, told

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
        "expected": expected, "count": count, "moment": moment, "sentence": sentence, "told": told,
        "left": left,
    }  # fmt: skip
    made.globals |= {"held": HELD, "into": into, "options": options_text, "where": page}
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
    distance = round(time.time() - moment)
    return _time(moment, f"in {long(-distance)}" if distance < 0 else f"{long(distance)} ago")


def left(seconds: float) -> str:
    """``about 6 min left``, which the page counts down."""
    return _time(time.time() + seconds, f"about {long(round(seconds))} left", Markup(" data-left"))


def _time(moment: float, text: str, more: str = "") -> str:
    return Markup('<time datetime="{}" title="{} UTC"{}>{}</time>').format(
        clock(moment, "%Y-%m-%dT%H:%M:%SZ"), clock(moment), more, text
    )


def words(name: object) -> str:
    """``published_unverified`` as people read it; a file that is ``sealed`` is stored."""
    return "stored" if name == "sealed" else str(name).replace("_", " ")
