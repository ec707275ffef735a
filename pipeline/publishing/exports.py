"""What a publication was made from, in the forms of others: SLSA's statement, a CycloneDX ML-BOM, or plain facts."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Annotated, Any, Literal
from uuid import NAMESPACE_URL, uuid5

from pydantic import BaseModel, Field

from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import BadSignature, NoProvenance, SignExtraMissing
from reshard.pipeline.limits import MANIFEST_MAX
from reshard.pipeline.planning.model import MANIFEST, PROVENANCE
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.manifest import parse
from reshard.pipeline.publishing.provenance import PREDICATE, evidence, of_manifest
from reshard.pipeline.stores.credentials import DEFAULT_ENDPOINT
from reshard.pipeline.tensors import Pin

Format = Literal["slsa", "cyclonedx", "json"]


def provenance(output: Source, form: Format) -> dict[str, Any]:
    """What is published, as it stands: nobody's signature is checked.

    Raises NoProvenance where there is neither a statement nor a manifest, BadSignature, BadManifest, SignExtraMissing.
    """
    bundle, manifest = evidence(output, PROVENANCE), output.files().get(MANIFEST)
    if bundle is not None:
        statement = _statement_in(bundle)
    elif manifest is not None:
        statement = of_manifest(parse(read_file(output, manifest, MANIFEST_MAX)), output)
    else:
        raise NoProvenance(place=str(output.place))
    if form == "slsa":
        return statement
    facts = _facts(statement, signed=bundle is not None)
    return facts if form == "json" else _bom(facts, output.pin)


def _statement_in(bundle: bytes) -> dict[str, Any]:
    try:
        envelope = json.loads(bundle)["dsseEnvelope"]
        statement: dict[str, Any] = json.loads(b64decode(envelope["payload"]))
        if envelope["signatures"][0]["sig"] and statement["predicateType"] == PREDICATE:
            _Facts.model_validate(_facts(statement, signed=True))
            return statement
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise BadSignature(file=PROVENANCE, why="not SLSA provenance v1 in a Sigstore bundle")


class _Dependency(BaseModel):
    uri: str
    name: str = ""
    digest: dict[str, str] = {}


class _Facts(BaseModel):
    """What of a statement, which anybody may have written, the other forms need."""

    model: Annotated[str, Field(min_length=1)]
    files: dict[str, str]
    source: _Dependency
    finished: str | None


def _facts(statement: dict[str, Any], signed: bool) -> dict[str, Any]:
    build, run = (statement["predicate"][part] for part in ("buildDefinition", "runDetails"))
    asked, (source, *files) = build["externalParameters"], build["resolvedDependencies"]
    return {
        "model": asked["target"],
        "files": {one["name"]: one["digest"]["sha256"] for one in statement["subject"]},
        "source": source,
        "source_files": [{key: one[key] for key in one if key != "content"} for one in files],
        "options": asked["options"],
        "builder": run["builder"],
        "finished": run["metadata"].get("finishedOn"),
        "signed": signed,
    }


def _bom(facts: dict[str, Any], pin: Pin) -> dict[str, Any]:
    """The model with its files, and the source as what it descends from (https://cyclonedx.org/capabilities/mlbom)."""
    try:
        from cyclonedx.model import HashAlgorithm, HashType
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType, Pedigree
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError as error:
        raise SignExtraMissing(what="cyclonedx") from error

    def model(name: str, endpoint: str | None, commit: str | None, **more: Any) -> Component:
        purl = None
        namespace, _, name_there = name.partition("/")
        if endpoint and namespace and name_there:
            other = {} if endpoint == DEFAULT_ENDPOINT else {"repository_url": endpoint}
            purl = PackageURL("huggingface", namespace, name_there, commit, other)
        return Component(
            name=name, version=commit, type=ComponentType.MACHINE_LEARNING_MODEL, purl=purl,
            bom_ref=f"{name}@{commit}" if commit else name, **more,
        )  # fmt: skip

    source = facts["source"]
    endpoint = source["uri"].removeprefix("git+").partition(f"/{source['name']}@")[0] if "name" in source else None
    ancestor = model(source.get("name", source["uri"]), endpoint, source.get("digest", {}).get("gitCommit"))
    parts = []
    for path, digest in facts["files"].items():
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
        parts.append(Component(name=path, type=ComponentType.FILE, bom_ref=path, hashes=hashes))
    ours = model(facts["model"], pin.endpoint, pin.commit, pedigree=Pedigree(ancestors=[ancestor]), components=parts)
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"{facts['model']}@{pin.commit}"),
        metadata=BomMetaData(component=ours),
    )
    made: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    made["metadata"] |= {"timestamp": facts["finished"]}  # not that of the export
    if facts["finished"] is None:
        del made["metadata"]["timestamp"]
    return made
