"""The table of operations: each is declared once, and carried out here, over HTTP, or for whoever asks the API.

An operation is a function of a session, of the names in its path, and of a ``body`` or a ``query``; it returns a
document. Called with a session, it is carried out where that leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.client.models.records import Document
from reshard.pipeline.errors import BadBody
from reshard.pipeline.limits import REQUEST_MAX
from reshard.pipeline.request import Request
from reshard.pipeline.validation import first_problem

if TYPE_CHECKING:
    from reshard.client.queue import Queue
    from reshard.pipeline.stores.connect import Context

BODY_MAX = 1_000_000  # bytes; a catalog of 20,000 entries has so many, and longer ones are for the broker
LISTED = 50  # jobs, schedules or catalogs of a page, unless told otherwise

P = ParamSpec("P")
Answered = TypeVar("Answered", bound=Document)
Model = TypeVar("Model", bound=BaseModel)
Row = TypeVar("Row", bound=Document)
Method = Literal["GET", "POST", "DELETE"]


class Body(BaseModel):
    """What is sent: nothing that is not known."""

    most: ClassVar[int] = REQUEST_MAX  # bytes
    model_config = ConfigDict(extra="forbid")


def read(model: type[Model], data: Mapping[str, Any] | bytes, whole: str = "the body") -> Model:
    """What was sent, as JSON or as fields; raises BadBody, where ``whole`` is what all of it is called."""
    try:
        return model.model_validate_json(data) if isinstance(data, bytes) else model.model_validate(data)
    except ValidationError as error:
        first = first_problem(error)
        raise BadBody(where=first.where or whole, why=first.why) from error


class OfPages(Protocol):
    """A document that is one page of several."""

    next: Any  # null on the last


class AsksAPage(Protocol):
    """What a page is asked for by."""

    after: Any  # ``next`` from the page before

    def model_copy(self, *, update: Mapping[str, Any]) -> Self: ...


Page = TypeVar("Page", bound=OfPages)
Query = TypeVar("Query", bound=AsksAPage)


def page_of(names: Sequence[str], limit: int, row: Callable[[str], Row | None]) -> tuple[list[Row], str | None]:
    """The rows of the first names, PAGE_BYTES at most or one, and the last name of the page, where others follow."""
    from reshard.worker.queue.jobs import PAGE_BYTES  # whoever lists has it loaded; who asks over HTTP need not

    rows, size = list[Row](), 0
    for at, name in enumerate(names[:limit]):
        if (one := row(name)) is None:
            continue
        size += len(one.model_dump_json())
        if rows and size > PAGE_BYTES:
            return rows, names[at - 1]
        rows.append(one)
    return rows, names[limit - 1] if limit < len(names) else None


def pages(ask: Callable[[Query], Page], query: Query) -> Iterator[Page]:
    """All pages from ``query`` on. What a service says of its next page goes back to it as it is."""
    while True:
        page = ask(query)
        yield page
        if page.next in {None, "", query.after}:
            return
        query = query.model_copy(update={"after": page.next})


class Session(Protocol):
    """Where operations are carried out: on the queue of a broker, or by `reshard web`.

    Every operation raises the QueueError family when the queue cannot be asked, and what its act is refused with.
    """

    def perform(self, operation: Operation[P, Answered], /, *args: P.args, **kwargs: P.kwargs) -> Answered: ...

    def linger(self, job: str, after: str, seconds: float) -> None:
        """Wait until something happens to a job after that event, or so long."""


class InProcess:
    """The queue of a broker, for whoever may reach it; what a job may name is the workers' to refuse."""

    served: ClassVar[bool] = False  # whether a service does it for others, with tokens of its own

    def __init__(self, queue: Queue, caller: str) -> None:
        self.queue = queue
        self.caller = caller  # who asks, for the record

    def perform(self, operation: Operation[P, Answered], /, *args: P.args, **kwargs: P.kwargs) -> Answered:
        with self.queue.answering():
            return operation.run(self, *args, **kwargs)

    def linger(self, job: str, after: str, seconds: float) -> None:
        with self.queue.answering():
            self.queue.jobs.events(job, after, seconds)

    def allow(self, request: Request, context: Context | None = None, has_target: bool = True) -> None:
        """Raises what no worker carries out, and what a service does not let be done with the ``context`` it has."""
        request.options.require_named_key()

    def allow_hubs(self, endpoints: Set[str]) -> None:
        """The same of the Hubs that a catalog names; its models are the workers' to refuse, each by itself."""

    @contextmanager
    def hub(self) -> Iterator[Context]:
        """The tokens and budgets that Hubs are called with."""
        from reshard.pipeline.stores.connect import Context

        with closing(Context.from_env()) as context:
            yield context


class Operation(Generic[P, Answered]):
    """One row of the table; ``run`` carries it out on a queue."""

    def __init__(self, method: Method, path: str, run: Callable[Concatenate[InProcess, P], Answered]) -> None:
        self.method = method
        self.path = path  # below the API's root; {names} are arguments
        self.run = run
        self.scope: Literal["read", "act"] = "read" if method == "GET" else "act"
        self.summary = (run.__doc__ or "").partition("\n")[0]

    def __call__(self, session: Session, /, *args: P.args, **kwargs: P.kwargs) -> Answered:
        return session.perform(self, *args, **kwargs)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.run)

    @property
    def answer(self) -> type[Answered]:
        return self._hints["return"]  # type: ignore[no-any-return]

    @property
    def body(self) -> type[Body] | None:
        return self._hints.get("body")

    @property
    def query(self) -> type[Body] | None:
        return self._hints.get("query")


def operation(
    method: Method, path: str
) -> Callable[[Callable[Concatenate[InProcess, P], Answered]], Operation[P, Answered]]:
    """Makes a function a row of the table, with its docstring's first line. What is no GET needs the scope ``act``."""
    return lambda run: Operation(method, path, run)
