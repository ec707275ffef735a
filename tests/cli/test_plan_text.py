"""A plan in words: a summary of eight lines, and how much moves."""

from __future__ import annotations

import re
from typing import Any

import pytest

from reshard.cli.plan_text import WHOLE, plan_text, summary_text
from reshard.client.models.plans import LeftOut, Plan, RankReads, Replaced, Shard, Transports
from reshard.client.models.records import Forecast, Sized
from reshard.pipeline.sizes import SINGLE

MOVES = Forecast(reads=3, read=91_665_048, written=90_868_336, seams=4, uploaded=491_376, at_most=False,
                 amplification=1.0088)  # fmt: skip
NOTES = [f"note {number}" for number in range(4)]


def plan(**more: Any) -> Plan:
    """Of one file into three, on the Hub; other fields are empty."""
    empty: dict[str, Any] = dict.fromkeys(
        (
            "ties",
            "indexes",
            "groups",
            "carried",
            "edited",
            "left_out",
            "replaced",
            "kept",
            "drift",
            "occupied",
            "notes",
        ),
        (),
    )
    given: dict[str, Any] = {
        "source": "them/m@0123456789ab", "target": "us/m", "into": "us/m", "undo": "us/m@main", "published": None,
        "size": 30_000_000, "tensors": 104, "bytes_read": 90_868_376, "bytes_written": 90_868_336, "forecast": MOVES,
        "transports": Transports(source="xet", target="xet"), "reads": [Sized(path="a", size=90_868_376)],
        "files": [Shard(path=f"b{i}", size=30_289_445, tensors=34) for i in range(3)], "largest": None,
        "manifest": None, "card": "README.md", "overwrite": False, "in_place": False, "may_replace": False,
    }  # fmt: skip
    return Plan.model_construct(**empty | given | more)


def test_a_summary_says_what_goes_where_in_how_many_files_and_what_moves() -> None:
    carried, left = [Sized(path="config.json", size=1)] * 10, [LeftOut(path=".gitattributes", why="")]
    said = summary_text(plan(carried=carried, left_out=left, notes=NOTES[:1]))
    assert said.splitlines() == [
        "them/m@0123456789ab -> us/m",
        "weights      1 file (90.9 MB) -> 3 files (90.9 MB), up to 30,000,000 bytes each",
        "other files  10 copied unchanged, 1 skipped",
        "moves        reads 91.7 MB (3 Xet requests), uploads about 491 kB",
        "note         note 0",
    ]
    assert summary_text(plan(size=SINGLE)).splitlines()[1] == "weights  1 file (90.9 MB) -> 3 files (90.9 MB)"
    assert summary_text(plan(files=[])).splitlines()[1] == "weights  unchanged, already in the target"
    assert "\nweights unchanged, already in the target\n" in plan_text(plan(files=[]))


def test_a_summary_has_at_most_eight_lines_whatever_there_is_to_tell() -> None:
    replaced = [Replaced(path="a", size=1, deleted=False), *[Replaced(path="b", size=1, deleted=True)] * 2]
    surprising = {"occupied": ["a", "b"], "drift": ["c is gone"] * 9, "replaced": replaced, "notes": NOTES}
    said = summary_text(plan(carried=[Sized(path="c", size=1)], **surprising)).splitlines()
    refuses = "a run will fail (exit code 7) unless you use --overwrite to replace them"
    assert said[3:] == [
        "target       overwrites 1 file, deletes 2 files",
        "moves        reads 91.7 MB (3 Xet requests), uploads about 491 kB",
        f"warning      2 files in the target that reshard did not publish from this source: a, b; {refuses}",
        f"warning      others changed 9 files in the target since reshard last published; {refuses}",
        "more         4 notes; use -v to show them",
    ]
    assert len(said) == 8
    whole = plan_text(plan(**surprising))
    assert re.findall(r"^note +(.+)$", whole, re.MULTILINE) == NOTES
    assert re.findall(r"^drift +(.+)$", whole, re.MULTILINE) == ["c is gone"] * 9


RANKS = [
    RankReads(rank=i, files=2 + i, bytes=6_100_000 + i, needed=6_000_000, patterns=[f"b{i}", "*.json"])
    for i in range(40)
]


def test_a_plan_that_is_cut_for_ranks_lists_what_each_reads() -> None:
    said = plan_text(plan(ranks=RANKS)).splitlines()
    assert "rank 1   reads 3 files, 6.1 MB, and needs 6.0 MB: --include b1 --include '*.json'" in said
    assert said.index("ranks    8 more; use `reshard plan --all` to show them") > 0
    assert sum(line.startswith("rank ") for line in plan_text(plan(ranks=RANKS), WHOLE).splitlines()) == 40


def test_a_summary_has_one_line_for_ranks_and_eight_lines_still() -> None:
    replaced, carried = [Replaced(path="a", size=1, deleted=False)], [Sized(path="c", size=1)]
    said = summary_text(plan(carried=carried, replaced=replaced, notes=NOTES, ranks=RANKS)).splitlines()
    assert said[4:] == [
        "ranks        40, each reading 6.1 MB; use -v to show the files",
        "moves        reads 91.7 MB (3 Xet requests), uploads about 491 kB",
        "note         note 0",
        "more         3 notes; use -v to show them",
    ]
    assert len(said) == 8
    larger = [RANKS[0], RANKS[1].model_copy(update={"bytes": 9_000_000})]
    assert "ranks    2, each reading 6.1 MB to 9.0 MB;" in summary_text(plan(ranks=larger))


@pytest.mark.parametrize(
    ("transports", "forecast", "says"),
    [
        (("xet", "xet"), {}, "reads 91.7 MB (3 Xet requests), uploads about 491 kB"),
        (("http", "lfs"), {"reads": 1, "at_most": True, "uploaded": 90_868_336},
         "reads 91.7 MB (1 HTTP request), uploads up to 90.9 MB (less if the Hub already has the data)"),
        (("file", "file"), {"uploaded": 90_868_336}, "reads 91.7 MB, writes 90.9 MB"),
        (("file", "file"), {"amplification": 2.04}, "reads 91.7 MB (2.0x the output), writes 491 kB"),
        (("xet", "xet"), {"amplification": 1.06},
         "reads 91.7 MB (3 Xet requests, 1.1x the output), uploads about 491 kB"),
    ],
)  # fmt: skip
def test_a_plan_says_how_much_moves_and_by_what(transports: tuple[str, str], forecast: Any, says: str) -> None:
    source, target = transports
    made = plan(transports=Transports(source=source, target=target), forecast=MOVES.model_copy(update=forecast))
    assert f"\nmoves    {says}" in summary_text(made)
    assert f"\nmoves  {says}\n" in plan_text(made)
    made = plan(target=None, transports=Transports(source=source, target=""), forecast=made.forecast)
    assert summary_text(made).splitlines()[-1] == f"moves    {says.rpartition(', ')[0]}"


def test_a_published_plan_has_nothing_to_do() -> None:
    said = plan_text(plan(published="c" * 40))
    assert said == "them/m@0123456789ab -> us/m\nNothing to do: the target is up to date"
    noted = plan_text(plan(published="c" * 40, notes=["theirs.txt: not covered by the signature"]))
    assert noted == f"{said}\nnote  theirs.txt: not covered by the signature"
