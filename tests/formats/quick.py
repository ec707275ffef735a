"""Which cases a run takes: by `make test` a few, by `make test-all` every one."""

from __future__ import annotations

import pytest

from tests.formats.cases import CASES

# One of each way to save, place and error of a loader, but for what other tests of `make test` read as well.
QUICK = {"t5-ties", "chatglm-int4", "sentence-transformers", "zero-3", "bucket"}
EACH_CASE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)


def named(request: pytest.FixtureRequest) -> set[str]:
    """The cases that tests of this file name in this run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return {str(item.callspec.params.get("name")) for item in items if hasattr(item, "callspec")} & CASES.keys()
