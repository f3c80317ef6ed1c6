"""Which module a topology's flow is taken from, and what is said if there is none."""

import sys

import pytest

from dedup.core.flow import FlowRecord
from dedup.errors import TopologyError
from dedup.flow_loader import load_flow, sample_findings
from dedup.topology.model import FlowSpec
from dedup.topology.parse import parse

CODE = "from dedup import Flow\nflow = Flow()\n@flow.on_unique\ndef each(record):\n    {}\n"


def topology(name, directory):
    return parse(
        "dedup: 1\nname: t\nsource: {topics: [in]}\ntracking_id: {key: true}\nguard_period: 1h\n"
        f"output: {{topic: out}}\nthen: {name}:flow\n",
        name=str(directory / "t.yaml"),
    )


def test_a_module_in_a_package_beside_the_file(tmp_path):
    package = tmp_path / "loader_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "flows.py").write_text(CODE.format("yield record"))
    assert load_flow(FlowSpec("loader_pkg.flows:flow", str(tmp_path))).function is not None


@pytest.mark.parametrize(
    ("code", "attribute", "says"),
    [
        ("raise ValueError('broken')", "flow", "cannot be imported: ValueError: broken; correct the module"),
        (
            "import no_such_package",
            "flow",
            "No module named 'no_such_package'; install no_such_package, which the module",
        ),
        ("flow = 1", "flow", "flow in .* is not a dedup.Flow"),
        ("from dedup import Flow", "flow", "is not a dedup.Flow"),
        ("from dedup import Flow\nflow = Flow()", "flow", "has no function"),
    ],
)
def test_what_is_no_flow(tmp_path, code, attribute, says, request):
    name = f"loader_{len(says)}_{len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(TopologyError, match=says):
        load_flow(FlowSpec(f"{name}:{attribute}", str(tmp_path), file="t.yaml"))


def test_no_module_and_another_module_of_that_name(tmp_path):
    with pytest.raises(TopologyError, match="No module named 'loader_nowhere'; put it into"):
        load_flow(FlowSpec("loader_nowhere:flow", str(tmp_path)))
    (tmp_path / "json.py").write_text(CODE.format("yield record"))
    assert "json" in sys.modules
    with pytest.raises(TopologyError, match="not the module beside the topology file"):
        load_flow(FlowSpec("json:flow", str(tmp_path)))


def test_samples_find_failures_and_results_that_depend_on_the_process(tmp_path):
    body = "if record.value == b'bad': raise ValueError('bad')\n    yield record.to(value='-'.join({'a', 'b', 'c', 'd', 'e'}))"
    (tmp_path / "loader_samples.py").write_text(CODE.format(body))
    records = [FlowRecord("out", None, value, (), 0) for value in (b"1", b"bad", b"2")]
    found = sample_findings(topology("loader_samples", tmp_path), records)
    assert [(each.level, each.code) for each in found] == [
        ("warning", "flow_fails"),
        ("error", "flow_not_deterministic"),
    ]
    assert "1 of 3 samples, first with: ValueError: bad" in found[0].text
    (tmp_path / "loader_plain.py").write_text(CODE.format("yield record"))
    assert sample_findings(topology("loader_plain", tmp_path), records) == []
