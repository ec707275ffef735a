"""Schedules of kills, each on a moment that was waited for. ``check`` then says whether every invariant held.

They are functions of a service, so that test_the_suite_can_fail.py can run the same ones on workers that are broken.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.service import Service, Transport, Violated, Work
from tests.support.procs import wait_for


@dataclass(frozen=True)
class Moment:
    """A request during which a worker can be caught: held before it is carried out, or before its answer."""

    match: Callable[[Work], str]
    when: str = "request"
    lost: bool = False  # it never arrives

    def lay(self, service: Service, work: Work) -> int:
        rule = service.admin.fault(self.match(work), "hold", times=1, when=self.when)
        if self.lost:
            service.admin.fault(self.match(work), "reset", times=1)
        return rule


MOMENTS = {
    "planning": Moment(lambda work: rf"^GET /api/models/{work.target}/revision/"),
    "copying": Moment(lambda work: work.upload),
    "after the last receipt": Moment(lambda work: rf"^POST /api/models/{work.target}/preupload/"),
    "before the commit": Moment(lambda work: work.commit, lost=True),
    "after the commit, before its response": Moment(lambda work: work.commit, when="answer"),
    "confirming": Moment(lambda work: rf"^GET /{work.target}/resolve/"),
}


def caught(service: Service, transport: Transport, moment: Moment) -> tuple[Work, int]:
    """A job whose worker stands in ``moment``, and the rule that holds it there."""
    work = service.prepare(transport)
    rule = moment.lay(service, work)
    work = service.submit(work)
    service.admin.wait_for_fault(rule, waiting=1)
    return work, rule


def worker_killed(service: Service, transport: Transport, moment: Moment) -> None:
    """A whole worker dies in ``moment``, and another machine's goes on."""
    work, _ = caught(service, transport, moment)
    worker, _ = service.holder(work)
    service.kill_worker(worker)
    service.admin.clear_faults()
    service.check(work)
    service.expect_event(work, "lost")


def child_killed(service: Service, transport: Transport, moment: Moment = MOMENTS["copying"]) -> None:
    """One child of a worker dies, and its brothers go on."""
    work, _ = caught(service, transport, moment)
    worker, child = service.holder(work)
    service.kill_child(child)
    service.admin.clear_faults()
    service.check(work)
    service.expect_event(work, "lost")
    assert worker.alive()


def control_and_worker_killed(service: Service, transport: Transport) -> None:
    """Nobody is left to notice the dead; the next control process does."""
    work, _ = caught(service, transport, MOMENTS["copying"])
    service.kill_control()
    worker, _ = service.holder(work)
    service.kill_worker(worker)
    service.admin.clear_faults()
    service.mend()
    service.check(work)


def broker_killed(service: Service, transport: Transport) -> None:
    """In the middle of a copy. What was answered is on its disk, so nothing is copied twice."""
    work, _ = caught(service, transport, MOMENTS["copying"])
    service.broker.kill()
    service.admin.clear_faults()
    service.mend()
    service.ended(work)
    service.kills += service.count_events(work, "lost")  # none, unless a busy machine has it back after a lease's end
    service.check(work)


def all_killed(service: Service, transport: Transport) -> None:
    work, _ = caught(service, transport, MOMENTS["copying"])
    service.kill_all()
    service.admin.clear_faults()
    service.mend()
    service.check(work)


def woken_for_nothing(service: Service, transport: Transport) -> None:
    """Wakes come many times over while everything is being copied: they find nothing to do."""
    work, _ = caught(service, transport, Moment(lambda work: work.upload))
    wait_for(lambda: len(service.store.get(work.job).claims) == 1, "all other groups' end")
    before = service.tokens(work)
    for _ in range(8):
        service.wake(work)
    wait_for(lambda: service.store.waiting()["interactive"] == 0, "the wakes being taken")
    service.admin.clear_faults()
    service.check(work)
    for unit, token in before.items():
        if service.finishers(work)[unit] != token:
            raise Violated("one owner", f"{unit} was claimed while its owner was at work\n{service.story(work)}")


def zombie_comes_back(service: Service, transport: Transport) -> None:
    """A worker hangs until another one has its unit, and then goes on as if nothing had been."""
    moment = MOMENTS["after the last receipt"]
    work, first = caught(service, transport, moment)
    second = moment.lay(service, work)
    zombie, _ = service.holder(work)
    before = service.tokens(work)["publish"]
    zombie.signal_all(signal.SIGSTOP)
    try:
        service.admin.wait_for_fault(second, waiting=1)
        owner = service.tokens(work)["publish"]
    finally:
        zombie.signal_all(signal.SIGCONT)
    assert owner != before
    service.admin.release(first)
    heard = f"publish of job {work.job} stopped: lease"
    wait_for(lambda: heard in zombie.said() or service.store.get(work.job).state.ended, "the zombie's end")
    service.admin.clear_faults()
    service.check(work)
    if service.finishers(work)["publish"] != owner:
        raise Violated("one owner", f"a zombie published\n{service.story(work)}")


def two_finishers(service: Service, transport: Transport) -> None:
    """The commit of a dead worker is still on its way when its successor makes its own."""
    work, _ = caught(service, transport, Moment(lambda work: work.commit))
    worker, _ = service.holder(work)
    service.kill_worker(worker)
    service.admin.wait_for_request(work.commit)
    service.admin.clear_faults()
    service.check(work)


Scenario = Callable[[Service, Transport], None]
SHORT: list[Scenario] = [
    child_killed,
    control_and_worker_killed,
    woken_for_nothing,
    zombie_comes_back,
    two_finishers,
]
LONG: list[Scenario] = [*SHORT, broker_killed, all_killed]
