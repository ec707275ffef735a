"""Folders of object stores: what is listed, what a change is, and stores that fail or refuse."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence

import pytest

from reshard.pipeline.errors import (
    BucketNotFound,
    BucketReadOnly,
    BucketRefused,
    CloudExtraMissing,
    HubError,
    HubRefused,
    HubUnreachable,
    NoConditionalWrites,
    NoTargetBucket,
    RateLimited,
    ReshardError,
    SourceChanged,
    UnsafePath,
)
from reshard.pipeline.installed import to_add
from reshard.pipeline.limits import ATTEMPTS, FIRST_ATTEMPTS
from reshard.pipeline.places import Bucket
from reshard.pipeline.protocols import Addition, Change, Source, Target
from reshard.pipeline.request import Options
from reshard.pipeline.stores import bucket_target
from reshard.pipeline.stores.bucket import BucketSource
from reshard.pipeline.stores.bucket_target import StoreObjects
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.objects import ObjectTarget
from reshard.pipeline.tensors import StoredFile
from tests.pipeline.stores.conftest import Impatient, noise, read
from tests.support.s3 import S3, OddStore

DATA = noise(3_300_000, 5)


def opened(url: str, context: Context) -> Source:
    return open_source(Bucket(url=url), context)


@pytest.fixture
def odd(odd_store: OddStore, context: Context) -> Source:
    odd_store.objects = {"model.safetensors": (DATA, "v1"), "config.json": (b"{}", "c")}
    return opened("s3://odd", context)


def test_a_folder_is_its_objects_and_not_those_of_a_longer_name(bucket: S3, context: Context) -> None:
    url = bucket.put("run", {"a.bin": b"1", "b/c.bin": b"23", "b/": b"", "": b"", "d%41+ é.bin": b"4"})
    bucket.put("run-2", {"other.bin": b"5"})
    source = opened(url + "/", context)
    assert {path: file.size for path, file in source.files().items()} == {"a.bin": 1, "b/c.bin": 2, "d%41+ é.bin": 1}
    assert read(source, "d%41+ é.bin") == b"4"
    assert (str(source.place), source.pin.endpoint, source.place.local, source.visibility) == (
        url, None, None, "private"
    )  # fmt: skip
    whole = opened(bucket.url, context)
    assert "run/b/c.bin" in whole.files() and "run-2/other.bin" in whole.files()


def test_a_name_that_looks_like_a_way_out_is_only_a_name(bucket: S3, context: Context) -> None:
    url = bucket.put("%2e%2e/other", {"a%2fb.bin": b"12"})
    assert read(opened(url, context), "a%2fb.bin", 1) == b"2"


def test_googles_interface_is_read_alike(
    bucket: S3, s3_server: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.client.put_bucket_acl(Bucket=bucket.name, ACL="public-read")
    bucket.client.put_object(Bucket=bucket.name, Key="run/a.bin", Body=b"12", ACL="public-read")
    monkeypatch.setenv("GOOGLE_BASE_URL", s3_server)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert read(opened(f"gs://{bucket.name}/run", context), "a.bin", 1) == b"2"


def test_a_folder_of_too_many_objects_is_refused(odd: Source, pace: Impatient) -> None:
    assert BucketSource.open(Bucket(url="s3://odd"), pace, most=2).files()
    with pytest.raises(HubRefused, match="more than 1 object; use the folder of the checkpoint"):
        BucketSource.open(Bucket(url="s3://odd"), pace, most=1)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIA\n", "AWS_ACCESS_KEY_ID has a line break"),
        ("AWS_REGION", "us-east-1\n", "AWS_REGION has a line break"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "AWS_ENDPOINT_URL is not a URL such as http://localhost:9000"),
        ("AWS_ENDPOINT_URL", "", "AWS_ENDPOINT_URL is empty: unset it"),
        ("AWS_ENDPOINT", "http://host:99999", "AWS_ENDPOINT is not a URL"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9/<", "cannot make a request with the region, endpoint"),
    ],
)
def test_an_environment_that_obstore_panics_at_is_an_error(
    name: str,
    value: str,
    why: str,
    bucket: S3,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Wherever it is met, and what is known of it beforehand without the lines that Rust prints."""
    listed = opened(bucket.put("run", {"a.bin": b"1"}), context)
    monkeypatch.setenv(name, value)

    def target() -> Target:
        return open_target(Bucket(url=bucket.url), Options(), context)

    for call in (
        lambda: opened(bucket.url, context),
        lambda: target().state(),
        lambda: target().prepare(private=True),
        lambda: target().sink("t").batch([]).open("a.bin", 0).finish(),
        lambda: read(BucketSource(Bucket(url=bucket.url), Impatient(), {"a.bin": (1, "etag")}), "a.bin"),
    ):
        with pytest.raises(BucketRefused, match=why) as refused:
            call()
        assert name in refused.value.next_step or "panic" in capfd.readouterr().err
    assert read(listed, "a.bin") == b"1", "what is open stays so"
    assert "panic" not in capfd.readouterr().err


def test_a_key_in_several_lines_is_no_mistake(bucket: S3, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{\n "type": "service_account"\n}\n')
    assert opened(bucket.put("run", {"a.bin": b"1"}), context).files().keys() == {"a.bin"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9/<")
    with pytest.raises(BucketRefused) as refused:
        opened(bucket.url, context)
    assert "GOOGLE" not in str(refused.value)


def test_an_error_quotes_no_setting(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '"of \\"mine\\" secret"')
    with pytest.raises(ReshardError) as refused:
        opened("gs://bucket/run", context)
    assert "secret" not in str(refused.value) and "decode" in str(refused.value)


def test_a_store_that_gives_no_etags_is_refused(odd: Source, odd_store: OddStore, pace: Impatient) -> None:
    odd_store.objects["model.safetensors"] = (DATA, "")
    with pytest.raises(HubRefused, match=r"'model\.safetensors' has no ETag"):
        BucketSource.open(Bucket(url="s3://odd"), pace)


@pytest.mark.parametrize("heeds_match", [True, False])
def test_an_object_that_was_written_again_is_another(odd: Source, odd_store: OddStore, heeds_match: bool) -> None:
    """Also where the store knows no If-Match, and where only the rest of a broken read would be of the new one."""
    odd_store.heeds_match = heeds_match
    odd_store.faults = [("cut", 1_500_000)]
    views = odd.read(odd.files()["model.safetensors"], 0, len(DATA))
    assert bytes(next(views)) == DATA[: 1 << 20]
    odd_store.objects["model.safetensors"] = (DATA, "v2")
    with pytest.raises(SourceChanged, match=r"s3://odd has changed .*model\.safetensors was replaced"):
        list(views)


@pytest.mark.parametrize("heeds_match", [True, False])
@pytest.mark.parametrize("etag", ["v1", "v2"])
@pytest.mark.parametrize("left", [0, 4, 1000])
def test_an_object_cut_after_the_listing_is_a_source_that_changed(
    odd: Source, odd_store: OddStore, pace: Impatient, heeds_match: bool, etag: str, left: int
) -> None:
    """Also of a store that knows no If-Match, or calls the shorter object by the tag of the longer one."""
    odd_store.heeds_match = heeds_match
    odd_store.objects["model.safetensors"] = (DATA[:left], etag)
    with pytest.raises(SourceChanged, match=r"model\.safetensors was replaced"):
        b"".join(odd.read(odd.files()["model.safetensors"], 2, 5000))
    assert not pace.slept, "what changed does not change back"


def test_an_object_that_is_gone_and_one_written_again_in_a_real_store(bucket: S3, context: Context) -> None:
    url = bucket.put("run", {"a.bin": b"1", "b.bin": b"2"})
    source = opened(url, context)
    bucket.put("run", {"a.bin": b"x"})
    bucket.client.delete_object(Bucket=bucket.name, Key="run/b.bin")
    with pytest.raises(SourceChanged, match="a.bin was replaced"):
        read(source, "a.bin")
    with pytest.raises(SourceChanged, match="b.bin is gone"):
        read(source, "b.bin")
    assert opened(url, context).pin != source.pin


def test_a_broken_read_goes_on_where_it_broke(odd: Source, odd_store: OddStore, pace: Impatient) -> None:
    odd_store.faults = [("status", 503), ("cut", 1_500_000), ("status", 500)]
    assert read(odd, "model.safetensors", 10) == DATA[10:]
    assert len(pace.slept) == 3
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in odd_store.asked]
    assert starts[:2] == [10, 10] and starts[2] == starts[3] >= 10 + (1 << 20), "what was handed out is not read again"


def test_progress_makes_the_attempts_count_anew(odd: Source, odd_store: OddStore) -> None:
    failing = [("status", 503)] * (ATTEMPTS - 2)
    odd_store.faults = [*failing, ("cut", 1_500_000), *failing, ("cut", 1_500_000), *failing]
    assert read(odd, "model.safetensors") == DATA


def test_a_store_that_stays_away_is_an_error_of_its_own(odd: Source, odd_store: OddStore, context: Context) -> None:
    odd_store.faults = [("status", 503)] * ATTEMPTS
    with pytest.raises(HubError, match=f"s3://odd: HTTP 503, after {ATTEMPTS} attempts"):
        read(odd, "model.safetensors")
    odd_store.faults = [("status", 429)] * ATTEMPTS
    with pytest.raises(RateLimited):
        read(odd, "model.safetensors")
    odd_store.shutdown()
    odd_store.server_close()
    with pytest.raises(
        HubUnreachable, match="cannot reach s3://odd/folder: HTTP error: error sending request, after 3"
    ) as error:
        opened("s3://odd/folder", context)
    assert "http://" not in str(error.value), "URLs may be signed"


@pytest.mark.parametrize(
    ("url", "setting", "more"),
    [
        ("s3://odd/m", "AWS_ENDPOINT_URL", {}),
        ("gs://odd/m", "GOOGLE_BASE_URL", {"GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az://odd/m", "AZURE_STORAGE_ENDPOINT", {"AZURE_SKIP_SIGNATURE": "true", "AZURE_STORAGE_ACCOUNT_NAME": "a"}),
    ],
)
def test_a_dead_endpoint_is_given_up_soon_and_told_with_its_own_setting(
    url: str, setting: str, more: dict[str, str], odd_store: OddStore, pace: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd_store.shutdown()
    odd_store.server_close()
    for name, value in {setting: odd_store.env["AWS_ENDPOINT_URL"], **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HubUnreachable) as gone:
        BucketSource.open(Bucket(url=url), pace)
    assert gone.value.next_step.startswith(f"check the network and {setting}, then ")
    assert len(pace.slept) == FIRST_ATTEMPTS - 1 and sum(pace.slept) < 3
    objects = StoreObjects(Bucket(url=url), pace)
    for look in (ObjectTarget(objects).recover, lambda: objects.read("a")):
        with pytest.raises(HubUnreachable) as gone:
            look()
        assert gone.value.next_step.startswith(f"check the network and {setting}, then ")
    assert len(pace.slept) == 2 * (FIRST_ATTEMPTS - 1), "a run into it gives up as soon"


def test_a_store_that_answers_badly_is_asked_as_often_as_any(odd: Source, odd_store: OddStore, pace: Impatient) -> None:
    odd_store.listing = 503
    with pytest.raises(HubError, match=f"HTTP 503, after {ATTEMPTS} attempts"):
        BucketSource.open(Bucket(url="s3://odd"), pace)


@pytest.mark.parametrize(
    ("url", "settings", "more"),
    [
        ("s3://odd/m", "AWS_*", {"AWS_CONDITIONAL_PUT": "sometimes"}),
        ("gs://odd/m", "GOOGLE_*", {"GOOGLE_SERVICE_ACCOUNT": "/nowhere"}),
        ("az://odd/m", "AZURE_*", {}),  # without an account
    ],
)
def test_hints_at_credentials_name_those_of_the_store(
    url: str, settings: str, more: dict[str, str], pace: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BucketRefused) as refused:
        BucketSource.open(Bucket(url=url), pace)
    assert f"({settings} variables)" in refused.value.next_step


@pytest.mark.parametrize("status", [400, 401, 403, 301])
def test_a_refusal_is_not_tried_again_and_none_of_its_text_is_repeated(
    status: int, odd: Source, odd_store: OddStore, context: Context, pace: Impatient
) -> None:
    odd_store.listing = status
    why = (
        "AWS_REGION is not the region of the bucket" if status == 301 else f"no permission to read s3://odd: .*{status}"
    )
    with pytest.raises(BucketRefused, match=why) as listing:
        opened("s3://odd", context)
    odd_store.faults = [("status", status)]
    with pytest.raises(BucketRefused) as reading:
        read(odd, "model.safetensors")
    assert "SECRET" not in f"{listing.value.to_dict()}{reading.value.to_dict()}" and not pace.slept


def test_nothing_there_is_told_with_the_place(bucket: S3, context: Context) -> None:
    with pytest.raises(BucketNotFound, match="s3://no-such-bucket/x.*HTTP 404, NoSuchBucket"):
        opened("s3://no-such-bucket/x", context)
    with pytest.raises(BucketNotFound, match=f"{bucket.url}/empty: .*no objects found"):
        opened(f"{bucket.url}/empty", context)
    target = open_target(Bucket(url="s3://no-such-bucket/x"), Options(), context)
    for look in (target.state, target.head, lambda: target.prepare(private=True)):
        with pytest.raises(NoTargetBucket, match=r"s3://no-such-bucket/x: bucket not found .HTTP 404") as missing:
            look()
        assert "AWS_ENDPOINT_URL" in missing.value.next_step


def test_who_may_not_delete_leaves_one_probe_however_often_a_run_is_tried(bucket: S3) -> None:
    class Kept(StoreObjects):
        def delete(self, paths: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
            raise BucketReadOnly(place=self.place, why="HTTP 403")

    place = Bucket(url=f"{bucket.url}/run")
    for _ in range(2):
        with pytest.raises(BucketReadOnly):
            Kept(place, Impatient()).prepare(private=True)
    assert len(StoreObjects(place, Impatient()).listed()) == 1
    StoreObjects(place, Impatient()).prepare(private=True)
    assert not StoreObjects(place, Impatient()).listed()


@pytest.mark.parametrize("key", ["a/../b", "a//b", "a/./b", "a\x1b[2Jb", "a\nb", "a\\b", "x" * 300])
def test_a_key_that_is_no_path_is_refused(key: str, odd_store: OddStore, context: Context) -> None:
    odd_store.objects = {"run/fine.bin": (b"", "1"), f"run/{key}": (b"", "2")}
    with pytest.raises(UnsafePath, match="s3://odd/run"):
        opened("s3://odd/run", context)


def test_without_obstore_the_extra_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CloudExtraMissing, match="s3://odd requires obstore") as missing:
        opened("s3://odd", context)
    assert to_add("cloud") in missing.value.next_step


def test_settings_that_make_no_store_are_told(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(BucketRefused, match="no permission to read az://container: .*[Aa]ccount"):
        opened("az://container", context)


@pytest.mark.parametrize("by", ["server", "setting"])
def test_a_store_without_conditional_writes_is_no_target(
    by: str, odd: Source, odd_store: OddStore, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because it ignores the condition, or because its user told obstore that it has none."""
    odd_store.writable, before = True, set(odd_store.objects)
    if by == "setting":
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    target = open_target(Bucket(url="s3://odd"), Options(), context)
    with pytest.raises(NoConditionalWrites, match="s3://odd does not support conditional writes"):
        target.prepare(private=True)
    assert odd_store.objects.keys() == before


def test_a_store_that_we_may_not_write_to_says_so(odd: Source, context: Context) -> None:
    target = open_target(Bucket(url="s3://odd"), Options(), context)
    assert target.leave(True).given is None
    with pytest.raises(BucketReadOnly, match="no permission to write to s3://odd: HTTP 403, Refused") as refused:
        target.prepare(private=True)
    assert "AWS_* variables" in refused.value.next_step and "SECRET" not in str(refused.value)


def test_a_file_too_large_for_the_stores_own_copy_goes_on_where_its_connection_broke(
    odd_store: OddStore, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_target, "STORE_COPY_MAX", len(DATA) - 1)
    sha256 = hashlib.sha256(DATA).hexdigest()
    odd_store.writable = True
    odd_store.objects = {
        f"{bucket_target.DATA}t/b-1": (DATA, "v1"),
        f"{bucket_target.SEALED}{sha256}/{len(DATA)}/t/b-1": (b"", "empty"),
    }
    odd_store.faults = [("cut", 1_500_000), ("cut", 1_000_000)]
    objects = StoreObjects(Bucket(url="s3://odd"), Impatient())
    objects.put([StoredFile("model.safetensors", len(DATA), sha256=sha256)])
    assert odd_store.objects["model.safetensors"][0] == DATA and len(odd_store.asked) == 3


def test_what_nobody_went_on_with_is_removed_in_time(
    bucket: S3, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_target(Bucket(url=f"{bucket.url}/run"), Options(), context)
    base = target.prepare(private=True)

    def stored(data: bytes) -> StoredFile:
        batch = target.sink("of a job").batch([])
        writer = batch.open("model.safetensors", len(data))
        writer.write(memoryview(data))
        writer.finish()
        return batch.seal()[0]

    left = stored(b"left")
    base = target.commit(Change("1", "", (Addition("a", stored=stored(b"a")),), ()), base)
    assert target.holds([left]) == []
    monkeypatch.setattr(bucket_target, "STAGING_AGE", -60.0)
    target.commit(Change("2", "", (Addition("b", stored=stored(b"b")),), ()), base)
    assert target.holds([left]) == [left]
