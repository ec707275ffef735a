"""Rules that rename tensors: regular expressions and what takes the place of what they match, in their order.

Rules come from whoever submits a job and run on a worker. So the expressions are RE2's: their time is linear in the
name, and there are no backreferences in them and no look-around. What they may take beside that is in limits.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, ValidationError, WithJsonSchema

from reshard.pipeline.errors import BadRename, RenameCollision
from reshard.pipeline.limits import (
    RENAME_CPU,
    RENAME_MEMORY,
    RENAME_NAME_MAX,
    RENAME_NODES_MAX,
    RENAME_PROGRAM_MAX,
    RENAME_RULES_MAX,
    RENAME_TEXT_MAX,
)
from reshard.pipeline.text import counted, printable
from reshard.pipeline.validation import first_problem

# What a replacement says beside plain text: `\1`, `\g<name>`, `\\`.
_REFERENCE = re.compile(r"\\(?:([1-9][0-9]?)|g<(\w+)>|(\\)|)")


class Rule(NamedTuple):
    """``pattern`` is replaced wherever it matches in a name."""

    pattern: str
    replacement: str

    def __str__(self) -> str:
        return "'{}' -> '{}'".format(*map(printable, self))


def _rule(value: object) -> Rule:
    """The rule that ``{pattern: replacement}`` is, or a pair, as a job keeps it; raises ValueError."""
    pair = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else value
    match pair:
        case (str(pattern), str(replacement)):
            rule = Rule(pattern, replacement)
        case _:
            raise ValueError("a rule is one regular expression and its replacement, such as `- '^encoder[.]': model.`")
    if not pattern or max(map(len, rule)) > RENAME_TEXT_MAX:
        most = f"each side of a rule can have at most {RENAME_TEXT_MAX} characters"
        raise ValueError(f"{most}, and the left side cannot be empty")
    if any("\ud800" <= letter <= "\udfff" for letter in pattern + replacement):
        raise ValueError(f"{rule} is not valid Unicode")
    _compiled(rule)
    return rule


_PATTERN = {"type": "string", "format": "regex", "minLength": 1, "maxLength": RENAME_TEXT_MAX}  # RE2's
_REPLACEMENT = {"type": "string", "format": "replacement", "maxLength": RENAME_TEXT_MAX}  # with `\\1` of what it has
_MAPPING = {
    "type": "object",
    "propertyNames": _PATTERN,
    "additionalProperties": _REPLACEMENT,
    "minProperties": 1,
    "maxProperties": 1,
}
_PAIR = {"type": "array", "prefixItems": [_PATTERN, _REPLACEMENT], "minItems": 2, "maxItems": 2}
Rules = tuple[
    Annotated[
        Rule,
        BeforeValidator(_rule),
        WithJsonSchema({"anyOf": [_MAPPING, _PAIR]}, "validation"),
        WithJsonSchema({"type": "array", "items": {"type": "string"}}, "serialization"),
    ],
    ...,
]


def parse_rules(text: str, where: str) -> tuple[Rule, ...]:
    """The rules of a YAML list; raises BadRename, which names ``where`` it stands."""
    import yaml

    from reshard.pipeline import guarded_yaml  # most requests have no rules

    try:
        # Not by libyaml: few lines take no time, and it tells other lines than those that are wrong.
        _, given = guarded_yaml.load(text, RENAME_NODES_MAX, yaml.SafeLoader)
        rules = TypeAdapter(Rules).validate_python(given if isinstance(given, list) else None)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise BadRename(rules=where, why=f"not YAML{f', line {mark.line + 1}' if mark else ''}") from error
    except ValidationError as error:
        first = first_problem(error)
        at = f"rule {int(first.loc[0]) + 1}: " if first.loc else "the file "
        raise BadRename(rules=where, why=f"{at}{first.why}") from error
    if not 0 < len(rules) <= RENAME_RULES_MAX:
        raise BadRename(rules=where, why=f"{counted(len(rules), 'rule')}, but 1 to {RENAME_RULES_MAX} are allowed")
    return rules


def _compiled(rule: Rule) -> Callable[[str], str]:
    """What carries the rule out; raises ValueError for what is no rule."""
    import re2  # most requests have no rules

    options = re2.Options()
    options.max_mem, options.log_errors = RENAME_MEMORY, False
    try:
        pattern = re2.compile(rule.pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace")
        raise ValueError(f"{rule.pattern!r}: {why} (RE2 syntax)") from None
    finally:
        re2.purge()  # it would keep what it compiled, and what that has learnt, for good
    if pattern.programsize > RENAME_PROGRAM_MAX:
        raise ValueError(f"{rule.pattern!r}: the expression is too large")
    parts: list[str | int] = []
    end = 0
    for found in _REFERENCE.finditer(rule.replacement):
        number = int(found[1]) if found[1] else pattern.groupindex.get(found[2], 0)
        if not (found[3] or 0 < number <= pattern.groups):
            raise ValueError(f"{rule.replacement!r}: {found[0]} is not a group in {rule.pattern!r}")
        parts += [rule.replacement[end : found.start()], found[3] or number]
        end = found.end()
    parts.append(rule.replacement[end:])

    def fill(match: Any) -> str:
        return "".join(part if isinstance(part, str) else match[part] or "" for part in parts)

    def apply(name: str) -> str:
        renamed: str = pattern.sub(fill, name)
        return renamed

    return apply


class Change(NamedTuple):
    """What one rule did: how many names it changed, and the first of them before and after."""

    names: int = 0
    before: str = ""
    after: str = ""


def renamed(
    names: Iterable[str], rules: Sequence[Rule], checkpoint: str, cpu: float = RENAME_CPU
) -> tuple[dict[str, str], list[Change]]:
    """Old name -> new name, each rule applied to what those before it left; and what each rule did.

    Raises RenameCollision when two names become one, and BadRename for a name that becomes empty or too long, and where
    all of it takes more than ``cpu`` seconds of processor time. ``checkpoint`` is for the messages.
    """
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    changes = [Change() for _ in rules]
    steps = [_compiled(rule) for rule in rules]
    until = time.thread_time() + cpu
    for name in names:
        new = name
        for number, apply in enumerate(steps):
            before = new
            if len(before) <= RENAME_NAME_MAX:
                new = apply(before)
            if not 0 < len(new) <= RENAME_NAME_MAX:
                what = f"{name[:100]!r} in {checkpoint} would have {len(new):,} characters"
                raise BadRename(rules=rules[number], why=f"{what}, but names can have only 1 to {RENAME_NAME_MAX:,}")
            if new != before:
                if new == "__metadata__" or printable(new) != new:
                    raise BadRename(rules=rules[number], why=f"{name[:100]!r} would be {new[:100]!r}, not a valid name")
                last = changes[number]
                changes[number] = last._replace(names=last.names + 1) if last.names else Change(1, before, new)
        if time.thread_time() > until:
            raise BadRename(rules=counted(len(rules), "rule"), why=f"they need more than {cpu:.0f} s of CPU time")
        found[name] = new
        if (other := taken.setdefault(new, name)) != name:
            raise RenameCollision(tensor=new, first=other, second=name, checkpoint=checkpoint)
    return found, changes
