"""Answers: documents of the API, and how errors become one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from reshard.client import SCHEMA
from reshard.pipeline import errors
from reshard.pipeline.arguments import retold
from reshard.pipeline.errors import ReshardError, SignInNeeded
from reshard.pipeline.request import Options

# The status of an error by its family's exit code; some have one of their own.
STATUS = {2: 400, 3: 422, 4: 403, 5: 422, 6: 422, 7: 409, 8: 503, 9: 502, 10: 409, 11: 409}
OWN_STATUS: dict[type[ReshardError], int] = {
    errors.SignInNeeded: 401,
    errors.NoSuchPage: 404,
    errors.JobNotFound: 404,
    errors.CatalogNotFound: 404,
    errors.ScheduleNotFound: 404,
    errors.WorkerNotFound: 404,
    errors.BodyTooLarge: 413,
    errors.BadLimit: 422,
    errors.BrokerUnavailable: 503,
    errors.TooManyPlans: 503,
    errors.TooManyQueued: 429,
    errors.TooManyReaders: 503,
    errors.BadSetting: 500,  # of this process, as a file of tokens that cannot be read
}

SENTENCES = {
    "run the same command again": "send the request again",
    "run the same command with": "send the request with",
    "see `reshard --help`": "see /api/v1/openapi.json",
}
NAMES = {
    "--to": "target", "--for": "options.ranks", "--no-manifest": "options.manifest false",
    "--public": "options.visibility public", "--private": "options.visibility private",
}  # fmt: skip


def document(data: Mapping[str, Any], status: int = 200) -> Response:
    text = json.dumps({"schema": SCHEMA} | dict(data), ensure_ascii=False, default=str)
    return Response(text, status, media_type="application/json")


def failed(error: ReshardError, status: int | None = None) -> Response:
    """The document of an error, which names fields of a request where a command has options."""
    error.told = lambda text: retold(text, SENTENCES, _field)
    response = document({"error": error.to_dict()}, status or status_of(error))
    if isinstance(error, SignInNeeded):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _field(option: str, value: str | None) -> str:
    field = option[2:].replace("-", "_")
    name = NAMES.get(option) or (f"options.{field}" if field in Options.model_fields else option)
    return f"{name} {value}" if value else name


def status_of(error: ReshardError) -> int:
    """The HTTP status that says most of it."""
    own = next((status for kind, status in OWN_STATUS.items() if isinstance(error, kind)), None)
    return own or STATUS.get(error.exit_code, 500)
