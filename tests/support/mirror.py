"""Thousands of models that were published before, written straight into the folder of a Hub that does not run.

Each is what a real publication of one small model left, under another name: the same files in the same two commits,
and the description of ours with the facts of this one. What a job or a list finds there is what it finds of the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reshard.pipeline.planning.build import request_key
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.request import Request
from reshard.pipeline.tensors import Pin
from tests.hub import HubProcess
from tests.hub.git import Commit
from tests.hub.hub import Hub
from tests.hub.repo import MAIN, Repo
from tests.hub.settings import Settings
from tests.support.measured import measured
from tests.support.models import arrays, numbered, save_sharded

TRAILER = "Reshard-Publication: "


@dataclass(frozen=True)
class Template:
    """A source that was really published, and its target."""

    source: str
    target: str


def publish(hub: HubProcess, request: Request, folder: Path, token: str) -> Template:
    """Upload a model of 20 kB in two files as the request's source, and carry the request out."""
    save_sharded(folder, numbered(arrays(4, 2000), 2))
    (folder / "config.json").write_text('{"model_type": "none-of-ours", "architectures": ["Nobody"]}')
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    source, target = str(request.source), str(request.target)
    hub.admin.create_repo(source)
    hub.admin.put_files(source, files, lfs=[name for name in files if name.endswith(".safetensors")])
    env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": token, "HF_HOME": str(folder.parent / "hf")}
    measured("tests.pipeline.jobs:do_run", source, target, request.options.model_dump(mode="json"), env=env)
    return Template(source, target)


def write(directory: Path, endpoint: str, template: Template, requests: Iterable[Request], published: bool) -> None:
    """The source of each of ``requests``, and if it was ``published`` its target, on the Hub in ``directory``.

    That Hub must not run now; it will at ``endpoint``.
    """
    hub = Hub(directory, Settings())
    source, target = hub.repos["models", template.source], hub.repos["models", template.target]
    for request in requests:
        pin = Pin(endpoint, str(request.source), _copy(hub, source, str(request.source), _last(source).message))
        if published:
            key = request_key(request, pin, None, f"{request.target}#main")
            _copy(hub, target, str(request.target), _told(_last(target), key, pin))


def _copy(hub: Hub, like: Repo, name: str, message: str) -> str:
    """A repository with the files of ``like``, its last commit under ``message``; returns that commit."""
    repo = hub.create_repo("models", name)
    for sha256, size in like.objects.items():
        repo.learn_object(sha256, size, like.xet.get(sha256))
    last = _last(like)
    return repo.commit(MAIN, last.changes, last.title, message, author=last.author).oid


def _last(repo: Repo) -> Commit:
    return repo.commits[repo.refs[MAIN]]


def _told(commit: Commit, request: str, pin: Pin) -> str:
    """The description of a publication, as it would be of another one."""
    head, _, rest = commit.message.partition(TRAILER)
    facts, _, _ = rest.partition("\n")
    told = json.loads(facts) | {"request": request, "source": pin.repo, "source_commit": pin.commit}
    message = f"{head}{TRAILER}{json.dumps(told, sort_keys=True, separators=(',', ':'))}\n"
    ours = publication.read(publication.Commit("", "", message, ""))
    assert ours is not None and (ours.request, ours.source) == (request, pin.repo), "it is not read like this any more"
    return message
