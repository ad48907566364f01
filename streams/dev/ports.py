"""Free ports, and who holds one that is not."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Collection

import psutil

from streams.errors import ServerUnavailable

# Below the range from which Linux and macOS take the local ports of outgoing connections. A port from inside
# that range can be taken by any client while the server is down, even by a client that connects to this very
# port and so meets itself; the server could then not come back to it.
FIRST, LAST = 20_000, 29_999
ATTEMPTS = 200
POLL_SECONDS = 0.05


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: a connection in TIME_WAIT is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def becomes_free(port: int, seconds: float) -> bool:
    """Whether the port is free now or within the given time."""
    deadline = time.monotonic() + seconds
    while not is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def choose(taken: Collection[int]) -> int:
    """A free port that is not in ``taken``, the ports promised to servers which do not listen yet."""
    for _ in range(ATTEMPTS):
        port = random.randint(FIRST, LAST)  # noqa: S311 - nothing depends on its being hard to guess
        if port not in taken and is_free(port):
            return port
    raise ServerUnavailable(f"no free port on 127.0.0.1 between {FIRST} and {LAST}")


def holder(port: int) -> str:
    """Who listens on the port, in words."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # macOS tells only root
        return "another process"
    pids = {found.pid for found in connections if found.laddr and found.laddr.port == port and found.pid}
    return ", ".join(sorted(_describe(pid) for pid in pids)) or "another account's process"


def _describe(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"
