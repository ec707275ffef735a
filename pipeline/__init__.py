"""The library: reshard a checkpoint, see its plan, or verify one, from Python.

Everything is imported when it is first used, so that `import reshard.pipeline` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.pipeline.api import Verification, plan, run, verify
    from reshard.pipeline.check import Check
    from reshard.pipeline.errors import (
        AccessError,
        CheckpointError,
        HubError,
        JobError,
        ProofError,
        QueueError,
        ReshardError,
        ResourceError,
        SourceError,
        TargetError,
        UsageError,
    )
    from reshard.pipeline.places import Folder, Hub, parse_place
    from reshard.pipeline.planning.model import Plan
    from reshard.pipeline.request import Options, Request
    from reshard.pipeline.reshard import Report, Watcher
    from reshard.pipeline.stores.connect import Context
    from reshard.pipeline.verifying.load import LoadOptions

__all__ = [
    "AccessError",
    "Check",
    "CheckpointError",
    "Context",
    "Folder",
    "Hub",
    "HubError",
    "JobError",
    "LoadOptions",
    "Options",
    "Plan",
    "ProofError",
    "QueueError",
    "Report",
    "Request",
    "ReshardError",
    "ResourceError",
    "SourceError",
    "TargetError",
    "UsageError",
    "Verification",
    "Watcher",
    "parse_place",
    "plan",
    "run",
    "verify",
]

_MODULES = {
    "api": ("Verification", "plan", "run", "verify"),
    "check": ("Check",),
    "places": ("Folder", "Hub", "parse_place"),
    "planning.model": ("Plan",),
    "request": ("Options", "Request"),
    "reshard": ("Report", "Watcher"),
    "stores.connect": ("Context",),
    "verifying.load": ("LoadOptions",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
