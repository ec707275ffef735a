"""Signatures that tools of others check: ``model.sig`` of all files, and statements about how they were made.

``model.sig`` is what the OpenSSF Model Signing package writes and verifies: an in-toto statement that lists each file
with its sha256, in a DSSE envelope, in a Sigstore bundle (https://github.com/sigstore/model-transparency). Other
statements are signed in the same form. A key is an EC key in a PEM file, with its certificates behind it where it has
some; it is read by the process that publishes, when it does.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.pipeline.checkpoint.tool_files import UNSIGNED, passed_over
from reshard.pipeline.errors import BadSignature, BadSignKey, CertificateExpired, NoSignKeys, SignExtraMissing
from reshard.pipeline.planning.model import CARD, SIGNATURE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.x509 import Certificate

# What is no part of it, or is changed after it by a repository's owner, git, a download and a folder's record. The
# signature names them, and verifiers pass over them.
_LEFT_OUT = (SIGNATURE, CARD, *UNSIGNED)
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
STATEMENT = "https://in-toto.io/Statement/v1"
_PAYLOAD = "application/vnd.in-toto+json"
# The curves of the package, by the names of securesystemslib.
_SCHEMES = {f"secp{n}r1": f"ecdsa-sha2-nistp{n}" for n in (256, 384, 521)}
_PACKAGES = ("cryptography", "model_signing", "OpenSSL", "securesystemslib")  # of the extra `sign`, as imported
_PEM_MAX = 1_000_000  # bytes; a key and its certificates have some thousand


def is_covered(path: str) -> bool:
    """Whether a signature of the files around it is also of this one."""
    return path not in (SIGNATURE, CARD) and not passed_over(path)


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key, the certificates of its PEM file, the first of them its own, and the id of who builds with it."""

    path: Path
    builder: str
    _key: EllipticCurvePrivateKey = field(repr=False)
    _certificates: tuple[Certificate, ...] = ()

    @classmethod
    def open(cls, key: str | None, keys: Path | None, builder: str) -> Signer | None:
        """The one of ``key``: a path if it has a slash, else a name in the folder ``keys``; None without one.

        Raises BadSignKey, CertificateExpired and SignExtraMissing. None of them repeats what the file holds.
        """
        if key is None:
            return None
        if keys is None and "/" not in key:
            if Path(key).is_file():
                cure = f"to use the file with that name, type {quote(f'./{key}')}"
                raise BadSignKey(key=key, why="RESHARD_SIGN_KEYS is not set", cure=cure)
            raise NoSignKeys(key=key)
        path = Path(key) if keys is None or "/" in key else keys / key
        pem = _read_pem(path, key)
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private: Any = load_pem_private_key(pem, None)
            certificates = _certificates(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # the second where it has a passphrase
            raise BadSignKey(key=key, why="not a private key in PEM format without a passphrase") from None
        _check_curve(private, key)
        if certificates:
            if certificates[0].public_key() != private.public_key():
                raise BadSignKey(key=key, why="its first certificate belongs to another key")
            if not _may_sign(certificates[0]):
                raise BadSignKey(key=key, why="its certificate allows neither digitalSignature nor codeSigning")
            if not certificates[0].not_valid_before_utc <= datetime.now(UTC) <= certificates[0].not_valid_after_utc:
                raise CertificateExpired(key=key, until=f"{certificates[0].not_valid_after_utc:%Y-%m-%d}")
        return cls(path, builder, private, certificates)

    @staticmethod
    def check(key: str | None, keys: Path | None) -> None:
        """Raises what ``open`` would, for a plan: but a name that no folder here has may be one of a worker's."""
        if key is not None and (keys is not None or "/" in key):
            Signer.open(key, keys, "")

    @property
    def trusted(self) -> Trusted:
        """What verifies its own signatures."""
        return Trusted({str(self.path): self._key.public_key()}, self._certificates)

    def sign_files(self, files: Mapping[str, str], name: str) -> bytes:
        """``model.sig`` of ``files``, path -> sha256, as those of the model ``name``; reads none of them."""
        from model_signing import manifest, signing

        class Known:
            """What the package asks for the hashes of a folder's files."""

            def hash(self, model_path: str) -> manifest.Manifest:
                how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": _LEFT_OUT}
                kind = manifest.SerializationType.from_args(how)
                digest = manifest.hashing.Digest
                items = [kind.new_item(path, digest("sha256", bytes.fromhex(files[path]))) for path in files]
                return manifest.Manifest(name, items, kind)

        known: Any = Known()
        config, path = signing.Config().set_hashing_config(known), self.path
        try:
            if self._certificates:
                config.use_certificate_signer(private_key=path, signing_certificate=path, certificate_chain=[path])
            else:
                config.use_elliptic_key_signer(private_key=path)
        except (OSError, ValueError, TypeError):
            raise BadSignKey(key=path.name, why="its file was changed during the run") from None
        with TemporaryDirectory() as folder:
            config.sign(name, made := Path(folder) / SIGNATURE)
            return made.read_bytes()

    @property
    def material(self) -> dict[str, Any]:
        """What a bundle of ``sign`` says of who signed it."""
        from cryptography.hazmat.primitives.serialization import Encoding

        chain = [{"rawBytes": b64encode(one.public_bytes(Encoding.DER)).decode()} for one in self._certificates]
        key = {"publicKey": {"hint": _hint(self._key.public_key())}}
        return ({"x509CertificateChain": {"certificates": chain}} if chain else key) | {"tlogEntries": []}

    def sign(self, statement: Mapping[str, Any]) -> bytes:
        """A bundle of any statement."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.signer import CryptoSigner

        text = json.dumps(statement, default=vars, sort_keys=True, separators=(",", ":")).encode()
        envelope = Envelope(text, _PAYLOAD, {})
        envelope.sign(CryptoSigner(self._key, _dsse_key(self._key.public_key())))
        bundle = {
            "mediaType": BUNDLE,
            "verificationMaterial": self.material,
            "dsseEnvelope": envelope.to_dict(),
        }
        return json.dumps(bundle, separators=(",", ":")).encode()


class Signed(NamedTuple):
    """A statement whose signature was checked, and who signed it: the file of the key, or the certificate."""

    statement: dict[str, Any]
    by: str
    until: datetime | None = None  # when the certificate expires, or expired

    @property
    def files(self) -> dict[str, str]:
        """Path -> sha256 of what it is about: the resources of a model's signature, else the subjects."""
        resources = self.statement["predicate"].get("resources")
        if resources is not None:
            return {one["name"]: one["digest"] for one in resources if one["algorithm"] == "sha256"}
        return {one["name"]: one["digest"]["sha256"] for one in self.statement["subject"]}


@dataclass(frozen=True, slots=True)
class Trusted:
    """Public keys by their files, and certificates that may vouch for others."""

    keys: Mapping[str, EllipticCurvePublicKey]
    authorities: tuple[Certificate, ...] = ()

    @classmethod
    def open(cls, files: list[str]) -> Trusted:
        """Those of PEM files; raises BadSignKey and SignExtraMissing."""
        keys, authorities = dict[str, "EllipticCurvePublicKey"](), list["Certificate"]()
        for file in files:
            pem = _read_pem(Path(file), file)
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.serialization import load_pem_public_key

            try:
                found = _certificates(pem)
                if pem.count(b"-----BEGIN PUBLIC KEY-----") + bool(found) > 1:
                    raise BadSignKey(key=file, why="has more than one key; put each in a file of its own")
                if found:
                    authorities += found
                    continue
                public: Any = load_pem_public_key(pem)
            except (ValueError, UnsupportedAlgorithm):
                cure = "pass the signer's public key: `openssl pkey -in KEY -pubout -out KEY.pub` writes it"
                raise BadSignKey(key=file, why="no public key and no certificate in PEM format", cure=cure) from None
            _check_curve(public, file)
            keys[file] = public
        return cls(keys, tuple(authorities))

    def read(self, bundle: bytes, what: str) -> Signed:
        """The statement of ``bundle``, which one of these signed; raises BadSignature."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.x509 import DuplicateExtension, InvalidVersion, UnsupportedGeneralNameType
        from OpenSSL.crypto import Error, X509StoreContextError
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import VerificationError
        from securesystemslib.signer import Signature

        try:
            read = json.loads(bundle)
            by, public, until = self._signer_of(read["verificationMaterial"], what)
            sealed = read["dsseEnvelope"]
            signature = Signature(_hint(public), b64decode(sealed["signatures"][0]["sig"]).hex())
            envelope = Envelope(b64decode(sealed["payload"]), sealed["payloadType"], {_hint(public): signature})
            envelope.verify([_dsse_key(public)], 1)
            found = Signed(json.loads(envelope.payload), by, until)
            if envelope.payload_type != _PAYLOAD or found.statement["_type"] != STATEMENT:
                raise BadSignature(file=what, why="not an in-toto statement")
            _ = found.files
        except VerificationError:
            raise BadSignature(file=what, why=f"{by} did not sign this text") from None
        except X509StoreContextError as error:
            raise BadSignature(file=what, why=f"its certificate is not trusted: {error}") from None
        except (InvalidVersion, DuplicateExtension, UnsupportedGeneralNameType):
            raise BadSignature(file=what, why="its certificate is not one of X.509") from None
        except (ValueError, LookupError, TypeError, AttributeError, Error, UnsupportedAlgorithm, RecursionError):
            raise BadSignature(file=what, why="not a signature in a Sigstore bundle") from None
        return found

    def _signer_of(self, material: Mapping[str, Any], what: str) -> tuple[str, EllipticCurvePublicKey, datetime | None]:
        if "publicKey" in material:
            for file, key in self.keys.items():
                if material["publicKey"]["hint"] == _hint(key):
                    return file, key, None
            raise BadSignature(file=what, why="it was signed with another key")
        from cryptography.x509 import load_der_x509_certificate
        from OpenSSL.crypto import X509, X509Store, X509StoreContext, X509StoreFlags

        told = material["x509CertificateChain"]["certificates"]
        leaf, *chain = (load_der_x509_certificate(b64decode(one["rawBytes"])) for one in told)
        public: Any = leaf.public_key()
        if public not in self.keys.values():
            if not _may_sign(leaf):
                raise BadSignature(file=what, why="its certificate does not allow signing")
            store = X509Store()
            store.set_flags(X509StoreFlags.PARTIAL_CHAIN)  # each is trusted, also one that is no root
            for authority in self.authorities:
                store.add_cert(X509.from_cryptography(authority))
            store.set_time(leaf.not_valid_before_utc)  # as the package does: nothing says reliably when it was signed
            X509StoreContext(
                store, X509.from_cryptography(leaf), [*map(X509.from_cryptography, chain)]
            ).verify_certificate()
        return leaf.subject.rfc4514_string(), public, leaf.not_valid_after_utc


def _read_pem(path: Path, named: str) -> bytes:
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise SignExtraMissing(what=", ".join(missing))
    try:
        with path.open("rb") as file:
            return file.read(_PEM_MAX)
    except OSError as error:
        raise BadSignKey(key=named, why=error.strerror or "cannot be read") from None


def _check_curve(key: Any, named: str) -> None:
    if getattr(getattr(key, "curve", None), "name", None) not in _SCHEMES:
        raise BadSignKey(key=named, why="not an EC key on the curve P-256, P-384 or P-521")


def _certificates(pem: bytes) -> tuple[Certificate, ...]:
    from cryptography.x509 import load_pem_x509_certificates

    return tuple(load_pem_x509_certificates(pem)) if b"-----BEGIN CERTIFICATE-----" in pem else ()


def _may_sign(certificate: Certificate) -> bool:
    """What the package asks of the signer's own certificate (``_verify_certificates``, model-signing 1.1)."""
    from cryptography.x509 import ExtendedKeyUsage, KeyUsage
    from cryptography.x509.oid import ExtendedKeyUsageOID

    return any(
        (isinstance(usage, KeyUsage) and usage.digital_signature)
        or (isinstance(usage, ExtendedKeyUsage) and ExtendedKeyUsageOID.CODE_SIGNING in usage)
        for usage in (extension.value for extension in certificate.extensions)
    )


def _hint(key: EllipticCurvePublicKey) -> str:
    """How a bundle names a key: by the sha256 of its PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _dsse_key(key: EllipticCurvePublicKey) -> Any:
    from securesystemslib.signer import SSlibKey

    return SSlibKey.from_crypto(key, keyid=_hint(key), scheme=_SCHEMES[key.curve.name])
