"""What is amiss with a repository or folder, and what of it a reshard would put right; from listings and headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import basename, dirname

from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.find import foreign_format
from reshard.pipeline.formats.safetensors import SUFFIX
from reshard.pipeline.limits import DEFAULT_SIZE, HUB_FILE_MAX, HUB_FOLDER_FILES_MAX, SMALL_FILE
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verify.compare import Side
from reshard.pipeline.verify.rules import check_rules
from reshard.pipeline.verify.tokenizer import processor_files, tokenizer_files

# Stems that loaders look for by themselves; others are found by who knows their names.
_USUAL_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
_RESHARD = "a reshard writes it right"
_NOT_CARRIED = "a reshard leaves it out"


@dataclass(frozen=True, slots=True)
class Symptom:
    """One thing that is amiss: ``kind`` in a word or two, and what cures it."""

    kind: str
    text: str
    cure: str


@dataclass(frozen=True, slots=True)
class Health:
    """Every symptom, the worst first; ``refused`` is why the pipeline would not take it, if it would not."""

    symptoms: tuple[Symptom, ...]
    refused: CheckpointError | None
    tensors: int
    weights: int  # bytes of the files that a loader reads


def examine(source: Source) -> Health:
    """Raises NoWeights, and what stores raise; whatever is broken is a symptom."""
    side = Side.attempt(source)
    rules = check_rules(source, side)
    if isinstance(side, CheckpointError):
        cure = f"a reshard refuses it: {side.next_step}"
        return Health(tuple(Symptom("broken", text, cure) for text in rules.findings), side, 0, 0)
    symptoms = [Symptom("index", text, _RESHARD) for text in rules.findings]
    symptoms += [*_formats(side), *_sizes(side), *_names(side), *_beside(side)]
    tensors = sum(len(checkpoint.tensors) for checkpoint in side.opened.checkpoints)
    return Health(tuple(symptoms), None, tensors, sum(file.size for file in _read(side)))


def _read(side: Side) -> list[StoredFile]:
    numbers = {number for checkpoint in side.opened.checkpoints for number in checkpoint.files}
    return [side.opened.files[number] for number in sorted(numbers)]


def _formats(side: Side) -> Iterator[Symptom]:
    read = {file.path for file in _read(side)}
    pickled = sorted(path for path in read if not path.endswith(SUFFIX))
    if pickled:
        text = f"the weights are pickles ({len(pickled)}, such as {pickled[0]}), which loaders run or refuse"
        yield Symptom("pickles", text, "a reshard reads them without running anything, and writes safetensors")
    for path, why in side.opened.duplicates.items():
        yield Symptom("duplicate", f"{path}: {why}", _NOT_CARRIED)
    others: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for path, file in side.source.files().items():
        kind = foreign_format(path)
        if kind and path not in read:
            others[kind] += 1
            sizes[kind] += file.size
    for kind, count in sorted(others.items()):
        text = f"{sizes[kind]:,} bytes in {kind} files ({count}): a second copy, or data of a trainer"
        yield Symptom("other formats", text, f"{_NOT_CARRIED}, unless --include names it")


def _sizes(side: Side) -> Iterator[Symptom]:
    read = _read(side)
    for file in read:
        if file.size > HUB_FILE_MAX:
            text = f"{file.path} has {file.size:,} bytes, and the Hub takes {HUB_FILE_MAX:,}"
            yield Symptom("size", text, "a reshard cuts it")
        elif file.size > 2 * DEFAULT_SIZE:
            text = f"{file.path} has {file.size:,} bytes: it is fetched again from the start where resuming fails"
            yield Symptom("size", text, "a reshard cuts it, if that is a trouble to anybody")
    small = [file for file in read if file.size < SMALL_FILE]
    if len(small) > 8 and len(small) > len(read) // 2:
        text = f"{len(small)} of {len(read)} weight files have less than {SMALL_FILE:,} bytes, and each costs a request"
        yield Symptom("size", text, "a reshard merges them")
    folders = Counter(dirname(path) for path in side.source.files())
    for folder, count in folders.items():
        if count > HUB_FOLDER_FILES_MAX:
            text = f"{folder or 'the root'} has {count:,} files, and the Hub allows {HUB_FOLDER_FILES_MAX:,}"
            yield Symptom("size", text, "a reshard with a larger --size has fewer")


def _names(side: Side) -> Iterator[Symptom]:
    for checkpoint in side.opened.checkpoints:
        for note in checkpoint.notes:
            yield Symptom("note", note, "a reshard keeps every tensor")
        if checkpoint.name.stem not in _USUAL_STEMS:
            text = f"{checkpoint.name} has a name that loaders do not look for"
            yield Symptom("name", text, "a reshard keeps its name; whoever reads it knows it")


def _beside(side: Side) -> Iterator[Symptom]:
    listing = side.source.files()
    roots = {checkpoint.name.folder for checkpoint in side.opened.checkpoints}
    names = {basename(path) for path in listing}
    if not names & {"config.json", "model_index.json", "adapter_config.json", "modules.json"}:
        text = "no config.json says which class loads it"
        yield Symptom("config", text, "--config-from takes it from another repository")
    elif "" in roots and "config.json" in listing and not [*tokenizer_files(listing), *processor_files(listing)]:
        text = "there is neither a tokenizer nor a processor"
        yield Symptom("tokenizer", text, "--config-from takes one from another repository, if the model needs it")
