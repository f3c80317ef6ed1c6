"""`then` and `routes`: how they are written, and what the places that know topologies make of them."""

from pathlib import Path

import pytest

from dedup.core.fold import OnMissing
from dedup.errors import TopologyError
from dedup.topology.chain import Named, describe_chain, lint_chain
from dedup.topology.describe import describe, graph, worker_permissions
from dedup.topology.model import FlowSpec
from dedup.topology.parse import parse
from dedup.worker.dead_letter_replay import replay_plan

HEAD = "dedup: 1\nname: t\nsource: {topics: [in], partitioned_by: tracking_id}\ntracking_id: {field: id}\nguard_period: 1h\n"
FLOW = HEAD + "output: {topic: out}\nthen: shop.flows:flow\nroutes: [eu, us]\n"


def problems(text):
    with pytest.raises(TopologyError) as caught:
        parse(text, name="dir/t.yaml")
    return [str(each) for each in caught.value.problems]


def test_a_flow_and_its_routes():
    made = parse(FLOW, name="dir/t.yaml")
    assert made.then == FlowSpec("shop.flows:flow", str(Path("dir").resolve()))
    assert (made.forwards_to, made.missing) == (("out", "eu", "us"), OnMissing.DEAD_LETTER)
    mapping = FLOW.replace("shop.flows:flow", "{flow: 'shop.flows:flow', on_error: stop}")
    assert parse(mapping, name="/t.yaml").then == FlowSpec("shop.flows:flow", "/", stop=True)
    assert parse(FLOW, name="t.yaml").then == FlowSpec("shop.flows:flow", str(Path.cwd()))


def test_the_state_does_not_depend_on_the_flow():
    plain = parse(HEAD + "output: {topic: out}\n", name="t.yaml")
    assert parse(FLOW, name="t.yaml").state_identity({"in": 1}) == plain.state_identity({"in": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "then: flows:flow\n", "dir/t.yaml:6:1: then: needs `output`; without it, the topology forwards no record"),
        (HEAD + "output: {topic: out}\nroutes: [eu]\n", "dir/t.yaml:7:1: routes: needs `then`, the flow that sends records there"),
        (FLOW.replace("us", "in"), 'dir/t.yaml:8:14: routes[1]: "in" is also a source topic; every topic has one role'),
        (FLOW.replace("us", "out"), 'dir/t.yaml:8:14: routes[1]: "out" is also the output topic; every topic has one role'),
        (FLOW.replace("us", "out.late"), 'routes[1]: "out.late" is also the topic of late records'),
        (FLOW.replace("us", "eu"), 'dir/t.yaml:8:9: routes: "eu" is listed twice'),
        (FLOW.replace("[eu, us]", "[]"), "routes: "),
        (FLOW.replace("shop.flows:flow", "flows.py"), 'then: "flows.py" is not a flow; write module:attribute, such as flows:flow'),
        (FLOW.replace("out}", "out, headers: true}"), "output.headers: has no effect with `then`"),
    ],
)  # fmt: skip
def test_mistakes(text, said):
    assert any(said in each for each in problems(text)), problems(text)


def test_every_place_that_knows_topologies_knows_the_routes():
    made = parse(FLOW, name="t.yaml")
    assert {"eu", "us"} <= {node.name for node in graph(made)[0]}
    assert "to the flow shop.flows:flow, and then to out or eu or us" in describe(made)
    allowed = {each.name: each.operations for each in worker_permissions(made)}
    assert allowed["eu"] == allowed["us"] == ("Write", "DescribeConfigs")
    assert "has a flow" in str(replay_plan(made, late=True, limit=None))


def test_a_chain_goes_on_behind_a_route():
    first = Named("a.yaml", parse(FLOW, name="a.yaml"))
    second = Named("b.yaml", parse(HEAD.replace("name: t", "name: u").replace("[in]", "[eu]"), name="b.yaml"))
    assert [file for file, each in lint_chain([first, second]) if each.code == "nobody_writes"] == ["a.yaml"]
    assert describe_chain([first, second], frozenset()) is not None
