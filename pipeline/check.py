"""The result of one check, as a person or a program reads it, and how an error carries such results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from reshard.pipeline.errors import ProofError
from reshard.pipeline.limits import REPORT_NAMES_MAX

Result = Literal["passed", "failed", "skipped", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: ``level`` says how closely was looked, ``figures`` what was counted.

    Each of ``findings`` is one thing that is wrong, and names the tensor or the file.
    """

    name: str
    result: Result
    level: str
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def some(findings: Sequence[str], most: int = REPORT_NAMES_MAX) -> tuple[str, ...]:
    """The first ``most``, and how many more there are.

    >>> some(["a", "b", "c"], 2)
    ('a', 'b', 'and 1 more')
    """
    more = len(findings) - most
    return (*findings[:most], *([f"and {more:,} more"] if more > 0 else []))


def first(names: Sequence[str]) -> str:
    """The first of one or many, and how many more there are.

    >>> first(["a", "b", "c"])
    'a and 2 more'
    """
    return " ".join(some(names, 1))


def failed(name: str, level: str, figures: Mapping[str, Any], findings: Sequence[str]) -> list[dict[str, Any]]:
    """A failed check as the fact ``checks`` of an error, which a job keeps: of many findings the first."""
    return [Check(name, "failed", level, "", dict(figures), some(findings)).to_dict()]


@contextmanager
def prior_checks(checks: Sequence[Check]) -> Iterator[None]:
    """A ProofError from inside takes along these checks, too, which were made before the one that failed."""
    try:
        yield
    except ProofError as error:
        error.facts["checks"] = [*(check.to_dict() for check in checks), *error.facts.get("checks", ())]
        raise
