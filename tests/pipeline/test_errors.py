"""An error is data: it is written into a job on one machine, and is the same error on another."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from string import Formatter

import pytest

from reshard.pipeline.arguments import as_arguments
from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.errors import (
    GO_ON,
    BadCatalog,
    DiskFull,
    NoWeights,
    ObjectLost,
    Oversize,
    ReshardError,
    TargetDrifted,
    UsageError,
    by_code,
)
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.stores.folder.source import FolderSource


def kept(error: ReshardError) -> ReshardError:
    return ReshardError.from_dict(json.loads(json.dumps(error.to_dict())))


@pytest.mark.parametrize("place", [Hub(repo="a/b", revision="v1"), Path("/a"), {"b"}, None])
def test_an_error_is_kept_whatever_its_facts_are(place: object) -> None:
    error = NoWeights(place=place, found="")
    again = kept(error)
    assert (type(again), str(again), again.next_step) == (NoWeights, str(error), error.next_step)


@pytest.mark.parametrize("again", [copy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))])  # noqa: S301
def test_an_error_comes_whole_from_another_process(again: Callable[[ReshardError], ReshardError]) -> None:
    lost = ObjectLost(["a" * 64], repo="us/model", what="w")
    lost.told = as_arguments
    found = again(lost)
    assert isinstance(found, ObjectLost) and found.lost == lost.lost and found.told is as_arguments
    assert (str(found), found.next_step, found.facts) == (str(lost), lost.next_step, lost.facts)


def test_an_error_shows_itself_in_the_words_of_who_gets_it() -> None:
    error = UsageError(what="--builder requires --signed-by")
    error.told = as_arguments
    assert repr(error) == f"UsageError({str(error)!r})" and "--" not in repr(error)


def test_what_has_no_weights_is_named_by_a_text(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"ONNX")
    with pytest.raises(NoWeights) as refused:
        find_checkpoints(FolderSource.open(Folder(path=str(tmp_path))))
    assert refused.value.facts["place"] == str(tmp_path)


def test_numbers_in_errors_are_told_with_their_thousands_apart_and_kept_as_they_are() -> None:
    full = DiskFull(path="/scratch", needed=209_715_200, free=1_000)
    assert str(full) == "not enough disk space on /scratch: 210 MB needed, 1.0 kB free"
    assert kept(full).facts["needed"] == 209_715_200 and str(kept(full)) == str(full)
    tight = Oversize(tensor="w", bytes=5_000_000, size=2_000)
    assert tight.next_step.startswith("raise --size to at least 5,000,000 bytes, ")
    assert "m.yaml, line 1200: " in str(
        BadCatalog(file="m.yaml", line=1200, key="to", why="it is empty", fix="fill it")
    )


def made(kind: type[ReshardError], **facts: object) -> ReshardError:
    """One with a value for each of its names."""
    texts = [text for text in (kind.message, kind.hint) if text]
    names = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
    return kind(**{name: f"a {name}" for name in names - GO_ON.keys() - {"job", "command"}} | facts)


HINTED = [kind for kind in by_code().values() if any(f"{{{name}}}" in kind.hint for name in GO_ON)]


@pytest.mark.parametrize("kind", HINTED, ids=lambda kind: kind.code)
def test_a_hint_goes_on_with_the_job_where_there_is_one_and_else_with_the_command(kind: type[ReshardError]) -> None:
    typed, queued = made(kind).next_step, kept(made(kind, job="abc123")).next_step
    assert "abc123" not in typed and "JOB" not in typed
    assert re.search(r"`reshard (retry|rollback|status) abc123", queued)
    assert "same command" not in queued


def test_a_job_whose_target_drifted_is_retried_onto_what_is_there() -> None:
    error = made(TargetDrifted)
    assert error.next_step.endswith("run the same command with --overwrite")
    error.facts["job"] = "abc123"
    assert error.next_step.endswith("`reshard retry abc123 --overwrite`")
