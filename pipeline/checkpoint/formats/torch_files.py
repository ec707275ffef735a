"""Any file of `torch.save`: which of its three formats it has, and what it holds."""

from __future__ import annotations

from shlex import quote

from reshard.pipeline.checkpoint.formats import torch_legacy, torch_zip
from reshard.pipeline.checkpoint.formats.pointers import refuse_pointer
from reshard.pipeline.checkpoint.formats.ranged import Read, read_bytes
from reshard.pipeline.errors import BadArchive, Unsupported
from reshard.pipeline.tensors import Contents, StoredFile

# Until 2017 torch wrote tar archives (`torch/serialization.py`, `legacy_load`): their mark stands at this byte.
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_PROBE = _TAR_MAGIC_AT + len(_TAR_MAGIC)


def read_torch(read: Read, file: StoredFile, number: int) -> Contents:
    """The tensors of a file of `torch.save`, as pieces of source file ``number``, without reading a storage.

    Raises UnsafePickle, Unsupported and the rest of the CheckpointError family, naming the file.
    """
    head = read_bytes(read, file, 0, min(_PROBE, file.size))
    refuse_pointer(head, file.path)
    if head.startswith(torch_zip.MAGIC):
        return torch_zip.read_torch_zip(read, file, number)
    if torch_legacy.is_legacy(head):
        return torch_legacy.read_torch_legacy(read, file, number)
    if head[_TAR_MAGIC_AT:] == _TAR_MAGIC:
        raise Unsupported(file=file.path, what="the tar format of torch before 2017")
    cure = f"if it has another format, skip it with --exclude {quote(file.path)}; otherwise, get a good copy"
    raise BadArchive(file=file.path, why="not written by torch.save", cure=cure)
