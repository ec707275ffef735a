"""Operations as a service carries them out for those who ask it: by its rules, and few at once that wait for a Hub."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import closing, contextmanager
from dataclasses import replace
from threading import BoundedSemaphore

from reshard.client.operations.table import InProcess
from reshard.client.queue import Queue
from reshard.pipeline.errors import TooManyPlans
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context, RateLimiterOf
from reshard.worker.fleet import policy
from reshard.worker.settings import Settings

HUB_CALLS = 16  # plans and rollbacks at once; each holds one of the 40 threads for everybody's requests
_places = BoundedSemaphore(HUB_CALLS)


class Served(InProcess):
    """For ``caller``, within RESHARD_ALLOWED_* of this process."""

    served = True

    def __init__(self, queue: Queue, settings: Settings, caller: str) -> None:
        super().__init__(queue, caller)
        self.settings = settings

    def allow(self, request: Request, context: Context | None = None, has_target: bool = True) -> None:
        """Raises what a worker would that has this process's rules; what its token may do, it knows itself."""
        if has_target:
            policy.check(
                request,
                self.settings,
                lambda target: policy.namespaces(target, context) if context else [target.namespace],
            )
        else:
            policy.check_sources(request, self.settings)

    def allow_hubs(self, endpoints: Set[str]) -> None:
        for endpoint in sorted(endpoints):
            policy.check_endpoint(endpoint, self.settings)

    @contextmanager
    def asking(self, limiters: RateLimiterOf | None = None) -> Iterator[Context]:
        """This process's tokens and budgets, for the Hubs that it may call."""
        context = Context.from_env(limiters)
        with closing(replace(context, endpoints=policy.endpoints(self.settings, context.credentials))) as own:
            yield own

    @contextmanager
    def hub(self) -> Iterator[Context]:
        """The same, for a call that may wait for a Hub for minutes: raises TooManyPlans where HUB_CALLS do."""
        if not _places.acquire(blocking=False):
            raise TooManyPlans(most=HUB_CALLS)
        try:
            with self.asking() as context:
                yield context
        finally:
            _places.release()
