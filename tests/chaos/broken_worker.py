"""A worker that lacks one of its guards: ``python -m tests.chaos.broken_worker GUARD ARGUMENTS-OF-CELERY``.

The guard is taken out of the running process, so that nothing in the program itself can switch it off. Each is a piece
of text or a function that must be found, so a test of a guard that was renamed fails instead of testing nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from reshard.pipeline.publishing import commit as publish
from reshard.worker.local import worker_command
from reshard.worker.queue import scripts


def without_text(old: str, new: str) -> None:
    """Every atomic step runs with ``new`` in the place of ``old``."""
    original = scripts.step_text
    assert old in original("claim")
    vars(scripts)["step_text"] = lambda name: original(name).replace(old, new)


def no_lease_check() -> None:
    """A unit may be claimed although its owner's lease has not run out."""
    without_text(
        "redis.call('ZRANGEBYSCORE', key(id, 'todo'), '-inf', t, 'LIMIT', 0, 1)",
        "redis.call('ZRANGEBYSCORE', key(id, 'todo'), '-inf', '+inf', 'LIMIT', 0, 1)",
    )


def no_token_check() -> None:
    """Whoever once had a unit may go on with it."""
    without_text("return unit(id, name, 'token') == token and ", "return ")


def no_look_for_our_digest() -> None:
    """Nobody looks whether the commit is there already, by its message or by what the target holds."""
    from reshard.worker import steps  # it needs the address of a broker, which whoever reads GUARDS has not

    for module in (publish, steps):
        assert vars(module)["find"].__module__ == publish.__name__
        vars(module)["find"] = lambda plan, target, at: None
    publish.same_content = lambda addition, there: False


GUARDS: dict[str, Callable[[], None]] = {
    guard.__name__: guard for guard in (no_lease_check, no_token_check, no_look_for_our_digest)
}


def broken_worker_command(guard: str, concurrency: int) -> Sequence[str]:
    """The command of a worker without ``guard``."""
    python, module, program, *arguments = worker_command(concurrency)
    assert (module, program) == ("-m", "reshard.worker.program")
    return [python, "-m", "tests.chaos.broken_worker", guard, *arguments]


if __name__ == "__main__":
    from celery.__main__ import main

    GUARDS[sys.argv.pop(1)]()
    main()
