"""Kills the relay again and again while services append: ``python -m tests.chaos.relay_kills [--kills N] [--json]``.

At the end every committed event is looked for in its topic: how many are not there, how many are there twice, and
how many keys have theirs in another order than they were committed in.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psycopg

import schemas
from streams import App, Settings, Topic, append
from streams.broker.kafka import end_offsets
from streams.event import CE_ID, FP_VERSION, Record
from streams.topics import apply, plan
from tests.bench.setting import bench_servers, fresh, prepare
from tests.processes import Process, eventually, start, stop, streams
from tests.running import everything_in, one

WRITERS, KEYS, PARTITIONS = 4, 40, 4
_LONG = 200

APP = App("kills", catalog=schemas.catalog, topics=[Topic("stock", partitions=PARTITIONS)])


@dataclass(frozen=True)
class Figures:
    """``disordered`` counts keys of which any record stands behind one of a later version, repeats apart."""

    kills: int
    events: int
    lost: int
    duplicates: int
    disordered: int

    @property
    def is_clean(self) -> bool:
        return (self.lost, self.duplicates, self.disordered) == (0, 0, 0)


def relay_kills(settings: Settings, kills: int) -> Figures:
    """Appends from several threads, kills the relay at random moments, and audits what is in the topic."""
    apply(plan(APP, settings), settings)
    with appending(settings):
        for _ in range(kills):
            _kill_at_some_moment(settings)
    end = one(settings, "SELECT pg_current_wal_lsn()::text")
    relay = start(streams("relay", "run"), settings)
    try:
        eventually(lambda: _confirms(settings, end), relay_output(relay), 120)
    finally:
        stop(relay)
    return audit(settings, kills)


@contextmanager
def appending(settings: Settings) -> Iterator[None]:
    """Writers at work until the block ends; none of them may have fallen."""
    done, fallen = threading.Event(), []

    def run(number: int) -> None:
        try:
            _write(settings, random.Random(number), done)
        except BaseException as error:  # noqa: BLE001 - shown below, in the caller's own thread
            fallen.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
        assert not fallen, fallen


def _write(settings: Settings, chance: random.Random, done: threading.Event) -> None:
    """Short transactions, now and then a long one, some rolled back; keys are shared between the writers."""
    with psycopg.connect(settings.database_url) as connection:
        while not done.is_set():
            # Each transaction takes its keys in one order, so that writers wait for each other and never deadlock.
            size = _LONG if chance.random() < 0.02 else chance.randint(1, 5)
            for key in sorted(chance.choices(range(KEYS), k=size)):
                append(connection, "stock", f"s{key}", [schemas.StockReceived(1)], None)
            if chance.random() < 0.1:
                connection.rollback()
            connection.commit()
            time.sleep(chance.random() * 0.01)


def _kill_at_some_moment(settings: Settings) -> None:
    relay = start(streams("relay", "run"), settings)
    before = _arrived(settings)
    # At any moment from the first record on; rarely before it.
    if random.random() < 0.9:
        eventually(lambda: _arrived(settings) > before or not relay.is_running, relay_output(relay), 60)
    time.sleep(random.random())
    assert relay.is_running, relay.output
    relay.signal(signal.SIGKILL)
    relay.wait()


def relay_output(relay: Process) -> Any:
    return lambda: f"the relay sends nothing:\n{relay.output}"


def _arrived(settings: Settings) -> int:
    return sum(end_offsets(settings, [f"{settings.topic_prefix}stock"]).values())


def _confirms(settings: Settings, position: str) -> bool:
    reached = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    return bool(one(settings, reached, position, settings.slot))


def audit(settings: Settings, kills: int) -> Figures:
    """Compares the store with the topic."""
    with psycopg.connect(settings.database_url) as connection:
        rows = connection.execute("SELECT id, resource_id, version FROM fencepost.event").fetchall()
    stored = {str(id).encode(): (key.encode(), version) for id, key, version in rows}
    records = everything_in(settings, f"{settings.topic_prefix}stock")
    found = Counter(record.header(CE_ID) or b"" for record in records)
    unknown = found.keys() - stored.keys()
    assert not unknown, f"not in the store, or rolled back: {sorted(unknown)[:3]}"
    return Figures(
        kills,
        events=len(stored),
        lost=len(stored.keys() - found.keys()),
        duplicates=sum(times - 1 for times in found.values()),
        disordered=_disordered(records),
    )


def _disordered(records: list[Record]) -> int:
    """Keys whose first occurrences do not stand in the order of their versions."""
    versions: dict[bytes, dict[int, None]] = defaultdict(dict)
    for record in records:
        versions[record.key or b""].setdefault(int(record.header(FP_VERSION) or b"0"))
    return sum(any(a > b for a, b in pairwise(order)) for order in versions.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.relay_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how often (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    with bench_servers() as servers, fresh(servers) as settings:
        prepare(settings, APP)
        figures = relay_kills(settings, arguments.kills)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(figures)) + "\n")
    else:
        for name, figure in asdict(figures).items():
            sys.stdout.write(f"{name:12} {figure:>12,}\n")
    raise SystemExit(0 if figures.is_clean else 1)


if __name__ == "__main__":
    main()
