"""Config files, `--set` and `DEDUP_*`: what they become, what is refused, and that secrets stay secret."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from dedup.errors import SettingsError
from dedup.settings import LogSettings, Secret, Security, Settings, TopicDefaults, load_settings

CONFIG = Path(__file__).parents[2] / "config"
CANARY = "canary-7f3a"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text: str) -> Path:
    path = Path("c.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def load(text: str, *overrides: str, **environ: str) -> Settings:
    return load_settings(write(text), overrides, environ)


def problems(text: str, *overrides: str, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(text, *overrides, **environ)
    return str(caught.value).splitlines()


def test_nothing_can_be_changed_later():
    settings = load("brokers: [a:9092]")
    with pytest.raises(ValidationError, match="frozen"):
        settings.worker_id = "another"
    with pytest.raises(ValidationError, match="frozen"):
        settings.web.port = 1


def test_only_brokers_is_needed():
    assert load("brokers: [a:9092]") == Settings(brokers=("a:9092",))


def test_the_defaults():
    settings = load("brokers: [a:9092]")
    assert settings.security == Security()
    assert (settings.commit_interval_ms, settings.transaction_timeout_ms, settings.session_timeout_ms) == (
        100,
        30_000,
        10_000,
    )
    topics = settings.topics
    assert (topics.create, topics.compression) == (True, "snappy")
    assert (topics.replication_factor, topics.min_insync_replicas, topics.retention_ms, topics.partitions) == (
        None,
    ) * 4
    assert (settings.web.enabled, settings.web.host, settings.web.port, settings.web.token) == (
        True,
        "127.0.0.1",
        6066,
        None,
    )
    assert (settings.log.format, settings.log.level) == ("text", "info")
    assert settings.state_dir == Path("state")
    assert settings.worker_id is None


def test_production_yaml_is_correct(tmp_path):
    secret = tmp_path / "kafka"
    secret.write_text(f"{CANARY}\n", encoding="utf-8")
    text = (CONFIG / "production.yaml").read_text(encoding="utf-8").replace("/run/secrets/kafka", str(secret))
    settings = load(text, KAFKA_USER="orders")
    assert settings.brokers == ("kafka-1:9093", "kafka-2:9093")
    assert settings.security.username == "orders"
    assert settings.security.password == Secret(CANARY)
    assert settings.topics == TopicDefaults(replication_factor=3, min_insync_replicas=2, retention="7d")
    assert settings.topics.retention_ms == 604_800_000
    assert settings.worker_id == "orders-1"
    assert settings.log == LogSettings(format="json")


def test_local_yaml_is_correct_and_is_the_default(monkeypatch):
    monkeypatch.chdir(CONFIG.parent)
    settings = load_settings(None, [], {})
    assert settings == load_settings(CONFIG / "local.yaml", [], {})
    assert settings.topics.replication_factor == 1


def test_without_any_file_overrides_do():
    assert load_settings(None, ["brokers=a:1,b:2"], {}).brokers == ("a:1", "b:2")
    assert load_settings(None, ["brokers=[a:1, b:2]"], {}).brokers == ("a:1", "b:2")
    assert load_settings(None, [], {"DEDUP_BROKERS": "a:1"}).brokers == ("a:1",)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file():
    text = "brokers: [a:1]\nweb: {port: 1}\nlog: {level: error}\ncommit_interval: 5s"
    settings = load(text, "web.port=3", DEDUP_WEB__PORT="2", DEDUP_LOG__LEVEL="debug")
    assert (settings.web.port, settings.log.level, settings.commit_interval_ms) == (3, "debug", 5_000)


def test_overrides_of_every_type():
    settings = load(
        "brokers: [a:1]", "topics.create=false", "worker_id=7", "state_dir=/x", "topics.retention=1h",
        "topics.partitions=12", "commit_interval=250ms", "web.host=::1",
    )  # fmt: skip
    assert settings.topics.create is False
    assert (settings.worker_id, settings.state_dir) == ("7", Path("/x"))
    assert (settings.topics.retention_ms, settings.topics.partitions) == (3_600_000, 12)
    assert (settings.commit_interval_ms, settings.web.host) == (250, "::1")


@pytest.mark.parametrize("written", ["0042", "+7", "-0", "007", "9" * 40])
def test_text_that_looks_like_a_number_keeps_its_characters(written):
    sasl = "security: {protocol: SASL_SSL, mechanism: PLAIN, username: %s}"
    users = [
        load(f"brokers: [a:1]\n{sasl % written}", DEDUP_SECURITY__PASSWORD="p"),
        load(f"brokers: [a:1]\n{sasl % 'u'}", DEDUP_SECURITY__USERNAME=written, DEDUP_SECURITY__PASSWORD="p"),
        load(f"brokers: [a:1]\n{sasl % 'u'}", f"security.username={written}", DEDUP_SECURITY__PASSWORD="p"),
    ]
    assert [settings.security.username for settings in users] == [written] * 3
    directories = [
        load(f"brokers: [a:1]\nstate_dir: {written}"),
        load("brokers: [a:1]", DEDUP_STATE_DIR=written),
        load("brokers: [a:1]", f"state_dir={written}"),
    ]
    assert [settings.state_dir for settings in directories] == [Path(written)] * 3


def test_text_that_looks_like_something_else_is_text_outside_a_file():
    assert load("brokers: [a:1]", "worker_id=true").worker_id == "true"
    assert load("brokers: [a:1]", DEDUP_STATE_DIR="[a, b]").state_dir == Path("[a, b]")
    said = 'worker_id: "true" must be text, not true or false; if this word is a name, put it in quotes'
    assert problems("brokers: [a:1]\nworker_id: true") == [f"c.yaml:2:12: {said}"]


def test_a_long_secret_in_the_wrong_place_is_not_shown(tmp_path):
    secret = tmp_path / "token"
    secret.write_text(CANARY * 60, encoding="utf-8")
    (said,) = problems(f"brokers: [a:9092]\nworker_id: 'my-${{file:{secret}}}'")
    assert "worker_id" in said
    assert CANARY not in said


def test_secrets_that_look_like_numbers_keep_their_characters(tmp_path):
    (tmp_path / "pw").write_text("0042\n", encoding="utf-8")
    text = "brokers: [a:1]\nsecurity: {protocol: SASL_SSL, mechanism: PLAIN, username: u%s}"
    assert load(text % "", DEDUP_SECURITY__PASSWORD="0042").security.password == Secret("0042")
    assert load(text % ', password: "${file:pw}"').security.password == Secret("0042")


def test_numbers_stay_numbers():
    assert load("brokers: [a:1]\nweb: {port: 0042}").web.port == 42
    assert load("brokers: [a:1]", "web.port=0042").web.port == 42
    assert load("brokers: [a:1]", DEDUP_TOPICS__PARTITIONS="012").topics.partitions == 12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            'c.yaml: the key "brokers" is missing; write `brokers: [host:9092]` into a config file, or --set brokers=host:9092, or DEDUP_BROKERS',
        ),
        ("brokers: []", "c.yaml:1:10: brokers: is an empty list; name at least one broker"),
        ("brokers: [kafka]", 'c.yaml:1:11: brokers[0]: "kafka" is not a broker; write host:port, such as kafka-1:9092'),
        (
            "brokers: [kafka:99999]",
            'c.yaml:1:11: brokers[0]: "kafka:99999" is not a broker; write host:port, such as kafka-1:9092',
        ),
        (
            "brokers: [.svc:9092]",  # as "$HOST.svc:9092" without HOST
            'c.yaml:1:11: brokers[0]: ".svc:9092" is not a broker; write host:port, such as kafka-1:9092',
        ),
        ("brokers:", "c.yaml:1:1: brokers: has no value; write one, or leave the key out"),
        ("brokers: [a:1, null]", "c.yaml:1:16: brokers[1]: has no value; write one, or leave the item out"),
        ("broker: [a:1]", 'c.yaml:1:1: unknown key "broker"; did you mean "brokers"?'),
        (
            "brokers: [a:1]\ncommit_interval: 100",
            'c.yaml:2:18: commit_interval: "100" has no unit; write "100ms" or "100s"',
        ),
        ("brokers: [a:1]\ncommit_interval: 5m", 'c.yaml:2:18: commit_interval: "5m" must be 1ms to 60s'),
        (
            "brokers: [a:1]\ncommit_interval: 20s",
            "c.yaml:1:1: transaction_timeout: must be at least twice commit_interval (20s)",
        ),
        ("brokers: [a:1]\nsession_timeout: 10ms", 'c.yaml:2:18: session_timeout: "10ms" must be 1s to 30m'),
        (
            "brokers: [a:1]\nworker_id: ../x",
            'c.yaml:2:12: worker_id: "../x" is not a valid worker ID; use at most 100 of a-z A-Z 0-9 "." "_" "-", and do not start with "."',
        ),
        (
            "brokers: [a:1]\ntopics: {replication_factor: 0}",
            'c.yaml:2:30: topics.replication_factor: "0" must be 1 to 32767',
        ),
        (
            "brokers: [a:1]\ntopics: {replication_factor: 1, min_insync_replicas: 2}",
            "c.yaml:2:54: topics.min_insync_replicas: more than topics.replication_factor (1)",
        ),
        (
            "brokers: [a:1]\ntopics: {compression: lz5}",
            'c.yaml:2:23: topics.compression: "lz5" is not one of none | gzip | snappy | lz4 | zstd; did you mean "lz4"?',
        ),
        (
            "brokers: [a:1]\nweb: {host: 0.0.0.0}",
            'c.yaml:2:13: web.host: "0.0.0.0" can be reached from outside; set web.token, or listen on 127.0.0.1',
        ),
        ("brokers: [a:1]\nweb: {prot: 1}", 'c.yaml:2:7: unknown key "web.prot"; did you mean "port"?'),
        (
            "brokers: [a:1]\nschema_registry: {username: u}",
            "c.yaml:2:29: schema_registry.username: needs schema_registry.url",
        ),
        (
            "brokers: [a:1]\nschema_registry: {url: 'http://r', ca_file: /x}",
            "c.yaml:2:45: schema_registry.ca_file: has no effect with http; write an address that begins with https",
        ),
        (
            "brokers: [a:1]\nschema_registry: {url: 'http://u:p@r'}",
            "c.yaml:2:24: schema_registry.url: contains a user; leave it out, and set schema_registry.username and .password",
        ),
        (
            "brokers: [a:1]\nschema_registry: {url: 'http://[::1'}",
            "c.yaml:2:24: schema_registry.url: is not the address of a schema registry; write for example https://registry:8081",
        ),
        (
            "brokers: [a:1]\nschema_registry: {url: 'registry:8081'}",
            "c.yaml:2:24: schema_registry.url: is not the address of a schema registry; write for example https://registry:8081",
        ),
        (
            "brokers: [a:1]\nlog: {level: trace}",
            'c.yaml:2:14: log.level: "trace" is not one of debug | info | warning | error',
        ),
        (
            "brokers: [a:1]\nsecurity: {protocol: SASL_SSL}",
            "c.yaml:2:22: security.mechanism: is missing; SASL_SSL needs it",
        ),
        (
            "brokers: [a:1]\nsecurity: {username: u}",
            "c.yaml:2:22: security.username: has no effect with protocol PLAINTEXT; write `protocol: SASL_SSL`",
        ),
        (
            "brokers: [a:1]\nsecurity: {ca_file: /x}",
            "c.yaml:2:21: security.ca_file: has no effect with protocol PLAINTEXT; write `protocol: SSL`",
        ),
        (
            "brokers: [a:1]\nsecurity: {protocol: SSL, cert_file: /x}",
            "c.yaml:2:38: security: cert_file and key_file belong together; name both",
        ),
        (
            'brokers: [a:1]\nstate_dir: "${env:NOPE}"',
            "c.yaml:2:12: state_dir: the environment variable NOPE is not set",
        ),
        (
            'brokers: [a:1]\nstate_dir: "${file:/nope/x}"',
            "c.yaml:2:12: state_dir: the file /nope/x cannot be read: No such file or directory",
        ),
        (
            'brokers: [a:1]\nstate_dir: "${vault:x}"',
            'c.yaml:2:12: state_dir: "${vault:...}" is unknown; write "${env:NAME}" or "${file:PATH}"',
        ),
        ("brokers: [a:1]\nbrokers: [b:1]", 'c.yaml:2:1: the key "brokers" is repeated; it is already on line 1'),
        ("[a]", "c.yaml:1:1: must be a mapping of keys to values; begin with `brokers:`"),
        (
            "brokers: [a:1]\nstate_dir: ~nobody-here/x",
            'c.yaml:2:12: state_dir: "~nobody-here/x" names the home directory of an unknown user; write the whole path',
        ),
        ("brokers: [a:1]\nstate_dir: [a]", "c.yaml:2:12: state_dir: must be text, not a list; write the text alone"),
        ("brokers: {a: 1}", 'c.yaml:1:10: brokers: must be a list; write "[a, b]"'),
        ("a: [", "c.yaml:1:5: is not YAML here: expected the node content, but found '<stream end>'"),
    ],
)
def test_a_mistake_in_the_file(text, said):
    assert said in problems(text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("web.prot=1", '--set web.prot: unknown key; did you mean "web.port"?'),
        ("web.port", "--set web.port: has no value; write --set key=value"),
        ("web.port=x", '--set web.port: web.port: "x" must be a whole number'),
        ("loglevel=debug", '--set loglevel: unknown key; did you mean "log.level"?'),
        ("commit_interval=5", '--set commit_interval: commit_interval: "5" has no unit; write "5s" or "5ms"'),
        ("topics.retention=7", '--set topics.retention: topics.retention: "7" has no unit; write "7h" or "7m"'),
    ],
)
def test_a_mistake_on_the_command_line(override, said):
    assert said in problems("brokers: [a:1]", override)


@pytest.mark.parametrize("key", ["brokers", "web.port", "commit_interval", "state_dir", "worker_id"])
def test_bytes_that_are_not_utf8_are_refused_wherever_they_come_from(key):
    variable = "DEDUP_" + key.replace(".", "__").upper()
    said = f"{key}: the value is not UTF-8; write it in UTF-8"
    assert f"--set {key}: {said}" in problems("brokers: [a:1]", f"{key}=a\udcff:1")
    assert f"{variable}: {said}" in problems("brokers: [a:1]", **{variable: "\udcff"})
    found = problems("brokers: [a:1]\nsecurity: {password: '${env:NAME}'}", NAME="\udcff")
    assert any(each.endswith("security.password: the environment variable NAME is not UTF-8 text") for each in found)


def test_an_unknown_variable_is_refused_but_not_those_of_tests():
    said = problems(
        "brokers: [a:1]", DEDUP_WEB__PROT="1", DEDUP_TEST_BROKER="x", DEDUP_JDBC_PASSWORD="y", DEDUP_CRASH_AT="y"
    )
    assert said == ['DEDUP_WEB__PROT: no setting has this variable; did you mean "DEDUP_WEB__PORT"?']


def test_everything_is_said_at_once_in_order():
    said = problems("brokers: [a]\ngrace: 1\nlog: {level: 1}", "x=1", DEDUP_X="1")
    assert [problem.split(" ")[0] for problem in said] == [
        "DEDUP_X:",
        "--set",
        "c.yaml:1:11:",
        "c.yaml:2:1:",
        "c.yaml:3:14:",
    ]


def test_a_file_that_is_not_there():
    with pytest.raises(SettingsError, match=r"nope.yaml: cannot be read: No such file or directory; name a config"):
        load_settings(Path("nope.yaml"), [], {})


def test_a_default_file_that_cannot_be_looked_for_is_named(monkeypatch):
    """Was: a traceback, also if DEDUP_BROKERS was set."""

    def refused(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refused)
        with pytest.raises(SettingsError) as caught:
            load_settings(None, (), {"DEDUP_BROKERS": "a:1"})
    assert str(caught.value).startswith("config/local.yaml: cannot be read: Permission denied; ")


@pytest.mark.parametrize("there", ["a file", "a directory", "nothing"])
def test_a_default_file_need_not_be_there(there):
    if there == "a file":
        Path("config").touch()
    elif there == "a directory":
        Path("config/local.yaml").mkdir(parents=True)
    assert load_settings(None, (), {"DEDUP_BROKERS": "a:1"}).brokers == ("a:1",)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "c").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not UTF-8 at byte 0; save it as UTF-8"):
        load_settings(tmp_path / "c", [], {})


class TestSecrets:
    sasl = "brokers: [a:1]\nsecurity: {protocol: SASL_SSL, mechanism: PLAIN, username: u, password: %s}"

    def test_from_a_variable_of_any_name(self):
        assert load(self.sasl % '"${env:PW}"', PW=CANARY).security.password == Secret(CANARY)

    def test_from_a_file_without_its_last_line_break(self, tmp_path):
        (tmp_path / "pw").write_text(f"{CANARY}\r\n", encoding="utf-8")
        assert load(self.sasl % '"${file:pw}"').security.password == Secret(CANARY)

    def test_not_from_a_file_that_is_larger_than_what_is_read_of_it(self, tmp_path):
        (tmp_path / "pw").write_text("x" * 65_536, encoding="utf-8")
        assert load(self.sasl % '"${file:pw}"').security.password == Secret("x" * 65_536)
        (tmp_path / "pw").write_text("x" * 65_537, encoding="utf-8")
        said = problems(self.sasl % '"${file:pw}"')
        assert said[0] == "c.yaml:2:73: security.password: the file pw is larger than 64 KiB, the limit"

    def test_from_our_own_variable_taken_as_it_is(self):
        odd = "${env:HOME}: [5"
        settings = load(self.sasl.replace(", password: %s", ""), DEDUP_SECURITY__PASSWORD=odd)
        assert settings.security.password == Secret(odd)

    @pytest.mark.parametrize("written", [CANARY, f'"x${{env:PW}}{CANARY}"', "12345"])
    def test_not_from_the_file_itself(self, written):
        said = problems(self.sasl % written, PW="p")
        assert said[0] == (
            'c.yaml:2:73: security.password: a secret must not be written here; write "${env:NAME}" or "${file:PATH}", '
            "or set DEDUP_SECURITY__PASSWORD"
        )
        assert CANARY not in "".join(said)
        assert "12345" not in "".join(said)

    def test_not_from_the_command_line_which_others_can_see(self):
        said = problems("brokers: [a:1]", f"web.token={CANARY}")
        assert said[0].startswith("--set web.token: web.token: a secret must not be written here")
        assert CANARY not in said[0]
        assert load("brokers: [a:1]", "web.token=${env:T}", T=CANARY).web.token == Secret(CANARY)

    def test_not_an_empty_one(self):
        assert problems(self.sasl % '"${env:PW}"', PW="") == ["c.yaml:2:73: security.password: ${env:PW} is empty"]

    def test_no_repr_text_or_pickle_shows_it(self):
        settings = load(self.sasl % '"${env:PW}"', PW=CANARY)
        assert CANARY not in f"{settings!r} {settings} {settings.security.password!s}"
        with pytest.raises(TypeError, match="must not be pickled"):
            pickle.dumps(settings)

    def test_no_message_shows_what_a_reference_stood_for(self):
        said = problems('brokers: ["${env:PW}"]\nlog: {level: "${env:PW}"}\nworker_id: "a/${env:PW}"', PW=CANARY)
        assert len(said) == 3
        assert CANARY not in "".join(said)
        assert "${env:PW}" in "".join(said)

    @pytest.mark.parametrize("value", ["m", "a", "is", "write", "interval", "must be", 'a"b', "must"])
    def test_a_value_is_replaced_only_where_it_is_written(self, value):
        """Was: `co${env:H}${env:H}it_interval`, which shows which letters the value consists of."""
        text = "brokers: [a:1]\nweb: {host: 127.0.0.1, port: 99999}\ncommit_interval: 90s\nlog: {level: '${env:H}'}\n"
        said = problems(text + "worker_id: '-/${env:H}'", H=value)
        assert [line.split(": ", 1)[1] for line in said] == [
            'web.port: "99999" must be 0 to 65535',
            'commit_interval: "90s" must be 1ms to 60s',
            'log.level: "${env:H}" is not one of debug | info | warning | error',
            (
                'worker_id: "-/${env:H}" is not a valid worker ID; use at most 100 of a-z A-Z 0-9 "." "_" "-", and do not '
                'start with "."'
            ),
        ]

    @pytest.mark.parametrize(
        "value", [f"7{CANARY}", f"31337 {CANARY}", f'{CANARY}" x', "8374628374", "83746283 s", 'one","other"']
    )
    def test_no_message_shows_a_part_of_it(self, value):
        """Was: the unit of `7canary` was shown as an unknown unit."""
        text = (
            "brokers: ['${env:PW},x${env:PW}']\ncommit_interval: '${env:PW}'\nweb: {port: '${env:PW}', host: ''}\n"
            "schema_registry: {url: 'http://${env:PW}@h'}\nstate: {checkpoint: 's3://u:${env:PW}@b'}\n"
        )
        said = "\n".join(problems(text, PW=value))
        assert "commit_interval: " in said
        assert not [at for at in range(len(value) - 3) if value[at : at + 4] in said]

    def test_no_chained_error_shows_it(self):
        with pytest.raises(SettingsError) as caught:
            load('brokers: ["${env:PW}"]', PW=CANARY)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_plain_references_mix_with_text():
    assert load('brokers: ["${env:HOST}:9092"]', HOST="kafka").brokers == ("kafka:9092",)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    assert load(f'brokers: [a:1]\nweb: {{host: "{host}"}}').web.host == host


@pytest.mark.parametrize("token", ["first\nsecond", "t\u00f6ken", "token ", "\ttoken"])
def test_a_token_of_the_pages_that_no_header_can_carry_is_named_at_the_start_and_not_shown(token):
    (said,) = problems("brokers: [a:1]", DEDUP_WEB__TOKEN=token)
    assert said.startswith("DEDUP_WEB__TOKEN: web.token: callers send it in an HTTP header")
    assert token not in said


@pytest.mark.parametrize("token", ["t", "a pass phrase", "p\u0021~"])
def test_a_token_of_the_pages_that_a_header_can_carry(token):
    assert load("brokers: [a:1]", DEDUP_WEB__TOKEN=token).web.token == Secret(token)


def test_an_empty_directory_is_not_the_current_one():
    assert problems("brokers: [a:1]", DEDUP_STATE_DIR="") == [
        "DEDUP_STATE_DIR: state_dir: is empty; write a directory, or leave it out"
    ]
    assert problems("brokers: [a:1]\nschema_registry: {directory: ''}") == [
        "c.yaml:2:30: schema_registry.directory: is empty; write a directory, or leave it out"
    ]


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_page_has_a_port_that_there_can_be(port):
    (said,) = problems(f"brokers: [a:1]\nweb: {{advertise: 'http://w-1:{port}'}}")
    assert f'web.advertise: "http://w-1:{port}" is not the address of a page' in said


def test_an_empty_host_is_refused_where_it_is_written():
    """Was: the pages were announced as http://:6066, and the worker ended with a traceback."""
    assert problems("brokers: [a:1]\nweb: {host: ''}", DEDUP_WEB__TOKEN=CANARY) == [
        'c.yaml:2:13: web.host: is empty; write an address, such as "0.0.0.0" for all addresses, or leave it out'
    ]


def test_another_host_does():
    settings = load("brokers: [a:1]\nweb: {host: 0.0.0.0}", DEDUP_WEB__TOKEN=CANARY)
    assert settings.web.token == Secret(CANARY)
    assert load("brokers: [a:1]\nweb: {host: 0.0.0.0, enabled: false}").web.enabled is False


@pytest.mark.parametrize("token", ["token\n", "t\u00f6ken", "a token"])
def test_a_bearer_token_that_no_header_can_carry_is_named_at_the_start(token):
    registry = "brokers: [a:1]\nschema_registry: {url: 'http://r', password: '${env:TOKEN}'"
    (found,) = problems(f"{registry}}}", TOKEN=token)
    assert "schema_registry.password: without a username, this is a bearer token" in found
    assert token not in found
    assert load(f"{registry}, username: u}}", TOKEN=token)
    assert load(f"{registry}}}", TOKEN="abc.DEF-123_~+/=")


@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize(
    ("section", "key", "what"),
    [
        ("security: {protocol: SSL", "ca_file", "file"),
        ("security: {protocol: SSL, key_file: /k", "cert_file", "file"),
        ("security: {protocol: SSL, cert_file: /c", "key_file", "file"),
        ("security: {protocol: SASL_SSL, mechanism: PLAIN, password: '${env:P}'", "username", "user"),
        ("schema_registry: {url: 'https://r'", "ca_file", "file"),
        ("schema_registry: {url: 'https://r'", "directory", "directory"),
    ],
)
def test_an_empty_variable_is_not_a_setting_that_is_left_out(section, key, what, empty):
    """Was: the system's CAs were trusted instead of the one that `${env:CA}` was meant to name."""
    text = f"brokers: [a:1]\n{section}, {key}: '${{env:V}}'}}"
    found = problems(text, V=empty, P="secret")
    assert len(found) == 1
    assert f"{section.split(':')[0]}.{key}: is empty; write a {what}, or leave it out" in found[0]


def test_every_path_may_begin_with_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    text = (
        "brokers: [a:1]\nstate_dir: ~/s\nstate: {checkpoint: ~/c}\n"
        "security: {protocol: SSL, ca_file: ~/ca, cert_file: ~/cert, key_file: ~/key}\n"
        "schema_registry: {url: 'https://r', ca_file: ~/ca, directory: ~/d}\n"
    )
    made = load(text)
    security, registry = made.security, made.schema_registry
    found = [str(made.state_dir), made.state.checkpoint, security.ca_file, security.cert_file, security.key_file]
    assert [*found, registry.ca_file, registry.directory] == [
        f"/home/ann/{name}" for name in ("s", "c", "ca", "cert", "key", "ca", "d")
    ]
    assert "unknown user; write the whole path" in problems(text.replace("~/ca", "~nobody-here/ca"))[0]
