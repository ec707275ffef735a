"""A pickle machine that runs nothing: it turns a pickle into inert values, and refuses what it would have to run.

A pickle is a program for a small stack machine (https://docs.python.org/3/library/pickletools.html). Ours knows the
opcodes that binary pickles of plain data are made of. Where Python's own would import a name it makes a ``Global``,
which is two strings; where Python's would call one it makes a ``Made``, which remembers what would have been called
with what. Names outside the caller's allow-list end the reading. So no import, no call, no attribute is ever looked up.

The machine never hashes, compares, prints or copies what it makes: a pickle of a few hundred bytes may hold a tuple of
2**40 elements. Dictionaries are therefore lists of pairs. Who reads the values must tell them apart by ``type(...)``.

What a pickle claims is checked against the bytes that are there before anything is allocated, and what it really makes
is charged against an allowance in proportion to its length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Final, NamedTuple

from reshard.pipeline.errors import BadPickle, PickleCutShort, UnsafePickle
from reshard.pipeline.limits import (
    PICKLE_IDLE_BYTES,
    PICKLE_IDLE_FREE,
    PICKLE_MAX,
    PICKLE_MEMORY_BASE,
    PICKLE_MEMORY_FACTOR,
    PICKLE_MEMORY_MAX,
)

# What values cost in memory at most, in bytes: 64-bit CPython 3.11 to 3.13, with the garbage collector's head.
_OPCODE_COST = 8  # a slot of the stack
_SMALL_COST = 40  # an integer or a float
_TUPLE_COST = 64  # and a slot for each element
_LIST_COST = 80
_SLOT_COST = 16  # of a list that grows
_MAPPING_COST = 144  # with the list inside it
_PAIR_COST = 80  # a tuple of two, and its slot
_MADE_COST = 96  # also of the other small objects
_MEMO_COST = 104  # an entry with its key, while the memo grows

_HIGHEST_PROTOCOL = 5
_INTEGER_BYTES_MAX = 255  # LONG4 could claim 2 GiB; nothing that describes tensors needs more than LONG1 holds


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that Python would have imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class Mapping:
    """A dictionary as it was written: pairs in order, keys unhashed, a repeated key still there twice."""

    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Made:
    """What calling ``kind`` with ``args`` would have made, with the state and the items that were put into it."""

    kind: Global
    args: tuple[object, ...]
    state: object = None
    # Most calls make neither a dictionary nor a list, and there are many calls: the lists come when needed.
    pairs: list[tuple[object, object]] | None = None
    items: list[object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something that lies outside the pickle, by the key that the pickle knows it under."""

    key: object


SET = Global("builtins", "set")


class Loaded(NamedTuple):
    """What one pickle held; every Persistent in ``value``, and those that ended nowhere, are in ``persistent``."""

    value: object
    stop: int  # byte behind the pickle
    persistent: list[Persistent]


def load(data: bytes, *, file: str, allowed: frozenset[str], start: int = 0) -> Loaded:
    """The value of the pickle that begins at byte ``start`` of ``data``.

    Values are None, bool, int, float, str, bytes, tuple, list, Mapping, Made, Global and Persistent; ``allowed`` holds
    dotted names. Raises UnsafePickle for a name outside it, PickleCutShort when ``data`` ends first, BadPickle for
    anything else that is not a pickle of plain data. ``file`` is for the message.
    """
    return _Machine(data, start, file, allowed).run()


class _Machine:
    def __init__(self, data: bytes, start: int, file: str, allowed: frozenset[str]) -> None:
        self._data = data
        self._start = start
        self._at = start
        self._file = file
        self._allowed = allowed
        self.stack: list[object] = []
        self._below_marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self._persistent: list[Persistent] = []
        self._idle = 0
        length = min(len(data) - start, PICKLE_MAX)
        self._allowance = min(PICKLE_MEMORY_BASE + PICKLE_MEMORY_FACTOR * length, PICKLE_MEMORY_MAX)

    def run(self) -> Loaded:
        data, stop = self._data, min(len(self._data), self._start + PICKLE_MAX)
        try:
            while self._at < stop:
                opcode = data[self._at]
                self._at += 1
                if opcode == _STOP:
                    if len(self.stack) != 1 or self._below_marks:
                        raise self._bad("values are left over at its end")
                    return Loaded(self.stack[0], self._at, self._persistent)
                step = _STEPS.get(opcode)
                if step is None:
                    raise self._bad(f"byte {self._at - 1} is {opcode:#04x}, an opcode that plain data does not use")
                self._allowance -= _OPCODE_COST  # checked by whatever allocates more
                step(self)
        except (IndexError, KeyError):
            raise self._bad(f"byte {self._at - 1} reads a value that was never stored") from None
        if stop < len(data):
            raise self._bad(f"it is longer than {PICKLE_MAX:,} bytes")
        raise self._cut_short()

    # What every step is made of.

    def _bad(self, why: str) -> BadPickle:
        return BadPickle(file=self._file, why=f"cannot read this pickle: {why}")

    def _cut_short(self) -> PickleCutShort:
        return PickleCutShort(file=self._file, bytes=len(self._data) - self._start)

    def _charge(self, cost: int) -> None:
        self._allowance -= cost
        if self._allowance < 0:
            raise self._bad("far more values than its length allows")

    def _count_idle(self) -> None:
        """Of a flood of marks or pops, memory is given back and not only time taken: the count ends it."""
        self._idle += 1
        if self._idle > PICKLE_IDLE_FREE and self._idle * PICKLE_IDLE_BYTES > self._at - self._start:
            raise self._bad(f"{self._idle:,} of its first {self._at - self._start:,} bytes are marks and pops")

    def _take(self, length: int) -> bytes:
        stop = self._at + length
        if stop > len(self._data):
            raise self._cut_short()
        taken = self._data[self._at : stop]
        self._at = stop
        return taken

    def number(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _line(self) -> str:
        stop = self._data.find(b"\n", self._at)
        if stop < 0:
            raise self._cut_short()
        return self._decoded(self._take(stop + 1 - self._at)[:-1])

    def _decoded(self, text: bytes) -> str:
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad("a string is not UTF-8") from None
        self._charge(getsizeof(decoded))
        return decoded

    def push(self, value: object, cost: int = 0) -> None:
        self._charge(cost)
        self.stack.append(value)

    def pop_to_mark(self) -> list[object]:
        values = self.stack
        self.stack = self._below_marks.pop()
        self._allowance += _LIST_COST
        return values

    # The steps, one per opcode or per kind of opcodes.

    def protocol(self) -> None:
        version = self.number(1)
        if version > _HIGHEST_PROTOCOL:
            raise self._bad(f"unknown protocol {version}")

    def frame(self) -> None:
        # Frames are a hint for readers of streams; the bytes are here already.
        if self.number(8) > len(self._data) - self._at:
            raise self._cut_short()

    def integer(self, length: int, signed: bool) -> None:
        self.push(int.from_bytes(self._take(length), "little", signed=signed), _SMALL_COST)

    def long(self, prefix: int) -> None:
        length = self.number(prefix)
        if length > _INTEGER_BYTES_MAX:
            raise self._bad(f"an integer claims {length:,} bytes")
        self._charge(length)
        self.integer(length, True)

    def float(self) -> None:
        self.push(struct.unpack(">d", self._take(8))[0], _SMALL_COST)

    def text(self, prefix: int) -> None:
        self.push(self._decoded(self._take(self.number(prefix))))

    def bytes(self, prefix: int) -> None:
        content = self._take(self.number(prefix))
        self.push(content, getsizeof(content))

    def pop_last(self, count: int) -> list[object]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def tuple_of(self, values: list[object]) -> None:
        self.push(tuple(values), _TUPLE_COST + 8 * len(values))

    def frozen_set(self) -> None:
        self.push(Made(SET, (), items=self.pop_to_mark()), _MADE_COST)

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        self._charge(_SLOT_COST * len(values))
        if type(target) is list:
            target.extend(values)
        elif type(target) is Made:
            if target.items is None:
                self._charge(_LIST_COST)
                target.items = []
            target.items.extend(values)
        else:
            raise self._bad("elements are added to a value that is not a collection")

    def set_items(self, flat: list[object]) -> None:
        if len(flat) % 2:
            raise self._bad("a key has no value")
        target = self.stack[-1]
        if type(target) is not Mapping and type(target) is not Made:
            raise self._bad("items are set on a value that is not a dictionary")
        self._charge(_PAIR_COST * (len(flat) // 2))
        if target.pairs is None:
            self._charge(_LIST_COST)
            target.pairs = []
        target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    def mark(self) -> None:
        self._count_idle()
        self._charge(_LIST_COST)
        self._below_marks.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        self._count_idle()
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def remember(self, key: int) -> None:
        self._charge(_MEMO_COST)
        self.memo[key] = self.stack[-1]

    def global_from_lines(self) -> None:
        self._push_global(self._line(), self._line())

    def global_from_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise self._bad("an imported name is not a string")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        found = Global(module, name)
        if str(found) not in self._allowed:
            # A name from a stranger may be long and may hold control characters.
            raise UnsafePickle(file=self._file, what=repr(str(found)[:200])[1:-1])
        self.push(found, _MADE_COST)

    def call(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not Global:
            raise self._bad("a call to something that is not a name")
        if type(args) is not tuple:
            raise self._bad(f"a call to {kind} without a tuple of arguments")
        self.push(Made(kind, args), _MADE_COST)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Made:
            raise self._bad("a state is set on a value that has none")
        target.state = state

    def persistent(self) -> None:
        found = Persistent(self.stack.pop())
        self.push(found, _MADE_COST)
        self._persistent.append(found)


_STOP = 0x2E

_STEPS: Final[dict[int, Callable[[_Machine], object]]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    0x4E: lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    0x4A: lambda machine: machine.integer(4, True),  # BININT
    0x4B: lambda machine: machine.integer(1, False),  # BININT1
    0x4D: lambda machine: machine.integer(2, False),  # BININT2
    0x8A: lambda machine: machine.long(1),
    0x8B: lambda machine: machine.long(4),
    0x47: _Machine.float,
    0x58: lambda machine: machine.text(4),  # BINUNICODE
    0x8C: lambda machine: machine.text(1),  # SHORT_BINUNICODE
    0x8D: lambda machine: machine.text(8),  # BINUNICODE8
    0x55: lambda machine: machine.text(1),  # SHORT_BINSTRING: how Python 2 wrote names
    0x54: lambda machine: machine.text(4),  # BINSTRING
    0x43: lambda machine: machine.bytes(1),  # SHORT_BINBYTES
    0x42: lambda machine: machine.bytes(4),  # BINBYTES
    0x8E: lambda machine: machine.bytes(8),  # BINBYTES8
    0x96: lambda machine: machine.bytes(8),  # BYTEARRAY8
    0x29: lambda machine: machine.push(()),  # EMPTY_TUPLE
    0x85: lambda machine: machine.tuple_of(machine.pop_last(1)),
    0x86: lambda machine: machine.tuple_of(machine.pop_last(2)),
    0x87: lambda machine: machine.tuple_of(machine.pop_last(3)),
    0x74: lambda machine: machine.tuple_of(machine.pop_to_mark()),
    0x5D: lambda machine: machine.push([], _LIST_COST),  # EMPTY_LIST
    0x7D: lambda machine: machine.push(Mapping(), _MAPPING_COST),  # EMPTY_DICT
    0x8F: lambda machine: machine.push(Made(SET, ()), _MADE_COST),  # EMPTY_SET
    0x91: _Machine.frozen_set,
    0x61: lambda machine: machine.extend(machine.pop_last(1)),  # APPEND
    0x65: lambda machine: machine.extend(machine.pop_to_mark()),  # APPENDS
    0x90: lambda machine: machine.extend(machine.pop_to_mark()),  # ADDITEMS
    0x73: lambda machine: machine.set_items(machine.pop_last(2)),
    0x75: lambda machine: machine.set_items(machine.pop_to_mark()),
    0x28: _Machine.mark,
    0x30: _Machine.pop,
    0x31: _Machine.pop_to_mark,
    0x32: lambda machine: machine.push(machine.stack[-1]),  # DUP
    0x94: lambda machine: machine.remember(len(machine.memo)),  # MEMOIZE
    0x71: lambda machine: machine.remember(machine.number(1)),  # BINPUT
    0x72: lambda machine: machine.remember(machine.number(4)),  # LONG_BINPUT
    0x68: lambda machine: machine.push(machine.memo[machine.number(1)]),  # BINGET
    0x6A: lambda machine: machine.push(machine.memo[machine.number(4)]),  # LONG_BINGET
    0x63: _Machine.global_from_lines,
    0x93: _Machine.global_from_stack,
    0x52: _Machine.call,  # REDUCE
    0x81: _Machine.call,  # NEWOBJ
    0x62: _Machine.build,
    0x51: _Machine.persistent,  # BINPERSID
}
