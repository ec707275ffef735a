"""No false alarms: everything that the table of formats holds, resharded, is its source's equal by every check."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.pipeline.check import Check
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.stores.overlay import Borrowing
from reshard.pipeline.verifying.index_rules import check_rules
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.verify import verify
from tests.formats.cases import CASES
from tests.formats.quick import EACH_CASE, named
from tests.formats.run import build_cases

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases whose tests are in this run."""
    scratch, names = tmp_path_factory.mktemp("honest"), sorted(named(request))
    assert list(build_cases(names, scratch)) == names
    return scratch


def checked(name: str, scratch: Path, meta_loader: MetaLoader, told: bool) -> list[Check]:
    """The checks of what the pipeline makes of a case; ``told`` what it was asked to change, or not."""
    case, folder = CASES[name], scratch / name
    lender = None if case.home == "source" else parse_place(str(folder / case.home))
    source, target = parse_place(str(folder / "source")), parse_place(str(folder / "output"))
    request = Request(source=source, target=target, options=Options(**case.options, config_from=lender))
    context = Context.from_env()
    run(request, context, meta_loader=meta_loader)
    theirs = open_source(source, context)
    against = Borrowing(theirs, open_source(lender, context)) if lender else theirs
    wishes = {key: case.options[key] for key in ("dtype", "dequantize", "strip_prefix") if told and key in case.options}
    return verify(open_source(target, context), against, meta_loader, deep=True, changes=Options(**wishes))


@EACH_CASE
def test_an_honest_output_is_never_called_broken(name: str, built: Path, meta_loader: MetaLoader) -> None:
    checks = checked(name, built, meta_loader, told=True)
    assert {check.name: check.findings for check in checks if check.result == "failed"} == {}
    (bytes_,) = [check for check in checks if check.name == "same bytes"]
    assert bytes_.result == "passed" and bytes_.figures["not_comparable"] == 0
    assert all(check.reason for check in checks if check.result in {"skipped", "inconclusive"})


@EACH_CASE
def test_an_honest_source_breaks_no_rule_and_is_looked_at(name: str, built: Path) -> None:
    source = open_source(parse_place(str(built / name / "source")), Context.from_env())
    rules = check_rules(OpenedSide.attempt(source))
    assert (rules.result, rules.findings) == ("passed", ())
    assert rules.figures["files"] and rules.figures["tensors"]


@pytest.mark.parametrize("name", ["mistral", "fsdp-wrapped", "mxfp4-plain"])
def test_a_change_that_was_asked_for_is_a_claim_to_whoever_is_not_told_and_without_a_manifest_a_difference(
    name: str, built: Path, meta_loader: MetaLoader, tmp_path: Path
) -> None:
    results = {check.name: check.result for check in checked(name, built, meta_loader, told=False)}
    assert results["same tensors"] == "inconclusive" and "failed" not in results.values()
    source, output = built / name / "source", tmp_path / "output"
    shutil.copytree(built / name / "output", output)
    (output / MANIFEST).unlink()
    sides = (open_source(parse_place(str(folder)), Context.from_env()) for folder in (output, source))
    assert "same tensors" in {check.name for check in verify(*sides, meta_loader) if check.result == "failed"}
