"""Stores of every kind behind the same two makers, so that one suite holds all of them to the protocols."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from reshard.pipeline.limits import MB, MEMORY_FLOOR_XET
from reshard.pipeline.places import Bucket, Folder, Hub, HubBucket
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.credentials import Credentials
from reshard.pipeline.stores.pace import RateLimitWindow
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.support.s3 import S3

_names = itertools.count(1)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress and repeat nowhere."""
    return np.random.default_rng(seed).bytes(size)


@dataclass
class Impatient:
    """A pace that waits for nothing and remembers what it was asked to wait for."""

    kinds: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)
    heard_of: list[RateLimitWindow] = field(default_factory=list)
    refusals: int = 0
    sent: int = 0

    def refused(self) -> None:
        self.refusals += 1

    def update(self, window: RateLimitWindow) -> None:
        self.heard_of.append(window)

    def before(self, kind: str) -> None:
        self.kinds.append(kind)

    def slow_down(self, seconds: float) -> None:
        self.slowed.append(seconds)

    def sleep(self, seconds: float, why: str) -> None:
        self.slept.append(seconds)

    def moved(self, count: int) -> None:
        self.sent += count


@pytest.fixture
def pace() -> Impatient:
    return Impatient()


@pytest.fixture
def context(namespace: Namespace, pace: Impatient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Signed in as the namespace's user, with a temporary folder of its own."""
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    (tmp_path / "tmp").mkdir()
    return Context(Credentials(namespace.endpoint), tmp_path / "tmp", MEMORY_FLOOR_XET, limiters=lambda budget: pace)


MakeSource = Callable[[Mapping[str, bytes]], Source]
MakeTarget = Callable[..., Target]


@pytest.fixture
def hub_source(namespace: Namespace, hub: HubAdmin, context: Context) -> MakeSource:
    """A repository with these files, the larger ones as large files, read over HTTP."""

    def make(files: Mapping[str, bytes]) -> Source:
        repo = namespace.repo(f"source{next(_names)}")
        hub.create_repo(repo)
        hub.put_files(repo, files, lfs=[path for path, data in files.items() if len(data) > MB])
        return open_source(Hub(repo=repo), context, transport="http")

    return make


@pytest.fixture
def xet_source(namespace: Namespace, hub: HubAdmin, context: Context) -> MakeSource:
    """A repository whose larger files the Hub's own client stored in chunks, read as streams."""

    def make(files: Mapping[str, bytes]) -> Source:
        repo = namespace.repo(f"source{next(_names)}")
        hub.create_repo(repo)
        hub.put_files(repo, {path: data for path, data in files.items() if len(data) <= MB})
        large = [CommitOperationAdd(path, data) for path, data in files.items() if len(data) > MB]
        HfApi(endpoint=hub.endpoint, token=namespace.token).create_commit(repo, large, commit_message="weights")
        return open_source(Hub(repo=repo), context, transport="xet")

    return make


@pytest.fixture
def folder_source(tmp_path: Path, context: Context) -> MakeSource:
    """A folder with these files."""

    def make(files: Mapping[str, bytes]) -> Source:
        root = tmp_path / f"source{next(_names)}"
        write_files(root, files)
        return open_source(Folder(path=str(root)), context)

    return make


@pytest.fixture
def bucket_source(bucket: S3, context: Context) -> MakeSource:
    """A folder of an object store with these files."""

    def make(files: Mapping[str, bytes]) -> Source:
        return open_source(Bucket(url=bucket.put(f"source{next(_names)}", files)), context)

    return make


@pytest.fixture
def hub_bucket_source(namespace: Namespace, context: Context) -> MakeSource:
    """A folder of a bucket on a Hub, with these files, which the Hub's own client put there."""

    def make(files: Mapping[str, bytes]) -> Source:
        api, bucket = HfApi(endpoint=namespace.endpoint, token=namespace.token), namespace.repo("bucket")
        api.create_bucket(bucket, private=True, exist_ok=True)
        folder = f"source{next(_names)}"
        # The Hub takes a prefix for the beginning of a name: the folder beside it must not be seen.
        beside = [(b"other", f"{folder}-other/config.json")]
        api.batch_bucket_files(bucket, add=[*((data, f"{folder}/{path}") for path, data in files.items()), *beside])
        return open_source(HubBucket(url=f"hf://buckets/{bucket}/{folder}"), context)

    return make


@pytest.fixture
def bucket_target(bucket: S3, context: Context) -> MakeTarget:
    """A folder of an object store that is not there yet."""

    def make(**options: object) -> Target:
        place = Bucket(url=f"{bucket.url}/target{next(_names)}/some")
        return open_target(place, Options.model_validate(options), context)

    return make


@pytest.fixture
def hub_bucket_target(namespace: Namespace, context: Context) -> MakeTarget:
    """A folder of a bucket that is not there yet."""

    def make(**options: object) -> Target:
        place = HubBucket(url=f"hf://buckets/{namespace.repo(f'bucket{next(_names)}')}/some/folder")
        return open_target(place, Options.model_validate(options), context)

    return make


@pytest.fixture
def hub_target(namespace: Namespace, context: Context) -> MakeTarget:
    """A repository that is not there yet, written over LFS."""

    def make(**options: object) -> Target:
        repo = namespace.repo(f"target{next(_names)}")
        return open_target(Hub(repo=repo), Options.model_validate({"transport": "http", **options}), context)

    return make


@pytest.fixture
def xet_target(namespace: Namespace, context: Context) -> MakeTarget:
    """A repository that is not there yet, written in chunks."""

    def make(**options: object) -> Target:
        repo = namespace.repo(f"target{next(_names)}")
        return open_target(Hub(repo=repo), Options.model_validate({"transport": "xet", **options}), context)

    return make


@pytest.fixture
def folder_target(tmp_path: Path, context: Context) -> MakeTarget:
    """A folder that is not there yet."""

    def make(**options: object) -> Target:
        root = tmp_path / f"target{next(_names)}"
        return open_target(Folder(path=str(root)), Options.model_validate(options), context)

    return make


@pytest.fixture(params=["folder", "http", "xet", "bucket", "hub_bucket"])
def make_source(request: pytest.FixtureRequest) -> Iterator[MakeSource]:
    names = {"http": "hub_source"}
    yield request.getfixturevalue(names.get(request.param, f"{request.param}_source"))


@pytest.fixture(params=["folder", "lfs", "xet", "hub_bucket", "bucket"])
def make_target(request: pytest.FixtureRequest) -> Iterator[MakeTarget]:
    names = {"lfs": "hub_target"}
    yield request.getfixturevalue(names.get(request.param, f"{request.param}_target"))


@pytest.fixture(params=[pytest.param("hub_bucket", marks=pytest.mark.slow), "bucket"])
def make_object_target(request: pytest.FixtureRequest) -> Iterator[MakeTarget]:
    """Of the stores without commits; what both do is one class's, so that one shows it in `make test`."""
    yield request.getfixturevalue(f"{request.param}_target")


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def read(source: Source, path: str, start: int = 0, stop: int | None = None) -> bytes:
    file = source.files()[path]
    return b"".join(source.read(file, start, file.size if stop is None else stop))
