"""The calls of the library, on places as they are typed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

from reshard.pipeline.arguments import as_option, in_python
from reshard.pipeline.check import Check, Result
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.kinds import foreign_format
from reshard.pipeline.errors import AccessError, BadPlace, HubRefused, NoTarget, TargetGone, UsageError, shortened
from reshard.pipeline.places import NOWHERE, AnyPlace, parse_place
from reshard.pipeline.planning.model import MANIFEST, Plan
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.signing import Signer, Trusted
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import Report, Watcher, draft, source_of
from reshard.pipeline.reshard import run as carry_out
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.overlay import Borrowing
from reshard.pipeline.tensors import Pin
from reshard.pipeline.verifying.load import LoadOptions, check_load
from reshard.pipeline.verifying.manifest_check import described_by
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.signed import check_signatures
from reshard.pipeline.verifying.verify import Trust
from reshard.pipeline.verifying.verify import verify as check_all

Progress = Callable[[int, int], None]  # bytes read so far, and about how many there are to read


def plan(request: Request, context: Context | None = None) -> Plan:
    """What ``run`` would write, carry and delete; reads headers only and changes nothing.

    Raises the SourceError, AccessError, CheckpointError, TargetError and UsageError families.
    """
    with in_python():
        _check(request, context)
        if context is None:
            with closing(Context.from_env()) as own:
                return plan(request, own)
        Signer.check(request.options.sign, context.sign_keys)
        target = open_target(request.target, request.options, context)
        return draft(request, source_of(request, context), target)


def run(
    request: Request,
    context: Context | None = None,
    watcher: Watcher | None = None,
    meta_loader: MetaLoader | None = None,
    jobs: int | None = 1,
    *,
    progress: bool = False,
) -> Report:
    """Carry out ``request`` in this process; with ``progress`` a bar shows how far it is, also in notebooks.

    Without a ``context``, tokens and limits come from the environment. ``watcher`` is told of each step, and a given
    ``meta_loader`` stays warm. ``jobs`` source files are copied at a time, or as many as memory and disk allow; with
    None, also as cores do. Raises ReshardError, whose families say why.
    """
    with in_python(), ExitStack() as stack:
        _check(request, context)
        _refuse(
            (isinstance(watcher, Watcher | None), "watcher", "a Watcher", watcher),
            (isinstance(meta_loader, MetaLoader | None), "meta_loader", "a MetaLoader", meta_loader),
            (jobs is None or (type(jobs) is int and jobs > 0), "jobs", "at least 1, or None", jobs),
        )
        if request.target == NOWHERE:
            raise NoTarget
        watcher = watcher or Watcher()
        if progress:
            from reshard.pipeline.bar import shown  # rich takes a while to import

            watcher = stack.enter_context(shown(watcher))
        return carry_out(request, context, watcher, meta_loader, jobs)


def _check(request: Request, context: Context | None) -> None:
    if not isinstance(request, Request):  # a place, as `verify` takes it
        raise UsageError(what=f"Request.of(source, target) makes a request; {shortened(repr(request))} is none")
    _refuse((isinstance(context, Context | None), "context", "a Context", context))


def _refuse(*arguments: tuple[bool, str, str, object]) -> None:
    """Raises UsageError for the first that does not fit: it would be taken for something else, or for nothing."""
    for fits, argument, words, given in arguments:
        if not fits:
            raise UsageError(what=f"{argument} must be {words}, not {shortened(repr(given))}")


UNTRIED = ("load", "skipped")  # which is a check only where it was asked for


@dataclass(frozen=True, slots=True)
class Verification:
    """The checks of one checkpoint, and which state of it and of its source they are about."""

    place: AnyPlace
    pin: Pin
    against: Pin | None
    checks: tuple[Check, ...]

    @property
    def result(self) -> Result:
        """``failed`` if one check is, else ``inconclusive`` if one is or a load was skipped, else ``passed``."""
        ends = {"inconclusive" if (check.name, check.result) == UNTRIED else check.result for check in self.checks}
        return "failed" if "failed" in ends else "inconclusive" if "inconclusive" in ends else "passed"


@in_python()
def verify(
    output: str | os.PathLike[str] | AnyPlace,
    against: str | os.PathLike[str] | AnyPlace | None = None,
    *,
    deep: bool = False,
    changes: Options | None = None,
    config_from: str | os.PathLike[str] | AnyPlace | None = None,
    load: LoadOptions | None = None,
    signed_by: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    builder: str | None = None,
    context: Context | None = None,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Check a checkpoint, optionally against its source; ``deep`` reads every byte of each side once.

    ``changes`` has the dtype, the prefix, the rules for names, the ties and the excluded files by which the output is
    meant to differ, and ``config_from`` lent the files that the source lacks. What only the output itself says of such
    changes makes the result ``inconclusive``, unless this user published it or somebody trusted signed it. With
    ``load`` the model is also loaded and run. ``signed_by`` is a file, or files, of public keys and certificates, one
    of which must have signed it, and ``builder`` who must have built it: raises BadSignKey, BadSignature and
    SignExtraMissing.
    What is wrong with ``output`` is in the checks; raises NoWeights, the CheckpointError family for a broken source,
    DeviceMapIncomplete, and what stores raise.
    """
    keys = [signed_by] if isinstance(signed_by, str | os.PathLike) else signed_by
    named = isinstance(keys, Sequence | None) and all(isinstance(key, str | os.PathLike) for key in keys or ())
    _refuse(
        (isinstance(deep, bool), "deep", "True or False", deep),
        (isinstance(changes, Options | None), "changes", "Options.of(...)", changes),
        (isinstance(load, LoadOptions | None), "load", "LoadOptions()", load),
        (named, "signed_by", "a file or a list of files", signed_by),
        (isinstance(builder, str | None), "builder", "text", builder),
        (isinstance(context, Context | None), "context", "a Context", context),
        (callable(progress), "progress", "a function", progress),
    )
    if against is None and (config_from is not None or changes not in (None, Options())):
        *names, last = (as_option(name) for name in Options.model_fields if Options.declared(name).expect)
        raise UsageError(what=f"{', '.join(names)} and {last} require --against")
    if builder is not None and signed_by is None:
        raise UsageError(what="--builder requires --signed-by")
    if keys is not None and not keys:  # as of a pattern that matches no file: no key is not any key
        raise UsageError(what="--signed-by requires at least one file")
    with ExitStack() as stack:
        context = context or stack.enter_context(closing(Context.from_env()))
        trusted = None if keys is None else Trusted.open([os.fspath(key) for key in keys])
        place = parse_place(output)
        other, lender = (None if given is None else parse_place(given) for given in (against, config_from))
        ours = open_source(place, context)
        # What has no manifest has no publication that brought one, and a weight file has none.
        may = place.local.is_dir() if place.local else MANIFEST in ours.files()
        # To look at its history, what reads the repository has to do.
        reading = replace(context, credentials=context.credentials.reading())
        target = described = None
        try:
            target = open_target(place, Options(), reading) if may else None
            described = described_by(target, ours.pin.commit) if target else None
        except (AccessError, HubRefused, TargetGone):
            pass  # which the check of the manifest tells
        except BadPlace:
            pass  # a folder whose name is too long for what a publication needs beside it
        theirs = open_source(other, context) if other else None
        if theirs and lender:
            theirs = Borrowing(theirs, open_source(lender, context))
        tick = _counter(progress, [ours, theirs] if theirs else [ours])

        def published() -> bool:
            return bool(target and described and target.is_ours(described.commit, described.author))

        # First, because they may end in an error of what was asked for, and reading every byte takes longer.
        signed = check_signatures(ours, trusted, builder, deep) if trusted else []
        meta_loader = stack.enter_context(closing(MetaLoader(tmpdir=context.tmpdir)))
        checks = check_all(
            ours,
            theirs,
            meta_loader,
            deep=deep,
            changes=changes or Options(),
            trust=Trust(described, published, signed),
            load=partial(check_load, ours, theirs, meta_loader, load, tick, context.tmpdir) if load else None,
            tick=tick,
            tmpdir=context.tmpdir,
        )
        return Verification(ours.place, ours.pin, theirs.pin if theirs else None, tuple(checks))


def _counter(progress: Progress, sides: list[Source]) -> Callable[[int], None]:
    """What adds up the bytes of each view of ``sides`` for ``progress``."""
    files = [file for side in sides for file in side.files().values()]
    total = sum(f.size for f in files if f.path.endswith(SUFFIX) or foreign_format(f.path))
    done, lock = 0, Lock()  # both sides are read at the same time

    def tick(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total)

    progress(0, total)
    return tick
