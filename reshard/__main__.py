"""`python -m reshard`: the command, where its script is not on PATH."""

from __future__ import annotations

from reshard.cli.start import main

main()
