"""Paths that a Hub lists: they end up in URLs, folders and commits."""

from __future__ import annotations

import json
from typing import Literal

import pytest

from reshard.pipeline.errors import UnsafePath
from reshard.pipeline.limits import MEMORY_FLOOR_XET
from reshard.pipeline.places import Hub
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.xet import XetSource
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace

HOSTILE = [
    "../../../secret/resolve/main/token.txt", "a/../../b", "..", "/etc/passwd", "a//b", "a/", "./a", "",
    "a\\b", "..\\b", "C:b", "a\0b", "a\nb", "a\x7fb", "a\x85b", "\ud800", "x" * 256, "a/" + "é" * 128, None, 7,
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: ascii(path)[:20])
@pytest.mark.parametrize("transport", ["http", "xet"])
def test_a_listed_path_that_is_not_safe_is_refused_before_anything_is_fetched(
    namespace: Namespace, hub: HubAdmin, context: Context, path: object, transport: Literal["http", "xet"]
) -> None:
    repo = namespace.repo("hostile")
    hub.create_repo(repo)
    item = {"type": "file", "path": path, "size": 3, "oid": "0" * 40}
    hub.fault(f"{repo}/tree/", "status", status=200, body=json.dumps([item]))
    source = HubSource.open(context.api(Hub(repo=repo), "read"), Hub(repo=repo))
    if transport == "xet":
        source = XetSource(source.api, source.place, source.pin.commit, "public", MEMORY_FLOOR_XET)
    with pytest.raises(UnsafePath):
        source.files()
    assert not [entry for entry in hub.log() if entry["kind"] == "resolve"]


@pytest.mark.parametrize("path", ["a..b/c", "...", "x" * 255, "é/ü b.txt", ".hidden", "read\u200fme.md"])
def test_a_listed_path_that_is_only_unusual_is_kept(
    namespace: Namespace, hub: HubAdmin, context: Context, path: str
) -> None:
    repo = namespace.repo("unusual")
    hub.create_repo(repo)
    item = {"type": "file", "path": path, "size": 3, "oid": "0" * 40}
    hub.fault(f"{repo}/tree/", "status", status=200, body=json.dumps([item]))
    assert HubSource.open(context.api(Hub(repo=repo), "read"), Hub(repo=repo)).files().keys() == {path}
