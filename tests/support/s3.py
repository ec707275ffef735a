"""Object stores that speak S3, on loopback: moto's, and one that misbehaves."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote
from uuid import uuid4
from xml.sax.saxutils import escape

import boto3
import pytest
from moto.server import ThreadedMotoServer

ENV = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class S3:
    """One bucket, and the environment in which it is found."""

    url: str
    env: dict[str, str]
    client: Any

    @property
    def name(self) -> str:
        return self.url.removeprefix("s3://")

    def put(self, folder: str, files: Mapping[str, bytes]) -> str:
        """The URL of a folder that has these files now, among others."""
        for path, data in files.items():
            self.client.put_object(Bucket=self.name, Key=f"{folder}/{path}", Body=data)
        return f"{self.url}/{folder}"

    def files(self, folder: str) -> dict[str, bytes]:
        """The files of a folder by their paths in it."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=f"{folder}/").get("Contents", [])
        read = {item["Key"]: self.client.get_object(Bucket=self.name, Key=item["Key"]) for item in found}
        return {key.removeprefix(f"{folder}/"): answer["Body"].read() for key, answer in read.items()}


@contextmanager
def s3_served() -> Iterator[str]:
    """The endpoint of a server of moto's."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@contextmanager
def in_s3(endpoint: str) -> Iterator[S3]:
    """A bucket of its own, in this process's environment."""
    env = ENV | {"AWS_ENDPOINT_URL": endpoint}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        client = boto3.client("s3", region_name="us-east-1")
        name = f"own{uuid4().hex[:12]}"  # obstore escapes hyphens for Google, and moto finds no bucket by that
        client.create_bucket(Bucket=name)
        yield S3(f"s3://{name}", env, client)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with s3_served() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_server: str) -> Iterator[S3]:
    with in_s3(s3_server) as made:
        yield made


class OddStore(ThreadingHTTPServer):
    """A store with one bucket, ``odd``, of a few objects, that answers as it is told to.

    ``objects`` has content and ETag by key; a number is the content of that many zeros. Each GET of an object takes the
    next of ``faults``: a status, or after how many bytes the connection is cut. ``asked`` are the ranges asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Odd)
        self.objects: dict[str, tuple[bytes | int, str]] = {}
        self.faults: list[tuple[str, int]] = []
        self.listing = 200
        self.heeds_match = True
        self.writable = False
        self.asked: list[str] = []

    @property
    def env(self) -> dict[str, str]:
        return ENV | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}


class _Odd(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OddStore

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's own output is enough."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        key = unquote(path).removeprefix("/odd").lstrip("/")
        if "list-type" in query:
            if self.server.listing != 200:
                return self._refuse(self.server.listing)
            rows = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{_size(data)}</Size><ETag>&quot;{etag}&quot;</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, (data, etag) in self.server.objects.items()
            )
            head = "<Name>odd</Name><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated>"
            return self._send(200, f"<ListBucketResult>{head}{rows}</ListBucketResult>".encode())
        fault, count = self.server.faults.pop(0) if self.server.faults else ("", 0)
        self.server.asked.append(self.headers["Range"])
        if fault == "status":
            return self._refuse(count)
        data, etag = self.server.objects[key]
        if self.server.heeds_match and self.headers.get("If-Match") not in {None, f'"{etag}"'}:
            return self._refuse(412)
        start, stop = (int(end) for end in self.headers["Range"].removeprefix("bytes=").split("-"))
        stop = min(stop, _size(data) - 1)
        if start > stop:
            return self._refuse(416)
        self.send_response(206)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Range", f"bytes {start}-{stop}/{_size(data)}")
        self.send_header("Content-Length", str(stop + 1 - start))
        self.end_headers()
        end = min(stop + 1, start + count) if fault == "cut" else stop + 1
        for at in range(start, end, 1 << 20):
            part = min(end, at + (1 << 20))
            self.wfile.write(bytes(part - at) if isinstance(data, int) else data[at:part])
        self.close_connection = fault == "cut"

    def do_PUT(self) -> None:
        """Whatever stands there already, and whatever condition is named."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.writable:
            return self._refuse(403)
        key = unquote(self.path).removeprefix("/odd/")
        self.server.objects[key] = data, "written"
        self._send(200, b"", {"ETag": '"written"'})

    def do_POST(self) -> None:
        """DeleteObjects."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", asked)
        for key in keys:
            self.server.objects.pop(key, None)
        rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._send(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def _refuse(self, status: int) -> None:
        secret = "<StringToSign>SECRET</StringToSign>"
        self._send(status, f"<Error><Code>Refused</Code>\n<Message>{secret}</Message></Error>".encode())

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _size(data: bytes | int) -> int:
    return data if isinstance(data, int) else len(data)


@pytest.fixture
def odd_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddStore]:
    """It, found by this process's environment at ``s3://odd``."""
    with OddStore() as store:
        for name, value in store.env.items():
            monkeypatch.setenv(name, value)
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield store
        store.shutdown()
        thread.join()
