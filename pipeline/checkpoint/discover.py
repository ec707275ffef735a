"""From a repository's listing to its sets of weight files: which files belong together, in which format.

Only listings and indexes are read. What belongs to a set is what its index says; file names decide only where a set
has none. Where one checkpoint (folder, stem and variant) is there in several formats, the safest is taken:
safetensors, then torch files, then what several processes left in parts; the others hold the same weights and are left
out. GGUF files are read where there is nothing else: what they were made from holds more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from posixpath import basename, dirname, join

from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.formats.pointers import refuse_pointer
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.indexes import Index, load_json, parse_index
from reshard.pipeline.checkpoint.kinds import FOREIGN, TRAINERS, foreign_format, named_like, suffix_of
from reshard.pipeline.checkpoint.modules import Modules, find_modules
from reshard.pipeline.checkpoint.parts import (
    NUMBERED,
    RANK_FILE,
    RANK_SAFETENSORS,
    SLICED,
    ZERO_FILE,
    FileSet,
    Format,
    find_parts,
    lost_part,
    numbered_sets,
    plain_steps,
    refuse_lost_parts,
    slices_of,
)
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import AbsentFile, AmbiguousWeights, BadIndex, LostPart, NotRead, NoWeights
from reshard.pipeline.limits import INDEX_MAX, LATEST_MAX
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import Name, StoredFile
from reshard.pipeline.text import counted

# Loaders that look for `<stem>.<variant>.safetensors`; in any other name a dot is just a dot.
_VARIANT_STEMS = {"model", "diffusion_pytorch_model", "pytorch_model"}
_VARIANT = re.compile(r"[A-Za-z_]\w*")
# `model.safetensors.index.json`, `pytorch_model.bin.index.fp16.json`, and what accelerate's documentation calls its
# bare maps: `x.index.json`, `index.json`. Without a suffix it may be an index of anything.
_INDEX = re.compile(
    r"(?:(?P<stem>.+?)(?P<suffix>\.safetensors|\.bin|\.pt|\.pth)?\.)?index(?:\.(?P<variant>[A-Za-z_]\w*))?\.json"
)

# Their loaders read one file by its name and know no index, so they are carried whole and never cut:
# adapters (peft), LoRA weights and textual inversions (diffusers), which can be merged into a model ...
_ADAPTERS = ("adapter_model*", "pytorch_lora_weights*", "learned_embeds*")
# ... what LLaVA's trainer leaves beside them, and MLX' adapters ...
_UNCUT = (
    *_ADAPTERS, "non_lora_trainables*", "mm_projector*", "adapters.safetensors", "[0-9]*_adapters.safetensors",
)  # fmt: skip
# ... and, beside the same weights in the usual names, what open_clip and mistral-inference look for.
_UNCUT_TWINS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "consolidated*.safetensors")
# What llama.cpp takes beside a model by --mmproj: one file. (Others that go beside one say so in their keys alone: what
# was quantised by an imatrix has that in its name, too.)
_PROJECTOR = "*mmproj*.gguf"

_TORCH = (".bin", ".pt", ".pth", ".ckpt", ".pth.tar")  # in this order, where one checkpoint has several
# TorchScript by its name: opened where nothing else is there, so that its own error says why it is not read.
_SCRIPT = ".jit"
# Stems that loaders look for by themselves, `pytorch_model` being `model`: transformers and diffusers; and
# mistral-inference, open_clip and peft.
USUAL_STEMS = ("model", "diffusion_pytorch_model")
_FOUND_STEMS = (*USUAL_STEMS, "open_clip_model")  # those that are found beside a config
SOUGHT_STEMS = (*_FOUND_STEMS, "consolidated", "adapter_model")


@dataclass(frozen=True, slots=True)
class Found:
    """The weights of one repository, known from its listing and its indexes alone."""

    sets: tuple[FileSet, ...]
    uncut: frozenset[str]  # weights that are carried whole, with their indexes
    single: frozenset[str] = frozenset()  # folders whose weights stay in one file, as their loader knows no index
    idle: tuple[str, ...] = ()  # indexes of which no file is there, beside other safetensors

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return tuple(file for part in self.sets for file in part.files)

    def without_maps(self) -> Found:
        """The same without what the indexes say of each tensor, which is not needed once the headers are read."""
        return replace(self, sets=tuple(replace(part, weight_map=None) for part in self.sets))

    def carrying(self, whole: frozenset[str]) -> Found:
        """The same where the files ``whole`` are carried, of which only their headers say that they are no models."""
        sets = tuple(part for part in self.sets if not any(file.path in whole for file in part.files))
        return replace(self, sets=sets, uncut=self.uncut | whole)

    @property
    def stays_whole(self) -> bool:
        """Whether there is nothing that could be cut: adapters, and whatever else is read by its name."""
        return all(file.path in self.uncut for file in self.files)

    @property
    def indexes(self) -> tuple[str, ...]:
        """Every file that says what belongs to a set."""
        return tuple(path for s in self.sets for path in (s.index_path, s.metadata and s.metadata.path) if path)


def may_be_other(path: str, read: Set[Name]) -> bool:
    """Whether a torch file may hold weights of which nothing that is ``read`` is a copy, by their names."""
    known = named_like(path, (*TRAINERS, "consolidated.*.pth"))  # the latter are Meta's own copy
    return foreign_format(path) == FOREIGN[".bin"] and set_name(path) not in read and not known


def is_weights(path: str) -> bool:
    """Whether a file of this name alone may be a checkpoint, or would say why it is none."""
    return suffix_of(path) in {SUFFIX, GGUF, *_TORCH, _SCRIPT}


def is_index(path: str) -> bool:
    """Whether a file may be an index, by its name: of weights, or of anything."""
    return _INDEX.fullmatch(basename(path)) is not None


def is_weight_index(path: str) -> bool:
    """``model.safetensors.index.json``, ``pytorch_model.bin.index.json`` and their variants."""
    match = _INDEX.fullmatch(basename(path))
    return match is not None and match["suffix"] is not None


def index_name(path: str) -> Name:
    """The checkpoint that an index is of, by the index's own name."""
    match = _INDEX.fullmatch(basename(path))
    assert match is not None, "only indexes have such a name"
    return Name(dirname(path), _usual_stem(match["stem"] or "model"), match["variant"])


def is_numbered(path: str) -> bool:
    """Whether a weight file is one of a set, by its name."""
    return NUMBERED.fullmatch(basename(path)) is not None


def find_checkpoints(source: Source, exclude: Callable[[str], bool] = lambda path: False) -> Found:
    """Which weight files of ``source`` belong together, but for those that ``exclude`` names.

    Reads indexes and no weight file. Raises NoWeights, BadIndex and UnsafePath.
    """
    listing = {path: file for path, file in source.files().items() if not exclude(path)}
    modules = find_modules(source, listing)
    uncut = _uncut(listing, modules)
    whole = {set_name(path) for path in uncut}
    indexes = {path for path in listing if is_weight_index(path) and index_name(path) in whole}
    # The same weights in torch's format are no checkpoint either, which would be written over what is carried.
    twins = {path for path in listing if suffix_of(path) in _TORCH and set_name(path) in whole} - uncut
    finder = _Finder(source, {path: file for path, file in listing.items() if path not in uncut | indexes | twins})
    sets = finder.sets()
    if not sets:
        raise NoWeights(place=str(source.place), **_what_else(listing, uncut))
    uncut |= indexes
    if any(part.format == "gguf" for part in sets):
        uncut |= {path for path in listing if _is_projector(path)}
    return Found(tuple(sets), frozenset(uncut), frozenset(modules.single), tuple(sorted(finder.idle)))


def find_uncut(source: Source) -> Found:
    """The weights that are carried whole, each of them alone, as they are checked where there are no others.

    Raises NoWeights and BadIndex.
    """
    listing = source.files()
    uncut = _uncut(listing, find_modules(source, listing))
    if not uncut:
        raise NoWeights(place=str(source.place), **_what_else(listing, uncut))
    sets = (FileSet(_name(path), _format({suffix_of(path)}), (listing[path],)) for path in sorted(uncut))
    return Found(tuple(sets), frozenset(uncut))


def _uncut(listing: Mapping[str, StoredFile], modules: Modules) -> set[str]:
    weights = {path for path in listing if suffix_of(path) in (SUFFIX, ".bin")}
    usual = {dirname(p) for p in weights if suffix_of(p) == SUFFIX and set_name(p).stem in USUAL_STEMS}
    uncut = {path for path in weights if named_like(path, _UNCUT)}
    uncut |= {path for path in weights if named_like(path, _UNCUT_TWINS) and dirname(path) in usual}
    carried = modules.carried
    uncut |= {path for path in weights if dirname(path) in carried}
    safer = {set_name(path) for path in uncut if suffix_of(path) == SUFFIX}
    return {path for path in uncut if suffix_of(path) == SUFFIX or set_name(path) not in safer}


def _is_projector(path: str) -> bool:
    return fnmatchcase(basename(path).lower(), _PROJECTOR)


class _Finder:
    """Looks for sets in one listing, in the order in which they are trusted."""

    def __init__(self, source: Source, listing: Mapping[str, StoredFile]) -> None:
        self._source = source
        self._listing = listing
        self._slices = slices_of(listing)
        self._claimed: set[str] = set()
        self._found: list[FileSet] = []
        self._suffixes: dict[Name, set[str]] = {}  # of the files of what is found
        self.idle: dict[str, AbsentFile] = {}  # indexes of which no file is there

    def sets(self) -> list[FileSet]:
        self._add(self._indexed({SUFFIX}))
        self._add(self._unindexed([SUFFIX]))
        self._add(self._indexed(set(_TORCH)))
        usual = [path for path in self._torch_files() if set_name(path).stem in USUAL_STEMS]
        for suffix in _TORCH:
            self._add(self._unindexed([suffix], [p for p in usual if self._is_new(set_name(p), suffix)]))
        self._add(find_parts(self._listing, self._is_new, self._text))
        if not self._found:
            self._add(plain_steps(self._listing, self._torch_files(), self._text))
            steps = {step for part in self._found for step in part.other_steps}
            self._add(self._unindexed(_TORCH, [p for p in self._torch_files() if dirname(p) not in steps]))
        if not self._found:
            self._add(self._unindexed([GGUF], [p for p in self._listing if not _is_projector(p)]))
        if not self._found and self._slices:
            raise NotRead(file=min(self._slices), what=SLICED)
        if not self._found:
            self._add(self._unindexed([_SCRIPT]))
        folders = {part.name.folder for part in self._found if part.format == "safetensors"}
        for path, error in self.idle.items():
            if dirname(path) not in folders:
                raise error
        in_folder = Counter(part.name.folder for part in self._found)
        return [self._loadable(part, in_folder[part.name.folder] == 1) for part in self._found]

    def _text(self, file: StoredFile) -> bytes:
        content = read_file(self._source, file, LATEST_MAX)
        refuse_pointer(content, file.path)
        return content

    def _add(self, sets: Iterable[FileSet]) -> None:
        for part in sets:
            self._claimed.update(file.path for file in part.files)
            self._found.append(part)
            self._suffixes.setdefault(part.name, set()).add(suffix_of(part.files[0].path))

    def _is_new(self, name: Name, suffix: str = "") -> bool:
        """Whether no set of a safer kind has the name. Sets of one kind may share it: which one counts, files tell."""
        return self._suffixes.get(name, set()) <= {suffix}

    def _loadable(self, part: FileSet, alone: bool) -> FileSet:
        """The set, under the name that loaders look for where it is all that a config beside it can mean."""
        config = join(part.name.folder, "config.json") in self._listing
        if part.format in {"safetensors", "gguf"} or part.name.stem in _FOUND_STEMS or not (alone and config):
            return part
        return replace(part, name=Name(part.name.folder, USUAL_STEMS[0]))

    def _indexed(self, suffixes: set[str]) -> Iterator[FileSet]:
        """The sets that an index names whose files have one of these suffixes; of two with the same files, one."""
        found = {part.index_path: part for part in self._by_index(suffixes)}
        usual = sorted(
            found.values(), key=lambda part: (part.name.variant is not None, part.name.stem not in USUAL_STEMS)
        )
        first = {part.files: part for part in reversed(usual)}
        kept = [part for part in found.values() if first[part.files] is part]
        owners = dict[str, FileSet]()
        for part in kept:
            for file in part.files:
                other = owners.setdefault(file.path, part)
                if other is not part:
                    why = f"also lists {file.path}, but not all of its files"
                    raise AmbiguousWeights(file=part.index_path, other=other.index_path, why=why)
        yield from kept

    def _by_index(self, suffixes: set[str]) -> Iterator[FileSet]:
        for path in sorted(self._listing):
            match = _INDEX.fullmatch(basename(path))
            if match is None or (match["suffix"] is not None and match["suffix"] not in suffixes):
                continue
            name = index_name(path)
            if not self._is_new(name, SUFFIX if SUFFIX in suffixes else ".bin"):
                continue
            if (index := _index_of(self._source, self._listing[path], suffixes)) is None:
                continue
            weight_map = index.by_tensor()
            files = sorted(set(weight_map.values()))
            if absent := [file for file in files if file not in self._listing]:
                self.idle[path] = AbsentFile(file=path, other=absent[0], **self._without(absent[0]))
                if len(absent) < len(files):
                    raise self.idle[path]
                continue
            for file in files:
                if suffix_of(file) not in suffixes:
                    raise BadIndex(file=path, why=f"{file} is not a {_format(suffixes)} file")
            stored = tuple(self._listing[file] for file in files)
            yield FileSet(name, _format(suffixes), stored, path, index.metadata or {}, weight_map)

    def _without(self, file: str) -> dict[str, str]:
        """What to do where ``file`` is missing, if the others of its numbered set are there: they are no set alone."""
        if not (match := NUMBERED.fullmatch(file)):
            return {}
        pattern = rf"{re.escape(match['stem'])}-\d{{5}}-of-{match['count']}{re.escape(match['suffix'])}"
        if not any(re.fullmatch(pattern, path) for path in self._listing):
            return {}
        return {"cure": "get it from its author, or download the model again; the other shards alone are not a model"}

    def _unindexed(self, suffixes: Iterable[str], among: Iterable[str] | None = None) -> Iterator[FileSet]:
        """What no index names: numbered files are one set, any other file is one of its own."""
        suffixes = set(suffixes)
        pool = self._listing if among is None else among
        free = {path for path in pool if suffix_of(path) in suffixes} - self._claimed
        indexed = {part.name for part in self._found if part.index_path}
        for (folder, stem, count, suffix), numbered in numbered_sets(free):
            if _name(join(folder, f"{stem}{suffix}")) in indexed:
                continue  # shards that the index no longer names are looked at one by one
            files = tuple(self._listing[path] for _, path in sorted(numbered.items()))
            if missing := {*range(1, count + 1)} - numbered.keys():
                no_index = "" if GGUF in suffixes else "no index, and "
                raise LostPart(file=files[0].path, why=f"{no_index}file {min(missing)} of {count} is missing")
            free -= {*numbered.values()}
            yield FileSet(_name(join(folder, f"{stem}{suffix}")), _format(suffixes), files)
        parts = sorted(path for path in free if RANK_SAFETENSORS.fullmatch(basename(path)))
        for folder, members in groupby(parts, key=dirname):
            files = tuple(self._listing[path] for path in members)
            refuse_lost_parts(files)
            yield FileSet(Name(folder, "model"), "safetensors", files)
        for path in sorted(free - {*parts}):
            yield FileSet(_name(path), _format(suffixes), (self._listing[path],))

    def _torch_files(self) -> list[str]:
        torch = [p for p in self._listing if suffix_of(p) in _TORCH and foreign_format(p) == FOREIGN[".bin"]]
        return [path for path in torch if path not in self._slices and not named_like(path, TRAINERS)]


def _format(suffixes: set[str]) -> Format:
    return "safetensors" if SUFFIX in suffixes else "gguf" if GGUF in suffixes else "torch"


def _usual_stem(stem: str) -> str:
    """The stem of the safetensors files that loaders look for: ``pytorch_model.bin`` becomes ``model.safetensors``."""
    return {"pytorch_model": "model", "open_clip_pytorch_model": "open_clip_model"}.get(stem, stem)


def _name(path: str) -> Name:
    """The name of a checkpoint without an index: ``unet/model.fp16.safetensors`` has the variant fp16."""
    stem = basename(path).removesuffix(suffix_of(path))
    if path.endswith(GGUF):
        return Name(dirname(path), stem, suffix=GGUF)
    base, dot, variant = stem.rpartition(".")
    if dot and base in _VARIANT_STEMS and _VARIANT.fullmatch(variant):
        return Name(dirname(path), _usual_stem(base), variant)
    return Name(dirname(path), _usual_stem(stem))


def set_name(path: str) -> Name:
    """The name of the set that a file is one of, if its name has a number."""
    match = NUMBERED.fullmatch(basename(path))
    return _name(join(dirname(path), match["stem"] + match["suffix"]) if match else path)


def _index_of(source: Source, file: StoredFile, suffixes: set[str]) -> Index | None:
    """The index that a file is by its name; None where it is none of files that have one of these suffixes."""
    named = is_weight_index(file.path)
    if file.size > INDEX_MAX and not named:
        return None
    content = read_file(source, file, INDEX_MAX)
    told = named or _is_map_of(content, suffixes)
    return parse_index(content, file.path) if told else None


def part_by(source: Source, path: str) -> str | None:
    """What makes a file of ``source`` one of several: its name, or an index beside it. Raises BadIndex, UnsafePath."""
    if any(part.fullmatch(basename(path)) for part in (NUMBERED, RANK_SAFETENSORS, RANK_FILE, ZERO_FILE)):
        return "its name"
    for other, file in source.files().items():
        if is_index(other) and dirname(other) == dirname(path):
            index = _index_of(source, file, {suffix_of(path)})
            if index is not None and path in index.by_tensor().values():
                return other
    return None


def _is_map_of(content: bytes, suffixes: set[str]) -> bool:
    """Whether this is a map from names to files that have one of these suffixes, and no index of anything else."""
    try:
        data = load_json(content)
    except ValueError:
        return False
    weight_map = data.get("weight_map", data) if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return False
    return all(isinstance(file, str) and suffix_of(file) in suffixes for file in weight_map.values())


def beside_a_model(path: str, told_by: str) -> dict[str, str]:
    """What there is where nothing else is than GGUF files that go beside a model."""
    cure = "use this file unchanged; reshard the model it belongs to"
    found = f" ({path} belongs to another model, according to its {told_by}, and is never resharded)"
    return {"found": found, "cure": cure}


def _what_else(listing: Mapping[str, StoredFile], uncut: set[str]) -> dict[str, str]:
    if uncut:
        merge = "use an adapter unchanged, or merge it into its base model first (merge_and_unload)"
        cure = merge if named_like(min(uncut), _ADAPTERS) else "use this file unchanged"
        return {"found": f" ({min(uncut)} is never resharded, because loaders look for that name)", "cure": cure}
    kinds = sorted({kind for path in listing if (kind := foreign_format(path))})
    if kinds:
        example = min(path for path in listing if foreign_format(path))
        if kinds == [FOREIGN[GGUF]] and _is_projector(example):
            return beside_a_model(example, "name")
        if reason := lost_part(listing):
            return reason
        cure = "use the repository these files were converted from"
        return {"found": f" (it has {', '.join(kinds)} files such as {example})", "cure": cure}
    return {"found": f" ({counted(len(listing), 'file')})"}
