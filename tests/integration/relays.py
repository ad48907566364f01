"""Relays that run in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]

from streams.broker import kafka
from streams.broker.kafka import end_offsets
from streams.relay.relay import Relay
from streams.settings import Settings


@contextmanager
def running_relay(settings: Settings) -> Iterator[tuple[Relay, list[BaseException]]]:
    """A relay that runs until the block ends, and what it fell with by then."""
    stop, fallen = threading.Event(), []
    relay = Relay(settings, stop)

    def run() -> None:
        try:
            relay.run()
        except BaseException as error:  # noqa: BLE001 - for the test's own thread to look at
            fallen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield relay, fallen
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def relaying(settings: Settings) -> Iterator[Relay]:
    """A relay that runs until the block ends, and must not have fallen by then."""
    with running_relay(settings) as (relay, fallen):
        yield relay
    assert not fallen, fallen


def arrived(settings: Settings, topic: str) -> int:
    return sum(end_offsets(settings, [topic]).values())


def set_limit(settings: Settings, topic: str, size: int) -> None:
    """Sets the largest record that a topic takes, in bytes."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", topic, incremental_configs=[entry])
    admin = kafka.admin(settings)  # held: the futures are fulfilled only as long as their client lives
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)
