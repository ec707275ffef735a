"""`verify --signed-by`: who signed these files, what they were made from, and where a chain of statements breaks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from model_signing import hashing, signing

from reshard.pipeline.api import verify
from reshard.pipeline.check import Check
from reshard.pipeline.errors import BadSignature, BadSignKey, NotSigned, SignedElsewhere, SignExtraMissing
from reshard.pipeline.limits import EVIDENCE_MAX
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import MANIFEST, PROVENANCE, SIGNATURE
from reshard.pipeline.publishing import signing as ours
from reshard.pipeline.publishing.exports import provenance
from reshard.pipeline.stores.connect import Context, open_source
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.checker import from_hub
from tests.support.keys import Pair, make_certified, make_pair, refusal
from tests.support.models import arrays, numbered, save_sharded

SIZE = 20_000
BUILDER = "https://builders.example/eu"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Weights alone, so that no class has to be imported."""
    save_sharded(tmp_path / "model", numbered(arrays(12, 4000), 3))
    (tmp_path / "model" / "notes.txt").write_text("first")
    return tmp_path / "model"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("RESHARD_BUILDER_ID", BUILDER)
    return make_pair(tmp_path / "keys")


@pytest.fixture
def signed(model: Path, tmp_path: Path, go: Run, pair: Pair) -> Path:
    go(model, tmp_path / "out", size=SIZE, sign=str(pair.private))
    return tmp_path / "out"


def looked(place: Path | str, *pairs: Pair, builder: str | None = None, deep: bool = False) -> tuple[Check, Check]:
    """What it says of the signature, and of the provenance."""
    signature, provenance, *_ = verify(
        place, signed_by=[pair.public for pair in pairs], builder=builder, deep=deep
    ).checks
    assert (signature.name, provenance.name) == ("signature", "provenance")
    return signature, provenance


def test_it_says_who_signed_when_and_from_what(model: Path, on_hub: Namespace, go: Run, pair: Pair) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE, sign=str(pair.private))
    signature, provenance = looked(target, pair, builder=BUILDER)
    assert (signature.result, provenance.result, signature.figures["files"]) == ("passed", "passed", 7)
    said = f"signed by {pair.public} as {target}; 3 files compared by the Hub's hash"
    assert said in signature.reason, signature.reason
    source = f"git+{on_hub.endpoint}/{repo}@{on_hub.admin.head(repo)}"
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert provenance.reason.startswith(f"built by {BUILDER} on {today}T") and f"from {source}" in provenance.reason
    assert looked(target, pair, deep=True)[0].figures["by_the_hub"] == 0


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda out: (out / "notes.txt").write_text("secnd"), "notes.txt has different bytes than were signed"),
        (lambda out: (out / "notes.txt").unlink(), "notes.txt was signed but is missing"),
        (lambda out: (out / "more.py").write_text(""), "more.py is not signed"),
    ],
)
def test_each_file_that_is_not_as_signed_is_named(
    signed: Path, pair: Pair, change: Callable[[Path], object], finding: str
) -> None:
    change(signed)
    assert looked(signed, pair)[0].findings == (finding,)


def test_workflows_of_a_source_are_published_and_not_signed_as_the_package_does_not_look_at_them(
    model: Path, tmp_path: Path, go: Run, pair: Pair
) -> None:
    workflow = model / ".github" / "workflows" / "ci.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("on: push")
    go(model, tmp_path / "out", size=SIZE, sign=str(pair.private))
    assert (tmp_path / "out" / workflow.relative_to(model)).read_text() == "on: push"
    assert refusal(tmp_path / "out", pair) == ""
    assert {check.result for check in looked(tmp_path / "out", pair)} == {"passed"}


TOOLS = [".reshard/x.py", ".git/x.py", ".github/x.py", ".cache/huggingface/x.py", ".gitignore", ".gitattributes"]


@pytest.mark.parametrize("folder", ["", "sub/"])
@pytest.mark.parametrize("name", TOOLS)
def test_files_of_tools_are_passed_over_where_the_package_passes_over_them(
    signed: Path, pair: Pair, folder: str, name: str
) -> None:
    path = folder + name
    (signed / path).parent.mkdir(parents=True, exist_ok=True)
    (signed / path).touch()
    assert looked(signed, pair)[0].findings == ((f"{path} is not signed",) if folder else ())
    assert bool(refusal(signed, pair)) == bool(folder)


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("sub/.git/l", "/etc/hostname"),
        ("sub/.git/l", "nowhere"),
        ("sub/.git/l", "l"),
        ("sub/.git/deep/l", "/etc"),
        ("sub/.git/l", ".."),
        ("sub/.git", "/etc"),
    ],
)
def test_links_in_folders_of_tools_are_not_signed_and_not_followed(
    signed: Path, pair: Pair, path: str, to: str
) -> None:
    (signed / path).parent.mkdir(parents=True, exist_ok=True)
    (signed / path).symlink_to(to)
    assert looked(signed, pair)[0].findings == (f"{path} is not signed",)


def test_a_name_in_a_folder_of_tools_that_is_not_utf_8_or_too_deep_to_read_is_not_signed(
    signed: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (signed / "sub" / ".git").mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(signed / "sub" / ".git") + b"/\xff")).touch()
    assert looked(signed, pair)[0].findings == (r"sub/.git/\udcff is not signed",)
    monkeypatch.chdir(signed / "sub" / ".git")
    for _ in range(20):  # longer together than a path may be
        Path("d" * 250).mkdir()
        os.chdir("d" * 250)
    os.chdir(signed)  # where a path ends too deep, Python 3.13.0 imports nothing
    assert any(one.startswith("sub/.git/ddd") for one in looked(signed, pair)[0].findings)


def test_the_folders_own_record_is_not_believed(signed: Path, pair: Pair) -> None:
    file = min(signed.glob("*.safetensors"))
    was, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert looked(signed, pair)[0].findings == (f"{file.name} has different bytes than were signed",)


def test_a_signature_vouches_for_what_the_manifest_says_of_names(
    model: Path, tmp_path: Path, go: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, (one, other, *_) = tmp_path / "out", sorted(arrays(12, 4000))
    swap = [{f"^{one}$": "?"}, {f"^{other}$": one}, {"^[?]$": other}]
    go(model, out, size=SIZE, sign=str(pair.private), rename=swap)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    assert verify(out, model).result == "inconclusive"
    found = verify(out, model, signed_by=pair.public)
    (same,) = [check for check in found.checks if check.name == "same tensors"]
    assert (found.result, same.result) == ("passed", "passed")
    assert [check.name for check in found.checks[:3]] == ["exchanged names", "signature", "provenance"]
    assert same.reason.startswith(f"compared with the options in the manifest that is signed: --rename '^{one}$'")
    manifest = (out / MANIFEST).read_bytes()
    covered = ours.Trusted.open([str(pair.public)]).read((out / SIGNATURE).read_bytes(), SIGNATURE).files
    (out / MANIFEST).write_bytes(wrong := manifest.replace(json.loads(manifest)["root"].encode(), b"0" * 64))
    signer = ours.Signer.open(str(pair.private), None, BUILDER)
    assert signer and wrong != manifest
    (out / SIGNATURE).write_bytes(signer.sign_files(covered | {MANIFEST: hashlib.sha256(wrong).hexdigest()}, "out"))
    results = {c.name: c.result for c in verify(out, model, signed_by=pair.public).checks}
    assert (results["signature"], results["manifest"], results["same tensors"]) == ("passed", "failed", "inconclusive")
    (out / "notes.txt").write_text("other")
    same = next(c for c in verify(out, model, signed_by=pair.public).checks if c.name == "same tensors")
    assert same.result == "inconclusive", "a signature of other files vouches for none"


def test_another_builder_is_a_finding(signed: Path, pair: Pair) -> None:
    provenance = looked(signed, pair, builder="https://builders.example/us")[1]
    assert provenance.findings == (f"it was built by {BUILDER}, not by https://builders.example/us",)


def test_a_statement_about_other_files_is_a_finding(model: Path, signed: Path, tmp_path: Path, pair: Pair) -> None:
    signer = ours.Signer.open(str(pair.private), None, BUILDER)
    assert signer
    bundle = json.loads((signed / PROVENANCE).read_bytes())
    statement = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["subject"][0]["digest"]["sha256"] = "0" * 64
    (signed / PROVENANCE).write_bytes(signer.sign(statement))
    covered = ours.Trusted.open([str(pair.public)]).read((signed / SIGNATURE).read_bytes(), SIGNATURE).files
    covered[PROVENANCE] = hashlib.sha256((signed / PROVENANCE).read_bytes()).hexdigest()
    (signed / SIGNATURE).write_bytes(signer.sign_files(covered, "out"))
    signature, provenance = looked(signed, pair)
    assert signature.result == "passed"
    assert provenance.findings == (f"{PROVENANCE} describes different files than {SIGNATURE}",)


def tampered(file: Path) -> None:
    """Another text under the old signature."""
    bundle = json.loads(file.read_bytes())
    text = b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"notes.txt", b"other.txt")
    bundle["dsseEnvelope"]["payload"] = b64encode(text).decode()
    file.write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda out: os.truncate(out / SIGNATURE, EVIDENCE_MAX + 1), "it is too large to be a signature"),
        (lambda out: (out / SIGNATURE).write_text("{}"), "not a signature in a Sigstore bundle"),
        (lambda out: (out / SIGNATURE).write_text("["), "not a signature in a Sigstore bundle"),
        (lambda out: tampered(out / SIGNATURE), "did not sign this text"),
        (lambda out: shutil.copy(out / PROVENANCE, out / SIGNATURE), "another statement"),
    ],
)
def test_what_is_no_signature_by_this_key_is_refused(
    signed: Path, pair: Pair, change: Callable[[Path], object], why: str
) -> None:
    change(signed)
    with pytest.raises(BadSignature, match=why):
        looked(signed, pair)


def test_what_is_not_signed_is_told_from_a_bad_signature(signed: Path, pair: Pair) -> None:
    (signed / SIGNATURE).unlink()
    with pytest.raises(NotSigned, match=f"is not signed: it has no {SIGNATURE}") as caught:
        looked(signed, pair)
    assert "ask its publisher to sign it" in caught.value.next_step


def test_a_certificate_of_no_known_version_is_refused(model: Path, tmp_path: Path) -> None:
    certified = make_certified(tmp_path / "keys")
    sign_as_its_author(model, certified)
    bundle = json.loads((model / SIGNATURE).read_bytes())
    for one in bundle["verificationMaterial"]["x509CertificateChain"]["certificates"]:
        der = b64decode(one["rawBytes"]).replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05", 1)
        one["rawBytes"] = b64encode(der).decode()
    (model / SIGNATURE).write_text(json.dumps(bundle))
    with pytest.raises(BadSignature, match="not one of X.509"):
        looked(model, certified)


def test_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSignature, match="signed with another key"):
        looked(signed, make_pair(tmp_path / "others"))


def test_a_missing_extra_is_said(signed: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "securesystemslib", None)
    with pytest.raises(SignExtraMissing, match="securesystemslib"):
        looked(signed, pair)
    monkeypatch.setitem(sys.modules, "cyclonedx", None)
    with pytest.raises(SignExtraMissing, match="cyclonedx"):
        provenance(open_source(parse_place(str(signed)), Context.from_env()), "cyclonedx")


def test_a_key_that_cannot_check_is_refused(signed: Path, pair: Pair) -> None:
    with pytest.raises(BadSignKey, match="no public key and no certificate"):
        verify(signed, signed_by=[pair.private])


def test_the_signature_of_another_repository_is_refused(
    model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path
) -> None:
    go(upload(on_hub, "source", model), on_hub.repo("target"), size=SIZE, sign=str(pair.private))
    fetch, copied = from_hub(on_hub.endpoint, on_hub.repo("target"), token=on_hub.token), tmp_path / "copied"
    copied.mkdir()
    for path in on_hub.admin.files(on_hub.repo("target")):
        (copied / path).write_bytes(fetch(path) or b"")
    elsewhere = upload(on_hub, "elsewhere", copied)
    with pytest.raises(SignedElsewhere, match=f"{elsewhere} is the signature for {on_hub.repo('target')}"):
        looked(elsewhere, pair)
    assert looked(copied, pair)[0].result == "passed", "a download may be in any folder"


def test_a_chain_is_followed_to_its_origin(model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path) -> None:
    second, third = make_pair(tmp_path / "keys", "second"), make_pair(tmp_path / "keys", "third")
    names = [upload(on_hub, "source", model), *(on_hub.repo(name) for name in "abc")]
    for source, target, key in zip(names[:-1], names[1:], (pair, second, third), strict=True):
        go(source, target, size=SIZE, sign=str(key.private))
    whole = looked(names[-1], pair, second, third)[1]
    assert (whole.result, whole.figures["links"]) == ("passed", 3), whole.reason
    assert whole.reason.index(f"signed by {second.public}") < whole.reason.index(f"signed by {pair.public}")
    assert whole.reason.endswith("which has no statement of its own")
    broken = looked(names[-1], third, second)[1]
    assert broken.result == "inconclusive"
    assert f"the chain breaks at git+{on_hub.endpoint}/{names[1]}@" in broken.reason
    assert "signed with another key" in broken.reason


def test_a_chain_breaks_where_the_statement_is_another_repositorys(
    model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path
) -> None:
    source, first, second = upload(on_hub, "source", model), on_hub.repo("first"), on_hub.repo("second")
    go(source, first, size=SIZE, sign=str(pair.private))
    fetch, copied = from_hub(on_hub.endpoint, first, token=on_hub.token), tmp_path / "copied"
    copied.mkdir()
    for path in on_hub.admin.files(first):
        (copied / path).write_bytes(fetch(path) or b"")
    go(upload(on_hub, "copy", copied), second, size=SIZE, sign=str(pair.private))
    assert looked(second, pair)[1].reason.endswith(f"its statement is about {first}")


def test_a_chain_breaks_where_the_source_was_changed(
    model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path
) -> None:
    source, middle, last = upload(on_hub, "source", model), on_hub.repo("middle"), on_hub.repo("last")
    go(source, middle, size=SIZE, sign=str(pair.private))
    path = min(path for path in on_hub.admin.files(middle) if path.endswith(".safetensors"))
    content = bytearray(from_hub(on_hub.endpoint, middle, token=on_hub.token)(path) or b"")
    content[-1] ^= 1
    on_hub.admin.put_files(middle, {path: bytes(content)}, lfs=[path])
    go(middle, last, size=SIZE, sign=str(pair.private))
    signature, provenance = looked(last, pair)
    assert (signature.result, provenance.result) == ("passed", "inconclusive")
    assert provenance.reason.endswith(f"its statement lists different bytes than were read for {path}")


def sign_as_its_author(folder: Path, pair: Pair) -> None:
    """By the package itself."""
    ignored = [folder / name for name in (SIGNATURE, "README.md", ".reshard")]
    config = signing.Config().set_hashing_config(hashing.Config().set_ignored_paths(paths=ignored))
    config.use_certificate_signer(
        private_key=pair.private, signing_certificate=pair.private, certificate_chain=[pair.private]
    )
    config.sign(folder, folder / SIGNATURE)


def test_a_model_that_its_author_signed_is_an_origin(
    model: Path, on_hub: Namespace, go: Run, pair: Pair, tmp_path: Path
) -> None:
    author = make_certified(tmp_path / "author")
    sign_as_its_author(model, author)
    go(upload(on_hub, "source", model), on_hub.repo("target"), size=SIZE, sign=str(pair.private))
    provenance = looked(on_hub.repo("target"), pair, author)[1]
    assert provenance.result == "passed"
    assert provenance.reason.endswith("signed by CN=Releases as the origin")


def test_an_expired_certificate_is_told(model: Path, tmp_path: Path, go: Run) -> None:
    certified, later = make_certified(tmp_path / "keys"), datetime(2020, 1, 2, tzinfo=UTC)
    go(model, tmp_path / "out", size=SIZE, sign=str(certified.private))
    assert "expired" not in looked(tmp_path / "out", certified)[0].reason
    old = make_certified(tmp_path / "old", later)
    sign_as_its_author(tmp_path / "out", old)
    assert "(its certificate expired on 2020-01-02)" in looked(tmp_path / "out", old, certified)[0].reason
    with pytest.raises(BadSignature, match="its certificate is not trusted"):
        looked(tmp_path / "out", certified)


def test_a_certificate_that_is_not_for_signing_is_refused_as_the_package_refuses_it(
    model: Path, tmp_path: Path
) -> None:
    certified = make_certified(tmp_path / "keys", usage=None)
    sign_as_its_author(model, certified)
    assert "cannot be used for signing" in refusal(model, certified)
    with pytest.raises(BadSignature, match="its certificate does not allow signing"):
        looked(model, certified)
