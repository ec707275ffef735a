"""How an extra is added to the reshard that runs: from what it was installed from, by what installed it.

Never by its name from an index: there is no release on one, and someone else could register the name.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

# Written by deploy/Dockerfile into the environment of the image: the extras that it was built with.
IMAGE_EXTRAS = "image-extras"


def to_add(extra: str) -> str:
    """What to do for ``extra``, as a hint says it.

    PEP 610 records what a distribution was installed from (``direct_url.json``); uv and pipx keep receipts beside it.
    """
    prefix = Path(sys.prefix)
    if (image := prefix / IMAGE_EXTRAS).is_file():
        return f"build the image with `--build-arg EXTRAS={shlex.quote(f'{image.read_text().strip()} {extra}')}`"
    record, installer = _recorded()
    again = f"reinstall reshard from its wheel or clone, with the extra `{extra}`"
    if not (url := record.get("url")):
        return again
    from urllib.parse import urlsplit
    from urllib.request import url2pathname  # with an HTTP client, which few commands need

    parts = urlsplit(url)
    userinfo, _, host = parts.netloc.rpartition("@")
    if userinfo not in {"", "git"} or parts.query or parts.fragment:  # a password, or a signature
        shown = parts._replace(netloc=host, query="", fragment="").geturl()
        return f"{again} (installed from {shown}, shown without credentials)"
    is_file = url.startswith("file:")
    place = url2pathname(parts.path) if is_file else url
    if is_file and not Path(place).exists():
        return f"reinstall reshard with the extra `{extra}` ({place}, where it was installed from, is gone)"
    if vcs := record.get("vcs_info"):
        place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    start, had = _command(prefix, installer)
    extras = ",".join(dict.fromkeys([*had, extra]))
    what = f"{place}[{extras}]" if is_file else f"reshard[{extras}] @ {place}"
    editable = ["--editable"] if record.get("dir_info", {}).get("editable") else []
    run = ["reshard"] if start[0] == "uvx" else []
    return f"run `{shlex.join([*start, *editable, what, *run])}`"


def version_of(package: str) -> str | None:
    """The version that is installed; None where none is."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _recorded() -> tuple[dict[str, Any], str]:
    """The record of PEP 610 of this reshard, empty where there is none, and who installed it."""
    from importlib.metadata import distributions

    for found in distributions(name="reshard"):
        if text := found.read_text("direct_url.json"):
            return json.loads(text), (found.read_text("INSTALLER") or "").strip()
    return {}, ""


def _command(prefix: Path, installer: str) -> tuple[list[str], list[str]]:
    """The words that install into that environment, and the extras it was asked for where only those named stay."""
    if (receipt := prefix / "uv-receipt.toml").is_file():
        import tomllib

        asked = tomllib.loads(receipt.read_text())["tool"]["requirements"]
        had = [extra for one in asked if one["name"] == "reshard" for extra in one.get("extras", [])]
        return ["uv", "tool", "install", "--force"], had
    if (metadata := prefix / "pipx_metadata.json").is_file():
        spec = json.loads(metadata.read_text())["main_package"]["package_or_url"]
        extras = re.search(r"\[([\w,\s-]+)\]", spec)
        return ["pipx", "install", "--force"], re.split(r"\s*,\s*", extras[1]) if extras else []
    if re.search(r"/(archive|environments)-v\d+/", f"{prefix.as_posix()}/"):
        return ["uvx", "--from"], []  # an environment in uv's cache
    python = str(prefix / "bin" / "python")
    return ["uv", "pip", "install", "--python", python] if installer == "uv" else [python, "-m", "pip", "install"], []
