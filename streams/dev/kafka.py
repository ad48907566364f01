"""Kafka: one KRaft node, broker and controller in one, from Maven's jars."""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from streams.dev.maven import cached, run_maven
from streams.dev.ports import listens
from streams.dev.process import Launch
from streams.dev.programs import find_java
from streams.dev.server import Attempt, LocalServer
from streams.dev.state import ServerName
from streams.errors import ServerUnavailable

VERSION = "4.3.1"
# For a short start and a small process; a broker on a developer's machine never gets hot enough for more.
JVM_FLAGS = ("-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
SHIPPED = Path(__file__).parent
MEBIBYTE = 1024 * 1024


class Kafka(LocalServer):
    name = ServerName.KAFKA
    port_names = ("port", "controller")
    stopping = ((signal.SIGTERM, 20.0),)

    @property
    def properties(self) -> Path:
        return self.home / "server.properties"

    def leads(self, command: Sequence[str]) -> bool:
        return "kafka.Kafka" in command

    def prepare(self, ports: Mapping[str, int], attempt: Attempt) -> Launch:
        java, jars = find_java(), _jars(attempt)
        self.properties.write_text(_properties(ports, self.data))
        logging = f"-Dlog4j2.configurationFile={SHIPPED / 'kafka-log4j2.xml'}"
        command = [str(java), *JVM_FLAGS, logging, "-cp", f"{jars}/*"]
        if not (self.data / "meta.properties").exists():
            self._format(command)
        return Launch([*command, "kafka.Kafka", str(self.properties)], self.home)

    def _format(self, java: Sequence[str]) -> None:
        arguments = ["format", "--ignore-formatted", "-t", _cluster_id(), "-c", str(self.properties)]
        command = [*java, "kafka.tools.StorageTool", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.home)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise ServerUnavailable(f"Kafka could not format {self.data}: {said}")

    def problem(self, port: int) -> str | None:
        # Asked first, for a client that was refused once waits long before it tries again.
        if not listens(port):
            return "nothing listens on its port"
        client = AdminClient({"bootstrap.servers": self.endpoint(port), "log_level": 0})
        try:
            brokers = client.list_topics(timeout=2).brokers
        except KafkaException as error:
            return str(error.args[0].str())
        return None if brokers else "the broker has not joined its cluster yet"

    def endpoint(self, port: int) -> str:
        return f"127.0.0.1:{port}"


def _jars(attempt: Attempt) -> Path:
    def fill(folder: Path) -> None:
        pom = shutil.copy(SHIPPED / "kafka-pom.xml", folder / "pom.xml")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}", "-DincludeScope=runtime"]
        run_maven(["-f", str(pom), *goal], "kafka", attempt)

    return cached(f"kafka-{VERSION}", "kafka", attempt, fill)


def _cluster_id() -> str:
    # The top bit is cleared, for an id that begins with "-" is taken for an option.
    number = uuid.uuid4().int & (2**127 - 1)
    return base64.urlsafe_b64encode(number.to_bytes(16)).decode().rstrip("=")


def _properties(ports: Mapping[str, int], data: Path) -> str:
    broker, controller = f"127.0.0.1:{ports['port']}", f"127.0.0.1:{ports['controller']}"
    values = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{controller}",
        "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{broker}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": data,
        # A killed broker is let in again only when its session has ended: short, so that it is back after seconds.
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 500,
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
        # A killed consumer's partitions go to another one after seconds; the default lets them wait for 45.
        "group.consumer.session.timeout.ms": 6000,
        "group.consumer.min.session.timeout.ms": 6000,
        "group.consumer.heartbeat.interval.ms": 1000,
        "group.consumer.min.heartbeat.interval.ms": 1000,
        "message.max.bytes": 16 * MEBIBYTE,
        "replica.fetch.max.bytes": 16 * MEBIBYTE,
        "log.cleaner.dedupe.buffer.size": 4 * MEBIBYTE,
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())
