"""Which class a config.json names, as far as its text tells: what needs neither transformers nor a process. Pure."""

from __future__ import annotations

import json
import re
from typing import Any


class NotChecked(Exception):
    """The class cannot be checked, and why: an answer with the ``result`` ``skipped`` or ``inconclusive``."""

    def __init__(self, reason: str, result: str = "skipped", **facts: Any) -> None:
        super().__init__(reason)
        self.result, self.facts = result, facts


def parsed(config: str | None) -> dict[str, Any]:
    """The config's object; raises NotChecked where there is none."""
    if config is None:
        raise NotChecked("no config.json, so no class to check")
    try:
        raw = json.loads(config)
    except RecursionError:
        raise NotChecked("config.json is nested too deeply") from None
    except ValueError as error:
        raise NotChecked(f"config.json is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict):
        raise NotChecked("config.json is not a JSON object")
    return raw


def named(raw: dict[str, Any]) -> str | None:
    """The name of the class that the config names first; None where transformers knows one by ``model_type`` if any.

    Raises NotChecked where it can name none.
    """
    if "_class_name" in raw:
        raise NotChecked(f"{raw['_class_name']!s:.100} is a diffusers class, and only transformers classes are checked")
    names = raw.get("architectures") or []
    if not names and isinstance(raw.get("model_type"), str):
        return None
    if not isinstance(names, list) or not names:
        raise no_class()
    name = names[0]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,127}", name):
        raise NotChecked(f"config.json has {name!r:.100}, which is not a class name")
    return name


def no_class(why: str = "") -> NotChecked:
    return NotChecked(f"config.json has no model class{why}")
