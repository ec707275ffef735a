"""What each check catches of the mutations: found by running them, and written into docs/verification.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from reshard.pipeline.check import Check
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.manifest_check import described_by
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import Trust, verify
from tests.verification.models import SIZE, save_source
from tests.verification.mutations import MUTATIONS, Mutation
from tests.verification.weights import Folder

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
BEGIN, END = "<!-- mutations:begin -->\n", "<!-- mutations:end -->\n"

# Column -> the checks that it stands for; the last two need no source, but a manifest.
COLUMNS = {
    "index rules": ("index rules",),
    "same tensors": ("same tensors",),
    "other files": ("other files",),
    "model": ("class of",),
    "tokenizer": ("tokenizer",),
    "same bytes": ("same bytes",),
    "manifest": ("manifest",),
    "manifest, deep": ("published bytes",),
}
AGAINST = tuple(COLUMNS)[:6]

Results = dict[str, list[Check]]


def make_good(folder: Path, meta_loader: MetaLoader) -> tuple[Path, Path]:
    """(source, output): the model, and what the pipeline itself makes of it."""
    source, output = folder / "source", folder / "good"
    save_source(source)
    request = Request(
        source=parse_place(str(source)), target=parse_place(str(output)), options=Options(size=SIZE, transport="auto")
    )
    run(request, Context.from_env(), meta_loader=meta_loader)
    return source, output


def check(output: Path, source: Path, meta_loader: MetaLoader) -> list[Check]:
    """Everything that `verify --against --deep` says."""
    context = Context.from_env()
    ours, theirs = (open_source(parse_place(str(folder)), context) for folder in (output, source))
    published = described_by(open_target(ours.place, Options(), context), ours.pin.commit)
    return verify(ours, theirs, meta_loader, deep=True, trust=Trust(published))


def results(folder: Path, meta_loader: MetaLoader) -> Results:
    """What is said of each mutated copy of one good output, by what was done to it."""
    source, good = make_good(folder, meta_loader)
    found: Results = {"": check(good, source, meta_loader)}
    for mutation in MUTATIONS:
        found[mutation.what] = check(mutated(good, folder / "broken", mutation), source, meta_loader)
    return found


def mutated(good: Path, to: Path, mutation: Mutation) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    mutation.apply(Folder(to))
    return to


def caught(checks: list[Check], result: str = "failed") -> set[str]:
    """The columns whose checks ended so."""
    failed = [check.name for check in checks if check.result == result]
    return {
        column
        for column, names in COLUMNS.items()
        if any(check == name or check.startswith(f"{name} ") for check in failed for name in names)
    }


def render(found: Mapping[str, list[Check]]) -> str:
    """The table, with one row a mutation and one column a check."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, list[Check]]) -> Iterator[str]:
    by_column = {column: sum(column in caught(found[m.what]) for m in MUTATIONS) for column in COLUMNS}
    undecided = sum(not mutation.proven for mutation in MUTATIONS)
    yield f"{len(MUTATIONS)} mutations; `--against --deep` passes none of them. `x`: failed. `?`: inconclusive, as for"
    yield f"the {undecided} that are not shown to affect a loader. Results of each check alone:"
    yield ""
    yield "| change to a good output | " + " | ".join(COLUMNS) + " |"
    yield "| --- |" + " :-: |" * len(COLUMNS)
    for kind, mutations in groupby(MUTATIONS, key=lambda mutation: mutation.kind):
        yield f"| **{kind}** |" + " |" * len(COLUMNS)
        for mutation in mutations:
            failed, undecided = (caught(found[mutation.what], result) for result in ("failed", "inconclusive"))
            marks = ("x" if column in failed else "?" if column in undecided else "" for column in COLUMNS)
            yield f"| {mutation.what} | " + " | ".join(marks) + " |"
    yield f"| **caught, of {len(MUTATIONS)}** | " + " | ".join(str(by_column[column]) for column in COLUMNS) + " |"


def on_the_page() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write(table: str) -> None:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(before + begin + table + end + after)
