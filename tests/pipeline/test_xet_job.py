"""A whole job over Xet on noise, and on 6 GB: what it uploads, writes to the disk, and refuses."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import disable_progress_bars

from reshard.pipeline.limits import MB, MEMORY_FLOOR_XET
from tests.hub.fixtures import Namespace, hub_process
from tests.support.measured import Measured, measured
from tests.support.models import save_single

__all__ = ["hub_process"]  # of its own: other files would leave chunks there, and what is sent is counted

SEAM = 150_000  # bytes that a seam may cost
DISK = 4 * MB  # bytes that one file of the process may have: caches and lists, and no weights


@dataclass
class Site:
    """Two files that nothing can compress, stored in chunks."""

    space: Namespace
    folder: Path
    repo: str
    size: int
    runs: int = 0

    def reshard(self, target: str) -> Measured:
        """One job in a process of its own with empty caches, which the kernel keeps from both disk and memory."""
        return self._measured("do_run_within", DISK, MEMORY_FLOOR_XET, target=target)

    def planned(self, target: str) -> Any:
        """What a plan says that the same job will move."""
        return self._measured("do_forecast", target=target).result

    def _measured(self, what: str, *limits: int, target: str) -> Measured:
        self.runs += 1
        home = self.folder / f"home{self.runs}"
        home.mkdir()
        env = {
            "HF_ENDPOINT": self.space.endpoint,
            "HF_TOKEN": self.space.token,
            "HF_HOME": str(home),
            "HF_XET_CACHE": str(home / "xet"),
            "RESHARD_TMPDIR": str(home),
        }
        self.space.admin.log(reset=True)
        options = {"size": self.size // 3, "transport": "xet"}
        return measured(f"tests.pipeline.jobs:{what}", *limits, self.repo, self.space.repo(target), options, env=env)

    def uploaded(self) -> int:
        """Bytes that the content store received since the last job began."""
        up: int = self.space.admin.totals()["xet"]["up"]
        return up


@pytest.fixture(params=[4_000_000, pytest.param(12_500_000, marks=pytest.mark.slow)], ids=["192MB", "600MB"])
def site(request: pytest.FixtureRequest, tmp_path: Path, namespace: Namespace) -> Site:
    return publish(noise(24, request.param), tmp_path, namespace)


@pytest.fixture
def small_site(tmp_path: Path, namespace: Namespace) -> Site:
    return publish(noise(4, 5_000_000), tmp_path, namespace)


@pytest.fixture
def large_site(tmp_path: Path, namespace: Namespace) -> Site:
    """6 GB, of which the content store keeps 25 MB: one piece of noise, over and over."""
    made = [np.random.default_rng(8).integers(0, 2**16, 12_500_000, dtype=np.uint16)] * 240
    return publish(made, tmp_path, namespace)


def noise(count: int, numbers: int) -> list[Any]:
    """So many tensors, of so many numbers of two bytes each, and none of another count's: a store keeps those."""
    random = np.random.default_rng(numbers)
    return [random.integers(0, 2**16, numbers, dtype=np.uint16) for _ in range(count)]


def publish(tensors: list[Any], tmp_path: Path, namespace: Namespace) -> Site:
    """Two files, with half of the tensors each."""
    disable_progress_bars()
    half = len(tensors) // 2
    for name, part in (("model", tensors[:half]), ("mtp", tensors[half:])):
        save_single(tmp_path / "model", {f"{name}.{i}": tensor for i, tensor in enumerate(part)}, f"{name}.safetensors")
    repo = namespace.repo("noise")
    namespace.admin.create_repo(repo)
    files = sorted((tmp_path / "model").iterdir())
    operations = [CommitOperationAdd(file.name, str(file)) for file in files]
    HfApi(namespace.endpoint, namespace.token).create_commit(repo, operations, commit_message="noise")
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
    return Site(namespace, tmp_path, repo, size)


def test_a_new_cut_uploads_its_seams_and_a_repeat_after_a_crash_next_to_nothing(site: Site) -> None:
    expected = site.planned("target")
    site.space.admin.fault("POST /api/models/.*/commit/", "status", status=403, times=1)
    with pytest.raises(subprocess.CalledProcessError):
        site.reshard("target")
    first = site.uploaded()
    done = site.reshard("target")
    again = site.uploaded()
    facts: dict[str, Any] = done.result
    assert facts["transports"] == ["xet", "xet"] and facts["written"] > site.size - MB
    print({"model": site.size, "seams": facts["seams"], "first": first, "again": again, "peak": done.peak})
    assert first <= SEAM * facts["seams"] + facts["headers"]
    assert 0.4 * expected["uploaded"] <= first <= 1.3 * expected["uploaded"] and not expected["at_most"]
    assert again <= 0.0005 * site.size
    assert done.peak <= MEMORY_FLOOR_XET


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_times_the_model_takes_no_more_memory_and_no_disk_either(large_site: Site) -> None:
    done = large_site.reshard("target")
    facts: dict[str, Any] = done.result
    uploaded = large_site.uploaded()
    print({"model": large_site.size, "seams": facts["seams"], "uploaded": uploaded, "peak": done.peak})
    assert facts["moved"]["read"] >= 6_000 * MB and facts["written"] >= 6_000 * MB
    assert uploaded <= SEAM * facts["seams"] + facts["headers"]
    assert done.peak <= MEMORY_FLOOR_XET


def test_a_flipped_byte_in_the_content_store_is_named_and_nothing_is_published(small_site: Site) -> None:
    admin, target = small_site.space.admin, small_site.space.repo("target")
    admin.create_repo(target)
    head = admin.head(target)
    admin.corrupt(small_site.repo, "mtp.safetensors", 12_345_678)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        small_site.reshard("target")
    assert "SourceCorrupt" in caught.value.stderr and "mtp.safetensors" in caught.value.stderr
    assert admin.head(target) == head
