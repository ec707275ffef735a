"""The root of the tree: what every error has, and the way to a job's record and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from reshard.pipeline.figures import human_bytes
from reshard.pipeline.installed import to_add

VALUE_SHOWN = 200  # characters of a value that an error repeats: one knows it by them, and it may have any number
TAIL_SHOWN = 60  # characters of these that are its last: of a path they say most
SENTENCE_SHOWN = 1000  # characters of a fact that is prose; the longest of our own has some 400
FACT_KEPT = 4096  # characters of a fact that scripts read: PATH_MAX of Linux
# Facts that are sentences or lists, which may repeat several values.
PROSE = frozenset(
    {"what", "why", "cure", "fix", "paths", "findings", "found", "others", "allowed", "known", "more", "install"}
)

ROOM = frozenset({"needed", "free", "limit"})  # Facts in bytes of which a person needs no more than the size.

# How to go on, as hints name it: for who typed the command, and for who looks at a job on the queue.
GO_ON = {
    "again": ("run the same command again", "run `reshard retry {job}`"),
    "anew": ("run the same command again", "run `reshard retry {job} --anew`"),
    "replace": ("run the same command with --overwrite", "run `reshard retry {job} --overwrite`"),
    "where": ("", " on the worker and restart it"),
    "sign_in": ("run `hf auth login` or set HF_TOKEN", "set HF_TOKEN or RESHARD_CREDENTIALS on the worker"),
    "let_in": ("add", "ask the operator to add"),
    "findings": ("see the failed check above", "see `reshard status {job} --report`"),
    "undo": ("`reshard rollback DST`", "`reshard rollback {job}`"),
}


class ReshardError(Exception):
    """The root. Subclasses state code, message and hint; ``{names}`` in both are filled from the facts.

    What a subclass does not state, its family does; other names in its class line are facts unless given.
    """

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    defaults: ClassVar[dict[str, str]] = {}
    # The machine or its credentials are at fault and not the work, so another worker may succeed. Some instances differ
    # from their class.
    blames_worker: bool = False
    # What tells it otherwise to who calls from Python; the facts and what a job keeps stay as they are.
    told: Callable[[str], str] | None = None
    message: ClassVar[str] = "internal error: {what}"
    hint: ClassVar[str] = "this is a bug; please report it with the traceback or the worker's log"

    def __init_subclass__(
        cls,
        code: str,
        exit_code: int | None = None,
        retryable: bool | None = None,
        blames_worker: bool = False,
        **defaults: str,
    ) -> None:
        cls.code, cls.defaults = code, defaults
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        cls.retryable = cls.retryable if retryable is None else retryable
        cls.blames_worker = cls.blames_worker or blames_worker

    def __init__(self, **facts: Any) -> None:
        facts = {**self.defaults, **facts}
        self.facts = {name: shortened(f, FACT_KEPT) if isinstance(f, str) else f for name, f in facts.items()}
        if "extra" in self.facts:  # how to install it there is a fact of the machine where it is missing
            self.facts.setdefault("install", to_add(self.facts["extra"]))
        super().__init__(_agreed(self.message.format_map(_told(self.facts))))

    def __reduce__(self) -> tuple[Any, ...]:
        """Whole, as another process gets it from a pool: what is made anew from its text would have no facts."""
        return _anew, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        return self._as_told(super().__str__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def _as_told(self, text: str) -> str:
        return self.told(text) if self.told else text

    @property
    def next_step(self) -> str:
        """The hint with its facts filled in, and with how to go on: with a job, where a worker has added which."""
        job = self.facts.get("job")
        on = {name: of_a_job.format(job=job) if job else typed for name, (typed, of_a_job) in GO_ON.items()}
        hint = self.hint.format_map({"job": "JOB", "command": "reshard", "help": "--help", **on, **_told(self.facts)})
        return self._as_told(_agreed(hint))

    @property
    def logged(self) -> dict[str, object]:
        """Fields of a log's line that tells it: its code, and the Hub's id of the call that it refused, if it did."""
        return {"code": self.code, "request_id": self.facts.get("request_id")}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, whatever the facts are: a job must be able to keep every error. ``from_dict`` reads it."""
        facts = json.loads(json.dumps(self.facts, default=str))
        return {"code": self.code, "message": str(self), "hint": self.next_step, "facts": facts}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ReshardError:
        """The error that ``to_dict`` described; a code, or facts, of another release become the root class."""
        try:
            error = by_code()[data["code"]](**data["facts"])
            _ = error.next_step
        except (KeyError, TypeError):
            return ReshardError(what=f"{data['code']}: {data['message']}")
        return error


def _anew(kind: type[ReshardError], args: tuple[Any, ...]) -> ReshardError:
    return kind.__new__(kind, *args)


def shortened(text: str, most: int = VALUE_SHOWN) -> str:
    """``text``, or of a longer one both ends.

    >>> shortened("a" * 10**7 + "/config.json")[-20:], len(shortened("a" * 10**7))
    ('aaaaaaaa/config.json', 200)
    """
    return text if len(text) <= most else f"{text[: most - TAIL_SHOWN - 3]}...{text[-TAIL_SHOWN:]}"


def _told(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as a person reads them: ``209,715,200``; what was typed stays as it was, as far as it is repeated."""
    return {name: _said(name, fact) for name, fact in facts.items()}


def _agreed(text: str) -> str:
    """Messages count bytes and the like, of which there may be one."""
    return re.sub(r"(?<![\d.,])1 (byte|attempt|time)s\b", r"1 \1", text)


def _said(name: str, fact: Any) -> Any:
    if type(fact) is int:
        if name in ROOM:
            return human_bytes(fact)
        return fact if name in {"line", "value"} else f"{fact:,}"
    if name in PROSE and isinstance(fact, str):
        words = re.sub(r"\S+", lambda word: shortened(word[0]), fact)
        return shortened(words, SENTENCE_SHOWN)
    return shortened(str(fact)) if isinstance(fact, str | list | tuple | dict | PurePath) else fact


def by_code() -> dict[str, type[ReshardError]]:
    """Every error class by its code."""

    def tree(kind: type[ReshardError]) -> Iterator[type[ReshardError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from tree(child)

    return {kind.code: kind for kind in tree(ReshardError)}
