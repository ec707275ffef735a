"""The content store, judged by the released hf_xet wheel and the real client."""

import hashlib
import json
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import hf_xet
import httpx2
import numpy
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._headers import build_hf_headers
from safetensors.numpy import save

from tests.hub import HubAdmin, HubProcess, User
from tests.hub.cas import shard as shards
from tests.hub.cas.hashes import file_hash, from_hex, to_hex, xorb_hash
from tests.hub.cas.xorb import GROUPED_LZ4, LZ4, checked, ungroup
from tests.hub.fixtures import Namespace, hub_process
from tests.hub.process import ROOT

__all__ = ["hub_process"]  # of its own: other files would leave chunks there, and what is sent is counted

RANDOM = numpy.random.default_rng(1).bytes(10_000_000)
FLOATS = numpy.linspace(0, 1, 400_003, dtype=numpy.float32).tobytes()  # compressed, grouped by position
TEXT = b"the same line over and over\n" * 20_000


@pytest.fixture
def api(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    """The client with Xet, which retries soon."""
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "100ms")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("HF_XET_TELEMETRY_ENABLED", "0")
    return HfApi(endpoint=namespace.endpoint, token=namespace.token)


@pytest.fixture
def repo(namespace: Namespace, api: HfApi, tmp_path: Path) -> str:
    """A repo whose large files came over Xet."""
    repo_id = namespace.repo("model")
    api.create_repo(repo_id)
    upload(api, repo_id, {"random.bin": RANDOM, "floats.bin": FLOATS, "text.bin": TEXT}, tmp_path)
    return repo_id


def upload(api: HfApi, repo: str, files: dict[str, bytes], folder: Path, **more: Any) -> str:
    """One commit of files on disk: bytes and open files would take another path."""
    operations = []
    for number, (path, data) in enumerate(files.items()):
        file = folder / f"upload-{number}"
        file.write_bytes(data)
        operations.append(CommitOperationAdd(path, file))
    return str(api.create_commit(repo, operations, commit_message="upload", **more).oid)


def unshared(seed: int) -> bytes:
    """For tests that damage the store: chunks that no other test uses."""
    return numpy.random.default_rng(seed).bytes(3_000_000)


def requests_to(hub: HubAdmin, part: str) -> list[dict[str, Any]]:
    return [entry for entry in hub.log() if part in f"{entry['method']} {entry['path']}"]


def fresh_client(namespace: Namespace, folder: Path, code: str) -> subprocess.Popen[str]:
    """A client process with empty caches; ``api``, ``Path`` and ``sys.argv[1]`` (its folder) are there."""
    folder.mkdir()
    environment = os.environ | {
        "HF_HOME": str(folder),
        "HF_XET_CACHE": str(folder / "xet"),
        "HF_ENDPOINT": namespace.endpoint,
    }
    head = (
        "import sys, json, hashlib\nfrom pathlib import Path\n"
        "from huggingface_hub import HfApi, CommitOperationAdd, snapshot_download\n"
        f"api = HfApi(token={namespace.token!r})\n"
    )
    command = [sys.executable, "-c", head + code, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)


def uploading(repo: str, path: str, file: Path) -> str:
    """Code for ``fresh_client``."""
    return f"api.upload_file(repo_id={repo!r}, path_in_repo={path!r}, path_or_fileobj={str(file)!r})\n"


def ended(client: subprocess.Popen[str]) -> str:
    output, _ = client.communicate(timeout=120)
    assert client.returncode == 0
    return output


def test_a_commit_over_xet_is_read_back_over_xet(repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    assert all(hub.files(repo)[name]["xet"] for name in ("random.bin", "floats.bin", "text.bin"))
    assert not requests_to(hub, "/_lfs/") and requests_to(hub, "/v1/shards")
    folder = Path(snapshot_download(repo, endpoint=api.endpoint, token=api.token, cache_dir=tmp_path / "cache"))
    for name, data in (("random.bin", RANDOM), ("floats.bin", FLOATS), ("text.bin", TEXT)):
        assert (folder / name).read_bytes() == data
    assert requests_to(hub, "GET /_cas/xorbs/") and not requests_to(hub, "/_cdn/")


def test_every_compression_of_the_wheel_was_read(repo: str, hub_process: HubProcess, hub: HubAdmin) -> None:
    schemes = set()
    for name in ("random.bin", "floats.bin", "text.bin"):
        for term in hub.xet_terms(hub.files(repo)[name]["xet"]):
            xorb = hub_process.directory / "xet" / "xorbs" / term["xorb"][:2] / term["xorb"]
            table, data = checked(xorb, from_hex(term["xorb"])), xorb.read_bytes()
            schemes |= {data[at + 4] for at in table.stored[:-1]}
    assert schemes == {0, LZ4, GROUPED_LZ4}


def test_files_over_xet_are_read_over_plain_http_with_ranges(
    repo: str, api: HfApi, hub: HubAdmin, lfs: None, tmp_path: Path
) -> None:
    path = hf_hub_download(repo, "floats.bin", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == FLOATS
    assert requests_to(hub, "/_cdn/") and not requests_to(hub, "GET /_cas/")
    url = f"{api.endpoint}/{repo}/resolve/main/random.bin"
    for start, stop in ((0, 1), (65_535, 65_537), (1_000_000, 9_000_000), (len(RANDOM) - 5, len(RANDOM))):
        headers = {"Authorization": f"Bearer {api.token}", "Range": f"bytes={start}-{stop - 1}"}
        answer = httpx2.get(url, headers=headers, follow_redirects=True)
        assert answer.status_code == 206 and answer.content == RANDOM[start:stop]


def test_headers_of_safetensors_over_xet_are_read_by_range(
    repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path
) -> None:
    upload(api, repo, {"model.safetensors": save({"a": numpy.ones(300_000, numpy.float32)})}, tmp_path)
    assert hub.files(repo)["model.safetensors"]["xet"]
    assert list(api.get_safetensors_metadata(repo).weight_map) == ["a"]
    assert hub.totals()["cdn"]["down"] < 200_000


def test_files_over_lfs_are_served_plainly_to_a_client_with_xet(
    repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path
) -> None:
    """An open file makes the client take LFS; such a file has no hash in the content store and needs none."""
    data = RANDOM[:5_000_000][::-1]
    api.create_commit(repo, [CommitOperationAdd("plain.bin", BytesIO(data))], commit_message="over LFS")
    assert hub.files(repo)["plain.bin"]["xet"] is None
    path = hf_hub_download(repo, "plain.bin", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == data


def test_streams_in_and_out_never_touch_the_disk(repo: str, api: HfApi, hub: HubAdmin) -> None:
    """From a download stream into an upload stream, committed by hand."""
    target = f"{repo}-target"
    api.create_repo(target)
    source = hub.files(repo)["random.bin"]
    session, headers = hf_xet.XetSession(), build_hf_headers(token=api.token)
    read_url = f"{api.endpoint}/api/models/{repo}/xet-read-token/{hub.head(repo)}"
    group = session.new_download_stream_group(token_refresh_url=read_url, token_refresh_headers=headers)
    info = hf_xet.XetFileInfo(source["xet"], source["size"])
    write_url = f"{api.endpoint}/api/models/{target}/xet-write-token/main"
    commit = session.new_upload_commit(token_refresh_url=write_url, token_refresh_headers=headers)
    stream = commit.start_upload_stream(name="part.bin")
    for start, stop in ((3_000_000, 9_000_001), (0, 1_000_000)):
        for piece in group.download_stream(info, start=start, end=stop):
            stream.write(piece)
    made = stream.finish().xet_info
    lines = [
        {"key": "header", "value": {"summary": "by hand", "parentCommit": hub.head(target)}},
        {"key": "lfsFile", "value": {"path": "part.bin", "algo": "sha256", "oid": made.sha256, "size": made.file_size}},
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    url = f"{api.endpoint}/api/models/{target}/commit/main"
    assert httpx2.post(url, headers=headers, content=content).status_code == 400  # git may not name it yet
    commit.wait_to_finish()
    assert httpx2.post(url, headers=headers, content=content).status_code == 200
    expected = RANDOM[3_000_000:9_000_001] + RANDOM[:1_000_000]
    assert hub.read(target, "part.bin") == expected
    assert made.sha256 == hashlib.sha256(expected).hexdigest() and made.hash == hub.files(target)["part.bin"]["xet"]


def test_a_fresh_client_finds_chunks_that_another_repo_has(
    repo: str, namespace: Namespace, hub: HubAdmin, tmp_path: Path
) -> None:
    """The first chunk of a file is always asked for, and the answer names all chunks of its shard."""
    hub.create_repo(namespace.repo("second"))
    hub.log(reset=True)
    (tmp_path / "part").write_bytes(RANDOM[:6_000_000])
    code = uploading(namespace.repo("second"), "a.bin", tmp_path / "part")
    ended(fresh_client(namespace, tmp_path / "client", code))
    assert hub.read(namespace.repo("second"), "a.bin") == RANDOM[:6_000_000]
    answered = [entry for entry in requests_to(hub, "/v1/chunks/") if entry["status"] == 200]
    assert answered and sum(entry["up"] for entry in requests_to(hub, "/v1/xorbs/")) < 400_000


def test_two_client_processes_write_and_read_at_once(
    repo: str, namespace: Namespace, hub: HubAdmin, tmp_path: Path
) -> None:
    code = (
        "import random\nme = Path(sys.argv[1])\ndata = random.Random(me.name).randbytes(8_000_000)\n"
        "(me / 'up').mkdir()\n(me / 'up' / f'{me.name}.bin').write_bytes(data)\n"
        f"api.upload_folder(repo_id={repo!r}, folder_path=me / 'up')\n"
        f"got = Path(snapshot_download({repo!r}, token=api.token))\n"
        "print(hashlib.sha256(data).hexdigest(), hashlib.sha256((got / 'random.bin').read_bytes()).hexdigest())\n"
    )
    clients = {name: fresh_client(namespace, tmp_path / name, code) for name in ("one", "two")}
    for name, client in clients.items():
        own, shared = ended(client).split()
        assert hub.files(repo)[f"{name}.bin"]["sha256"] == own
        assert shared == hashlib.sha256(RANDOM).hexdigest()


def test_a_folder_goes_up_over_xet(repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a.safetensors").write_bytes(RANDOM[5:7_000_000])
    (folder / "config.json").write_text("{}")
    api.upload_folder(repo_id=repo, folder_path=folder)
    assert hub.files(repo)["sub/a.safetensors"]["xet"]
    assert hub.read(repo, "sub/a.safetensors") == RANDOM[5:7_000_000]


def test_a_pull_request_takes_files_over_xet(repo: str, hub: HubAdmin, tmp_path: Path) -> None:
    guest = HfApi(endpoint=hub.endpoint, token=hub.create_user(f"{repo.split('/')[0]}-guest").token)
    upload(guest, repo, {"new.bin": RANDOM[:3_000_000][::-1]}, tmp_path, create_pr=True)
    assert hub.files(repo, "refs/pr/1")["new.bin"]["xet"]


def test_files_are_copied_between_repos_without_their_bytes(repo: str, api: HfApi, hub: HubAdmin) -> None:
    target = f"{repo}-copy"
    api.create_repo(target)
    hub.log(reset=True)
    operation = CommitOperationCopy("random.bin", "r.bin", src_repo_id=repo, src_repo_type="model")
    api.create_commit(target, [operation], commit_message="copy")
    assert hub.read(target, "r.bin") == RANDOM
    totals = hub.totals()
    assert totals["xet"]["up"] == totals["lfs"]["up"] == totals["cdn"]["down"] == 0
    assert hub.files(target)["r.bin"]["xet"] == hub.files(repo)["random.bin"]["xet"]


def test_a_repos_files_are_not_read_with_the_token_of_another(repo: str, hub: HubAdmin, api: HfApi) -> None:
    hub.create_repo(repo, visibility="private")
    guest = hub.create_user(f"{repo.split('/')[0]}-guest")
    hub.create_repo(f"{guest.name}/own")
    token_url = f"{hub.endpoint}/api/models/%s/xet-read-token/main"
    mine = {"Authorization": f"Bearer {guest.token}"}
    assert httpx2.get(token_url % repo, headers=mine).status_code == 404
    issued = httpx2.get(token_url % f"{guest.name}/own", headers=mine).json()
    bearer = {"Authorization": f"Bearer {issued['accessToken']}"}
    url = f"{issued['casUrl']}/v1/reconstructions/{hub.files(repo)['random.bin']['xet']}"
    assert httpx2.get(url, headers=bearer).status_code == 404
    assert httpx2.get(url).status_code == 401
    xorb = hub.xet_terms(hub.files(repo)["random.bin"]["xet"])[0]["xorb"]
    assert httpx2.get(f"{hub.endpoint}/_cas/xorbs/{xorb}", headers=bearer).status_code == 403
    assert httpx2.post(f"{issued['casUrl']}/v1/shards", headers=bearer, content=b"").status_code == 403


def test_signed_urls_are_good_for_their_range_only(repo: str, hub: HubAdmin, api: HfApi) -> None:
    bearer, cas = write_access(api, repo, "read")
    xet = hub.files(repo)["random.bin"]["xet"]
    answer = httpx2.get(f"{cas}/v1/reconstructions/{xet}", headers={**bearer, "Range": "bytes=5000000-5000009"}).json()
    (term,) = answer["terms"]
    (part,) = answer["fetch_info"][term["hash"]]
    first, last = part["url_range"]["start"], part["url_range"]["end"]
    assert 0 < last - first < 200_000 and 0 <= answer["offset_into_first_range"] < term["unpacked_length"]
    assert httpx2.get(part["url"], headers={"Range": f"bytes={first}-{last}"}).status_code == 206
    assert httpx2.get(part["url"], headers={"Range": f"bytes={first}-{last + 1}"}).status_code == 403
    past = {**bearer, "Range": f"bytes={len(RANDOM)}-"}
    assert httpx2.get(f"{cas}/v1/reconstructions/{xet}", headers=past).status_code == 416


def write_access(api: HfApi, repo: str, scope: str = "write") -> tuple[dict[str, str], str]:
    url = f"{api.endpoint}/api/models/{repo}/xet-{scope}-token/main"
    issued = httpx2.get(url, headers={"Authorization": f"Bearer {api.token}"}).json()
    return {"Authorization": f"Bearer {issued['accessToken']}"}, issued["casUrl"]


def test_a_xorb_that_does_not_hash_to_its_name_is_refused(
    repo: str, hub_process: HubProcess, hub: HubAdmin, api: HfApi
) -> None:
    bearer, cas = write_access(api, repo)
    name = hub.xet_terms(hub.files(repo)["random.bin"]["xet"])[0]["xorb"]
    stored = (hub_process.directory / "xet" / "xorbs" / name[:2] / name).read_bytes()
    wrong = stored[:5000] + bytes([stored[5000] ^ 1]) + stored[5001:]
    for body in (wrong, stored[:-200_000], b"", stored[3:]):
        assert httpx2.post(f"{cas}/v1/xorbs/default/{name}", headers=bearer, content=body).status_code == 400
    again = httpx2.post(f"{cas}/v1/xorbs/default/{name}", headers=bearer, content=stored)
    assert again.json() == {"was_inserted": False}


def test_a_shard_that_describes_its_files_wrongly_is_refused(
    repo: str, hub_process: HubProcess, hub: HubAdmin, api: HfApi
) -> None:
    bearer, cas = write_access(api, repo)
    xet = hub.files(repo)["floats.bin"]["xet"]
    found = [path.read_bytes() for path in (hub_process.directory / "xet" / "shards").glob("*/*")]
    data = next(d for d in found if any(f.hash == from_hex(xet) for f in shards.parse(d).files))

    def post(body: bytes) -> int:
        return int(httpx2.post(f"{cas}/v1/shards", headers=bearer, content=body).status_code)

    assert post(data) == 200
    name = data.index(from_hex(xet))
    count = int.from_bytes(data[name + 36 : name + 40], "little")
    for offset in (
        name + 1,  # the file's hash
        name + 48 + 1,  # its first xorb
        name + 48 + 36,  # its first term's length
        name + 48 + 44,  # and the end of its chunks
        name + 48 * (1 + count) + 1,  # the proof that its uploader has the chunks
    ):
        assert post(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]) == 400
    assert post(data[: name + 48]) == 400


def test_expired_tokens_are_refreshed_in_the_middle(
    repo: str, namespace: Namespace, hub: HubAdmin, tmp_path: Path
) -> None:
    hub.settings(xet_token_lifetime=1)
    hub.fault("/_cas/", "throttle", rate=6_000_000)
    hub.log(reset=True)
    data = RANDOM[8_000_000::-1]
    code = uploading(repo, "slow.bin", tmp_path / "slow") + (
        f"got = Path(snapshot_download({repo!r}, allow_patterns='slow.bin', token=api.token))\n"
        "print(hashlib.sha256((got / 'slow.bin').read_bytes()).hexdigest())\n"
    )
    (tmp_path / "slow").write_bytes(data)
    assert ended(fresh_client(namespace, tmp_path / "client", code)).strip() == hashlib.sha256(data).hexdigest()
    assert len(requests_to(hub, "xet-write-token")) > 1


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("POST .*/v1/xorbs", {"action": "reset_upload", "after": 1_000_000}),
    ("POST .*/v1/xorbs", {"action": "status", "status": 503}),
    ("POST .*/v1/shards", {"action": "lost_response"}),
    ("GET .*/v1/reconstructions", {"action": "status", "status": 503}),
    ("GET /_cas/xorbs/", {"action": "truncate", "after": 300_000}),
    ("GET /_cas/xorbs/", {"action": "truncate", "after": 300_000, "fin": True}),
    ("GET /_cas/xorbs/", {"action": "status", "status": 429}),
]


@pytest.mark.parametrize(("match", "fault"), FAULTS, ids=[f"{m} {f['action']}" for m, f in FAULTS])
def test_the_wheel_survives_passing_faults(
    namespace: Namespace, api: HfApi, hub: HubAdmin, tmp_path: Path, match: str, fault: dict[str, Any]
) -> None:
    repo_id = namespace.repo("model")
    api.create_repo(repo_id)
    data = hashlib.shake_128(f"{match}{fault}".encode()).digest(2_000_000)
    rule = hub.fault(match, times=1, **fault)
    upload(api, repo_id, {"a.bin": data}, tmp_path)
    path = hf_hub_download(repo_id, "a.bin", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == data
    assert hub.wait_for_fault(rule)["hits"] == 1


def test_wrong_bytes_in_a_stored_xorb_reach_the_reader_unnoticed(
    namespace: Namespace, api: HfApi, hub: HubAdmin, tmp_path: Path
) -> None:
    """Neither the wheel nor the client compares what it got with the file's hashes."""
    repo = api.create_repo(namespace.repo("damaged")).repo_id
    floats = numpy.linspace(1, 2, 400_000, dtype=numpy.float32).tobytes()
    files = {"random.bin": unshared(2), "floats.bin": floats}
    upload(api, repo, files, tmp_path)
    for path, data in files.items():
        hub.corrupt(repo, path, at=1_234_567)
        expected = data[:1_234_567] + bytes([data[1_234_567] ^ 0xFF]) + data[1_234_568:]
        assert hub.read(repo, path) == expected
        cache = tmp_path / "cache"
        local = hf_hub_download(repo, path, endpoint=api.endpoint, token=api.token, cache_dir=cache)
        assert Path(local).read_bytes() == expected


def test_wrong_bytes_on_the_way_of_a_plain_read(repo: str, hub: HubAdmin, api: HfApi) -> None:
    hub.fault("GET /_cdn/.*/random.bin", "wrong_bytes", at=6_000_000)
    headers = {"Authorization": f"Bearer {api.token}", "Range": "bytes=5999999-6000001"}
    answer = httpx2.get(f"{api.endpoint}/{repo}/resolve/main/random.bin", headers=headers, follow_redirects=True)
    expected = bytearray(RANDOM[5_999_999:6_000_002])
    expected[1] ^= 0xFF
    assert answer.content == expected


def test_a_lost_xorb_is_missed_by_readers_and_commits(
    namespace: Namespace, hub: HubAdmin, api: HfApi, tmp_path: Path
) -> None:
    repo = api.create_repo(namespace.repo("lost")).repo_id
    upload(api, repo, {"random.bin": unshared(3)}, tmp_path)
    hub.drop_xorb(hub.xet_terms(hub.files(repo)["random.bin"]["xet"])[0]["xorb"])
    with pytest.raises(RuntimeError, match="404"):
        hf_hub_download(repo, "random.bin", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path / "cache")
    with pytest.raises(HfHubHTTPError, match="LFS pointer"):
        api.create_commit(repo, [CommitOperationCopy("random.bin", "again.bin")], commit_message="git must not name it")


def test_what_was_stored_is_there_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubProcess(tmp_path / "hub", users=["alice:hf_alice"]) as process:
        api = HfApi(endpoint=process.endpoint, token="hf_alice")
        api.create_repo("alice/model")
        upload(api, "alice/model", {"a.bin": RANDOM}, tmp_path)
        process.kill()
        process.start()
        assert process.admin.read("alice/model", "a.bin") == RANDOM
        namespace = Namespace(process.endpoint, process.admin, User("alice", "hf_alice"))
        code = uploading("alice/model", "b.bin", tmp_path / "b") + (
            "got = Path(snapshot_download('alice/model', token=api.token))\n"
            "print(hashlib.sha256((got / 'a.bin').read_bytes()).hexdigest())\n"
        )
        (tmp_path / "b").write_bytes(RANDOM + b"more")
        assert ended(fresh_client(namespace, tmp_path / "client", code)).strip() == hashlib.sha256(RANDOM).hexdigest()
        assert sum(entry["up"] for entry in requests_to(process.admin, "/v1/xorbs/")) < 400_000


def test_a_hub_without_xet_has_none_of_it(
    repo: str, hub: HubAdmin, api: HfApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.settings(xet=False)
    (item,) = api.get_paths_info(repo, "random.bin")
    assert getattr(item, "xet_hash", None) is None
    head = httpx2.head(f"{api.endpoint}/{repo}/resolve/main/random.bin", headers=build_hf_headers(token=api.token))
    assert head.status_code == 302 and "x-xet-hash" not in head.headers
    with pytest.raises(ConnectionError):
        upload(api, repo, {"new.bin": RANDOM[:100_000]}, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    upload(api, repo, {"new.bin": RANDOM[:100_000]}, tmp_path)
    path = hf_hub_download(repo, "random.bin", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == RANDOM


def test_full_storage_refuses_the_token(repo: str, hub: HubAdmin, api: HfApi, tmp_path: Path) -> None:
    hub.settings(storage_full=[repo])
    with pytest.raises(ConnectionError, match="403"):
        upload(api, repo, {"new.bin": RANDOM[:100_000]}, tmp_path)


def test_hashes_agree_with_the_wheels_own_store(tmp_path: Path) -> None:
    """The wheel writes to its own store in a folder; its files there are named by hashes that we compute too."""
    store = tmp_path / "store"
    session = hf_xet.XetSession()
    commit = session.new_upload_commit(endpoint=f"local://{store}")
    upload = commit.start_upload_bytes(FLOATS + RANDOM, name="both")
    commit.wait_to_finish()
    made = upload.result().xet_info
    xorbs = {path.name.removeprefix("default."): path for path in store.rglob("default.*") if path.suffix != ".tagset"}
    tables = {from_hex(name): checked(path, from_hex(name)) for name, path in xorbs.items()}
    files = [f for path in store.rglob("xorbs/shards/*.mdb") for f in shards.parse(path.read_bytes()).files]
    (file,) = [f for f in files if to_hex(f.hash) == made.hash]
    nodes = [node for term in file.terms for node in tables[term.xorb].nodes(term.start, term.end)]
    assert to_hex(file_hash(nodes)) == made.hash
    assert sum(size for _, size in nodes) == len(FLOATS + RANDOM)


def test_the_tree_over_few_chunks() -> None:
    one = (bytes(range(32)), 100)
    assert xorb_hash([one]) == one[0] and file_hash([one]) != one[0]
    assert xorb_hash([]) == bytes(32)
    assert to_hex(one[0]) == "07060504030201000f0e0d0c0b0a090817161514131211101f1e1d1c1b1a1918"
    assert from_hex(to_hex(one[0])) == one[0]


@pytest.mark.parametrize("length", range(8))
def test_bytes_are_ungrouped(length: int) -> None:
    data = bytes(range(length))
    grouped = b"".join(data[position::4] for position in range(4))
    assert ungroup(grouped) == data
