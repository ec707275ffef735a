"""Every model class of transformers that builds from a default config: honest passes, one tensor wrong fails.

Long: half an hour of processor time in all, so in parts. Layouts come from transformers' own reverse conversion.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
import transformers
from transformers.models.auto import modeling_auto

from reshard.pipeline.verifying.child.server import Allowed
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import ModelCheck
from tests.pipeline.verifying.models import Specs, layout

PARTS = 24
PATIENT = Allowed(seconds=1800, cpu=600)  # what is asked is the verdict; what it may cost, test_server.py asks
MAPPINGS = (
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

# Classes to whose honest checkpoint the loader has something to say, and why; what is wrong must be found all the same.
NOT_CLEAN = {
    "Ovis2ForConditionalGeneration": "the default config gives lm_head another size than the embedding it is tied to",
}


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


def victims(free: list[str]) -> dict[str, str]:
    """A tensor for each fault, of those that nothing is tied to."""
    return {fault: random.Random(fault).choice(free) for fault in ("dropped", "renamed", "reshaped")}


def with_faults(specs: Specs, faults: dict[str, str]) -> Specs:
    broken = {name: spec for name, spec in specs.items() if name not in faults.values()}
    for fault, name in faults.items():
        dtype, shape = specs[name]
        if fault == "renamed":
            broken[f"{name}_old"] = (dtype, shape)
        if fault == "reshaped":
            broken[name] = (dtype, (*shape, 3))
    return broken


def unseen(config: bytes, specs: Specs, faults: dict[str, str], meta_loader: MetaLoader) -> Iterator[str]:
    """Faults that are not found. All are tried at once, and alone where that does not tell them apart."""
    found = meta_loader.check(config, specs, with_faults(specs, faults), allowed=PATIENT)
    if found.result == "failed" and all_named(faults, found):
        return
    for fault, name in faults.items():
        found = meta_loader.check(config, specs, with_faults(specs, {fault: name}), allowed=PATIENT)
        if found.result != "failed":
            yield f"{name} {fault} is {found.result}, {found.reason}"


def all_named(faults: dict[str, str], found: ModelCheck) -> bool:
    """Whether the report names each tensor, or at least the layer that holds it and no other of them.

    A class may have other names than its files and fuse tensors of one layer, but a layer keeps its number.
    """
    rows = [row for row in found.errors if "UNEXPECTED" not in row]
    said = {text.partition(":")[0] for text in (*found.missing, *found.mismatched, *rows)}
    if said >= set(faults.values()):
        return True
    layers = [numbers(name) for name in faults.values()]
    apart = all(layers) and len(set().union(*layers)) == len(layers)
    return apart and set().union(*layers) <= set().union(*map(numbers, said))


def numbers(name: str) -> set[int]:
    """The first number that is a part of its own in ``name``, or all of a first ``{15, 30}``."""
    match = re.search(r"(?<!\w)(\d+|\{[\d, ]+\})(?!\w)", name)
    return {int(number) for number in re.findall(r"\d+", match[1])} if match else set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_passes_when_honest_and_fails_when_not(part: int, meta_loader: MetaLoader) -> None:
    names = class_names()[part::PARTS]
    assert len(names) > 30
    checked, wrong = 0, []
    for name, config, specs in layouts(names):
        honest = meta_loader.check(config, specs, allowed=PATIENT)
        if honest.result != ("report" if name in NOT_CLEAN else "clean"):
            wrong.append(f"{name}: {honest.result}, {honest.reason}")
            continue
        checked += 1
        free = sorted(specs.keys() - {*honest.ties, *honest.ties.values()})
        wrong += [f"{name}: {fault}" for fault in unseen(config, specs, victims(free), meta_loader)]
    print(f"{checked} of {len(names)} classes checked")
    assert wrong == []
    assert checked > len(names) * 0.8
