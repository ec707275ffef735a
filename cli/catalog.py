"""`reshard catalog ...`: many models by one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option, Typer

from reshard.cli.arguments import Limits, asked_by, read_limits, read_output, takes
from reshard.cli.jobs import missing, open_store
from reshard.cli.outcome import moved
from reshard.cli.output import Output, ago, count, finds_none, human_bytes, lines, succeeded
from reshard.cli.waits import waits
from reshard.pipeline.errors import EntriesWrong, FolderNotWritable, NoBroker, NoSuchFailures, UsageError
from reshard.pipeline.places import Hub

if TYPE_CHECKING:
    from reshard.pipeline.catalogs.definition import Catalog
    from reshard.pipeline.catalogs.expand import Wanted
    from reshard.pipeline.stores.retry import RateLimiter
    from reshard.worker.followers.catalogs import Catalogs
    from reshard.worker.followers.records import CatalogStatus as Seen
    from reshard.worker.followers.records import Definition, Standing
    from reshard.worker.queue.jobs import JobStore

SHOWN = 20  # lines of one kind; --json has all of them
SUBMIT_AGAIN = "mend the file, then `reshard catalog submit FILE`"

File = Annotated[Path, Argument(metavar="FILE", help="The catalog, a YAML file.", show_default=False)]
Name = Annotated[str, Argument(metavar="NAME", help="The catalog's name.", show_default=False)]

catalog = Typer(
    name="catalog",
    help="Keep many models in a cut of your own, by one YAML file.",
    no_args_is_help=True,
)


def read_catalog(file: Path) -> tuple[str, Catalog]:
    """The file's text and what it says; raises UsageError, BadCatalog."""
    from reshard.pipeline.catalogs.definition import parse

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(what=f"{file} cannot be read: {error}") from None
    return text, parse(text, str(file))


def read_definition(file: Path, limits: Limits) -> Definition:
    """The file as it is submitted; raises UsageError, BadCatalog."""
    from reshard.worker.followers.records import Definition

    text, parsed = read_catalog(file)
    given = {name: value for name, value in asdict(limits).items() if value is not None}
    return Definition(name=parsed.name, text=text, asked_by=asked_by(), **given)


@contextmanager
def _open() -> Iterator[tuple[JobStore, Catalogs]]:
    from reshard.worker.followers.catalogs import Catalogs

    with open_store() as store:
        yield store, Catalogs(store)


@catalog.command("check")
@takes(output=read_output)
def check(file: File, output: Output) -> None:
    """Show what a catalog comes to now, and queue nothing. Asks the Hub with your own token."""
    from reshard.pipeline.catalogs.expand import expand
    from reshard.pipeline.doctor.probes import unwritable
    from reshard.pipeline.stores.connect import Context

    _, parsed = read_catalog(file)
    calls = Counter[str]()
    context = Context.from_env(_counted(calls))
    found = expand(parsed, context)
    wanted = found.models
    denied = list(unwritable(_targets(wanted), context))
    stands = _standings(parsed.name, wanted)
    facts: dict[str, Any] = {
        "catalog": parsed.name,
        "models": len(wanted),
        "empty": found.empty,
        "unwritable": denied,
        "ready": sum(one.error is None for one in wanted),
        "new": sum(one.error is None and one.target is None for one in wanted),
        "gated": [one.repo for one in wanted if one.source and one.source.gated],
        "bytes": sum(one.source.bytes for one in wanted if one.source and one.error is None),
        "growth": _growth(wanted, stands),
        "calls": calls.total(),
        "unchanged": None if stands is None else stands.count("unchanged"),
        "drift": None
        if stands is None
        else [one.repo for one, stand in zip(wanted, stands, strict=True) if stand == "target"],
        "wrong": [{"repo": one.repo, **one.error.to_dict()} for one in wanted if one.error],
        "entries": [_entry(one) for one in wanted],
    }
    output.result(facts, lines(_told(facts)), str(facts["ready"]))
    if facts["wrong"]:
        raise EntriesWrong(file=str(file), count=count(len(facts["wrong"]), "model"))


@catalog.command("submit")
@takes(limits=read_limits, output=read_output)
def submit(
    *,
    file: File,
    limits: Limits,
    output: Output,
) -> None:
    """Queue every model of a catalog that changed, a few at a time; returns at once."""
    definition = read_definition(file, limits)
    with _open() as (store, catalogs):
        started = catalogs.submit(definition)
        for kind in missing(store.processes()):
            output.say(Text(f"no {kind} is running: start one with `reshard {kind}`, or all of it with `reshard up`"))
        if why := waits(store, bulk=True):
            output.say(Text(why))
    name = definition.name
    said = f"catalog {name} is {'submitted' if started else 'under way already'}"
    facts = {"catalog": name, "digest": definition.digest, "existed": not started, "waits": why}
    output.result(facts, Text(f"{said}\nfollow it with `reshard catalog status {name}`"), name)


@catalog.command("status")
@takes(output=read_output)
def status(
    *,
    name: Annotated[str | None, Argument(metavar="NAME", help="A catalog's name.", show_default=False)] = None,
    report: Annotated[
        Path | None, Option(metavar="FILE", help="Write a report in Markdown there.", show_default=False)
    ] = None,
    output: Output,
) -> None:
    """Show how far a catalog is, or without NAME all of them."""
    if report and name is None:
        raise UsageError(what="--report is about one catalog: give its NAME")
    with _open() as (_, catalogs):
        found = [catalogs.get(name) for name in ([name] if name else catalogs.names())]
    if report:
        from reshard.cli.catalog_report import markdown

        try:
            report.write_text(markdown(found[0]), encoding="utf-8")
        except OSError as error:
            raise FolderNotWritable(path=str(report), why=error.strerror or str(error)) from error
    if output.json:
        for seen in found:
            output.document(seen.to_dict())
    elif name:
        output.text(lines(_status(found[0])), found[0].state)
    else:
        names = [seen.definition.name for seen in found]
        rows = [
            (name, seen.state, ago(seen.since), succeeded(seen.success), _counts(seen))
            for name, seen in zip(names, found, strict=True)
        ]
        output.text(lines(rows) if rows else Text("no catalogs"), "\n".join(names))


@catalog.command("failures")
@takes(output=read_output)
def failures(name: Name, output: Output) -> None:
    """Show what failed, by error code, with what to do about it."""
    with _open() as (_, catalogs):
        groups = catalogs.get(name).failures()
    facts = {
        code: [{"repo": repo, "job": ended.job, **(ended.error or {})} for repo, ended in group]
        for code, group in groups.items()
    }
    rows = []
    for code, group in facts.items():
        alike = len({item["hint"] for item in group}) == 1  # most name the model
        rows.append((code, count(len(group), "model"), str(group[0]["hint"]) if alike else ""))
        for item in group[:SHOWN]:
            rows.append(("", item["repo"], f"job {item['job'] or '-'}: {item['message']}"))
            rows += [] if alike else [("", "", item["hint"])]
        rows += [("", f"{len(group) - SHOWN:,} more", "--json has them all")] if len(group) > SHOWN else []
    then = [f"{code}: {SUBMIT_AGAIN}" for code, group in groups.items() if group[0][1].in_file]
    if len(then) < len(groups):
        then.insert(0, f"when it is mended, `reshard catalog retry {name} --only CODE`")
    rows += [("" if i else "next", "", step) for i, step in enumerate(then)]
    output.result({"catalog": name, "failures": facts}, lines(rows) if rows else Text("no failures"), "\n".join(facts))


@catalog.command("retry")
@takes(output=read_output)
def retry(
    *,
    name: Name,
    only: Annotated[
        str | None, Option(metavar="CODE", help="Only what failed with this error code.", show_default=False)
    ] = None,
    output: Output,
) -> None:
    """Give what failed another turn, from what it had copied. What only the file can mend is left as it is."""
    with _open() as (_, catalogs):
        failed = catalogs.get(name).failures()
        if only is not None and only not in failed:
            raise NoSuchFailures(name=name, only=only, there=", ".join(failed) or "nothing")
        again = catalogs.retry(name, only)
    left = {code: len(group) for code, group in failed.items() if only in {None, code} and group[0][1].in_file}
    rows = [(f"{count(again, 'model')} of {name} again",)]
    rows += [(f"{count(number, 'model')} not, {code}: {SUBMIT_AGAIN}",) for code, number in left.items()]
    output.result({"catalog": name, "again": again, "left": left}, lines(rows), str(again))


@catalog.command("pause")
@takes(output=read_output)
def pause(name: Name, output: Output) -> None:
    """Begin nothing more; what is at work goes on."""
    with _open() as (_, catalogs):
        catalogs.pause(name)
    output.result({"catalog": name, "state": "paused"}, Text(f"catalog {name} is paused"), name)


@catalog.command("resume")
@takes(output=read_output)
def resume(name: Name, output: Output) -> None:
    """Go on where a catalog was paused, or stopped by a limit, which then counts anew."""
    with _open() as (_, catalogs):
        catalogs.resume(name)
        state = catalogs.get(name).state
    said = f"catalog {name} goes on" if state == "running" else f"catalog {name} is {state}"
    output.result({"catalog": name, "state": state}, Text(said), name)


@catalog.command("cancel")
@takes(output=read_output)
def cancel(name: Name, output: Output) -> None:
    """Begin nothing more, and cancel what is at work."""
    with _open() as (_, catalogs):
        jobs = catalogs.cancel(name)
    said = f"catalog {name} is cancelled, and {count(jobs, 'job')} of it"
    output.result({"catalog": name, "state": "cancelled", "jobs": jobs}, Text(said), name)


@catalog.command("remove")
@takes(output=read_output)
def remove(name: Name, output: Output) -> None:
    """Forget a catalog that has ended, and what it knows of its targets; these stay, and so do its jobs."""
    from reshard.worker.followers.schedules import Schedules

    with _open() as (store, catalogs):
        catalogs.remove(name)
        kept = [seen.schedule for seen in Schedules(store).all()]
    schedules = [one.name for one in kept if one.catalog is not None and one.catalog.name == name]
    said = [f"catalog {name} is removed; its targets stay as they are, and `reshard list` still has its jobs"]
    said += [f"schedule {one} submits it again: `reshard schedule remove {one}` ends that" for one in schedules]
    output.result({"catalog": name, "removed": True, "schedules": schedules}, Text("\n".join(said)), name)


def _status(seen: Seen) -> list[tuple[str, str]]:
    definition, groups = seen.definition, seen.failures()
    told = [
        ("catalog", f"{definition.name}, {definition.digest[:12]}"),
        ("state", f"{seen.state}, {ago(seen.since)}{f': {seen.note}' if seen.note else ''}"),
        ("success", succeeded(seen.success)),
        ("asked by", f"{definition.asked_by}, {ago(seen.started)}"),
        ("models", f"{seen.entries:,}: {_counts(seen)}"),
        moved(sum(e.read for _, e in seen.ended), sum(e.uploaded for _, e in seen.ended), 0),
        *_listed("warning", seen.empty, finds_none),
        *_listed("at work", [f"{repo}, job {job}" for repo, job in seen.active.items()], str),
        *(("failed", f"{code}: {count(len(group), 'model')}") for code, group in groups.items()),
    ]
    return [*told, ("next", f"see `reshard catalog failures {definition.name}`")] if groups else told


def _counts(seen: Seen) -> str:
    told = [f"{number:,} {what}" for what, number in seen.counts().items()]
    told += [f"{number:,} {what}" for what, number in (("at work", len(seen.active)), ("to do", seen.todo)) if number]
    said = ", ".join(told) or ("none yet" if seen.state == "expanding" else "none")
    if not seen.empty:
        return said
    return f"{said}; {len(seen.empty):,} {'entry that finds' if len(seen.empty) == 1 else 'entries that find'} no model"


def _standings(name: str, wanted: Sequence[Wanted]) -> Sequence[Standing] | None:
    """How each model stands against the last job that carried it out; None without a broker, which alone knows."""
    from reshard.worker.followers.records import entry_of

    try:
        with _open() as (_, catalogs):
            return catalogs.standings(name, map(entry_of, wanted))
    except NoBroker:
        return None


def _targets(wanted: Sequence[Wanted]) -> Iterator[Hub]:
    """Those that must be written to; a pull request may be anybody's."""
    for one in wanted:
        if one.error is None and one.request and isinstance(one.request.target, Hub) and not one.request.options.pr:
            yield one.request.target


def _growth(wanted: Sequence[Wanted], stands: Sequence[Standing] | None) -> int:
    """Bytes of the sources that may be written: a target that is there already may be rewritten as a whole."""
    known = stands or ["unknown"] * len(wanted)
    return sum(
        one.source.bytes
        for one, stand in zip(wanted, known, strict=True)
        if one.source and one.error is None and stand != "unchanged"
    )


def _entry(one: Wanted) -> dict[str, Any]:
    return {
        "repo": one.repo,
        "target": str(one.request.target) if one.request else None,
        "commit": one.source.sha if one.source else None,
        "bytes": one.source.bytes if one.source else None,
        "exists": one.target is not None,
        "error": one.error.code if one.error else None,
    }


def _told(facts: dict[str, Any]) -> list[tuple[str, str]]:
    wrong = facts["wrong"]
    return [
        ("catalog", facts["catalog"]),
        ("models", f"{facts['models']:,}, of which {facts['ready']:,} can be done"),
        ("targets", f"{facts['new']:,} new, {facts['ready'] - facts['new']:,} there already"),
        ("bytes", f"{human_bytes(facts['bytes'])} stored by the sources, past commits included"),
        ("growth", f"{human_bytes(facts['growth'])} at most, before the Hub finds what it has already"),
        ("calls", f"{facts['calls']:,} to the Hub for this"),
        ("unchanged", _unchanged(facts["unchanged"])),
        *_listed("warning", facts["empty"], finds_none),
        *_listed("warning", facts["unwritable"], lambda who: f"{who}; control and workers may have another token"),
        *_listed("drift", facts["drift"] or (), lambda repo: f"the target of {repo} has commits that are not ours"),
        *_listed("gated", facts["gated"], str),
        *_listed("wrong", wrong, lambda item: f"{item['repo']}: {item['code']}: {item['message']} ({item['hint']})"),
    ]


def _unchanged(number: int | None) -> str:
    return "not known without a broker" if number is None else f"{number:,} since their last job, which need none now"


def _listed(what: str, items: Sequence[Any], say: Callable[[Any], str]) -> list[tuple[str, str]]:
    told = [(what, say(item)) for item in items[:SHOWN]]
    more = len(items) - SHOWN
    return [*told, (what, f"{more:,} more; --json has them all")] if more > 0 else told


def _counted(calls: Counter[str]) -> Callable[[str], RateLimiter]:
    """Paces of this process that count the calls of each budget."""
    from reshard.pipeline.stores.retry import LocalRateLimiter

    class Counted(LocalRateLimiter):
        def __init__(self, budget: str) -> None:
            super().__init__()
            self._budget = budget

        def before(self, kind: str) -> None:
            calls[self._budget] += 1
            super().before(kind)

    paces: dict[str, Counted] = {}
    return lambda budget: paces.setdefault(budget, Counted(budget))
