"""Every model class of transformers that builds from a default config: honest passes, one tensor wrong fails.

Long: an hour of processor time in all, so in parts. Layouts come from transformers' own reverse conversion.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import transformers
from transformers.models.auto import modeling_auto

from reshard.pipeline.verify.reload import Reload
from tests.pipeline.verify.models import Specs, layout

PARTS = 24
MAPPINGS = (
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)


def class_names() -> list[str]:
    found: set[str] = set()
    for mapping in MAPPINGS:
        for names in mapping.values():
            found |= {names} if isinstance(names, str) else set(names)
    return sorted(found)


def layouts(names: list[str]) -> Iterator[tuple[str, bytes, Specs]]:
    """Those classes that build from their default config; a default is often incomplete, or a package is missing."""
    for name in names:
        try:
            config = getattr(transformers, name).config_class(architectures=[name])
            yield name, *layout(config)
        except Exception as error:  # noqa: BLE001 - the class's own reason, whatever it is
            print(f"{name} does not build: {' '.join(str(error).split())[:120]}")


def faults(specs: Specs, free: list[str]) -> Iterator[tuple[str, str, Specs]]:
    """One tensor that nothing is tied to, dropped, renamed and reshaped."""
    for fault in ("dropped", "renamed", "reshaped"):
        name = random.Random(fault).choice(free)
        dtype, shape = specs[name]
        broken = {key: spec for key, spec in specs.items() if key != name}
        if fault == "renamed":
            broken[f"{name}_old"] = (dtype, shape)
        if fault == "reshaped":
            broken[name] = (dtype, (*shape, 3))
        yield fault, name, broken


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_passes_when_honest_and_fails_when_not(part: int, reload: Reload) -> None:
    names = class_names()[part::PARTS]
    assert len(names) > 30
    checked, wrong = 0, []
    for name, config, specs in layouts(names):
        honest = reload.check(config, specs)
        if honest.result != "clean":
            wrong.append(f"{name}: {honest.result}, {honest.reason}")
            continue
        checked += 1
        tied = {*honest.ties, *honest.ties.values()}
        for fault, victim, broken in faults(specs, sorted(specs.keys() - tied)):
            found = reload.check(config, specs, broken)
            if found.result != "failed":
                wrong.append(f"{name}: {victim} {fault} is {found.result}, {found.reason}")
    print(f"{checked} of {len(names)} classes checked")
    assert wrong == []
    assert checked > len(names) * 0.8
