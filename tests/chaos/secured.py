"""A broker that trusts nobody: TLS with certificates by openssl in PEM files, SASL, mTLS, an authorizer, ACLs.

Its plaintext listener on the loopback is the administrator's: tests make topics and judge through it.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from dedup.embedded.kafka_node import HOST, EmbeddedKafka, free_ports, new_id
from tests.brokers import Admin, RunningKafka, admin_of
from tests.integration.fleet import Job
from tests.kafka_cluster import ClusterNode

USER: Final = "worker"
PASSWORD: Final = "canary-password-8c1f"
"""Must appear in no log, error or page."""
CERTIFIED: Final = "certified"
"""The name in the client certificate."""

RESOURCES: Final = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}
OPERATIONS: Final = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Delete": AclOperation.DELETE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}
PATTERNS: Final = {"literal": ResourcePatternType.LITERAL, "prefixed": ResourcePatternType.PREFIXED}


def openssl(*arguments: str | Path) -> None:
    """openssl did what it was asked to."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Certificates:
    """A CA, and what it signed: each is NAME.pem with its key in NAME.key."""

    directory: Path

    def make_ca(self, name: str) -> Path:
        """A CA of this name is there."""
        key, own = self.directory / f"{name}.key", self.directory / f"{name}.pem"
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl("req", "-x509", *new_key, "-keyout", key, "-out", own, "-days", "2", "-subj", f"/CN={name}")
        return own

    def sign(self, name: str, *, ca: str = "ca", alternative: str = "DNS:nobody") -> tuple[Path, Path]:
        """Return certificate and key for a common name."""
        key, own = self.directory / f"{name}.key", self.directory / f"{name}.pem"
        request, extra = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extra.write_text(f"subjectAltName={alternative}\n", encoding="ascii")
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", self.directory / f"{ca}.pem", "-CAkey", self.directory / f"{ca}.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *signer, "-days", "2", "-extfile", extra, "-out", own)
        return own, key


@dataclass(frozen=True)
class Secured:
    """The broker that runs, and what its clients need."""

    kafka: EmbeddedKafka
    certificates: Certificates
    sasl_port: int
    mtls_port: int

    @property
    def plaintext(self) -> str:
        """The administrator's listener."""
        return self.kafka.bootstrap

    def set_password(self, password: str) -> None:
        """The user logs in with this password from now on; connections that are open stay open."""
        admin = AdminClient({"bootstrap.servers": self.plaintext, "log_level": 0})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        asked = admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, info, password.encode())])
        for future in asked.values():
            future.result(timeout=30)

    def path(self, name: str) -> str:
        """Return the path of a certificate or key."""
        return str(self.certificates.directory / name)

    def sasl(self, mechanism: str = "SCRAM-SHA-512", **changes: Any) -> dict[str, Any]:
        """Return the `security` of a worker that logs in by user and password; None takes a key away."""
        base = {"protocol": "SASL_SSL", "mechanism": mechanism, "username": USER, "ca_file": self.path("ca.pem")}
        secret = {"password": "${env:WORKER_PASSWORD}"}
        return {key: value for key, value in (base | secret | changes).items() if value is not None}

    def mtls(self, **changes: Any) -> dict[str, Any]:
        """Return the `security` of a worker with a client certificate; None takes a key away."""
        files = {"cert_file": self.path(f"{CERTIFIED}.pem"), "key_file": self.path(f"{CERTIFIED}.key")}
        base = {"protocol": "SSL", "ca_file": self.path("ca.pem")} | files
        return {key: value for key, value in (base | changes).items() if value is not None}


@contextmanager
def running(directory: Path) -> Iterator[Secured]:
    """The broker runs, with a CA, a server certificate for 127.0.0.1 and the users."""
    certificates = Certificates(directory)
    certificates.make_ca("ca")
    certificates.make_ca("stranger")
    own, key = certificates.sign("broker", alternative=f"IP:{HOST}")
    certificates.sign(CERTIFIED)
    certificates.sign("impostor", ca="stranger")
    store = directory / "broker-store.pem"
    store.write_text(key.read_text(encoding="ascii") + own.read_text(encoding="ascii"), encoding="ascii")
    client, controller, sasl, mtls = free_ports(4)
    properties = _properties(directory, client, controller, sasl, mtls)
    with ClusterNode(1, new_id(), (client, controller), f"1@{HOST}:{controller}", properties) as kafka:
        made = Secured(kafka, certificates, sasl, mtls)
        made.set_password(PASSWORD)
        yield made


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Return a broker of the module's own that trusts nobody."""
    with running(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.fixture(scope="module")
def kafka(secured: Secured) -> RunningKafka:
    """Return the broker as its administrator reaches it."""
    return RunningKafka(secured.plaintext, secured.kafka)


@pytest.fixture(scope="module")
def admin(kafka: RunningKafka) -> Admin:
    """Return what creates topics on it."""
    return admin_of(kafka.bootstrap)


def as_client(job: Job, address: str, how: dict[str, Any]) -> None:
    """The job's config names this listener and these credentials: its workers and commands reach the broker so."""
    config = json.loads(job.config_file.read_text(encoding="utf-8")) | {"brokers": [address], "security": how}
    job.config_file.write_text(json.dumps(config), encoding="utf-8")


def _properties(directory: Path, client: int, controller: int, sasl: int, mtls: int) -> dict[str, str]:
    listeners = {"CLIENT": client, "SASL": sasl, "MTLS": mtls}
    told = ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items())
    login = "org.apache.kafka.common.security"
    unsecured = f"{login}.oauthbearer.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler"
    return {
        "listeners": f"{told},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": told,
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_SSL,MTLS:SSL",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN,OAUTHBEARER",
        "listener.name.sasl.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        "listener.name.sasl.plain.sasl.jaas.config": (
            f'{login}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        ),
        "listener.name.sasl.oauthbearer.sasl.jaas.config": f"{login}.oauthbearer.OAuthBearerLoginModule required;",
        "listener.name.sasl.oauthbearer.sasl.server.callback.handler.class": unsecured,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(directory / "broker-store.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(directory / "ca.pem"),
        "listener.name.mtls.ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
    }


def token(user: str = USER) -> str:
    """Return a token that Kafka's validator for development takes: unsigned JSON."""

    def part(fields: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")

    now_s = int(time.time())
    return f"{part({'alg': 'none'})}.{part({'sub': user, 'iat': now_s, 'exp': now_s + 3600})}."


def bindings(rows: Iterable[dict[str, Any]], principal: str) -> list[AclBinding]:
    """Return the ACLs that the JSON of `dedup apply --acls` lists."""
    return [
        AclBinding(
            RESOURCES[row["resource"]],
            row["name"],
            PATTERNS[row["pattern"]],
            principal,
            "*",
            OPERATIONS[operation],
            AclPermissionType.ALLOW,
        )
        for row in rows
        for operation in row["operations"]
    ]


def grant(admin: AdminClient, wanted: list[AclBinding]) -> None:
    """The ACLs are in force."""
    for future in admin.create_acls(wanted).values():
        future.result(timeout=30)


def withdraw(admin: AdminClient, binding: AclBinding) -> None:
    """The ACL is gone."""
    every = AclBindingFilter(
        binding.restype,
        binding.name,
        binding.resource_pattern_type,
        binding.principal,
        binding.host,
        binding.operation,
        binding.permission_type,
    )
    for future in admin.delete_acls([every]).values():
        assert len(future.result(timeout=30)) == 1
