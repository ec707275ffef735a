"""stdout and stderr of a command: what becomes of it where they are closed, take no more, or lack a character."""

from __future__ import annotations

from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO

from reshard.pipeline.errors import OutputUnwritable


class OutputLost(OSError):
    """A stream of ours takes no more; without an errno, by which typer and rich would exit with 1 and say nothing."""

    def __init__(self, stream: int, why: OSError) -> None:
        super().__init__(f"cannot write to {stream}")
        self.stream, self.why = stream, why

    def told(self) -> None:
        """Raises OutputUnwritable."""
        stream = {1: "stdout", 2: "stderr"}.get(self.stream, "the output")
        raise OutputUnwritable(stream=stream, why=self.why.strerror or str(self.why)) from self


class _Raw(FileIO):
    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(self.fileno(), error) from error


def own(stream: TextIO) -> TextIO:
    """The same stream, which raises OutputLost: no other error of a file or a socket is taken for one of output.

    What its encoding lacks is escaped: a job does not fail because its name cannot be shown.
    """
    raw, through = _Raw(stream.fileno(), "wb", closefd=False), getattr(stream, "write_through", False)
    return TextIOWrapper(
        raw if through else BufferedWriter(raw),
        stream.encoding,
        "backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=through,
    )
