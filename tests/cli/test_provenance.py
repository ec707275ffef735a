"""`reshard run --sign`, `verify --signed-by` and `provenance`, as a person types them."""

from __future__ import annotations

import json
from base64 import b64encode
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement_pb2 import Statement

from reshard.pipeline.api import plan
from reshard.pipeline.errors import BadSignKey
from reshard.pipeline.planning.model import PROVENANCE as STATEMENT
from reshard.pipeline.publishing.provenance import PREDICATE
from reshard.pipeline.request import Request
from tests.cli.conftest import Run
from tests.hub.fixtures import Namespace
from tests.support.keys import Pair, make_certified, make_pair

BUILDER = "https://builders.example/eu"


@pytest.fixture
def bare(model: Path) -> Path:
    """The model's weights alone: nothing that the reload child would have to import torch for."""
    for name in ("config.json", "tokenizer.json", "optimizer.pt"):
        (model / name).unlink()
    return model


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "keys")


def test_a_signed_run_is_verified_by_the_public_key(reshard: Run, bare: Path, pair: Pair, tmp_path: Path) -> None:
    out, env = tmp_path / "out", {"RESHARD_SIGN_KEYS": str(pair.private.parent), "RESHARD_BUILDER_ID": BUILDER}
    assert reshard("run", bare, "--to", out, "--size", "3300B", "--sign", "release.pem", env=env).code == 0
    done = reshard("verify", out, "--signed-by", pair.public, "--builder", BUILDER, "--json")
    assert done.code == 0, done.err
    signature, provenance = done.documents[0]["checks"][:2]
    assert (signature["result"], provenance["result"]) == ("passed", "passed")
    other = reshard("verify", out, "--signed-by", make_pair(tmp_path / "others").public)
    assert other.code == 6
    assert "error[proof.signature]: model.sig: it was signed with another key\nhint: " in other.err
    assert reshard("verify", out, "--builder", BUILDER).err.startswith("error[usage]: --builder requires --signed-by")
    (out / "more.py").touch()
    failed = reshard("verify", out, "--signed-by", pair.public)
    assert failed.code == 6 and "more.py is not signed" in failed.err


def test_a_plan_fails_as_its_run_would_where_the_key_cannot_be_used(
    reshard: Run, bare: Path, pair: Pair, tmp_path: Path
) -> None:
    command = (bare, "--to", tmp_path / "out", "--size", "3300B", "--sign")
    env = {"RESHARD_SIGN_KEYS": str(pair.private.parent)}
    for key in (str(pair.public), "other.pem"):
        planned, ran = (reshard(verb, *command, key, env=env) for verb in ("plan", "run"))
        assert (planned.code, planned.err) == (ran.code, ran.err) and "error[access.sign_key]" in ran.err
    assert reshard("plan", *command, "release.pem", env=env).code == 0
    assert reshard("plan", *command, "a-workers-own.pem").code == 0
    with pytest.raises(BadSignKey):
        plan(Request.of(bare, sign="./other.pem"))


def exported(reshard: Run, place: str | Path, form: str, env: dict[str, str]) -> Any:
    done = reshard("provenance", place, "--format", form, env=env)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert reshard("provenance", place, "--format", form, "--json", env=env).documents[0]["provenance"] == answer
    return answer


@pytest.mark.parametrize(
    "signed", [pytest.param(True, id="signed"), pytest.param(False, id="by its manifest", marks=pytest.mark.slow)]
)
def test_it_is_told_in_the_forms_of_others(
    reshard: Run, bare: Path, pair: Pair, namespace: Namespace, signed: bool
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "HF_HUB_DISABLE_XET": "1"}
    source, target = namespace.repo("source"), namespace.repo("target")
    namespace.admin.create_repo(source)
    weights = (bare / "model.safetensors").read_bytes()
    commit = namespace.admin.put_files(source, {"model.safetensors": weights}, lfs=["model.safetensors"])
    key = ["--sign", str(pair.private)] if signed else []
    assert reshard("run", source, "--to", target, "--size", "3300B", *key, env=env).code == 0

    slsa = exported(reshard, target, "slsa", env)
    predicate = slsa.pop("predicate")
    ParseDict(slsa | {"predicate": {}}, Statement())  # raises for a field that in-toto does not know
    ParseDict(predicate, Provenance())
    assert predicate["buildDefinition"]["resolvedDependencies"][0]["digest"] == {"gitCommit": commit}

    facts = exported(reshard, target, "json", env)
    assert (facts["model"], facts["signed"], facts["source"]["name"]) == (target, signed, source)
    listed = {path: file["sha256"] for path, file in namespace.admin.files(target).items() if "safetensors" in path}
    weights_of = {path: digest for path, digest in listed.items() if not path.endswith(".json")}
    assert len(weights_of) == 4 and weights_of.items() <= facts["files"].items()

    bom = exported(reshard, target, "cyclonedx", env)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
    model = bom["metadata"]["component"]
    assert (model["type"], model["name"], model["version"]) == (
        "machine-learning-model", target, namespace.admin.head(target),
    )  # fmt: skip
    (ancestor,) = model["pedigree"]["ancestors"]
    assert (ancestor["name"], ancestor["version"]) == (source, commit)
    assert ancestor["purl"].startswith(f"pkg:huggingface/{source}@{commit}?repository_url=http")
    assert {part["name"] for part in model["components"]} == facts["files"].keys()


def test_what_reshard_did_not_publish_has_none(reshard: Run, bare: Path) -> None:
    done = reshard("provenance", bare)
    assert done.code == 3 and done.err.startswith("error[source.no_provenance]: ")


@pytest.mark.parametrize("form", ["slsa", "cyclonedx", "json"])
@pytest.mark.parametrize(
    ("source", "signatures"),
    [
        ({"name": "u/s"}, [{"sig": "eA=="}]),
        ({"uri": "git+https://a/u/s@0", "name": "u/s", "digest": None}, [{"sig": "eA=="}]),
        ({"uri": 5}, [{"sig": "eA=="}]),
        ({"uri": "git+https://a/u/s@0"}, []),
        ({"uri": "git+https://a/u/s@0"}, None),
    ],
)
def test_a_statement_of_others_that_is_none_is_refused(
    reshard: Run, bare: Path, form: str, source: object, signatures: object
) -> None:
    subject = [{"name": "model.safetensors", "digest": {"sha256": "0" * 64}}]
    asked = {"target": "a/b", "options": {}}
    build = {"externalParameters": asked, "resolvedDependencies": [source]}
    predicate = {"buildDefinition": build, "runDetails": {"builder": {"id": "x"}, "metadata": {}}}
    statement = {"subject": subject, "predicateType": PREDICATE, "predicate": predicate}
    envelope = {"payload": b64encode(json.dumps(statement).encode()).decode(), "signatures": signatures}
    (bare / STATEMENT).write_text(json.dumps({"dsseEnvelope": envelope}))
    done = reshard("provenance", bare, "--format", form)
    assert (done.code, done.out) == (6, "") and "error[proof.signature]: " in done.err, done.err


def test_a_manifest_names_the_version_that_wrote_it_as_a_statement_does(
    reshard: Run, bare: Path, tmp_path: Path
) -> None:
    assert reshard("run", bare, "--to", tmp_path / "out", "--size", "3300B").code == 0
    facts = exported(reshard, tmp_path / "out", "json", {})
    assert facts["builder"]["version"] == {"reshard": version("reshard")}


@pytest.mark.parametrize("how", ["builder", "certificate"])
def test_another_builder_or_certificate_signs_again_and_copies_nothing(
    reshard: Run, bare: Path, tmp_path: Path, how: str
) -> None:
    out, pair = tmp_path / "out", make_certified(tmp_path / "keys")
    key = tmp_path / "key.pem"
    key.write_text(pair.private.read_text().partition("-----BEGIN CERTIFICATE-----")[0])
    command = ("run", bare, "--to", out, "--size", "3300B", "--sign", key)
    assert reshard(*command).code == 0
    weights = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert reshard(*command).out.startswith("Nothing to do")
    renewed = tmp_path / "renewed.pem"
    renewed.write_bytes((pair.private if how == "certificate" else key).read_bytes())
    command, env = (*command[:-1], renewed), {"RESHARD_BUILDER_ID": BUILDER} if how == "builder" else {}
    assert reshard(*command, env=env).out.startswith("Wrote")
    assert {path.name: path.stat().st_ino for path in out.glob("*.safetensors")} == weights
    trust = ("--builder", BUILDER) if how == "builder" else ()
    by = pair.public if how == "certificate" else plain_public(key, tmp_path)
    assert reshard("verify", out, "--signed-by", by, *trust).code == 0
    assert reshard(*command, env=env).out.startswith("Nothing to do")


def plain_public(key: Path, folder: Path) -> Path:
    public = folder / "key.pub"
    private = load_pem_private_key(key.read_bytes(), None)
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public
