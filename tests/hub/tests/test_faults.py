"""The fault switch, seen from the real client or from a bare connection."""

import hashlib
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from tests.hub import HubAdmin, HubRefused
from tests.hub.fixtures import Namespace
from tests.support.procs import wait_for

DATA = bytes(range(256)) * 80_000  # 20 MB: the client reads in blocks of 10 MB
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "weights.bin"
    file.write_bytes(DATA)
    return file


@pytest.fixture
def repo(namespace: Namespace, hub: HubAdmin, weights: Path) -> str:
    """A repo with a large file and a regular one."""
    repo_id = namespace.repo("model")
    hub.create_repo(repo_id)
    hub.import_files(repo_id, {"weights.bin": weights}, sha256={"weights.bin": SHA256})
    hub.put_files(repo_id, {"config.json": b"{}"})
    hub.log(reset=True)
    return repo_id


@pytest.fixture
def fetch(repo: str, namespace: Namespace, lfs: None, tmp_path: Path) -> Path:
    return tmp_path


def download(repo: str, hub: HubAdmin, folder: Path, name: str = "weights.bin") -> bytes:
    return Path(hf_hub_download(repo, name, endpoint=hub.endpoint, token=False, cache_dir=folder)).read_bytes()


def commit(api: HfApi, repo: str, parent: str | None = None) -> str:
    operations = [CommitOperationAdd("new.txt", b"new")]
    return str(api.create_commit(repo, operations, commit_message="new", parent_commit=parent).oid)


def test_a_status_is_answered_instead_of_the_request(repo: str, hub: HubAdmin, api: HfApi) -> None:
    head = hub.head(repo)
    rule = hub.fault("POST .*/commit/main", "status", status=503, body="down", headers={"X-Test": "yes"}, times=1)
    with pytest.raises(HfHubHTTPError) as failed:
        commit(api, repo)
    assert failed.value.response.status_code == 503 and failed.value.response.headers["x-test"] == "yes"
    assert hub.head(repo) == head
    commit(api, repo)
    assert hub.faults()[0]["hits"] == hub.wait_for_fault(rule)["hits"] == 1


def test_a_lost_answer_leaves_the_commit_behind(repo: str, hub: HubAdmin, api: HfApi) -> None:
    head = hub.head(repo)
    hub.fault("POST .*/commit/main", "lost_response", times=1)
    with pytest.raises(httpx2.NetworkError):
        commit(api, repo)
    assert hub.head(repo) != head and "new.txt" in hub.files(repo)
    (entry,) = [entry for entry in hub.log() if "/commit/" in entry["path"]]
    assert (entry["status"], entry["fault"]) == (0, "lost_response")


def test_a_reset_request_is_not_carried_out(repo: str, hub: HubAdmin, api: HfApi) -> None:
    head = hub.head(repo)
    hub.fault("POST .*/commit/main", "reset", times=1)
    with pytest.raises(httpx2.TransportError):
        commit(api, repo)
    assert hub.head(repo) == head


def test_a_held_commit_loses_to_one_that_comes_in_between(repo: str, hub: HubAdmin, api: HfApi) -> None:
    head, outcome = hub.head(repo), []

    def late() -> None:
        try:
            commit(api, repo, parent=head)
        except HfHubHTTPError as error:
            outcome.append(error.response.status_code)

    rule = hub.fault("POST .*/commit/main", "hold", times=1)
    thread = threading.Thread(target=late)
    thread.start()
    hub.wait_for_fault(rule, waiting=1)
    winner = hub.put_files(repo, {"between.txt": b"x"})
    hub.release(rule)
    thread.join()
    assert outcome == [412] and hub.head(repo) == winner


def test_a_held_request_is_carried_out_even_if_its_client_is_gone(
    repo: str, hub: HubAdmin, namespace: Namespace
) -> None:
    body = b'{"key":"header","value":{"summary":"late"}}\n{"key":"file","value":{"path":"late","content":"x"}}\n'
    rule = hub.fault("POST .*/commit/main", "hold", times=1)
    with socket.create_connection(("127.0.0.1", int(hub.endpoint.rpartition(":")[2]))) as connection:
        head = f"POST /api/models/{repo}/commit/main HTTP/1.1\r\nAuthorization: Bearer {namespace.token}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        hub.wait_for_fault(rule, waiting=1)
    assert "late" not in hub.files(repo)
    hub.release()
    hub.wait_for_request("POST .*/commit/main")
    assert hub.read(repo, "late") == b"x"


def test_an_answer_can_be_held_after_it_was_carried_out(repo: str, hub: HubAdmin, api: HfApi) -> None:
    rule = hub.fault("POST .*/commit/main", "hold", when="answer", times=1)
    thread = threading.Thread(target=commit, args=(api, repo))
    thread.start()
    hub.wait_for_fault(rule, waiting=1)
    assert "new.txt" in hub.files(repo)
    hub.clear_faults()
    thread.join()


def test_a_download_cut_by_fin_is_resumed_where_it_broke(repo: str, hub: HubAdmin, fetch: Path) -> None:
    hub.fault("GET /_cdn/.*weights.bin", "truncate", after=15_000_000, fin=True, times=1)
    assert download(repo, hub, fetch) == DATA
    first, second = [entry for entry in hub.log() if entry["kind"] == "cdn"]
    assert (first["status"], first["down"], first["fault"]) == (200, 15_000_000, "truncate")
    assert (second["status"], second["down"]) == (206, len(DATA) - 10_485_760)
    assert hub.totals()["cdn"]["down"] == first["down"] + second["down"]


def test_a_download_cut_by_rst_fails_at_once(repo: str, hub: HubAdmin, fetch: Path) -> None:
    """The client retries what it calls protocol errors and timeouts, and a reset is neither."""
    hub.fault("GET /_cdn/.*weights.bin", "truncate", after=15_000_000, times=1)
    with pytest.raises(httpx2.ReadError):
        download(repo, hub, fetch)
    assert hub.totals()["cdn"]["requests"] == 1


@pytest.mark.parametrize(
    ("after", "arrives"), [(0, b""), (12, b"HTTP/1.1 200"), (29, b"HTTP/1.1 200 OK\r\nContent-Type"), (9999, b"\r\n\r")]
)
def test_an_answer_is_cut_inside_its_head(repo: str, hub: HubAdmin, after: int, arrives: bytes) -> None:
    """However much of it is asked for, the head is never whole."""
    hub.fault(f"GET /api/models/{repo}$", "truncate_head", after=after, fin=True, times=1)
    with socket.create_connection(("127.0.0.1", int(hub.endpoint.rpartition(":")[2]))) as connection:
        connection.sendall(f"GET /api/models/{repo} HTTP/1.1\r\nHost: hub\r\n\r\n".encode())
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.endswith(arrives) and b"\r\n\r\n" not in received
    assert len(received) == after or after == 9999
    # The entry is corrected once the connection is cut, which its client may see first.
    wait_for(
        lambda: [(entry["down"], entry["fault"]) for entry in hub.log()] == [(0, "truncate_head")], "the log's entry"
    )


@pytest.mark.parametrize("fin", [True, False])
def test_a_commit_whose_answer_is_cut_inside_its_head_stands(repo: str, hub: HubAdmin, api: HfApi, fin: bool) -> None:
    head = hub.head(repo)
    hub.fault("POST .*/commit/main", "truncate_head", after=40, fin=fin, times=1)
    with pytest.raises(httpx2.TransportError):
        commit(api, repo)
    assert hub.head(repo) != head and "new.txt" in hub.files(repo)


def test_an_answer_without_a_body_is_cut_inside_its_head(repo: str, hub: HubAdmin) -> None:
    hub.fault("HEAD .*/resolve/", "truncate_head", after=20, fin=True, times=1)
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.head(f"{hub.endpoint}/{repo}/resolve/main/weights.bin")


def test_a_byte_of_the_file_is_wrong_in_whatever_range_is_read(repo: str, hub: HubAdmin, fetch: Path) -> None:
    hub.fault("GET /_cdn/", "wrong_bytes", at=11_000_000)
    hub.fault("GET /_cdn/", "truncate", after=10_500_000, fin=True, times=1)
    received = download(repo, hub, fetch)
    assert [n for n in range(0, len(DATA), 4096) if received[n : n + 4096] != DATA[n : n + 4096]] == [
        11_000_000 // 4096 * 4096
    ]
    assert received[11_000_000] == DATA[11_000_000] ^ 0xFF
    assert hub.read(repo, "weights.bin") == DATA


def test_wrong_bytes_count_when_they_are_served(repo: str, hub: HubAdmin, fetch: Path) -> None:
    hub.fault("GET ", "wrong_bytes", at=11_000_000, times=1)
    assert download(repo, hub, fetch / "a", "config.json") == b"{}"
    assert download(repo, hub, fetch / "b") != DATA
    assert download(repo, hub, fetch / "c") == DATA


def test_an_upload_that_breaks_is_sent_again(repo: str, hub: HubAdmin, api: HfApi) -> None:
    hub.fault("PUT /_lfs/", "reset_upload", after=3_000_000, times=1)
    api.create_commit(repo, [CommitOperationAdd("new.bin", DATA[1:])], commit_message="new")
    first, second = [entry for entry in hub.log() if entry["method"] == "PUT"]
    assert (first["status"], first["up"], second["status"], second["up"]) == (0, 3_000_000, 200, len(DATA) - 1)


def test_a_throttle_is_shared_and_works_both_ways(repo: str, hub: HubAdmin, api: HfApi, fetch: Path) -> None:
    hub.fault("GET /_cdn/|PUT /_lfs/", "throttle", rate=36_000_000)  # the line's buffers take a tenth of a second of it
    start = time.monotonic()
    assert download(repo, hub, fetch) == DATA
    down = time.monotonic() - start
    api.create_commit(repo, [CommitOperationAdd("new.bin", DATA[1:])], commit_message="new")
    up = time.monotonic() - start - down
    assert down > 0.45 and up > 0.45


def test_a_delay_comes_before_the_answer(repo: str, hub: HubAdmin) -> None:
    hub.fault("GET /api/models/", "delay", seconds=0.3, times=1)
    start = time.monotonic()
    HfApi(endpoint=hub.endpoint, token=False).model_info(repo)
    assert time.monotonic() - start > 0.3


def test_rules_skip_and_run_out(repo: str, hub: HubAdmin) -> None:
    hub.fault(f"GET /api/models/{repo}$", "status", status=500, skip=1, times=2)

    def status() -> int:
        try:
            with urllib.request.urlopen(f"{hub.endpoint}/api/models/{repo}") as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [status() for _ in range(4)] == [200, 500, 500, 200]


def test_an_object_that_the_store_lost_is_missed_by_readers_and_commits(
    repo: str, hub: HubAdmin, api: HfApi, fetch: Path
) -> None:
    hub.drop_object(hub.files(repo)["weights.bin"]["sha256"])
    with pytest.raises(HfHubHTTPError, match="404"):
        download(repo, hub, fetch)
    api.create_commit(repo, [CommitOperationAdd("again.bin", DATA)], commit_message="sent again")
    assert [entry["up"] for entry in hub.log() if entry["method"] == "PUT"] == [len(DATA)]


def test_a_fault_with_unknown_or_missing_options_is_refused(hub: HubAdmin) -> None:
    for wrong in ({"action": "explode"}, {"action": "delay"}, {"action": "reset", "after": 3}):
        with pytest.raises(HubRefused, match="400"):
            hub.fault("GET", **wrong)
