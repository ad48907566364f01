"""librdkafka's mock broker, for machines on which no Kafka can be started: the demo's last resort.

It lives in the demo's own process, and keeps no more than five megabytes per partition. It answers what clients
ask for, but no administrator: topics come into being when they are asked after, and have no ids.

Run as ``python -m processors.demo.mock``, this is the command line for processes that work on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Producer

from streams import App, Settings
from streams import topics as planning
from streams.broker import kafka
from streams.cli.main import main

OPTIONS = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}
_SECONDS = 10.0


@contextmanager
def broker() -> Iterator[str]:
    """A broker that lasts as long as the block; its address."""
    owner = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = owner.list_topics(timeout=_SECONDS).brokers.values()
    yield ",".join(f"{each.host}:{each.port}" for each in brokers)
    owner.flush(0)  # the owner must live until here


def make_topics(app: App, settings: Settings) -> None:
    admin = kafka.admin(settings)
    for topic in planning.wanted(app, settings):
        admin.list_topics(topic.name, timeout=_SECONDS)


def _topic_ids(settings: Settings, topics: list[str]) -> dict[str, str]:
    found = kafka.admin(settings).list_topics(timeout=_SECONDS).topics
    return {name: "mock" for name in topics if name in found}


if __name__ == "__main__":
    kafka.topic_ids = _topic_ids
    main()
