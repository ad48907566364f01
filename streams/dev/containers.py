"""The servers as containers, where an engine runs and the checkout has a compose file."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streams.dev.state import Report, ServerName, read_json, write_json
from streams.errors import ServerUnavailable

COMPOSE_FILE = "docker-compose.yml"
ASK_SECONDS = 5.0
# What the compose file publishes.
PORTS = {ServerName.KAFKA: 9092, ServerName.POSTGRES: 5432, ServerName.REDIS: 6379, ServerName.REGISTRY: 8081}
ENDPOINTS = {
    ServerName.KAFKA: "127.0.0.1:9092",
    ServerName.POSTGRES: "postgresql://postgres:postgres@127.0.0.1:5432/postgres",
    ServerName.REDIS: "redis://127.0.0.1:6379/0",
    ServerName.REGISTRY: "http://127.0.0.1:8081/apis/ccompat/v7",
}


def usable() -> Path | None:
    """The compose file of the current checkout, if an engine answers that could run it."""
    file = Path.cwd() / COMPOSE_FILE
    return file if file.is_file() and _engine_answers() else None


def _engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def running(directory: Path) -> dict[ServerName, str]:
    """The endpoints of the containers that ``up`` started for the directory."""
    return {ServerName(name): endpoint for name, endpoint in _record(directory).get("endpoints", {}).items()}


def up(directory: Path, file: Path, names: Sequence[ServerName], report: Report) -> None:
    report(f"starting containers: {', '.join(names)}")
    _compose(file, "up", "-d", "--wait", *names)
    endpoints: Mapping[ServerName, str] = {**running(directory), **{name: ENDPOINTS[name] for name in names}}
    write_json(directory / "containers.json", {"file": str(file), "endpoints": endpoints})


def down(directory: Path, *, volumes: bool = False) -> list[ServerName]:
    """Removes the containers, with their data where ``volumes`` says so; which servers they were."""
    stopped = list(running(directory))
    if stopped:
        _compose(Path(_record(directory)["file"]), "down", *(["--volumes"] if volumes else []))
        (directory / "containers.json").unlink()
    return stopped


def log_command(directory: Path, name: ServerName, *, lines: int, follow: bool) -> list[str]:
    options = ["--no-log-prefix", "--tail", str(lines), *(["--follow"] if follow else [])]
    return ["docker", "compose", "-f", _record(directory)["file"], "logs", *options, name]


def _record(directory: Path) -> dict[str, Any]:
    return read_json(directory / "containers.json")


def _compose(file: Path, *arguments: str) -> None:
    command = ["docker", "compose", "-f", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerUnavailable(f"docker compose {arguments[0]} failed: {done.stderr.strip()[-500:]}")
