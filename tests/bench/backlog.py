"""A backlog of committed events: what a relay finds when it is started."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from streams.settings import Settings

PUBLICATION = "bench_event"
RESOURCES = 1_000

# Values repeat after a thousand, which is further apart than lz4 looks back; unlogged, so that no slot sees them made.
_VALUES = "CREATE UNLOGGED TABLE bench_value (n int PRIMARY KEY, value bytea)"
# A loop in the server commits as often as services would, and sooner.
_WRITER = """
CREATE PROCEDURE bench_write(events int, per_transaction int) LANGUAGE plpgsql AS $$
BEGIN
    FOR start IN 0 .. events - 1 BY per_transaction LOOP
        INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload)
        SELECT 'order', 'o' || v.n, e.n / 1000 + 1, gen_random_uuid(), 'OrderPlaced', v.value
        FROM generate_series(start, least(start + per_transaction, events) - 1) e (n)
        JOIN bench_value v ON v.n = e.n % 1000
        ORDER BY e.n;
        COMMIT;
    END LOOP;
END $$"""


@dataclass(frozen=True)
class Shape:
    """What a backlog looks like. The defaults are a service's: a few events of an order in each transaction."""

    rows_per_transaction: int = 5
    value_bytes: int = 300
    partitions: int = 6


def make_slots(settings: Settings, names: Sequence[str]) -> None:
    """A publication of the event store alone, and slots of those who read it: they see what is committed from now on."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(
            f"CREATE PUBLICATION {PUBLICATION} FOR TABLE fencepost.event WITH (publish = 'insert')"
        )
        for name in names:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))


def write(settings: Settings, events: int, shape: Shape) -> None:
    """Commits the events, and leaves the server without work of its own."""
    values = random.Random(1)
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(_VALUES)
        with connection.cursor().copy("COPY bench_value FROM STDIN (FORMAT binary)") as copy:
            copy.set_types(["int4", "bytea"])
            for n in range(RESOURCES):
                copy.write_row((n, values.randbytes(shape.value_bytes)))
        connection.execute(_WRITER)
        connection.execute("SET synchronous_commit = off")
        connection.execute("CALL bench_write(%s, %s)", (events, shape.rows_per_transaction))
        connection.execute("VACUUM ANALYZE fencepost.event")
        connection.execute("CHECKPOINT")
