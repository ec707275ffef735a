"""What is in the files, and what became of it: checkpoint, proof."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard.pipeline.errors.base import ReshardError

# A table: an error is three lines, so there are no blank lines within a family.
# fmt: off


class CheckpointError(ReshardError, code="checkpoint", exit_code=5):
    message = "{file}: {why}"
    hint = "the source file is corrupt; get a good copy from its author"
class BadHeader(CheckpointError, code="checkpoint.header"): ...
class BadLength(CheckpointError, code="checkpoint.length"):
    message = "{file} is {actual} bytes, but its header requires {expected}"
    hint = "the file is incomplete or was modified; get a good copy from its author"
class BadIndex(CheckpointError, code="checkpoint.index"): ...
class AbsentFile(
    BadIndex, code="checkpoint.absent_file", cure="get it from its author, or skip the index with --exclude"
):
    message = "{file} refers to a missing file: {other}"
    hint = "{cure}"
class LostPart(BadIndex, code="checkpoint.lost_part"):
    hint = "get the missing file from where the others came from"
class AmbiguousWeights(
    BadIndex, code="checkpoint.ambiguous", cure="remove the outdated one, or skip one of them with --exclude"
):
    message = "{file}: {other} {why}"
    hint = "{cure}"
class UnsafePath(
    CheckpointError,
    code="checkpoint.unsafe_path",
    why="points outside the repository",
    cure="do not use this checkpoint unless you trust its author",
):
    message = "{file}: unsafe path {path}: {why}"
    hint = "{cure}"
class FolderLink(UnsafePath, code="checkpoint.unsafe_path.folder"):
    message = "{file}: {path} is a symbolic link to a folder, and reshard does not follow such links"
    hint = "if {to} is the model, pass that path; otherwise, remove the link or replace it with a copy"
class UnsafeName(CheckpointError, code="checkpoint.unsafe_name"):
    message = "{file}: cannot publish tensor name {tensor} to a repository: it has control or bidirectional characters"
    hint = "do not use this checkpoint unless you trust its author; to keep the name, publish to a folder"
class NameTooLong(CheckpointError, code="checkpoint.name_too_long"):
    message = "{file}: one component of its path is {bytes} bytes long, but file systems allow at most {most}"
    hint = "rename the source file that this path comes from, or skip it with --exclude"
class PathTaken(CheckpointError, code="checkpoint.path_taken"):
    message = "{file} and {other} cannot both be written: {why}"
    hint = "rename one of them in the source or in the target, or skip it with --exclude"
class DuplicateTensor(CheckpointError, code="checkpoint.duplicate_tensor"):
    message = "duplicate tensor {tensor}: in {file} and again in {other}"
class BadScale(CheckpointError, code="checkpoint.scale"):
    message = "{tensor}: {why}"
    hint = "the source is corrupt, or its quantization is not supported; remove --dequantize to copy it unchanged"
class UnsafePickle(CheckpointError, code="checkpoint.unsafe_pickle"):
    message = "{file} would run {what} when unpickled; nothing was run"
    hint = "do not load it with any tool unless you trust its author; if it is a pickled model, ask for its state dict"
class BadPickle(CheckpointError, code="checkpoint.pickle"): ...
class PickleCutShort(BadPickle, code="checkpoint.pickle.cut"):
    message = "{file}: truncated pickle: it ends after {bytes} bytes"
    hint = "the file is incomplete or was modified; get a good copy from its author"
class BadArchive(
    CheckpointError, code="checkpoint.archive", cure="the source file is corrupt; get a good copy from its author"
):
    hint = "{cure}"
class BadTiling(CheckpointError, code="checkpoint.tiling"):
    message = "{file}: the parts of {tensor} do not add up to the whole: {why}"
class BadManifest(CheckpointError, code="checkpoint.manifest"):
    hint = "publish again with `reshard run`, or install a reshard release that supports this manifest"
class LfsPointer(CheckpointError, code="checkpoint.pointer"):
    message = "{file} is a Git LFS pointer, not the file itself"
    hint = "run `git lfs install` and `git lfs pull` in the clone, or use the repository instead of the folder"
class Unsupported(CheckpointError, code="checkpoint.unsupported"):
    message = "cannot convert {file} to safetensors: {what}"
    hint = "convert it with the tool that made it, then reshard the result"
class NotRead(
    Unsupported, code="checkpoint.not_read", cure="convert it with the tool that made it, then reshard the result"
):
    message = "{file}: {what} is not supported"
    hint = "{cure}"


class ProofError(ReshardError, code="proof", exit_code=6):
    """The fact ``checks``, where it has one: what was checked until then, the failed check last (check.py)."""

    message = "{what}"
    hint = "nothing was published; to start over and re-read all files, {again}"


# What errors say was read instead: a hash would tell of what a redirect led to, which may be nobody else's business.
OTHER_BYTES = "different bytes"


class SourceCorrupt(ProofError, code="proof.source_corrupt"):
    message = "{file} at {place} does not match its checksum: expected {expected}, got {actual}"
    hint = "nothing was published; {again}; if that fails too, the stored file is corrupt: report it to its owner"
class DigestsDiffer(ProofError, code="proof.taps"):
    message = "{tensor}: digest on read ({read}) does not match digest on write ({written})"
class ReceiptWrong(ProofError, code="proof.receipt"):
    message = "{file}: {why}"

    def __init__(self, void: Iterable[str] = (), **facts: Any) -> None:
        super().__init__(**facts)
        self.void = frozenset(void)  # digests of the shards that are to be copied again
class ReloadFailed(ProofError, code="proof.reload"):
    message = "the result does not load the same way as the source (checked on the meta device): {why}"
    hint = "nothing was published; {findings}"
class ModelCheckRequired(
    ProofError,
    code="proof.model_required",
    cure="use a model that transformers has a class for, or remove --require to check only the structure",
):
    message = "--require model is set, but only the structure check passed: {why}"
    hint = "{cure}"
class ReadBackDiffers(ProofError, code="proof.read_back"):
    message = "{place} at {commit} differs from the plan: {why}"
    hint = "the result was published; {findings}; to undo the publication, use {undo}"
class ChangeOverwritten(ProofError, code="proof.overwritten"):
    message = "{target}: commit {commit} overwrote a concurrent change to {paths}, and the Hub did not reject it"
    hint = "the overwritten change is in commit {parent}; restore it from there, or undo commit {commit} with {undo}"
class BadSignature(ProofError, code="proof.signature"):
    message = "{file}: {why}"
    hint = "check that you are using the signer's current public key; if you are, do not trust these files"
class NotSigned(BadSignature, code="proof.signature.missing"):
    message = "{place} is not signed: it has no {file}"
    hint = "ask its publisher to sign it; if you publish it, run `reshard run` with --sign"
class SignedElsewhere(BadSignature, code="proof.signature.elsewhere"):
    message = "{file} in {place} is the signature for {name}"
    hint = "verify {name} instead; if it was renamed to {place}, sign it again with --sign and --force"
class VerifyFailed(ProofError, code="proof.verify"):
    message = "{place}: {failed} of {checks} checks failed; first finding: {first}"
    hint = "use --json for every finding; docs/verification.md explains each check"
class AuditFailed(ProofError, code="proof.audit"):
    message = "{what}: {failed} of {models} models failed the audit; the worst is {place}: {first}"
    hint = "use --json for every finding; docs/guides/auditing.md explains each kind"
