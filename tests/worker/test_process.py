"""What a process of a worker keeps from one unit to the next."""

from __future__ import annotations

import shutil
from pathlib import Path

from reshard.worker.process import OwnProcess


def test_a_temporary_folder_that_a_cleaner_took_is_made_again(tmp_path: Path) -> None:
    process = OwnProcess(tmp_path)
    first = process.temp_dir()
    assert process.temp_dir() is first
    shutil.rmtree(first)
    second = process.temp_dir()
    assert second != first and second.is_dir()
    process.end()
    assert list(tmp_path.iterdir()) == []
