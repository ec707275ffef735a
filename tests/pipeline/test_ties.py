"""`--ties source` over several publications: what a config says of ties is heard, and what was dropped is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel

from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.checker import from_folder, from_hub, read_checkpoint


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A tied GPT-2 as `torch.save` writes it, with its head."""
    folder = tmp_path / "tied"
    folder.mkdir()
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=200, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(folder)
    torch.save(GPT2LMHeadModel(config).state_dict(), folder / "pytorch_model.bin")
    return folder


def test_weights_are_made_again_where_the_config_unties_them(tied: Path, on_hub: Namespace, go: Run) -> None:
    source, target = upload(on_hub, "source", tied), on_hub.repo("target")
    go(source, target, size=20_000, ties="source")
    assert "lm_head.weight" not in read_checkpoint(from_hub(on_hub.endpoint, target))
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": False}
    on_hub.admin.put_files(source, {"config.json": json.dumps(config).encode()})
    go(source, target, size=20_000, ties="source")
    assert "lm_head.weight" in read_checkpoint(from_hub(on_hub.endpoint, target))


def test_weights_are_named_anew_where_a_config_joins_them(tied: Path, on_hub: Namespace, go: Run) -> None:
    """Beside a config, loaders look for `model`."""
    config = (tied / "config.json").read_bytes()
    (tied / "config.json").unlink()
    (tied / "pytorch_model.bin").rename(tied / "weird.pt")
    source, target = upload(on_hub, "source", tied), on_hub.repo("target")
    assert {shard.path for shard in go(source, target, size=10**6).plan.shards} == {"weird.safetensors"}
    on_hub.admin.put_files(source, {"config.json": config})
    assert {shard.path for shard in go(source, target, size=10**6).plan.shards} == {"model.safetensors"}


def test_one_file_made_of_several_says_which_copies_were_dropped(
    tied: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    go(tied, tmp_path / "several", size=20_000, ties="source")
    go(tmp_path / "several", tmp_path / "one", size=10**6)
    assert "lm_head.weight" not in read_checkpoint(from_folder(tmp_path / "one"))
    one, source = (open_source(parse_place(str(p)), Context.from_env()) for p in (tmp_path / "one", tied))
    checks = {check.name: check.result for check in verify(one, source, meta_loader, deep=True)}
    assert checks["same tensors"] != "failed" and checks["same bytes"] == "passed"


@pytest.mark.parametrize(
    ("rules", "result"),
    [
        ([{"^lm_head": "head"}], "passed"),
        ([{"^transformer[.]": "backbone."}], "inconclusive"),
        ([{"^transformer[.]": "backbone."}, {"lm_head": "head"}], "inconclusive"),
    ],
    ids=["the copy", "the kept", "both"],
)
def test_copies_that_were_dropped_and_renamed_are_to_verify_what_they_are_to_the_job(
    rules: Any, result: str, tied: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    report = go(tied, tmp_path / "out", ties="source", rename=rules)
    assert [check.result for check in report.checks if check.name == "reload model"] == [result]
    out, source = (open_source(parse_place(str(p)), Context.from_env()) for p in (tmp_path / "out", tied))
    for changes in (Options.of(ties="source", rename=rules), Options()):
        checks = {check.name: check.result for check in verify(out, source, meta_loader, deep=True, changes=changes)}
        assert checks["class of model"] == result and "failed" not in checks.values()


def test_a_lost_tensor_that_the_class_does_not_tie_is_a_difference_by_any_name(
    tied: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": False}
    rules: Any = [{"^lm_head": "head"}]
    go(tied, tmp_path / "out", ties="source", rename=rules)
    for folder in (tied, tmp_path / "out"):
        (folder / "config.json").write_text(json.dumps(config))
    out, source = (open_source(parse_place(str(p)), Context.from_env()) for p in (tmp_path / "out", tied))
    changes = Options.of(ties="source", rename=rules)
    checks = {check.name: check.result for check in verify(out, source, meta_loader, changes=changes)}
    assert checks["class of model"] == "failed"


def ties_of(folder: Path) -> dict[str, str]:
    """What an output says of its ties, in its index or in the metadata of its files."""
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())["metadata"] if index.exists() else {}
    for path in folder.glob("*.safetensors"):
        told |= safe_open(path, "pt").metadata()
    return {key: to for key, to in told.items() if key != "format" and isinstance(to, str) and "weight" in to}


@pytest.mark.parametrize("size", [20_000, 10**6], ids=["several", "one"])
@pytest.mark.parametrize("before", [20_000, 10**6], ids=["of several", "of one"])
@pytest.mark.parametrize(
    ("rules", "ties"),
    [
        ((), {"lm_head.weight": "transformer.wte.weight"}),
        ([{"^transformer[.]": "backbone."}], {"lm_head.weight": "backbone.wte.weight"}),
        ([{"^": "m."}], {"m.lm_head.weight": "m.transformer.wte.weight"}),
        ([{"transformer.wte": "lm_head"}], {}),  # stored itself now
    ],
    ids=["none", "the kept", "both", "one for the other"],
)
def test_what_is_said_of_ties_follows_the_names_of_a_later_publication(
    rules: Any, ties: dict[str, str], before: int, size: int, tied: Path, tmp_path: Path, go: Run
) -> None:
    go(tied, tmp_path / "first", size=before, ties="source")
    assert ties_of(tmp_path / "first") == {"lm_head.weight": "transformer.wte.weight"}
    go(tmp_path / "first", tmp_path / "second", size=size, rename=rules)
    assert ties_of(tmp_path / "second") == ties


def test_the_only_copy_of_a_tensor_is_not_what_was_kept_under_two_names(tied: Path, go: Run) -> None:
    file = tied / "pytorch_model.bin"
    states = torch.load(file)
    torch.save({"lm_head.weight": states["lm_head.weight"], **states}, file)  # the name that goes comes first
    go(tied, tied, size=20_000, ties="source")
    assert "lm_head.weight" not in read_checkpoint(from_folder(tied))
    assert not go(tied, tied, size=40_000).published.found
