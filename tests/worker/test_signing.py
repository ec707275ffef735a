"""Jobs that are signed: by the worker that publishes, with a key that nothing else ever sees."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from redis import Redis

from reshard.pipeline.errors import BadSignKey, SignKeyNotAllowed
from reshard.worker.queue.states import JobState
from tests.support.keys import make_pair, refusal
from tests.worker.sites import Site, site

__all__ = ["site"]


def stored(client: Redis) -> bytes:
    """Everything that the broker holds, uncompressed."""
    client.config_set("rdbcompression", "no")
    return b"".join(client.dump(key) or b"" for key in client.scan_iter("*"))


def test_the_key_is_seen_by_nothing_but_the_process_that_publishes(site: Site, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "keys")
    (tmp_path / "keys" / "broken.pem").write_text(pair.private.read_text().replace("END", "XXX"))
    worker = site.machine.worker(RESHARD_SIGN_KEYS=str(tmp_path / "keys"))
    job = site.submit(sign="release.pem")
    site.assert_published_once(job)
    where = {"local_dir": tmp_path / "here", "endpoint": site.space.endpoint, "token": site.space.token}
    here = Path(snapshot_download(site.space.repo("out"), **where))
    assert refusal(here, pair) == ""

    broken, absent, path = (
        site.ended(site.submit(name, sign=key))
        for name, key in (("a", "broken.pem"), ("b", "absent.pem"), ("c", str(pair.private)))
    )
    assert [one.state for one in (broken, absent, path)] == [JobState.failed] * 3
    assert [(one.error or {})["code"] for one in (broken, absent, path)] == [
        BadSignKey.code, BadSignKey.code, SignKeyNotAllowed.code,
    ]  # fmt: skip
    created = [line for line in site.space.admin.log() if line["path"] == "/api/repos/create"]
    assert len(created) == 1, "nothing was copied for the others"

    seen = stored(site.client) + worker.said().encode()
    assert b"release.pem" in seen, "its name travels"
    for line in pair.private.read_text().splitlines()[1:-1]:
        assert line.encode() not in seen
