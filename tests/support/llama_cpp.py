"""llama.cpp itself, by its shared libraries: the calls of gguf-split, and its loader. Runs in a process of its own.

python -m tests.support.llama_cpp LIBRARIES WHOLE PARTS...  prints what both make of a model and its parts, as JSON
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Init(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p)))


class _Params(ctypes.Structure):
    """``llama_model_params``, which is passed by value and is smaller than this in every release."""

    _fields_ = (("_", ctypes.c_ubyte * 512),)


class LlamaCpp:
    """The libraries of one folder."""

    def __init__(self, folder: Path) -> None:
        def library(name: str) -> ctypes.CDLL:
            return ctypes.CDLL(str(next(folder.glob(f"lib{name}*.so*"))), mode=ctypes.RTLD_GLOBAL)

        self._ggml, devices, self._llama = library("ggml-base"), library("ggml."), library("llama.")
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name, answer, arguments in (
            ("gguf_init_from_file", pointer, (text, _Init)),
            ("gguf_init_empty", pointer, ()),
            ("gguf_get_n_tensors", ctypes.c_int64, (pointer,)),
            ("gguf_get_tensor_name", text, (pointer, ctypes.c_int64)),
            ("ggml_get_tensor", pointer, (pointer, text)),
            ("gguf_add_tensor", None, (pointer, pointer)),
            ("gguf_set_kv", None, (pointer, pointer)),
            ("gguf_set_val_u16", None, (pointer, text, ctypes.c_uint16)),
            ("gguf_set_val_i32", None, (pointer, text, ctypes.c_int32)),
            ("gguf_get_meta_size", ctypes.c_size_t, (pointer,)),
            ("gguf_get_meta_data", None, (pointer, pointer)),
        ):
            function = getattr(self._ggml, name)
            function.restype, function.argtypes = answer, arguments
        self._llama.llama_model_default_params.restype = _Params
        self._llama.llama_model_load_from_file.restype = pointer
        self._llama.llama_model_load_from_file.argtypes = (text, _Params)
        self._llama.llama_model_n_params.restype = ctypes.c_uint64
        self._llama.llama_model_n_params.argtypes = (pointer,)
        devices.ggml_backend_load_all_from_path.argtypes = (text,)
        devices.ggml_backend_load_all_from_path(str(folder).encode())

    def _open(self, path: Path) -> tuple[Any, Any]:
        tensors = ctypes.c_void_p()
        opened = self._ggml.gguf_init_from_file(str(path).encode(), _Init(True, ctypes.pointer(tensors)))
        if not opened:
            raise ValueError(f"llama.cpp does not read {path}")
        return opened, tensors

    def _names(self, opened: Any) -> list[bytes]:
        return [self._ggml.gguf_get_tensor_name(opened, i) for i in range(self._ggml.gguf_get_n_tensors(opened))]

    def _add(self, made: Any, names: Sequence[bytes], tensors: Any) -> None:
        for name in names:
            self._ggml.gguf_add_tensor(made, self._ggml.ggml_get_tensor(tensors, name))

    def _header(self, made: Any) -> bytes:
        size = self._ggml.gguf_get_meta_size(made)
        data = ctypes.create_string_buffer(size)
        self._ggml.gguf_get_meta_data(made, data)
        return data.raw

    def split(self, whole: Path, parts: Sequence[Path]) -> list[bytes]:
        """The headers that gguf-split writes where it cuts ``whole`` as ``parts`` are (tools/gguf-split)."""
        source, tensors = self._open(whole)
        made = []
        for number, part in enumerate(parts):
            one = self._ggml.gguf_init_empty()
            if number == 0:
                self._ggml.gguf_set_kv(one, source)
            self._ggml.gguf_set_val_u16(one, b"split.no", number)
            self._ggml.gguf_set_val_u16(one, b"split.count", 0)
            self._ggml.gguf_set_val_i32(one, b"split.tensors.count", self._ggml.gguf_get_n_tensors(source))
            self._add(one, self._names(self._open(part)[0]), tensors)
            made.append(one)
        for one in made:
            self._ggml.gguf_set_val_u16(one, b"split.count", len(parts))
        return [self._header(one) for one in made]

    def merge(self, parts: Sequence[Path]) -> bytes:
        """The header that gguf-split writes where it merges ``parts``."""
        made = self._ggml.gguf_init_empty()
        for number, part in enumerate(parts):
            opened, tensors = self._open(part)
            if number == 0:
                self._ggml.gguf_set_val_u16(opened, b"split.count", 0)
                self._ggml.gguf_set_kv(made, opened)
            self._add(made, self._names(opened), tensors)
        return self._header(made)

    def parameters(self, first: Path) -> int:
        """How many parameters the model has that llama.cpp loads from ``first`` and the parts beside it."""
        params = self._llama.llama_model_default_params()
        model = self._llama.llama_model_load_from_file(str(first).encode(), params)
        if not model:
            raise ValueError(f"llama.cpp does not load {first}")
        return int(self._llama.llama_model_n_params(model))


def main() -> None:
    llama = LlamaCpp(Path(sys.argv[1]))
    whole, *parts = map(Path, sys.argv[2:])
    headers = [*llama.split(whole, parts), llama.merge(parts)]
    print(
        json.dumps(
            {
                "headers": [[len(header), hashlib.sha256(header).hexdigest()] for header in headers],
                "parameters": [llama.parameters(path) for path in (whole, parts[0])],
            }
        )
    )


if __name__ == "__main__":
    main()
