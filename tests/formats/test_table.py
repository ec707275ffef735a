"""Every case of the table, by every loader; and the table in the documentation is the one of this run.

Loaders are left to `make test-all`, but for those of tests/pipeline/verifying/test_load.py; bytes and checks of some
cases are read by tests/verification/test_honest.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.cases import CASES
from tests.formats.gguf_rows import gguf_rows
from tests.formats.quick import named
from tests.formats.refused import refusals
from tests.formats.run import COLUMNS, EQUAL, Row, judged, run_cases
from tests.formats.table import between, cells_of, falls, rendered, replaced
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.hub.process import HubProcess

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"

# One run for all that are asked for; of all of them it takes minutes of processor time.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def rows(
    request: pytest.FixtureRequest, hub_process: HubProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Row]:
    """The lines of the cases whose tests are in this run."""
    asked = named(request)
    if any(item.name == test_the_page_holds_the_table_of_this_run.__name__ for item in request.session.items):
        asked = CASES.keys()
    admin: HubAdmin = hub_process.admin
    space = Namespace(hub_process.endpoint, admin, admin.create_user("formats"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", space.endpoint)
        patch.setenv("HF_TOKEN", space.token)
        found = run_cases([name for name in CASES if name in asked], space, tmp_path_factory.mktemp("formats"))
    return {row.name: row for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("column", COLUMNS)
def test_equal_or_the_error_that_the_source_gives_too(rows: dict[str, Row], name: str, column: str) -> None:
    assert column not in rows[name].wrong, rows[name].wrong[column]


@pytest.mark.slow
def test_the_page_holds_the_table_of_this_run(rows: dict[str, Row]) -> None:
    text = rendered(list(rows.values()), list(refusals()), list(gguf_rows()))
    assert falls(cells_of(between(PAGE.read_text())), cells_of(text)) == []
    assert between(PAGE.read_text()) == text, "run `python -m tests.formats --write docs/formats.md`"


@pytest.mark.slow
def test_no_line_of_the_page_is_better_than_this_run(rows: dict[str, Row]) -> None:
    page, found = cells_of(between(PAGE.read_text())), cells_of(rendered(list(rows.values()), []))
    assert page.keys() == CASES.keys() and found
    assert falls({name: page[name] for name in found}, found) == []
    assert between(PAGE.read_text()).endswith(
        rendered([], list(refusals()), list(gguf_rows())).partition("### GGUF")[2]
    )


@pytest.mark.slow
def test_tensors_and_tokenizers_are_never_anything_but_equal(rows: dict[str, Row]) -> None:
    assert {row.cells[column] for row in rows.values() for column in ("tensors", "tokenizer")} == {EQUAL}


@pytest.mark.parametrize(
    ("here", "source", "cell"),
    [
        ({"answer": 1}, None, EQUAL),  # the model itself said the same
        ({"answer": 1}, {"answer": 1}, EQUAL),
        ({"answer": 1}, {"answer": 2}, "WRONG"),
        ({"answer": 1}, {"error": "KeyError: x"}, "WRONG"),
        ({"error": "KeyError: x"}, {"error": "KeyError: x"}, "KeyError: x"),
        ({"error": "KeyError: x"}, {"error": "KeyError: y"}, "WRONG"),
        ({"error": "KeyError: x"}, {"answer": 1}, "WRONG"),
    ],
)
def test_a_cell_is_equal_or_the_sources_own_error(
    here: dict[str, object], source: dict[str, object] | None, cell: str
) -> None:
    assert judged(here, source)[0] == cell
    assert bool(judged(here, source)[1]) == (cell == "WRONG")


def test_a_cell_that_falls_and_a_case_that_goes_are_told() -> None:
    before = {"t5": {"tensors": EQUAL, "accelerate": "KeyError (1)"}, "bert": {"tensors": EQUAL}}
    assert falls(before, before) == []
    after = {"t5": {"tensors": "ImportError (1)", "accelerate": EQUAL}}
    assert falls(before, after) == [
        "t5, tensors: was equal, is ImportError (1)",
        "bert, tensors: was equal, is gone",
    ]


@pytest.mark.slow
def test_a_table_that_was_written_reads_back(rows: dict[str, Row]) -> None:
    text = rendered(list(rows.values()), [])
    found = cells_of(between(replaced("before\n" + PAGE.read_text(), text)))
    assert found.keys() == rows.keys()
    assert {name for name, cells in found.items() if cells["transformers"] == EQUAL} == {
        name for name, row in rows.items() if row.cells["transformers"] == EQUAL
    }
