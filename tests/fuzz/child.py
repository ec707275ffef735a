"""One target under atheris: ``python -m tests.fuzz.child TARGET [libFuzzer's options]``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["reshard"]):
    from tests.fuzz.targets import TARGETS, tried


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        tried(target, data)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
