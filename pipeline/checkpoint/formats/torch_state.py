"""From the inert values of a torch pickle to tensors: what `torch.save` writes, in words of storages and views.

Sources: `torch/_utils.py` (the `_rebuild_*` functions, whose arguments these are), `torch/serialization.py`
(persistent ids) and `torch/storage.py` (the storage classes). None of those functions is called here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeGuard

from reshard.pipeline.checkpoint.formats import torch_names
from reshard.pipeline.checkpoint.formats.nesting import Branch, Leaf, Other, label, weights_of
from reshard.pipeline.checkpoint.formats.pickles import Global, Made, Persistent
from reshard.pipeline.checkpoint.formats.pickles import Mapping as PickledMapping
from reshard.pipeline.errors import BadPickle, DuplicateTensor, Unsupported
from reshard.pipeline.limits import ATTRIBUTES_MAX, EXPANSION_FREE, EXPANSION_MAX, NESTING_MAX, VALUES_MAX
from reshard.pipeline.tensors import DTYPE_BITS, Piece, Record, Tensor, packed_strides

_DIMENSIONS_MAX = 63  # torch and numpy have 64 at most, and a gather needs one more than the tensor has
_BYTES_MAX = 1 << 63  # every reader of the format counts bytes in 64 bits


class Storage(NamedTuple):
    """A run of bytes that the archive keeps under ``key``, of which this one uses ``start <= byte < start + size``."""

    key: str
    whole: int  # bytes that the archive must keep under the key
    start: int
    size: int
    width: int  # bytes of an element
    dtype: str | None  # torch's name; None for a storage that counts bytes


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as torch sees it. Offset and strides are bytes, and inside the storage for every element."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def packed(self) -> bool:
        return self.dtype == "F4" or _is_packed(self.shape, self.strides, DTYPE_BITS[self.dtype] // 8)

    @property
    def span(self) -> int:
        """The bytes of the storage from its first element to the end of its last one."""
        if self.packed or not self.size:
            return self.size
        reach = sum((extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True))
        return reach + DTYPE_BITS[self.dtype] // 8


# --------------------------------------------------------------------------------------------------------- values


def pairs_of(value: object, most: int = VALUES_MAX) -> Sequence[tuple[object, object]] | None:
    """The pairs of a pickled dictionary, or None when the value is not one of at most so many.

    One dictionary may stand in many places, by a few bytes each: who looks at it in each of them has to bound it.
    """
    pairs: Sequence[tuple[object, object]]
    if type(value) is PickledMapping:
        pairs = value.pairs
    elif type(value) is Made and str(value.kind) in torch_names.DICTIONARIES:
        pairs = value.pairs or ()
        # Python 2 passed the pairs as an argument.
        if str(value.kind) == "collections.OrderedDict" and value.args and type(value.args[0]) is list:
            passed = value.args[0]
            if len(passed) > most:
                return None
            if all(type(pair) in (list, tuple) and len(pair) == 2 for pair in passed):
                pairs = [*((pair[0], pair[1]) for pair in passed), *pairs]
    else:
        return None
    return pairs if len(pairs) <= most else None


def is_tensor(value: object) -> TypeGuard[Made]:
    return type(value) is Made and str(value.kind) in torch_names.TENSOR_KINDS


def fields(value: object, kind: str, file: str) -> dict[str, object]:
    """The attributes of a pickled object whose class is called ``kind``; raises BadPickle where it is none."""
    if type(value) is Made and value.kind.name == kind:
        if value.state is None:
            return {}
        pairs = pairs_of(value.state, ATTRIBUTES_MAX)
        if pairs is not None and all(type(key) is str for key, _ in pairs):
            return {key: field for key, field in pairs if type(key) is str}
    raise BadPickle(file=file, why=f"expected a {kind}")


def named(value: object, what: str, file: str) -> dict[str, object]:
    """A pickled dictionary whose keys are all text; raises BadPickle where ``value`` is none."""
    pairs = pairs_of(value)
    if pairs is None or not all(type(key) is str for key, _ in pairs):
        raise BadPickle(file=file, why=f"{what} is not a dictionary of names")
    return {key: field for key, field in pairs if type(key) is str}


def describe(value: object) -> str:
    """A few words on a value other than a tensor, of any kind and size."""
    if value is None or type(value) in (bool, int, float):
        return f"{type(value).__name__} {value!r}"[:60] if value is not None else "None"
    if type(value) is str:
        return f"str {value[:40]!r}"
    if type(value) is bytes or type(value) is tuple or type(value) is list:
        return f"a {type(value).__name__} of {len(value)}"
    if (pairs := pairs_of(value)) is not None:
        return f"a dictionary of {len(pairs)}"
    name = str(value.kind if type(value) is Made else value if type(value) is Global else "value of an unknown kind")
    return f"{'an' if name.lower().startswith(tuple('aeio')) else 'a'} {name}"


class _Tree:
    """Makes a tree of nested dictionaries, and looks for tensors inside what is none: only at so many values."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._looked_at = 0
        # By identity, so that what occurs often is not walked often, and by whether it lies too deep to be entered;
        # None while a dictionary's own inside is.
        self._done: dict[tuple[int, bool], Branch[Made] | Other | None] = {}
        self._bare: set[int] = set()  # values without a tensor anywhere inside

    def node(self, value: object, depth: int = 0) -> Branch[Made] | Leaf[Made] | Other:
        if is_tensor(value):
            return Leaf(value)
        if type(value) not in _COLLECTIONS:
            return Other(describe(value))
        key = id(value), depth >= NESTING_MAX
        if key not in self._done:
            self._done[key] = None
            self._done[key] = self._inside(value, depth)
        return self._done[key] or Other("a dictionary inside itself")

    def _inside(self, value: object, depth: int) -> Branch[Made] | Other:
        pairs = pairs_of(value)
        self._count(len(pairs or ()))
        if pairs is None or depth >= NESTING_MAX or not all(type(key) is str for key, _ in pairs):
            return Other(describe(value), self._finds_tensor(value))
        return self._branch(pairs, depth + 1)

    def _branch(self, pairs: Iterable[tuple[object, object]], depth: int) -> Branch[Made]:
        branch: Branch[Made] = Branch()
        for key, child in pairs:
            assert type(key) is str
            if key in branch.children:
                raise DuplicateTensor(tensor=label((key,)), file=self._file, other="the same dictionary")
            branch.children[key] = node = self.node(child, depth)
            branch.has_tensors = branch.has_tensors or isinstance(node, Leaf) or node.has_tensors
        return branch

    def _finds_tensor(self, value: object) -> bool:
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if is_tensor(value):
                return True
            if type(value) not in _COLLECTIONS or id(value) in seen or id(value) in self._bare:
                continue
            seen.add(id(value))
            inner = _inner(value)
            self._count(len(inner))
            waiting.extend(inner)
        self._bare |= seen
        return False

    def _count(self, values: int) -> None:
        self._looked_at += values
        if self._looked_at > VALUES_MAX:
            raise BadPickle(file=self._file, why=f"more than {VALUES_MAX:,} values")


_COLLECTIONS = (tuple, list, PickledMapping, Made)


def _inner(value: object) -> Sequence[object]:
    if type(value) is tuple or type(value) is list:
        return value
    if type(value) is PickledMapping:
        return [part for pair in value.pairs for part in pair]
    if type(value) is Made:
        parts = (part for pair in value.pairs or () for part in pair)
        return [*value.args, value.state, *(value.items or ()), *parts]
    return ()


# ---------------------------------------------------------------------------------------------------------- views


def counts_of(value: object) -> tuple[int, ...] | None:
    """A tuple of non-negative integers, or the torch.Size of one; None for anything else."""
    if type(value) is Made and str(value.kind) == "torch.Size":
        value = value.args[0] if len(value.args) == 1 else None
    if not (type(value) is tuple or type(value) is list) or len(value) > _DIMENSIONS_MAX:
        return None
    found = tuple(count for count in value if type(count) is int and 0 <= count < _BYTES_MAX)
    return found if len(found) == len(value) else None


def count_of(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _BYTES_MAX else None


def dtype_of(value: object, what: str, file: str) -> str:
    """The format's name of a pickled torch.dtype; raises Unsupported for those that it does not know."""
    return _dtype(value.name if type(value) is Global and value.module == "torch" else "", what, file)


def _dtype(name: str, what: str, file: str) -> str:
    if name in torch_names.DTYPES:
        return torch_names.DTYPES[name]
    if name in torch_names.FOREIGN_DTYPES:
        raise Unsupported(file=file, what=f"{what} (dtype {name})")
    raise BadPickle(file=file, why=f"{what} has no valid dtype")


def storage_of(value: object, what: str, file: str) -> Storage:
    """The storage behind a persistent id: ``("storage", class, key, device, elements[, view])``.

    Raises BadPickle where it is none.
    """
    if type(value) is not Persistent or type(value.key) is not tuple or len(value.key) not in (5, 6):
        raise BadPickle(file=file, why=f"{what} has no storage")
    tag, kind, key, _device, elements, *view = value.key
    count = count_of(elements)
    if tag != "storage" or type(kind) is not Global or type(key) is not str or count is None:
        raise BadPickle(file=file, why=f"{what} has a malformed storage")
    dtype: str | None = None
    width = 1
    if str(kind) not in torch_names.UNTYPED:
        if kind.name not in torch_names.STORAGES:
            raise BadPickle(file=file, why=f"{what} has the unknown storage class {kind}")
        dtype = torch_names.STORAGES[kind.name]
        width = torch_names.FOREIGN_STORED.get(dtype) or DTYPE_BITS[torch_names.DTYPES[dtype]] // 8
    whole = count * width
    start, size = 0, whole
    if view and view[0] is not None:
        # Files of torch before 0.4 name a part of a storage: (its key, first element, elements).
        part = view[0]
        if type(part) is not tuple or len(part) != 3:
            raise BadPickle(file=file, why=f"{what} has a malformed storage")
        first, length = count_of(part[1]), count_of(part[2])
        if first is None or length is None or first + length > count:
            raise BadPickle(file=file, why=f"{what} refers to a part outside its storage")
        start, size = first * width, length * width
    return Storage(key, whole, start, size, width, dtype)


def _unwrapped(made: Made, what: str, file: str) -> Made:
    """The plain tensor inside parameters and subclasses that add nothing to the bytes."""
    for _ in range(NESTING_MAX):
        kind = str(made.kind)
        if kind in torch_names.FOREIGN_KINDS:
            raise Unsupported(file=file, what=f"{what} ({torch_names.FOREIGN_KINDS[kind]})")
        if kind in torch_names.PARAMETER:
            inner = made.args[0] if made.args else None
        elif kind in torch_names.FROM_TYPE:
            if len(made.args) < 3 or type(made.args[0]) is not Global or type(made.args[2]) is not tuple:
                raise BadPickle(file=file, why=f"{what} is not a well-formed tensor")
            if type(made.args[1]) is not Global or str(made.args[1]) not in torch_names.PLAIN_TYPES:
                raise Unsupported(file=file, what=f"{what} (a tensor of a custom class)")
            inner = Made(made.args[0], made.args[2])
        else:
            return made
        if not is_tensor(inner):
            raise BadPickle(file=file, why=f"{what} is a parameter without a tensor")
        made = inner
    raise BadPickle(file=file, why=f"{what} is wrapped more than {NESTING_MAX} times")


def _refuse_lazy_bits(metadata: object, what: str, file: str) -> None:
    """Conjugate and negative views keep the bytes of the original and a flag; the bytes alone would be wrong."""
    if metadata is None:
        return
    pairs = pairs_of(metadata, ATTRIBUTES_MAX)
    if pairs is None:
        raise BadPickle(file=file, why=f"{what} has malformed metadata")
    for key, value in pairs:
        if value is not False and value is not None:
            name = key[:20] if type(key) is str else "metadata"
            raise Unsupported(file=file, what=f"{what} (a lazy view, {name!r})")


def view_of(made: Made, what: str, file: str) -> View:
    """The view that a pickled tensor is; raises Unsupported or BadPickle, saying ``what`` it was."""
    made = _unwrapped(made, what, file)
    kind, args = str(made.kind), made.args
    if len(args) not in torch_names.REBUILD.get(kind, ()):
        raise BadPickle(file=file, why=f"{what} is not a well-formed tensor")
    storage = storage_of(args[0], what, file)
    if kind == torch_names.REBUILD_V3:
        dtype = dtype_of(args[6], what, file)
    else:
        dtype = _dtype(storage.dtype, what, file) if storage.dtype else "U8"
    _refuse_lazy_bits(args[-1] if len(args) > min(torch_names.REBUILD[kind]) else None, what, file)
    offset, shape, steps = count_of(args[1]), counts_of(args[2]), counts_of(args[3])
    if offset is None or shape is None or steps is None or len(shape) != len(steps):
        raise BadPickle(file=file, why=f"{what} has an invalid shape, stride or offset")
    # Of 4-bit elements torch counts pairs, the format counts elements (safetensors, bindings/python, `prepare`).
    width = 1 if dtype == "F4" else DTYPE_BITS[dtype] // 8
    if dtype == "F4" and not (shape and _is_packed(shape, steps)):
        raise Unsupported(file=file, what=f"{what} (a strided tensor of 4-bit elements)")
    if prod(max(extent, 1) for extent in shape) * width >= _BYTES_MAX:
        raise BadPickle(file=file, why=f"{what} claims an impossibly large shape")
    size = prod(shape) * width
    last = offset + sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True))
    if size and (last + 1) * width > storage.size:
        raise BadPickle(file=file, why=f"{what} extends outside its storage of {storage.size:,} bytes")
    if size > EXPANSION_FREE and size > EXPANSION_MAX * storage.size:
        raise BadPickle(file=file, why=f"{what} claims {size:,} bytes, but its storage has {storage.size:,}")
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] * 2)
        steps = (0,) * len(shape)
    return View(storage, dtype, shape, tuple(step * width for step in steps), offset * width if size else 0)


def _is_packed(shape: tuple[int, ...], steps: tuple[int, ...], width: int = 1) -> bool:
    """Whether the strides are those of C order, for every dimension in which there is a step to take."""
    dimensions = zip(shape, steps, packed_strides(shape, width), strict=True)
    return 0 in shape or all(extent == 1 or step == expected for extent, step, expected in dimensions)


def piece_of(view: View, record: Record, big_endian: bool = False) -> Piece:
    """The view as one piece of a file, where ``record`` is its storage."""
    width = DTYPE_BITS[view.dtype] // 8
    return Piece(
        file=record.file,
        offset=record.start + view.storage.start + view.offset,
        at=(0,) * len(view.shape),
        shape=view.shape,
        strides=None if view.packed else view.strides,
        order="big" if big_endian and width > 1 else "little",
    )


# ------------------------------------------------------------------------------------------------------ state dicts


def tensors_of(root: object, file: str, told: Container[str] = ()) -> tuple[dict[str, Made], tuple[str, ...]]:
    """Name -> tensor, as it was pickled, for the weights in a pickled value, and notes on the rest but for ``told``.

    Raises Unsupported when the value is not a dictionary of tensors, DuplicateTensor, BadPickle.
    """
    pairs = pairs_of(root)
    if pairs is None:
        kind = "a single tensor" if is_tensor(root) else describe(root)
        raise Unsupported(file=file, what=f"a file with {kind} and no dictionary of tensors")
    if not pairs:
        return {}, ()  # one of several files may be empty
    node = _Tree(file).node(root)
    if not isinstance(node, Branch):
        raise Unsupported(file=file, what="a dictionary whose keys are not all names")
    return weights_of(node, file, told)


def views_of(tensors: Mapping[str, Made], file: str) -> dict[str, View]:
    """Name -> view of pickled tensors; raises Unsupported or BadPickle, also where together they claim too much."""
    views = {name: view_of(made, label((name,)), file) for name, made in tensors.items()}
    total = sum(view.size for view in views.values())
    spanned = sum(view.span for view in views.values() if not view.packed)  # which a gather reads
    if max(total, spanned) > EXPANSION_FREE:
        kept = sum({view.storage.key: view.storage.whole for view in views.values()}.values())
        if total > EXPANSION_MAX * kept:
            raise BadPickle(file=file, why=f"tensors claim {total:,} bytes, but the storages have {kept:,}")
        if spanned > EXPANSION_MAX * kept:
            why = f"strided tensors span {spanned:,} bytes together, but the storages have {kept:,}"
            raise BadPickle(file=file, why=why)
    return views


def tied_tensors(tensors: Iterable[Tensor]) -> tuple[tuple[str, ...], ...]:
    """Groups of two names and more whose tensors are made of the same bytes."""
    groups: dict[tuple[str, tuple[Piece, ...]], list[str]] = {}
    for tensor in tensors:
        if tensor.size:
            groups.setdefault((tensor.dtype, tensor.pieces), []).append(tensor.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def sizes_of(storages: Iterable[Storage], file: str) -> dict[str, int]:
    """Key -> bytes of every storage; raises BadPickle when one key has two different sizes."""
    sizes: dict[str, int] = {}
    for storage in storages:
        if sizes.setdefault(storage.key, storage.whole) != storage.whole:
            raise BadPickle(file=file, why=f"storage {label((storage.key,))} has two different sizes")
    return sizes
