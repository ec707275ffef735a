"""Sets of files that hold parts of tensors, as the processes of a training leave them: found by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from posixpath import basename, dirname, join
from shlex import quote
from typing import Literal

from reshard.pipeline.errors import AbsentFile, AmbiguousWeights, BadIndex, LostPart, NotRead
from reshard.pipeline.tensors import Name, StoredFile

Format = Literal["safetensors", "torch", "distributed", "ranks", "zero", "gguf"]
WHOLE: frozenset[Format] = frozenset({"safetensors", "torch", "gguf"})  # the others hold parts
Listing = Mapping[str, StoredFile]
Text = Callable[[StoredFile], bytes]  # the content of a small file

NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
DISTRIBUTED_METADATA = ".metadata"
# accelerate's folder for a model that it saved with FSDP's SHARDED_STATE_DICT; what it makes belongs one level up.
_FSDP_FOLDER = re.compile(r"pytorch_model_fsdp_(?P<model>\d+)")
RANK_FILE = re.compile(r"model_world_size_(?P<count>\d{1,6})_rank_(?P<rank>\d{1,6})\.pt")
# What torch.distributed.checkpoint's HuggingFaceStorageWriter calls its files: each holds parts of tensors, of rank
# `shard`, and `model` counts the files that they make up together.
RANK_SAFETENSORS = re.compile(r"shard-(?P<shard>\d{5})-model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# Where verl puts config and tokenizer, and itself the weights where it is told to save them whole.
_RANK_HOME = "huggingface"
# DeepSpeed: the folder of each step, and beside them the name of the one that counts. Other ranks than these are those
# of tensor, pipeline and expert parallelism, which only DeepSpeed's own conversion to a universal checkpoint undoes.
ZERO_FILE = re.compile(r".*[_-](?:optim|model)_states\.pt")
_ZERO_PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_00_optim_states\.pt")
_ZERO_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_00_model_states\.pt")
_ZERO_PARAMETER = re.compile(r"(?P<step>(?:.*/)?)zero/[^/]+/fp32\.pt")
_LATEST = ("latest", "latest_universal")
# Without ZeRO, what of them has the whole model.
_PLAIN_MODEL = re.compile(r"(?P<step>(?:.*/)?global_step\d+)/mp_rank_00_model_states\.pt")
# Slices of one model for tensor or pipeline parallelism, each of which would pass for a model: DeepSpeed's,
# Megatron-LM's and Meta's.
_SLICES = [
    re.compile(rf"(?P<of>(?:.*/)?){name}")
    for name in (r"mp_rank_\d+_model_states\.pt", r"mp_rank_[\d_]+/model_(?:optim_)?rng\.pt", r"consolidated\.\d+\.pth")
]
# How the names end of what belongs together, and what to do where the second is missing.
_TOGETHER = (
    (
        ".distcp",
        DISTRIBUTED_METADATA,
        "get that file too: some programs do not copy names that begin with a dot",
    ),
    (DISTRIBUTED_METADATA, ".distcp", "get those files too"),
    ("_optim_states.pt", "_model_states.pt", "get that file too"),
    ("_model_states.pt", "_optim_states.pt", "get those files too"),
)
SLICED = "a model split by tensor, pipeline or expert parallelism"


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one checkpoint, before they are looked into."""

    name: Name
    format: Format
    files: tuple[StoredFile, ...]
    index_path: str | None = None
    index_metadata: Mapping[str, object] | None = None
    weight_map: Mapping[str, str] | None = None  # tensor -> path from the root of the repository
    # Of a distributed checkpoint, what says where its chunks lie; of one of DeepSpeed, which step counts.
    metadata: StoredFile | None = None
    other_steps: tuple[str, ...] = ()  # folders of DeepSpeed's that lie beside that step


def find_parts(listing: Listing, wanted: Callable[[Name], bool], text: Text) -> Iterator[FileSet]:
    """Every such set of ``listing`` whose name is ``wanted``; raises BadIndex or NotRead where one is not complete."""
    inside = defaultdict(list)
    for path, file in sorted(listing.items()):
        inside[dirname(path)].append(file)
    yield from (part for part in _distributed(listing, inside) if wanted(part.name))
    for folder in sorted({dirname(path) for path in listing if RANK_FILE.fullmatch(basename(path))}):
        home = join(folder, _RANK_HOME)
        name = Name(home if join(home, "config.json") in listing else folder, "model")
        if wanted(name):
            yield FileSet(name, "ranks", _ranks(inside[folder]))
    for home, steps in sorted(_steps(listing).items()):
        if wanted(name := Name(home, "model")):
            step, latest = _latest(home, steps, listing, text)
            others = tuple(sorted(steps - {step}))
            yield FileSet(name, "zero", _zero(step, listing), metadata=latest, other_steps=others)


def plain_steps(listing: Listing, among: Iterable[str], text: Text) -> Iterator[FileSet]:
    """What DeepSpeed leaves without ZeRO: a torch file in each step's folder, as the model of the folder above.

    Nothing of folders whose steps cannot be told apart.
    """
    homes: dict[str, set[str]] = {}
    for path in among:
        if match := _PLAIN_MODEL.fullmatch(path):
            homes.setdefault(dirname(match["step"]), set()).add(match["step"])
    for home, steps in sorted(homes.items()):
        latest = listing.get(join(home, _LATEST[0]))
        named = join(home, text(latest).decode("utf-8", "replace").strip()) if latest else ""
        step = named if named in steps else min(steps)
        if named in steps or len(steps) == 1:
            files = (listing[join(step, "mp_rank_00_model_states.pt")],)
            others = tuple(sorted(steps - {step}))
            yield FileSet(Name(home, "model"), "torch", files, metadata=latest, other_steps=others)


def _distributed(listing: Listing, inside: Mapping[str, Sequence[StoredFile]]) -> Iterator[FileSet]:
    for path in sorted(listing):
        folder = dirname(path)
        if basename(path) != DISTRIBUTED_METADATA or basename(folder).startswith("optimizer"):
            continue
        chunks = [file for file in inside[folder] if file.path.endswith(".distcp")]
        if chunks:
            yield FileSet(_distributed_name(folder), "distributed", tuple(chunks), metadata=listing[path])


def _distributed_name(folder: str) -> Name:
    """As accelerate calls a second model and those behind it where it saves them whole: model_1."""
    match = _FSDP_FOLDER.fullmatch(basename(folder))
    if match is None:
        return Name(folder, "model")
    return Name(dirname(folder), f"model_{int(match['model'])}" if int(match["model"]) else "model")


def slices_of(paths: Iterable[str]) -> set[str]:
    """Those of these files that are slices of one model, each beside another."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        for kind in _SLICES:
            if match := kind.fullmatch(path):
                found.setdefault((match["of"], kind.pattern), set()).add(path)
    return {path for slices in found.values() if len(slices) > 1 for path in slices}


def lost_part(listing: Iterable[str]) -> dict[str, str]:
    """What is there, and what to do, where only some of a training's files are; empty where that is not the reason."""
    folders: dict[str, set[str]] = {}
    for path in listing:
        folders.setdefault(dirname(path), set()).add(basename(path))
    for end, other, cure in _TOGETHER:
        for folder, names in sorted(folders.items()):
            there = [name for name in names if _ends(name, end)]
            if there and not any(_ends(name, other) for name in names):
                missing = other if other == DISTRIBUTED_METADATA else f"*{other}"
                return {"found": f" (it has {join(folder, min(there))}, but no {missing} next to it)", "cure": cure}
    return {}


def _ends(name: str, end: str) -> bool:
    return name == end if end == DISTRIBUTED_METADATA else name.endswith(end)


def refuse_lost_parts(files: Sequence[StoredFile]) -> None:
    """Raises BadIndex unless these, whose names are RANK_SAFETENSORS, may be all files of one checkpoint.

    The last ranks may be missing without a trace in the names.
    """
    first = files[0].path
    found = [match for file in files if (match := RANK_SAFETENSORS.fullmatch(basename(file.path)))]
    counts = {int(match["count"]) for match in found}
    if len(counts) > 1:
        raise BadIndex(file=first, why=f"one of {min(counts)} files, but others here are of {max(counts)}")
    numbers, shards = ({int(match[key]) for match in found} for key in ("number", "shard"))
    if missing := {*range(1, max(counts) + 1)} - numbers:
        raise LostPart(file=first, why=f"no rank has a file {min(missing)} of {max(counts)}")
    if missing := {*range(1, max(shards))} - shards:
        raise LostPart(file=first, why=f"the files of shard {min(missing)} are missing")


def numbered_sets(paths: Iterable[str]) -> list[tuple[tuple[str, str, int, str], dict[int, str]]]:
    """((folder, stem, count, suffix), number -> path) of what files with numbers make up."""
    found: dict[tuple[str, str, int, str], dict[int, str]] = defaultdict(dict)
    for path in paths:
        match = NUMBERED.fullmatch(basename(path))
        if match and not RANK_SAFETENSORS.fullmatch(basename(path)):
            key = dirname(path), match["stem"], int(match["count"]), match["suffix"]
            found[key][int(match["number"])] = path
    return sorted(found.items())


def _ranks(beside: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    """The files of the ranks among these, in order; raises BadIndex unless each is there once."""
    found: dict[int, StoredFile] = {}
    count = None
    for file in sorted(beside, key=lambda file: file.path):
        match = RANK_FILE.fullmatch(basename(file.path))
        if match is None:
            continue
        rank, ranks = int(match["rank"]), int(match["count"])
        count = count or ranks
        if ranks != count:
            raise BadIndex(file=file.path, why=f"one of {ranks} ranks, but other files here are from {count} ranks")
        if rank >= count or rank in found:
            raise BadIndex(file=file.path, why=f"its rank is a duplicate, or not one of the {count} ranks")
        found[rank] = file
    return _complete(found, count or 0)


def _complete(found: Mapping[int, StoredFile], count: int) -> tuple[StoredFile, ...]:
    """The files by rank, in order; raises BadIndex unless all are there."""
    for rank in range(count):
        if rank not in found:
            first = found[min(found)].path
            raise LostPart(file=first, why=f"one of {count} ranks, but the file of rank {rank} is missing")
    return tuple(found[rank] for rank in sorted(found))


def _steps(listing: Listing) -> dict[str, set[str]]:
    """The folders with a ZeRO checkpoint in them, by the folder that they are in.

    Optimizers without a model beside them are none.
    """
    models = {dirname(path) for path in listing if ZERO_FILE.fullmatch(path) and path.endswith("model_states.pt")}
    found: dict[str, set[str]] = {}
    for path in listing:
        match = _ZERO_PARAMETER.fullmatch(path)
        if match is not None or (ZERO_FILE.fullmatch(path) and path.endswith("_optim_states.pt")):
            step = match["step"].rstrip("/") if match else dirname(path)
            if step in models:
                found.setdefault(dirname(step), set()).add(step)
    return found


def _latest(home: str, steps: set[str], listing: Listing, text: Text) -> tuple[str, StoredFile | None]:
    """The step that counts, and the file that says so, where there is one."""
    there = [listing[path] for name in _LATEST if (path := join(home, name)) in listing]
    named = [join(home, text(file).decode("utf-8", "replace").strip()) for file in there]
    for file, step in zip(there, named, strict=True):
        if step in steps:
            return step, file
    if there:
        path, other = there[0].path, repr(named[0])[1:-1][:200]
        cure = f"use --exclude {quote(path)}"
        cure += f", and {_all_but_one(steps)}" if len(steps) > 1 else ""
        raise AbsentFile(file=path, other=other if named[0] != join(home, "") else "it is empty", cure=cure)
    if len(steps) > 1:
        first, *others = sorted(steps)
        they = "in the same folder " + ("is a different step" if len(others) == 1 else "are different steps")
        why = f"{they}, and no `latest` file says which one to use"
        raise AmbiguousWeights(file=first, other=", ".join(others), why=why, cure=f"use {_all_but_one(steps)}")
    return min(steps), None


def _all_but_one(steps: Iterable[str]) -> str:
    """How to leave out all of these folders but one, shown by the first."""
    return f"--exclude {quote(join(escape(min(steps)), '*'))} and so on for each step but one"


def _zero(step: str, listing: Listing) -> tuple[StoredFile, ...]:
    """The files of one step: each rank's partition or each parameter, then the model's own states."""
    partitions: dict[int, StoredFile] = {}
    models: dict[int, StoredFile] = {}
    stored = []
    for path, file in sorted(listing.items()):
        if (match := _ZERO_PARAMETER.fullmatch(path)) is not None:
            if match["step"].rstrip("/") == step:
                stored.append(file)
        elif dirname(path) == step and ZERO_FILE.fullmatch(basename(path)):
            match = _ZERO_PARTITION.fullmatch(basename(path)) or _ZERO_MODEL.fullmatch(basename(path))
            if match is None:
                raise NotRead(file=path, what=SLICED)
            kind = partitions if path.endswith("_optim_states.pt") else models
            # Two thirds of a partition are moments: it is attested by the sums of what is used, not as a whole.
            file = replace(file, sha256=None)
            if kind.setdefault(int(match["rank"] or 0), file) is not file:
                raise BadIndex(file=path, why=f"{kind[int(match['rank'] or 0)].path} has the same rank")
    ranks = max(partitions or models, default=0) + 1
    each = any(basename(file.path).startswith("zero_pp_rank_") for file in models.values())  # as in stage 3
    weights = _complete(partitions, ranks) if partitions else tuple(stored)
    return (*weights, *_complete(models, ranks if each else 1))
