"""Every known way to break a good output is caught, by a finding that names the place; the good one is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.check import Check
from reshard.pipeline.verifying import verify as verification
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.verification.mutations import MUTATIONS, Mutation
from tests.verification.table import AGAINST, COLUMNS, Results, caught, check, make_good, mutated, on_the_page, render

LEAST = 40
PLACES = (".safetensors", ".json", ".py", ".jinja", ".model", ".weight", ".bin", ".txt", "LICENSE", "inv_freq", "mtp")


def test_the_good_output_passes_every_check(found: Results) -> None:
    assert {check.name: check.result for check in found[""] if check.result != "passed"} == {}
    assert len(found[""]) >= len(COLUMNS)


def test_there_are_many_and_no_two_are_called_the_same() -> None:
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS) >= LEAST


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.what)
def test_a_broken_output_is_caught_without_its_manifest(mutation: Mutation, found: Results) -> None:
    checks = found[mutation.what]
    result = "failed" if mutation.proven else "inconclusive"
    assert caught(checks, result) & set(AGAINST)
    assert mutation.proven or not caught(checks)
    told = [text for check in checks if check.result == result for text in check.findings or (check.reason,)]
    assert all(told)
    assert any(place in text for text in told for place in PLACES), "neither a tensor nor a file is named"


def test_the_table_on_the_page_is_what_the_run_found(found: Results) -> None:
    assert on_the_page() == render(found), "run `python -m tests.verification`"


# Each check is the only one that catches something: without it, something broken would pass.
ALONE = {
    "index rules": "check_rules",
    "same tensors": "check_headers",
    "other files": "check_files",
    "tokenizer": "check_tokenizers",
    "same bytes": "check_bytes",
}


@pytest.mark.parametrize("column", ALONE)
def test_without_a_check_something_broken_passes(
    column: str, found: Results, tmp_path: Path, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = [m for m in MUTATIONS if len(found[m.what]) == len(found[""])]
    mine = [m for m in opens if caught(found[m.what]) & set(AGAINST) == {column}]
    assert mine, f"no mutation needs {column}"
    source, good = make_good(tmp_path, meta_loader)
    broken = mutated(good, tmp_path / "broken", mine[-1])
    name = ALONE[column]
    switched_off = Check(column, "passed", "")
    many = name == "check_tokenizers"
    monkeypatch.setattr(verification, name, lambda *_: [switched_off] if many else switched_off)
    assert not caught(check(broken, source, meta_loader)) & set(AGAINST)
