"""What a person may type, stated once: a command asks for a ``Request`` or an ``Output``, and its options appear.

A request's options are the fields of ``Options``: their names, choices, defaults and descriptions.
"""

from __future__ import annotations

import inspect
import re
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

from pydantic import BaseModel
from typer import Argument, Option, Typer

from reshard.cli import completion
from reshard.cli.help import HELP_ALL, OUTPUT, SectionedCommand, SectionedGroup
from reshard.cli.output import Output
from reshard.client.connect import asked_by, connect
from reshard.client.profiles import PROFILES
from reshard.pipeline.arguments import ACCESS, FILES, PUBLISHING, WEIGHTS, as_option
from reshard.pipeline.errors import BadPlace, BadRename, NoTarget, UsageError, shortened
from reshard.pipeline.limits import DEFAULT_SIZE, JOBS_MAX, RENAME_RULES_MAX, RENAME_TEXT_MAX
from reshard.pipeline.places import (
    CREDENTIAL,
    NOWHERE,
    REVISION,
    TYPED,
    AnyPlace,
    parse_place,
    require_branches,
)
from reshard.pipeline.renaming import Rule, parse_rules
from reshard.pipeline.request import Options, Request
from reshard.pipeline.sizes import SINGLE, parse_size
from reshard.worker.queue.states import JobState

PLACE = f"{TYPED}."
P = TypeVar("P", bound=BaseModel)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return Argument(metavar=metavar, help=help, show_default=False, **more)


def value(metavar: str | None, help: str, *names: str, section: str | None = None, **limits: Any) -> Any:
    """An option that takes a value and has none unless it is given, or else one that ``help`` states."""
    return Option(*names, metavar=metavar, help=help, show_default=False, rich_help_panel=section, **limits)


def flag(name: str, help: str, section: str | None = None) -> Any:
    """An option that is given or not; ``name`` may have a short form behind a slash, as "--quiet/-q" has."""
    return Option(*name.split("/"), help=help, rich_help_panel=section)


def read_output(
    json: Annotated[bool, flag("--json", "Print JSON, one document per line, including errors.", OUTPUT)] = False,
    quiet: Annotated[bool, flag("--quiet/-q", "Print only the essential values, for use in scripts.", OUTPUT)] = False,
) -> Output:
    if json and quiet:
        raise UsageError(what="--json and --quiet cannot be used together")
    return Output(json=json, quiet=quiet)


USES = ", ".join(PROFILES)

# Fields of Options that are typed otherwise than by their name and value; of those with a type, a request takes it.
_TYPED_OTHERWISE: dict[str, Any] = {
    "size": None, "visibility": None, "manifest": None, "ranks": None, "rename": Path | None, "config_from": str | None,
}  # fmt: skip

_TYPES = get_type_hints(Options)  # without their bounds: a request refuses a value by the option that took it


def option(name: str, help: str = "", section: str | None = None) -> Parameter:
    """What a command takes for this field of ``Options``; ``help`` and ``section`` are the field's."""
    field, declared = Options.model_fields[name], Options.declared(name)
    repeated = get_origin(field.annotation) is tuple and name not in _TYPED_OTHERWISE
    type_ = list[str] | None if repeated else _TYPED_OTHERWISE.get(name, _TYPES[name])
    default = None if repeated or name in _TYPED_OTHERWISE else field.default
    info = Option(
        *([as_option(name)] if field.annotation is bool else []),
        metavar=declared.value,
        help=help or f"{field.description}{' Can be repeated.' if repeated else ''}",
        show_default=field.default not in (None, ()) and "(default:" not in help,
        rich_help_panel=section or declared.section,
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, info])


def read_options(**typed: Any) -> dict[str, Any]:
    """The fields of ``Options`` that were typed, as far as they are typed by their names."""
    given = {name: value for name, value in typed.items() if value is not None}
    if rules := given.pop("rename", None):
        given["rename"] = read_rules(rules)
    if "config_from" in given:
        given["config_from"] = parse_place(given["config_from"])
    return given


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a file; raises BadRename."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(RENAME_RULES_MAX * 2 * RENAME_TEXT_MAX)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRename(rules=path, why=error.strerror if isinstance(error, OSError) else "not UTF-8") from error
    return parse_rules(text, str(path))


def read_request(
    source: Annotated[str, argument("SRC", f"The model: {PLACE}")],
    to: Annotated[str, value("DST", "The target: user/repo or a folder.", "--to")],
    size: Annotated[str | None, value("SIZE", f"{Options.model_fields['size'].description}  [default: 5GB]")] = None,
    for_: Annotated[
        str | None,
        value(
            "USE",
            f"Preset for --size ({USES}), or ranks to group tensors by, such as ep8 or pp4.",
            "--for",
            section=WEIGHTS,
        ),
    ] = None,
    single: Annotated[bool, flag("--single", "Write all weights to one file, regardless of --size.", WEIGHTS)] = False,
    revision: Annotated[str | None, value("REV", "Branch, tag or commit of the source.")] = None,
    credential: Annotated[
        str | None, value("NAME", "Use this credential from RESHARD_CREDENTIALS to read SRC.", section=ACCESS)
    ] = None,
    to_credential: Annotated[
        str | None, value("NAME", "Use this credential from RESHARD_CREDENTIALS to write to DST.", section=ACCESS)
    ] = None,
    public: Annotated[
        bool, flag("--public", "Create the target as a public repository, even if SRC is private or gated.", PUBLISHING)
    ] = False,
    private: Annotated[bool, flag("--private", "Create the target as a private repository.", PUBLISHING)] = False,
    no_manifest: Annotated[
        bool, flag("--no-manifest", "Do not publish a manifest. Without one, `reshard verify` needs SRC.", FILES)
    ] = False,
    help_all: Annotated[bool, HELP_ALL] = False,  # which answers by itself
    **options: Any,
) -> Request:
    """The request that was typed; raises the UsageError family. ``options`` are the other fields of ``Options``."""
    if public and private:
        raise UsageError(what="--public and --private cannot be used together")
    return Request(
        source=_by("--credential", credential, _source(source, revision)),
        target=_by("--to-credential", to_credential, _target(to, options.get("branch"), options.get("pr", False))),
        options=Options.called(
            as_option,
            {
                **_cut(size, for_, single),
                "visibility": "public" if public else "private" if private else "as-source",
                "manifest": not no_manifest,
                **read_options(**options),
            },
        ),
        asked_by=asked_by(),
    )


def _cut(size: str | None, use: str | None, single: bool) -> dict[str, Any]:
    ranks, use = (use, None) if use and re.match("(ep|pp)[0-9]", use) else ("", use)
    if use is not None and use not in PROFILES:
        raise UsageError(what=f"--for {use}: expected {USES}, or ranks such as ep8 or pp4")
    if single and (size is not None or use is not None or ranks):
        raise UsageError(what="--single writes one file, so it cannot be used with --size or --for")
    if use is not None and size is not None:
        why = f"{use} is itself a size; ranks such as ep8 can be used with --size"
        raise UsageError(what=f"--size and --for {use} cannot be used together: {why}")
    if use is not None:
        return {"size": PROFILES[use]}
    return {"size": SINGLE if single else DEFAULT_SIZE if size is None else parse_size(size), "ranks": ranks}


def _source(value: str, revision: str | None) -> AnyPlace:
    place = parse_place(value)
    if revision is None:
        return place
    if not place.branch:
        raise UsageError(
            what=f"--revision {revision}: only repositories have revisions, and {value} is not a repository"
        )
    try:
        REVISION.checked(revision)
    except ValueError as error:
        raise UsageError(what=f"--revision {shortened(revision)}: {error}") from None
    if place not in (place.at(None), place.at(revision)):
        raise UsageError(what=f"{value} and --revision {revision} name different revisions")
    return place.at(revision)


def _target(value: str, branch: str | None, pr: bool) -> AnyPlace:
    try:
        place = parse_place(value)
    except BadPlace as bad:
        if value.strip() and "/" not in value:
            bad.facts["cure"] = f"use --to user/repo, or --to {shlex.quote(f'./{value}')} for a folder"
        raise
    if branch and pr:
        raise UsageError(what="--branch and --pr cannot be used together: a pull request targets the default branch")
    if branch or pr:
        require_branches(place, value)
    if place != place.at(None):
        raise UsageError(what=f"--to {value}: a target cannot have a revision; use --branch for a branch")
    return place


def _by(option: str, credential: str | None, place: P) -> P:
    """The place, read or written by that credential."""
    if credential is None:
        return place
    if "credential" not in type(place).model_fields:
        raise UsageError(what=f"{option}: credentials are only for repositories, and {place} is not a repository")
    try:
        return place.model_copy(update={"credential": CREDENTIAL.checked(credential)})
    except ValueError as error:
        raise UsageError(what=f"{option}: {error}") from None


def read_plan(**typed: Any) -> Request:
    """``read_request``; without a --to the target is NOWHERE, and what only a repository takes is dropped."""
    nowhere = {"to": NOWHERE.path, "to_credential": None, "branch": None, "pr": False}
    return read_request(**typed | (nowhere if typed["to"] is None else {}))


def read_limits(
    at_once: Annotated[
        int | None, value("N", "Maximum number of the catalog's jobs to run at once (default: 8).", min=1)
    ] = None,
    max_failures: Annotated[int | None, value("N", "Stop the catalog after more than N failures.", min=0)] = None,
    max_bytes: Annotated[str | None, value("SIZE", "Stop the catalog after reading this much weight data.")] = None,
) -> dict[str, int]:
    """The limits that are given, as fields of a catalog's ``Definition``."""
    size = parse_size(max_bytes, "--max-bytes") if max_bytes is not None else None
    typed = {"at_once": at_once, "max_failures": max_failures, "max_bytes": size}
    return {name: value for name, value in typed.items() if value is not None}


def read_request_or_catalog(**typed: Any) -> Request | tuple[Path, dict[str, int]]:
    """``read_request``, or a catalog's file with its limits; raises UsageError, which names what is in excess."""
    request = {name: typed[name] for name in _REQUEST}
    limits = {name: typed[name] for name in _LIMITS}
    given = [name for name, value in request.items() if value not in (None, [], _REQUEST[name].default)]
    given = ["SRC" if name == "source" else as_option(name.rstrip("_")) for name in given]
    limited = [as_option(name) for name, value in limits.items() if value is not None]
    if typed["catalog"] is not None:
        if given:
            raise UsageError(what=f"--catalog FILE defines the whole submission; remove {', '.join(given)}")
        return typed["catalog"], read_limits(**limits)
    if not given and not limited:
        raise UsageError(what="nothing to submit: pass SRC and --to, or --catalog FILE")
    if limited:
        raise UsageError(what=f"{', '.join(limited)}: only valid with --catalog FILE")
    if typed["source"] is None:
        raise UsageError(what="SRC is missing" if typed["to"] else "SRC and --to are missing")
    if typed["to"] is None:
        raise NoTarget
    return read_request(**request)


def read_filter(
    state: Annotated[list[JobState] | None, value("STATE", "Filter by state. Can be repeated.")] = None,
    source: Annotated[str | None, value("GLOB", "Filter by source, such as 'them/*'.")] = None,
    target: Annotated[str | None, value("GLOB", "Filter by target.")] = None,
    by: Annotated[str | None, value("NAME", "Filter by submitter.")] = None,
    catalog: Annotated[str | None, value("NAME", "Filter by catalog.")] = None,
    code: Annotated[str | None, value("CODE", "Filter by error code.")] = None,
    since: Annotated[str | None, value("AGE", "Only jobs newer than this, such as 12h or 7d.")] = None,
) -> dict[str, Any]:
    """The fields of ``Filter`` that were typed; raises UsageError."""
    typed: dict[str, Any] = {"source": source, "target": target, "by": by, "catalog": catalog, "code": code}
    given = {name: value for name, value in (typed | {"since": since}).items() if value is not None}
    if empty := next((name for name, value in given.items() if not value.strip()), ""):  # which would be no filter
        raise UsageError(what=f"--{empty}: empty; is a shell variable unset?")
    if since is not None:
        given["since"] = time.time() - parse_age(since, "--since")
    return given | ({"state": [*dict.fromkeys(state)]} if state else {})


class Choice(NamedTuple):
    """Jobs that are named, or the fields of ``Chosen`` that choose them."""

    jobs: list[str]
    fields: dict[str, Any]
    dry_run: bool
    yes: bool


def read_choice(
    jobs: Annotated[
        list[str] | None, argument("JOB", "Job IDs or unique prefixes.", autocompletion=completion.jobs)
    ] = None,
    all_: Annotated[bool, flag("--all", "Apply the command to all eligible jobs.")] = False,
    older_than: Annotated[
        str | None, value("AGE", "Only jobs that have been in their current state for at least this long, such as 30d.")
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Show which jobs would be affected, without changing them.")] = False,
    yes: Annotated[bool, flag("--yes/-y", "Skip the confirmation prompt for selected jobs.")] = False,
    **filter: Any,
) -> Choice:
    """The jobs that were typed; raises UsageError."""
    fields = read_filter(**filter)
    if older_than is not None:
        fields["age"] = parse_age(older_than, "--older-than")
    ways = sum(map(bool, (jobs, fields, all_)))
    if not ways:
        raise UsageError(what="pass JOB IDs, select jobs with --state, --source or another filter, or use --all")
    if ways > 1:
        raise UsageError(what="JOB IDs, filters and --all cannot be used together")
    return Choice(jobs or [], fields or {"all": True}, dry_run, yes)


_SECONDS = {"min": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str, option: str) -> float:
    """Seconds; raises UsageError."""
    match = re.fullmatch(r"(\d{1,9}) ?(min|h|d|w)", text.strip(), re.ASCII)
    if match is None or not int(match[1]):  # none is no age, which would choose all
        raise UsageError(what=f"{option} {text}: invalid duration; use a value such as 30min, 12h, 7d or 4w")
    return float(match[1]) * _SECONDS[match[2]]


# ------------------------------------------------------------------------------------- from signatures to options


Jobs = Annotated[
    int | None,
    value(
        "N",
        "Maximum number of source files to copy at once; fewer if memory or disk is low (default: half the CPU cores).",
        section=ACCESS,
        min=1,
        max=JOBS_MAX,
    ),
]
Verbose = Annotated[bool, flag("--verbose/-v", "Show the full plan and the details of each check.", OUTPUT)]
Command = Callable[..., None]


# What every command has that names it, the session open until it ends; the queue is asked once all options are read.
_USUAL: dict[str, Callable[..., Any]] = {"output": read_output, "session": connect}


def takes(**readers: Callable[..., Any]) -> Callable[[Command], Command]:
    """Gives a command the options of each reader in place of the parameter that the reader's result fills."""

    def wrap(command: Command) -> Command:
        parameters = _parameters(command)
        used = {name: reader for name, reader in (readers | _USUAL).items() if name in parameters}
        shown: list[Parameter] = []
        for name in sorted(parameters, key=lambda name: name in _USUAL):  # help has the command's own options first
            shown += _parameters(used[name]).values() if name in used else [parameters[name]]

        def run(**typed: Any) -> None:
            with ExitStack() as opened:
                for name, reader in used.items():
                    read = reader(**{p: typed.pop(p) for p in _parameters(reader)})
                    typed[name] = opened.enter_context(read) if reader is connect else read
                command(**typed)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in shown}
        sign(run, shown)
        return run

    return wrap


def commands(name: str, help: str) -> tuple[Typer, Callable[..., Callable[[Command], Command]]]:
    """A group of commands, and what makes functions commands of it, each of which ``takes`` what its readers read."""
    group = Typer(name=name, cls=SectionedGroup, help=help, no_args_is_help=True)

    def command(name: str, **readers: Callable[..., Any]) -> Callable[[Command], Command]:
        return lambda function: group.command(name, cls=SectionedCommand)(takes(**readers)(function))

    return group, command


def _parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def sign(function: Any, more: Iterable[Parameter]) -> None:
    """Has ``inspect.signature``, of which Typer makes options, say ``more`` in place of the function's keywords."""
    own = [p for p in _parameters(function).values() if p.kind is not Parameter.VAR_KEYWORD]
    function.__signature__ = Signature([p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*own, *more)])


def _optional(parameter: Parameter, info: Any = None) -> Parameter:
    """The same, but it may be left out."""
    info = info or parameter.annotation.__metadata__[0]
    return parameter.replace(default=None, annotation=Annotated[str | None, info])


sign(read_choice, _parameters(read_filter).values())
sign(read_request, (option(name) for name in Options.model_fields if _TYPED_OTHERWISE.get(name, name)))
_REQUEST, _LIMITS = _parameters(read_request), _parameters(read_limits)
_to = _optional(_REQUEST["to"], value("DST", "The target; without it, plan only how SRC would be split.", "--to"))
sign(read_plan, (_REQUEST | {"to": _to}).values())
_file = Annotated[Path | None, value("FILE", "Submit this catalog instead of SRC.")]
_either = _REQUEST | {name: _optional(_REQUEST[name]) for name in ("source", "to")}
_either["catalog"] = Parameter("catalog", Parameter.KEYWORD_ONLY, default=None, annotation=_file)
sign(read_request_or_catalog, [*_either.values(), *_LIMITS.values()])
