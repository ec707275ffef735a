"""Folders that look like the cache of huggingface_hub: what belongs to a snapshot, and what none may read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.pipeline.errors import BrokenLink, CacheFolder, FolderLink, UnsafePath, WholeCache
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.source import FolderSource
from tests.pipeline.stores.conftest import read, write_files

HASH, REPO = "ab" * 32, "models--them--m"
SHARED = f"hub/blobs/ab/{HASH}"
MARK = "hub/blobs/.huggingface-shared-blobs"
SECRET = b"a secret of the user's"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out, with one file of its own and one in the shared folder."""
    write_files(tmp_path, {f"hub/{REPO}/blobs/1234": b"{}", SHARED: b"weights", MARK: b"1\n", "home/secret": SECRET})
    blobs = tmp_path / "hub" / REPO / "blobs"
    (blobs / "5678").symlink_to(f"../../blobs/ab/{HASH}")
    snapshot = tmp_path / "hub" / REPO / "snapshots" / "c0ffee"
    (snapshot / "unet").mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "unet" / "model.safetensors").symlink_to("../../../blobs/5678")
    return tmp_path / "hub"


def snapshot_of(hub: Path) -> Path:
    return hub / REPO / "snapshots" / "c0ffee"


def opened(folder: Path) -> FolderSource:
    return FolderSource.open(Folder(path=str(folder)))


def relink(link: Path, to: Path | str) -> None:
    link.unlink()
    link.symlink_to(to)


def test_a_snapshot_is_read_through_its_own_blobs_and_shared_ones(hub: Path) -> None:
    source = opened(snapshot_of(hub))
    assert read(source, "config.json") == b"{}" and read(source, "unet/model.safetensors") == b"weights"


def test_a_link_to_a_snapshot_is_a_place_too(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(snapshot_of(hub))
    assert read(opened(tmp_path / "mine"), "unet/model.safetensors") == b"weights"


def test_a_repository_of_the_cache_is_refused_and_the_snapshot_of_main_named(hub: Path) -> None:
    """Whose blobs would be copied beside the weights in its snapshots."""
    other = hub / REPO / "snapshots" / "beef"
    write_files(other, {"config.json": b"{}"})
    os.utime(other, (1, 1))
    for place in (hub / REPO, hub / REPO / "snapshots"):
        with pytest.raises(CacheFolder, match="huggingface_hub cache") as newest:
            opened(place)
        assert newest.value.next_step == f"pass the folder of one version instead: {snapshot_of(hub)}"
    write_files(hub / REPO, {"refs/main": b"beef"})
    with pytest.raises(CacheFolder) as main:
        opened(hub / REPO)
    assert main.value.facts["snapshot"] == str(other)
    write_files(hub / "models--mine", {"model.safetensors": b"weights"})
    assert read(opened(hub / "models--mine"), "model.safetensors") == b"weights", "only its name is alike"


def test_a_whole_cache_is_refused_and_a_snapshot_in_it_named(hub: Path) -> None:
    """Whose locks and blobs would be copied as files of one model."""
    write_files(hub, {"version.txt": b"1", f".locks/{REPO}/1234.lock": b"", "datasets--a/snapshots/1/x": b""})
    for home in (hub, hub.parent):  # HF_HUB_CACHE, HF_HOME
        with pytest.raises(WholeCache) as refused:
            opened(home)
        assert refused.value.next_step.endswith(f"such as {snapshot_of(hub)}")


@pytest.mark.parametrize("own", ["model.safetensors", "model_index.json"])
def test_a_model_beside_a_cache_is_a_model(own: str, hub: Path) -> None:
    write_files(hub, {own: b"{}"})
    assert read(opened(hub), own) == b"{}"


def own_blob_leads_out(hub: Path) -> None:
    relink(hub / REPO / "blobs" / "1234", hub.parent / "home" / "secret")


def shared_blob_leads_out(hub: Path) -> None:
    relink(hub / "blobs" / "ab" / HASH, hub.parent / "home" / "secret")


def own_blobs_are_a_link(hub: Path) -> None:
    (hub / REPO / "blobs").rename(hub / "moved")
    (hub / REPO / "blobs").symlink_to(hub.parent / "home")
    relink(snapshot_of(hub) / "config.json", "../../blobs/secret")


def shared_blobs_are_a_link(hub: Path) -> None:
    (hub / "blobs").rename(hub.parent / "home" / "blobs")
    (hub / "blobs").symlink_to(hub.parent / "home" / "blobs")


def a_prefix_is_a_link(hub: Path) -> None:
    (hub / "blobs" / "ab").rename(hub.parent / "home" / "ab")
    (hub / "blobs" / "ab").symlink_to(hub.parent / "home" / "ab")


def below_own_blobs(hub: Path) -> None:
    write_files(hub / REPO / "blobs", {"more/secret": SECRET})
    relink(snapshot_of(hub) / "config.json", "../../blobs/more/secret")


def of_another_repository(hub: Path) -> None:
    write_files(hub, {"models--mine--private/blobs/1234": SECRET})
    relink(snapshot_of(hub) / "config.json", "../../../models--mine--private/blobs/1234")


def no_hash(hub: Path) -> None:
    write_files(hub / "blobs", {"no/notes": SECRET})
    relink(snapshot_of(hub) / "config.json", "../../../blobs/no/notes")


def another_prefix(hub: Path) -> None:
    write_files(hub / "blobs", {f"cd/{HASH}": SECRET})
    relink(snapshot_of(hub) / "config.json", f"../../../blobs/cd/{HASH}")


def no_mark(hub: Path) -> None:
    """A folder `blobs` of the user's, beside which something was unpacked."""
    (hub / "blobs" / ".huggingface-shared-blobs").unlink()


def another_mark(hub: Path) -> None:
    (hub / "blobs" / ".huggingface-shared-blobs").write_bytes(b"2\n")


def a_mark_that_is_a_link(hub: Path) -> None:
    write_files(hub.parent, {"mark": b"1\n"})
    relink(hub / "blobs" / ".huggingface-shared-blobs", hub.parent / "mark")


def another_name(hub: Path) -> None:
    """`~/snapshots/c0ffee` beside a folder `~/blobs` of the user's."""
    (hub / REPO).rename(hub / "them")


def not_in_snapshots(hub: Path) -> None:
    (hub / REPO / "snapshots").rename(hub / REPO / "versions")


def a_snapshot_that_is_a_link(hub: Path) -> None:
    snapshot_of(hub).rename(hub.parent / "home" / "model")
    snapshot_of(hub).symlink_to(hub.parent / "home" / "model")


def snapshots_that_are_a_link(hub: Path) -> None:
    snapshot_of(hub).parent.rename(hub.parent / "home" / "models")
    snapshot_of(hub).parent.symlink_to(hub.parent / "home" / "models")


@pytest.mark.parametrize(
    "imitate",
    [
        own_blob_leads_out, shared_blob_leads_out, own_blobs_are_a_link, shared_blobs_are_a_link, a_prefix_is_a_link,
        below_own_blobs, of_another_repository, no_hash, another_prefix, no_mark, another_mark, a_mark_that_is_a_link,
        another_name, not_in_snapshots, a_snapshot_that_is_a_link, snapshots_that_are_a_link,
    ],
    ids=lambda imitate: imitate.__name__,
)  # fmt: skip
def test_an_imitation_reads_nothing_that_a_cache_does_not_own(hub: Path, imitate: Callable[[Path], None]) -> None:
    opened(snapshot_of(hub))
    imitate(hub)
    [place] = {path.parent for path in hub.rglob("config.json")} or {snapshot_of(hub)}
    with pytest.raises(UnsafePath, match=re.escape(str(place))):
        opened(place)


def test_a_weight_file_of_a_snapshot_is_read_and_through_one_that_is_a_link_none_is(hub: Path) -> None:
    """As `models--them--m/snapshots/c9`, which leads to another repository's snapshot."""
    real = hub / "models--me--private" / "snapshots" / "c1"
    write_files(real.parent.parent, {"blobs/1234": SECRET})
    real.mkdir(parents=True)
    (real / "model.safetensors").symlink_to("../../blobs/1234")
    assert read(opened(real / "model.safetensors"), "model.safetensors") == SECRET
    (snapshot_of(hub).parent / "c9").symlink_to(real)
    for place in ("c9", "c9/model.safetensors"):
        with pytest.raises(UnsafePath, match=re.escape(str(snapshot_of(hub).parent / "c9"))):
            opened(snapshot_of(hub).parent / place)


def test_a_dangling_index_beside_a_weight_file_is_an_error_in_words(tmp_path: Path) -> None:
    write_files(tmp_path, {"model.safetensors": b"weights"})
    (tmp_path / "model.safetensors.index.json").symlink_to("gone")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(BrokenLink, match="link: it is a symbolic link to gone, which does not exist"):
        opened(tmp_path / "link")
    (tmp_path / "link").unlink()
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(BrokenLink, match=r"model\.safetensors\.index\.json: it is a symbolic link to gone, which"):
            opened(place)


def test_a_link_to_a_folder_inside_gets_a_hint_that_fits_and_one_out_of_it_a_warning(tmp_path: Path) -> None:
    """As trainers leave `latest` beside their steps."""
    write_files(tmp_path / "run", {"step-500/model.safetensors": b"weights"})
    (tmp_path / "run" / "latest").symlink_to("step-500")
    with pytest.raises(FolderLink, match="latest is a symbolic link to a folder") as inside:
        opened(tmp_path / "run")
    assert f"if {tmp_path}/run/step-500 is the model" in inside.value.next_step
    assert "trust its author" not in inside.value.next_step
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest").symlink_to(tmp_path)
    with pytest.raises(UnsafePath, match="points outside the repository") as outside:
        opened(tmp_path / "run")
    cure = "do not use this checkpoint unless you trust its author; if the link is your own, replace it with a copy of"
    assert outside.value.next_step == f"{cure} the folder"
    (tmp_path / "run" / "latest").unlink()
    write_files(tmp_path, {"elsewhere.safetensors": b"weights"})
    (tmp_path / "run" / "model.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(UnsafePath, match="model.safetensors: points outside the repository") as outside:
        opened(tmp_path / "run")
    assert outside.value.next_step == f"{cure} the file"
