"""Webhooks of the Hub: whatever reads a source that somebody pushed to is carried out again.

What the Hub sends: https://huggingface.co/docs/hub/webhooks
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic.alias_generators import to_camel

from reshard.client.served import Served
from reshard.pipeline.errors import (
    AccessError,
    HookRefused,
    HubUnreachable,
    ReshardError,
    ScheduleNotFound,
    ScheduleUnreadable,
    SourceError,
)
from reshard.pipeline.places import Hub, repository
from reshard.pipeline.publishing.history import read, undoes
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.pace import LocalRateLimiter
from reshard.pipeline.stores.refusal import Refusal
from reshard.worker.followers.pushes import Watch

log = logging.getLogger(__name__)

AT_ONCE = 8  # hooks; each holds one of 40 threads, and may wait for the Hub
SECRET = "x-webhook-secret"
CONTENT = "repo.content"  # what was pushed; narrower ones begin so, and count as this


class Sent(BaseModel):
    """Only what is read: a Hub may add to it at any time."""

    model_config = ConfigDict(alias_generator=to_camel)


class What(Sent):
    action: str
    scope: str


class Repo(Sent):
    type: str
    name: str


class Ref(Sent):
    ref: str
    new_sha: str | None = Field(default=None, pattern=r"^[0-9a-f]{40,64}$")  # None: it was deleted


class Payload(Sent):
    event: What
    repo: Repo
    updated_refs: list[Ref] = []

    def heads(self) -> dict[str, str]:
        """The commits that were pushed, by revisions as people type them."""
        return {
            name: ref.new_sha
            for ref in self.updated_refs
            if ref.new_sha
            for name in (ref.ref, ref.ref.removeprefix("refs/heads/").removeprefix("refs/tags/"))
        }

    def ignored(self) -> str | None:
        """Why it starts nothing, whatever reads the repository."""
        scope = self.event.scope
        if scope != CONTENT and not scope.startswith(f"{CONTENT}."):
            return f"{self.event.action} of {scope} changes no file"
        if self.repo.type != "model":
            return f"a {self.repo.type} has no weights to reshard"
        return None if self.heads() else "nothing was pushed"


class Hurried(LocalRateLimiter):
    """Waits for nothing: the Hub itself waits for the answer."""

    def _wait(self, seconds: float) -> NoReturn:
        raise HubUnreachable(endpoint="the Hub", what=f"asks to wait {seconds:.0f} s")


def check_secret(sent: str | None, secret: SecretStr | None) -> None:
    """Raises HookRefused unless the header says the secret; in the time that every wrong one takes."""
    known = secret.get_secret_value().encode() if secret else b""
    given = (sent or "").encode("latin-1")  # as headers are decoded
    if not (hmac.compare_digest(given, known) and known):
        raise HookRefused


def take(payload: Payload, session: Served) -> Mapping[str, Any]:
    """Submit what reads the source that was pushed to; returns what became of each."""
    ignored, carried = payload.ignored(), list[dict[str, Any]]()
    if ignored is None:
        heads = payload.heads()
        watches = session.queue.pushes.watches(payload.repo.name, heads)
        with session.asking(lambda endpoint: Hurried()) as context:
            ours = cache(partial(_ours, context))  # many may read one source
            carried = [_carry(session, watch, heads, ours) for watch in watches]
    return {"repo": payload.repo.name, "carried": carried, "ignored": ignored}


def _carry(session: Served, watch: Watch, heads: Mapping[str, str], ours: Callable[[Hub, str], bool]) -> dict[str, Any]:
    source = repository(watch.request.source)
    commit = heads[source.branch]
    outcome, job, problem = "own", None, None
    try:
        session.allow(watch.request)
        if not ours(source, commit):
            outcome, job = session.queue.pushes.push(watch, commit)
    except (SourceError, AccessError, ScheduleNotFound, ScheduleUnreadable) as error:
        outcome, problem = "refused", error.to_dict()
    log.info("%s at %s was pushed, for %s: %s, job %s", source, commit, watch.request.target, outcome, job)
    named = {"schedule": watch.schedule, "catalog": watch.catalog}
    places = {"source": str(source), "target": str(watch.request.target)}
    return named | places | {"commit": commit, "outcome": outcome, "job": job, "error": problem}


def _ours(context: Context, source: Hub, commit: str) -> bool:
    """Whether reshard made that commit, as its description says: one that answers it would be answered in turn.

    Of a Hub that does not tell, it is not: then a job finds that there is nothing to do, or what is wrong.
    """
    try:
        found = next(context.api(source, "read").commits(source.repo, commit), None)
    except (ReshardError, Refusal) as error:
        log.warning("cannot tell whose commit %s of %s is: %s", commit, source, error)
        return False
    return found is not None and found.id == commit and bool(read(found) or undoes(found))
