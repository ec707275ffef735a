"""What is in the files, and what became of it: checkpoint, proof."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard.pipeline.errors.base import ReshardError

# A table: an error is three lines, so there are no blank lines within a family.
# fmt: off


class CheckpointError(ReshardError, code="checkpoint", exit_code=5):
    message = "{file}: {why}"
    hint = "the source is broken; get the file again from its author"
class BadHeader(CheckpointError, code="checkpoint.header"): ...
class BadLength(CheckpointError, code="checkpoint.length"):
    message = "{file} is {actual} bytes long, and its header needs {expected}"
    hint = "the file was truncated or modified; get it again from its author"
class BadIndex(CheckpointError, code="checkpoint.index"): ...
class AbsentFile(BadIndex, code="checkpoint.absent_file"):
    message = "{file}: it names {other}, which is not there"
    hint = "get it from its author; `reshard run` and `reshard plan` take --exclude to do without the index"
class AmbiguousWeights(BadIndex, code="checkpoint.ambiguous"):
    message = "{file}: {other} beside it {why}"
    hint = "remove the outdated one, or leave one of them out: `reshard run` and `reshard plan` take --exclude"
class UnsafePath(CheckpointError, code="checkpoint.unsafe_path", why="leaves the repository"):
    message = "{file} names {path}, which {why}"
    hint = "do not use this checkpoint before you know who made it"
class FolderLink(UnsafePath, code="checkpoint.unsafe_path.folder"):
    message = "{file}: {path} is a link to a folder, which is not followed"
    hint = "give {to} as the place, if that is the model; otherwise remove the link, or put a copy in its place"
class UnsafeName(CheckpointError, code="checkpoint.unsafe_name"):
    message = "{file} names a tensor {tensor}; control characters and bidirectional marks are not published to a Hub"
    hint = "do not use this checkpoint before you know who made it; a folder as the target takes any name"
class NameTooLong(CheckpointError, code="checkpoint.name_too_long"):
    message = "{file}: a part of its path has {bytes} bytes, and file systems take {most}"
    hint = "rename the source file that it is called after, or leave it out with --exclude"
class PathTaken(CheckpointError, code="checkpoint.path_taken"):
    message = "{file} and {other} cannot both be written: {why}"
    hint = "rename one of them at the source or in the target, or leave it out with --exclude"
class DuplicateTensor(CheckpointError, code="checkpoint.duplicate_tensor"):
    message = "{tensor} is in {file} and again in {other}"
class BadScale(CheckpointError, code="checkpoint.scale"):
    message = "{tensor}: {why}"
    hint = "the source is broken, or quantised in another way than is known here; leave out --dequantize to keep it so"
class UnsafePickle(CheckpointError, code="checkpoint.unsafe_pickle"):
    message = "{file} asks to run {what}; nothing was run"
    hint = "load it with no tool before you know who made it; of a model pickled whole, ask them for the state dict"
class BadPickle(CheckpointError, code="checkpoint.pickle"): ...
class PickleCutShort(BadPickle, code="checkpoint.pickle.cut"):
    message = "{file}: a pickle ends in the middle, after {bytes} bytes"
    hint = "the file was truncated or modified; get it again from its author"
class BadArchive(CheckpointError, code="checkpoint.archive"): ...
class BadTiling(CheckpointError, code="checkpoint.tiling"):
    message = "{file}: the parts of {tensor} do not make up the whole: {why}"
class BadManifest(CheckpointError, code="checkpoint.manifest"):
    hint = "publish again with `reshard run`, or use a release of reshard that knows it"
class LfsPointer(CheckpointError, code="checkpoint.pointer"):
    message = "{file} is a git-lfs pointer and not the file; fetch it with `git lfs pull`"
    hint = "run `git lfs install` and `git lfs pull` in that clone, or name the repository instead of the folder"
class Unsupported(CheckpointError, code="checkpoint.unsupported"):
    message = "{file}: {what} cannot be held in safetensors"
    hint = "convert it with the tool that made it, then submit the result"
class NotRead(
    Unsupported, code="checkpoint.not_read", cure="convert it with the tool that made it, then submit the result"
):
    message = "{file}: {what} is not read"
    hint = "{cure}"


class ProofError(ReshardError, code="proof", exit_code=6):
    """The fact ``checks``, where it has one: what was checked until then, the failed check last (check.py)."""

    message = "{what}"
    hint = "nothing was published; to read everything again, {again}"


# What errors say was read instead: a hash would tell of what a redirect led to, which may be nobody else's business.
OTHER_BYTES = "other bytes"


class SourceCorrupt(ProofError, code="proof.source_corrupt"):
    message = "{file} at {place} does not match its checksum: expected {expected}, read {actual}"
    hint = "nothing was published; the stored file is damaged, or was on the way: {again}, then tell its owner"
class DigestsDiffer(ProofError, code="proof.taps"):
    message = "{tensor} was read as {read} and written as {written}"
class ReceiptWrong(ProofError, code="proof.receipt"):
    message = "{file}: {why}"

    def __init__(self, void: Iterable[str] = (), **facts: Any) -> None:
        super().__init__(**facts)
        self.void = frozenset(void)  # digests of the shards that are to be copied again
class ReloadFailed(ProofError, code="proof.reload"):
    message = "the reload on the meta device differs from the source's: {why}"
    hint = "nothing was published; {findings}"
class ModelCheckRequired(
    ProofError,
    code="proof.model_required",
    cure="give a model whose class transformers has; or leave out --require, and its structure is checked",
):
    message = "--require model, but the reload can only be structural: {why}"
    hint = "{cure}"
class ReadBackDiffers(ProofError, code="proof.read_back"):
    message = "{place} at {commit} is not what was planned: {why}"
    hint = "it stands as it is; {findings}; if it is wrong, undo it by {undo}"
class ChangeOverwritten(ProofError, code="proof.overwritten"):
    message = "{target}: commit {commit} replaced what others had just changed in {paths}; the Hub did not refuse it"
    hint = "what they changed is in commit {parent}; put it back, or undo ours by {undo}"
class VerifyFailed(ProofError, code="proof.verify"):
    message = "{place}: {failed} of {checks} checks failed; the first finding: {first}"
    hint = "--json has every finding, docs/verification.md what each check proves"
