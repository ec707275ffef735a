"""Buckets, judged by the real client."""

from pathlib import Path

import pytest
from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError

from tests.hub.fixtures import Namespace

FILES = {"config.json": b"{}", "deep/er/model.bin": bytes(range(256)) * 9000, "empty": b"", "model/x": b"1"}


@pytest.fixture
def api(namespace: Namespace) -> HfApi:
    return HfApi(endpoint=namespace.endpoint, token=namespace.token)


@pytest.fixture
def bucket(namespace: Namespace, api: HfApi) -> str:
    """With files in it."""
    url = api.create_bucket(namespace.repo("bucket"), private=True)
    assert (url.bucket_id, api.create_bucket(url.bucket_id, exist_ok=True).bucket_id) == (namespace.repo("bucket"),) * 2
    api.batch_bucket_files(url.bucket_id, add=[(data, path) for path, data in FILES.items()])
    return url.bucket_id


def sizes(api: HfApi, bucket: str, prefix: str | None = None) -> dict[str, int]:
    found = api.list_bucket_tree(bucket, prefix=prefix, recursive=True)
    return {item.path: item.size for item in found if isinstance(item, BucketFile)}


def test_files_are_listed_and_read(bucket: str, api: HfApi, tmp_path: Path) -> None:
    assert sizes(api, bucket) == {path: len(data) for path, data in FILES.items()}
    assert sizes(api, bucket, "m") == {"model/x": 1}
    assert [item.path for item in api.get_bucket_paths_info(bucket, ["empty", "none"])] == ["empty"]
    info = api.bucket_info(bucket)
    assert (info.private, info.total_files, info.size) == (True, 4, sum(map(len, FILES.values())))
    api.download_bucket_files(bucket, [(path, tmp_path / path) for path in FILES])
    assert {path: (tmp_path / path).read_bytes() for path in FILES} == FILES
    assert api.get_bucket_file_metadata(bucket, "config.json").size == 2


def test_operations_fail_one_by_one(bucket: str, api: HfApi, namespace: Namespace) -> None:
    with pytest.raises(HfHubHTTPError, match="gone: no such file"):
        api.batch_bucket_files(bucket, add=[(b"2", "model/x")], delete=["gone", "empty"])
    assert sizes(api, bucket).keys() == FILES.keys() - {"empty"}
    with pytest.raises(HfHubHTTPError, match="no such file"):
        api.batch_bucket_files(bucket, delete=["gone"])
    other = api.create_bucket(namespace.repo("other")).bucket_id
    api.copy_files(f"hf://buckets/{bucket}/deep/", f"hf://buckets/{other}/copy/")
    assert sizes(api, other) == {"copy/er/model.bin": len(FILES["deep/er/model.bin"])}


def test_a_private_bucket_is_its_owners(bucket: str, api: HfApi, namespace: Namespace) -> None:
    stranger = HfApi(endpoint=namespace.endpoint, token=namespace.admin.create_user("stranger").token)
    for someone in (stranger, HfApi(endpoint=namespace.endpoint, token=False)):
        with pytest.raises(BucketNotFoundError):
            someone.bucket_info(bucket)
    with pytest.raises(HfHubHTTPError, match="403"):
        stranger.create_bucket(namespace.repo("mine"))
