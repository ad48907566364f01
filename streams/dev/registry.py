"""The schema registry: Apicurio, which speaks Confluent's API. It keeps its schemas in memory only."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from streams.dev.maven import cached, run_maven
from streams.dev.process import Launch
from streams.dev.programs import find_java
from streams.dev.server import Attempt, LocalServer
from streams.dev.state import ServerName

VERSION = "2.6.13.Final"
ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
API = "/apis/ccompat/v7"


class Registry(LocalServer):
    name = ServerName.REGISTRY

    def leads(self, command: Sequence[str]) -> bool:
        return any(part.endswith("-runner.jar") for part in command)

    def prepare(self, ports: Mapping[str, int], attempt: Attempt) -> Launch:
        java = find_java()
        jar = next(_unpacked(attempt).glob("*-runner.jar"))
        where = [f"-Dquarkus.http.port={ports['port']}", "-Dquarkus.http.host=127.0.0.1"]
        flags = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return Launch([str(java), *flags, *where, "-jar", str(jar)], self.home)

    def problem(self, port: int) -> str | None:
        # Not urllib, which would go through a configured proxy.
        connection = HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", f"{API}/subjects")
            status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()
        return None if status == HTTPStatus.OK else f"it answers with HTTP status {status}"

    def endpoint(self, port: int) -> str:
        return f"http://127.0.0.1:{port}{API}"


def _unpacked(attempt: Attempt) -> Path:
    def fill(folder: Path) -> None:
        goal = ["dependency:copy", f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={folder}"]
        run_maven(goal, "registry", attempt)
        archive = next(folder.glob("*.tar.gz"))
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
        archive.unlink()

    return cached(f"apicurio-registry-{VERSION}", "registry", attempt, fill)
