"""The processes that import torch and transformers once for many cases.

python -m tests.formats.child build FOLDER NAME...   builds cases below FOLDER; a line for each that is done
python -m tests.formats.child load                   answers questions, a JSON document per line
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # Else the last bit of a product depends on where in memory a matrix lies, and so on the cut of a file.
    "MKL_CBWR": "COMPATIBLE",
    "PYTHONWARNINGS": "ignore",
}


def build(folder: Path, names: list[str]) -> None:
    """Leaves ``source/``, ``expected.json`` and ``answer.json`` of every case."""
    from tests.formats.cases import CASES
    from tests.formats.loaders import answer

    for name in names:
        source = folder / name / "source"
        source.mkdir(parents=True)
        built = CASES[name].build(source)
        expected = {path: {n: described(t) for n, t in state.items()} for path, state in built.expected.items()}
        (folder / name / "expected.json").write_text(json.dumps(expected))
        (folder / name / "answer.json").write_text(json.dumps(None if built.model is None else answer(built.model)))
        print(name, flush=True)


def described(tensor: Any) -> list[Any]:
    """(dtype, shape, sha256 of the bytes) by torch's own view of a tensor, in the format's names."""
    import torch

    names = {
        torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
        torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.bool: "BOOL",
    }  # fmt: skip
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [names[tensor.dtype], list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def load() -> None:
    """Each line of the input is {loader, folder, dtype}; each of the output the loader's answer or error."""
    from tests.formats.loaders import ask, ids

    for line in sys.stdin:
        question = json.loads(line)
        folder = Path(question["folder"])
        loader = question["loader"]
        said = ids(folder) if loader == "tokenizer" else ask(loader, folder, question["dtype"])
        print(json.dumps(question | said), flush=True)


if __name__ == "__main__":
    os.environ |= OFFLINE
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]), sys.argv[3:])
    else:
        load()
