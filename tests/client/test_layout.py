"""What advice foretells is what a Hub counts of ten layouts, and the layout that it recommends suits the loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from reshard.client.layout import advice_of, command_for, layout_of
from reshard.client.models.plans import Advice, AdvisedLayout
from reshard.pipeline import run
from reshard.pipeline.checkpoint.discover import Found
from reshard.pipeline.drafting import outline
from reshard.pipeline.limits import GB, KB, MB
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.build import Known
from reshard.pipeline.planning.existing import NOTHING
from reshard.pipeline.planning.model import Keys
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.connect import Context, open_source
from tests.hub.fixtures import Namespace
from tests.pipeline.planning.builders import PIN, opened_named, request
from tests.pipeline.planning.shapes import Shapes, llama_3_8b
from tests.support.models import save_mixture

DOWNLOAD = """
import json, sys
from huggingface_hub import snapshot_download
for repo, patterns in json.loads(sys.argv[1]).items():
    snapshot_download(repo, allow_patterns=patterns, ignore_patterns=".gitattributes")
"""
# By the ranks that read: the layouts beside the one that is there.
CHOICES: dict[str | None, dict[str, dict[str, Any]]] = {
    None: {"large": {"size": GB}, "aligned": {"size": 900 * KB, "align": 4096}},
    "ep2": {"small": {"size": 400 * KB}, "experts": {"ranks": "ep2"}, "both": {"ranks": "ep2", "align": 512}},
    "pp2": {"stages": {"ranks": "pp2", "size": 900 * KB}, "layers": {"pack": "layers", "size": MB}},
}


def known(shapes: Shapes, file_of: int) -> Known:
    """A model of these shapes as if its headers had been read."""
    keys, opened = Keys("", None), opened_named(shapes, file_of)
    return Known(request(), PIN, keys, Found((), frozenset()), opened, {}, NOTHING)


def best(advice: Advice) -> AdvisedLayout:
    (one,) = (layout for layout in advice.layouts if layout.recommended)
    return one


def test_a_command_names_the_hub_of_its_model() -> None:
    typed = "https://hub.example/a/b/tree/v1"
    assert command_for(parse_place(typed), {"align": 512}) == f"reshard run {typed} --to ./b@v1-cut --align 512"


def test_what_is_recommended_depends_on_the_loader_and_on_what_is_there() -> None:
    llama = known(llama_3_8b(), 5 * GB)
    as_it_is, largest = [advice_of(llama, loader).layouts[0] for loader in ("mlx", "transformers")], 1_050_673_152
    assert as_it_is[0].memory == 16_060_522_496, "of its tensors, and of nothing beside them"
    assert as_it_is[1].memory == as_it_is[0].memory + largest
    assert [best(advice_of(llama, loader)).name for loader in ("mlx", "transformers")] == ["as it is"] * 2
    assert best(advice_of(llama, "vllm")).command == "reshard run a/b --to ./b-cut --align 4096"
    aligned = {name: spec for name, spec in llama_3_8b().items() if spec[1] != (128256, 4096)}  # all are under 512 MB
    found = advice_of(known(aligned, 5 * GB), "browser")
    assert (best(found).name, best(found).command) == ("512 MB files", "reshard run a/b --to ./b-cut --for browser")
    names = [best(advice_of(known(aligned, size * MB), "browser")).name for size in (200, 530)]
    assert names == ["as it is", "512 MB files"], "files over 512 MB do not count, however near"


def test_a_slow_line_needs_longer_and_many_requests_add_to_it() -> None:
    llama = known(llama_3_8b(), 5 * GB)
    slow, fast = (advice_of(llama, link=rate).layouts for rate in (MB, GB))
    for one, other in zip(slow, fast, strict=True):
        assert one.seconds - one.bytes / MB == pytest.approx(other.seconds - other.bytes / GB, abs=0.02)
        assert one.seconds - one.bytes / MB == pytest.approx(one.requests * 0.1 / 8, abs=0.02)


def test_a_hub_counts_the_bytes_and_requests_that_were_foretold(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_mixture(tmp_path / "mixture", 16_384)  # 4 MB, beside which what a card gets is nothing
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    context = Context.from_env()
    foretold: dict[str, AdvisedLayout] = {}
    patterns: dict[str, list[str] | None] = {}
    for ranks, choices in CHOICES.items():
        advice = advice_of(outline(open_source(parse_place(folder), context)), ranks=ranks, choices=choices)
        for one in advice.layouts:
            repo = namespace.repo(f"{ranks}-{one.name.replace(' ', '-')}")
            if given := choices.get(one.name):
                options = Options(**given)
                run(Request(source=parse_place(folder), target=parse_place(repo), options=options), context)
            else:
                api = HfApi(namespace.endpoint, token=namespace.token)
                api.create_repo(repo)
                api.upload_folder(repo_id=repo, folder_path=folder)
            foretold[repo], patterns[repo] = one, None
            if ranks:
                found = layout_of(open_source(parse_place(repo), context), ranks)
                patterns[repo] = max(found.ranks, key=lambda rank: rank.bytes).patterns
    assert len(foretold) == 10

    namespace.admin.log(reset=True)
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    subprocess.run([sys.executable, "-c", DOWNLOAD, json.dumps(patterns)], env=env, check=True, capture_output=True)
    requests, down = defaultdict[str, int](int), defaultdict[str, int](int)
    for entry in namespace.admin.log():
        if f"/{namespace.name}/" not in entry["path"]:
            continue  # what a process asks once, whatever it downloads
        (repo,) = [name for name in foretold if f"/{name}/" in entry["path"]]
        requests[repo] += 1
        down[repo] += entry["down"] if entry["kind"] != "api" else 0
    for repo, one in foretold.items():
        assert abs(one.requests - requests[repo]) <= 0.01 * requests[repo], (repo, one.requests, requests[repo])
        assert abs(one.bytes - down[repo]) <= 0.01 * down[repo], (repo, one.bytes, down[repo])
    assert len({*requests.values()}) > 4 and min(down.values()) < 0.6 * max(down.values()), "layouts that differ"
