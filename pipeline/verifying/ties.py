"""Tied tensors that are stored under both names: whether the two copies are the same bytes."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.pipeline.check import Check, some
from reshard.pipeline.tensors import Name
from reshard.pipeline.verifying.compare import Read, Sums
from reshard.pipeline.verifying.meta_load import ModelCheck
from reshard.pipeline.verifying.opened import OpenedSide


def check_ties(output: OpenedSide, models: Mapping[Name, ModelCheck], was_read: Read) -> list[Check]:
    """Of each checkpoint that stores tied tensors twice: whether both copies are equal.

    Copies that differ are no failure, as honest models have them (T5 v1.1 stores a head that newer configs call tied).
    But loaders take one of them or both, so nobody can say from here which model it is.
    """
    checks = []
    for checkpoint in output.opened.checkpoints:
        twice = models[checkpoint.name].stored_twice
        if twice:
            checks.append(_check(f"ties of {checkpoint.name}", twice, was_read.tensors[checkpoint.name]))
    return checks


def _check(name: str, twice: Mapping[str, str], sums: Mapping[str, Sums]) -> Check:
    level = "BLAKE3 of both copies"
    differing = [f"{one} and {other}" for one, other in twice.items() if sums[one].blake3 != sums[other].blake3]
    figures = {"stored_twice": len(twice), "differ": len(differing)}
    if not differing:
        return Check(name, "passed", level, "", figures)
    told = "loaders take one copy or both; --against tells whether the source has them so"
    return Check(name, "inconclusive", level, f"other bytes in {', '.join(some(differing))}: {told}", figures)
