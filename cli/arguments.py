"""What a person may type, said once: a command asks for a ``Request`` or an ``Output``, and its options appear."""

from __future__ import annotations

import getpass
import inspect
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from reshard.cli.output import Output
from reshard.cli.profiles import PROFILES
from reshard.pipeline.errors import UsageError
from reshard.pipeline.limits import DEFAULT_SIZE
from reshard.pipeline.places import Folder, Hub, check_credential, parse_place
from reshard.pipeline.request import SINGLE, Options, Request, parse_size


class Use(StrEnum):
    """`PROFILES` has the same names."""

    browser = "browser"
    fat32 = "fat32"
    colab = "colab"
    hub = "hub"


class Oversize(StrEnum):
    own_shard = "own-shard"
    fail = "fail"


class Pack(StrEnum):
    greedy = "greedy"
    balanced = "balanced"
    layers = "layers"


class DType(StrEnum):
    keep = "keep"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Ties(StrEnum):
    keep = "keep"
    source = "source"


class Require(StrEnum):
    any = "any"
    model = "model"


class Transport(StrEnum):
    auto = "auto"
    xet = "xet"
    http = "http"


class Priority(StrEnum):
    interactive = "interactive"
    bulk = "bulk"


Job = Annotated[str, Argument(metavar="JOB", help="A job's id, or the start of one.", show_default=False)]


_TO = Option("--to", metavar="DST", help="Where it goes: user/repo, or a folder.", show_default=False)
_OPTIONAL_TO = Annotated[
    str | None,
    Option("--to", metavar="DST", help="Where it would go; left out, SRC itself.", show_default=False),
]


def read_output(
    json: Annotated[bool, Option("--json", help="Write JSON, one document per line, errors included.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Write only what a script needs.")] = False,
) -> Output:
    if json and quiet:
        raise UsageError(what="--json and --quiet exclude each other")
    return Output(json=json, quiet=quiet)


def read_request(
    source: Annotated[
        str,
        Argument(
            metavar="SRC",
            help="Where the model is: user/repo, user/repo@revision, a URL of the Hub, or a folder (./path, /path).",
            show_default=False,
        ),
    ],
    to: Annotated[str, _TO],
    size: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="The most bytes a file may have: 200MB is 200,000,000, 200MiB 209,715,200.  [default: 5GB]",
            show_default=False,
        ),
    ] = None,
    for_: Annotated[
        Use | None, Option("--for", help="The size that suits this use, in place of --size.", show_default=False)
    ] = None,
    single: Annotated[bool, Option("--single", help="Everything in one file, in place of --size.")] = False,
    oversize: Annotated[
        Oversize, Option(help="A tensor larger than SIZE gets a file of its own, or fails the job.")
    ] = Oversize.own_shard,
    pack: Annotated[
        Pack,
        Option(
            help="Which tensors share a file: greedy fills one after the other in source order, balanced makes files"
            " of about one size, layers keeps a model's block in one file."
        ),
    ] = Pack.greedy,
    dtype: Annotated[
        DType, Option(help="Cast wider floating tensors to this; narrower, fp8, packed and integer ones stay.")
    ] = DType.keep,
    strict_dtype: Annotated[
        bool, Option("--strict-dtype", help="Fail where a cast makes a finite value infinite.")
    ] = False,
    ties: Annotated[
        Ties, Option(help="Tied weights of .bin files: keep every name, or only the one that the others are tied to.")
    ] = Ties.keep,
    strip_prefix: Annotated[
        str | None,
        Option(metavar="PREFIX", help="Take this off tensor names; auto: the wrappers they show.", show_default=False),
    ] = None,
    config_from: Annotated[
        str | None,
        Option(metavar="PLACE", help="Config and tokenizer from here, where SRC has none.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, Option(metavar="REV", help="Branch, tag or commit of the source.", show_default=False)
    ] = None,
    credential: Annotated[
        str | None,
        Option(metavar="NAME", help="Read SRC by this one of RESHARD_CREDENTIALS.", show_default=False),
    ] = None,
    to_credential: Annotated[
        str | None,
        Option(metavar="NAME", help="Write DST by this one of RESHARD_CREDENTIALS.", show_default=False),
    ] = None,
    include: Annotated[
        list[str] | None,
        Option(metavar="GLOB", help="Carry these files too. May be given again.", show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Option(metavar="GLOB", help="Do not carry these files. May be given again.", show_default=False),
    ] = None,
    branch: Annotated[
        str | None, Option(metavar="BRANCH", help="Commit to this branch of the target.", show_default=False)
    ] = None,
    pr: Annotated[bool, Option("--pr", help="Open a pull request on the target.")] = False,
    public: Annotated[bool, Option("--public", help="The target may be seen by everyone.")] = False,
    private: Annotated[bool, Option("--private", help="A new target is private.")] = False,
    prune: Annotated[bool, Option("--prune", help="Also remove the target's files that the source does not have.")] = (
        False
    ),
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace what others changed since our last publication.")
    ] = False,
    lineage: Annotated[bool, Option("--lineage", help="Name the source as base_model in the model card.")] = False,
    no_manifest: Annotated[
        bool,
        Option("--no-manifest", help="Publish no manifest, by which the result can be checked without its source."),
    ] = False,
    force: Annotated[bool, Option("--force", help="Do it again even if the same was published before.")] = False,
    require: Annotated[
        Require, Option(help="model: refuse unless the model's own class can judge the result.")
    ] = Require.any,
    transport: Annotated[
        Transport, Option(help="How weights travel: xet where the Hub speaks it, http otherwise, or one of the two.")
    ] = Transport.auto,
) -> Request:
    """The request that these words make; raises the UsageError family."""
    if public and private:
        raise UsageError(what="--public and --private exclude each other")
    return Request(
        source=_by("--credential", credential, _source(source, revision)),
        target=_by("--to-credential", to_credential, _target(to, branch, pr)),
        options=Options(
            size=_size(size, for_, single),
            oversize=oversize.value,
            pack=pack.value,
            dtype=dtype.value,
            strict_dtype=strict_dtype,
            ties=ties.value,
            strip_prefix=strip_prefix,
            config_from=parse_place(config_from) if config_from else None,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            branch=branch,
            pr=pr,
            visibility="public" if public else "private" if private else "as-source",
            prune=prune,
            overwrite=overwrite,
            lineage=lineage,
            manifest=not no_manifest,
            force=force,
            require=require.value,
            transport=transport.value,
        ),
        asked_by=asked_by(),
    )


def _size(size: str | None, use: Use | None, single: bool) -> int:
    if sum((size is not None, use is not None, single)) > 1:
        raise UsageError(what="of --size, --for and --single one at most makes sense")
    if use is not None:
        return PROFILES[use.value].size
    if single:
        return SINGLE
    return DEFAULT_SIZE if size is None else parse_size(size)


def asked_by() -> str:
    """Who types here, for the record."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def read_in_place(**typed: Any) -> Request:
    """``read_request`` for which a missing --to means the source itself."""
    return read_request(**typed | {"to": typed["to"] or _without_revision(typed["source"])})


@dataclass(frozen=True)
class Limits:
    """How much of a catalog at once and at most; None: as it is when nobody says."""

    at_once: int | None
    max_failures: int | None
    max_bytes: int | None


def read_limits(
    *,
    at_once: Annotated[
        int | None, Option(min=1, help="The most jobs of a catalog at work at a time; left out, 8.", show_default=False)
    ] = None,
    max_failures: Annotated[
        int | None, Option(min=0, help="Stop a catalog when more models than this have failed.", show_default=False)
    ] = None,
    max_bytes: Annotated[
        str | None,
        Option(metavar="SIZE", help="Stop a catalog once so many bytes of weights were read.", show_default=False),
    ] = None,
) -> Limits:
    return Limits(at_once, max_failures, parse_size(max_bytes, "--max-bytes") if max_bytes is not None else None)


def read_request_or_catalog(**typed: Any) -> Request | tuple[Path, Limits]:
    """``read_request``, or a catalog's file with its limits; raises UsageError, which names what is in excess."""
    parameters = inspect.signature(read_request).parameters
    limits = inspect.signature(read_limits).parameters
    request = {name: typed[name] for name in parameters}
    said = [_typed_as(name) for name, value in request.items() if value not in (None, [], parameters[name].default)]
    limited = [_typed_as(name) for name in limits if typed[name] is not None]
    if typed["catalog"] is not None:
        if said:
            raise UsageError(what=f"--catalog says all that is submitted: leave out {', '.join(said)}")
        return typed["catalog"], read_limits(**{name: typed[name] for name in limits})
    if not said and not limited:
        raise UsageError(what="it is not said what to submit: give SRC and --to, or --catalog FILE")
    if limited:
        raise UsageError(what=f"{', '.join(limited)}: only a catalog has this; give --catalog FILE, or leave it out")
    missing = [_typed_as(name) for name in ("source", "to") if typed[name] is None]
    if missing:
        raise UsageError(what=f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return read_request(**request)


def _typed_as(parameter: str) -> str:
    """What a person types for it."""
    return "SRC" if parameter == "source" else f"--{parameter.rstrip('_').replace('_', '-')}"


def _without_revision(source: str) -> str:
    place = parse_place(source)
    if isinstance(place, Folder):
        return place.path
    return f"{place.endpoint}/{place.repo}" if place.endpoint else place.repo


def _with_optional_to(signature: inspect.Signature) -> inspect.Signature:
    parameters = dict(signature.parameters)
    parameters["to"] = parameters["to"].replace(default=None, annotation=_OPTIONAL_TO)
    return signature.replace(parameters=[p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()])


def _with_nothing_required(signature: inspect.Signature) -> inspect.Signature:
    parameters = dict(signature.parameters)
    source, to = parameters["source"].annotation, parameters["to"].annotation
    parameters["source"] = parameters["source"].replace(
        default=None, annotation=Annotated[str | None, *source.__metadata__]
    )
    parameters["to"] = parameters["to"].replace(default=None, annotation=Annotated[str | None, *to.__metadata__])
    file = Option(metavar="FILE", help="Submit this catalog, as it is now, instead of SRC.", show_default=False)
    parameters["catalog"] = inspect.Parameter(
        "catalog", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file]
    )
    parameters |= inspect.signature(read_limits, eval_str=True).parameters
    return signature.replace(parameters=[p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()])


def _sign(function: Any, signature: inspect.Signature) -> None:
    """What ``inspect.signature`` says of the function from now on; Typer makes a command's options of it."""
    function.__signature__ = signature


_sign(read_request_or_catalog, _with_nothing_required(inspect.signature(read_request, eval_str=True)))
_sign(read_in_place, _with_optional_to(inspect.signature(read_request, eval_str=True)))


def _source(value: str, revision: str | None) -> Hub | Folder:
    place = parse_place(value)
    if revision is None:
        return place
    if isinstance(place, Folder):
        raise UsageError(what=f"--revision {revision}: a folder has no revisions")
    if place.revision not in {None, revision}:
        raise UsageError(what=f"{value} and --revision {revision} name two revisions")
    return place.model_copy(update={"revision": revision})


def _target(value: str, branch: str | None, pr: bool) -> Hub | Folder:
    place = parse_place(value)
    if branch and pr:
        raise UsageError(what="--branch and --pr exclude each other: a pull request goes to the default branch")
    if isinstance(place, Folder) and (branch or pr):
        raise UsageError(what=f"{value} is a folder, which has neither branches nor pull requests")
    if isinstance(place, Hub) and place.revision:
        raise UsageError(what=f"--to {value}: a target has no revision; name a branch with --branch")
    return place


def _by(option: str, credential: str | None, place: Hub | Folder) -> Hub | Folder:
    """The place, read or written by that credential."""
    if credential is None:
        return place
    if isinstance(place, Folder):
        raise UsageError(what=f"{option}: {place} is a folder, which needs none")
    try:
        return place.model_copy(update={"credential": check_credential(credential)})
    except ValueError as error:
        raise UsageError(what=f"{option}: {error}") from None


def takes(**readers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of each reader in place of the parameter that the reader's result fills."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        shown: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            reader = readers.get(parameter.name)
            shown += inspect.signature(reader, eval_str=True).parameters.values() if reader else [parameter]

        def run(**typed: Any) -> None:
            for name, reader in readers.items():
                typed[name] = reader(**{p: typed.pop(p) for p in inspect.signature(reader).parameters})
            command(**typed)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in shown}
        _sign(run, inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in shown]))
        return run

    return wrap
