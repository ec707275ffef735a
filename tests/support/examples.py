"""How many examples a property is tried on, where it is not the profile's own number."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # hypothesis's own


def examples(wanted: int) -> int:
    """So many by `make test-all`; by `make test` the part of them that its profile has of the usual number."""
    return max(1, wanted * settings().max_examples // USUAL)
