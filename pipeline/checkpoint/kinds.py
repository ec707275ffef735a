"""Which kind of weights a file holds, by its name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from posixpath import basename

from reshard.pipeline.checkpoint.parts import DISTRIBUTED_METADATA

# What trainers leave beside the weights, and no weights: transformers' Trainer, accelerate's `save_state`, DeepSpeed's
# ZeRO (whose model states are parts, put together where all of them are there), torchtune, verl.
TRAINERS = (
    "training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*", "sampler*",
    "arguments.pt", "trainer_state*", "zero_pp_rank_*", "*_optim_states.pt", "recipe_state*", "optim_world_size_*",
    "extra_state_*",
)  # fmt: skip

# What gpt-oss has beside its safetensors for GPUs of Apple's: its own format under a name of torch's.
_METAL = "metal/model.bin"
_OPENVINO = ("openvino_*.bin",)  # what optimum-intel writes beside its .xml

# Weights in formats that are not read, by their suffixes; pickles of anything else are among them.
FOREIGN = {
    ".bin": "PyTorch", ".pt": "PyTorch", ".pth": "PyTorch", ".ckpt": "PyTorch", ".pth.tar": "PyTorch",
    ".jit": "TorchScript", ".distcp": "PyTorch distributed",
    ".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".onnx_data": "ONNX", ".gguf": "GGUF", ".ggml": "GGML",
    ".ot": "Rust", ".tflite": "TFLite", ".mlmodel": "Core ML", ".npz": "NumPy", ".nemo": "NeMo", ".engine": "TensorRT",
    ".pkl": "pickle", ".pickle": "pickle", ".joblib": "pickle",
}  # fmt: skip

# Language models of KenLM's, which decoders of speech have beside the weights (pyctcdecode).
_KENLM = re.compile(r"(?:^|/)language_model/[^/]*gram[^/]*\.bin$")
_ONNX_DATA = re.compile(r"\.onnx(_data_\d+|\.data)$")  # of models that are larger than one file may be


def foreign_format(path: str) -> str | None:
    """The kind of weights in another format that ``path`` holds, by its name; None for everything else."""
    if basename(path) == DISTRIBUTED_METADATA:
        return FOREIGN[".distcp"]
    if _KENLM.search(path):
        return None
    known = {"Metal": path == _METAL, "OpenVINO": named_like(path, _OPENVINO), "ONNX": _ONNX_DATA.search(path.lower())}
    return next((kind for kind, named in known.items() if named), FOREIGN.get(suffix_of(path).lower()))


def suffix_of(path: str) -> str:
    name = basename(path)
    if name.endswith(".pth.tar"):  # no tar archive: torch.save under the name that torch's own examples have
        return ".pth.tar"
    dot = name.rfind(".")
    return name[dot:] if dot >= 0 else ""


def named_like(path: str, patterns: Iterable[str]) -> bool:
    """Whether the file's own name, whatever its folder, matches one of the globs."""
    return any(fnmatchcase(basename(path), pattern) for pattern in patterns)
