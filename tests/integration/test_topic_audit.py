"""Every kind of difference between the store and a topic is told apart, in bounded memory, and what is missing comes back."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
import typer

import schemas
from streams.broker import kafka
from streams.broker.partitioner import partition_of
from streams.broker.types import NewTopic, TopicPartition
from streams.cli.audit import since_of
from streams.errors import Busy, ServerUnavailable
from streams.event import FP_POSITION, FP_VERSION, Headers, Record
from streams.observe import repair
from streams.observe.repair import Gaps
from streams.observe.topic_audit import TopicAudit, TopicAuditor, topic
from streams.relay import switch
from streams.schema.catalog import encode
from streams.settings import Settings
from streams.stores.postgres import Connection, connect
from tests.integration.relays import relaying
from tests.processes import Process, eventually, start, streams
from tests.running import everything_in, one, produce

pytestmark = pytest.mark.real

STORE = """
INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload, traceparent, recorded_at)
VALUES ('stock', %s, %s, gen_random_uuid(), 'StockReceived', %s, %s, %s)"""
PAYLOAD = encode(schemas.StockReceived(1))
PARTITIONS = 3


@pytest.fixture
def connection(settings: Settings) -> Iterator[Connection]:
    with connect(settings.database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def stock(settings: Settings) -> str:
    """The topic, made and empty."""
    name = f"{settings.topic_prefix}stock"
    admin = kafka.admin(settings)
    admin.create_topics([NewTopic(name, num_partitions=PARTITIONS)])[name].result(10)
    return name


def store(connection: Connection, resource: str, versions: Iterable[int], at: datetime | None = None) -> None:
    now = datetime.now(UTC)
    for version in versions:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" if version == 2 else None
        connection.execute(STORE, (resource, version, PAYLOAD, trace, at or now))


def lose(connection: Connection, settings: Settings) -> None:
    """What is stored until now, the relay will not send."""
    connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", (settings.slot,))


def relayed(version: int | bytes, position: bytes | None = None) -> Headers:
    number = version if isinstance(version, bytes) else b"%d" % version
    return ((FP_VERSION, number), *(() if position is None else ((FP_POSITION, position),)))


def put(settings: Settings, topic: str, resource: str | None, *versions: int | bytes) -> None:
    key = None if resource is None else resource.encode()
    produce(settings, topic, [(key, b"", relayed(version)) for version in versions])


def auditing(settings: Settings, *arguments: str) -> Process:
    """The command, as a process of its own."""
    return start(streams("relay", "audit", *arguments), settings)


def rows(process: Process) -> dict[str, object]:
    (row,) = json.loads(process.output)
    assert isinstance(row, dict)
    return row


def judged(found: TopicAudit) -> dict[str, int]:
    """What is not as it should be."""
    names = ("missing", "expired", "repeated", "out_of_order", "republished", "blocked", "unknown")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


@pytest.fixture
def damaged(connection: Connection, settings: Settings, stock: str) -> str:
    """A topic with every kind of damage, and resources that have none."""
    for resource in ("whole", "hole", "begun", "ended", "absent", "twice", "disordered"):
        store(connection, resource, range(1, 7))
    lose(connection, settings)
    put(settings, stock, "whole", 1, 2, 3, 4, 5, 6)
    put(settings, stock, "hole", 1, 2, 5, 6)
    put(settings, stock, "begun", 1, 2, 3)
    put(settings, stock, "ended", 4, 5, 6)
    put(settings, stock, "twice", 1, 2, 3, 2, 3, 4, 4, 5, 6)
    put(settings, stock, "disordered", 1, 3, 2, 6, 4, 5)
    put(settings, stock, "whole", 7, 0, b"-1", b"one", b"9" * 30)
    put(settings, stock, "stranger", 1)
    put(settings, stock, None, 1)
    produce(settings, stock, [(b"\xff", b"", relayed(1)), (b"a\x00b", b"", relayed(1)), (b"whole", None, ())])
    return stock


DAMAGE = {"missing": 2 + 3 + 3 + 6, "repeated": 3, "out_of_order": 3, "unknown": 10}


@pytest.mark.parametrize("limit", [1_000, 2])
def test_each_kind_of_damage_is_told_apart_in_one_pass_and_in_several(
    connection: Connection, settings: Settings, damaged: str, limit: int
) -> None:
    with Gaps() as gaps:
        found = TopicAuditor(connection, settings, limit=limit).audit("stock", gaps)
        missing = {(gap.resource_id, gap.first, gap.last) for gap in gaps}
        assert gaps.events == found.missing
    assert missing == {("hole", 3, 4), ("begun", 4, 6), ("ended", 1, 3), ("absent", 1, 6)}
    assert judged(found) == DAMAGE
    assert (found.stored, found.relayed) == (42, 28)
    assert set(found.examples) == {(key, v) for key, first, last in missing for v in range(first, last + 1)}
    assert not found.is_clean
    records = sum(kafka.end_offsets(settings, [damaged]).values())
    assert (found.passes > 3) is (limit == 2)
    assert found.records == records * found.passes


def test_what_is_whole_is_clean(connection: Connection, settings: Settings, stock: str) -> None:
    store(connection, "a", [1, 2])
    put(settings, stock, "a", 1, 2)
    found = topic(connection, settings, "stock")
    assert judged(found) == {}
    assert found.is_clean


def test_a_topic_that_is_not_there_is_named(connection: Connection, settings: Settings) -> None:
    with pytest.raises(ServerUnavailable, match=r"stock is not there; run: streams topics apply"):
        topic(connection, settings, "stock")


def test_events_that_come_in_meanwhile_are_neither_missing_nor_unknown(
    connection: Connection, settings: Settings, stock: str
) -> None:
    store(connection, "a", [1])
    put(settings, stock, "a", 1)

    def meanwhile(_what: str, _done: int, _total: int | None) -> None:
        if one(settings, "SELECT count(*) FROM fencepost.event") == 1:
            with connect(settings.database_url, autocommit=True) as service:
                store(service, "a", [2, 3])
                store(service, "b", [1])
            put(settings, stock, "a", 2)
            put(settings, stock, "b", 1)

    found = TopicAuditor(connection, settings, progress=meanwhile).audit("stock")
    assert (found.stored, found.records, judged(found)) == (1, 3, {})


def test_events_on_their_way_are_waited_for(connection: Connection, settings: Settings, stock: str) -> None:
    store(connection, "a", range(1, 101))
    found = TopicAuditor(connection, settings, wait_seconds=0.1).audit("stock")
    assert (found.settled, found.missing) == (False, 100)
    starts = threading.Event()

    def begin_when_waited_for(what: str, _done: int, _total: int | None) -> None:
        if what.startswith("waiting"):
            starts.set()

    results = []
    auditor = TopicAuditor(connection, settings, wait_seconds=30, progress=begin_when_waited_for)
    audit = threading.Thread(target=lambda: results.append(auditor.audit("stock")))
    audit.start()
    assert starts.wait(10)
    with relaying(settings):
        audit.join(40)
    (found,) = results
    assert (found.settled, judged(found)) == (True, {})


def test_a_relay_that_does_not_come_is_waited_for_once(
    connection: Connection, settings: Settings, stock: str
) -> None:
    waited = []
    auditor = TopicAuditor(
        connection, settings, wait_seconds=0.3, progress=lambda what, *_: waited.append(what)
    )
    assert not auditor.audit("stock").settled
    before = waited.count("waiting for the relay")
    assert before > 1
    assert not auditor.audit("stock").settled
    assert waited.count("waiting for the relay") == before


def test_a_slot_that_is_not_there_confirms_nothing(
    connection: Connection, settings: Settings, stock: str
) -> None:
    elsewhere = settings.model_copy(update={"slot": "nobody"})
    told: list[str] = []
    auditor = TopicAuditor(
        connection, elsewhere, wait_seconds=30, progress=lambda what, *_: told.append(what)
    )
    assert not auditor.audit("stock").settled
    assert "waiting for the relay" not in told


def keys_of(partition: int) -> Iterator[str]:
    """Keys that belong to a partition."""
    return (key for n in range(1_000) if partition_of((key := f"sku-{n}").encode(), PARTITIONS) == partition)


def cut(settings: Settings, topic: str, partition: int, offset: int) -> None:
    """Deletes the records before an offset, as retention would."""
    before = TopicPartition(topic, partition, offset)
    admin = kafka.admin(settings)  # held: the future is fulfilled only as long as its client lives
    admin.delete_records([before])[before].result(10)


def test_what_retention_deleted_is_expired_and_what_was_lost_is_missing(
    connection: Connection, settings: Settings, stock: str
) -> None:
    now = datetime.now(UTC)
    keys = keys_of(0)
    old, halved, lost, young = next(keys), next(keys), next(keys), next(keys)
    elsewhere, nowhere = islice(keys_of(1), 2)
    before, after = now - timedelta(hours=1), now + timedelta(hours=1)
    store(connection, old, [1, 2], before)  # all of it deleted
    store(connection, halved, [1, 2, 3], before)  # 1 deleted, 2 there, 3 lost
    store(connection, lost, [1], after)  # later than what remains
    store(connection, young, [1, 2], before)  # 1 deleted
    store(connection, young, [3], after)  # 3 lost
    store(connection, elsewhere, [1, 2], before)  # 2 lost, in a partition where nothing was deleted
    store(connection, nowhere, [1], before)  # lost, in that partition too
    put(settings, stock, old, 1, 2)
    put(settings, stock, halved, 1)
    put(settings, stock, young, 1)
    put(settings, stock, halved, 2)
    put(settings, stock, young, 2)
    put(settings, stock, elsewhere, 1)
    assert judged(topic(connection, settings, "stock")) == {"missing": 5}
    cut(settings, stock, 0, 4)
    found = topic(connection, settings, "stock")
    assert judged(found) == {"expired": 4, "missing": 5}
    assert set(found.examples) == {(halved, 3), (lost, 1), (young, 3), (elsewhere, 2), (nowhere, 1)}

    since = TopicAuditor(connection, settings, since=before - timedelta(minutes=1)).audit("stock")
    assert judged(since) == {"missing": 9}, "who says since when, says that it must be there"


def test_a_partition_that_retention_emptied_has_lost_nothing_for_certain(
    connection: Connection, settings: Settings, stock: str
) -> None:
    key = next(keys_of(0))
    store(connection, key, [1, 2])
    put(settings, stock, key, 1, 2)
    cut(settings, stock, 0, 2)
    assert judged(topic(connection, settings, "stock")) == {"expired": 2}


def test_since_leaves_out_what_was_recorded_before(
    connection: Connection, settings: Settings, stock: str
) -> None:
    now = datetime.now(UTC)
    long_ago = now - timedelta(days=2)
    store(connection, "both", [1, 2], long_ago)
    store(connection, "both", [3, 4, 5], now)
    store(connection, "old", [1], long_ago)
    store(connection, "new", [1], now)
    producer = kafka.producer(settings)
    for key, version, at in (("both", 2, long_ago), ("old", 1, long_ago), ("both", 3, now), ("both", 5, now)):
        producer.produce(
            stock, b"", key, headers=list(relayed(version)), timestamp=int(at.timestamp() * 1_000)
        )
        assert producer.flush(10) == 0
    put(settings, stock, "old", 1)  # sent again, but of before
    assert judged(topic(connection, settings, "stock")) == {"missing": 3, "repeated": 1}
    found = TopicAuditor(connection, settings, since=now - timedelta(hours=1)).audit("stock")
    assert (found.stored, found.relayed, judged(found)) == (4, 2, {"missing": 2})
    assert set(found.examples) == {("both", 4), ("new", 1)}
    assert found.records < sum(kafka.end_offsets(settings, [stock]).values()), (
        "the topic is not read from its beginning"
    )
    nothing = TopicAuditor(connection, settings, since=now + timedelta(hours=1)).audit("stock")
    assert (nothing.stored, nothing.records) == (0, 0)


def test_what_is_missing_is_sent_again_once_and_in_order(
    connection: Connection, settings: Settings, damaged: str
) -> None:
    with relaying(settings):
        first = auditing(settings, "stock", "--repair", "--yes", "--json")
        first.wait(60)
        found = rows(first)
        assert (found["missing"], found["republished"], found["settled"]) == (0, 5, True), first.output
        assert found["out_of_order"] == DAMAGE["out_of_order"], "what was in disorder before stays it"
        sent = one(settings, "SELECT count(*) FROM fencepost.outbox")
        assert sent == DAMAGE["missing"]
        second = auditing(settings, "stock", "--repair", "--yes", "--json")
        second.wait(60)
        assert rows(second) == found
    assert one(settings, "SELECT count(*) FROM fencepost.outbox") == sent
    again = [record for record in everything_in(settings, damaged) if record.header(FP_POSITION)]
    assert len(again) == sent
    for key, versions in (("absent", [1, 2, 3, 4, 5, 6]), ("hole", [3, 4]), ("ended", [1, 2, 3])):
        assert [version_of(record) for record in again if record.key == key.encode()] == versions


def version_of(record: Record) -> int:
    return int(record.header(FP_VERSION) or 0)


def test_a_repair_that_mends_everything_succeeds(
    connection: Connection, settings: Settings, stock: str
) -> None:
    store(connection, "a", range(1, 2_501))
    lose(connection, settings)
    put(settings, stock, "a", 1, 1_200)
    with relaying(settings):
        process = auditing(settings, "--repair", "--yes", "--json", "stock")
        assert process.wait(60) == 0, process.output
    assert judged(topic(connection, settings, "stock")) == {"republished": 1_198}
    first_seen = list(dict.fromkeys(version_of(record) for record in everything_in(settings, stock)))
    assert first_seen == [1, 1_200, *range(2, 1_200), *range(1_201, 2_501)]


def test_a_record_that_is_sent_again_is_the_relays_own(
    connection: Connection, settings: Settings, stock: str
) -> None:
    with relaying(settings):
        store(connection, "a", [1, 2])
        store(connection, "größe", [1], datetime(2024, 2, 29, 23, 59, 59, 7, UTC))
        eventually(lambda: len(everything_in(settings, stock)) == 3, "they are sent")
        originals = everything_in(settings, stock)
        for partition in range(PARTITIONS):
            cut(settings, stock, partition, -1)
        assert judged(topic(connection, settings, "stock")) == {"expired": 3}
        nothing = auditing(settings, "stock", "--repair", "--yes", "--json")
        assert nothing.wait(60) == 0, nothing.output
        assert one(settings, "SELECT count(*) FROM fencepost.outbox") == 0, "retention's work is left alone"
        process = auditing(
            settings, "stock", "--since", "2024-01-01T00:00:00Z", "--repair", "--yes", "--json"
        )
        assert process.wait(60) == 0, process.output

    def content(record: Record) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        return record.key, record.value, sorted(h for h in record.headers if h[0] != FP_POSITION)

    again = everything_in(settings, stock)
    assert sorted(map(content, again)) == sorted(map(content, originals))
    assert all(record.header(FP_POSITION) for record in again)


def test_a_repair_is_refused_while_events_may_be_on_their_way(
    connection: Connection, settings: Settings, stock: str
) -> None:
    store(connection, "a", [1])
    refused = auditing(settings, "stock", "--repair", "--yes", "--wait", "0.2")
    assert refused.wait() == 1
    assert "Start it first (streams relay run)" in refused.output
    assert one(settings, "SELECT count(*) FROM fencepost.outbox") == 0
    plain = auditing(settings, "stock", "--wait", "0.2")
    assert plain.wait() == 1
    assert "did not confirm within 0.2 s: events may still be on their way" in plain.output
    assert f"missing in {stock}: a version 1" in plain.output


def test_a_relay_that_polls_is_waited_for_too(connection: Connection, settings: Settings, stock: str) -> None:
    store(connection, "a", [1, 2])
    lose(connection, settings)
    switch.to_polling(settings, "for the test")
    polling = settings.model_copy(update={"relay_source": "poll"})
    with relaying(polling):
        repaired = auditing(settings, "stock", "--repair", "--yes", "--json")
        assert repaired.wait(60) == 0, repaired.output
    assert (rows(repaired)["settled"], rows(repaired)["missing"]) == (True, 0)
    assert [record.header(FP_VERSION) for record in everything_in(settings, stock)] == [b"1", b"2"]


def test_what_was_set_aside_is_blocked_and_not_sent_again(
    connection: Connection, settings: Settings, stock: str
) -> None:
    store(connection, "a", range(1, 8))
    lose(connection, settings)
    put(settings, stock, "a", 1)
    for version in (3, 4, 6):
        connection.execute(
            "INSERT INTO fencepost.relay_blocked (slot, identity, topic, key, header_names, header_values, lane, reason) "
            "VALUES (%s, %s, %s, 'a', '{fp_version}', ARRAY[%s]::bytea[], 'key', 'too large')",
            (settings.slot, b"%d" % version, stock, b"%d" % version),
        )
    found = topic(connection, settings, "stock")
    assert judged(found) == {"missing": 3, "blocked": 3}
    assert found.examples == (("a", 2), ("a", 5), ("a", 7))


def test_a_repair_asks_first(connection: Connection, settings: Settings, stock: str) -> None:
    process = auditing(settings, "stock", "--repair")
    assert process.wait() == 2
    assert "add --yes" in process.output


def test_two_repairs_do_not_run_at_once(settings: Settings) -> None:
    with (
        connect(settings.database_url, autocommit=True) as first,
        connect(settings.database_url, autocommit=True) as other,
    ):
        repair.claim(first)
        with pytest.raises(Busy, match="another repair is running"):
            repair.claim(other)
        first.close()
        eventually(lambda: claims(other), "it is free when the other has ended")


def claims(connection: Connection) -> bool:
    try:
        repair.claim(connection)
    except Busy:
        return False
    return True


@pytest.mark.slow
def test_many_events_take_little_memory(connection: Connection, settings: Settings, stock: str) -> None:
    resources, versions = 20_000, 2
    connection.execute(
        "INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload) "
        "SELECT 'stock', 'resource-' || lpad(r::text, 11, '0'), v, gen_random_uuid(), 'StockReceived', '' "
        "FROM generate_series(1, %s) r, generate_series(1, %s) v",
        (resources, versions),
    )
    producer = kafka.producer(settings, {"queue.buffering.max.messages": 1_000_000})
    for version in range(1, versions + 1):
        for number in range(1, resources + 1):
            producer.produce(stock, b"", f"resource-{number:011}", headers=list(relayed(version)))
    assert producer.flush(60) == 0

    def peak(limit: int) -> int:
        tracemalloc.start()
        try:
            found = TopicAuditor(connection, settings, limit=limit).audit("stock")
            assert judged(found) == {}
            assert (found.stored, found.relayed) == (resources * versions, resources * versions)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    whole, parts = peak(resources), peak(resources // 3)
    assert whole / resources < 300
    assert parts < whole * 0.7, "while a share is split there is one and a half of it"


@pytest.mark.parametrize(
    ("text", "wanted"), [("90s", 90), ("30m", 1_800), ("2h", 7_200), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_a_time_ago_is_counted_from_now(text: str, wanted: float) -> None:
    before = datetime.now(UTC)
    assert before <= since_of(text) + timedelta(seconds=wanted) <= datetime.now(UTC)


def test_a_time_is_iso_8601_and_local_where_it_names_no_zone() -> None:
    assert since_of("2025-01-31T12:00:00+01:00") == datetime(2025, 1, 31, 11, tzinfo=UTC)
    assert since_of("2025-01-31T11:00:00Z") == datetime(2025, 1, 31, 11, tzinfo=UTC)
    assert since_of("2025-01-31") == datetime(2025, 1, 31).astimezone()


@pytest.mark.parametrize("text", ["yesterday", "2", "h", "99999999999d", "2025-13-01", ""])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no time"):
        since_of(text)
