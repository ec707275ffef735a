"""Plans as bytes: what their digests cover."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.limits import OUTLINE_FILES, OUTLINE_PATHS
from reshard.pipeline.planning.codec import PlannedFile, decode_outline, outline, shard_digest
from reshard.pipeline.planning.model import Entry, Scale
from reshard.pipeline.planning.pack import Heading, header_of
from reshard.pipeline.request import key_of
from reshard.pipeline.tensors import Piece, Pin, StoredFile, Tensor
from tests.pipeline.planning.builders import opened_of, plan_of

PIN = Pin("https://hub.example", "a/b", "c" * 40)
FILES = (
    StoredFile("a.bin", 100, sha256="a" * 64, xet="b" * 64),
    StoredFile("b.bin", 100, xet="b" * 64),
    StoredFile("ü/c.bin", 100),
)

counts = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
orders = st.sampled_from(["little", "big"])
pieces = st.builds(Piece, st.integers(0, 2), st.integers(0, 2**50), counts, counts, st.none() | counts, orders)
tensors = st.builds(
    Tensor, st.text(max_size=8), st.sampled_from(["F32", "BF16"]), st.just((2,)), st.lists(pieces).map(tuple)
)
scales = st.builds(Scale, tensors, st.tuples(st.integers(1, 200), st.integers(1, 200)))
entries = st.lists(st.builds(Entry, tensors, st.sampled_from(["F32", "F16"]), st.none() | scales), max_size=5)


@given(entries)
def test_a_shards_digest_covers_its_header_and_every_piece_of_what_is_read(entries: list[Entry]) -> None:
    header = header_of(entries, Heading({"format": "pt"}))
    names = ["a" * 64, "b" * 64, key_of([PIN.endpoint, PIN.repo, PIN.commit, "ü/c.bin"])]

    def read(tensor: Tensor) -> list[object]:
        return [[names[p.file], *p[1:]] for p in tensor.pieces]

    def scaled(scale: Scale) -> list[object]:
        return [[scale.block, scale.tensor.dtype, scale.tensor.shape], read(scale.tensor)]

    read_of = [[e.as_dtype, read(e.tensor), *(scaled(e.scale) if e.scale else [])] for e in entries]
    assert shard_digest(header, entries, FILES, PIN) == key_of([header.decode("latin-1"), read_of])


def test_a_shards_digest_is_the_one_that_receipts_of_earlier_releases_have() -> None:
    tensor = Tensor("w", "F32", (2,), (Piece(0, 8, (0,), (2,)),))
    header = header_of([Entry(tensor, "F32")], Heading({"format": "pt"}))
    assert (
        shard_digest(header, [Entry(tensor, "F32")], FILES, PIN)
        == "d2ade4775c3e4d6500e16f96359a86d0a6a0e91e389082b82159a2235812766f"
    )


def test_an_outline_has_the_first_files_of_a_plan_in_two_kilobytes() -> None:
    plan = plan_of(opened_of([[900] * 30]), size=2000)
    assert decode_outline(outline(plan)) == [PlannedFile(s.path, s.size, len(s.entries)) for s in plan.shards]
    many = OUTLINE_FILES + 1
    names = [f"model-{number + 1:05d}-of-{many:05d}.safetensors" for number in range(many)]
    shards = [replace(plan.shards[0], path=name, size=10**8 + 7919**n % 10**8) for n, name in enumerate(names)]
    kept = outline(replace(plan, shards=tuple(shards)))
    assert [file.path for file in decode_outline(kept)] == names[:OUTLINE_FILES] and len(kept) < 2000
    long = [replace(plan.shards[0], path=f"{number}" * 1000) for number in range(1, 10)]
    assert len(decode_outline(outline(replace(plan, shards=tuple(long * 10))))) == OUTLINE_PATHS // 1000
