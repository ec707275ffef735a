"""python -m tests.verification: run every mutation and write the table in docs/verification.md again."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.verification.table import caught, render, results, write

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, closing(MetaLoader()) as meta_loader:
        found = results(Path(folder), meta_loader)
    for what, checks in found.items():
        print(f"{what or 'nothing'}: {', '.join(sorted(caught(checks))) or 'nothing'}")
    write(render(found))
