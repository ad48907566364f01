"""The topics an application needs: planned from its declaration, compared with the broker, made on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streams.app import App
from streams.broker import kafka
from streams.broker.types import KafkaException, NewTopic
from streams.errors import ConfigurationError, ServerUnavailable
from streams.settings import Settings

_HOUR_MS = 3_600_000
_DEAD_LETTER_HOURS = 24 * 30
_RETRY_HOURS = 24 * 7
_RETRY_PARTITIONS = 2
_MAX_BYTES = 16 * 1024 * 1024

Action = Literal["create", "keep", "more partitions", "fewer partitions"]


@dataclass(frozen=True)
class Wanted:
    """A topic as declared. ``retention_ms`` of -1 keeps records for ever."""

    name: str
    partitions: int
    retention_ms: int


@dataclass(frozen=True)
class Step:
    """One topic of a plan. ``partitions_now`` is 0 where it does not exist."""

    topic: Wanted
    partitions_now: int

    @property
    def action(self) -> Action:
        if self.partitions_now == 0:
            return "create"
        if self.partitions_now == self.topic.partitions:
            return "keep"
        return "more partitions" if self.partitions_now < self.topic.partitions else "fewer partitions"


def wanted(app: App, settings: Settings) -> list[Wanted]:
    """Every topic of an application: its events', and each processor's retry and dead-letter topics."""
    topics = {
        topic.name(settings): Wanted(
            topic.name(settings), topic.partitions, _retention(topic.retention_hours)
        )
        for topic in app.topics
    }
    for processor in app.processors.values():
        for name in processor.retry_topics:
            topics[name] = Wanted(name, _RETRY_PARTITIONS, _retention(_RETRY_HOURS))
        dead = processor.dead_letter_topic
        topics[dead] = Wanted(dead, 1, _retention(_DEAD_LETTER_HOURS))
    return list(topics.values())


def plan(app: App, settings: Settings) -> list[Step]:
    """What ``apply`` would do.

    Raises:
        ServerUnavailable: no broker answers.
    """
    kafka.require_broker(settings)
    found = kafka.admin(settings).list_topics(timeout=settings.connect_seconds).topics
    return [
        Step(topic, len(found[topic.name].partitions) if topic.name in found else 0)
        for topic in wanted(app, settings)
    ]


def apply(steps: Sequence[Step], settings: Settings) -> list[Step]:
    """Makes the topics that are missing; answers those it made.

    Partition counts of existing topics are not changed: keys would move to other partitions, and their order with them.

    Raises:
        ConfigurationError: a topic has another number of partitions than declared.
        ServerUnavailable: the broker refuses.
    """
    different = [step for step in steps if step.action in ("more partitions", "fewer partitions")]
    if different:
        names = ", ".join(
            f"{s.topic.name} has {s.partitions_now}, declared {s.topic.partitions}" for s in different
        )
        raise ConfigurationError(
            f"partitions differ: {names}. They are not changed here, since keys would move and lose their order; "
            "declare what is there, or move to a new topic"
        )
    missing = [step for step in steps if step.action == "create"]
    new = [
        NewTopic(
            step.topic.name,
            num_partitions=step.topic.partitions,
            replication_factor=settings.replication_factor,
            config={"retention.ms": str(step.topic.retention_ms), "max.message.bytes": str(_MAX_BYTES)},
        )
        for step in missing
    ]
    # Held in a variable: the futures are fulfilled only as long as their client lives.
    admin = kafka.admin(settings)
    for name, future in (admin.create_topics(new) if new else {}).items():
        try:
            future.result(settings.connect_seconds)
        except TimeoutError as error:
            raise ServerUnavailable(f"topic {name} could not be made: the broker does not answer") from error
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":  # two services that start together
                raise ServerUnavailable(f"topic {name} could not be made: {error.args[0].str()}") from error
    return missing


def _retention(hours: float | None) -> int:
    return -1 if hours is None else int(hours * _HOUR_MS)
