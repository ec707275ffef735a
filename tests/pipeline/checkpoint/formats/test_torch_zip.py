"""Torch's zip files: every tensor equals what `torch.load` makes of it; hostile files are refused and run nothing."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes

from reshard.pipeline.checkpoint.formats.safetensors import parse_header
from reshard.pipeline.checkpoint.formats.torch_files import read_torch
from reshard.pipeline.errors import (
    BadArchive,
    BadLength,
    BadPickle,
    CheckpointError,
    DuplicateTensor,
    LfsPointer,
    UnsafePickle,
    Unsupported,
)
from reshard.pipeline.tensors import Contents, StoredFile
from tests.support.canary import touch
from tests.support.examples import examples
from tests.support.pieces import Disk, content, flat_memory, stored

MIB = 1 << 20


def opened(path: Path) -> Contents:
    (file,) = stored(path.parent, path.name)
    return read_torch(Disk(path.parent).read, file, 0)


def saved(folder: Path, value: object, **options: Any) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(value, path, **options)
    return path


def whole_file(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What safetensors' own writer makes of the tensors, one file each, so that ties and strides are no matter."""
    found = {}
    for name, tensor in tensors.items():
        data = safetensors_bytes({"t": tensor.detach().clone().contiguous()})
        spec = parse_header(data, file="x", file_size=len(data)).tensors["t"]
        found[name] = (spec.dtype, spec.shape, data[spec.start : spec.stop])
    return found


def assert_equal_to_torch(path: Path, expected: dict[str, torch.Tensor] | None = None) -> Contents:
    """Everything that was read equals what torch loads: names, dtypes, shapes, bytes."""
    contents = opened(path)
    loaded = expected if expected is not None else torch.load(path, weights_only=True)
    files = stored(path.parent, path.name)
    made = {t.name: (t.dtype, t.shape, content(t, files, path.parent)) for t in contents.tensors}
    assert made == whole_file(loaded)
    assert [t.name for t in contents.tensors] == list(loaded)
    data = path.read_bytes()
    for record in contents.records:
        assert record.crc32 in (None, zlib.crc32(data[record.start : record.stop]))
    return contents


# ----------------------------------------------------------------------------------------------------- round trips

STORED_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    width = dtype.itemsize
    raw = torch.randint(0, 256, (*shape, width), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", STORED_DTYPES, ids=str)
def test_every_dtype_that_safetensors_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = of_dtype(dtype, 3, 5)
    state = {"w": tensor, "transposed": tensor.T, "scalar": of_dtype(dtype), "empty": tensor[:0], "row": tensor[1]}
    assert_equal_to_torch(saved(tmp_path, state))


def test_four_bit_floats_keep_their_bytes_and_double_their_last_dimension(tmp_path: Path) -> None:
    packed = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    (tensor,) = opened(path := saved(tmp_path, {"w": packed})).tensors
    reference = safetensors_bytes({"w": packed})
    spec = parse_header(reference, file="x", file_size=len(reference)).tensors["w"]
    assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape) == ("F4", (3, 8))
    assert content(tensor, stored(tmp_path), tmp_path) == bytes(range(12))
    with pytest.raises(Unsupported, match="4-bit"):
        opened(saved(path.parent, {"w": packed[:, ::2]}))


def test_views_of_all_kinds(tmp_path: Path) -> None:
    base = torch.randn(4, 6, 8, 2)
    lots = torch.randn(100, 100)
    state = {
        "base": base,
        "permuted": base.permute(3, 1, 0, 2),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "slice": base[1:3, ::2, 5:],
        "expanded": base[:1, :1].expand(4, 6, 8, 2),
        "diagonal": lots.diagonal(),
        "windows": lots[0].unfold(0, 10, 3),
        "parameter": torch.nn.Parameter(lots.T),
        "buffer": torch.nn.Buffer(lots[3]),
        "scalar": lots[5, 7],
        "none": lots[:, :0],
        "unused": torch.zeros(0),
    }
    contents = assert_equal_to_torch(saved(tmp_path, state))
    assert contents.ties == ()
    ranges = {tensor.name for tensor in contents.tensors if tensor.range is not None}
    assert ranges == {"base", "buffer", "scalar", "none", "unused"}


@given(st.data())
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_strided_view(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [data.draw(st.integers(0, 5)) for _ in shape]
    offset = data.draw(st.integers(0, 3))
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    storage = torch.arange(offset + last + 1 + data.draw(st.integers(0, 3)), dtype=torch.float32)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint16]))
    assert_equal_to_torch(saved(tmp_path, {"w": storage.to(dtype).as_strided(shape, strides, offset)}))


def test_a_state_dict_with_its_metadata_as_transformers_saves_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    contents = assert_equal_to_torch(saved(tmp_path, model.state_dict()))
    assert contents.notes == ()


def test_ties_are_the_names_of_one_view_and_overlaps_are_none(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    state = {
        "embed": weight,
        "head": weight,
        "head_parameter": torch.nn.Parameter(weight),
        "transposed": weight.T,
        "part": weight[:3],
        "equal": weight.clone(),
        "e1": weight[:0],
        "e2": weight[:0],
    }
    assert assert_equal_to_torch(saved(tmp_path, state)).ties == (("embed", "head", "head_parameter"),)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_pickle_protocol_that_torch_can_be_asked_for(protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.randn(3)}, pickle_protocol=protocol)
    assert_equal_to_torch(path, torch.load(path, weights_only=False))


def test_parameters_with_attributes_and_tensors_with_attributes(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(2, 3))
    parameter.partition_dim = 1  # type: ignore[attr-defined]
    tensor = torch.randn(3)
    tensor.note = "kept elsewhere"  # type: ignore[attr-defined]
    assert_equal_to_torch(saved(tmp_path, {"p": parameter, "t": tensor}))


def big_endian(path: Path, swapped: dict[int, int]) -> None:
    """Rewrite a file as a big-endian machine would have written it: ``swapped`` is storage -> bytes of a part."""
    source = zipfile.ZipFile(path)
    records = {info.filename: source.read(info) for info in source.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            key = name.rpartition("/data/")[2]
            if name.endswith("/byteorder"):
                data = b"big"
            elif key.isdigit():
                width = swapped[int(key)]
                data = b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))
            archive.writestr(name, data)


@pytest.mark.parametrize("protocol", [2, 5])
def test_bytes_that_can_be_written_to_are_a_value_as_any_other(tmp_path: Path, protocol: int) -> None:
    state = {"w": torch.randn(3), "epoch": bytearray(b"12")}
    assert_equal_to_torch(saved(tmp_path, state, pickle_protocol=protocol), {"w": state["w"]})


def test_big_endian_files_are_swapped_as_torch_swaps_them(tmp_path: Path) -> None:
    state = {
        "f32": torch.randn(3, 4),
        "f64": torch.randn(5, dtype=torch.float64),
        "bf16": torch.randn(4).bfloat16(),
        "c64": torch.randn(3, dtype=torch.complex64),
        "u8": torch.arange(7, dtype=torch.uint8),
        "f8": torch.randn(3).to(torch.float8_e5m2),
    }
    path = saved(tmp_path, state)
    big_endian(path, {0: 4, 1: 8, 2: 2, 3: 4, 4: 1, 5: 1})
    contents = assert_equal_to_torch(path)
    assert whole_file(torch.load(path)) == whole_file(state)
    assert {t.name for t in contents.tensors if t.range is not None} == {"u8", "f8"}


def test_a_big_endian_dtype_that_torch_itself_would_not_swap_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"ids": torch.arange(3).to(torch.uint16)})
    big_endian(path, {0: 2})
    assert torch.load(path)["ids"].tolist() != [0, 1, 2]
    with pytest.raises(Unsupported, match=r"ids \(a big-endian tensor of U16\)"):
        opened(path)


# ------------------------------------------------------------------------------------------------------- wrapping


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "net"])
def test_a_wrapped_state_dict_is_found_and_the_rest_is_listed(wrapper: str, tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(2, 3), "a.bias": torch.randn(3)}
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    path = saved(
        tmp_path,
        {"epoch": 3, wrapper: state, "optimizer": optimizer.state_dict(), "args": {"lr": 1e-3}, "history": [0.5, None]},
    )
    contents = assert_equal_to_torch(path, state)
    assert contents.notes == (
        f"pytorch_model.bin: using the weights under {wrapper}",
        "pytorch_model.bin: skipped epoch (int 3)",
        "pytorch_model.bin: skipped optimizer (a dictionary of 2)",
        "pytorch_model.bin: skipped args (a dictionary of 1)",
        "pytorch_model.bin: skipped history (a list of 2)",
    )


def test_tensors_in_what_is_left_out_are_said_to_be_there(tmp_path: Path) -> None:
    state = {"w": torch.randn(2)}
    path = saved(
        tmp_path, {"model": state, "ema": dict(state), "optimizer": {"m": [torch.zeros(2)]}, "step": torch.tensor(3)}
    )
    notes = assert_equal_to_torch(path, state).notes
    assert notes[1:] == (
        "pytorch_model.bin: skipped ema (a dictionary of 1, with tensors)",
        "pytorch_model.bin: skipped optimizer (a dictionary of 1, with tensors)",
        "pytorch_model.bin: skipped step (a tensor)",
    )


def test_a_wrapper_around_a_wrapper(tmp_path: Path) -> None:
    state = {"w": torch.randn(2)}
    contents = assert_equal_to_torch(saved(tmp_path, {"state_dict": {"module": state, "step": 1}}), state)
    assert contents.notes == (
        "pytorch_model.bin: using the weights under state_dict.module",
        "pytorch_model.bin: skipped state_dict.step (int 1)",
    )


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(3), "a single tensor"),
        ([torch.zeros(3)], "a list of 1"),
        ({"lr": 0.1}, "without named tensors"),
        ({"nothing": {}}, "without named tensors"),
        ({0: torch.zeros(3)}, "whose keys are not all names"),
        ({"encoder": {"w": torch.zeros(3)}, "decoder": {"w": torch.zeros(3)}}, r"several .*\(encoder, decoder\)"),
        ({"w": torch.zeros(3), "heads": [torch.zeros(2)]}, r"heads \(a list of 1 with tensors inside\)"),
        (
            {"w": torch.zeros(3), "more": {"b": {"c": torch.zeros(2)}}},
            r"more \(a dictionary of 1 with tensors inside",
        ),
    ],
)
def test_what_is_no_state_dict_is_refused_and_said(value: object, what: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=rf"^cannot convert pytorch_model\.bin to safetensors: .*{what}"):
        opened(saved(tmp_path, value))


def test_many_left_out_values_are_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(1)} | {f"extra{i}": i for i in range(1000)})
    notes = opened(path).notes
    assert len(notes) == 21 and notes[-1].endswith("skipped 980 more values")


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.zeros(2, dtype=torch.complex128), r"w \(dtype complex128\)"),
        (lambda: torch.zeros(2, 2).to_sparse(), r"w \(a sparse tensor\)"),
        (lambda: torch.eye(2).to_sparse_csr(), r"w \(a sparse tensor\)"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), r"w \(a quantized tensor\)"),
        (lambda: torch.zeros(2, device="meta"), r"w \(a meta tensor without data\)"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), r"w \(a lazy view"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, r"w \(a lazy view"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), r"w \(a nested tensor\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch, on the kinds that it is about to drop
def test_tensors_that_safetensors_cannot_hold_are_refused_by_name(
    make: Callable[[], torch.Tensor], what: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, {"v": torch.zeros(1), "w": make()})
    with pytest.raises(Unsupported, match=f"cannot convert pytorch_model.bin to safetensors: {what}"):
        opened(path)


def test_a_pickle_that_runs_something_is_refused_and_does_not(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = saved(tmp_path, {"w": torch.zeros(2), "x": touch(canary)})
    with pytest.raises(
        UnsafePickle, match=r"pytorch_model\.bin would run (posix|nt|os)\.system when unpickled; nothing was run"
    ):
        opened(path)
    assert not canary.exists()
    torch.load(path, weights_only=False)
    assert canary.exists()


def test_a_whole_module_is_refused_by_the_name_of_its_class(tmp_path: Path) -> None:
    with pytest.raises(UnsafePickle, match=r"torch\.nn\.modules\.linear\.Linear"):
        opened(saved(tmp_path, torch.nn.Linear(2, 2)))


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    with pytest.raises(Unsupported, match="TorchScript"):
        opened(path)
    with zipfile.ZipFile(path, "w") as archive:  # without a function there is no code
        archive.writestr("m/data.pkl", b"")
        archive.writestr("m/constants.pkl", b"")
    with pytest.raises(Unsupported, match="TorchScript"):
        opened(path)


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"", BadArchive, "not written by torch.save"),
        (b"GGUF" + bytes(500), BadArchive, "not written by torch.save"),
        (bytes(257) + b"ustar" + bytes(300), Unsupported, "tar format of torch before 2017"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", LfsPointer, "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(300), BadArchive, "could be truncated"),
    ],
)
def test_other_files_are_told_apart(data: bytes, error: type[CheckpointError], match: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    with pytest.raises(error, match=match):
        opened(path)


# ---------------------------------------------------------------------------------------------- crafted pickles


class Storage:
    """Pickled as a persistent id."""

    def __init__(self, *key: object) -> None:
        self.key = key


class Call:
    """Pickled as a call of a global that may not exist."""

    def __init__(self, name: str, *args: object) -> None:
        self.name, self.args = name, args


def crafted(value: object) -> bytes:
    """A pickle in protocol 2 with `Call` and `Storage` inside; written by hand, so that it can say anything."""
    if isinstance(value, Call):
        module, _, name = value.name.rpartition(".")
        return f"c{module}\n{name}\n".encode() + crafted(value.args) + b"R"
    if isinstance(value, Storage):
        return crafted(value.key) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(crafted, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(crafted, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(crafted(key) + crafted(item) for key, item in value.items()) + b"u"
    if isinstance(value, bytes):  # a global, by its line
        return value
    return pickle.dumps(value, 2)[2:-1]


FLOATS = b"ctorch\nFloatStorage\n"
UNTYPED = b"ctorch.storage\nUntypedStorage\n"
UINT16 = b"ctorch\nuint16\n"
HOOKS = Call("collections.OrderedDict")


def floats(count: object = 6, key: object = "0", kind: bytes = FLOATS) -> Storage:
    return Storage("storage", kind, key, "cpu", count)


def tensor(storage: object, offset: object, shape: object, strides: object, *more: object) -> Call:
    return Call("torch._utils._rebuild_tensor_v2", storage, offset, shape, strides, False, HOOKS, *more)


def archived(folder: Path, root: object, data: dict[str, bytes] | None = None, pickled: bytes | None = None) -> Path:
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled if pickled is not None else b"\x80\x02" + crafted(root) + b".")
        for key, content in (data if data is not None else {"0": bytes(range(24))}).items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def test_a_crafted_file_is_read_when_it_is_honest(tmp_path: Path) -> None:
    path = archived(tmp_path, {"w": tensor(floats(), 1, (2, 2), (1, 3))})
    (found,) = opened(path).tensors
    assert content(found, stored(tmp_path), tmp_path) == bytes(
        [*range(4, 8), *range(16, 20), *range(8, 12), *range(20, 24)]
    )


@pytest.mark.parametrize(
    "value",
    [
        tensor(floats(), 0, (7,), (1,)),  # longer than its storage
        tensor(floats(), 3, (2, 2), (2, 1)),  # reaches behind it
        tensor(floats(), -1, (2,), (1,)),
        tensor(floats(), 0, (2,), (-1,)),
        tensor(floats(), 0, (-2,), (1,)),
        tensor(floats(), 0, (2,), (1, 1)),
        tensor(floats(), 0, (True,), (1,)),
        tensor(floats(), 0, (2.0,), (1,)),
        tensor(floats(), 0, "23", (1, 1)),
        tensor(floats(), 0, (1,) * 65, (1,) * 65),
        tensor(floats(), 2**70, (), ()),
        tensor(floats(), 0, (2**62, 0), (1, 1)),  # claims more bytes than there are numbers, and is empty
        tensor(floats(2**61), 0, (2,), (1,)),  # a storage longer than its record
        tensor(floats(5), 0, (2,), (1,)),  # or shorter
        tensor(floats(-6), 0, (2,), (1,)),
        tensor(floats("6"), 0, (2,), (1,)),
        tensor(floats(6, "1"), 0, (2,), (1,)),  # a record that is not there
        tensor(floats(6, "../0"), 0, (2,), (1,)),
        tensor(floats(6, 0), 0, (2,), (1,)),
        tensor(floats(6, "0", b"ctorch\nfloat32\n"), 0, (2,), (1,)),
        tensor(Storage("module", FLOATS, "0", "cpu", 6), 0, (2,), (1,)),
        tensor(Storage("storage"), 0, (2,), (1,)),
        tensor("0", 0, (2,), (1,)),
        tensor(floats(), 0, (2,), (1,), "metadata"),
        Call("torch._utils._rebuild_tensor_v2", floats()),
        Call("torch._utils._rebuild_tensor_v3", floats(24, "0", UNTYPED), 0, (2,), (1,), False, HOOKS, "float32"),
        Call("torch._utils._rebuild_tensor_v3", floats(24, "0", UNTYPED), 0, (13,), (1,), False, HOOKS, UINT16),
        Call("torch._utils._rebuild_parameter"),
        Call("torch._utils._rebuild_parameter", 3, True, HOOKS),
        Call("torch._tensor._rebuild_from_type_v2", FLOATS, FLOATS, 3, {}),
    ],
)  # fmt: skip
def test_tensors_that_lie_are_refused_by_name(value: Call, tmp_path: Path) -> None:
    with flat_memory(4 * MIB), pytest.raises((BadPickle, BadArchive), match=r"^pytorch_model\.bin: ") as caught:
        opened(archived(tmp_path, {"the.weight": value}))
    assert "the.weight" in str(caught.value) or "storage" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2**40,), (0,)), ((2**20, 2**20), (0, 0)), ((2**62,), (0,)), ((2**21, 3, 2), (0, 2, 1))],
)
def test_a_few_bytes_that_claim_terabytes_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], tmp_path: Path
) -> None:
    with flat_memory(4 * MIB), pytest.raises(BadPickle, match=r"w claims (an impossibly large shape|.* bytes)"):
        opened(archived(tmp_path, {"w": tensor(floats(), 0, shape, strides)}))


def test_many_names_that_together_claim_far_more_than_the_file_are_refused(tmp_path: Path) -> None:
    names = {f"w{i}": tensor(floats(), 0, (1000, 1000), (0, 0)) for i in range(5)}
    with pytest.raises(BadPickle, match="tensors claim 20,000,000 bytes, but the storages have 24"):
        opened(archived(tmp_path, names))


def test_a_small_expanded_tensor_is_honest(tmp_path: Path) -> None:
    (found,) = opened(archived(tmp_path, {"w": tensor(floats(), 0, (4096,), (0,))})).tensors
    assert content(found, stored(tmp_path), tmp_path) == bytes([0, 1, 2, 3]) * 4096


@pytest.mark.parametrize("flag", ["conj", "neg"])
def test_lazy_bits_are_refused_wherever_they_stand(flag: str, tmp_path: Path) -> None:
    view = tensor(floats(), 0, (2,), (1,), {"unknown": False, flag: True})
    for value in (view, Call("torch._utils._rebuild_parameter", view, True, HOOKS)):
        with pytest.raises(Unsupported, match=rf"w \(a lazy view, '{flag}'\)"):
            opened(archived(tmp_path, {"w": value}))


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    pair = crafted("w") + crafted(tensor(floats(), 0, (2,), (1,)))
    with pytest.raises(DuplicateTensor, match="duplicate tensor w: in"):
        opened(archived(tmp_path, None, pickled=b"\x80\x02}(" + pair + pair + b"u."))


def test_one_storage_of_two_lengths_is_refused(tmp_path: Path) -> None:
    state = {"a": tensor(floats(6), 0, (2,), (1,)), "b": tensor(floats(5), 0, (2,), (1,))}
    with pytest.raises(BadPickle, match="two different sizes"):
        opened(archived(tmp_path, state))


def test_a_dictionary_inside_itself_is_no_endless_way_down(tmp_path: Path) -> None:
    view = crafted(tensor(floats(), 0, (2,), (1,)))
    pickled = b"\x80\x02}q\x63(" + crafted("model") + b"h\x63" + crafted("w") + view + b"u."
    contents = opened(archived(tmp_path, None, pickled=pickled))
    assert [found.name for found in contents.tensors] == ["w"]
    assert contents.notes == ("pytorch_model.bin: skipped model (a dictionary inside itself)",)


@pytest.mark.parametrize(
    "bomb",
    [
        b")" + b"2\x86" * 60,  # 2**60 elements
        b"]q\x01" + b"0](h\x01h\x01eq\x01" * 60,  # lists, by way of the memo
        b"]q\x01h\x01a",  # a list that contains itself
    ],
)
def test_bombs_beside_the_weights_are_listed_in_no_time(bomb: bytes, tmp_path: Path) -> None:
    view = crafted(tensor(floats(), 0, (2,), (1,)))
    pickled = b"\x80\x02}(" + crafted("w") + view + crafted("bomb") + bomb + b"u."
    with flat_memory(4 * MIB):
        contents = opened(archived(tmp_path, None, pickled=pickled))
    assert [found.name for found in contents.tensors] == ["w"]
    assert "skipped bomb" in contents.notes[0]


def test_nested_dictionaries_with_two_to_the_forty_paths_are_walked_once(tmp_path: Path) -> None:
    leaf = crafted({"w": tensor(floats(), 0, (2,), (1,))}) + b"q\x01"
    levels = b"".join(b"0}(" + crafted("a") + b"h\x01" + crafted("b") + b"h\x01uq\x01" for _ in range(40))
    with flat_memory(4 * MIB), pytest.raises(Unsupported):
        opened(archived(tmp_path, None, pickled=b"\x80\x02" + leaf + levels + b"."))


def test_tensors_thousands_of_dictionaries_deep_are_said_to_be_there(tmp_path: Path) -> None:
    view, levels = crafted(tensor(floats(), 0, (2,), (1,))), 5000
    deep = (b"}(" + crafted("a")) * levels + view + b"u" * levels
    pickled = b"\x80\x02}(" + crafted("model") + crafted({"w": tensor(floats(), 0, (2,), (1,))}) + crafted("deep")
    contents = opened(archived(tmp_path, None, pickled=pickled + deep + b"u."))
    assert [found.name for found in contents.tensors] == ["w"]
    assert contents.notes[1:] == ("pytorch_model.bin: skipped deep (a dictionary of 1, with tensors)",)


def test_bytes_behind_the_pickle_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match="after the end of its pickle"):
        opened(archived(tmp_path, None, pickled=b"\x80\x02}.}."))


# ------------------------------------------------------------------------------------------------- crafted archives


class Zip:
    """The parts of a torch file, taken apart so that each can be made to lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        self.end = len(self.data) - 22
        self.directory = struct.unpack_from("<L", self.data, self.end + 16)[0]
        self.entries = {}
        at = self.directory
        while self.data[at : at + 4] == b"PK\x01\x02":
            name, extra, comment = struct.unpack_from("<3H", self.data, at + 28)
            self.entries[self.data[at + 46 : at + 46 + name].decode().partition("/")[2]] = at
            at += 46 + name + extra + comment

    def put(self, at: int, layout: str, value: int) -> None:
        struct.pack_into("<" + layout, self.data, at, value)

    def entry(self, name: str, field: int, layout: str, value: int) -> None:
        self.put(self.entries[name] + field, layout, value)

    def local(self, name: str, field: int, layout: str, value: int) -> None:
        self.put(self.header_of(name) + field, layout, value)

    def header_of(self, name: str) -> int:
        return int(struct.unpack_from("<L", self.data, self.entries[name] + 42)[0])

    def sizes(self, name: str, size: int) -> None:
        """Both sizes in the directory."""
        self.entry(name, 20, "L", size)
        self.entry(name, 24, "L", size)

    def count(self, records: int) -> None:
        """The number of records in both end records."""
        self.put(self.end + 8, "H", records)
        self.put(self.end + 10, "H", records)
        self.put(self.end - 76 + 24, "Q", records)
        self.put(self.end - 76 + 32, "Q", records)

    def write(self) -> Path:
        self.path.write_bytes(self.data)
        return self.path


KEY_AT = len("pytorch_model/data/")
ARCHIVE_LIES: dict[str, tuple[Callable[[Zip], object], str]] = {
    "compressed in the directory": (lambda z: z.entry("data/0", 10, "H", 8), "compressed"),
    "compressed in the record": (lambda z: z.local("data/0", 8, "H", 8), "disagree"),
    "packed and unpacked size differ": (lambda z: z.entry("data/0", 20, "L", 23), "compressed"),
    "encrypted": (lambda z: z.entry("data/0", 8, "H", 0x0809), "encrypted"),
    "encrypted in the record": (lambda z: z.local("data/0", 6, "H", 0x0809), "disagree"),
    "strongly encrypted": (lambda z: z.entry("data/0", 8, "H", 0x0848), "encrypted"),
    "on another disk": (lambda z: z.entry("data/0", 34, "H", 1), "torch never uses"),
    "record overlaps record": (
        lambda z: z.entry("data/1", 42, "L", z.directory - 300),
        "overlaps|disagree|two records",
    ),
    "both at one place": (lambda z: z.entry("data/1", 42, "L", z.header_of("data/0")), "overlaps"),
    "longer than its room": (lambda z: z.sizes("data/0", 5000), "overlaps"),
    "record claims another size": (
        lambda z: (z.local("data/0", 18, "L", 24), z.local("data/0", 22, "L", 20)),
        "disagree on its size",
    ),
    "record claims another crc": (lambda z: z.local("data/0", 14, "L", 7), "disagree on its size or CRC"),
    "record has another name": (lambda z: z.local("data/0", 30 + KEY_AT, "B", ord("1")), "disagree"),
    "record has a longer header": (lambda z: z.local("data/0", 28, "H", 60000), "overlaps the next record"),
    "no record there": (lambda z: z.local("data/0", 0, "L", 0), "disagree"),
    "two records of one name": (
        lambda z: z.put(z.entries["data/1"] + 46 + KEY_AT, "B", ord("0")),
        "two records|disagree",
    ),
    "zip64 field missing": (lambda z: z.sizes("data/0", 2**32 - 1), "missing zip64 field"),
    "zip64 end elsewhere": (lambda z: z.put(z.end - 20 + 8, "Q", 5), "zip64 end record is not where"),
    "zip64 end disagrees": (lambda z: z.put(z.end - 76 + 32, "Q", 3), "disagree|was not written by torch"),
    "end counts other records": (
        lambda z: (z.put(z.end + 8, "H", 3), z.put(z.end + 10, "H", 3)),
        "two zip end records disagree",
    ),
    "both ends count fewer": (lambda z: z.count(3), "but has more"),
    "both ends count more": (lambda z: z.count(99), "but has fewer|broken"),
    "directory claims gigabytes": (
        lambda z: (z.put(z.end + 12, "L", 2**32 - 1), z.put(z.end - 76 + 40, "Q", 2**40)),
        "directory claims",
    ),
    "directory elsewhere": (
        lambda z: (z.put(z.end + 16, "L", 0), z.put(z.end - 76 + 48, "Q", 0)),
        "does not end at the end record",
    ),
    "directory broken": (lambda z: z.put(z.directory, "L", 0), "directory is broken"),
    "several disks": (lambda z: z.put(z.end + 4, "H", 1), "was not written by torch"),
    "a comment": (lambda z: (z.put(z.end + 20, "H", 3), z.data.extend(b"abc")), "could be truncated"),
    "cut off": (lambda z: z.data.__delitem__(slice(-40, None)), "could be truncated"),
    "bytes behind": (lambda z: z.data.extend(b"\0"), "could be truncated"),
    "name is no text": (lambda z: z.put(z.entries["data/0"] + 46, "B", 0xFF), "not UTF-8"),
    "outside of the folder": (lambda z: z.put(z.entries["data/0"] + 46, "B", ord("q")), "not in the archive's folder"),
    "pickle was changed": (lambda z: z.put(z.data.index(b"weight"), "B", ord("W")), "data.pkl does not match its CRC"),
    "unknown byte order": (
        lambda z: z.data.__setitem__(slice(at := z.data.index(b"little"), at + 6), b"middle"),
        "byteorder does not match its CRC",
    ),
}


@pytest.mark.parametrize("lie", ARCHIVE_LIES)
def test_archives_that_can_be_read_in_two_ways_are_refused(lie: str, tmp_path: Path) -> None:
    change, why = ARCHIVE_LIES[lie]
    archive = Zip(saved(tmp_path, {"weight": torch.arange(6.0), "other": torch.arange(200.0)}))
    change(archive)
    with flat_memory(4 * MIB), pytest.raises(BadArchive, match=rf"^pytorch_model\.bin: .*({why})"):
        opened(archive.write())


def test_the_archive_that_the_lies_start_from_is_honest(tmp_path: Path) -> None:
    archive = Zip(saved(tmp_path, {"weight": torch.arange(6.0), "other": torch.arange(200.0)}))
    assert_equal_to_torch(archive.write())


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_bombs_are_refused_unopened(compression: int, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", bytes(64 * MIB))
    with flat_memory(4 * MIB), pytest.raises(BadArchive, match=r"data\.pkl is compressed"):
        opened(path)


def test_a_pickle_that_claims_more_than_is_read_is_refused_before_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive, archive.open("a/data.pkl", "w") as record:
        for _ in range(129):
            record.write(bytes(MIB))
    with flat_memory(4 * MIB), pytest.raises(BadArchive, match="pickle is 135,266,304 bytes"):
        opened(path)


def test_records_without_checksums_are_read_and_attest_nothing(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, {"w": torch.arange(6.0)})
    finally:
        torch.serialization.set_crc32_options(before)
    (record,) = assert_equal_to_torch(path).records
    assert record.crc32 is None


# ------------------------------------------------------------------------------------------------- cost and fuzzing


def test_a_file_of_many_tensors_is_opened_in_few_requests(tmp_path: Path) -> None:
    state = OrderedDict((f"layers.{i}.weight", torch.zeros(64)) for i in range(3000))
    (file,) = stored(tmp_path, saved(tmp_path, state).name)
    disk = Disk(tmp_path)
    assert len(read_torch(disk.read, file, 0).tensors) == 3000
    assert len(disk.requests) <= 5


def test_nineteen_gigabytes_are_opened_in_a_few_kilobytes(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with torch.serialization.skip_data():  # a sparse file, with zip64 sizes and offsets
        torch.save({f"w{i}": torch.empty(1 << 29, 3) for i in range(3)} | {"last": torch.empty(5)}, path)
    (file,) = stored(tmp_path, path.name)
    disk = Disk(tmp_path)
    with flat_memory(8 * MIB):
        contents = read_torch(disk.read, file, 0)
    assert file.size > 19e9 and disk.bytes_read < 100_000 and len(disk.requests) <= 8
    reader = torch._C.PyTorchFileReader(str(path))
    assert [t.range.start for t in contents.tensors if t.range] == [
        reader.get_record_offset(f"data/{i}") for i in range(4)
    ]


def honest_file() -> bytes:
    buffer = io.BytesIO()
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"state_dict": {"a": weight, "b": weight.T, "c": torch.nn.Parameter(weight[1])}, "step": 3}, buffer)
    return buffer.getvalue()


HONEST = honest_file()


def read_bytes_of(data: bytes) -> Contents:
    def read(file: StoredFile, start: int, stop: int, /) -> Any:
        assert 0 <= start < stop <= len(data)
        yield memoryview(data)[start:stop]

    return read_torch(read, StoredFile("x.bin", len(data)), 0)


@given(st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 40))
@settings(max_examples=examples(300))
def test_a_damaged_file_gives_tensors_inside_of_it_or_an_error_of_ours(
    changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(HONEST)
    for at, value in changes:
        data[at] = value
    if cut > 30:
        del data[-cut:]
    try:
        contents = read_bytes_of(bytes(data))
    except CheckpointError as error:
        assert str(error).startswith("x.bin") or "x.bin" in str(error)
        return
    for found in contents.tensors:
        for piece in found.pieces:
            strides = piece.strides or ()
            last = piece.offset + sum((n - 1) * s for n, s in zip(piece.shape, strides, strict=False))
            assert 0 <= piece.offset <= last <= len(data)


@given(st.binary(max_size=300))
def test_any_bytes_give_an_error_of_ours(data: bytes) -> None:
    for head in (b"", b"PK\x03\x04"):
        with pytest.raises(CheckpointError):
            read_bytes_of(head + data)


@given(st.binary(max_size=200), st.lists(st.integers(0, 399), max_size=5))
@settings(max_examples=examples(150))
def test_any_pickle_in_an_archive_gives_tensors_or_an_error_of_ours(noise: bytes, swaps: list[int]) -> None:
    archive = zipfile.ZipFile(io.BytesIO(HONEST))
    records = {info.filename: archive.read(info) for info in archive.infolist()}
    pickled = bytearray(records["archive/data.pkl"])
    for at, value in zip(swaps, noise, strict=False):
        pickled[at % len(pickled)] = value
    records["archive/data.pkl"] = bytes(pickled) if swaps else noise
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in records.items():
            made.writestr(name, data)
    try:
        contents = read_bytes_of(buffer.getvalue())
    except CheckpointError as error:
        assert "x.bin" in str(error)
    else:
        assert contents.tensors


def test_a_file_that_ends_before_its_size_says_so(tmp_path: Path) -> None:
    def read(file: StoredFile, start: int, stop: int, /) -> Any:
        yield memoryview(HONEST)[start : stop - 1]

    with pytest.raises(BadLength):
        read_torch(read, StoredFile("x.bin", len(HONEST)), 0)
