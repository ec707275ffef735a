"""Experts of a mixture, stacked and cut: what transformers makes of them, bit for bit, and what is no plain stack."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from reshard.pipeline.errors import BadExperts
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.experts import arranged
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.tensors import Piece, Tensor
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.formats.models import model_of
from tests.pipeline.conftest import Run
from tests.support.measured import within

State = dict[str, torch.Tensor]
SEPARATE = {"MixtralForCausalLM": "separate-mixtral", "DeepseekV3ForCausalLM": "separate"}


def read(folder: Path) -> State:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def results(out: Path, source: Path, meta_loader: MetaLoader, **changes: Any) -> dict[str, tuple[str, str]]:
    made, was = (open_source(parse_place(str(place)), Context.from_env()) for place in (out, source))
    found = verify(made, was, meta_loader, deep=True, changes=Options(**changes))
    return {check.name: (check.result, check.reason) for check in found}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEPARATE)
def test_both_ways_are_those_of_transformers(kind: str, tmp_path: Path, go: Run, meta_loader: MetaLoader) -> None:
    """What `save_pretrained` writes becomes what the model holds, and that becomes what it wrote; both are loaded."""
    model, saved, fused = model_of(kind).to(torch.bfloat16), tmp_path / "saved", tmp_path / "fused"
    model.save_pretrained(saved)
    # transformers names the block of a Mixtral otherwise in memory
    rename: Any = [{"[.]block_sparse_moe[.]": ".mlp."}] if kind == "MixtralForCausalLM" else []
    report = go(saved, fused, size=20_000, experts="fused", rename=rename)
    held, made = model.state_dict(), read(fused)
    stacks = [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert stacks and not [name for name in made if "experts.0." in name]
    assert_same({name: made[name] for name in stacks}, {name: held[name] for name in stacks})
    assert any(note.startswith("--experts fused: ") for note in report.plan.notes)
    assert "experts were fused" in (fused / "README.md").read_text()
    checks = results(fused, saved, meta_loader)
    # Only the output itself says that it is stacked; whoever gives the same options is told that it is right.
    assert checks["same bytes"][0] == checks["class of model"][0] == "passed"
    assert checks["same tensors"][0] == "inconclusive"
    assert "options that only the output's manifest states: --experts fused" in checks["same tensors"][1]
    asked = results(fused, saved, meta_loader, experts="fused", rename=rename)
    assert asked["same bytes"][0] == asked["same tensors"][0] == asked["class of model"][0] == "passed"
    back: Any = [{"[.]mlp[.]": ".block_sparse_moe."}] if rename else []
    go(fused, tmp_path / "back", size=20_000, experts=SEPARATE[kind], rename=back)
    assert_same(read(tmp_path / "back"), read(saved))
    assert results(tmp_path / "back", saved, meta_loader)["same bytes"][0] == "passed"


def test_a_hostile_name_is_matched_in_a_time_that_its_length_gives() -> None:
    names = [f"{'experts.0.' * 20_000}\n", f"{'experts.' * 20_000}\n"]
    hostile = [Tensor(name, "F32", (1,), (Piece(0, 0, (0,), (1,)),)) for name in names]
    start = time.process_time()
    assert arranged(hostile[1:], "fused") == hostile[1:] and arranged(hostile, "separate") == hostile
    with pytest.raises(BadExperts):
        arranged(hostile, "fused")
    assert within(time.process_time() - start, 1.0)


def test_stacks_that_a_trainer_sharded_are_cut_too(tmp_path: Path, go: Run) -> None:
    """The shards of FSDP end anywhere, and torch files hold views in another order."""
    both, down = torch.randn(4, 12, 5), torch.randn(4, 5, 6)
    names = {"mlp.experts.gate_up_proj": both, "mlp.experts.down_proj": down, "norm.weight": torch.ones(5)}
    expected: State = {"norm.weight": torch.ones(5)}
    for n in range(4):
        parts = {"gate_proj": both[n, :6], "up_proj": both[n, 6:], "down_proj": down[n]}
        expected |= {f"mlp.experts.{n}.{part}.weight": tensor for part, tensor in parts.items()}
    (tmp_path / "dcp").mkdir()
    dcp.save({"model": names}, checkpoint_id=tmp_path / "dcp" / "pytorch_model_fsdp_0", no_dist=True)
    go(tmp_path / "dcp", tmp_path / "of-dcp", size=400, experts="separate")
    assert_same(read(tmp_path / "of-dcp"), expected)
    (tmp_path / "bin").mkdir()
    turned = {name: tensor.mT.contiguous().mT for name, tensor in names.items() if tensor.ndim == 3}
    torch.save(names | turned, tmp_path / "bin" / "pytorch_model.bin")
    go(tmp_path / "bin", tmp_path / "of-bin", size=400, experts="separate")
    assert_same(read(tmp_path / "of-bin"), expected)
    go(tmp_path / "of-bin", tmp_path / "again", experts="fused")
    assert_same(read(tmp_path / "again"), names)


def test_every_cut_of_a_sharded_stack_is_the_same_bytes() -> None:
    """Boxes of 3 experts by 5 rows by all columns, of a stack of 4 by 6: each piece ends inside an expert."""
    values = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
    pieces, data = [], b""
    for first, rows in ((slice(0, 3), slice(0, 5)), (slice(0, 3), slice(5, 6)), (slice(3, 4), slice(0, 6))):
        box = values[first, rows]
        pieces.append(Piece(0, len(data), (first.start, rows.start, 0), box.shape))
        data += box.tobytes()
    down = Tensor("experts.down_proj", "F32", (4, 2, 3), (Piece(1, 0, (0, 0, 0), (4, 2, 3)),))
    made = {
        t.name: t for t in arranged([Tensor("experts.gate_up_proj", "F32", (4, 6, 2), tuple(pieces)), down], "separate")
    }
    for n in range(4):
        for part, rows in (("gate_proj", slice(0, 3)), ("up_proj", slice(3, 6))):
            found = np.zeros((3, 2), np.float32)
            for piece in made[f"experts.{n}.{part}.weight"].pieces:
                assert piece.strides is None
                count = piece.shape[0] * piece.shape[1]
                box = np.frombuffer(data, np.float32, count, piece.offset).reshape(piece.shape)
                found[piece.at[0] : piece.at[0] + piece.shape[0], :] = box
            assert (found == values[n, rows]).all()


def expert(n: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj.weight": (6, 4), "up_proj.weight": (6, 4), "down_proj.weight": (4, 6)} | more
    return {f"mlp.experts.{n}.{name}": shape for name, shape in shapes.items() if shape}


STACK = {"mlp.experts.gate_up_proj": (2, 12, 4), "mlp.experts.down_proj": (2, 4, 6)}


@pytest.mark.parametrize(
    ("experts", "shapes", "dtype", "why"),
    [
        ("fused", expert(0) | expert(2), "F32", "missing"),
        ("fused", expert(0) | expert(1, **{"up_proj.weight": ()}), "F32", "missing"),
        ("fused", expert(0) | expert(1, **{"up_proj.weight": (6, 5)}), "F32", "different shapes"),
        ("fused", expert(0, **{"gate_proj.bias": (6,)}), "F32", "gate_proj.bias"),
        ("fused", expert(0, **{"gate_proj.weight_scale_inv": (1, 1)}), "F32", "weight_scale_inv"),
        ("fused", expert(0), "F8_E4M3", "quantized"),
        ("fused", expert(0) | {"mlp.experts.bias": (1,)}, "F32", "mlp.experts.bias belongs to them"),
        ("fused", expert(0) | {f"mlp.experts.{'1' * 5000}.w": (1,)}, "F32", "1.w belongs to them"),
        ("fused", expert(0, **{"down_proj.weight": (6, 4)}), "F32", "transposed"),
        ("separate", {"mlp.experts.gate_up_proj": (2, 4, 12), "mlp.experts.down_proj": (2, 6, 4)}, "F32", "transposed"),
        ("separate", STACK | {"mlp.experts.gate_up_proj_bias": (2, 12)}, "F32", "gate_up_proj_bias belongs to them"),
        ("separate", {"mlp.experts.gate_up_proj": (2, 12, 4)}, "F32", "only one of gate_up_proj and down_proj exists"),
        ("separate", STACK | {"mlp.experts.gate_up_proj": (2, 11, 4)}, "F32", "shapes"),
        ("separate", STACK | {"mlp.experts.down_proj": (3, 4, 6)}, "F32", "shapes"),
        ("separate", {"mlp.experts.gate_up_proj": (2, 0, 4), "mlp.experts.down_proj": (2, 4, 0)}, "F32", "shapes"),
        ("separate", STACK, "I8", "quantized"),
    ],
)
def test_experts_that_are_no_plain_stack_are_refused(
    experts: str, shapes: dict[str, tuple[int, ...]], dtype: str, why: str, tmp_path: Path, go: Run
) -> None:
    kinds = {"F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
    save_file(
        {name: torch.zeros(shape).to(kinds[dtype]) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(BadExperts, match=why):
        go(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), experts=experts)


MIXTRAL = {f"block_sparse_moe.experts.{n}.{w}.weight": (4, 4) for n in range(8) for w in ("w1", "w2", "w3")}
DENSE: dict[str, tuple[int, ...]] = {"mlp.gate_proj.weight": (6, 4)}
PACKED = {"mlp.experts.gate_up_proj_blocks": (2, 12, 1, 4), "mlp.experts.down_proj_blocks": (2, 4, 1, 6)}


@pytest.mark.parametrize(
    ("experts", "shapes", "why", "hint"),
    [
        ("separate", expert(0), "they are already separate$", "the result is the same without it"),
        ("separate-mixtral", MIXTRAL, "they are already separate-mixtral$", "the result is the same without it"),
        ("fused", STACK, "they are already fused$", "the result is the same without it"),
        (
            "separate",
            MIXTRAL,
            "already separate, under the names of separate-mixtral",
            "only the names differ (w1 to gate_proj, w3 to up_proj, w2 to down_proj)",
        ),
        ("separate-mixtral", expert(0), "already separate, under the names of separate$", "(gate_proj to w1, "),
        ("fused", DENSE, "no experts to convert to fused", "remove --experts"),
        ("separate", DENSE, "no experts to convert to separate", "remove --experts"),
        ("separate", PACKED, "no experts to convert to separate", "not convert quantized ones"),
    ],
)
def test_experts_that_nothing_is_done_to_are_refused_with_the_reason(
    experts: str, shapes: dict[str, tuple[int, ...]], why: str, hint: str, tmp_path: Path, go: Run
) -> None:
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(BadExperts, match=why) as refused:
        go(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), experts=experts)
    assert hint in refused.value.next_step


def test_quantised_weights_are_made_plain_in_a_run_of_their_own(tmp_path: Path, go: Run) -> None:
    save_file({name: torch.zeros(shape) for name, shape in STACK.items()}, tmp_path / "model.safetensors")
    with pytest.raises(BadExperts, match="use it in a separate run"):
        go(tmp_path, tmp_path.with_name("out"), experts="separate", dequantize=True, dtype="bfloat16")


def test_a_manifest_that_says_otherwise_is_found_out(tmp_path: Path, go: Run, meta_loader: MetaLoader) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({name: torch.rand(shape) for name, shape in STACK.items()}, source / "model.safetensors")
    go(source, out, experts="separate")
    text = (out / MANIFEST).read_text()
    for other in ("separate-mixtral", "fused", "of-a-newer-release"):
        (out / MANIFEST).write_text(text.replace('"experts":"separate"', f'"experts":"{other}"'))
        assert results(out, source, meta_loader)["same tensors"][0] == "failed"
    assert results(out, source, meta_loader, experts="separate")["same bytes"][0] == "passed"
