"""`verify` and `doctor` on GGUF models of any maker: parts, keys, types and bytes, alone and against a source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.pipeline.check import Check
from reshard.pipeline.doctor.health import examine
from reshard.pipeline.places import Folder
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.support import ggufs

NAME = "tiny.gguf"


@pytest.fixture(scope="module")
def two_cuts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model as llama.cpp's package writes it, and our cut of it, with its manifest."""
    folder = tmp_path_factory.mktemp("gguf")
    ggufs.save(folder / "source" / NAME, ggufs.MODEL)
    options = Options(size=200_000)
    run(
        Request(source=Folder(path=str(folder / "source")), target=Folder(path=str(folder / "out")), options=options),
        Context.from_env(),
    )
    return folder / "source", folder / "out"


@pytest.fixture
def copied(two_cuts: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(two_cuts[1], tmp_path / "copied")
    return tmp_path / "copied"


@pytest.fixture(scope="module")
def loader() -> MetaLoader:
    return MetaLoader()  # which no GGUF model asks anything


def look(loader: MetaLoader, output: Path, source: Path | None = None, deep: bool = False) -> dict[str, Check]:
    sides = [FolderSource.open(Folder(path=str(place))) if place else None for place in (output, source)]
    assert sides[0] is not None
    return {check.name: check for check in verify(sides[0], sides[1], loader, deep=deep)}


def failed(checks: dict[str, Check]) -> dict[str, tuple[str, ...]]:
    return {name: check.findings for name, check in checks.items() if check.result == "failed"}


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def test_two_cuts_pass_with_every_byte(two_cuts: tuple[Path, Path], loader: MetaLoader) -> None:
    source, output = two_cuts
    for one, other in ((output, source), (source, output)):
        checks = look(loader, one, other, deep=True)
        assert failed(checks) == {}
        count = len(ggufs.MODEL)
        assert checks["same tensors"].figures == {"tensors": count, "in_the_source": count, "differences": 0}
        assert checks["same bytes"].figures["tensors"] == count
        assert checks["index rules"].figures == {"files": len(parts(one)), "tensors": count, "indexes": 0}
        assert (checks["class of tiny.gguf"].result, checks["class of tiny.gguf"].level) == ("skipped", "structural")


def test_the_manifest_alone_proves_every_byte(two_cuts: tuple[Path, Path], loader: MetaLoader) -> None:
    checks = look(loader, two_cuts[1], deep=True)
    assert failed(checks) == {} and (two_cuts[1] / MANIFEST).exists()
    assert checks["manifest"].result == checks["published bytes"].result == checks["stored bytes"].result == "passed"
    assert checks["manifest"].figures["tensors"] == len(ggufs.MODEL)


def test_one_flipped_bit_is_named_by_tensor_and_block(
    two_cuts: tuple[Path, Path], copied: Path, loader: MetaLoader
) -> None:
    (copied / MANIFEST).unlink()
    path = parts(copied)[0]
    data = path.read_bytes()
    whole = ggufs.read(path).tensors["token_embd.weight"][2]
    at = data.index(whole) + 144 * 3 + 5  # the fourth block, which begins with element [3, 0]
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert failed(look(loader, copied, two_cuts[0])) == {}, "nothing but the bytes differs"
    (finding,) = failed(look(loader, copied, two_cuts[0], deep=True))["same bytes"]
    assert finding.startswith("token_embd.weight has different bytes: element [3, 0] is 0x")


def test_another_key_is_named_though_every_tensor_is_the_same(
    two_cuts: tuple[Path, Path], copied: Path, loader: MetaLoader
) -> None:
    (copied / MANIFEST).unlink()
    path = parts(copied)[0]
    path.write_bytes(path.read_bytes().replace(b"a model", b"A model", 1))
    assert failed(look(loader, copied, two_cuts[0]))["same tensors"] == ("the key 'general.name' is changed",)


def test_a_changed_header_is_not_that_of_the_manifest(copied: Path, loader: MetaLoader) -> None:
    path = parts(copied)[0]
    path.write_bytes(path.read_bytes().replace(b"a model", b"A model", 1))
    assert f"{path.name} has a different header than published" in failed(look(loader, copied))["manifest"]


def test_parts_that_are_missing_or_mixed_are_findings(copied: Path, loader: MetaLoader) -> None:
    first, second, *rest = parts(copied)
    content = second.read_bytes()
    second.unlink()
    (copied / MANIFEST).unlink()
    count = len(rest) + 2
    found = failed(look(loader, copied))["index rules"]
    assert f"file 2 of {count} of tiny is missing" in found
    second.write_bytes(first.read_bytes())
    first.write_bytes(content)
    found = failed(look(loader, copied))["index rules"]
    assert any("say number 2 of" in text and first.name in text for text in found)


def test_a_header_that_cannot_be_read_is_a_finding(copied: Path, loader: MetaLoader) -> None:
    path = parts(copied)[1]
    path.write_bytes(path.read_bytes()[:-64])
    assert any(path.name in text for text in failed(look(loader, copied))["index rules"])


def test_what_is_carried_may_be_of_a_kind_that_is_not_read_and_is_not_cut_short(
    copied: Path, loader: MetaLoader
) -> None:
    ggufs.save_odd(copied / "mmproj.gguf")
    assert failed(look(loader, copied)) == {}
    lora = copied / "lora.gguf"
    ggufs.save(lora, {"a": ("F16", (64,))}, kind="adapter")
    assert failed(look(loader, copied)) == {}
    lora.rename(lora := copied / "mmproj.gguf")
    lora.write_bytes(lora.read_bytes()[:-32])
    assert any("mmproj.gguf" in text for text in failed(look(loader, copied))["index rules"])
    ggufs.save_odd(lora.rename(copied / "odd.gguf"))
    assert any(
        "odd.gguf" in text and "is not supported" in text for text in failed(look(loader, copied))["index rules"]
    )


def test_doctor_has_nothing_to_say_of_an_honest_model(two_cuts: tuple[Path, Path], loader: MetaLoader) -> None:
    for folder in two_cuts:
        health = examine(FolderSource.open(Folder(path=str(folder))), loader)
        assert health.symptoms == () and health.refusals.always is health.refusals.on_hub is None
        assert health.refusals.require_model is not None
        assert health.tensors == len(ggufs.MODEL)


def test_doctor_calls_nothing_a_second_copy_that_is_carried(copied: Path, loader: MetaLoader) -> None:
    ggufs.save(copied / "mmproj.gguf", {"v": ("F16", (4,))})
    ggufs.save(copied / "lora.gguf", {"a": ("F16", (4,))}, kind="adapter")
    health = examine(FolderSource.open(Folder(path=str(copied))), loader)
    assert health.symptoms == () and health.tensors == len(ggufs.MODEL)


def test_doctor_names_what_run_refuses(copied: Path, loader: MetaLoader) -> None:
    parts(copied)[1].unlink()
    health = examine(FolderSource.open(Folder(path=str(copied))), loader)
    assert health.refusals.always is not None and "file 2 of" in str(health.refusals.always)
    assert any("number 2 of" in symptom.text for symptom in health.symptoms)
