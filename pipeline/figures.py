"""Sizes as people read them."""

from __future__ import annotations

UNITS = ("kB", "MB", "GB", "TB", "PB")


def human_bytes(size: float) -> str:
    """``47.2 MB``, ``476 kB``: decimal units, as sizes are typed.

    >>> human_bytes(1), human_bytes(999), human_bytes(47_200_000), human_bytes(476_400), human_bytes(999_960)
    ('1 byte', '999 bytes', '47.2 MB', '476 kB', '1.0 MB')
    """
    if size < 1000:
        return f"{round(size)} byte{'' if round(size) == 1 else 's'}"
    power = 1
    while power < len(UNITS) and round(size / 1000**power) >= 1000:
        power += 1
    figure = size / 1000**power
    return f"{figure:,.{0 if figure >= 99.95 else 1}f} {UNITS[power - 1]}"
