"""Workers whose machines are at fault, in the ways of which docs/failures.md says that they fail no job."""

from __future__ import annotations

from pathlib import Path

WAYS = ("folder", "full", "token", "no token", "credentials")


def spoil(way: str, folder: Path) -> dict[str, str]:
    """The environment of a worker that is at fault in one of WAYS; what it needs for that is put into ``folder``."""
    if way == "token":
        return {"HF_TOKEN": "hf_revoked"}
    if way == "no token":
        return {"HF_TOKEN": ""}
    if way == "credentials":
        (folder / "bad.toml").write_text("[[credential]\n")
        return {"RESHARD_CREDENTIALS": str(folder / "bad.toml")}
    if way == "full":
        return {"RESHARD_DISK_LIMIT": "1B", "HF_HUB_DISABLE_XET": "1"}
    assert way == "folder"
    (folder / "spoilt").write_text("a file where the folder should be")
    return {"RESHARD_TMPDIR": str(folder / "spoilt" / "tmp"), "TMPDIR": str(folder)}
