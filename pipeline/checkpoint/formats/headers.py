"""The header of a weight file that loaders read as it is, told by its first bytes: safetensors or GGUF."""

from __future__ import annotations

from reshard.pipeline.checkpoint.formats import gguf, safetensors


def parse_header(data: bytes | memoryview, *, file: str, file_size: int) -> safetensors.Header:
    """The header of a file of ``file_size`` bytes, of which ``data`` holds the whole header or more.

    No safetensors header begins as GGUF files do: it would be longer than the format allows. Raises BadHeader or
    BadLength naming ``file``, and LfsPointer.
    """
    parse = gguf.parse_header if bytes(data[:4]) == gguf.MAGIC else safetensors.parse_header
    return parse(data, file=file, file_size=file_size)
