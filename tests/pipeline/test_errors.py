"""An error is data: it is written into a job on one machine, and is the same error on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.pipeline.errors import NoWeights, ReshardError
from reshard.pipeline.find import find_checkpoints
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.stores.folder import FolderSource


def kept(error: ReshardError) -> ReshardError:
    return ReshardError.from_dict(json.loads(json.dumps(error.to_dict())))


@pytest.mark.parametrize("place", [Hub(repo="a/b", revision="v1"), Path("/a"), {"b"}, None])
def test_an_error_is_kept_whatever_its_facts_are(place: object) -> None:
    error = NoWeights(place=place, found="")
    again = kept(error)
    assert (type(again), str(again), again.next_step) == (NoWeights, str(error), error.next_step)


def test_what_has_no_weights_is_named_by_a_text(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(NoWeights) as refused:
        find_checkpoints(FolderSource.open(Folder(path=str(tmp_path))))
    assert refused.value.facts["place"] == str(tmp_path)
