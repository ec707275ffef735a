"""An endpoint of the API: what it takes and answers, and who may call it. Routes and OpenAPI are made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.client.queue import Queue
from reshard.pipeline.errors import BadBody
from reshard.pipeline.limits import REQUEST_MAX
from reshard.pipeline.validation import first_problem
from reshard.web.auth import Caller, Scope
from reshard.worker.settings import Settings

BODY_MAX = 1_000_000  # bytes; the longest catalog has some hundred kilobytes
Model = TypeVar("Model", bound=BaseModel)


class Body(BaseModel):
    """Nothing that is not known."""

    most: ClassVar[int] = REQUEST_MAX  # bytes
    model_config = ConfigDict(extra="forbid")


def read(model: type[Model], data: Mapping[str, Any] | bytes, whole: str = "the body") -> Model:
    """What was sent, as JSON or as fields; raises BadBody, where ``whole`` is what all of it is called."""
    try:
        return model.model_validate_json(data) if isinstance(data, bytes) else model.model_validate(data)
    except ValidationError as error:
        first = first_problem(error)
        raise BadBody(where=first.where or whole, why=first.why) from error


class Call(NamedTuple):
    """What an endpoint's function is given."""

    queue: Queue
    caller: Caller
    path: Mapping[str, str]
    query: Any  # the endpoint's query model
    body: Any  # the endpoint's body model
    settings: Settings


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``run`` returns the document without its schema, and may raise any ReshardError."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # below the API's root; {names} are the call's ``path``
    scope: Scope
    summary: str
    answer: Any  # a model of client/models
    run: Callable[[Call], Mapping[str, Any]]
    query: type[BaseModel] | None = None
    body: type[Body] | None = None


ENDPOINTS: list[Endpoint] = []


def endpoint(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    answer: Any,
    *,
    query: type[BaseModel] | None = None,
    body: type[Body] | None = None,
    scope: Scope | None = None,
) -> Callable[[Callable[[Call], Mapping[str, Any]]], Callable[[Call], Mapping[str, Any]]]:
    """Adds a function to the API, its docstring's first line as its summary. What changes something takes ``act``."""

    def add(run: Callable[[Call], Mapping[str, Any]]) -> Callable[[Call], Mapping[str, Any]]:
        needed = scope or (Scope.read if method == "GET" else Scope.act)
        summary = (run.__doc__ or "").partition("\n")[0]
        ENDPOINTS.append(Endpoint(method, path, needed, summary, answer, run, query, body))
        return run

    return add
