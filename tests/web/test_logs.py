"""No log of a service at work lets anybody in, however much each library of it logs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import httpx2
import pytest

from reshard.web.auth import Scope, add_token
from reshard.worker.queue.jobs import JobStore
from tests.hub.fixtures import Namespace
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, free_port, wait_for
from tests.web.conftest import SECRET, Site, post, pushed, start

# Each logger logs all that it can, whatever level it is set to; those of libraries that are not loaded yet, too.
LOUD = "import logging\nlogging.Logger.setLevel = lambda *_: None\nlogging.getLogger().level = logging.DEBUG\n"


@pytest.mark.parametrize(("transport", "form"), [("http", "json"), pytest.param("xet", "text", marks=pytest.mark.slow)])
def test_no_log_of_a_service_has_a_signature_or_a_token(
    namespace: Namespace, broker: Broker, store: JobStore, tmp_path: Path, transport: str, form: str
) -> None:
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "sitecustomize.py").write_text(LOUD)
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "RESHARD_LOG_FORMAT": form}
    loud = {"PYTHONPATH": str(tmp_path / "loud"), "RUST_LOG": "debug", "HF_DEBUG": "1"}
    save_sharded(tmp_path / "model", numbered(arrays(6, 300_000), 2))
    add_friends(tmp_path / "model")
    source, options = namespace.repo("source"), ["--transport", transport]
    with Machine(tmp_path, broker.url, RESHARD_ALLOWED_TARGETS=namespace.name, **env, **loud) as machine:
        ran = machine.run("run", "./model", "--to", source, *options)
        assert ran.returncode == 0, ran.stderr
        token, port = add_token(tmp_path / "tokens", "ada", Scope.act), free_port()
        url = f"http://127.0.0.1:{port}"
        site = Site(machine, start(machine, tmp_path / "tokens", port), url, {"act": token})
        machine.control(), machine.worker(1)
        asked = {
            "source": source,
            "target": namespace.repo("target"),
            "options": {"size": "2MB", "transport": transport},
        }
        site.post("/api/v1/plan", asked)
        namespace.admin.fault("GET /_(cdn|cas/xorbs)/", "status", status=503, times=4)
        job = site.post("/api/v1/jobs", asked)["id"]
        wait_for(lambda: site.get(f"/api/v1/jobs/{job}", "act")["state"] == "done", "the job's end")
        told = [line["text"] for line in site.get(f"/api/v1/jobs/{job}/log", "act")["lines"]]
        assert post(site, pushed(source, "1" * 40)).status_code == 200
        assert httpx2.get(f"{url}/api/v1/jobs?token={token}", headers={"Authorization": "Bearer x"}).status_code == 401
        site.process.terminate()
        site.process.wait(30)
    queries = [dict(parse_qsl(urlsplit(line["path"]).query)) for line in namespace.admin.log()]
    signatures = {query["signature"] for query in queries if "signature" in query}
    password = urlsplit(broker.url).password or ""
    assert len(signatures) > 3, "signed URLs were followed"
    logs = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*.log")} | {tmp_path: ran.stderr}
    assert {path.name.partition("-")[0] for path in logs} >= {"web", "worker", "control"}
    assert any("HTTP Request: GET " in line and "?..." in line for line in told), "of signed URLs, too"
    logs[tmp_path / "kept with the job"] = "\n".join(told)
    whole = "".join(logs.values())
    assert "DEBUG" in whole and "httpcore2" in whole, "libraries do log"
    assert not any(path.stat().st_size for path in tmp_path.rglob("xet_*.log")), "hf_xet's own lines pass no filter"
    for path, text in logs.items():
        for secret in (*signatures, namespace.token, token, SECRET, password, "signature="):
            found = text.find(secret)
            assert found < 0, f"{path}: {text[max(0, found - 300) : found + 200]}"
