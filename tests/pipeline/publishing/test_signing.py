"""What is signed, as the unmodified Model Signing package sees it, and what of a key gets anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import ExtensionType
from huggingface_hub import snapshot_download

from reshard.pipeline.errors import (
    BadSignKey,
    CertificateExpired,
    NoSignKeys,
    ReshardError,
    SignExtraMissing,
    UsageError,
)
from reshard.pipeline.planning.model import MANIFEST, PROVENANCE, SIGNATURE
from reshard.pipeline.publishing.signing import Trusted
from reshard.pipeline.request import Options
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.keys import CODE, DIGITAL, Pair, make_certified, make_pair, refusal
from tests.support.models import arrays, numbered, save_sharded

SIZE = 20_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_sharded(tmp_path / "model", numbered(arrays(12, 4000), 3))
    (tmp_path / "model" / "sub").mkdir()
    (tmp_path / "model" / "sub" / "notes.txt").write_text("first")
    (tmp_path / "model" / "config.json").write_text("{}\n")
    (tmp_path / "model" / "README.md").write_text("# Model\n")
    return tmp_path / "model"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "keys")


def statement_in(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(b64decode(json.loads(file.read_bytes())["dsseEnvelope"]["payload"]))
    return found


@pytest.fixture
def signed(model: Path, tmp_path: Path, go: Run, pair: Pair) -> Path:
    go(model, tmp_path / "out", size=SIZE, sign=str(pair.private))
    return tmp_path / "out"


def test_the_unmodified_command_accepts_it(signed: Path, pair: Pair) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(signed)]
    command += ["--signature", str(signed / SIGNATURE), "--public_key", str(pair.public)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Verification succeeded\n"), done.stderr


def test_it_covers_every_file_but_those_that_others_edit(signed: Path, pair: Pair) -> None:
    covered = {one["name"] for one in statement_in(signed / SIGNATURE)["predicate"]["resources"]}
    files = {path.relative_to(signed).as_posix() for path in signed.rglob("*") if path.is_file()}
    assert covered == {path for path in files if not path.startswith(".reshard")} - {"README.md", SIGNATURE}
    assert {MANIFEST, PROVENANCE, "config.json", "sub/notes.txt"} <= covered
    (signed / "README.md").write_text("# Another text\n")
    (signed / ".gitattributes").write_text("*.bin filter=lfs\n")
    assert refusal(signed, pair) == ""


def flipped(folder: Path, path: str) -> None:
    content = bytearray((folder / path).read_bytes())
    content[-1] ^= 1
    (folder / path).write_bytes(content)


def weight_of(folder: Path) -> str:
    return min(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        lambda out: flipped(out, weight_of(out)),
        lambda out: flipped(out, "config.json"),
        lambda out: flipped(out, MANIFEST),
        lambda out: flipped(out, PROVENANCE),
        lambda out: (out / "extra.py").write_text("import os\n"),
        lambda out: (out / weight_of(out)).unlink(),
        lambda out: (out / "sub" / "notes.txt").rename(out / "sub" / "other.txt"),
    ],
    ids=[
        "a bit of a weight",
        "a bit of the config",
        "the manifest",
        "the provenance",
        "one more",
        "one less",
        "renamed",
    ],
)
def test_whatever_changes_is_refused(signed: Path, pair: Pair, change: Callable[[Path], object]) -> None:
    change(signed)
    assert "Signature mismatch" in refusal(signed, pair)


def test_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    assert "Key mismatch" in refusal(signed, make_pair(tmp_path / "others"))


def test_a_download_from_the_hub_is_accepted(
    model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    monkeypatch.setenv("RESHARD_SIGN_KEYS", str(pair.private.parent))
    on_hub.admin.create_repo(target)
    on_hub.admin.put_files(target, {"code/.gitignore": b"", "theirs.txt": b"not ours"})
    report = go(repo, target, size=SIZE, sign=pair.private.name, overwrite=True)
    told = "2 files left in place, such as code/.gitignore: not covered by the signature, so verifiers reject"
    assert any(note.startswith(told) and "--prune" not in note for note in report.plan.notes), "it deletes one of them"
    here = Path(snapshot_download(target, local_dir=tmp_path / "here", endpoint=on_hub.endpoint, token=on_hub.token))
    extra = "Extra files found in model 'here': code/.gitignore, theirs.txt"
    assert extra in refusal(here, pair), "nobody here vouches for that"
    for path in ("code/.gitignore", "theirs.txt"):
        (here / path).unlink()
    assert refusal(here, pair) == ""
    statement = statement_in(here / PROVENANCE)
    build = statement["predicate"]["buildDefinition"]
    assert build["externalParameters"]["target"] == target
    source, *files = build["resolvedDependencies"]
    commit = on_hub.admin.head(repo)
    assert source["uri"] == f"git+{on_hub.endpoint}/{repo}@{commit}" and source["digest"] == {"gitCommit": commit}
    weights = [one for one in files if one["name"].endswith(".safetensors")]
    assert len(weights) == 3 and {one["annotations"]["verified"] for one in weights} == {"checked"}
    assert "sign" not in build["externalParameters"]["options"] and str(pair.private) not in json.dumps(statement)


def test_what_is_published_is_signed_without_reading_a_weight(
    model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path
) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    first = go(repo, target, size=SIZE)
    on_hub.admin.log(reset=True)
    second = go(repo, target, size=SIZE, sign=str(pair.private))
    assert not second.plan.shards and second.published.commit != first.published.commit
    assert not [one for one in on_hub.admin.log() if one["method"] == "GET" and one["path"].endswith(".safetensors")]
    same_key = shutil.copy(pair.private, pair.private.with_name("copy.pem"))
    third = go(repo, target, size=SIZE, sign=str(same_key))
    assert third.published.commit == second.published.commit, "the signature that stands is as good"
    newer = make_pair(pair.private.parent, "newer")
    fourth = go(repo, target, size=SIZE, sign=str(newer.private))
    assert not fourth.plan.shards and fourth.published.commit != second.published.commit
    on_hub.admin.put_files(repo, {"sub/notes.txt": b"second"})
    assert not go(repo, target, size=SIZE, sign=str(newer.private)).plan.shards
    here = Path(snapshot_download(target, local_dir=tmp_path / "here", endpoint=on_hub.endpoint, token=on_hub.token))
    assert refusal(here, newer) == "", "weights that stay are covered, and a signature of other files is replaced"
    unsigned = go(repo, target, size=SIZE, exclude=["sub/*"])
    assert {SIGNATURE, PROVENANCE} <= {*unsigned.plan.deletes}, "of files that are no longer there"


def test_a_sources_signature_is_not_passed_on(signed: Path, tmp_path: Path, go: Run) -> None:
    report = go(signed, tmp_path / "next", size=2 * SIZE)
    assert not (tmp_path / "next" / SIGNATURE).exists() and not (tmp_path / "next" / PROVENANCE).exists()
    assert {one.path for one in report.plan.left_out} >= {SIGNATURE, PROVENANCE}


@pytest.mark.parametrize("usage", [DIGITAL, CODE])
def test_a_certificate_signs(usage: ExtensionType, model: Path, tmp_path: Path, go: Run) -> None:
    certified = make_certified(tmp_path / "keys", usage=usage)
    go(model, tmp_path / "out", size=SIZE, sign=str(certified.private))
    assert refusal(tmp_path / "out", certified) == ""
    flipped(tmp_path / "out", "config.json")
    assert "Signature mismatch" in refusal(tmp_path / "out", certified)


def bad_key(folder: Path, kind: str) -> Path:
    folder.mkdir()
    file = folder / "bad.pem"
    if kind == "a curve that is not signed with":
        return make_pair(folder, "bad", ec.SECP256K1()).private
    if kind == "text":
        file.write_text("swordfish")
    if kind == "its public half":
        return make_pair(folder, "bad").public
    if kind == "another's certificate":
        parts = [make_certified(folder / name).private.read_text().partition("-----BEGIN CERT") for name in "ab"]
        file.write_text(parts[0][0] + "".join(parts[1][1:]))
    if kind == "not for signatures":
        return make_certified(folder, usage=None).private
    if kind == "expired":
        return make_certified(folder, datetime(2020, 1, 2, tzinfo=UTC)).private
    return file


@pytest.mark.parametrize(
    ("kind", "error", "why"),
    [
        ("no file", BadSignKey, "No such file"),
        ("text", BadSignKey, "not a private key"),
        ("its public half", BadSignKey, "not a private key"),
        ("a curve that is not signed with", BadSignKey, "P-256"),
        ("another's certificate", BadSignKey, "belongs to another key"),
        ("not for signatures", BadSignKey, "allows neither digitalSignature nor codeSigning"),
        ("expired", CertificateExpired, "valid until 2020-01-02"),
    ],
)
def test_a_key_that_cannot_sign_is_refused_before_anything_is_read(
    kind: str, error: type[ReshardError], why: str, tmp_path: Path, go: Run
) -> None:
    with pytest.raises(error, match=why) as refused:
        go(tmp_path / "nowhere", tmp_path / "out", sign=str(bad_key(tmp_path / "keys", kind)))
    assert type(refused.value) is error and "swordfish" not in str(refused.value)


def test_a_name_needs_the_folder_of_keys(tmp_path: Path, go: Run) -> None:
    with pytest.raises(NoSignKeys, match="RESHARD_SIGN_KEYS, the folder of keys, is not set") as refused:
        go(tmp_path / "nowhere", tmp_path / "out", sign="release.pem")
    refused.value.facts |= {"job": "abc", "where": " on the worker and restart it"}
    set_it = "set RESHARD_SIGN_KEYS to the folder with the key on the worker and restart it"
    assert refused.value.next_step == f"{set_it}, then run `reshard retry abc`"


@pytest.mark.parametrize(("name", "typed"), [("release.pem", "./release.pem"), ("a key.pem", "'./a key.pem'")])
def test_a_name_of_a_file_here_is_pointed_at(
    name: str, typed: str, pair: Pair, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pair.private.read_bytes())
    with pytest.raises(BadSignKey, match="RESHARD_SIGN_KEYS is not set") as refused:
        go(tmp_path / "nowhere", tmp_path / "out", sign=name)
    assert refused.value.next_step == f"to use the file with that name, type {typed}"


@pytest.mark.parametrize("package", ["cryptography", "model_signing", "OpenSSL", "securesystemslib"])
def test_a_missing_extra_is_said_before_anything_is_read(
    package: str, pair: Pair, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SignExtraMissing, match=package) as refused:
        go(tmp_path / "nowhere", tmp_path / "out", sign=str(pair.private))
    assert "sign" in refused.value.next_step


def test_a_key_typed_for_its_name_is_not_repeated(pair: Pair) -> None:
    text = pair.private.read_text()
    with pytest.raises(UsageError, match="never the key itself") as refused:
        Options.of(sign=text)
    assert text.splitlines()[1] not in str(refused.value.to_dict())


def test_a_file_with_two_keys_is_refused_as_either_might_be_meant(pair: Pair, tmp_path: Path) -> None:
    both = tmp_path / "both.pub"
    both.write_bytes(pair.public.read_bytes() + make_pair(tmp_path / "others").public.read_bytes())
    with pytest.raises(BadSignKey, match="has more than one key"):
        Trusted.open([str(both)])
