"""Which module an ID function is taken from, which copy of it, and what is said if there is none."""

import pickle
import sys
import zipfile
from pathlib import Path

import pytest

from dedup.code_loader import imported_digest, load_attribute, load_id_function, source_digest
from dedup.core.flow import FlowRecord
from dedup.errors import TopologyError
from dedup.flow_loader import sample_findings
from dedup.topology.parse import parse
from dedup.yaml_document import beside

GOOD = "def own(key, value, headers):\n    return value\n"


def topology(directory, name, code, **more):
    (directory / f"{name}.py").write_text(code, encoding="utf-8")
    file = directory / "t.yaml"
    text = (
        "dedup: 1\nname: t\nsource: {topics: [in]}\nguard_period: 1h\noutput: {topic: out}\n"
        f"tracking_id: {more.get('rule', '')}{{python: {name}:own}}{more.get('end', '')}\n"
    )
    return parse(text, name=str(file), read_file=beside(file))


def test_a_rule_that_was_sent_to_another_process_finds_the_same_function(tmp_path):
    rule = topology(tmp_path, "code_sent", GOOD).tracking_id.rule
    assert rule.digest == source_digest(GOOD)
    assert pickle.loads(pickle.dumps(rule)).load() is rule.load()
    assert rule.load()(None, b"v", ()) == b"v"


def test_a_module_in_a_package(tmp_path):
    (tmp_path / "code_package").mkdir()
    (tmp_path / "code_package" / "__init__.py").touch()
    text = GOOD.replace("return value", "return 7")
    (tmp_path / "code_package" / "ids.py").write_text(text, encoding="utf-8")
    rule = topology(tmp_path, "code_package.ids", "").tracking_id.rule
    assert rule.digest == source_digest(text)
    assert rule.load()(None, None, ()) == 7


def test_a_module_may_begin_with_a_byte_order_mark(tmp_path):
    """Was: refused as another module than the one next to the topology file."""
    rule = topology(tmp_path, "code_marked", "\ufeff" + GOOD).tracking_id.rule
    assert rule.load()(None, b"v", ()) == b"v"


def test_an_older_copy_of_the_module_is_refused(tmp_path):
    rule = topology(tmp_path, "code_older", GOOD).tracking_id.rule
    (tmp_path / "code_older.py").write_text(GOOD + "# changed\n", encoding="utf-8")
    with pytest.raises(
        TopologyError, match=r"code_older.py \(digest \w+\) differs from the module that was next to the topology file"
    ):
        rule.load()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("own = 7", "is not a function; define it as def own\\(key, value, headers\\)"),
        ("", "is not a function"),
        ("async def own(key, value, headers):\n    return key", "own is async; a tracking ID must not wait"),
    ],
)
def test_what_is_no_function(tmp_path, code, says):
    name = f"code_{len(code)}_{len(says)}"
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    with pytest.raises(TopologyError, match=says):
        load_id_function(f"{name}:own", str(tmp_path), "t.yaml", "")


def test_a_module_that_was_changed_after_its_import_needs_another_process(tmp_path):
    before = topology(tmp_path, "code_changed", GOOD).tracking_id.rule
    assert before.load()(None, b"v", ()) == b"v"
    after = topology(tmp_path, "code_changed", GOOD.replace("value\n", "key\n")).tracking_id.rule
    with pytest.raises(TopologyError, match="was changed after this process had imported it; restart the process"):
        after.load()
    assert before.load()(None, b"v", ()) == b"v"


def test_the_digest_of_what_runs_is_that_of_the_import(tmp_path):
    assert imported_digest("code_digest:flow") == ""
    file = tmp_path / "code_digest.py"
    file.write_text("flow = 1\n", encoding="utf-8")
    load_attribute("then", "code_digest:flow", str(tmp_path), "t.yaml")
    file.write_text("flow = 2\n", encoding="utf-8")
    assert imported_digest("code_digest:flow") == source_digest("flow = 1\n")


def test_a_module_in_a_zip_file_as_spark_ships_it(tmp_path, monkeypatch):
    rule = topology(tmp_path, "code_zipped", GOOD).tracking_id.rule
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.write(tmp_path / "code_zipped.py", "code_zipped.py")
    (tmp_path / "code_zipped.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "code.zip"))
    assert rule.load()(None, b"v", ()) == b"v"


def test_a_relative_name_means_the_same_in_another_working_directory(tmp_path, monkeypatch):
    (tmp_path / "code_relative.py").write_text(GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = "dedup: 1\nname: t\nsource: {topics: [in]}\nguard_period: 1h\ntracking_id: {python: code_relative:own}\n"
    rule = parse(text, name="t.yaml", read_file=beside(Path("t.yaml"))).tracking_id.rule
    monkeypatch.chdir("/")
    assert rule.load()(None, b"v", ()) == b"v"


def test_a_link_to_a_module_and_a_package_that_hides_a_module(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "code_linked.py").write_text(GOOD, encoding="utf-8")
    (tmp_path / "code_linked.py").symlink_to(elsewhere / "code_linked.py")
    assert topology(tmp_path, "code_linked", GOOD).tracking_id.rule.load()(None, b"v", ()) == b"v"
    (tmp_path / "code_twice").mkdir()
    (tmp_path / "code_twice" / "__init__.py").write_text(GOOD.replace("value\n", "7\n"), encoding="utf-8")
    assert topology(tmp_path, "code_twice", GOOD).tracking_id.rule.load()(None, b"v", ()) == 7


def test_a_module_that_hides_the_one_beside_the_file(tmp_path):
    assert "json" in sys.modules
    with pytest.raises(TopologyError, match="not the module beside the topology file"):
        topology(tmp_path, "json", GOOD).tracking_id.rule.load()


def test_samples_find_functions_that_fail_or_depend_on_the_process(tmp_path):
    records = [FlowRecord("out", None, value, (), 0) for value in (b"1", b"bad", b"2")]
    code = "def own(key, value, headers):\n    if value == b'bad': raise ValueError('bad')\n    return {}\n"
    plain = topology(tmp_path, "code_fails", code.format("value"))
    (fails,) = sample_findings(plain, records)
    assert (fails.level, fails.code) == ("warning", "id_function_fails")
    assert "the function code_fails:own fails at 1 of 3 samples" in fails.text
    chance = code.format("'-'.join({'a', 'b', 'c', 'd', 'e'})")
    made = topology(tmp_path, "code_chance", chance, rule="{first_of: [{header: h}, ", end="]}")
    silly = topology(tmp_path, "code_silly", "def own(key, value, headers):\n    return value == b'2' or None\n")
    (useless,) = sample_findings(silly, records)
    assert "fails at 1 of 3 samples, first with: what code_silly:own returned has the type bool" in useless.text
    assert [each.code for each in sample_findings(made, records)] == [
        "id_function_fails",
        "id_function_not_deterministic",
    ]
