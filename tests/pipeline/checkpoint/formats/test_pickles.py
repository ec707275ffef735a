"""The pickle machine: reads plain data as Python does, runs nothing, and allocates no more than is there."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats import pickles
from reshard.pipeline.checkpoint.formats.pickles import Global, Made, Mapping, Persistent, load
from reshard.pipeline.errors import BadPickle, CheckpointError, PickleCutShort, UnsafePickle
from reshard.pipeline.limits import PICKLE_MEMORY_BASE, PICKLE_MEMORY_FACTOR
from tests.support.canary import Runs
from tests.support.pieces import flat_memory

ALLOWED = frozenset({"collections.OrderedDict", "builtins.set", "__builtin__.set", "_codecs.encode"})
MIB = 1 << 20


def value_of(data: bytes) -> object:
    return load(data, file="x.bin", allowed=ALLOWED).value


def thawed(value: object) -> object:
    """The machine's value as Python's own."""
    if type(value) is tuple:
        return tuple(map(thawed, value))
    if type(value) is list:
        return list(map(thawed, value))
    if type(value) is Mapping:
        return {thawed(key): thawed(item) for key, item in value.pairs}
    if type(value) is Made and value.kind.name == "set":
        return set(value.items or value.args[0] if value.items or value.args else ())  # type: ignore[call-overload]
    return value


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=30,
)


@given(PLAIN, st.integers(3, 5))
def test_plain_data_reads_as_python_reads_it(value: object, protocol: int) -> None:
    assert thawed(value_of(pickle.dumps(value, protocol))) == value


@given(PLAIN, st.binary(max_size=5), st.binary(max_size=5))
def test_a_pickle_may_lie_anywhere_and_says_where_it_ends(value: object, before: bytes, after: bytes) -> None:
    data = pickle.dumps(value, 4)
    loaded = load(before + data + after, file="x", allowed=ALLOWED, start=len(before))
    assert loaded.stop == len(before) + len(data)
    assert thawed(loaded.value) == value


def test_calls_states_and_persistent_ids_are_remembered_and_not_made() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", 7) if obj is marker else None

    marker = object()
    state = OrderedDict(weight=marker)
    state.flag = 3  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(state)
    loaded = load(buffer.getvalue(), file="x", allowed=ALLOWED)
    made = loaded.value
    assert type(made) is Made and str(made.kind) == "collections.OrderedDict" and made.args == ()
    (pair,) = made.pairs or ()
    assert pair[0] == "weight" and type(pair[1]) is Persistent and pair[1].key == ("storage", 7)
    assert loaded.persistent == [pair[1]]
    assert type(made.state) is Mapping and made.state.pairs == [("flag", 3)]


# ------------------------------------------------------------------------------------------------- nothing is run


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, r"(posix|nt|os)\.system"),
        (builtins.eval, r"_*builtins?_*\.eval"),
        (builtins.exec, r"_*builtins?_*\.exec"),
        (builtins.getattr, r"_*builtins?_*\.getattr"),
        (builtins.__import__, r"_*builtins?_*\.__import__"),
    ],
)
def test_a_call_outside_of_the_list_is_refused_and_not_made(
    function: Callable[..., Any], name: str, protocol: int, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w')"
    data = pickle.dumps({"weight": Runs(function, f"touch {canary}" if function is os.system else code)}, protocol)
    if protocol >= 2:
        with pytest.raises(UnsafePickle, match=f"x.bin would run ({name}) when unpickled; nothing was run"):
            value_of(data)
    else:  # protocols 0 and 1 mark strings with opcodes that torch has never written
        with pytest.raises(CheckpointError, match=r"x\.bin"):
            value_of(data)
    assert not canary.exists()


def test_the_canary_would_have_been_touched(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Runs(os.system, f"touch {canary}")))  # noqa: S301
    assert canary.exists()


@pytest.mark.parametrize("name", ["os.system", "collections.OrderedDict.fromkeys", "builtins.set.__class__"])
def test_dotted_names_do_not_reach_through_what_is_allowed(name: str) -> None:
    module, _, attribute = name.partition(".")
    data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, attribute))
    with pytest.raises(UnsafePickle):
        value_of(data + b"\x93.")


def test_a_name_from_a_stranger_is_shown_escaped_and_short() -> None:
    data = b"cos\x1b[2J\n" + b"y" * 5000 + b"\n."
    with pytest.raises(UnsafePickle) as caught:
        value_of(data)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "data",
    [
        b"(ios\nsystem\n.",  # INST
        b"(cos\nsystem\no.",  # OBJ, after a name that is refused first
        b"\x82\x01.",  # EXT1: a name from copyreg's registry
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"ccollections\nOrderedDict\n)}\x92.",  # NEWOBJ_EX
        b"P1\n.",  # PERSID
        b"I1\n.",
        b"\x97.",  # NEXT_BUFFER
    ],
)
def test_opcodes_that_plain_data_never_needs_are_refused(data: bytes) -> None:
    with pytest.raises((BadPickle, UnsafePickle)):
        value_of(data)


def test_what_is_called_must_be_a_name() -> None:
    for data in (b"K\x01)R.", b")K\x01\x85R.", b"}K\x01\x85\x81.", b"ccollections\nOrderedDict\n)R)R."):
        with pytest.raises(BadPickle, match="a call to something that is not a name"):
            value_of(data)


# ---------------------------------------------------------------------------------------- claims, bombs and fuzzing


@pytest.mark.parametrize(
    "data",
    [
        b"\x8e" + struct.pack("<Q", 64 << 30),  # BINBYTES8
        b"\x96" + struct.pack("<Q", 64 << 30),  # BYTEARRAY8
        b"\x8d" + struct.pack("<Q", 64 << 30),  # BINUNICODE8
        b"\x8d" + struct.pack("<Q", 2**64 - 1),
        b"B" + struct.pack("<I", 2**32 - 1),
        b"X" + struct.pack("<I", 2**32 - 1),
        b"\x8b" + struct.pack("<i", 2**31 - 1),  # LONG4
        b"\x8b" + struct.pack("<i", -1),
        b"\x95" + struct.pack("<Q", 64 << 30),  # FRAME
        b"c" + b"a" * 1000,  # a name without an end
    ],
)
def test_what_a_pickle_claims_is_never_allocated(data: bytes) -> None:
    with flat_memory(MIB), pytest.raises(BadPickle):
        value_of(data + b"abc")


def test_a_memo_far_away_costs_nothing() -> None:
    with flat_memory(MIB):
        assert value_of(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.") is None


def test_a_tuple_of_two_to_the_forty_elements_is_read_and_stays_small() -> None:
    with flat_memory(MIB):
        assert type(value_of(b")" + b"2\x86" * 40 + b".")) is tuple


@pytest.mark.parametrize("data", [b")" + b"\x85" * 100_000 + b".", b"(" * 100_000 + b"t" * 100_000 + b"."])
def test_nesting_a_hundred_thousand_deep_does_not_recurse(data: bytes) -> None:
    with flat_memory(PICKLE_MEMORY_BASE + (PICKLE_MEMORY_FACTOR + 16) * len(data)):
        assert type(value_of(data)) is tuple  # and is freed again without a crash


@pytest.mark.parametrize("values", [b"}", b"]", b"(", b"}\x94", b"\x8f", b"]\x94", b"}NNs", b"K\x01\x85\x94"])
def test_values_that_its_length_does_not_explain_are_refused_within_the_allowance(
    values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "PICKLE_MEMORY_BASE", MIB // 2)
    data = values * (MIB // 8 // len(values)) + b"."
    allowance = MIB // 2 + PICKLE_MEMORY_FACTOR * len(data)
    with (
        flat_memory(allowance + 16 * len(data)),
        pytest.raises(BadPickle, match="more values than its length allows"),
    ):
        value_of(data)


@pytest.mark.parametrize("flood", [b"(", b"(1", b"N0"], ids=["marks", "marks taken back", "pops"])
def test_a_flood_of_marks_or_pops_ends_by_its_count_and_not_by_its_memory(flood: bytes) -> None:
    """Thirty million marks took 70 s and a gigabyte to be refused."""
    data = flood * (30_000_000 // len(flood)) + b"."
    with pytest.raises(BadPickle, match=r"1,000,001 of its first [12],000,0\d\d bytes are marks and pops"):
        value_of(data)


def test_marks_that_have_values_are_as_many_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "PICKLE_IDLE_FREE", 10_000)
    data = b"](" + b"(NNNNt" * 11_000 + b"e."
    value = value_of(data)
    assert isinstance(value, list) and len(value) == 11_000


def test_a_value_may_contain_itself() -> None:
    value = value_of(b"]q\x00h\x00a.")
    assert type(value) is list and value[0] is value


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80", b"\x80\x06.", b".", b"NN.", b"(.", b"(N.", b"0.", b"2.", b"t.", b"h\x00.", b"e.", b"u.", b"}(Nu.",
        b"Ns.", b"NNNs.", b"N(e.", b"Na.", b"\x93.", b"NN\x93.", b"b.", b"N}b.", b"Q.", b"X\x01\x00\x00\x00\xff.",
        b"\x8a\x05\x00.", b"G\x00.", b"J\x00.", b"ccollections\nOrderedDict\nNR.",
    ],
)  # fmt: skip
def test_broken_pickles_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(BadPickle, match=r"^x\.bin: "):
        value_of(data)


def test_a_pickle_that_ends_too_soon_says_so() -> None:
    data = pickle.dumps({"a": [1, 2.0, "three", b"four"], "b": (None, True)}, 4)
    for stop in range(len(data)):
        with pytest.raises(PickleCutShort):
            value_of(data[:stop])


OPCODES = bytes([0x4E, 0x88, 0x89, 0x29, 0x5D, 0x7D, 0x28, 0x30, 0x31, 0x32, 0x74, 0x75, 0x65, 0x61, 0x73, 0x85, 0x86,
                 0x87, 0x8F, 0x90, 0x91, 0x94, 0x52, 0x62, 0x81, 0x93, 0x51, 0x2E])  # fmt: skip
PROGRAMS = st.lists(
    st.sampled_from([bytes([opcode]) for opcode in OPCODES])
    | st.sampled_from(
        [b"K\x01", b"q\x00", b"h\x00", b"ccollections\nOrderedDict\n", b"\x8c\x01a", b"C\x01a", b"\x8a\x01\x05"]
    )
    | st.binary(max_size=3),
    max_size=60,
).map(b"".join)


@given(PROGRAMS)
def test_any_bytes_are_a_value_or_an_error_of_ours(data: bytes) -> None:
    try:
        loaded = load(data, file="x.bin", allowed=ALLOWED)
    except CheckpointError as error:
        assert str(error).startswith("x.bin")
    else:
        assert data[loaded.stop - 1 : loaded.stop] == b"."


def test_globals_compare_by_identity_so_that_nothing_hostile_is_ever_hashed() -> None:
    assert Global("a", "b") != Global("a", "b")
