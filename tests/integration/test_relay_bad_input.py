"""Whatever is set up wrongly, the relay says what to change, begins nothing, and shows no password."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from streams import publish
from streams.dev import postgres, servers
from streams.dev.state import Endpoints, ServerName
from streams.errors import ConfigurationError
from streams.settings import Settings
from streams.stores.postgres import connect
from streams.topics import Step, Wanted, apply
from tests.integration.relays import arrived, relaying
from tests.processes import eventually, start, streams
from tests.running import one

pytestmark = pytest.mark.real

RUN, MIGRATE, BEGIN = ("relay", "run"), ("migrate",), ("relay", "begin", "--yes")
SECRET = "s3cr3t"
# All that means something in a URL, between two pieces that must never be shown.
PASSWORD = f"{SECRET}@:/?#[]% &='\"{SECRET}ü"


def refused(settings: Settings, arguments: tuple[str, ...], *expected: str, **extra: str) -> str:
    """The output of a command that a wrong set-up ends, with what to change and without a password."""
    process = start(streams("--verbose", *arguments), settings, **extra)
    status, output = process.wait(60), process.output
    assert status == 2, output
    for text in expected:
        assert text in output
    for secret in ("Traceback", SECRET):
        assert secret not in output
    return output


def of_url(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"database_url": url, "connect_seconds": 3.0})


def place(settings: Settings) -> tuple[int, int]:
    """How many slots there are, and how many cursors."""
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() OR slot_name = %s"
    return one(settings, slots, settings.slot), one(settings, "SELECT count(*) FROM fencepost.relay_cursor")


@pytest.fixture
def server(endpoints: Endpoints) -> Iterator[psycopg.Connection[Any]]:
    assert endpoints.database_url is not None
    with psycopg.connect(endpoints.database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def new(settings: Settings) -> Settings:
    """Settings of a database that no relay has seen yet."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (settings.slot,))
    return settings


@pytest.fixture
def role(new: Settings) -> Iterator[Settings]:
    """A role that may do everything with the tables, and may not replicate; it has to give its password."""
    name = f"role_{uuid.uuid4().hex[:8]}"
    rules = one(new, "SELECT pg_read_file(current_setting('hba_file'))")
    statements = (
        "CREATE ROLE {} LOGIN PASSWORD {}",
        "GRANT CREATE ON DATABASE {database} TO {}",
        "GRANT ALL ON SCHEMA fencepost TO {}",
        "GRANT ALL ON ALL TABLES IN SCHEMA fencepost TO {}",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA fencepost TO {}",
    )
    with psycopg.connect(new.database_url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(
                sql.SQL(statement).format(
                    sql.Identifier(name), PASSWORD, database=sql.Identifier(connection.info.dbname)
                )
            )
    write_rules(new, f"host all {name} 127.0.0.1/32 scram-sha-256\n{rules}")
    yield as_role(new, name, quote(PASSWORD, safe=""))
    write_rules(new, rules)
    with psycopg.connect(new.database_url, autocommit=True) as connection:
        for statement in ("REASSIGN OWNED BY {} TO CURRENT_USER", "DROP OWNED BY {}", "DROP ROLE {}"):
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))


def write_rules(settings: Settings, rules: str) -> None:
    """Says anew who may connect how."""
    loaded = "SELECT pg_conf_load_time()"
    before = one(settings, loaded)
    Path(one(settings, "SELECT current_setting('hba_file')")).write_text(rules)
    one(settings, "SELECT pg_reload_conf()")
    eventually(lambda: one(settings, loaded) != before, "the server has read them")


def as_role(settings: Settings, name: str, password: str) -> Settings:
    return of_url(settings, settings.database_url.replace("postgres@", f"{name}:{password}@"))


def as_superuser(role: Settings) -> str:
    return f"postgresql://postgres@{role.database_url.rpartition('@')[2]}"


WRONG_URLS = {
    "no URL and no DSN": ("nonsense", "cannot be read", "postgresql://user:password@host:port/database"),
    "an unknown option": ("hots=127.0.0.1", "cannot be read", "hots"),
    "a URL of SQLAlchemy": (
        f"postgresql+psycopg://u:{SECRET}@127.0.0.1/x",
        "cannot be read",
        "postgresql://",
    ),
    "a % in the password": (f"postgresql://u:{SECRET}%zz@127.0.0.1/x", "cannot be read", "% as %25"),
    "an @ in the password": (f"postgresql://u:a@{SECRET}@127.0.0.1/x", "cannot be read", "@ as %40"),
    "a / in the password": (f"postgresql://u:{SECRET}/a@127.0.0.1/x", "cannot be read", "/ as %2F"),
    "? and / in the password": (f"postgresql://u:a?{SECRET}/a@127.0.0.1/x", "cannot be read", "/ as %2F"),
    "a space in the password of a DSN": (f"host=127.0.0.1 password=a {SECRET}", "cannot be read", "'...'"),
    "an unknown host": (
        f"postgresql://u:{SECRET}@nowhere.invalid/x",
        "does not let us in",
        "nowhere.invalid",
    ),
}


@pytest.mark.parametrize(
    ("url", "expected"), [(url, rest) for url, *rest in WRONG_URLS.values()], ids=WRONG_URLS
)
def test_a_database_url_that_cannot_be_right_is_named_without_its_password(
    url: str, expected: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        connect(url, seconds=3)
    message = str(raised.value)
    for text in ("STREAMS_DATABASE_URL", *expected):
        assert text in message
    shown: BaseException | None = raised.value
    while shown is not None:  # as a traceback would show them
        assert SECRET not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


@pytest.mark.parametrize(
    ("arguments", "which"),
    [(RUN, "an @ in the password"), (MIGRATE, "a URL of SQLAlchemy"), (RUN, "an unknown host")],
    ids=str,
)
def test_a_command_with_a_wrong_database_url_ends_with_status_2(
    settings: Settings, arguments: tuple[str, ...], which: str
) -> None:
    url, *expected = WRONG_URLS[which]
    refused(of_url(settings, url), arguments, "STREAMS_DATABASE_URL", *expected)


def test_a_stranger_to_the_server_is_told_so(role: Settings) -> None:
    name = role.database_url.partition("://")[2].partition(":")[0]
    wrong = of_url(role, f"postgresql://{name}:{SECRET}wrong@{role.database_url.rpartition('@')[2]}")
    refused(wrong, RUN, "password authentication failed", "check STREAMS_DATABASE_URL", "%XX")
    unknown = of_url(role, f"postgresql://nobody_known@{role.database_url.rpartition('@')[2]}")
    refused(unknown, RUN, 'role "nobody_known" does not exist', "check STREAMS_DATABASE_URL")
    nowhere = of_url(role, f"{role.database_url.rpartition('/')[0]}/nowhere")
    refused(nowhere, RUN, 'database "nowhere" does not exist', "check STREAMS_DATABASE_URL")
    encrypted = of_url(role, f"{role.database_url}?sslmode=require")
    refused(encrypted, RUN, "server does not support SSL", "check STREAMS_DATABASE_URL")
    assert place(role) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "source"), [(RUN, "log"), (RUN, "peek"), (MIGRATE, "log"), (BEGIN, "log")], ids=str
)
def test_a_role_that_may_not_replicate_is_told_the_statement_or_to_poll(
    role: Settings, arguments: tuple[str, ...], source: str
) -> None:
    refused(
        role,
        arguments,
        "run as a superuser: ALTER ROLE <role> REPLICATION",
        "STREAMS_RELAY_SOURCE=poll",
        STREAMS_RELAY_SOURCE=source,
    )
    assert place(role) == (0, 0)


def test_a_first_migration_by_a_role_that_may_not_replicate_makes_no_table(role: Settings) -> None:
    with psycopg.connect(as_superuser(role)) as connection:
        connection.execute("DROP SCHEMA fencepost CASCADE")
    refused(role, MIGRATE, "ALTER ROLE <role> REPLICATION")
    assert one(role, "SELECT to_regnamespace('fencepost')") is None


@pytest.mark.parametrize("arguments", [RUN, MIGRATE, BEGIN], ids=" ".join)
def test_a_role_without_rights_is_told_which_it_lacks(role: Settings, arguments: tuple[str, ...]) -> None:
    with psycopg.connect(as_superuser(role)) as connection:
        name = sql.Identifier(role.database_url.partition("://")[2].partition(":")[0])
        connection.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(name))
        connection.execute(sql.SQL("DROP OWNED BY {}").format(name))
    process = start(streams(*arguments), role)
    assert process.wait() == 1, process.output
    assert "error: the database says: permission denied for" in process.output
    assert "Traceback" not in process.output
    assert SECRET not in process.output
    assert (
        one(
            of_url(role, as_superuser(role)),
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s",
            role.slot,
        )
        == 0
    )


def test_a_role_that_may_not_replicate_polls(role: Settings) -> None:
    plain = f"{role.topic_prefix}plain"
    apply([Step(Wanted(plain, 1, -1), 0)], role)
    polls = role.model_copy(update={"relay_source": "poll"})
    migrated = start(streams("migrate"), role, STREAMS_RELAY_SOURCE="poll")
    assert migrated.wait() == 0, migrated.output
    assert place(role) == (0, 1)
    with relaying(polls), psycopg.connect(role.database_url) as connection:
        publish(connection, plain, "k", b"v")
        connection.commit()
        eventually(lambda: arrived(role, plain) == 1, "it is sent")


PUBLICATIONS = {
    "that is gone": ("DROP PUBLICATION fencepost", "there is no publication fencepost; run: streams migrate"),
    "that lacks a table": (
        "ALTER PUBLICATION fencepost DROP TABLE fencepost.outbox",
        "ALTER PUBLICATION fencepost ADD TABLE fencepost.outbox",
    ),
    "that is empty": (
        "ALTER PUBLICATION fencepost DROP TABLE fencepost.event, fencepost.outbox",
        "ALTER PUBLICATION fencepost ADD TABLE fencepost.event, fencepost.outbox",
    ),
    "that names the days": (
        "ALTER PUBLICATION fencepost SET (publish_via_partition_root = false)",
        "ALTER PUBLICATION fencepost SET (publish = 'insert', publish_via_partition_root = true)",
    ),
    "of no inserts": (
        "ALTER PUBLICATION fencepost SET (publish = 'update')",
        "ALTER PUBLICATION fencepost SET (publish = 'insert', publish_via_partition_root = true)",
    ),
    "of all tables": (
        "DROP PUBLICATION fencepost; CREATE PUBLICATION fencepost FOR ALL TABLES",
        "FOR TABLE fencepost.event, fencepost.outbox",
    ),
}


@pytest.mark.parametrize("which", PUBLICATIONS)
def test_a_publication_that_would_leave_rows_out_is_refused_with_the_statement_to_run(
    new: Settings, which: str
) -> None:
    change, expected = PUBLICATIONS[which]
    with psycopg.connect(new.database_url, autocommit=True) as connection:
        for statement in change.split(";"):
            connection.execute(statement.encode())
    refused(new, RUN, "publication fencepost", expected)
    if which == "that lacks a table":
        refused(new, MIGRATE, "publication fencepost", expected)
        refused(new, BEGIN, "publication fencepost", expected)
    assert place(new) == (0, 0)


SLOTS = {
    "of another plugin": "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')",
    "that is physical": "SELECT pg_create_physical_replication_slot(%s)",
    "of another database": "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')",
}


@pytest.mark.parametrize("which", SLOTS)
def test_a_slot_that_is_not_the_relays_is_refused_and_left_alone(
    new: Settings, server: psycopg.Connection[Any], which: str
) -> None:
    try:
        if which == "of another database":
            server.execute(SLOTS[which].encode(), (new.slot,))
        else:
            with psycopg.connect(new.database_url, autocommit=True) as connection:
                connection.execute(SLOTS[which].encode(), (new.slot,))
    except psycopg.errors.UndefinedFile:
        pytest.skip("this server has no other plugin")
    try:
        for arguments in (RUN, BEGIN):
            refused(
                new,
                arguments,
                f"replication slot {new.slot} is",
                "set STREAMS_SLOT to a name of the relay's own",
            )
        assert place(new) == (1, 0)
    finally:
        server.execute("SELECT pg_drop_replication_slot(%s)", (new.slot,))


SETTINGS = {
    "no way to read": (
        {"STREAMS_RELAY_SOURCE": "pol"},
        "setting relay_source: Input should be 'log', 'peek' or 'poll'",
    ),
    "no name of a slot": ({"STREAMS_SLOT": "My-Slot"}, "STREAMS_SLOT"),
    "options that are no JSON": (
        {"STREAMS_KAFKA_OPTIONS": f"sasl.password={SECRET}"},
        "kafka_options",
    ),
    "options that are no texts": (
        {"STREAMS_KAFKA_OPTIONS": json.dumps({"sasl.password": {"is": SECRET}})},
        "setting kafka_options.sasl.password",
    ),
    "an option that nobody knows": (
        {"STREAMS_KAFKA_OPTIONS": json.dumps({"sasl.pasword": SECRET})},
        'STREAMS_KAFKA_OPTIONS do not make a client: No such configuration property: "sasl.pasword"',
    ),
    "an option of an unknown value": (
        {"STREAMS_KAFKA_OPTIONS": json.dumps({"security.protocol": "tls", "sasl.password": SECRET})},
        'Invalid value "tls" for configuration property "security.protocol"',
    ),
}


@pytest.mark.parametrize("which", SETTINGS)
def test_a_setting_that_cannot_be_right_is_named(new: Settings, which: str) -> None:
    extra, expected = SETTINGS[which]
    refused(new, RUN, expected, **extra)
    assert place(new) == (0, 0)


def test_a_server_that_writes_too_little_into_its_log_is_refused_but_may_be_polled(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(postgres.SETTINGS, "wal_level", "replica")
    try:
        url = servers.up(tmp_path, want=[ServerName.POSTGRES]).database_url
        assert url is not None
        of_it = of_url(settings, url)
        expected = "ALTER SYSTEM SET wal_level = logical", "or set STREAMS_RELAY_SOURCE=poll"
        refused(of_it, MIGRATE, *expected)
        assert one(of_it, "SELECT to_regnamespace('fencepost')") is None
        done = start(streams("migrate"), of_it, STREAMS_RELAY_SOURCE="poll")
        assert done.wait() == 0, done.output
        refused(of_it, BEGIN, *expected)
        assert place(of_it) == (0, 1), "the place to go on from is still there"
        with psycopg.connect(url) as connection:
            connection.execute("DELETE FROM fencepost.relay_cursor")
        refused(of_it, RUN, *expected)
        assert place(of_it) == (0, 0)
    finally:
        servers.reset(tmp_path)
