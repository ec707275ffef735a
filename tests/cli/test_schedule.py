"""`reshard schedule ...` against a real broker on which nobody works."""

from __future__ import annotations

import json
import re
from pathlib import Path

from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.schedules import ALL, Schedules
from reshard.worker.queue.jobs import JobStore
from tests.cli.conftest import WHEN, Done, Queue
from tests.worker.conftest import another
from tests.worker.followers.builders import begin, definition, finish, jobs, nightly


def add(queue: Queue, name: str, *options: str) -> Done:
    return queue("schedule", "add", name, "a/model", "--to", f"b/{name}", "--cron", "0 3 * * *", *options)


def test_a_schedule_from_its_adding_to_its_removal(queue: Queue) -> None:
    added = add(queue, "nightly", "--tz", "Europe/Berlin", "--size", "1MB", "--dtype", "bfloat16")
    assert added.code == 0
    assert "a/model -> b/nightly, at most 1,000,000 bytes per file, --dtype bfloat16, first run " in added.out
    assert " 03:00 CE" in added.out
    assert "the control process is not running" in added.err

    fired = queue("schedule", "run", "nightly", "--quiet").out.strip()
    (job,) = queue("status", fired, "--json").documents
    assert (job["request"]["priority"], job["request"]["options"]["size"]) == ("bulk", 1_000_000)
    assert "still in progress" in queue("schedule", "run", "nightly").out
    queue("cancel", fired)

    days = queue("schedule", "next", "nightly", "-n", "5").out.splitlines()
    assert len({*days}) == 5 and all(" 03:00 CE" in day for day in days)
    assert len(queue("schedule", "next", "nightly", "--json").documents[0]["next"]) == 1

    assert queue("schedule", "pause", "nightly").code == 0
    assert queue("schedule", "next", "nightly").out == "paused\n"
    head, row = queue("schedule", "list").out.splitlines()
    assert re.split("  +", head) == ["SCHEDULE", "NEXT", "LAST RUN", "LAST SUCCESS"]
    assert re.split("  +", row)[:2] == ["nightly", "paused"]
    assert row.index("none yet") == head.index("LAST SUCCESS")
    assert " 03:00 CE" in queue("schedule", "resume", "nightly").out
    (shown,) = queue("schedule", "show", "nightly", "--json").documents
    assert [run["outcome"] for run in shown["runs"]] == ["overlap", "fired"]
    assert shown["request"]["priority"] == "bulk"
    assert "missed times run once" in queue("schedule", "show", "nightly").out

    assert queue("schedule", "remove", "nightly").code == 0
    assert queue("schedule", "list").out == "No schedules\n"


def test_a_time_zone_that_only_another_machine_knows_hides_no_schedule(queue: Queue, url: str) -> None:
    assert add(queue, "nightly").code == 0
    with JobStore.at(url) as store:
        kept = json.loads(store.redis.hget(ALL, "nightly"))
        store.redis.hset(ALL, "nightly", json.dumps(kept | {"tz": "America/Newtown"}))
    assert " 03:00 UTC" in queue("schedule", "list").out and queue("schedule", "show", "nightly").code == 0


def test_a_schedule_shows_that_its_last_job_was_deleted(queue: Queue) -> None:
    assert add(queue, "forgetful").code == 0
    fired = queue("schedule", "run", "forgetful", "--quiet").out.strip()
    queue("cancel", fired)
    assert queue("delete", fired).code == 0
    assert f"job {fired} (since deleted)" in queue("schedule", "list").out
    assert queue("schedule", "show", "forgetful").code == 0
    assert queue("schedule", "remove", "forgetful").code == 0


def test_what_is_wrong_is_said_in_one_line(queue: Queue) -> None:
    assert add(queue, "taken").code == 0
    for done, code, said in (
        (add(queue, "taken"), 10, "error[queue.schedule_exists]: schedule taken already exists"),
        (add(queue, "zone", "--tz", "Mars/Base"), 2, "error[usage.schedule]: --tz 'Mars/Base' is not a time zone"),
        (add(queue, "n" * 64), 2, "error[usage]: name: "),
        (add(queue, "when", "--cron", "0" * 251), 2, "error[usage]: cron: "),
        (add(queue, "zone", "--tz", "z" * 101), 2, "error[usage]: tz: "),
        (add(queue, "Big"), 2, "error[usage.schedule]: 'Big' is not a valid name"),
        (queue("schedule", "show", "nobody"), 10, "error[queue.no_schedule]: schedule not found: nobody"),
    ):
        assert done.code == code
        assert done.err.splitlines()[-2].startswith(said)
    for options, hint in (
        (("--tz", "Mars/Base"), "use a name such as Europe/Berlin, or UTC"),
        (("--cron", "0 3 * *"), "use five fields (minute hour day month weekday) or @daily: "),
    ):
        assert add(queue, "zone", *options).err.splitlines()[-1].startswith(f"hint: {hint}")


def test_schedules_and_catalogs_show_their_last_success(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        schedules, catalogs = Schedules(store), Cursor(store)
        schedules.add(nightly("watched", tz="Asia/Tokyo"))
        assert re.search("^watched .* none yet$", queue("schedule", "list").out, re.MULTILINE)
        begin(catalogs, definition(1))
        for job in (schedules.run("watched").job or "", *jobs(catalogs)):
            finish(another(store), job)
        jobs(catalogs)
        expected = schedules.get("watched").success, catalogs.get("mirror").success
    due = r"\d{4}-\d\d-\d\d \d\d:\d\d JST"  # in the schedule's zone, as its next time is
    shown = queue("schedule", "show", "watched").out
    assert re.search(rf"^next +{due}$", shown, re.MULTILINE) and re.search(
        rf"^last success +{due}$", shown, re.MULTILINE
    )
    for command, form in ((("schedule", "list"), due), (("catalog", "status"), WHEN)):
        head, *rows = queue(*command).out.splitlines()
        last = [row[head.index("LAST SUCCESS") :] for row in rows if row.startswith(("watched", "mirror"))]
        assert [re.match(form, text) is not None for text in last] == [True], command
    shown = [
        queue(*command, "--json").documents[0] for command in (("schedule", "show", "watched"), ("catalog", "status"))
    ]
    assert tuple(seen["success"] for seen in shown) == expected


def test_a_dry_run_of_a_request_says_what_it_would_write_or_that_nothing_changed(
    queue: Queue, model: Path, tmp_path: Path
) -> None:
    asked = (model, "--to", tmp_path / "out", "--size", "5kB")
    assert queue("schedule", "add", "folder", *asked, "--cron", "0 3 * * *").code == 0
    _, now, job = queue("schedule", "next", "folder", "--dry-run").out.splitlines()
    assert now.split(maxsplit=1) == ["now", "would be submitted"]
    assert job.split(maxsplit=1)[1].startswith(f"{model} -> {tmp_path / 'out'}: 3 files, ")
    assert not (tmp_path / "out").exists()
    assert queue("run", *asked).code == 0
    *_, same = queue("schedule", "next", "folder", "--dry-run").out.splitlines()
    assert same == f"unchanged  {tmp_path / 'out'} is up to date"
    fired = queue("schedule", "run", "folder", "--quiet").out.strip()
    (facts,) = queue("schedule", "next", "folder", "--dry-run", "--json").documents
    assert (facts["would"]["outcome"], facts["would"]["job"]) == ("overlap", fired)
    assert len(queue("schedule", "show", "folder", "--json").documents[0]["runs"]) == 1
