"""A mixture that is cut for ranks, as each of them fetches it: by its patterns, with the real `hf download`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.pipeline.planning.readers import Readers, shares
from tests.cli.conftest import Run
from tests.cli.uploads import download
from tests.formats.models import model_of
from tests.hub.fixtures import Namespace
from tests.support.checker import Tensors, from_folder, parse, read_checkpoint


def held(folder: Path) -> Tensors:
    """The tensors of all weight files there, whatever the index says."""
    found: Tensors = {}
    for path in folder.rglob("*.safetensors"):
        tensors = parse(path.read_bytes())[1]
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


@pytest.mark.parametrize(
    ("kind", "changes", "ranks"),
    [
        ("MixtralForCausalLM", {}, "ep4"),
        pytest.param("Qwen3MoeForCausalLM", {}, "ep2", marks=pytest.mark.slow),
        pytest.param("DeepseekV3ForCausalLM", {}, "ep2", marks=pytest.mark.slow),
        ("DeepseekV3ForCausalLM", {"num_hidden_layers": 5}, "pp3"),
    ],
)
def test_each_rank_fetches_its_tensors_and_no_other_byte(
    kind: str, changes: dict[str, Any], ranks: str, reshard: Run, namespace: Namespace, tmp_path: Path
) -> None:
    saved, repo = tmp_path / "saved", namespace.repo("cut")
    model_of(kind, torch.bfloat16, **changes).save_pretrained(saved)
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    done = reshard("run", saved, "--to", repo, "--for", ranks, "--size", "20kB", "--json", env=env)
    assert done.code == 0, done.err
    plan = next(one["plan"] for one in done.documents if "plan" in one)
    whole = read_checkpoint(from_folder(saved))
    share = shares([*whole], Readers.of(ranks)).of
    assert len(plan["ranks"]) == int(ranks[2:])
    (seen,) = reshard("layout", repo, "--ranks", ranks, "--json", env=env).documents
    assert seen["ranks"] == plan["ranks"], "as the plan told before it was published"

    fetched: Tensors = {}
    for told in plan["ranks"]:
        namespace.admin.log(reset=True)
        typed = [word for glob in told["patterns"] for word in ("--include", glob)]
        here = download(repo, namespace, tmp_path / f"home {told['rank']}", *typed, HF_HUB_DISABLE_XET="1")
        tensors = held(here)
        assert tensors == {name: whole[name] for name in whole if share.get(name, told["rank"]) == told["rank"]}
        log = [e for e in namespace.admin.log() if e["kind"] == "cdn" and ".safetensors?" in e["path"]]
        assert (len(log), sum(e["down"] for e in log)) == (told["files"], told["bytes"])
        assert told["needed"] < told["bytes"] < sum(file["size"] for file in plan["files"])
        assert {"config.json", "model.safetensors.index.json"} <= {path.name for path in here.iterdir()}
        fetched |= tensors
    assert fetched == whole
