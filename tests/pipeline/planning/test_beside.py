from __future__ import annotations

import time

from reshard.pipeline.checkpoint.discover import Found
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.checkpoint.parts import FileSet
from reshard.pipeline.planning.beside import sort_out
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Name, StoredFile
from tests.support.measured import within


def test_files_of_other_steps_are_sorted_out_in_a_time_that_their_number_gives() -> None:
    latest, read = StoredFile("latest", 10), StoredFile("step9/a_model_states.pt", 1)
    steps = tuple(f"old{number}" for number in range(20_000))
    listing = {path: StoredFile(path, 1) for step in steps for path in [f"{step}/deep/a.pt"]}
    found = Found((FileSet(Name("", "model"), "zero", (read,), metadata=latest, other_steps=steps),), frozenset())
    start = time.process_time()
    carried, left_out = sort_out(listing, found, Opened((), (), {}), Options())
    assert within(time.process_time() - start, 3.0)
    assert not carried and {one.why for one in left_out} == {"another step; latest selects step9"}
    assert len(left_out) == len(steps)
