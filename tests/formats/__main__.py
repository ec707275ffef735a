"""Runs the cases and writes, or prints, the table: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

# Before anything of huggingface_hub is imported, which reads it once.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from tests.formats.cases import CASES
from tests.formats.gguf_rows import gguf_rows
from tests.formats.refused import refusals
from tests.formats.run import run_cases
from tests.formats.table import between, cells_of, falls, rendered, replaced
from tests.hub.fixtures import Namespace
from tests.hub.process import HubProcess


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.formats", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="CASE")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the whole table between the page's markers")
    arguments = parser.parse_args()
    if arguments.write and arguments.names:
        parser.error("--write wants every case")
    with HubProcess() as hub, tempfile.TemporaryDirectory() as scratch:
        space = Namespace(hub.endpoint, hub.admin, hub.admin.create_user("formats"))
        os.environ |= {"HF_ENDPOINT": space.endpoint, "HF_TOKEN": space.token}
        rows = run_cases(arguments.names or list(CASES), space, Path(scratch))
    wrong = [f"{row.name}, {column}: {why}" for row in rows for column, why in row.wrong.items()]
    text = rendered(rows, list(refusals()), list(gguf_rows()))
    if wrong:
        sys.exit("\n".join(wrong))
    if arguments.write is None:
        print(text)
        return
    page = arguments.write.read_text()
    if lost := falls(cells_of(between(page)), cells_of(text)):
        sys.exit("\n".join(["not written, as a cell may not fall:", *lost]))
    arguments.write.write_text(replaced(page, text))


if __name__ == "__main__":
    main()
