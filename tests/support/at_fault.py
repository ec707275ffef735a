"""Workers whose machines are at fault, in the ways of which docs/failures.md says that they fail no job."""

from __future__ import annotations

from pathlib import Path

from reshard.worker.local import worker_command

WAYS = ("folder", "full", "token", "no token", "credentials")
FULL = 'ulimit -f 128 && exec "$@"'  # no file may have more than 64 KiB: the kernel's own way to say there is no room


def spoil(way: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a worker that is at fault in one of WAYS; ``folder`` gets what it needs for that."""
    command, env = worker_command(2), dict[str, str]()
    match way:
        case "token":
            env["HF_TOKEN"] = "hf_revoked"
        case "no token":
            env["HF_TOKEN"] = ""
        case "credentials":
            (folder / "bad.toml").write_text("[[credential]\n")
            env["RESHARD_CREDENTIALS"] = str(folder / "bad.toml")
        case "full":
            command, env["HF_HUB_DISABLE_XET"] = ["sh", "-c", FULL, "sh", *command], "1"
        case "folder":
            env |= {"RESHARD_TMPDIR": str(folder / "spoilt" / "tmp"), "TMPDIR": str(folder)}
    return command, env


def spoil_started(way: str, folder: Path) -> None:
    """The rest, once the workers run: without a temporary folder none starts."""
    if way == "folder":
        (folder / "spoilt").rename(folder / "taken")
        (folder / "spoilt").write_text("a file where the folder should be")
