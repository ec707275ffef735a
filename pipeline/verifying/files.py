"""Every file beside the weights, held against the source's: the same bytes, what reshard writes, or a finding."""

from __future__ import annotations

from collections.abc import Set
from posixpath import basename, dirname, join
from typing import NamedTuple

from reshard.pipeline.check import Check, Result, some
from reshard.pipeline.checkpoint.discover import SOUGHT_STEMS, is_weights, set_name
from reshard.pipeline.checkpoint.kinds import foreign_format, named_like
from reshard.pipeline.checkpoint.tool_files import is_tool_file, leftover
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.planning.beside import describes, excluded, settings_files, sort_out
from reshard.pipeline.planning.model import CARD, MANIFEST, STATEMENTS
from reshard.pipeline.planning.select import edited_config
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.card import without_block
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import StoredFile, same_by_hash
from reshard.pipeline.verifying.digests import first_unequal
from reshard.pipeline.verifying.json_difference import Difference, json_difference
from reshard.pipeline.verifying.opened import UNCHANGED, OpenedSide
from reshard.pipeline.verifying.structure import Finding
from reshard.pipeline.verifying.tokenizer import compared_by_behaviour
from reshard.pipeline.verifying.tokenizer_files import TOKENIZER_FILES

_CONFIGS = ("*config*.json", "model_index.json")
# What loaders, tokenizers, processors and generation read or run by themselves at the root or beside weights: settings
# of transformers, diffusers and sentence-transformers, of quantisers, adapters, which transformers attaches, and code.
# Weights under names that they look for are read, too.
_READ_BY_LOADERS = (
    "config.json", "generation_config.json", "model_index.json", "modules.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "params.json", "*processor_config.json", "chat_template.*",
    "quant*_config.json", "hf_quant_config.json", "adapter_config.json", "adapter_model.*", "*.py", "*.jinja",
    "tf_model*.h5", "flax_model*.msgpack", "consolidated*.safetensors", "consolidated.*.pth", *TOKENIZER_FILES,
)  # fmt: skip
# Folders below those, from which transformers takes chat templates and the code of `generate`.
_READ_FOLDERS = ("additional_chat_templates", "custom_generate")
# A folder without any of these is not a model that loaders know, and what completes it takes nothing away.
_ROOTS = ("config.json", "model_index.json", "modules.json", "adapter_config.json")


def check_files(source: OpenedSide, output: OpenedSide, changes: Options, deep: bool, tick: Tick) -> Check:
    """Whether every file of the output is accounted for, and everything that a copy carries is there.

    The check of tokenizers judges theirs. Files that are argued to mean the same, and added ones that no loader reads,
    are named, and the check is inconclusive.
    """
    behaves = compared_by_behaviour(source.source.files(), output.source.files())
    found = compare_files(source, output, changes, behaves, deep, tick)
    findings = list(map(str, found.findings))
    open_ = sorted([*found.undecided, *found.unread])
    result: Result = "failed" if findings else "inconclusive" if open_ else "passed"
    reason = "; ".join([*some(open_, 20), *_card(source.source, output.source)])
    return Check("other files", result, "every file, byte for byte", reason, found.figures, some(findings))


class Compared(NamedTuple):
    """What differs between the files beside the weights, what cannot be decided, and what takes ``deep`` to decide."""

    findings: list[Finding]
    undecided: list[str]
    unread: list[str]
    figures: dict[str, int]


def compare_files(
    source: OpenedSide, output: OpenedSide, changes: Options, but: Set[str], deep: bool, tick: Tick
) -> Compared:
    """Every file of the output, and everything that a copy carries, ``but`` those that are judged elsewhere.

    A file is accounted for by the source's bytes; as written by reshard (weights, index, manifest and card have checks
    or owners of their own); or by ``changes``: a config's dtype, what is excluded. Files above CONFIG_MAX are
    read only where ``deep``.
    """
    theirs, ours = source.source.files(), output.source.files()
    carried = {file.path for file in sort_out(theirs, source.found, source.opened, changes)[0]}
    written = {*output.found.indexes, *(file.path for file in output.files)}
    accounted = {*written, *but, CARD, MANIFEST, *STATEMENTS}
    accounted |= {path for path in ours if describes(path, map(dirname, written))}
    folders = _model_folders(source, output)
    findings: list[Finding] = []
    settings = settings_files(source.opened)
    configs = {join(part.name.folder, "config.json") for part in source.found.sets}  # whose dtype a run changes
    undecided: list[str] = []
    unread: list[str] = []
    figures = {"files": 0, "added": 0, "not_compared": 0}
    made = {path for path in settings if not excluded(changes, path)} if MANIFEST in ours else set()  # others make none
    for path in sorted(path for path in (carried | made | ours.keys()) - accounted if not is_tool_file(path)):
        was, is_ = theirs.get(path), ours.get(path)
        figures["files"] += 1
        if is_ is None:
            findings.append(Finding("file_missing", f"{path} is missing", path))
        elif was is None and path in settings:
            expected = settings[path].encode()
            if is_.size != len(expected) or b"".join(output.source.read(is_, 0, is_.size)) != expected:
                text = f"{path} differs from the settings stored with the source's weights"
                findings.append(Finding("file_changed", text, path))
        elif was is None and leftover(path) and not _is_read(path, folders):
            continue
        elif was is None:
            figures["added"] += 1
            if _is_read(path, folders):
                findings.append(Finding("file_added", f"{path} is not in the source, and loaders read it", path))
            else:
                undecided.append(f"{path} is not in the source")
        elif not deep and was.size == is_.size > CONFIG_MAX and same_by_hash(was, is_) is None:
            figures["not_compared"] += 1
            unread.append(f"{path} was not compared (use --deep)")
        elif difference := _difference(
            source.source, was, output.source, is_, changes if path in configs else UNCHANGED, deep, tick
        ):
            if difference.same_meaning:
                undecided.append(f"{path} {difference.text}")
            else:
                findings.append(Finding("file_changed", f"{path} {difference.text}", path))
    return Compared(findings, undecided, unread, figures)


def _card(source: Source, output: Source) -> list[str]:
    """Whether the model card has a text of its own, reshard's block apart: it belongs to the output's owner."""
    texts = []
    for side in (source, output):
        file = side.files().get(CARD)
        content = b"" if file is None else b"".join(side.read(file, 0, min(file.size, CONFIG_MAX)))
        texts.append(without_block(content).strip())
    return [] if texts[0] == texts[1] else [f"{CARD} differs (ignored)"]


def _model_folders(source: OpenedSide, output: OpenedSide) -> set[str]:
    """The root and the folders of weights, where the source is a model there: `--config-from` completes others."""
    folders = {"", *(checkpoint.name.folder for checkpoint in output.opened.checkpoints)}
    return {folder for folder in folders if any(join(folder, root) in source.source.files() for root in _ROOTS)}


def _is_read(path: str, folders: set[str]) -> bool:
    folder = dirname(path)
    if basename(folder) in _READ_FOLDERS:
        return dirname(folder) in folders
    weights = (is_weights(path) or foreign_format(path) is not None) and set_name(path).stem in SOUGHT_STEMS
    return folder in folders and (weights or named_like(path, _READ_BY_LOADERS))


def _difference(
    source: Source, was: StoredFile, output: Source, is_: StoredFile, changes: Options, deep: bool, tick: Tick
) -> Difference | None:
    """What is different about a file that both sides have; None where its bytes are accounted for."""
    if same_by_hash(was, is_):
        return None
    if was.path.endswith(".json") and max(was.size, is_.size) <= CONFIG_MAX:
        before, after = (b"".join(side.read(file, 0, file.size)) for side, file in ((source, was), (output, is_)))
        if changes.dtype != "keep":
            before = edited_config(was.path, before.decode("utf-8", "replace"), changes, source.files()).encode()
        return None if before == after else json_difference(before, after, config=named_like(was.path, _CONFIGS))
    if was.size != is_.size:
        return Difference(False, f"has {is_.size:,} bytes, but {was.size:,} in the source")
    if not deep and was.size > CONFIG_MAX:
        return Difference(False, "has a different hash")
    if found := first_unequal(source.read(was, 0, was.size), output.read(is_, 0, is_.size), tick):
        return Difference(False, f"differs starting at byte {found[0] + found[1]}")
    return None
