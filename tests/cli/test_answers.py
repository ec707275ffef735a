"""Every command with --json, against docs/reference/json.md; `documents` compares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from docs.answers import ANSWERS
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.followers.cursor import Cursor
from reshard.worker.queue.jobs import JobStore, Process
from tests.cli.conftest import Queue
from tests.hub.fixtures import Namespace
from tests.support.models import arrays, save_single
from tests.worker.conftest import another, followed
from tests.worker.followers.builders import begin, definition, fail, jobs


@pytest.mark.slow
def test_every_command_answers_as_it_is_documented(
    queue: Queue, url: str, clean: dict[str, str], namespace: Namespace, model: Path, tmp_path: Path
) -> None:
    clean["HF_ENDPOINT"] = namespace.endpoint
    seen = set()

    def answers(*typed: str | Path, code: int = 0) -> list[dict[str, object]]:
        done = queue(*typed, "--json")
        assert done.code == code, done.out + done.err
        assert done.documents[0].keys() != {"error"}
        seen.add(done.command)
        return done.documents

    mixture = tmp_path / "models" / "mixture"
    save_single(mixture, {f"model.layers.0.mlp.experts.{i}.up_proj.weight": np.zeros(8, np.uint8) for i in range(2)})
    out, file, daily = tmp_path / "out", tmp_path / "mirror.yaml", ("--cron", "@daily")
    answers("plan", model, "--to", out, "--size", "3300B")
    save_single(out, arrays(2, 1000))
    answers("run", model, "--to", out, "--size", "3300B", "--overwrite")
    answers("verify", out, "--against", model)
    answers("provenance", out)
    answers("rollback", out)
    answers("audit", mixture.parent)
    answers("doctor", model)
    answers("layout", mixture, "--ranks", "ep2")
    answers("advise", mixture, "--ranks", "ep2")
    answers("up")
    answers("down")
    answers("token", "ada")
    answers("usage")

    job = str(answers("submit", "a/model", "--to", "b/model")[0]["id"])
    answers("status")
    answers("logs", job)
    answers("list")
    answers("cancel", job)
    answers("retry", job)
    answers("cancel", job)
    event, *_ = answers("watch", job, code=11)
    assert event.keys() == {"event"}
    answers("delete", job)

    answers("schedule", "add", "nightly", "a/model", "--to", "b/nightly", *daily)
    fired = str(answers("schedule", "run", "nightly")[0]["job"])
    for verb in ("list", "show", "next", "pause", "resume", "remove"):
        answers("schedule", verb, *(["nightly"] if verb != "list" else []))
    answers("cancel", fired)

    with JobStore.at(url) as store:
        file.write_text(definition(2).text)
        catalogs = Cursor(store)
        begin(catalogs, definition(2))
        fail(another(store), jobs(catalogs)[0])
        followed(store)
        answers("schedule", "add", "mirrored", "--catalog", file, *daily)
        answers("schedule", "set", "mirrored", "--catalog", file)
        for verb in ("pause", "resume", "retry", "failures", "cancel"):
            answers("catalog", verb, "mirror")
        for left in jobs(catalogs):
            store.cancel(left)
        followed(store)
        answers("catalog", "remove", "mirror")
        answers("catalog", "check", file, code=2)
        answers("catalog", "submit", file)
        answers("catalog", "status")
        answers("catalog", "cancel", "mirror")
        answers("catalog", "watch", "mirror", code=10)

        answers("fleet", "status")
        answers("fleet", "pause")
        answers("fleet", "resume")
        answers("fleet", "limit", "--bandwidth", "none")
        for verb in ("drain", "undrain"):  # while it gives a sign of life
            announce(store.redis, Process("here:7", "worker", "1", "here", 7, 2, 0.0, False))
            answers("fleet", verb, "here:7")
    assert seen == ANSWERS.keys()
