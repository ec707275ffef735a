"""The Hub as a process: it survives being killed, stays small, and ends with its parent."""

import contextlib
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from tests.hub import HubAdmin, HubProcess
from tests.hub.fixtures import Namespace
from tests.hub.process import ROOT

GIB = 1 << 30
SIZE = GIB + (64 << 20)
MAY_GROW = 48 << 20


@pytest.fixture
def process(tmp_path: Path) -> Iterator[HubProcess]:
    """A Hub of the test's own."""
    with HubProcess(tmp_path / "hub", users=["alice:hf_alice"]) as process:
        yield process


def test_what_was_answered_is_there_after_a_kill(process: HubProcess, lfs: None) -> None:
    api = HfApi(endpoint=process.endpoint, token="hf_alice")
    api.create_repo("alice/model", private=True)
    api.create_repo("alice/old")
    api.move_repo("alice/old", "alice/new")
    data = os.urandom(3_000_000)
    operations = [CommitOperationAdd("w.safetensors", data), CommitOperationAdd("config.json", b"{}")]
    first = api.create_commit("alice/model", operations, commit_message="one").oid
    api.create_tag("alice/model", tag="v1")
    api.create_commit("alice/model", [CommitOperationAdd("x", b"x")], commit_message="a proposal", create_pr=True)
    port, before = process.port, process.admin.state("alice/model")
    process.kill()
    process.start()
    assert process.port == port
    assert process.admin.state("alice/model") == before
    assert process.admin.read("alice/model", "w.safetensors") == data
    assert api.get_discussion_details("alice/model", 1).title == "a proposal"
    assert api.model_info("alice/old").id == "alice/new"
    operations = [CommitOperationAdd("w2.safetensors", data)]
    api.create_commit("alice/model", operations, commit_message="two", parent_commit=first)
    assert process.admin.totals()["lfs"]["up"] < 10_000


def test_a_kill_in_the_middle_of_a_write_loses_only_what_was_not_answered(process: HubProcess) -> None:
    process.admin.create_repo("alice/model")
    head = process.admin.put_files("alice/model", {"a.txt": b"a"})
    process.kill()
    journal = process.directory / "repos" / "000001" / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"event":"commit","ref":"refs/heads/main","com')
    process.start()
    assert process.admin.head("alice/model") == head
    process.admin.put_files("alice/model", {"b.txt": b"b"})
    process.kill()
    process.start()
    assert set(process.admin.files("alice/model")) == {".gitattributes", "a.txt", "b.txt"}


def test_an_upload_in_parts_goes_on_after_a_kill(process: HubProcess) -> None:
    process.admin.create_repo("alice/model")
    process.admin.settings(lfs_multipart_threshold=1, lfs_part_size=600_000)
    data = os.urandom(1_000_000)
    sha256 = hashlib.sha256(data).hexdigest()
    upload = batch(process, sha256, len(data))["upload"]
    etags = [put(upload["header"]["1"], data[:600_000])]
    process.kill()
    process.start()
    etags.append(put(upload["header"]["2"], data[600_000:]))
    parts = [{"partNumber": n, "etag": etag} for n, etag in enumerate(etags, 1)]
    send("POST", upload["href"], json.dumps({"oid": sha256, "parts": parts}).encode())
    verify = {"oid": sha256, "size": len(data)}
    url = f"{process.endpoint}/alice/model.git/info/lfs/objects/verify"
    send("POST", url, json.dumps(verify).encode(), {"Authorization": "Bearer hf_alice"})
    assert "actions" not in batch_answer(process, sha256, len(data))


def batch_answer(process: HubProcess, sha256: str, size: int) -> dict[str, object]:
    request = {"operation": "upload", "transfers": ["basic", "multipart"], "objects": [{"oid": sha256, "size": size}]}
    url = f"{process.endpoint}/alice/model.git/info/lfs/objects/batch"
    answer = send("POST", url, json.dumps(request).encode(), {"Authorization": "Bearer hf_alice"})
    found: dict[str, object] = json.loads(answer[1])["objects"][0]
    return found


def batch(process: HubProcess, sha256: str, size: int) -> dict[str, dict]:  # type: ignore[type-arg]
    actions = batch_answer(process, sha256, size)["actions"]
    assert isinstance(actions, dict)
    return actions


def put(url: str, data: bytes) -> str:
    return send("PUT", url, data)[0]["ETag"]


def send(method: str, url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[dict[str, str], bytes]:
    parts = urlsplit(url)
    assert parts.hostname
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port)) as connection:
        connection.request(method, f"{parts.path}?{parts.query}", body, headers or {})
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        return dict(response.headers), data


def test_more_than_a_gigabyte_down_does_not_make_it_grow(process: HubProcess, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.bin"
    with sparse.open("wb") as file:
        file.truncate(SIZE)
        file.seek(GIB)
        file.write(b"beyond")
    process.admin.create_repo("alice/model")
    process.admin.import_files("alice/model", {"big.safetensors": sparse}, sha256={"big.safetensors": "ab" * 32})
    before = process.peak_rss()
    parts = urlsplit(process.endpoint)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", parts.port)) as connection:
        connection.request("GET", "/alice/model/resolve/main/big.safetensors")
        redirect = connection.getresponse()
        redirect.read()
        target = urlsplit(redirect.headers["Location"])
        connection.request("GET", f"{target.path}?{target.query}")
        response, received, buffer = connection.getresponse(), 0, bytearray(8 << 20)
        while count := response.readinto(buffer):
            received += count
    assert received == SIZE
    assert process.peak_rss() - before < MAY_GROW
    assert process.admin.read("alice/model", "big.safetensors", start=GIB - 1, stop=GIB + 7) == b"\0beyond\0"


def test_half_a_gigabyte_up_does_not_make_it_grow(process: HubProcess) -> None:
    process.admin.create_repo("alice/model")
    process.admin.settings(lfs_multipart_threshold=GIB)
    size, block = GIB // 2, bytes(8 << 20)
    running = hashlib.sha256()
    for _ in range(size // len(block)):
        running.update(block)
    target = urlsplit(batch(process, running.hexdigest(), size)["upload"]["href"])
    before = process.peak_rss()
    with socket.create_connection(("127.0.0.1", process.port)) as connection:
        head = f"PUT {target.path}?{target.query} HTTP/1.1\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(size // len(block)):
            connection.sendall(block)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert process.peak_rss() - before < MAY_GROW


def test_an_imported_sparse_file_is_hashed_as_its_bytes_are(process: HubProcess, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.bin"
    with sparse.open("wb") as file:
        file.seek(30_000_000)
        file.write(b"data" * 1000)
        file.truncate(50_000_000)
    process.admin.create_repo("alice/model")
    process.admin.import_files("alice/model", {"s.bin": sparse})
    stored = process.admin.files("alice/model")["s.bin"]
    assert stored == {**stored, "size": 50_000_000, "sha256": hashlib.sha256(sparse.read_bytes()).hexdigest()}
    assert (process.directory / "objects" / stored["sha256"][:2] / stored["sha256"]).samefile(sparse)


def test_both_names_of_loopback_reach_it(namespace: Namespace, hub: HubAdmin) -> None:
    for name in ("127.0.0.1", "localhost"):
        api = HfApi(endpoint=hub.endpoint.replace("127.0.0.1", name), token=namespace.token)
        assert api.whoami()["name"] == namespace.name


def test_a_chunked_body_is_accepted(namespace: Namespace, hub: HubAdmin) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(hub.endpoint.split(":")[-1]))) as connection:
        pieces = [b'{"name": "chunked",', b' "organization": null}']
        headers = {"Authorization": f"Bearer {namespace.token}", "Transfer-Encoding": "chunked"}
        connection.request("POST", "/api/repos/create", iter(pieces), headers, encode_chunked=True)
        assert connection.getresponse().status == 200
    assert hub.head(namespace.repo("chunked"))


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.hub import HubProcess\n"
        "print(HubProcess(Path(sys.argv[1])).start().pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "hub")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        hub = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    hub.wait(timeout=10)
