"""What stands in many places of a pickle, by a few bytes each, is looked at once or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from reshard.pipeline.checkpoint.formats.pickles import Global, Made, Mapping, Persistent
from reshard.pipeline.checkpoint.formats.torch_state import describe, fields, pairs_of, tensors_of, view_of, views_of
from reshard.pipeline.errors import BadPickle
from reshard.pipeline.limits import ATTRIBUTES_MAX

Pairs = list[tuple[object, object]]


class Counting(Pairs):
    """Pairs that count how often somebody begins to walk them."""

    walks = 0

    def __iter__(self) -> Iterator[tuple[object, object]]:
        self.walks += 1
        return super().__iter__()


def storage(elements: int, key: str = "0") -> Persistent:
    return Persistent(("storage", Global("torch", "FloatStorage"), key, "cpu", elements))


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], of: Persistent, *metadata: object) -> Made:
    kind = Global("torch._utils", "_rebuild_tensor_v2")
    return Made(kind, (of, 0, shape, strides, False, Mapping(), *metadata))


WEIGHT = ("w", tensor((2,), (1,), storage(2)))


@pytest.mark.parametrize("key", ["name", 3])
@pytest.mark.parametrize("around", [lambda shared: shared, lambda shared: [shared] * 9, lambda shared: (shared,)])
def test_a_dictionary_in_a_thousand_places_is_walked_as_often_as_in_one(
    key: object, around: Callable[[Mapping], object]
) -> None:
    def walks(places: int) -> int:
        pairs = Counting([(key, None)])
        shared = Mapping(pairs)
        beside = Mapping([WEIGHT, *((f"x{i}", around(shared)) for i in range(places))])
        tensors, _ = tensors_of(beside, "x.bin")
        assert list(tensors) == ["w"]
        return pairs.walks

    assert 0 < walks(1000) == walks(1)


def test_a_tensor_is_said_to_be_in_every_value_that_holds_it() -> None:
    shared = [3, WEIGHT[1], 4]
    root = Mapping([("model", Mapping([WEIGHT])), ("a", [shared]), ("b", [shared]), ("c", [4])])
    _, notes = tensors_of(root, "x.bin")
    assert notes[1:] == (
        "x.bin: skipped a (a list of 1, with tensors)",
        "x.bin: skipped b (a list of 1, with tensors)",
        "x.bin: skipped c (a list of 1)",
    )


def test_an_object_is_described_by_its_class() -> None:
    made = [Made(Global(module, name), (), None) for module, name in (("argparse", "Namespace"), ("numpy", "dtype"))]
    assert [*map(describe, made)] == ["an argparse.Namespace", "a numpy.dtype"]
    assert describe(object()) == "a value of an unknown kind"


def test_attributes_and_metadata_are_few() -> None:
    many = Mapping([(f"a{i}", False) for i in range(ATTRIBUTES_MAX + 1)])
    with pytest.raises(BadPickle, match="expected a Shard"):
        fields(Made(Global("x", "Shard"), (), many), "Shard", "x.bin")
    with pytest.raises(BadPickle, match="malformed metadata"):
        view_of(tensor((2,), (1,), storage(2), many), "w", "x.bin")
    few = Mapping(many.pairs[:-1])
    assert len(fields(Made(Global("x", "Shard"), (), few), "Shard", "x.bin")) == ATTRIBUTES_MAX
    assert view_of(tensor((2,), (1,), storage(2), few), "w", "x.bin").shape == (2,)


def test_pairs_that_python_2_passed_are_none_where_there_are_too_many() -> None:
    old = Made(Global("collections", "OrderedDict"), ([("a", 1), ("b", 2)],))
    assert pairs_of(old, 2) == [("a", 1), ("b", 2)]
    assert pairs_of(old, 1) is None


def test_strided_tensors_that_span_one_storage_over_and_over_are_refused() -> None:
    """Each is two elements, and a gather reads all that lies between them."""
    elements = 1 << 20

    def views(count: int) -> int:
        kept = storage(elements)
        return len(views_of({f"w{i}": tensor((2,), (elements - 1,), kept) for i in range(count)}, "x.bin"))

    assert views(64) == 64
    with pytest.raises(BadPickle, match=r"strided tensors span 272,629,760 bytes together, .* 4,194,304"):
        views(65)


def test_a_tensor_has_one_dimension_less_than_numpy_can_have() -> None:
    assert len(view_of(tensor((1,) * 63, (1,) * 63, storage(1)), "w", "x.bin").shape) == 63
    with pytest.raises(BadPickle, match="invalid shape"):
        view_of(tensor((1,) * 64, (1,) * 64, storage(1)), "w", "x.bin")
