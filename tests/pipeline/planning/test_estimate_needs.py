"""What a plan says that a job needs is what the job then takes."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.pipeline.errors import DiskFull, TargetFull
from reshard.pipeline.limits import MEMORY_FLOOR, MEMORY_FLOOR_XET, STAGED_SHARDS_MAX
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.estimate import Needs, Room, needs, warnings
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import draft
from reshard.pipeline.stores.connect import Context, open_source, open_target
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import TRANSPORT, Run, upload
from tests.support.giants import save_sparse
from tests.support.models import save_model

SIZE = 20_000
NOTHING = Needs(0, 0, 0, 0, 0, 0, 0)
AMPLE = Room("/scratch", 10**9)
LICENSED = b"---\nlicense: mit\n---\n"


def drafted(source: str | Path, target: str | Path, **options: Any) -> tuple[Plan, Needs]:
    chosen = Options(**{"transport": os.environ.get(TRANSPORT, "auto")} | options)
    request = Request(source=parse_place(str(source)), target=parse_place(str(target)), options=chosen)
    context = Context.from_env()
    there = open_target(request.target, chosen, context)
    made = draft(request, open_source(request.source, context, transport=chosen.transport), there)
    before = there.at(made.base).files() if made.base else {}
    return made, needs(made, before)


def model(folder: Path, files: int, layers: int) -> Path:
    return save_model(folder, layers, 4000, files)


@pytest.mark.parametrize(("files", "layers"), [(2, 24), (12, 60)])
def test_the_calls_are_counted_right(files: int, layers: int, tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model(tmp_path / "model", files, layers)), on_hub.repo("target")
    on_hub.admin.create_repo(target)
    _, need = drafted(repo, target, size=SIZE)
    on_hub.admin.log(reset=True)
    go(repo, target, size=SIZE)
    paths = [request["path"] for request in on_hub.admin.log()]
    calls = sum("/api/" in path or "/info/lfs/" in path for path in paths)
    resolved = sum("/resolve/" in path for path in paths)
    assert need.api_calls == pytest.approx(calls, rel=0.25)
    assert need.resolver_calls == pytest.approx(resolved, rel=0.25)


def test_old_weights_are_what_the_history_keeps(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model(tmp_path / "model", 2, 24))
    weights = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert drafted(repo, repo, size=SIZE)[1].history == weights
    on_hub.admin.create_repo(on_hub.repo("new"))
    assert drafted(repo, on_hub.repo("new"), size=SIZE)[1].history == 0


def test_memory_and_disk_follow_the_transport(tmp_path: Path, on_hub: Namespace) -> None:
    repo = upload(on_hub, "source", model(tmp_path / "model", 2, 24))
    on_hub.admin.create_repo(on_hub.repo("target"))
    made, need = drafted(repo, on_hub.repo("target"), size=SIZE)
    largest = max(shard.size for shard in made.shards)
    xet = os.environ[TRANSPORT] == "xet"
    assert need.memory == (MEMORY_FLOOR_XET if xet else MEMORY_FLOOR)
    assert need.disk == (0 if xet else STAGED_SHARDS_MAX * largest)


def test_a_tensor_that_must_be_put_in_order_lies_on_the_disk_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.zeros(300, 200).t(), "v": torch.zeros(5)}, tmp_path / "model" / "pytorch_model.bin")
    _, need = drafted(tmp_path / "model", tmp_path / "out")
    spooled, written = 300 * 200 * 4, 300 * 200 * 4 + 5 * 4
    assert need[:3] == (MEMORY_FLOOR, spooled, spooled) and need[4:] == (0, 0, 0)
    assert written < need.target < written + 1000  # and a header


def test_over_lfs_it_lies_there_beside_the_shard_that_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.zeros(300, 200).t(), "v": torch.zeros(5)}, tmp_path / "model" / "pytorch_model.bin")
    made, _ = drafted(tmp_path / "model", tmp_path / "out")
    over_lfs, (shard,) = made.transports._replace(target="lfs"), made.shards
    assert needs(replace(made, transports=over_lfs), {}).least_disk == shard.size + 300 * 200 * 4


@pytest.fixture
def plan(tmp_path: Path, on_hub: Namespace) -> Plan:
    return drafted(upload(on_hub, "source", model(tmp_path / "model", 2, 24)), tmp_path / "out", size=SIZE)[0]


@pytest.mark.parametrize(("card", "stated"), [(LICENSED, True), (b"", False)])
def test_without_a_licence_a_plan_warns(card: bytes, stated: bool, plan: Plan) -> None:
    warned = [] if stated else ["the source does not state a license"]
    assert warnings(plan, NOTHING, "public", card, AMPLE, None) == warned


def test_what_to_think_of_is_told(plan: Plan) -> None:
    gated, _ = warnings(plan, NOTHING, "gated", b"", AMPLE, None)
    assert "the source is gated" in gated and "private unless --public" in gated
    told = warnings(plan, Needs(0, 0, 0, 0, 2000, 9, 0), "public", b"", AMPLE, None)
    assert any("1,000 calls" in warning for warning in told)


def test_a_disk_without_room_is_a_warning_that_names_its_folder(plan: Plan) -> None:
    def told(scratch: int, target: int) -> list[str]:
        rooms = Room("/scratch", scratch), Room("/out", target)
        return warnings(plan, Needs(0, 100, 0, 200, 0, 0, 0), "public", LICENSED, *rooms)

    assert told(100, 200) == []
    assert told(99, 200) == ["temporary files need 100 bytes in /scratch (99 bytes free)"]
    assert told(100, 199) == ["a run will fail: the target needs 200 bytes next to /out (199 bytes free)"]


def test_a_folder_without_room_is_refused_before_a_byte_is_written(tmp_path: Path, go: Run) -> None:
    """The source is holes: it has more bytes than any disk of this machine."""
    count = shutil.disk_usage(tmp_path).free // 10**11 + 1
    tensors = ((f"layers.{i}.weight", "U8", (10**11,)) for i in range(count))
    save_sparse(tmp_path / "giant", tensors, count)
    with pytest.raises(TargetFull, match=f"not enough disk space for {tmp_path}/to/out") as refused:
        go(tmp_path / "giant", tmp_path / "to" / "out", size=2 * 10**11)
    assert refused.value.facts["needed"] > refused.value.facts["free"]
    assert not (tmp_path / "to").exists()


def test_a_temporary_folder_without_room_is_refused_before_a_byte_is_sent(
    tmp_path: Path, namespace: Namespace, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    monkeypatch.setenv("RESHARD_DISK_LIMIT", f"{SIZE // 2}B")
    with pytest.raises(DiskFull, match="free$") as refused:
        go(model(tmp_path / "model", 2, 24), namespace.repo("target"), size=SIZE, transport="http")
    assert refused.value.facts["path"] == str(Context.from_env().tmpdir)
    assert not [r for r in namespace.admin.log() if r["method"] == "PUT" or "/info/lfs/" in r["path"]]


def test_what_is_staged_counts_as_room(tmp_path: Path) -> None:
    target = open_target(parse_place(str(tmp_path / "out")), Options(), Context.from_env())
    before = target.room()
    staged = tmp_path / ".out.reshard" / "objects" / "0"
    staged.parent.mkdir(parents=True)
    with staged.open("wb") as file:
        file.truncate(10**13)
    assert before is not None and target.room() >= 10**13 > before
