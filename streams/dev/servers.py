"""The local servers of a directory: all up, all down, their status, and single ones stopped and started.

Every function takes the dev directory and holds its lock while it changes something, so that commands and tests
may run at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from streams.dev import containers, lifecycle
from streams.dev.kafka import Kafka
from streams.dev.postgres import Postgres
from streams.dev.redis import Redis
from streams.dev.registry import Registry
from streams.dev.server import Attempt, LocalServer
from streams.dev.state import Endpoints, Report, ServerName, configured, locked, read_state, write_json
from streams.errors import ConfigurationError

KINDS: dict[ServerName, type[LocalServer]] = {kind.name: kind for kind in (Kafka, Postgres, Redis, Registry)}


def silent(_message: str) -> None:
    """The report of those who want none."""


def server(directory: Path, name: ServerName) -> LocalServer:
    return KINDS[name](directory)


def up(
    directory: Path,
    *,
    want: Collection[ServerName],
    report: Report = silent,
    use_containers: bool = False,
    new_ports: bool = False,
) -> Endpoints:
    """Starts those wanted servers that are neither configured in the environment nor running; returns all endpoints.

    If one does not come up, or on Ctrl-C, the ones this call started are stopped again.

    Raises:
        ServerUnavailable: a server does not start, or somebody else has its port.
        ConfigurationError: a program is missing.

    """
    local = [name for name in ServerName if name in want and name not in configured()]
    with _lock(directory, report):
        file = containers.usable() if use_containers and not _running(directory) else None
        if file is None and containers.running(directory):
            raise ConfigurationError(
                "these servers run as containers: start the engine and use the folder of their docker-compose.yml, "
                "or first run: streams dev down"
            )
        try:
            if file is not None and local:
                containers.up(directory, file, local, report)
            else:
                _start_missing(directory, local, Attempt(report), new_ports=new_ports)
        finally:
            _publish(directory)
        return Endpoints.of(_endpoints(directory) | configured())


def down(directory: Path, *, report: Report = silent) -> list[ServerName]:
    """Stops every server of the directory; returns which. The data and the ports stay."""
    with _lock(directory, report):
        return _down(directory, report)


def reset(directory: Path, *, report: Report = silent) -> list[ServerName]:
    """Stops every server and deletes all data, ports and logs."""
    with _lock(directory, report):
        containers.down(directory, volumes=True)
        stopped = _down(directory, report)
        for each in _all(directory):
            for folder in {each.home, each.data.parent}:  # not always the same: see Postgres.data
                if folder.exists():
                    shutil.rmtree(folder)
        return stopped


def start(directory: Path, name: ServerName, *, report: Report = silent) -> None:
    """Starts one stopped server on the ports and data it had."""
    with _lock(directory, report):
        _start_missing(directory, [name], Attempt(report))
        _publish(directory)


def stop(directory: Path, name: ServerName, *, kill: bool = False, report: Report = silent) -> None:
    """Stops one server, with ``kill`` as a crash would: by SIGKILL, and leaving its endpoint published."""
    with _lock(directory, report):
        lifecycle.stop(server(directory, name), kill=kill)
        if not kill:
            _publish(directory)


def restart(directory: Path, name: ServerName, *, kill: bool = False, report: Report = silent) -> None:
    """Stops one server and starts it again with its ports and data; its endpoint stays published."""
    with _lock(directory, report):
        lifecycle.stop(server(directory, name), kill=kill)
        _start_missing(directory, [name], Attempt(report))


@contextmanager
def _lock(directory: Path, report: Report) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make {directory} ({error.strerror}); set STREAMS_DEV_DIR"
        ) from error
    with locked(directory / "lock", lambda: report("waiting for another command on these servers")):
        yield


def _all(directory: Path) -> list[LocalServer]:
    return [server(directory, name) for name in ServerName]


def _running(directory: Path) -> list[LocalServer]:
    return [each for each in _all(directory) if lifecycle.is_running(each)]


def _endpoints(directory: Path) -> dict[ServerName, str]:
    processes = {each.name: lifecycle.endpoint(each) for each in _running(directory)}
    return containers.running(directory) | processes


def _publish(directory: Path) -> None:
    """Writes the endpoints to where the settings look for them."""
    found = {name.setting: endpoint for name, endpoint in _endpoints(directory).items()}
    if found:
        write_json(directory / "endpoints.json", found)
    else:
        (directory / "endpoints.json").unlink(missing_ok=True)


def _start_missing(
    directory: Path, names: Sequence[ServerName], attempt: Attempt, *, new_ports: bool = False
) -> None:
    missing = []
    for each in (server(directory, name) for name in names):
        if lifecycle.is_serving(each, attempt):
            attempt.report(f"{each.name}: already running")
        else:
            missing.append(each)
    # Before the threads start: two servers that looked for a port at once could find the same.
    for each in missing:
        lifecycle.clear(each)
        taken = {port for other in _all(directory) for port in read_state(other.home).ports.values()}
        lifecycle.assign_ports(each, taken, new_ports=new_ports)
    _start_together(missing, attempt)


def _start_together(missing: Sequence[LocalServer], attempt: Attempt) -> None:
    if not missing:
        return
    with ThreadPoolExecutor(max_workers=len(missing)) as pool:
        futures = [pool.submit(lifecycle.start, each, attempt) for each in missing]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:  # Ctrl-C too: nothing stays half up
            attempt.call_off()
            wait(futures)
            _stop_together(missing)
            raise


def _stop_together(servers: Sequence[LocalServer]) -> list[ServerName]:
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        found = list(pool.map(lifecycle.stop, servers))
    return [each.name for each, was_there in zip(servers, found, strict=True) if was_there]


def _down(directory: Path, report: Report) -> list[ServerName]:
    (directory / "endpoints.json").unlink(missing_ok=True)  # first, so that nobody new connects
    report("stopping")
    return containers.down(directory) + _stop_together(_all(directory))
