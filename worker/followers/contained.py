"""What goes wrong with one schedule or catalog must stop neither the others nor what else control does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from reshard.pipeline.errors import BadSchedule, CatalogNotFound, ScheduleNotFound, ScheduleUnreadable
from reshard.worker.queue.scripts import BROKER_UNAVAILABLE

log = logging.getLogger(__name__)


class Contained:
    """Logs what goes wrong with each, once until it goes well again; only a broker that is unavailable passes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._broken: set[str] = set()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        try:
            yield
        except (CatalogNotFound, ScheduleNotFound) as error:
            log.info("removed or restarted meanwhile: %s", error)
        except BROKER_UNAVAILABLE:
            raise
        except Exception as error:
            if name not in self._broken:
                # A newer release's, or a time zone that is unknown here.
                if isinstance(error, ValidationError | ScheduleUnreadable | BadSchedule):
                    log.error(
                        "cannot read %s %s here; leaving it to another control process: %s", self._what, name, error
                    )
                else:
                    log.exception("%s %s failed for an unknown reason and waits", self._what, name)
            self._broken.add(name)
        else:
            self._broken.discard(name)
