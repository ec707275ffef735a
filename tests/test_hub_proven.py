"""The Hub's own tests are left out only where nothing changed since they passed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.hub import proven


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(proven.HERE, tmp_path / "hub", ignore=shutil.ignore_patterns("__pycache__")))


def test_a_copy_has_the_same_digest_and_any_change_of_a_module_or_a_test_another(copy: Path) -> None:
    assert proven.digest(copy) == proven.digest()
    for name in ("app.py", "cas/store.py", "tests/test_client.py"):
        before, path = proven.digest(copy), copy / name
        path.write_bytes(path.read_bytes() + b"\n")
        assert proven.digest(copy) != before
    before = proven.digest(copy)
    (copy / "new.py").touch()
    assert proven.digest(copy) != before
    (copy / "new.py").rename(copy / "newer.py")
    assert proven.digest(copy) != before


def test_another_version_of_a_client_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = proven.digest()
    monkeypatch.setattr(proven, "version", lambda name: "99")
    assert proven.digest() != before
    assert not proven.proven()
