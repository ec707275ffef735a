"""The report of a catalog's night: what was done, what failed and what to type next, as Markdown that renders."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from reshard.client.catalog_report import markdown
from reshard.client.models.catalogs import Catalog
from reshard.client.operations.catalogs import told
from reshard.pipeline.errors import NoWeights, ReshardError, SourceGated, SourceNotFound, TargetsCollide
from reshard.worker.followers.records import CatalogStatus, Definition, Ended, tally

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BEGAN = 1_795_222_800.0  # 2026-11-21 01:00:00 UTC


def failed(error: ReshardError, job: str | None = "j1") -> Ended:
    return Ended("failed", job, None, 10, 0, error.to_dict())


def seen(*rows: tuple[str, str | None, Ended], todo: int = 0, note: str | None = None) -> Catalog:
    outcomes = Counter(what for _, _, ended in rows for what in tally(ended))
    return told(CatalogStatus(
        definition=Definition(name="mirror", text="name: mirror", asked_by="ann@desk"),
        state="stopped" if todo else "failed" if outcomes["failed"] else "done",
        run="r", started=BEGAN, since=BEGAN + 4330, note=note,
        entries=len(rows) + todo, todo=todo, active={}, running=0, outcomes=outcomes,
        read=sum(ended.read for _, _, ended in rows), uploaded=sum(ended.uploaded for _, _, ended in rows),
        ended=tuple((repo, ended) for repo, _, ended in rows), targets=tuple(target for _, target, _ in rows),
        next=None, success=None,
    ))  # fmt: skip


NIGHT = seen(
    ("them/a", "us/a", Ended("published", "j1", COMMIT, 1_500_000_000, 2_000_000)),
    ("them/b", "http://hub.example/us/b", Ended("published", "j2", COMMIT[::-1], 500_000_000, 0)),
    ("them/c", "us/c", Ended("unchanged")),
    ("them/d", "us/d", failed(SourceGated(repo="them/d", endpoint="https://hub"))),
    ("them/e", "us/e", failed(SourceGated(repo="them/e", endpoint="https://hub"))),
    ("them/f", "us/f", failed(NoWeights(place="them/f", found=";\nit has GGUF files"))),
)


@pytest.fixture(autouse=True)
def endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mine.example/")


def test_failures_are_counted_by_code() -> None:
    assert NIGHT.failed() == {"source.gated": 2, "source.no_weights": 1}


def test_the_figures_add_up() -> None:
    page = markdown(NIGHT)
    assert page.startswith(
        "# Catalog mirror: failed\n\nStarted 2026-11-21 01:00:00 UTC, failed since 2026-11-21 02:12:10 UTC"
    )
    assert " UTC (after 1 h 12 min).\nSubmitted by ann@desk" in page
    assert "| published | 2 | 2.0 GB | 2.0 MB |" in page
    assert "| unchanged | 1 | 0 bytes | 0 bytes |" in page
    assert "| failed | 3 | 30 bytes | 0 bytes |" in page
    assert "| all | 6 | 2.0 GB | 2.0 MB |" in page
    assert "to do" not in page


def test_each_commit_is_a_link_to_where_it_is() -> None:
    page = markdown(NIGHT)
    assert f"| them/a | us/a | [`01234567`](https://mine.example/us/a/commit/{COMMIT}) | 1.5 GB | 2.0 MB |" in page
    assert f"](http://hub.example/us/b/commit/{COMMIT[::-1]})" in page


def test_each_code_has_its_models_what_to_do_and_the_command_after_that() -> None:
    page = markdown(NIGHT)
    gated, weights = page.index("### `source.gated`: 2 models"), page.index("### `source.no_weights`: 1 model")
    assert gated < weights, "the most frequent first"
    assert "`reshard catalog retry mirror --only source.gated`" in page[gated:weights]
    assert "* them/e is gated, and the token does not have access; request access" in page[gated:weights]
    assert "request access at https://hub/them/d" in page and "request access at https://hub/them/e" in page
    assert (
        "check that this is a model. Then run `reshard catalog retry mirror --only source.no_weights`" in page[weights:]
    )
    assert "* them/f has no weights that reshard can read; it has GGUF files (job `j1`)" in page


def test_a_command_that_a_hint_ends_with_is_said_once() -> None:
    nobody = SourceNotFound(repo="them/x", endpoint="https://hub", again="run `reshard catalog retry mirror`")
    page = markdown(seen(("them/x", None, failed(nobody, None))))
    assert page.count("reshard catalog retry mirror") == 1
    assert ". Then run `reshard catalog retry mirror --only source.not_found`." in page


def test_a_night_that_was_stopped_says_why_and_what_is_left() -> None:
    collide = failed(TargetsCollide(target="us/x", source="them/a", others="them/b"), None)
    page = markdown(seen(("them/a", None, collide), todo=4, note="more than 0 failed"))
    assert page.startswith("# Catalog mirror: stopped\n")
    assert "\n**more than 0 failed**\n" in page
    assert "in a template. Then run `reshard catalog submit FILE`." in page
    assert "| to do | 4 |" in page and "| all | 5 |" in page
    assert "\n* them/a and them/b have the same target: us/x\n" in page
    assert "## Published" not in page and "(job" not in page


def test_rows_have_as_many_cells_as_their_heads() -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", markdown(NIGHT), re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
