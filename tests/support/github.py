"""GitHub on loopback, as far as `hf extensions` and pip ask it: one repository, and its archive of HEAD.

It stands behind a proxy of its own, so that its clients run as they are and no other host is reached.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOSTS = ("github.com", "raw.githubusercontent.com")


@contextmanager
def github(repository: str, files: Mapping[str, bytes], archive: bytes, commit: str, folder: Path) -> Iterator[str]:
    """The URL of the proxy; the certificate to trust is ``folder``/github.pem.

    ``files`` are those of ``repository`` that are read one by one, ``archive`` is the zip of all of them.
    """
    answers = {
        ("github.com", f"/{repository}"): b"",
        ("github.com", f"/{repository}/archive/HEAD.zip"): archive,
        ("github.com", f"/{repository}.git/info/refs?service=git-upload-pack"): f"{commit} HEAD\0".encode(),
        **{("raw.githubusercontent.com", f"/{repository}/HEAD/{path}"): content for path, content in files.items()},
    }
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(folder))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        host = ""

        def do_CONNECT(self) -> None:
            self.host = self.path.partition(":")[0]
            if self.host not in HOSTS:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            self.close_connection = False  # as it is after a request of HTTP/1.0, which pip makes of a proxy
            self.connection = context.wrap_socket(self.connection, server_side=True)
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)

        def do_GET(self) -> None:
            answer = answers.get((self.host, self.path))
            self.send_response(HTTPStatus.NOT_FOUND if answer is None else HTTPStatus.OK)
            self.send_header("Content-Length", str(len(answer or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer or b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing: pytest shows what the clients say."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _certificate(folder: Path) -> Path:
    """A file with a key and a certificate of the hosts, which signs itself."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOSTS[0])])
    now, id_ = datetime.now(UTC), x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS]), critical=False)
    made = builder.add_extension(id_, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "github.pem"
    file.write_bytes(secret + made.public_bytes(pem))
    return file
