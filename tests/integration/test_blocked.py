"""What the broker refuses for good stops its own key, is listed, and is sent again or let go by decision."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from streams import publish
from streams.relay.blocked import ABSENT
from streams.settings import Settings
from streams.topics import Step, Wanted, apply
from tests.integration.relays import arrived, relaying, set_limit
from tests.processes import Process, eventually, start, streams
from tests.running import everything_in, one

pytestmark = pytest.mark.real


@pytest.fixture
def small(settings: Settings) -> str:
    """A topic that takes records of up to 100,000 bytes."""
    name = f"{settings.topic_prefix}small"
    apply([Step(Wanted(name, 1, -1), 0)], settings)
    set_limit(settings, name, 100_000)
    return name


@pytest.fixture
def send(settings: Settings) -> Iterator[Any]:
    """Publishes one message in a transaction of its own."""
    with psycopg.connect(settings.database_url) as connection:

        def message(topic: str, key: str | None, value: bytes) -> None:
            publish(connection, topic, key, value)
            connection.commit()

        yield message


def values(settings: Settings, topic: str) -> list[bytes]:
    return [(record.value or b"")[:6] for record in everything_in(settings, topic)]


def listed(settings: Settings, *more: str) -> list[dict[str, Any]]:
    process = start(streams("relay", "blocked", "--json", *more), settings)
    assert process.wait() == 0, process.output
    return list(json.loads(process.output))


def decide(settings: Settings, *arguments: str) -> str:
    process = start(streams("relay", "blocked", *arguments), settings)
    assert process.wait() == 0, process.output
    return process.output


def waiting(settings: Settings) -> int:
    return int(
        one(settings, "SELECT count(*) FROM fencepost.relay_blocked WHERE decision IS DISTINCT FROM 'let_go'")
    )


@pytest.mark.parametrize("before", [0, 3], ids=["first of its partition", "after others"])
@pytest.mark.parametrize(
    "size", [970_000, 17 * 1024 * 1024], ids=["the broker refuses", "the client refuses"]
)
def test_a_refused_record_stops_its_key_and_no_other(
    settings: Settings, small: str, send: Any, before: int, size: int
) -> None:
    for n in range(before):
        send(small, "k", b"good %d" % n)
    with psycopg.connect(settings.database_url) as raw:  # as a service would that does not use publish()
        raw.execute(
            "INSERT INTO fencepost.outbox (topic, key, payload) VALUES (%s, 'k', %s)",
            (small, b"first " + os.urandom(size)),
        )
    send(small, "k", b"second" + os.urandom(90_000))
    for n in range(5):
        send(small, "other", b"other%d" % n)
    good = [b"good %d" % n for n in range(before)]
    others = [b"other%d" % n for n in range(5)]
    with relaying(settings) as relay:
        eventually(lambda: arrived(settings, small) >= before + 5, "all that is not of that key")
        eventually(lambda: waiting(settings) == 2, "it and the one behind it wait")
        send(small, "k", b"third ")
        eventually(lambda: waiting(settings) == 3, "so does what comes later")
        end = one(settings, "SELECT pg_current_wal_lsn()::text")
        eventually(lambda: relay.progress.confirmed >= end, "the log is not held back")
        assert sorted(values(settings, small)) == sorted([*good, *others])
        (found,) = listed(settings)
        assert (found["topic"], found["key"], found["behind"]) == (small, "k", 2)
        assert "MSG_SIZE_TOO_LARGE" in found["reason"]
        if size < 1_000_000:
            set_limit(settings, small, 10_000_000)
            decide(settings, "resend", str(found["id"]))
            rest = [b"first ", b"second", b"third "]
        else:
            decide(settings, "let-go", str(found["id"]), "--yes")
            rest = [b"second", b"third "]
        eventually(lambda: waiting(settings) == 0, "the lane is sent")
        send(small, "k", b"fourth")
        eventually(lambda: arrived(settings, small) == before + 5 + len(rest) + 1, "and goes on as before")
    of_key = [(record.value or b"")[:6] for record in everything_in(settings, small) if record.key == b"k"]
    assert of_key == [*good, *rest, b"fourth"]
    if size > 1_000_000:
        assert [row["decision"] for row in listed(settings, "--all")] == ["let_go"]


def test_a_record_that_is_refused_again_waits_again(settings: Settings, small: str, send: Any) -> None:
    with psycopg.connect(settings.database_url) as raw:
        for name in (b"first ", b"second"):
            raw.execute(
                "INSERT INTO fencepost.outbox (topic, key, payload) VALUES (%s, 'k', %s)",
                (small, name + os.urandom(200_000)),
            )
    with relaying(settings):
        eventually(lambda: waiting(settings) == 2, "both wait")
        (found,) = listed(settings)
        decide(settings, "resend", str(found["id"]))
        eventually(
            lambda: (
                one(settings, "SELECT decided_at FROM fencepost.relay_blocked ORDER BY id LIMIT 1") is None
            ),
            "refused again",
        )
        assert arrived(settings, small) == 0
        set_limit(settings, small, 1_000_000)
        decide(settings, "resend", "--topic", small)
        eventually(lambda: waiting(settings) == 0, "sent")
    assert values(settings, small) == [b"first ", b"second"]


def test_good_records_of_a_batch_that_is_too_large_as_a_whole_pass_alone(
    settings: Settings, small: str, send: Any
) -> None:
    with relaying(settings):
        send(small, "k", b"0")
        eventually(lambda: arrived(settings, small) == 1, "it is at work")
        with psycopg.connect(settings.database_url) as connection:
            for n in range(1, 41):
                publish(connection, small, "k", b"%d" % n + os.urandom(20_000))
            connection.commit()
        eventually(lambda: arrived(settings, small) == 41, "all arrive", 90)
    assert waiting(settings) == 0
    numbers = [
        int((record.value or b"")[: len(str(n))]) for n, record in enumerate(everything_in(settings, small))
    ]
    assert numbers == list(range(41))


def test_a_topic_that_is_not_there_holds_up_no_other_and_is_sent_when_it_comes(
    settings: Settings, small: str, send: Any
) -> None:
    absent = f"{settings.topic_prefix}absent"
    impatient = settings.model_copy(update={"topic_grace_seconds": 0.5})
    with relaying(impatient):
        for n in range(700):
            send(absent, f"k{n % 3}", b"%d" % n)
        send(small, "k", b"x")
        eventually(lambda: arrived(settings, small) == 1, "the other topic's goes on")
        (found,) = listed(settings)
        assert (found["topic"], found["reason"], found["behind"]) == (absent, ABSENT, 699)
        apply([Step(Wanted(absent, 2, -1), 0)], settings)
        eventually(lambda: waiting(settings) == 0, "what waited is sent without a decision")
        send(absent, "k0", b"700")
        eventually(lambda: arrived(settings, absent) == 701, "and goes on")
    by_key: dict[bytes | None, list[int]] = {}
    for record in everything_in(settings, absent):
        by_key.setdefault(record.key, []).append(int(record.value or b""))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert sorted(n for numbers in by_key.values() for n in numbers) == list(range(701))


def test_a_name_that_can_be_no_topic_waits_by_itself(settings: Settings, small: str, send: Any) -> None:
    impatient = settings.model_copy(update={"topic_grace_seconds": 0.2})
    send("no topic: with spaces", None, b"a")
    send(small, "k", b"x")
    with relaying(impatient):
        eventually(lambda: arrived(settings, small) == 1, "the other goes on")
    assert waiting(settings) == 1


def test_killed_between_refusal_and_decision_nothing_is_lost_or_doubled(
    settings: Settings, small: str, send: Any
) -> None:
    with psycopg.connect(settings.database_url) as raw:
        raw.execute(
            "INSERT INTO fencepost.outbox (topic, key, payload) VALUES (%s, 'k', %s)",
            (small, b"first " + os.urandom(200_000)),
        )
    send(small, "k", b"second")
    send(small, "other", b"other")
    for point in ("relay.acknowledged", "relay.confirmed"):
        killed_or_waiting(settings, start(streams("relay", "run"), settings, kill_at=point))
    with relaying(settings):
        eventually(
            lambda: arrived(settings, small) == 1 and waiting(settings) == 2, "the other arrives, two wait"
        )
        set_limit(settings, small, 1_000_000)
        decide(settings, "resend", "--topic", small)
        eventually(lambda: waiting(settings) == 0, "sent")
    assert values(settings, small) == [b"other", b"first ", b"second"]


def killed_or_waiting(settings: Settings, relay: Process) -> None:
    eventually(lambda: not relay.is_running or waiting(settings) == 2, lambda: relay.output)
    relay.kill()


@pytest.mark.slow
def test_a_storm_of_refusals_is_worked_off_and_everything_else_arrives(
    settings: Settings, small: str, send: Any
) -> None:
    """As when a limit is lowered under a backlog: each is found, none holds another up, and nothing is lost."""
    with psycopg.connect(settings.database_url) as raw:
        raw.execute(
            "INSERT INTO fencepost.outbox (topic, key, payload) "
            "SELECT %s, convert_to('k' || n %% 150, 'UTF8'), int4send(n) || CASE WHEN n %% 3 = 0 AND n < 300 "
            "THEN (SELECT string_agg(decode(md5(random()::text || i), 'hex'), '') FROM generate_series(1, 10000) i) "
            "ELSE '' END FROM generate_series(0, 1499) n ORDER BY n",
            (small,),
        )
    blocked_keys = {n % 150 for n in range(0, 300, 3)}
    free = [n for n in range(1500) if n % 150 not in blocked_keys]
    with relaying(settings):
        eventually(lambda: arrived(settings, small) == len(free), lambda: f"{arrived(settings, small)}", 100)
        eventually(lambda: waiting(settings) == 1500 - len(free), "the rest waits")
        set_limit(settings, small, 10_000_000)
        decide(settings, "resend", "--topic", small)
        eventually(lambda: waiting(settings) == 0, lambda: f"{waiting(settings)} wait", 60)
    by_key: dict[bytes | None, list[int]] = {}
    for record in everything_in(settings, small):
        by_key.setdefault(record.key, []).append(int.from_bytes((record.value or b"")[:4], "big"))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert sorted(n for numbers in by_key.values() for n in numbers) == list(range(1500))
