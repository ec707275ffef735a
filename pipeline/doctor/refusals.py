"""What `run` would refuse of a repository: it is planned as `run` plans it, for a target that does not exist yet."""

from __future__ import annotations

from typing import NamedTuple
from uuid import uuid4

from reshard.pipeline.drafting import draft
from reshard.pipeline.errors import CheckpointError, ModelCheckRequired, NoWeights, ProofError, ReshardError, UsageError
from reshard.pipeline.places import AnyPlace, Folder, Hub
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.verifying.job_checks import check_model
from reshard.pipeline.verifying.meta_load import MetaLoader

_OF_SOURCE = (CheckpointError, NoWeights, ProofError, UsageError)
_STRICT = Options(require="model")


class Refusals(NamedTuple):
    """What ends a run into any target, and if nothing does, what ends one to a Hub, or one with --require model."""

    always: ReshardError | None = None
    on_hub: ReshardError | None = None
    require_model: ModelCheckRequired | None = None


def refusals(source: Source, meta_loader: MetaLoader) -> Refusals:
    """Raises what stores raise; nothing is written."""
    on_hub, new = None, Folder(path=f"/reshard-doctor-{uuid4().hex}")  # which no source lies in or around
    try:
        try:
            made = _draft(source, Hub(repo="some/new"), new)
        except _OF_SOURCE as error:
            on_hub = error
            made = _draft(source, new, new)  # which asks less of names and sizes
        check_model(made, made.shards, source, meta_loader)
    except ModelCheckRequired as error:
        return Refusals(None, on_hub, error)
    except _OF_SOURCE as error:
        return Refusals(error)
    return Refusals(None, on_hub)


def _draft(source: Source, wanted: AnyPlace, new: Folder) -> Plan:
    return draft(Request(source=source.place, target=wanted, options=_STRICT), source, FolderTarget(new))
