"""`dedup apply --acls` without a broker."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.topology.describe import Resource, worker_permissions
from dedup.topology.parse import parse

BASE = {"dedup": 1, "name": "orders", "tracking_id": {"field": "id"}, "guard_period": "1h", "output": {"topic": "out"}}


def permissions(**changes):
    document = BASE | {"source": {"topics": ["in"], "partitioned_by": "tracking_id"}} | changes
    return worker_permissions(parse(json.dumps(document), name="t.yaml"))


def operations(found):
    return {(each.resource, each.name): set(each.operations) for each in found}


def test_a_direct_topology():
    assert operations(permissions(duplicates="dup")) == {
        (Resource.TOPIC, "in"): {"Read", "DescribeConfigs"},
        (Resource.TOPIC, "out"): {"Write", "DescribeConfigs"},
        (Resource.TOPIC, "dup"): {"Write", "DescribeConfigs"},
        (Resource.TOPIC, "out.late"): {"Write", "DescribeConfigs"},
        (Resource.TOPIC, "out.dead-letter"): {"Write", "DescribeConfigs"},
        (Resource.TOPIC, "orders.changelog"): {"Read", "Write", "Delete", "DescribeConfigs"},
        (Resource.TOPIC, "orders.layout"): {"Read", "Write"},
        (Resource.GROUP, "orders"): {"Read"},
        (Resource.GROUP, "orders.reset"): {"Describe"},
        (Resource.TRANSACTIONAL_ID, "orders."): {"Write", "Describe"},
    }


def test_only_transactional_ids_are_a_prefix_and_it_is_this_topologys_alone():
    found = permissions()
    assert [each.name for each in found if each.prefixed] == ["orders."]


def test_a_repartitioned_topology_reads_back_what_it_writes():
    found = operations(permissions(source={"topics": ["a", "b"]}))
    assert found[Resource.TOPIC, "orders.repartition"] == {"Read", "Write", "Delete", "DescribeConfigs"}
    assert found[Resource.TOPIC, "b"] == {"Read", "DescribeConfigs"}


@pytest.fixture
def topology_file(tmp_path):
    path = tmp_path / "orders.yaml"
    path.write_text(json.dumps(BASE | {"source": {"topics": ["in"]}}))
    return str(path)


def test_the_commands_are_what_kafka_acls_takes(topology_file):
    asked = ["apply", topology_file, "--acls", "--principal", "User:me too", "--set", "brokers=a:1,b:2"]
    lines = CliRunner().invoke(create_app(), asked).stdout.splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("kafka-acls")]
    assert all(
        each[1:6] == ["--bootstrap-server", "a:1,b:2", "--add", "--allow-principal", "User:me too"] for each in commands
    )
    assert commands[-1][-5:] == ["Describe", "--transactional-id", "orders.", "--resource-pattern-type", "prefixed"]


def test_the_json_names_the_principal_and_every_row(topology_file):
    asked = ["apply", topology_file, "--acls", "--json", "--set", "brokers=a:1"]
    listed = json.loads(CliRunner().invoke(create_app(), asked).stdout)
    assert listed["principal"] == "User:dedup"
    assert {"resource": "group", "name": "orders", "pattern": "literal", "operations": ["Read"]}.items() <= next(
        row.items() for row in listed["permissions"] if row["resource"] == "group"
    )
