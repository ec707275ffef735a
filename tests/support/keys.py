"""Keys and certificates as `openssl` makes them, and what the Model Signing package says of a folder."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from model_signing import verifying

DAY = timedelta(days=1)


def _usage(which: int) -> x509.KeyUsage:
    return x509.KeyUsage(*(index == which for index in range(9)))


DIGITAL = _usage(0)  # signatures
CODE = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])


class Pair(NamedTuple):
    private: Path
    public: Path


def make_pair(folder: Path, name: str = "release", curve: ec.EllipticCurve | None = None) -> Pair:
    """A key and its public half, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.pub")
    key = ec.generate_private_key(curve or ec.SECP256R1())
    pair.private.write_bytes(_private(key))
    pair.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return pair


def make_certified(folder: Path, until: datetime | None = None, usage: x509.ExtensionType | None = DIGITAL) -> Pair:
    """A key with its certificate in one file, and the certificate of the authority that issued it."""
    folder.mkdir(parents=True, exist_ok=True)
    root, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    end = until or datetime.now(UTC) + 30 * DAY
    authority = _certificate("Root", root, root, end, True, _usage(5))
    own = _certificate("Releases", key, root, end, False, usage)
    pair = Pair(folder / "certified.pem", folder / "root.pem")
    pair.private.write_bytes(_private(key) + own.public_bytes(Encoding.PEM))
    pair.public.write_bytes(authority.public_bytes(Encoding.PEM))
    return pair


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate(
    name: str, key: Any, issuer: Any, until: datetime, authority: bool, usage: x509.ExtensionType | None
) -> x509.Certificate:
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, "Root")]
    builder = (
        x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
        .not_valid_before(until - 60 * DAY)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
    )
    if usage:
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(issuer, hashes.SHA256())


def refusal(folder: Path, pair: Pair) -> str:
    """What the package has against ``folder``, with its defaults; nothing where it accepts it."""
    config = verifying.Config()
    if pair.public.name == "root.pem":
        config.use_certificate_verifier(certificate_chain=[pair.public])
    else:
        config.use_elliptic_key_verifier(public_key=pair.public)
    try:
        config.verify(folder, folder / "model.sig")
    except ValueError as error:
        return str(error)
    return ""
