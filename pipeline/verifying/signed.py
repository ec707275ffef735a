"""The signatures of a publication: whose they are, whether they are of these files, and where those came from."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from reshard.pipeline.check import Check, Result, first, some
from reshard.pipeline.checkpoint.tool_files import FOLDERS, is_tool_file, is_tool_folder
from reshard.pipeline.errors import BadSignature, NotSigned, SignedElsewhere
from reshard.pipeline.planning.model import PROVENANCE, SIGNATURE
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.provenance import PREDICATE, evidence, sha256_of
from reshard.pipeline.publishing.signing import BUNDLE, Signed, Trusted, is_covered
from reshard.pipeline.text import counted, printable

_MODEL = "https://model_signing/signature/v1.0"  # what the package calls the signature of a model
_FILES, _ORIGIN = "sha256 of every file, against the signature", "the signed statement of what it was made from"


def check_signatures(output: Source, trusted: Trusted, builder: str | None, deep: bool) -> list[Check]:
    """Whether ``model.sig`` is of just these files, and what the signed provenance says, made by ``builder`` if given.

    A sha256 that the store lists, as Hubs do of large files, is believed unless ``deep``; all others are read. Raises
    BadSignature where nobody trusted signed, SignedElsewhere where it was another repository.
    """
    signature = _read(output, SIGNATURE, trusted)
    signed, name = signature.files, signature.statement["subject"][0]["name"]
    if signature.statement["predicateType"] != _MODEL:
        raise BadSignature(file=SIGNATURE, why="it is another statement, not a model signature")
    if output.pin.named not in (None, name):
        raise SignedElsewhere(file=SIGNATURE, place=output.pin.named, name=name)
    listed = {path: file for path, file in output.files().items() if is_covered(path)}
    findings = [f"{path} was signed but is missing" for path in sorted(signed.keys() - listed.keys())]
    unsigned = (listed.keys() | _unlisted(output)) - signed.keys()
    findings += [f"{printable(path)} is not signed" for path in sorted(unsigned)]
    known = {path: file.sha256 for path, file in listed.items() if file.sha256 and not deep}
    for path in sorted(signed.keys() & listed.keys()):
        if (known.get(path) or sha256_of(output, output.files()[path])) != signed[path]:
            findings.append(f"{path} has different bytes than were signed")
    reason = f"signed by {signature.by} as {name}{_expired(signature)}"
    if known:
        reason += f"; {counted(len(known), 'file')} compared by the Hub's hash (--deep reads the bytes)"
    figures = {"files": len(signed), "by_the_hub": len(known)}
    check = Check("signature", "failed" if findings else "passed", _FILES, reason, figures, some(findings))
    return [check, _provenance(output, trusted, builder, signed)]


def _unlisted(output: Source) -> set[str]:
    """What the source does not list of a folder although a signature covers it: folders of tools below others.

    No links are followed, and what cannot be read is listed by the path of its folder.
    """
    folder = output.place.local
    if folder is None or not folder.is_dir():
        return set()
    found: set[str] = set()
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(folder / above) as entries:
                for entry in entries:
                    path = above + entry.name
                    if entry.is_dir(follow_symlinks=False) and path not in FOLDERS:
                        waiting.append(f"{path}/")
                    elif is_tool_folder(path) or is_tool_file(path):
                        found.add(path)
        except OSError:
            found.add(above.rstrip("/") or ".")
    return {path for path in found if is_covered(path)} - output.files().keys()


def _provenance(output: Source, trusted: Trusted, builder: str | None, signed: Mapping[str, str]) -> Check:
    if PROVENANCE not in signed or PROVENANCE not in output.files():
        if builder is None:
            said = "it is missing" if PROVENANCE in signed else "none was published"
            return Check("provenance", "skipped", _ORIGIN, said)
        return Check("provenance", "failed", _ORIGIN, "", {}, (f"no {PROVENANCE}, so nothing says who built it",))
    statement = _read(output, PROVENANCE, trusted).statement
    try:
        told = _told(statement)
        subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        steps, broken = _chain(statement, trusted)
    except (LookupError, TypeError, AttributeError, ValueError):
        return Check("provenance", "failed", _ORIGIN, "", {}, (f"{PROVENANCE} is not SLSA provenance v1",))
    findings = []
    if builder not in (None, told.builder):
        findings.append(f"it was built by {told.builder}, not by {builder}")
    if subjects != {path: digest for path, digest in signed.items() if path != PROVENANCE}:
        findings.append(f"{PROVENANCE} describes different files than {SIGNATURE}")
    reason = f"built by {told.builder} on {told.finished}, from {told.source}"
    reason += "".join(f", {step}" for step in steps) + (f"; {broken}" if broken else "")
    result: Result = "failed" if findings else "inconclusive" if broken else "passed"
    return Check("provenance", result, _ORIGIN, reason, {"links": len(steps)}, tuple(findings))


class _Told(NamedTuple):
    source: str
    builder: str
    finished: str


def _told(statement: Mapping[str, Any]) -> _Told:
    predicate = statement["predicate"]
    run = predicate["runDetails"]
    source = predicate["buildDefinition"]["externalParameters"]["source"]
    if statement["predicateType"] != PREDICATE:
        raise ValueError(statement["predicateType"])
    return _Told(source, run["builder"]["id"], run["metadata"]["finishedOn"])


def _chain(statement: Mapping[str, Any], trusted: Trusted) -> tuple[list[str], str]:
    """The links behind ``statement``, nearest first, and where the chain breaks, if it does.

    Follows the sources' own statements, which ours carry, to the first source that has none. A link holds if someone
    trusted signed it, about the repository that was read, with each sha256 that was listed.
    """
    steps: list[str] = []
    while statement["predicateType"] == PREDICATE:
        source, made_from = _told(statement).source, statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        carried = next((one for one in made_from if one.get("mediaType") == BUNDLE), None)
        if carried is None:
            return [*steps, "which has no statement of its own"], ""
        try:
            link = trusted.read(b64decode(carried["content"]), carried["name"])
        except BadSignature as error:
            return steps, f"the chain breaks at {source}: {error}"
        if broken := _breaks(link, [one for one in made_from if one is not carried]):
            return steps, f"the chain breaks at {source}: {broken}"
        statement = link.statement
        by = f"signed by {link.by}{_expired(link)}"
        built = statement["predicateType"] == PREDICATE
        steps.append(f"{by} and built from {_told(statement).source}" if built else f"{by} as the origin")
    return steps, ""


def _breaks(link: Signed, made_from: list[dict[str, Any]]) -> str:
    """Why ``link`` is not about what was read; empty where it is."""
    if link.statement["predicateType"] == PREDICATE:  # an author's own tool may call the model as it likes
        target = link.statement["predicate"]["buildDefinition"]["externalParameters"]["target"]
        if made_from[0].get("name") not in (None, target):
            return f"its statement is about {target}"
    read = {one["name"]: digest for one in made_from[1:] if (digest := one.get("digest", {}).get("sha256"))}
    if not read:
        return "no sha256 of its files was listed"
    if other := sorted(path for path, digest in read.items() if link.files.get(path) != digest):
        return f"its statement lists different bytes than were read for {first(other)}"
    return ""


def _read(output: Source, path: str, trusted: Trusted) -> Signed:
    if (bundle := evidence(output, path)) is None:
        if path not in output.files():
            raise NotSigned(place=str(output.place), file=path)
        raise BadSignature(file=path, why="it is too large to be a signature")
    return trusted.read(bundle, path)


def _expired(signed: Signed) -> str:
    """Nothing says reliably when it was signed, so this is for people to judge."""
    over = signed.until is not None and signed.until < datetime.now(UTC)
    return f" (its certificate expired on {signed.until:%Y-%m-%d})" if over else ""
