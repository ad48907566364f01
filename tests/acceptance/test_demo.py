"""The demo as a user runs it, and with somebody killing its processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from streams.dev.state import Endpoints
from tests.processes import ROOT, eventually

pytestmark = [pytest.mark.real, pytest.mark.slow]

KILLS = 8
PARTS = ("relay run", "run processors.demo.app:app", "processors.demo.service")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The dev directory; the demo takes the one beside it."""
    yield tmp_path / "dev"
    left = [process for process in psutil.process_iter() if _is_under(process, tmp_path)]
    for process in left:
        process.kill()
    assert not left, "the demo leaves no process behind"


@pytest.mark.timeout(300)
def test_a_run_on_its_own_servers_is_clean(directory: Path) -> None:
    demo = start(directory, "--events", "4000", "--json")
    output, errors = demo.communicate(timeout=280)
    assert demo.returncode == 0, errors
    result = json.loads(output.splitlines()[-1])
    assert_clean(result)
    assert result["kafka"] == "real"
    assert result["dead_lettered"] >= 8, "poison in four projections"
    assert "kill -9" in errors
    assert not (directory.parent / "dev-demo" / "endpoints.json").exists()


@pytest.mark.timeout(300)
def test_kill_9_at_any_moment_changes_nothing(directory: Path, endpoints: Endpoints) -> None:
    before = leftovers(endpoints)
    demo = start(directory, "--events", "4000", "--seed", "9", "--json", **configured(endpoints))
    rng = random.Random()
    killed: list[str] = []
    while demo.poll() is None and len(killed) < KILLS:
        victims = [child for child in children(demo.pid) if part_of(child)]
        if victims:
            victim = rng.choice(victims)
            killed.append(part_of(victim) or "")
            victim.kill()
        try:  # somewhen, not when something is ready
            demo.wait(rng.uniform(0.3, 2.5))
        except subprocess.TimeoutExpired:
            continue
    output, errors = demo.communicate(timeout=280)
    assert demo.returncode == 0, (killed, errors)
    assert_clean(json.loads(output.splitlines()[-1]))
    assert killed
    assert leftovers(endpoints) == before, "on servers that others use, the demo leaves nothing behind"


@pytest.mark.timeout(300)
def test_where_no_kafka_can_be_started_a_mock_stands_in_and_is_named_first(
    directory: Path, tmp_path: Path
) -> None:
    without_maven = {"PATH": str(Path(sys.executable).parent), "STREAMS_CACHE_DIR": str(tmp_path / "cache")}
    demo = start(directory, "--events", "4000", "--json", "--keep", **without_maven)
    output, errors = demo.communicate(timeout=280)
    assert demo.returncode == 0, errors
    assert "mock broker" in errors.splitlines()[0]
    result = json.loads(output.splitlines()[-1])
    assert_clean(result)
    assert result["kafka"] == "mock"


def test_ctrl_c_ends_everything(directory: Path) -> None:
    demo = start(directory)
    eventually(lambda: len(children(demo.pid)) >= 4 or demo.poll() is not None, "all processes run", 60)
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, errors


def test_a_second_demo_in_the_same_place_is_refused(directory: Path) -> None:
    first = start(directory)
    eventually((directory.parent / "dev-demo" / "demo.lock").exists, "the first one is there")
    second = start(directory)
    _, errors = second.communicate(timeout=60)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert second.returncode == 1
    assert "another demo is running" in errors


def start(directory: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("STREAMS_", "DEMO_"))}
    kept = {key: value for key, value in os.environ.items() if key == "STREAMS_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-m", "streams.cli.main", "demo", *arguments],
        cwd=ROOT,
        env={**inherited, **kept, "STREAMS_DEV_DIR": str(directory), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def configured(endpoints: Endpoints) -> dict[str, str]:
    assert endpoints.kafka is not None
    assert endpoints.database_url is not None
    assert endpoints.redis_url is not None
    return {
        "STREAMS_KAFKA": endpoints.kafka,
        "STREAMS_DATABASE_URL": endpoints.database_url,
        "STREAMS_REDIS_URL": endpoints.redis_url,
    }


def assert_clean(result: dict[str, Any]) -> None:
    assert result["appended"] >= 4_000
    assert result["relayed"] == result["appended"]
    assert (result["lost"], result["doubled"], result["out_of_order"]) == (0, 0, 0)
    assert result["dead_lettered"] == result["redriven"] > 0
    assert result["seconds"] > 0


def children(pid: int) -> list[psutil.Process]:
    try:
        found = psutil.Process(pid).children()
        return [child for child in found if part_of(child)]
    except psutil.NoSuchProcess:
        return []


def part_of(process: psutil.Process) -> str | None:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return None
    return next((part for part in PARTS if part in command), None)


def leftovers(endpoints: Endpoints) -> list[tuple[Any, ...]]:
    """Databases and slots of demos."""
    assert endpoints.database_url is not None
    with psycopg.connect(endpoints.database_url) as connection:
        return connection.execute(
            "SELECT datname::text FROM pg_database WHERE datname LIKE 'fencepost_demo%' "
            "UNION ALL SELECT slot_name::text FROM pg_replication_slots WHERE slot_name LIKE 'fencepost_demo%'"
        ).fetchall()


def _is_under(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
