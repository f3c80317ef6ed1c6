"""Compose, Kubernetes and systemd files: valid by the published schemas, and what they name is there."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
from ruamel.yaml import YAML
from typer.main import get_command

from dedup.cli.main import create_app
from dedup.settings import load_settings
from dedup.topology.lint import lint
from dedup.topology.parse import parse
from dedup.web.server import OPEN_PAGES
from dedup.worker.supervisor import FINAL
from tests.brokers import IMAGE
from tests.deploy.conftest import tool

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
KUBERNETES = CONFIG / "kubernetes"
VERSIONS = ("1.29", "1.37")
"""The oldest and the newest Kubernetes that the manifests are checked against."""
MAKES_PODS = re.compile(r"^kind: (StatefulSet|Deployment|DaemonSet|Job|CronJob|Pod)$", re.MULTILINE)
POD_SPECS = [path for path in sorted(CONFIG.rglob("*.yaml")) if MAKES_PODS.search(path.read_text(encoding="utf-8"))]
"""The manifests, and the templates of the chart, that make pods."""
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
USER = 10001


def load(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def manifests() -> list[str]:
    return load(KUBERNETES / "kustomization.yaml")["resources"]


def settings_of(path: Path, tmp_path: Path):
    """Return a config's settings, its secret files being there."""
    secret = tmp_path / "secret"
    secret.write_text("s", encoding="utf-8")
    config = tmp_path / "config.yaml"
    config.write_text(
        re.sub(r"\$\{file:[^}]*\}", f"${{file:{secret}}}", path.read_text(encoding="utf-8")), encoding="utf-8"
    )
    return load_settings(config, [], {})


def understood(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line of ours; raises where one is unknown."""
    group = get_command(create_app())
    return group.commands[arguments[0]].make_context(arguments[0], arguments[1:], parent=typer.Context(group)).params


def schema(name: str) -> Any:
    """Return a published schema that check-jsonschema carries; not by its program, which asks more of click."""
    package = importlib.util.find_spec("check_jsonschema")
    path = Path(package.origin).parent / "builtin_schemas" / "vendor" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


class TestCompose:
    FILE = CONFIG / "compose.yaml"

    def test_it_is_valid_by_the_published_schema(self):
        document = load(self.FILE)
        jsonschema.validate(document, schema("compose-spec"))
        document["services"]["worker-1"]["comand"] = []
        with pytest.raises(jsonschema.ValidationError, match="comand"):
            jsonschema.validate(document, schema("compose-spec"))

    def test_the_engine_takes_it(self, tmp_path):
        docker = shutil.which("docker")
        if (
            docker is None
            or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
        ):
            pytest.skip("docker compose is not installed here")
        copy = tmp_path / "config"
        shutil.copytree(CONFIG, copy)
        (copy / "web_token").write_text("t", encoding="utf-8")
        command = [docker, "compose", "-f", str(copy / "compose.yaml"), "config", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr

    def test_what_it_mounts_and_waits_for_is_there(self):
        compose = load(self.FILE)
        services = compose["services"]
        mounted = [volume.split(":")[0] for each in services.values() for volume in each.get("volumes", ())]
        assert [path for path in mounted if path.startswith(".") and not (CONFIG / path).exists()] == []
        assert {path for path in mounted if not path.startswith(".")} == set(compose["volumes"])
        assert {other for each in services.values() for other in each.get("depends_on", ())} <= set(services)
        assert {secret for each in services.values() for secret in each.get("secrets", ())} == set(compose["secrets"])

    def test_workers_are_two_locked_down_and_run_a_topology_that_is_right(self, tmp_path, monkeypatch):
        services = load(self.FILE)["services"]
        workers = [each for name, each in services.items() if name.startswith("worker-")]
        assert len({each["environment"]["DEDUP_WORKER_ID"] for each in workers}) == len(workers) == 2
        for name, each in services.items():
            if name.startswith("worker-"):
                assert each["environment"]["DEDUP_WEB__ADVERTISE"] == f"http://{name}:6066"
        monkeypatch.chdir(ROOT)
        for each in workers:
            assert each["read_only"]
            assert each["cap_drop"] == ["ALL"]
            parameters = understood(each["command"])
            topology = parse(Path(parameters["topology"]).read_text(encoding="utf-8"), name="t")
            assert [finding for finding in lint(topology) if finding.level == "error"] == []
            settings = settings_of(Path(parameters["config"]), tmp_path)
            assert settings.brokers == ("kafka:9092",)
            assert f":{settings.state_dir}" in each["volumes"][0]
            assert services["orders"]["command"][-3] == topology.source.topics[0]

    def test_prometheus_scrapes_the_workers(self):
        (job,) = load(CONFIG / "prometheus.yaml")["scrape_configs"]
        services = load(self.FILE)["services"]
        port = load(CONFIG / "compose-worker.yaml")["web"]["port"]
        (targets,) = (each["targets"] for each in job["static_configs"])
        assert targets == [f"{name}:{port}" for name in services if name.startswith("worker-")]
        (token,) = services["prometheus"]["secrets"]
        assert job["authorization"]["credentials_file"] == f"/run/secrets/{token}"

    def test_down_keeps_the_topics_if_it_keeps_the_state(self):
        """Was: `down` kept the state but not the changelog, so after the next `up` each worker ended with exit 3, again and again."""
        kafka = load(self.FILE)["services"]["kafka"]
        (volume,) = kafka["volumes"]
        # The image makes this directory, and its user owns it; Kafka's default, /tmp/kafka-logs, goes with the container.
        assert volume == f"kafka:{kafka['environment']['KAFKA_LOG_DIRS']}" == "kafka:/var/lib/kafka/data"

    def test_the_kafka_image_is_the_one_the_tests_use(self):
        assert load(self.FILE)["services"]["kafka"]["image"] == IMAGE


class TestKubernetes:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("name", manifests())
    def test_a_manifest_is_valid_by_the_published_schema(self, name, version):
        kubernetes_validate.validate(load(KUBERNETES / name), version, strict=True)

    def test_the_schema_refuses_a_mistake(self):
        wrong = load(KUBERNETES / "statefulset.yaml")
        wrong["spec"]["replica"] = 3
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)

    def test_kustomize_builds_it_and_the_result_is_valid(self):
        kubectl = tool("kubectl", "Kubernetes' client")
        built = subprocess.run(
            [kubectl, "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=False, timeout=60
        )
        assert built.returncode == 0, built.stderr
        documents = list(YAML(typ="safe").load_all(built.stdout))
        assert len(documents) == len(manifests()) + 1  # and the ConfigMap
        for document in documents:
            kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
        by_kind = {document["kind"]: document for document in documents}
        labels = by_kind["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
        for selector in (
            by_kind["StatefulSet"]["spec"]["selector"]["matchLabels"],
            by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
            by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
            by_kind["Service"]["spec"]["selector"],
        ):
            assert selector
            assert selector.items() <= labels.items()

    def test_every_file_of_the_directory_is_used(self):
        customized = load(KUBERNETES / "kustomization.yaml")
        used = {*customized["resources"], *customized["configMapGenerator"][0]["files"], "kustomization.yaml"}
        assert {path.name for path in KUBERNETES.iterdir()} == used

    def test_the_worker_is_started_with_files_that_are_mounted_and_right(self, tmp_path):
        spec = load(KUBERNETES / "statefulset.yaml")["spec"]["template"]["spec"]
        (worker,) = spec["containers"]
        parameters = understood(worker["args"])
        mounts = {each["mountPath"]: each["name"] for each in worker["volumeMounts"]}
        volumes = {each["name"]: each for each in spec["volumes"]}
        for path in (parameters["topology"], parameters["config"]):
            assert "configMap" in volumes[mounts[str(path.parent)]]
            assert (KUBERNETES / path.name).is_file()
        topology = parse((KUBERNETES / "topology.yaml").read_text(encoding="utf-8"), name="t")
        assert [finding for finding in lint(topology) if finding.level == "error"] == []
        settings = settings_of(KUBERNETES / "worker.yaml", tmp_path)
        (claim,) = load(KUBERNETES / "statefulset.yaml")["spec"]["volumeClaimTemplates"]
        assert mounts[str(settings.state_dir)] == claim["metadata"]["name"]
        assert worker["ports"] == [{"name": "web", "containerPort": settings.web.port}]
        assert settings.worker_id is None
        environ = {each["name"]: each.get("value") for each in worker["env"]}
        assert set(environ) == {"DEDUP_WORKER_ID", "DEDUP_WEB__ADVERTISE"}
        service = load(KUBERNETES / "service.yaml")["metadata"]["name"]
        assert service == load(KUBERNETES / "statefulset.yaml")["spec"]["serviceName"]
        assert environ["DEDUP_WEB__ADVERTISE"] == f"http://$(DEDUP_WORKER_ID).{service}:{settings.web.port}"
        references = re.findall(r"\$\{file:([^}]*)\}", (KUBERNETES / "worker.yaml").read_text(encoding="utf-8"))
        assert {mounts[str(Path(each).parent)] for each in references} == {"secrets"}
        assert spec["terminationGracePeriodSeconds"] * 1000 > settings.transaction_timeout_ms

    def test_probes_ask_pages_that_need_no_token(self):
        (worker,) = load(KUBERNETES / "statefulset.yaml")["spec"]["template"]["spec"]["containers"]
        pages = {worker[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert pages == OPEN_PAGES

    def test_prometheus_finds_the_workers_and_has_their_token(self):
        """Was: the pods asked to be scraped by annotations, which have no token, so each scrape was answered with 401."""
        for path in POD_SPECS:
            assert "prometheus.io/" not in path.read_text(encoding="utf-8"), path
        service = load(KUBERNETES / "service.yaml")
        namespace = load(KUBERNETES / "kustomization.yaml")["namespace"]
        (port,) = service["spec"]["ports"]
        (job,) = load(CONFIG / "prometheus-kubernetes.yaml")["scrape_configs"]
        wanted = f"_{port['name']}._tcp.{service['metadata']['name']}.{namespace}.svc"
        assert job["dns_sd_configs"] == [{"names": [wanted]}]
        spec = load(KUBERNETES / "statefulset.yaml")["spec"]["template"]["spec"]
        (secret,) = [each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each]
        token = Path(load(KUBERNETES / "worker.yaml")["web"]["token"].removesuffix("}")).name
        assert job["authorization"]["credentials_file"] == f"/etc/prometheus/secrets/{secret}/{token}"
        monitor = load(CONFIG / "podmonitor.yaml")
        assert monitor["metadata"]["namespace"] == namespace
        assert monitor["spec"]["selector"] == load(KUBERNETES / "statefulset.yaml")["spec"]["selector"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == spec["containers"][0]["ports"][0]["name"]
        assert endpoint["authorization"]["credentials"] == {"name": secret, "key": token}
        assert endpoint["relabelings"][0] == {"targetLabel": "job", "replacement": job["job_name"]}

    @pytest.mark.parametrize("path", POD_SPECS, ids=lambda path: path.parent.name)
    def test_a_service_of_a_similar_name_adds_no_variables_to_a_pod(self, path):
        """Was: after the next restart, each worker refused DEDUP_..._SERVICE_HOST as an unknown setting."""
        pods = path.read_text(encoding="utf-8").partition("\n  template:\n")[2]
        assert "\n    spec:\n" in pods
        assert "\n      enableServiceLinks: false\n" in pods

    def test_a_pod_has_no_root_no_capability_and_nothing_writable_but_its_volumes(self):
        spec = load(KUBERNETES / "statefulset.yaml")["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == USER
        assert f"USER {USER}" in DOCKERFILE
        (worker,) = spec["containers"]
        assert worker["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


class TestSystemd:
    UNIT = CONFIG / "systemd" / "dedup@.service"

    def value(self, key: str) -> str:
        found = re.findall(rf"^{key}=(.*)$", self.UNIT.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(found) == 1, key
        return str(found[0])

    def test_systemd_takes_it(self, tmp_path):
        analyze = tool("systemd-analyze", "systemd")
        program = tmp_path / "dedup"
        program.write_text("#!/bin/sh\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        unit = tmp_path / "dedup@orders.service"
        unit.write_text(
            self.UNIT.read_text(encoding="utf-8").replace("/opt/dedup/bin/dedup", str(program)), encoding="utf-8"
        )
        done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
        # Of other units of this machine it complains, too.
        assert "dedup" not in done.stderr, done.stderr

    def test_systemd_refuses_a_mistake(self, tmp_path):
        analyze = tool("systemd-analyze", "systemd")
        unit = tmp_path / "dedup-wrong.service"
        unit.write_text("[Service]\nExecStart=/bin/true\nRestartt=no\n", encoding="utf-8")
        done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
        assert "Restartt" in done.stderr

    def test_its_command_is_understood(self):
        program, *arguments = shlex.split(self.value("ExecStart").replace("%i", "orders"))
        assert program == "/opt/dedup/bin/dedup"
        assert "state_dir=/var/lib/dedup-orders" in understood(arguments)["overrides"]
        assert self.value("StateDirectory") == "dedup-%i"

    def test_it_is_not_restarted_where_no_restart_helps(self):
        assert {int(code) for code in self.value("RestartPreventExitStatus").split()} == FINAL
