"""Manifests and chart: valid by the schemas of Kubernetes, consistent with each other, and what they start works.

There is no cluster here: pods are started as processes with the environment and the arguments of their manifests.
"""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reshard.pipeline.stores import network
from reshard.web.auth import Scope, add_token
from reshard.worker.broker import find_server
from tests.deploy.manifests import ALL, BASE, CHART, ROOT, Manifest, as_base, base, manifests, pod, rendered
from tests.deploy.schemas import check
from tests.deploy.tools import Missing, tool
from tests.hub import HubProcess
from tests.support.models import save_model
from tests.support.procs import Proc, answer, free_port, wait_for
from tests.support.stuck import STUCK

FOUND = [found for text in base().values() for found in manifests(text)]
WORKLOADS = [found for found in FOUND if found["kind"] in ("Deployment", "StatefulSet")]
OURS = [found for found in WORKLOADS if found["kind"] == "Deployment"]
TAKEN = CHART / "templates/settings.yaml"
SECRETS = "/run/secrets/reshard"


def name(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def container(workload: Manifest) -> Manifest:
    (only,) = pod(workload)["containers"]
    assert isinstance(only, dict)
    return only


def environment(workload: Manifest) -> dict[str, str]:
    (settings,) = [found["data"] for found in FOUND if name(found) == "ConfigMap reshard-settings"]
    return settings | {entry["name"]: entry["value"] for entry in container(workload).get("env", [])}


# ------------------------------------------------------------------------------------------------------- as data


@pytest.mark.parametrize("manifest", FOUND, ids=name)
def test_a_manifest_is_valid(manifest: Manifest) -> None:
    check(manifest)


def test_the_base_has_all_that_it_should() -> None:
    assert {name(found) for found in FOUND} == {
        "ConfigMap reshard-settings", "ConfigMap reshard-broker",
        "Deployment reshard-worker", "Deployment reshard-control", "Deployment reshard-web",
        "StatefulSet reshard-broker", "PodDisruptionBudget reshard-worker",
        "Service reshard-broker", "Service reshard-control", "Service reshard-web",
        "NetworkPolicy reshard", "NetworkPolicy reshard-broker",
        "ServiceMonitor reshard-control", "PrometheusRule reshard-control", "ScaledObject reshard-worker",
    }  # fmt: skip


def test_rules_and_configuration_are_those_of_the_files_in_deploy() -> None:
    by_name = {name(found): found for found in FOUND}
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert by_name["PrometheusRule reshard-control"]["spec"] == rules
    config = (ROOT / "deploy/redis.conf").read_text()
    assert by_name["ConfigMap reshard-broker"]["data"]["redis.conf"].strip() == config.strip()


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_a_pod_may_do_little_and_has_time_to_end(workload: Manifest) -> None:
    spec, only = pod(workload), container(workload)
    assert spec["terminationGracePeriodSeconds"] == 60
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    # Else a Service reshard-web becomes RESHARD_WEB_PORT=tcp://..., which is no port.
    assert spec["enableServiceLinks"] is False
    context = only["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in only["resources"]["limits"]
    mounted, volumes = {m["name"] for m in only["volumeMounts"]}, {v["name"] for v in spec["volumes"]}
    claimed = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    assert mounted == volumes | claimed


@pytest.mark.parametrize("workload", OURS, ids=name)
def test_probes_ask_the_port_that_answers_them(workload: Manifest) -> None:
    only, set_to = container(workload), environment(workload)
    port = {"worker": "RESHARD_HEALTH_PORT", "control": "RESHARD_METRICS_PORT"}.get(only["name"])
    (listens,) = only["ports"]
    assert listens["containerPort"] == (int(set_to[port]) if port else 8474)
    for kind, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        assert only[f"{kind}Probe"]["httpGet"] == {"path": path, "port": listens["name"]}


def test_services_budgets_and_policies_select_the_pods_that_they_are_for() -> None:
    labels = {name(w): w["spec"]["template"]["metadata"]["labels"] for w in WORKLOADS}

    def selected(by: dict[str, str]) -> set[str]:
        return {pod for pod, own in labels.items() if by.items() <= own.items()}

    for workload in WORKLOADS:
        assert selected(workload["spec"]["selector"]["matchLabels"]) == {name(workload)}
    for found in FOUND:
        own = found["metadata"]["name"].removeprefix("reshard-")
        if found["kind"] == "Service":
            (only,) = selected(found["spec"]["selector"])
            assert only.endswith(f"reshard-{own}")
        elif found["kind"] == "PodDisruptionBudget":
            assert selected(found["spec"]["selector"]["matchLabels"]) == {"Deployment reshard-worker"}
        elif found["kind"] == "ServiceMonitor":
            by = found["spec"]["selector"]["matchLabels"].items()
            (service,) = [s for s in FOUND if s["kind"] == "Service" and by <= s["metadata"]["labels"].items()]
            (endpoint,) = found["spec"]["endpoints"]
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        elif found["kind"] == "ScaledObject":
            assert f"Deployment {found['spec']['scaleTargetRef']['name']}" in labels


def test_keda_asks_for_documented_figures_and_one_worker_takes_what_its_concurrency_says() -> None:
    (scaled,) = [found for found in FOUND if found["kind"] == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    documented = set(re.findall(r"^\| `(reshard_\w+)`", (ROOT / "docs/operations.md").read_text(), re.MULTILINE))
    asked = set(re.findall(r"reshard_\w+", trigger["metadata"]["query"]))
    assert "reshard_claimable_units" in asked <= documented
    (worker,) = [found for found in OURS if found["metadata"]["name"] == "reshard-worker"]
    assert trigger["metadata"]["threshold"] == environment(worker)["RESHARD_CONCURRENCY"]


def test_no_manifest_holds_a_secret_and_every_file_of_one_is_told_in_the_guide() -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    files = {file for text in base().values() for file in re.findall(rf"{SECRETS}/([\w.-]+)", text)}
    assert files == {"broker-password", "hf-token", "web-tokens"}
    assert [file for file in files if f"secret/{file}" not in guide] == []
    assert not [found for found in FOUND if found["kind"] == "Secret"]


def test_pods_do_not_reach_what_a_hub_must_not_lead_to() -> None:
    (policy,) = [found for found in FOUND if name(found) == "NetworkPolicy reshard"]
    blocks = [to["ipBlock"] for rule in policy["spec"]["egress"] for to in rule.get("to", []) if "ipBlock" in to]
    left_out = {ipaddress.ip_network(net) for block in blocks for net in block["except"]}
    assert left_out == {*map(ipaddress.ip_network, ("169.254.0.0/16", "fe80::/10")), *network.METADATA}


# ------------------------------------------------------------------------------------------------------- rendered


def needs(program: str) -> None:
    try:
        tool(program)
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_the_base_is_what_the_chart_renders() -> None:
    needs("helm")
    files = rendered("monitoring.enabled=true") | {"keda.yaml": rendered(*ALL)["keda.yaml"]}
    assert as_base(files) == base(), "python -m tests.deploy.manifests"


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        [],
        ALL,
        ["broker.url=rediss://broker.example:6379/0", "web.enabled=false", "networkPolicy=false"],
        ["settings.RESHARD_DISK_LIMIT=1GiB"],
        ["worker.storage.volume=true", "worker.storage.className=fast", "broker.storage.className=fast"],
        ["web.hooks=true", "web.hosts={localhost,reshard.example}", "image.pullSecrets={mine}", "image.tag=sha"],
        ["settings.RESHARD_ALLOWED_TARGETS=acme", "settings.HF_HOME=/other", "monitoring.labels.release=prom", *ALL],
        ["worker.nodeSelector.disk=fast", "worker.tolerations[0].key=batch", "worker.tolerations[0].operator=Exists"],
    ],
    ids=" ".join,
)
def test_the_chart_renders_to_valid_manifests(values: list[str]) -> None:
    needs("helm")
    found = [manifest for text in rendered(*values).values() for manifest in manifests(text)]
    for manifest in found:
        check(manifest)
    kinds = {name(manifest) for manifest in found}
    assert ("StatefulSet reshard-broker" in kinds) is not any(value.startswith("broker.url") for value in values)
    assert ("Deployment reshard-web" in kinds) is ("web.enabled=false" not in values)
    (settings,) = [m["data"] for m in found if name(m) == "ConfigMap reshard-settings"]
    for value in values:
        if value.startswith("settings."):
            variable, _, text = value.removeprefix("settings.").partition("=")
            assert settings[variable] == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RESHARD_CONCURRENCY", "RESHARD_WEB_HOSTS", "RESHARD_METRICS_PORT"])
def test_the_chart_refuses_a_setting_that_it_would_hide(name: str) -> None:
    needs("helm")
    with pytest.raises(AssertionError, match=f"settings.{name}: use "):
        rendered(f"settings.{name}=4")


def test_no_setting_of_all_pods_is_hidden_by_one_of_a_single_kind() -> None:
    for workload in OURS:
        own = [entry["name"].removeprefix("RESHARD_") for entry in container(workload)["env"]]
        assert [name for name in own if name not in TAKEN.read_text()] == []


def test_a_copy_on_the_disk_of_a_node_ends_before_its_pod_is_evicted() -> None:
    (worker,) = [found for found in OURS if name(found) == "Deployment reshard-worker"]
    (volume,) = [one for one in pod(worker)["volumes"] if one["name"] == "work"]
    found = environment(worker)
    size, copy = volume["emptyDir"]["sizeLimit"], found["RESHARD_DISK_LIMIT"]
    assert (size[-2:], copy[-3:]) == ("Gi", "GiB")
    assert int(copy[:-3]) * int(found["RESHARD_CONCURRENCY"]) <= int(size[:-2])


@pytest.mark.slow
def test_helm_finds_nothing_to_say_of_the_chart() -> None:
    needs("helm")
    done = subprocess.run([tool("helm"), "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_kustomize_builds_the_base_and_with_its_components_keda_owns_the_number_of_workers(tmp_path: Path) -> None:
    needs("kubectl")
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": "reshard",
                "resources": [os.path.relpath(BASE, tmp_path)],
                "components": [os.path.relpath(BASE / part, tmp_path) for part in ("monitoring", "keda")],
            }
        )
    )

    def built(folder: Path) -> dict[str, Manifest]:
        command = [tool("kubectl"), "kustomize", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = {name(manifest): manifest for manifest in manifests(done.stdout)}
        for manifest in found.values():
            check(manifest)
        return found

    plain, whole = built(BASE), built(tmp_path)
    assert whole.keys() == {name(found) for found in FOUND}
    assert plain.keys() == whole.keys() - {
        "ServiceMonitor reshard-control", "PrometheusRule reshard-control", "ScaledObject reshard-worker",
    }  # fmt: skip
    assert plain["Deployment reshard-worker"]["spec"]["replicas"] == 2
    assert "replicas" not in whole["Deployment reshard-worker"]["spec"]


# --------------------------------------------------------------------------------------------------------- as processes


class Node:
    """Runs pods as processes: mounts are folders of its own, and every address is this machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = free_port()
        self.processes: list[Proc] = []
        binaries = folder / "bin"
        binaries.mkdir()
        (binaries / "valkey-server").symlink_to(find_server())
        self.path = f"{binaries}:{os.environ['PATH']}"

    def here(self, text: str) -> str:
        """``text`` of a manifest, with paths and addresses of this machine."""
        places = {f"/{part}": str(self.folder / part) for part in ("work", "data", "etc/reshard", SECRETS[1:])}
        addresses = {"0.0.0.0": "127.0.0.1", "* -::*": "127.0.0.1", "reshard-broker:6379": f"127.0.0.1:{self.redis}"}
        for there, here in {**addresses, "port 6379": f"port {self.redis}"}.items():
            text = text.replace(there, here)
        for there, here in places.items():
            text = re.sub(rf"(?<![\w/.-]){there}(?![\w-])", here, text)
        return text

    def start(self, workload: Manifest, **more: str) -> tuple[Proc, int]:
        """The process of its container, and where it answers probes."""
        only = container(workload)
        environ = {key: self.here(value) for key, value in environment(workload).items()} | {"PATH": self.path}
        port = free_port()
        ours = {"worker": "RESHARD_HEALTH_PORT", "control": "RESHARD_METRICS_PORT", "web": "RESHARD_WEB_PORT"}
        if only["name"] in ours:
            command = [sys.executable, "-c", "from reshard.cli.main import main; main()", *only["args"]]
            environ |= {ours[only["name"]]: str(port), **more}
        else:
            command, environ = [*only["command"], *map(self.here, only["args"])], {"PATH": self.path}
        self.processes.append(Proc(only["name"], command, environ, self.folder))
        return self.processes[-1], port

    def run(self, workload: Manifest, *arguments: str, **more: str) -> str:
        """What `reshard ARGUMENTS` says in its container."""
        environ = {key: self.here(value) for key, value in environment(workload).items()} | {"PATH": self.path} | more
        command = [sys.executable, "-c", "from reshard.cli.main import main; main()", *arguments]
        done = subprocess.run(command, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=STUCK)
        assert done.returncode == 0, done.stderr + "".join(process.said()[-3000:] for process in self.processes)
        return done.stdout


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for process in made.processes:
        process.kill()


@pytest.mark.slow
def test_what_the_manifests_start_gets_ready_does_a_job_and_ends_in_time(node: Node) -> None:
    by_name: dict[str, Any] = {found["metadata"]["name"].removeprefix("reshard-"): found for found in WORKLOADS}
    for folder in ("work", "data", "etc/reshard", SECRETS[1:]):
        (node.folder / folder).mkdir(parents=True)
    (config,) = [found["data"] for found in FOUND if name(found) == "ConfigMap reshard-broker"]
    (node.folder / "etc/reshard/redis.conf").write_text(node.here(config["redis.conf"]))
    secrets = node.folder / SECRETS[1:]
    (secrets / "broker-password").write_text("0123abcd\n")
    (secrets / "hf-token").write_text("hf_acme\n")
    add_token(secrets / "web-tokens", "ada", Scope.act)
    with HubProcess(users=["acme:hf_acme"]) as hub:
        model = save_model(node.folder / "model", 6, 100_000, 2)
        hub.admin.create_repo("acme/model")
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        hub.admin.put_files("acme/model", files, lfs=[path for path in files if path.endswith(".safetensors")])
        more = {"HF_ENDPOINT": hub.endpoint}

        broker, _ = node.start(by_name["broker"])
        wait_for(lambda: "Ready to accept connections" in broker.said(), "the broker's start")
        started = {kind: node.start(by_name[kind], **more) for kind in ("control", "worker", "web")}
        for kind, (process, port) in started.items():
            wait_for(lambda process=process, port=port: ready(process, port), f"{kind}'s readiness")
        said = node.run(
            by_name["control"], "submit", "acme/model", "--to", "acme/cut", "--size", "200KB", "--watch", **more
        )
        assert "acme/cut" in said and len(hub.admin.files("acme/cut")) > 3
        assert "0123abcd" not in Path(f"/proc/{broker.pid}/cmdline").read_text()
        for kind, (process, _) in started.items():
            process.terminate()
            assert process.wait(60) in (0, -signal.SIGTERM), kind  # uvicorn ends by the signal itself
            assert "Traceback" not in process.said()


def ready(process: Proc, port: int) -> bool:
    assert process.alive(), process.said()
    try:
        return answer(port, "/readyz")[0] == 200
    except OSError:
        return False
