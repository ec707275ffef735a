"""Webhooks of the Hub: whatever reads a source that somebody pushed to is carried out again.

What the Hub sends: https://huggingface.co/docs/hub/webhooks
"""

from __future__ import annotations

import hmac

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic.alias_generators import to_camel

from reshard.client.models.catalogs import Pushed
from reshard.client.pushed import carry_out
from reshard.client.served import Served
from reshard.pipeline.errors import HookRefused

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


def check_secret(sent: str | None, secret: SecretStr | None) -> None:
    """Raises HookRefused unless the header says the secret; in the time that every wrong one takes."""
    known = secret.get_secret_value().encode() if secret else b""
    given = (sent or "").encode("latin-1")  # as headers are decoded
    if not (hmac.compare_digest(given, known) and known):
        raise HookRefused


def take(payload: Payload, session: Served) -> Pushed:
    """Submit what reads the source that was pushed to; returns what became of each."""
    ignored = payload.ignored()
    carried = [] if ignored else carry_out(session, payload.repo.name, payload.heads())
    return Pushed(repo=payload.repo.name, carried=carried, ignored=ignored)
