"""What is refused before a tensor byte is read, and what the refusal says."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from reshard.pipeline.errors import ReshardError
from reshard.pipeline.places import Folder
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import draft
from reshard.pipeline.stores.connect import Context, open_source, open_target
from tests.support import ggufs
from tests.support.canary import touch
from tests.support.save_zero import Zero, model_path, optimizer_path, save, training

CANARY = "ran"  # what hostile files would leave in the folder that they lie in


@dataclass(frozen=True)
class Refusal:
    what: str
    code: str
    message: str


def _tensorflow(folder: Path) -> None:
    (folder / "tf_model.h5").write_bytes(b"\x89HDF")
    (folder / "flax_model.msgpack").write_bytes(b"\x00")


def _onnx(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"ONNX")


def _gguf(folder: Path) -> None:
    ggufs.save(folder / "model-Q4_K_M.gguf", {f"blk.{i}.weight": ("Q4_K", (2, 256)) for i in range(4)}, per_file=2)
    (folder / "model-Q4_K_M-00001-of-00002.gguf").unlink()


def _renamed(folder: Path) -> None:
    _gguf(folder)
    (folder / "model-Q4_K_M-00002-of-00002.gguf").rename(folder / "model-Q4_K_M.gguf")


def _nested(folder: Path) -> None:
    array = struct.pack("<IQ", 9, 1 << 40) * 1000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + array
    (folder / "model.gguf").write_bytes(head)


def _pointer(name: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"
        (folder / name).write_text(text)

    return build


def _runs(folder: Path) -> None:
    torch.save({"weight": torch.ones(3), "more": touch(folder / CANARY)}, folder / "pytorch_model.bin")


def _runs_in_metadata(folder: Path) -> None:
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(touch(folder / CANARY)))
    (folder / "__0_0.distcp").write_bytes(b"PK")


def _runs_in_a_rank(folder: Path) -> None:
    torch.save({"weight": torch.ones(3)}, folder / "model_world_size_2_rank_0.pt")
    torch.save({"weight": torch.ones(3), "more": touch(folder / CANARY)}, folder / "model_world_size_2_rank_1.pt")


def _one_rank(folder: Path) -> None:
    torch.save({"weight": torch.ones(3)}, folder / "model_world_size_2_rank_0.pt")


def _other_ranks(folder: Path) -> None:
    for rank in range(2):
        torch.save({"weight": torch.ones(3 + rank)}, folder / f"model_world_size_2_rank_{rank}.pt")


def _zero(change: Callable[[Path, Zero], object], stage: int = 3) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        made = training(stage)
        change(made.save(folder), made)

    return build


def _lacks_a_rank(step: Path, made: Zero) -> None:
    optimizer_path(step, 0).unlink()


def _has_another_step(step: Path, made: Zero) -> None:
    save(training(3, step=made.step - 1).optimizer(1), optimizer_path(step, 1))


def _has_another_world(step: Path, made: Zero) -> None:
    save(training(3, 4).optimizer(1), optimizer_path(step, 1))


def _does_not_add_up(step: Path, made: Zero) -> None:
    for rank in range(2):
        state = made.model(rank)
        state["param_shapes"][0]["embed.weight"] = torch.Size([1 << 20, 1 << 20])
        save(state, model_path(step, rank, 3))


def _has_tensor_parallelism(step: Path, made: Zero) -> None:
    (step / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"PK")


def _runs_in_a_partition(step: Path, made: Zero) -> None:
    save(made.optimizer(1) | {"more": touch(step.parent / CANARY)}, optimizer_path(step, 1))


def _names_no_step(step: Path, made: Zero) -> None:
    (step.parent / "latest").write_text("global_step10")


def _module(folder: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), folder / "pytorch_model.bin")


def _torchscript(folder: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(folder / "pytorch_model.bin"))


def _complex(folder: Path) -> None:
    torch.save({"weight": torch.ones(2, dtype=torch.complex128)}, folder / "pytorch_model.bin")


def _sparse(folder: Path) -> None:
    torch.save({"weight": torch.eye(3).to_sparse()}, folder / "pytorch_model.bin")


def _bomb(folder: Path) -> None:
    torch.save({"weight": torch.ones(1).expand(1 << 40)}, folder / "pytorch_model.bin")


def _escapes(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"weight": "../../elsewhere/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _incomplete(folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model-00001-of-00002.bin")


def _holds(*names: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        save_file({name: torch.ones(2, 2).to(dtype) for name in names}, folder / "model.safetensors")

    return build


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")


REFUSED: dict[str, Callable[[Path], None]] = {
    "only TensorFlow and Flax weights": _tensorflow,
    "only ONNX": _onnx,
    "an adapter without its model": _adapter,
    "a git-lfs pointer, safetensors": _pointer("model.safetensors"),
    "a git-lfs pointer, `.bin`": _pointer("pytorch_model.bin"),
    "a git-lfs pointer, index": _pointer("model.safetensors.index.json"),
    "a pickle that calls a function": _runs,
    "a `.metadata` that calls a function": _runs_in_metadata,
    "a rank's file that calls a function": _runs_in_a_rank,
    "a whole module, pickled": _module,
    "a TorchScript program": _torchscript,
    "complex128": _complex,
    "a sparse tensor": _sparse,
    "4 bytes that claim to be 4 TiB": _bomb,
    "an index that leaves its folder": _escapes,
    "one of two numbered files, no index": _incomplete,
    "one of two ranks": _one_rank,
    "ZeRO, a rank is missing": _zero(_lacks_a_rank),
    "ZeRO, a rank of another step": _zero(_has_another_step),
    "ZeRO, a rank of another number of ranks": _zero(_has_another_world),
    "ZeRO, shapes that the ranks do not hold": _zero(_does_not_add_up),
    "ZeRO with tensor parallelism": _zero(_has_tensor_parallelism),
    "ZeRO, `latest` names a folder that is not there": _zero(_names_no_step),
    "ZeRO, a partition that calls a function": _zero(_runs_in_a_partition),
    "ranks of two models": _other_ranks,
    "one of two parts of a GGUF model": _gguf,
    "a part of a GGUF model, renamed": _renamed,
    "a weight in fp8 without its scale": _holds("proj.weight", dtype=torch.float8_e4m3fn),
    "blocks of mxfp4 without a config": _holds("experts.up_blocks", "experts.up_scales", dtype=torch.uint8),
    "a rename that makes one name of two": _holds("norm.weight", "old.norm.weight"),
    "an expert without its third matrix": _holds("experts.0.gate_proj.weight", "experts.0.up_proj.weight"),
    "a GGUF key of nested arrays": _nested,
}


# What is asked of some of them, that others are not refused without.
ASKED: dict[str, dict[str, Any]] = {
    "a weight in fp8 without its scale": {"dtype": "bfloat16", "dequantize": True},
    "blocks of mxfp4 without a config": {"dtype": "bfloat16", "dequantize": True},
    "a rename that makes one name of two": {"rename": [{r"^old[.]": ""}]},
    "an expert without its third matrix": {"experts": "fused"},
}


def refusals() -> Iterator[Refusal]:
    """Each of REFUSED, as the product answers it; raises AssertionError when one is not refused or ran something."""
    for what, build in REFUSED.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            build(folder)
            yield _refused(what, folder)
            assert not (folder / CANARY).exists(), f"{what}: it ran"


def _refused(what: str, folder: Path) -> Refusal:
    options = Options(**ASKED.get(what, {}))
    request = Request(source=Folder(path=str(folder)), target=Folder(path=f"{folder}-out"), options=options)
    context = Context.from_env()
    try:
        draft(request, open_source(request.source, context), open_target(request.target, request.options, context))
    except ReshardError as error:
        return Refusal(what, error.code, str(error).replace(str(folder), "./model"))
    raise AssertionError(f"{what}: it is not refused")
