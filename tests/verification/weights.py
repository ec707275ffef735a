"""Safetensors files taken apart and put together again by hand, to break them in ways that no writer has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

INDEX = "model.safetensors.index.json"


class Array(NamedTuple):
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Arrays = dict[str, Array]


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:end])
    return header, content[end:]


def join(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path: Path) -> Arrays:
    header, data = split(path)
    header.pop("__metadata__", None)
    return {
        name: Array(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }


def write(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> None:
    """One file; without ``metadata`` the usual one."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [at, at + len(array.data)],
        }
        at += len(array.data)
    join(path, header, b"".join(array.data for array in arrays.values()))


class Folder:
    """A sharded output that is about to be broken."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def shards(self) -> list[Path]:
        return sorted(self.path.glob("model-*.safetensors"))

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def home(self, name: str) -> Path:
        """The shard that holds a tensor."""
        return next(path for path in self.shards if name in read(path))

    def names(self) -> Iterator[str]:
        for path in self.shards:
            yield from read(path)

    def get(self, name: str) -> Array:
        return read(self.home(name))[name]

    def put(self, name: str, array: Array) -> None:
        """Replace a tensor where it is, and mend the index's total."""
        home = self.home(name)
        write(home, read(home) | {name: array})
        self.mend()

    def change(self, name: str, change: Callable[[bytearray], object]) -> None:
        """Change a tensor's bytes in place."""
        array = self.get(name)
        data = bytearray(array.data)
        change(data)
        self.put(name, array._replace(data=bytes(data)))

    def drop(self, *names: str) -> None:
        """Take tensors out of files and index, so that both still agree."""
        for name in names:
            home = self.home(name)
            left = {n: a for n, a in read(home).items() if n != name}
            if left:
                write(home, left)
            else:
                home.unlink()
        self.mend()

    def index(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the index."""
        content = json.loads((self / INDEX).read_text())
        change(content)
        (self / INDEX).write_text(json.dumps(content, indent=2))

    def mend(self) -> None:
        """Make the index agree with the files again, as a writer does that lost something before it began."""

        def again(index: dict[str, Any]) -> None:
            index["weight_map"] = {name: path.name for path in self.shards for name in read(path)}
            index["metadata"]["total_size"] = sum(len(a.data) for path in self.shards for a in read(path).values())

        self.index(again)

    def json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((self / name).read_text())
        change(content)
        (self / name).write_text(json.dumps(content))
