"""What is wrong with a repository or folder, and what of it a reshard repairs; from listings and headers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename, dirname, join
from typing import Any, NamedTuple
from uuid import uuid4

from reshard.pipeline.checkpoint.discover import USUAL_STEMS, may_be_other, set_name
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.indexes import load_json
from reshard.pipeline.checkpoint.kinds import FOREIGN, foreign_format, named_like
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.drafting import draft
from reshard.pipeline.errors import CheckpointError, ModelCheckRequired, NoWeights, ProofError, ReshardError, UsageError
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.limits import (
    CONFIG_MAX,
    DEFAULT_SIZE,
    HUB_FILE_MAX,
    HUB_FOLDER_FILES_MAX,
    HUB_HTTP_MAX,
    SMALL_FILE,
)
from reshard.pipeline.places import AnyPlace, Folder, Hub
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.tensors import Name, StoredFile
from reshard.pipeline.text import counted
from reshard.pipeline.verifying.index_rules import as_check, ruled
from reshard.pipeline.verifying.job_checks import check_model
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.tokenizer import check_tokenizers
from reshard.pipeline.verifying.tokenizer_files import PROCESSOR_FILES, tokenizer_files

# What says how weights beside it are loaded: transformers and diffusers, Mistral's and Meta's own layouts, OpenCLIP;
# at the root also what a pipeline of diffusers and an adapter of PEFT is made of.
_SAYS_CLASS = ("config.json", "params.json", "open_clip_config.json", "model_index.json", "adapter_config.json")
PIPELINE = "model_index.json"
_JSON = (*_SAYS_CLASS, "generation_config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json")
_WEIGHTLESS = re.compile("Scheduler|Tokenizer|Processor|Extractor")  # classes of components that are only settings
# A file that is a whole tokenizer's vocabulary; `vocab.json` is one with merges.txt, and by itself only of few classes.
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.txt", "*.model", "*.spm")
_OF_TEXT = ("ForCausalLM", "ForMaskedLM")
_TORCH = FOREIGN[".bin"]
_RESHARD = "resharding fixes it"
_LEFT = "resharding keeps it; skip it with --exclude"
_FROM_MAKER = "get it from the author of the pipeline; resharding does not add it"
_NOT_CUT_OFF = "it could be truncated; get it from the author of the model"
_NOT_CARRIED = "resharding skips it"
_OF_SOURCE = (CheckpointError, NoWeights, ProofError, UsageError)  # what a run refuses of any source


@dataclass(frozen=True, slots=True)
class Symptom:
    """One thing that is wrong: ``kind`` in a word or two, and what repairs it."""

    kind: str
    text: str
    cure: str


class Refusals(NamedTuple):
    """What ends a run into any target, and if nothing does, what ends one to a Hub, or one with --require model."""

    always: ReshardError | None = None
    on_hub: ReshardError | None = None
    require_model: ModelCheckRequired | None = None


class Health(NamedTuple):
    """Every symptom, the worst first, and what `run` would refuse."""

    symptoms: tuple[Symptom, ...]
    refusals: Refusals
    tensors: int
    weights: int  # bytes of the files that a loader reads


def examine(source: Source, meta_loader: MetaLoader, tmpdir: Path | None = None) -> Health:
    """Raises NoWeights where there are none of any kind, and what stores raise; whatever is broken is a symptom.

    ``meta_loader`` is asked about the model's class, and about a tokenizer whose files leave open whether it loads.
    """
    side = OpenedSide.attempt(source)
    refused = _refusals(source, meta_loader)
    found = ruled(side)
    rules = as_check(side, found)
    seen = _seen(side)
    weights = sum(file.size for file in seen.files)
    around = [*_formats(seen), *_sizes(seen), *_configs(seen), *_components(seen)]
    around += _tokenizers(seen, meta_loader, tmpdir)
    if side.error:
        cure = f"`reshard run` would fail: {side.error.next_step}"
        symptoms = [*(Symptom("broken", text, cure) for text in rules.findings), *around]
        return Health(tuple(symptoms), refused, rules.figures["tensors"], weights)
    symptoms = [Symptom("refused", str(error), error.next_step) for error in [refused.always] if error]
    symptoms += [Symptom("on a Hub", f"{e.code}: {e}", e.next_step) for e in [refused.on_hub] if e]
    stale = {str(one) for one in found.findings if one.rule == "stale_file"}
    symptoms += [Symptom("index", text, _LEFT if text in stale else _RESHARD) for text in rules.findings]
    symptoms += [Symptom("duplicate", f"{path}: {why}", _NOT_CARRIED) for path, why in side.opened.duplicates.items()]
    symptoms += [*around, *_names(side, seen)]
    return Health(tuple(symptoms), refused, sum(len(c.tensors) for c in side.opened.checkpoints), weights)


def _refusals(source: Source, meta_loader: MetaLoader) -> Refusals:
    """What `run` would refuse, planned as `run` plans it, for a target that does not exist yet."""
    on_hub, new = None, Folder(path=f"/reshard-doctor-{uuid4().hex}")  # which no source lies in or around

    def planned(wanted: AnyPlace) -> Plan:
        request = Request(source=source.place, target=wanted, options=Options(require="model"))
        return draft(request, source, FolderTarget(new))

    try:
        try:
            made = planned(Hub(repo="some/new"))
        except _OF_SOURCE as error:
            on_hub = error
            made = planned(new)  # which asks less of names and sizes
        check_model(made, made.shards, source, meta_loader)
    except ModelCheckRequired as error:
        return Refusals(None, on_hub, error)
    except _OF_SOURCE as error:
        return Refusals(error)
    return Refusals(None, on_hub)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a loader reads, as far as files are not broken."""

    source: Source
    files: tuple[StoredFile, ...]  # of weights
    names: tuple[Name, ...]  # of checkpoints that loaders find by themselves; others, and GGUF, are read by their names
    uncut: frozenset[str] = frozenset()  # weights that are carried whole, whatever their format

    def json(self, path: str) -> Any:
        """The content of a JSON file; None where it is absent, or no JSON."""
        file = self.source.files().get(path)
        if file is None:
            return None
        try:
            return load_json(read_file(self.source, file, CONFIG_MAX))
        except (CheckpointError, ValueError):
            return None


def _seen(side: OpenedSide) -> _Seen:
    opened, uncut, source = side.opened, side.found.uncut, side.source
    if side.error:
        listing = source.files()
        paths = [path for path in listing if path.endswith(SUFFIX)]
        paths = paths or [path for path in listing if foreign_format(path) == _TORCH]
        return _Seen(source, tuple(listing[path] for path in sorted(paths)), tuple({set_name(path) for path in paths}))
    found = (
        c.name
        for c in opened.checkpoints
        if c.name.suffix != GGUF and any(opened.files[n].path not in uncut for n in c.files)
    )
    return _Seen(source, tuple(side.files), tuple(found), uncut)


def _formats(seen: _Seen) -> Iterator[Symptom]:
    read = {file.path for file in seen.files}
    pickled = sorted(path for path in read if not path.endswith((SUFFIX, GGUF)))
    if pickled:
        text = f"the weights are pickles ({len(pickled)}, such as {pickled[0]}), which loaders execute or reject"
        yield Symptom("pickles", text, "resharding reads them without running anything, and writes safetensors")
    names = {set_name(path) for path in read}
    others: defaultdict[tuple[str, bool], list[StoredFile]] = defaultdict(list)
    for path, file in sorted(seen.source.files().items()):
        kind = foreign_format(path)
        if kind and path not in read | seen.uncut:
            others[kind, may_be_other(path, names)].append(file)
    for (kind, other), files in sorted(others.items()):
        what = f"maybe other weights, such as {files[0].path}" if other else "a second copy, or training data"
        size = human_bytes(sum(file.size for file in files))
        text = f"{size} in {counted(len(files), f'{kind} file')}: {what}"
        yield Symptom("other formats", text, f"{_NOT_CARRIED}, unless you use --include")


def _sizes(seen: _Seen) -> Iterator[Symptom]:
    read = seen.files
    for file in read:
        if file.size > HUB_FILE_MAX:
            text = f"{file.path} has {file.size:,} bytes, but the Hub accepts at most {HUB_FILE_MAX:,}"
            yield Symptom("size", text, "resharding splits it")
        elif file.size > HUB_HTTP_MAX:
            text = f"{file.path} has {file.size:,} bytes: clients without hf_xet can download at most {HUB_HTTP_MAX:,}"
            yield Symptom("size", text, "resharding splits it")
        elif file.size > 2 * DEFAULT_SIZE:
            text = f"{file.path} is {human_bytes(file.size)}: a download that cannot resume starts over"
            yield Symptom("size", text, "resharding splits it, if that is a problem")
    sets = Counter(set_name(file.path) for file in read)
    small = [file for file in read if file.size < SMALL_FILE and sets[set_name(file.path)] > 1]
    if len(small) > 8 and len(small) > len(read) // 2:
        text = f"{len(small)} of {len(read)} weight files are under {human_bytes(SMALL_FILE)}, one request each"
        yield Symptom("size", text, "resharding merges them")
    folders = Counter(dirname(path) for path in seen.source.files())
    for folder, count in folders.items():
        if count > HUB_FOLDER_FILES_MAX:
            text = f"{folder or 'the root'} has {counted(count, 'file')} (maximum on the Hub: {HUB_FOLDER_FILES_MAX:,})"
            yield Symptom("size", text, "resharding with a larger --size makes fewer")


def _names(side: OpenedSide, seen: _Seen) -> Iterator[Symptom]:
    for checkpoint in side.opened.checkpoints:
        for note in checkpoint.notes:
            yield Symptom("note", note, _NOT_CARRIED if " skipped " in note else "resharding keeps all weights")
        if checkpoint.name in seen.names and checkpoint.name.stem not in USUAL_STEMS:
            text = f"{checkpoint.name} has a name that loaders do not look for"
            yield Symptom("name", text, "resharding keeps the name, which its own loader knows")


def _configs(seen: _Seen) -> Iterator[Symptom]:
    """Configs that are not JSON, and checkpoints beside which a config should lie."""
    listing = seen.source.files()
    for path in sorted(path for path in listing if basename(path) in _JSON and path != PIPELINE):
        if seen.json(path) is None:
            yield Symptom("config", f"{path} is not JSON that loaders can read", _NOT_CUT_OFF)
    anywhere = any(basename(path) in _SAYS_CLASS for path in listing)
    for name in seen.names:
        here = any(join(name.folder, config) in listing for config in _SAYS_CLASS)
        if not here and (name.stem in USUAL_STEMS or not anywhere):
            text = f"no config.json next to {name}, so its class is unknown"
            yield Symptom("config", text, "use --config-from REPO to get it from another repository")


def _components(seen: _Seen) -> Iterator[Symptom]:
    """Whether every component that a diffusers pipeline's ``model_index.json`` names is there, with its weights."""
    listing, index = seen.source.files(), seen.json(PIPELINE)
    if PIPELINE not in listing:
        return
    if not isinstance(index, dict):
        yield Symptom("component", f"{PIPELINE} is not a JSON object", "get it from the author of the pipeline")
        return
    folders = {path.partition("/")[0] for path in listing if "/" in path}
    weights = {dirname(path) for path in listing if path.endswith(SUFFIX) or foreign_format(path)}
    for component, value in index.items():
        named = isinstance(value, list) and len(value) == 2 and all(part and isinstance(part, str) for part in value)
        if component.startswith("_") or not named:
            continue
        if component not in folders:
            text = f"{PIPELINE} lists {component} ({'.'.join(value)}), but that folder is missing"
            yield Symptom("component", text, _FROM_MAKER)
        elif not (component in weights or _WEIGHTLESS.search(value[1])) and join(component, "config.json") in listing:
            text = f"{component} ({'.'.join(value)}) has a config.json but no weights"
            yield Symptom("component", text, _FROM_MAKER)


def _tokenizers(seen: _Seen, meta_loader: MetaLoader, tmpdir: Path | None) -> Iterator[Symptom]:
    """Whether the files of each tokenizer are enough to load it, and whether a model of text has one."""
    listing = seen.source.files()
    tokenizers = tokenizer_files(listing)
    cure = "use --config-from REPO to get one from another repository, if the model needs it"
    config = seen.json("config.json")
    if "" in {name.folder for name in seen.names} and "config.json" in listing and not tokenizers:
        classes = config.get("architectures") if isinstance(config, dict) else None
        of_text = [name for name in classes if str(name).endswith(_OF_TEXT)] if isinstance(classes, list) else []
        if not any(named_like(path, PROCESSOR_FILES) for path in listing):
            yield Symptom("tokenizer", "no tokenizer and no processor", cure)
        elif of_text:
            text = f"a processor but no tokenizer, and {of_text[0]} reads text"
            yield Symptom("tokenizer", text, cure)
    partial = {
        folder: names
        for folder, paths in tokenizers.items()
        if not (_has_vocabulary(names := [basename(path) for path in paths]) or _has_code(folder, seen))
    }
    if partial:
        for check in check_tokenizers(seen.source, None, meta_loader, tmpdir):
            folder = check.name.partition(" ")[2]
            if folder in partial and check.result != "passed":
                has = f"{folder or 'the root'} has only part of a tokenizer ({', '.join(partial[folder])})"
                text = f"{has}: {check.reason}"
                yield Symptom("tokenizer", text, cure)


def _has_vocabulary(names: Iterable[str]) -> bool:
    alone = any(named_like(name, _VOCABULARIES) for name in names)
    return alone or ("merges.txt" in names and any(name.endswith("vocab.json") for name in names))


def _has_code(folder: str, seen: _Seen) -> bool:
    """Whether a tokenizer's own code reads files that only it knows."""
    config = seen.json(join(folder, "tokenizer_config.json"))
    return isinstance(config, dict) and "auto_map" in config
