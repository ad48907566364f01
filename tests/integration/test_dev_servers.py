"""The local servers keep their promises: nothing is started twice, nothing is lost, nothing stays, nobody else is hit.

The tests that take ``running`` share one set of servers, since Kafka takes seconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from typer.testing import CliRunner

from streams.cli.dev import app
from streams.dev import process, servers
from streams.dev.postgres import Postgres
from streams.dev.state import ALWAYS, Endpoints, ServerName, read_state, write_state
from streams.dev.status import State, status
from streams.errors import ConfigurationError, ServerUnavailable
from streams.settings import Settings, dev_endpoints

pytestmark = pytest.mark.real

REDIS_ONLY = [ServerName.REDIS]
ENDPOINT_VARIABLES = [name.variable for name in ServerName]


def processes_in(directory: Path) -> list[int]:
    """Every process of the directory's servers, recorded or not."""
    return [found.pid for name in ServerName for found in process.owned(servers.server(directory, name).mark)]


def pid_of(directory: Path, name: ServerName) -> int:
    pid = read_state(directory / name).pid
    assert pid is not None
    return pid


@pytest.fixture(autouse=True)
def without_configured_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENDPOINT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STREAMS_DEV_DIR", str(tmp_path))
    yield tmp_path
    servers.reset(tmp_path)
    assert processes_in(tmp_path) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("dev")
    yield path
    servers.reset(path)


@pytest.fixture
def running(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    monkeypatch.setenv("STREAMS_DEV_DIR", str(shared))
    return servers.up(shared, want=ALWAYS)


def test_settings_find_them(running: Endpoints) -> None:
    settings = Settings.load()
    assert settings.kafka == running.kafka
    assert settings.database_url == running.database_url
    assert settings.redis_url == running.redis_url


def test_postgres_is_fit_for_logical_replication(running: Endpoints) -> None:
    asked = "SELECT current_setting('wal_level'), current_setting('TimeZone'), current_user"
    with psycopg.connect(str(running.database_url)) as connection:
        assert connection.execute(asked).fetchone() == ("logical", "UTC", "postgres")


def test_second_up_changes_nothing(shared: Path, running: Endpoints) -> None:
    before = processes_in(shared)
    said: list[str] = []
    assert servers.up(shared, want=ALWAYS, report=said.append) == running
    assert said == ["kafka: already running", "postgres: already running", "redis: already running"]
    assert set(before) <= set(processes_in(shared))


def test_status_as_table_and_as_json(running: Endpoints) -> None:
    shown = CliRunner().invoke(app, ["status"])
    assert shown.exit_code == 0
    assert shown.stdout.count("running") == 3
    rows = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)
    assert [row["endpoint"] for row in rows] == [running.kafka, running.database_url, running.redis_url]


def test_logs_shows_the_end(running: Endpoints) -> None:
    shown = CliRunner().invoke(app, ["logs", "kafka", "--lines", "500"])
    assert "Kafka Server started" in shown.stdout


def test_killed_servers_come_back_with_data_and_ports(shared: Path, running: Endpoints) -> None:
    admin = AdminClient({"bootstrap.servers": str(running.kafka), "log_level": 0})
    admin.create_topics([NewTopic("kept", num_partitions=2)])["kept"].result(10)
    with psycopg.connect(str(running.database_url)) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    redis.Redis.from_url(str(running.redis_url)).set("kept", "42")

    for name in ALWAYS:
        os.kill(pid_of(shared, name), signal.SIGKILL)
    assert servers.up(shared, want=ALWAYS) == running

    assert len(admin.list_topics(timeout=10).topics["kept"].partitions) == 2
    with psycopg.connect(str(running.database_url)) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    assert redis.Redis.from_url(str(running.redis_url)).get("kept") == b"42"


def test_status_tells_a_crash(directory: Path) -> None:
    servers.up(directory, want=REDIS_ONLY)
    pid = pid_of(directory, ServerName.REDIS)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)], timeout=5)
    found = {each.name: each for each in status(directory)}[ServerName.REDIS]
    assert (found.state, found.detail) == (State.CRASHED, f"process {pid} is gone")


def test_one_server_restarts_alone(shared: Path, running: Endpoints) -> None:
    kafka, before = pid_of(shared, ServerName.KAFKA), pid_of(shared, ServerName.POSTGRES)
    servers.restart(shared, ServerName.POSTGRES, kill=True)
    assert pid_of(shared, ServerName.POSTGRES) != before
    assert pid_of(shared, ServerName.KAFKA) == kafka
    with psycopg.connect(str(running.database_url)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_stop_unpublishes_and_a_crash_does_not(shared: Path, running: Endpoints) -> None:
    servers.stop(shared, ServerName.REDIS, kill=True)
    assert "redis_url" in dev_endpoints()
    servers.start(shared, ServerName.REDIS)
    servers.stop(shared, ServerName.REDIS)
    assert "redis_url" not in dev_endpoints()
    assert [each.state for each in status(shared)] == [State.RUNNING, State.RUNNING, State.STOPPED]


def test_down_leaves_no_process(shared: Path, running: Endpoints) -> None:
    stopped = CliRunner().invoke(app, ["down"])
    assert stopped.stdout == "stopped kafka, postgres, redis\n"
    assert processes_in(shared) == []
    assert dev_endpoints() == {}
    assert CliRunner().invoke(app, ["status"]).exit_code == 1
    assert CliRunner().invoke(app, ["down"]).stdout == "nothing was running\n"


def test_a_reused_pid_is_not_killed(directory: Path) -> None:
    servers.up(directory, want=REDIS_ONLY)
    home = directory / ServerName.REDIS
    ours, state = pid_of(directory, ServerName.REDIS), read_state(home)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=home) as stranger:
        began = psutil.Process(stranger.pid).create_time()
        write_state(home, type(state)(state.ports, answered=True, pid=stranger.pid, created=began))
        assert [each.state for each in status(directory) if each.name is ServerName.REDIS] == [State.CRASHED]
        servers.down(directory)
        assert stranger.poll() is None
        stranger.kill()
    assert not psutil.pid_exists(ours), "a server that is ours is stopped even where its record is wrong"


def test_up_takes_over_from_a_run_that_died_before_it_wrote_the_pid(directory: Path) -> None:
    endpoints = servers.up(directory, want=REDIS_ONLY)
    home, lost = directory / ServerName.REDIS, pid_of(directory, ServerName.REDIS)
    write_state(home, read_state(home).stopped())
    assert servers.up(directory, want=REDIS_ONLY) == endpoints
    assert processes_in(directory) == [pid_of(directory, ServerName.REDIS)] != [lost]


def test_postgres_starts_over_a_pid_file_that_names_a_stranger(directory: Path) -> None:
    servers.up(directory, want=[ServerName.POSTGRES])
    data = servers.server(directory, ServerName.POSTGRES).data
    servers.down(directory)
    (data / "postmaster.pid").write_text(f"{os.getpid()}\n{data}\n")
    assert servers.up(directory, want=[ServerName.POSTGRES]).database_url is not None


def test_down_does_not_wait_for_a_replication_client(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Postgres, "stopping", ((signal.SIGINT, 1.0), (signal.SIGQUIT, 5.0)))
    endpoint = servers.up(directory, want=[ServerName.POSTGRES]).database_url
    connection = psycopg.connect(f"{endpoint}?replication=database", autocommit=True)
    connection.execute("CREATE_REPLICATION_SLOT held LOGICAL pgoutput")
    options = "(proto_version '1', publication_names 'none')"
    connection.pgconn.send_query(f"START_REPLICATION SLOT held LOGICAL 0/0 {options}".encode())
    began = time.monotonic()
    servers.down(directory)
    assert time.monotonic() - began < 5
    assert processes_in(directory) == []
    connection.close()


def test_an_occupied_port_is_named_with_its_holder(directory: Path) -> None:
    servers.up(directory, want=REDIS_ONLY)
    servers.down(directory)
    port = read_state(directory / ServerName.REDIS).ports["port"]
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(
            ServerUnavailable, match=rf"port {port} of redis is in use by .*\(pid {os.getpid()}\)"
        ):
            servers.up(directory, want=REDIS_ONLY)
        moved = servers.up(directory, want=REDIS_ONLY, new_ports=True)
    assert str(port) not in str(moved.redis_url)


def test_a_server_that_never_ran_moves_by_itself(directory: Path) -> None:
    home = directory / ServerName.REDIS
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        write_state(home, type(read_state(home))({"port": port}))
        assert str(port) not in str(servers.up(directory, want=REDIS_ONLY).redis_url)


def test_a_configured_server_is_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMS_KAFKA", "broker.example:9092")
    assert servers.up(directory, want=[ServerName.KAFKA]) == Endpoints(kafka="broker.example:9092")
    assert processes_in(directory) == []
    assert status(directory)[0].state is State.CONFIGURED


def test_two_ups_at_once_start_one_server(directory: Path) -> None:
    found: list[Endpoints] = []
    threads = [
        threading.Thread(target=lambda: found.append(servers.up(directory, want=REDIS_ONLY)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len(processes_in(directory)) == 1


def test_a_server_that_does_not_come_up_shows_its_log_and_takes_the_others_along(directory: Path) -> None:
    servers.up(directory, want=REDIS_ONLY)
    servers.down(directory)
    damaged = servers.server(directory, ServerName.REDIS).data / "appendonly.aof"
    damaged.write_text("no command at all\n")
    with pytest.raises(ServerUnavailable, match=r"redis ended while starting[\s\S]*Bad file format"):
        servers.up(directory, want=[ServerName.REDIS, ServerName.POSTGRES])
    assert processes_in(directory) == []
    assert dev_endpoints() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(directory: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from streams.cli.dev import app; app()", "up", "--no-containers"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        for line in up.stderr:
            if line.startswith("redis: ready"):
                break
        up.send_signal(number)
        up.stderr.read()
    assert up.returncode != 0
    assert processes_in(directory) == []
    assert dev_endpoints() == {}


def test_reset_asks_and_deletes(directory: Path) -> None:
    servers.up(directory, want=REDIS_ONLY)
    assert CliRunner().invoke(app, ["reset"], input="n\n").exit_code == 1
    assert len(processes_in(directory)) == 1
    assert CliRunner().invoke(app, ["reset", "--yes"]).exit_code == 0
    assert processes_in(directory) == []
    assert not (directory / ServerName.REDIS).exists()


def test_logs_of_a_server_that_never_ran(directory: Path) -> None:
    failed = CliRunner().invoke(app, ["logs", "registry"])
    assert isinstance(failed.exception, ConfigurationError)
    assert str(failed.exception) == "registry has no log yet; start it with: streams dev up"
