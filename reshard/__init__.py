"""Change how a model's weights are split into files, and nothing else: `reshard.pipeline` is the library."""

from __future__ import annotations

__version__: str  # of what is installed; looked up when it is asked for, because that reads files


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("reshard")
