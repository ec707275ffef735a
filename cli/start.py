"""Where the console script begins: until the command is loaded, an interrupt just ends the process.

Python would print a traceback of half an import, or a module would make an ImportError of it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys


def main() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this: opened in this order, each gets its own number
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 -- to the end
    if os.getpid() == 1:  # of a container: what its first process does not handle is dropped, and it is killed instead
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell's background job ignores interrupts, and goes on doing so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not any(name.startswith("OTEL_") for name in os.environ):
        # Else redis-py loads it wherever it is installed, which takes a sixth of a command's time.
        sys.modules["opentelemetry"] = None  # type: ignore[assignment]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it looks for some in all that is installed
    gc.disable()  # until the command is loaded: modules are not garbage, and scanning them takes a tenth of its time
    from reshard.cli.main import main
    from reshard.cli.streams import own

    sys.stdout, sys.stderr = own(sys.stdout), own(sys.stderr)
    signal.signal(signal.SIGINT, before)
    main()
