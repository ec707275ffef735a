"""The overview of a real process: what an operator is told there and does next, and what it shows as failing."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

from reshard.client.operations.table import LISTED
from reshard.pipeline.errors import UsageError
from reshard.web.pages.overview import AT_WORK_MAX
from reshard.web.pages.wording import COPY
from reshard.worker.fleet.heartbeat import announce, withdraw
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.schedules import TROUBLE, Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, job_key, server_ms
from tests.support.procs import wait_for
from tests.web.conftest import Site, signed_in
from tests.worker.conftest import Wakes, ask, claimed, followed, process
from tests.worker.followers.builders import begin, definition, fail, finish, jobs, nightly


def test_a_stopped_worker_is_shown_with_what_to_do_until_it_is_back_or_removed(site: Site, store: JobStore) -> None:
    command = [sys.executable, "-c", "input()  # as reshard, by its command line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as lives, signed_in(site, "read") as client:
        try:
            worker = process(f"{socket.gethostname()}:{lives.pid}")
            announce(store.redis, worker)
            lives.send_signal(signal.SIGSTOP)
            store.redis.delete(f"{PREFIX}process:{worker.name}")  # as after PRESUMED_DEAD
            says = f"{worker.name} is stopped: resume it with <code>kill -CONT {lives.pid}</code>{COPY} or replace it"
            says += f" with <code>reshard up --restart</code>{COPY}"
            # Beside why nothing is begun, which is said on every page as long as no other worker is there.
            wait_for(lambda: client.get("/").text.count(says) == 2, "its line")
            assert "No worker is running" not in client.get("/").text
            announce(store.redis, worker)
            assert "is stopped" not in client.get("/").text
            store.redis.delete(f"{PREFIX}process:{worker.name}")
            assert client.get("/").text.count(says) == 2
            withdraw(store.redis, worker)
            seen = client.get("/").text
            assert "is stopped" not in seen and "No worker is running" in seen
        finally:
            lives.kill()


def failing(site: Site, store: JobStore) -> str:
    """The section of what fails, once control has heard what happened."""
    followed(store)
    with signed_in(site, "read") as client:
        return client.get("/").text.partition('id="failing"')[2].partition("</section>")[0]


def test_a_skipped_time_of_a_schedule_is_not_shown_as_the_job_that_stood_in_its_way(
    site: Site, store: JobStore
) -> None:
    now = [server_ms(store.redis) / 1000]
    schedules, leases = Schedules(store, lambda: now[0]), Leases(store, Wakes(), "worker-a")
    now[0] = max(schedules.add(nightly(name, ask(size=size))) for name, size in (("s1", 1000), ("s2", 2000)))
    (_, first), (_, second) = schedules.fire_due()
    assert (first.outcome, second.outcome, first.job) == ("fired", "busy", second.job) and first.job
    finish(leases, first.job)
    shown = failing(site, store)
    assert "name=s2" in shown and "name=s1" not in shown
    assert f"skipped: job {first.job} was writing to the same target for another request" in shown
    assert f'href="/jobs/{first.job}"' not in shown and "done" not in shown


def test_a_schedule_whose_last_run_is_still_at_work_is_shown_as_skipped_and_not_as_failing(
    site: Site, store: JobStore
) -> None:
    now = [server_ms(store.redis) / 1000]
    schedules = Schedules(store, lambda: now[0])
    now[0] = schedules.add(nightly("s1", ask()))
    ((_, first),) = schedules.fire_due()
    now[0] += 86_400
    ((_, second),) = schedules.fire_due()
    assert (first.outcome, second.outcome) == ("fired", "overlap")
    shown = failing(site, store)
    assert "Failed or missed" in shown and f"skipped: previous job {first.job} was still in progress" in shown
    assert "Failing" not in shown and ">Failed<" not in shown
    with signed_in(site, "read") as client:
        there = client.get("/schedules").text
    assert "failed or missed</span>" in there and "failing</span>" not in there


def test_the_overview_and_the_api_show_a_schedule_whose_catalog_stays_paused(site: Site, store: JobStore) -> None:
    """To its schedule a paused catalog is a run still in progress: nothing else would tell that no night is met."""
    now, wanted = [server_ms(store.redis) / 1000], definition(2)
    catalogs, schedules = Cursor(store), Schedules(store, lambda: now[0])
    begin(catalogs, wanted)
    assert catalogs.pause("mirror")
    now[0] = schedules.add(Schedule(name="s1", cron="0 3 * * *", catalog=wanted))
    for _ in range(5):
        ((_, run),) = schedules.fire_due()
        assert run.outcome == "overlap"
        now[0] += 86_400
    assert "name=s1" in failing(site, store)
    with site.client() as client:
        found = client.get("/api/v1/schedules?failing=true").json()["schedules"]
    assert [one["name"] for one in found] == ["s1"]


def test_a_failed_catalog_that_is_expanded_again_is_shown_without_a_count_of_models(
    site: Site, store: JobStore
) -> None:
    catalogs, leases = Cursor(store), Leases(store, Wakes(), "worker-a")
    begin(catalogs, definition(1))
    fail(leases, jobs(catalogs)[0])
    assert "1 of 1 model" in failing(site, store)
    assert catalogs.submit(definition(1))
    shown = failing(site, store)
    assert "expanding</span> next run started <time" in shown and "0 of 0" not in shown
    run = catalogs.claim("mirror", "token")
    catalogs.refuse("mirror", run, "token", UsageError(what="no such owner"))
    shown = failing(site, store)
    assert "no such owner" in shown and "0 of 0" not in shown and "next run" not in shown


def test_a_worker_at_an_old_job_is_shown_so_however_many_wait(site: Site, store: JobStore) -> None:
    worker = process(f"{socket.gethostname()}:1")
    announce(store.redis, worker)
    job = store.submit(ask("first")).id
    claimed(Leases(store, Wakes(), worker.name), job, "plan")
    for number in range(AT_WORK_MAX):
        store.submit(ask(f"m{number}"))
    with signed_in(site, "read") as client:
        workers = client.get("/").text.partition('id="workers"')[2].partition("</section>")[0]
    assert f'href="/jobs/{job}"' in workers and "idle" not in workers


def test_a_worker_at_an_old_job_is_shown_so_however_many_have_begun_since(site: Site, store: JobStore) -> None:
    leases = Leases(store, Wakes(), "elsewhere:1.5")
    old = store.submit(ask("old")).id
    claimed(leases, old, "plan")
    announce(store.redis, process("elsewhere:1"))
    with store.redis.pipeline() as pipe:  # as jobs that await their next try
        for number in range(AT_WORK_MAX):
            id = store.submit(ask(f"m{number}")).id
            pipe.zrem(f"{PREFIX}jobs:queued", id)
            pipe.zadd(f"{PREFIX}jobs:planning", {id: server_ms(store.redis) + 1})
            pipe.hset(job_key(id), "state", "planning")
        pipe.execute()
    with signed_in(site, "read") as client:
        workers = client.get("/").text.partition('id="workers"')[2].partition("</section>")[0]
    assert f"{old} plan" in workers and "idle" not in workers


def test_every_schedule_in_trouble_is_shown_and_leads_to_itself(site: Site, store: JobStore) -> None:
    schedules, now = Schedules(store), server_ms(store.redis)
    names = [f"s{number:03}" for number in range(LISTED + 5)]
    for name in names:
        schedules.add(nightly(name, ask(name)))
        store.redis.hset(TROUBLE, name, now)
    with signed_in(site) as client:
        seen = client.get("/").text.partition('id="failing"')[2].partition("</section>")[0]
        assert re.findall(r'href="/schedules\?name=(\w+)"', seen) == names
        last = client.get(f"/schedules?name={names[-1]}").text
        assert re.findall(r"<h2>(s\d+) ?<", last) == names[-1:] and "All schedules" in last
        paused = client.post(f"/schedules/{names[-1]}/pause")
    assert f'id="s-{names[-1]}"' in paused.text and "paused" in paused.text
