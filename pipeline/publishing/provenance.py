"""What a publication was made from, as a statement of SLSA provenance v1 (https://slsa.dev/spec/v1.0/provenance).

Its subjects are the published files. The first of ``resolvedDependencies`` is the source at its commit, then come its
files by the hashes that its store lists, and last the source's own statement, where it has one: the evidence by which
`verify` follows a chain to its origin. Without a signature the same is told by the manifest alone.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.checkpoint.tool_files import is_tool_file
from reshard.pipeline.errors import BadSignature
from reshard.pipeline.limits import EVIDENCE_MAX
from reshard.pipeline.planning.model import CARD, PROVENANCE, SIGNATURE, Plan, Receipt
from reshard.pipeline.planning.ranges import parts
from reshard.pipeline.protocols import Addition, Source, Target
from reshard.pipeline.publishing.manifest import Manifest
from reshard.pipeline.publishing.signing import BUNDLE, STATEMENT, Signer, is_covered
from reshard.pipeline.request import LAYOUT
from reshard.pipeline.stores.connect import UNNAMED_BUILDER
from reshard.pipeline.tensors import Attestation, Pin, StoredFile

PREDICATE = "https://slsa.dev/provenance/v1"
TENSORS_PREDICATE = "urn:reshard:tensors:1"
BUILD_TYPE = "urn:reshard:build:1"  # what externalParameters means; docs/guides/signing.md describes it


def signatures(
    plan: Plan,
    additions: Sequence[Addition],
    levels: Mapping[str, Attestation],
    source: Source,
    target: Target,
    there: Source,
    signer: Signer,
) -> list[Addition]:
    """The two files that say whose and from what the result is; none where those that stand ``there`` still do.

    ``additions`` are put on top of ``there``. What others put there is not covered.
    """
    added = {addition.path: addition for addition in additions}
    ours = sorted(filter(is_covered, {*added, *(file.path for file in plan.carried), *plan.reused}))
    files = {path: _sha256(added.get(path), there, path) for path in ours}
    name = name_of(there)
    if not plan.options.force and _stand(there, files, name, signer):
        return []
    made = signer.sign(_statement(plan, files, levels, source, name, signer.builder))
    seal = signer.sign_files(files | {PROVENANCE: hashlib.sha256(made).hexdigest()}, name)
    return target.carry([], source, "", [Addition(PROVENANCE, content=made), Addition(SIGNATURE, content=seal)])


def name_of(source: Source) -> str:
    """What a signature calls the model: its repository, or the last part of its folder's path."""
    return source.pin.named or source.pin.repo.rstrip("/").rpartition("/")[2]


def _sha256(addition: Addition | None, there: Source, path: str) -> str:
    """What a file will have; only small ones that stay, and of which git knows its own hash alone, are read."""
    if addition is not None and addition.content is not None:
        return hashlib.sha256(addition.content).hexdigest()
    file = addition.stored if addition is not None and addition.stored else there.files()[path]
    return file.sha256 or sha256_of(there, file)


def sha256_of(source: Source, file: StoredFile) -> str:
    """By reading all of it."""
    found = hashlib.sha256()
    for view in source.read(file, 0, file.size):
        found.update(view)
    return found.hexdigest()


def _stand(there: Source, files: Mapping[str, str], name: str, signer: Signer) -> bool:
    """Whether ``there`` has a signature of just these files by this key, with its certificates, and by this builder."""
    try:
        found, now = (evidence(there, path) for path in (PROVENANCE, SIGNATURE))
        if found is None or now is None:
            return False
        signed, made = signer.trusted.read(now, SIGNATURE), json.loads(found)
        run = json.loads(b64decode(made["dsseEnvelope"]["payload"]))["predicate"]["runDetails"]
        if (made["verificationMaterial"], run["builder"]["id"]) != (signer.material, signer.builder or UNNAMED_BUILDER):
            return False
    except (BadSignature, ValueError, LookupError, TypeError):
        return False
    expected = {**files, PROVENANCE: hashlib.sha256(found).hexdigest()}
    return signed.files == expected and signed.statement["subject"][0]["name"] == name


def evidence(source: Source, path: str) -> bytes | None:
    """The bundle at ``path``, where there is one."""
    file = source.files().get(path)
    return None if file is None or file.size > EVIDENCE_MAX else read_file(source, file, EVIDENCE_MAX)


def _statement(
    plan: Plan,
    files: Mapping[str, str],
    levels: Mapping[str, Attestation],
    source: Source,
    name: str,
    builder: str,
) -> dict[str, Any]:
    left_out = {one.path for one in plan.left_out}
    listing = {path: file for path, file in source.files().items() if path not in left_out and not is_tool_file(path)}
    made_from = [_repository(pin) for pin in (plan.pin, plan.lender) if pin]
    made_from += [one for path, file in sorted(listing.items()) if (one := _listed(file, levels.get(path)))]
    for path in (PROVENANCE, SIGNATURE):
        if (bundle := evidence(source, path)) is not None:
            digest = {"sha256": hashlib.sha256(bundle).hexdigest()}
            content = b64encode(bundle).decode()
            made_from.append({"name": path, "mediaType": BUNDLE, "digest": digest, "content": content})
            break
    options = plan.options.content() | {"config_from": plan.lender.named if plan.lender else None}
    options.pop("sign", None)
    return _slsa(files, plan.pin, name, options, plan.digest, made_from, builder)


def tensors_of(plan: Plan, receipts: Mapping[str, Receipt], levels: Mapping[str, Attestation]) -> dict[str, Any]:
    """Which bytes of which source file each tensor was made from, by sha256 (docs/reference/tensors.schema.json).

    A tensor that is its source's bytes has one digest for both; of one that was put in order or dequantized only the
    result's is known.
    """
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for shard in plan.shards:
        told = made[shard.path] = {}
        for part in parts(shard.entries):
            if part.kept:
                continue
            written, *read = receipts[shard.digest].hashes[part.entry.name]
            one = told[part.entry.name] = {"sha256": written}
            if part.as_stored:
                one["from"] = [[place.file, place.start, place.stop] for place in part.ranges]
                one |= {"source_sha256": read[0]} if read else {}
    files = [
        {"path": file.path, "verified": levels.get(file.path, "as delivered")}
        | ({"sha256": file.sha256} if file.sha256 else {})
        for file in plan.read
    ]
    return {
        "_type": STATEMENT,
        "subject": [{"name": s.path, "digest": {"sha256": receipts[s.digest].sha256}} for s in plan.shards],
        "predicateType": TENSORS_PREDICATE,
        "predicate": {"source": uri_of(plan.pin), "files": files, "tensors": made},
    }


def of_manifest(manifest: Manifest, there: Source) -> dict[str, Any]:
    """The same, unsigned, as far as a manifest tells it: of the source's files only how they were checked."""
    files = {path: file.sha256 for path, file in manifest.files.items()}
    said, made = manifest.source, manifest.made
    pin = Pin(said.endpoint, said.repo or "", said.commit)
    checked = [{"name": path, "annotations": {"verified": level}} for path, level in said.files.items()]
    by = made.by.removeprefix("reshard ")
    return _slsa(files, pin, name_of(there), made.options, made.plan, [_repository(pin), *checked], None, by)


def _slsa(
    files: Mapping[str, str],
    pin: Pin,
    target: str,
    options: Mapping[str, Any],
    plan: str,
    made_from: Sequence[Mapping[str, Any]],
    builder: str | None,
    by: str = "",
) -> dict[str, Any]:
    """``builder`` None: nobody vouches for it."""
    run: dict[str, Any] = {
        "builder": {"id": builder or UNNAMED_BUILDER, "version": {"reshard": by or version("reshard")}},
        "metadata": {"finishedOn": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"} if builder is not None else {},
    }
    return {
        "_type": STATEMENT,
        "subject": [{"name": path, "digest": {"sha256": digest}} for path, digest in files.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"source": uri_of(pin), "target": target, "options": options},
                "internalParameters": {"layout": LAYOUT, "plan": plan},
                "resolvedDependencies": made_from,
            },
            "runDetails": run,
        },
    }


def uri_of(pin: Pin) -> str:
    """Where the source is; of what is on no Hub only the digest of its listing, because its path says nothing."""
    return f"git+{pin.endpoint}/{pin.repo}@{pin.commit}" if pin.endpoint else f"urn:reshard:listing:{pin.commit}"


def _repository(pin: Pin) -> dict[str, Any]:
    digest = {"digest": {"gitCommit": pin.commit}} if pin.endpoint else {}
    return {"uri": uri_of(pin), **({"name": pin.named} if pin.named else {}), **digest}


def _listed(file: StoredFile, level: Attestation | None) -> dict[str, Any] | None:
    """A file by the hash that its store lists; without one, how it was checked is all there is to tell."""
    digest = {"sha256": file.sha256} if file.sha256 else {"gitBlob": file.oid} if file.oid else {}
    told: dict[str, Any] = {"annotations": {"verified": level}} if level else {}
    if digest:
        told["digest"] = digest
    return {"name": file.path, **told} if told and file.path != CARD else None
