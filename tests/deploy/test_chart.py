"""The Helm chart makes what config/kubernetes makes, valid by the published schemas; its values are checked."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from dedup.topology.parse import parse
from tests.deploy.conftest import tool
from tests.deploy.test_files import CONFIG, KUBERNETES, VERSIONS, load, manifests, settings_of

CHART = CONFIG / "helm" / "dedup"
EXAMPLE = CONFIG / "helm" / "orders.yaml"
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
HELM_LABELS = {"app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"}


def helm(
    *options: str, version: str = VERSIONS[-1], values: Path = EXAMPLE, release: str = "orders"
) -> subprocess.CompletedProcess[str]:
    """Render a release."""
    command = [tool("helm", "the Helm project"), "template", release, str(CHART), "--kube-version", version]
    command += ["--values", str(values), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def rendered(*options: str, **how: Any) -> dict[str, Any]:
    """Return the manifests of a release, by kind."""
    done = helm(*options, **how)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in YAML(typ="safe").load_all(done.stdout) if each}


def without_helm(found: Any) -> Any:
    """Return a manifest without what only Helm adds: labels of the release, and the checksum of the ConfigMap."""
    if isinstance(found, dict):
        kept = {
            key: without_helm(value) for key, value in found.items() if key not in {*HELM_LABELS, "checksum/config"}
        }
        labels = kept.get("labels")
        if not kept.get("annotations", True):
            del kept["annotations"]
        if "name" in kept and labels == {"app.kubernetes.io/name": "dedup", "app.kubernetes.io/instance": "orders"}:
            del kept["labels"]  # config/kubernetes labels pods only
        return kept
    return [without_helm(each) for each in found] if isinstance(found, list) else found


def test_the_example_makes_the_manifests_of_the_kustomization():
    made = rendered()
    for name in manifests():
        wanted = load(KUBERNETES / name)
        if wanted["kind"] == "StatefulSet":
            (image,) = load(KUBERNETES / "kustomization.yaml")["images"]
            wanted["spec"]["template"]["spec"]["containers"][0]["image"] = f"{image['newName']}:{image['newTag']}"
        assert without_helm(made[wanted["kind"]]) == wanted, name
    assert made.keys() == {load(KUBERNETES / name)["kind"] for name in manifests()} | {"ConfigMap"}


def test_the_config_map_is_the_topology_and_the_config_of_the_kustomization(tmp_path):
    data = rendered()["ConfigMap"]["data"]
    assert data.keys() == {"topology.yaml", "worker.yaml"}
    for name, text in data.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    both = [(KUBERNETES / "topology.yaml").read_text(encoding="utf-8"), data["topology.yaml"]]
    assert parse(both[0], name="t") == parse(both[1], name="t")
    assert settings_of(tmp_path / "worker.yaml", tmp_path) == settings_of(KUBERNETES / "worker.yaml", tmp_path)


@pytest.mark.parametrize(
    "topology",
    [
        # Was: repartitioned by nothing, so the same ID in two partitions was forwarded twice; stopped at 4 GiB of state.
        {"tracking_id": {"header": "id"}, "output": {"topic": "payments.unique"}},
        # Was: observed only, by its file, and forwarded all the same.
        {"tracking_id": {"field": "payment"}},
    ],
)
def test_a_users_topology_and_security_are_theirs_alone(topology, tmp_path):
    topology = {"dedup": 1, "name": "payments", "source": {"topics": ["payments"]}, "guard_period": "1h", **topology}
    config = {"brokers": ["kafka:9092"], "security": {"protocol": "PLAINTEXT"}}
    values = tmp_path / "my-values.yaml"
    values.write_text(json.dumps({"topology": topology, "config": config}), encoding="utf-8")
    data = rendered(values=values)["ConfigMap"]["data"]
    assert parse(data["topology.yaml"], name="t") == parse(json.dumps(topology), name="t")
    (tmp_path / "worker.yaml").write_text(data["worker.yaml"], encoding="utf-8")
    security = settings_of(tmp_path / "worker.yaml", tmp_path).security
    (tmp_path / "plain.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert security == settings_of(tmp_path / "plain.yaml", tmp_path).security


def test_without_a_topology_helm_says_that_it_is_missing(tmp_path):
    values = tmp_path / "my-values.yaml"
    values.write_text("replicas: 3\n", encoding="utf-8")
    done = helm(values=values)
    assert done.returncode == 1
    assert "missing property 'topology'" in done.stderr
    assert "missing property 'brokers'" in done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("more", [[], ["--set", "autoscaling.enabled=true", "--set", "storage.className=fast"]])
def test_what_is_rendered_is_valid_by_the_published_schema(version, more):
    made = rendered(*more, version=version)
    for document in made.values():
        kubernetes_validate.validate(document, version, strict=True)
    assert ("HorizontalPodAutoscaler" in made) is bool(more)
    assert ("replicas" in made["StatefulSet"]["spec"]) is not bool(more)


@pytest.mark.parametrize("release", ["2024", "true", "1e3", 46 * "a"])
def test_names_that_yaml_reads_as_a_number_stay_names(release):
    """Was: labels that are no strings, which the API refuses."""
    odd = ("--set-string", "secretName=1e3,network.monitoringNamespace=12,storage.className=7")
    made = rendered(*odd, release=release)
    for document in made.values():
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
        assert document["metadata"]["name"] == f"dedup-{release}"
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == release
    assert made["StatefulSet"]["spec"]["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "7"


@pytest.mark.parametrize("release", ["a.b", 47 * "a"])
def test_a_release_whose_name_makes_no_pods_is_refused(release):
    done = helm(release=release)
    assert done.returncode == 1
    assert f'The name of the release, "{release}"' in done.stderr
    assert "at most 46 characters without dots" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"record",\n "name":"R","fields":[]}\n',
        '  {"type": "record"}\n',  # was: "YAML parse error"
        "\n\n\tsyntax = 'proto3';  \n// a: b # c\n\n",
        "no end of line",
        "a" + 300 * " b" + "\r\n  c\r\n",
    ],
)
def test_a_schema_stands_beside_the_topology(text, tmp_path):
    (tmp_path / "o.avsc").write_bytes(text.encode())
    data = rendered("--set-file", f"files.o\\.avsc={tmp_path / 'o.avsc'}")["ConfigMap"]["data"]
    assert data.keys() == {"topology.yaml", "worker.yaml", "o.avsc"}
    assert data["o.avsc"] == text


@pytest.mark.parametrize(
    ("more", "ports"),
    [
        ([], [9092, 9093, 443, 8081]),
        (["--set", "network.egressPorts={443,8443}"], [9092, 9093, 443, 8443]),
        (["--set", "network.brokerPorts={9098}"], [9098, 443, 8081]),
        # A rule with an empty list of ports would allow all of them.
        (["--set-json", "network.egressPorts=[]"], [9092, 9093]),
        (["--set", "network.egressPorts=null"], [9092, 9093]),
    ],
)
def test_pods_reach_brokers_registry_and_storage_and_nothing_else(more, ports):
    dns, outside, workers = rendered(*more)["NetworkPolicy"]["spec"]["egress"]
    assert outside == {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    # Was: of namespace kube-system only, so no name was known with a cache on the node or on OpenShift.
    assert dns == {"ports": [{"protocol": each, "port": port} for port in (53, 5353) for each in ("UDP", "TCP")]}
    assert workers["ports"] == [{"protocol": "TCP", "port": "web"}]


@pytest.mark.parametrize("given", [0, 7, None])
def test_an_upgrade_leaves_the_number_of_workers_to_keda_if_replicas_is_null(given, tmp_path):
    path = tmp_path / "my-values.yaml"
    path.write_text(f"replicas: {'null' if given is None else given}\n", encoding="utf-8")
    for more in (["--values", str(path)], ["--set", f"replicas={'null' if given is None else given}"]):
        made = rendered(*more)
        assert made["StatefulSet"]["spec"].get("replicas", "left out") == ("left out" if given is None else given)
        assert "HorizontalPodAutoscaler" not in made
        kubernetes_validate.validate(made["StatefulSet"], VERSIONS[-1], strict=True)


class ClusterWithFleet(http.server.BaseHTTPRequestHandler):
    """What Helm asks an API server for when a chart looks up a StatefulSet."""

    volume: ClassVar[dict[str, Any]] = {}
    """The spec of the volumes that are there."""

    def do_GET(self) -> None:
        """Answer with one StatefulSet, in namespace dedup."""
        version = {"groupVersion": "apps/v1", "version": "v1"}
        kind = {"name": "statefulsets", "singularName": "", "namespaced": True, "kind": "StatefulSet", "verbs": ["get"]}
        found = {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            "/apis": {"kind": "APIGroupList", "groups": [{"name": "apps", "versions": [version]}]},
            "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": [kind]},
            "/apis/apps/v1/namespaces/dedup/statefulsets/dedup-orders": {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": "dedup-orders", "namespace": "dedup"},
                "spec": {"replicas": 3, "volumeClaimTemplates": [{"spec": self.volume}]},
            },
        }.get(self.path.partition("?")[0])
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        absent = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.wfile.write(json.dumps(found or absent).encode())

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def cluster() -> Iterator[Callable[[str, str | None], list[str]]]:
    """Return what makes a cluster with volumes of a size and a class, and returns Helm's options to ask it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClusterWithFleet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def start(size: str, name: str | None) -> list[str]:
            ClusterWithFleet.volume = {"resources": {"requests": {"storage": size}}, "storageClassName": name}
            address = f"http://127.0.0.1:{server.server_port}"
            return ["--dry-run=server", "--namespace", "dedup", "--kube-apiserver", address]

        yield start
        server.shutdown()


@pytest.mark.parametrize("more", ["storage.size=80Gi", "storage.className=fast"])
def test_an_upgrade_to_other_volumes_is_refused_before_it_changes_anything(cluster, more):
    """Was: the ConfigMap was changed, the StatefulSet was not, so pods that restarted later had another topology."""
    done = helm(*cluster("40Gi", None), "--set", more)
    assert done.returncode == 1
    assert 'the volumes of StatefulSet dedup-orders (size 40Gi, class "")' in done.stderr
    assert '"Larger volumes" in docs/how-to-deploy.md' in done.stderr
    assert "\n### Larger volumes\n" in (CONFIG.parent / "docs" / "how-to-deploy.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("size", "name", "more"),
    [
        ("40Gi", None, []),
        ("40Gi", "fast", ["--set", "storage.className=fast"]),
        ("2Ti", None, ["--set", "storage.size=2048Gi"]),  # as the API writes it
    ],
)
def test_an_upgrade_with_the_same_volumes_is_taken(cluster, size, name, more):
    assert rendered(*cluster(size, name), *more)["StatefulSet"]["spec"]["replicas"] == 3


def test_another_topology_replaces_the_pods():
    sums = [
        rendered(*more)["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for more in ([], ["--set", "topology.guard_period=2h"], [])
    ]
    assert sums[0] == sums[2] != sums[1]


def values() -> Any:
    """Return the values of the example, with the chart's defaults."""
    defaults, example = load(CHART / "values.yaml"), load(EXAMPLE)
    return {**defaults, **example, "config": {**defaults["config"], **example["config"]}}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("replica",), 3),
        (("replicas",), "three"),
        (("replicas",), -1),
        (("storage", "size"), "40GB"),
        (("config", "brokers"), []),
        (("config", "worker_id"), "a"),
        (("config", "state_dir"), "/data"),
        (("topology", "name"), ""),
        (("terminationGracePeriodSeconds",), 10),
        (("network", "brokerPorts"), ["9092"]),
        (("network", "egressPorts"), [0]),
        (("network", "egressPorts"), 443),
        (("autoscaling", "cpuPercent"), 700),
    ],
)
def test_a_wrong_value_is_refused(path, wrong):
    jsonschema.validate(values(), SCHEMA)
    document = values()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_helm_refuses_by_the_schema():
    done = helm("--set", "storage.size=40GB")
    assert done.returncode == 1
    assert "40GB" in done.stderr or "storage" in done.stderr


def test_the_example_for_keda_names_what_the_chart_makes():
    secret, authentication, scaled = YAML(typ="safe").load_all((CONFIG / "helm" / "keda.yaml").read_text("utf-8"))
    topology, config = values()["topology"], values()["config"]
    (trigger,) = scaled["spec"]["triggers"]
    found = trigger["metadata"]
    assert (found["consumerGroup"], found["topic"]) == (topology["name"], topology["source"]["topics"][0])
    assert found["bootstrapServers"] == ",".join(config["brokers"])
    assert found["version"] == "3.1.0"  # the oldest Kafka that dedup supports; Kafka 4 refuses KEDA's default, 1.0.0
    assert scaled["spec"]["scaleTargetRef"]["name"] == load(KUBERNETES / "statefulset.yaml")["metadata"]["name"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    # Was: the name in the metadata, where KEDA ignores it; "no username given", and the fleet was never scaled.
    assert found.keys().isdisjoint({"username", "password"})
    references = {each["parameter"]: each for each in authentication["spec"]["secretTargetRef"]}
    assert references.keys() == {"username", "password"}
    assert references["username"]["name"] == secret["metadata"]["name"]
    assert secret["stringData"][references["username"]["key"]] == config["security"]["username"]
    (secrets,) = [
        each["secret"] for each in rendered()["StatefulSet"]["spec"]["template"]["spec"]["volumes"] if "secret" in each
    ]
    assert references["password"]["name"] == secrets["secretName"]
    assert references["password"]["key"] == Path(config["security"]["password"].removesuffix("}")).name
    kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)


def test_the_versions_of_the_chart_and_of_the_package_are_one():
    chart = load(CHART / "Chart.yaml")
    project = (CONFIG.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{chart["appVersion"]}"\n' in project
    assert chart["version"] == chart["appVersion"]
