"""Kafka clients with the options that fencepost's promises rest on."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streams.errors import ConfigurationError, ServerUnavailable
from streams.event import Record
from streams.settings import Settings

logger = logging.getLogger(__name__)

Place = tuple[str, int]
Client = TypeVar("Client")

_LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]

# librdkafka's own lines. What matters of them comes through error_cb too, so they are for those who ask for them.
_CLIENT_LOG = logging.getLogger("streams.broker.librdkafka")
_CLIENT_LOG.setLevel(logging.CRITICAL)


def producer(settings: Settings, overrides: Mapping[str, Any] | None = None) -> Producer:
    """An idempotent producer that never gives a record up by itself."""
    return _made(
        Producer,
        {
            **_common(settings),
            "enable.idempotence": True,
            # The default sends on behind a record that was refused for good: disorder.
            "enable.gapless.guarantee": True,
            "acks": "all",
            # The default hashes keys by CRC32, where every Java client uses murmur2: one key, two partitions.
            "partitioner": "murmur2_random",
            # The default drops a record after five minutes and goes on with the next: loss and disorder.
            "message.timeout.ms": 0,
            "message.max.bytes": 16 * 1024 * 1024,
            "compression.type": "lz4",
            "linger.ms": 2,
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 64 * 1024,
            **(overrides or {}),
        },
    )


def consumer(settings: Settings, group: str, overrides: Mapping[str, Any] | None = None) -> Consumer:
    """A consumer whose offsets move only when told to."""
    options: dict[str, Any] = {
        **_common(settings),
        "group.id": group,
        "group.protocol": settings.group_protocol,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # Where a partition has no fence yet it is sought explicitly; an offset out of range must not pass unseen.
        "auto.offset.reset": "error",
        "enable.partition.eof": False,
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 100,
        # Enough to fill the next batch while the last one is in the database, and no more per partition than that.
        "queued.min.messages": 10_000,
        "queued.max.messages.kbytes": 65_536,
    }
    if settings.group_protocol == "classic":
        options["partition.assignment.strategy"] = "cooperative-sticky"
    return _made(Consumer, {**options, **(overrides or {})})


def reader(settings: Settings, overrides: Mapping[str, Any] | None = None) -> Consumer:
    """A consumer outside any group, for reading what is there."""
    group = f"fencepost-reader-{uuid.uuid4()}"
    options = {
        "group.protocol": "classic",
        "partition.assignment.strategy": "range",
        "auto.offset.reset": "earliest",
    }
    classic = settings.model_copy(update={"group_protocol": "classic"})
    return consumer(classic, group, {**options, **(overrides or {})})


def admin(settings: Settings) -> AdminClient:
    return _made(AdminClient, _common(settings))


def require_broker(settings: Settings) -> None:
    """Raises ServerUnavailable where no broker answers within ``connect_seconds``."""
    try:
        admin(settings).list_topics(timeout=settings.connect_seconds)
    except KafkaException as error:
        raise ServerUnavailable(
            f"Kafka does not answer at {settings.kafka} ({error.args[0].str()}); "
            "check STREAMS_KAFKA, or start local servers with: streams dev up"
        ) from error


def partitions(settings: Settings, seconds: float = 3.0) -> dict[str, int]:
    """How many partitions each topic has; nothing where no broker answers in time."""
    try:
        found = admin(settings).list_topics(timeout=seconds).topics
    except KafkaException:
        return {}
    return {name: len(topic.partitions) for name, topic in found.items()}


def topic_ids(settings: Settings, topics: list[str]) -> dict[str, str]:
    """The id of each topic that exists: a topic made anew under an old name has another.

    Raises:
        ServerUnavailable: the broker does not answer, or not this question.
    """
    from confluent_kafka import TopicCollection  # noqa: PLC0415 - the name is only used here

    found: dict[str, str] = {}
    client = admin(settings)  # held: the futures are fulfilled only as long as their client lives
    for name, future in client.describe_topics(TopicCollection(topics)).items():
        try:
            found[name] = str(future.result(settings.connect_seconds).topic_id)
        except KafkaException as error:
            if (
                error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART
            ):  # an absent topic is answered by its absence
                raise ServerUnavailable(
                    f"Kafka at {settings.kafka}: topic {name}: {error.args[0].str()}"
                ) from error
        except TimeoutError as error:
            raise ServerUnavailable(f"Kafka at {settings.kafka} does not describe topic {name}") from error
    return found


def record_of(message: Any) -> Record:
    """A consumed message byte for byte.

    ``Message`` is falsy for a tombstone, so nothing here asks for its truth.
    """
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
        message.timestamp()[1],
    )


def end_offsets(settings: Settings, topics: Sequence[str]) -> dict[Place, int]:
    """The offset after the last record of each partition of those topics that exist.

    Raises:
        ServerUnavailable: no broker answers within ``connect_seconds``.
    """
    return _offsets(settings, topics, _LATEST)


def begin_offsets(settings: Settings, topics: Sequence[str]) -> dict[Place, int]:
    """The offset of the oldest record of each partition of those topics that exist.

    Raises:
        ServerUnavailable: no broker answers within ``connect_seconds``.
    """
    return _offsets(settings, topics, _EARLIEST)


def offsets_since(settings: Settings, topics: Sequence[str], since: datetime) -> dict[Place, int]:
    """The offset of the first record of each partition that is as late as this; its end where there is none.

    Raises:
        ServerUnavailable: no broker answers within ``connect_seconds``.
    """
    ends = end_offsets(settings, topics)
    found = _offsets(settings, topics, OffsetSpec.for_timestamp(int(since.timestamp() * 1000)))
    return {place: found[place] if found.get(place, -1) >= 0 else end for place, end in ends.items()}


def _offsets(settings: Settings, topics: Sequence[str], which: Any) -> dict[Place, int]:
    client = admin(settings)
    deadline = time.monotonic() + settings.connect_seconds
    while True:
        try:
            return _ask_offsets(client, topics, which, settings.connect_seconds)
        except KafkaException as error:
            # A topic that was made a moment ago has no leader yet, one of a broker that is just back has an old epoch.
            if time.monotonic() > deadline:
                raise ServerUnavailable(
                    f"Kafka does not answer at {settings.kafka}: {error.args[0].str()}"
                ) from error
            time.sleep(0.05)


def _ask_offsets(client: AdminClient, topics: Sequence[str], which: Any, seconds: float) -> dict[Place, int]:
    found = client.list_topics(timeout=seconds).topics
    places = [
        TopicPartition(name, number) for name in topics if name in found for number in found[name].partitions
    ]
    if not places:
        return {}
    futures = client.list_offsets(dict.fromkeys(places, which), request_timeout=seconds)
    return {
        (place.topic, place.partition): future.result(seconds).offset for place, future in futures.items()
    }


def read(
    settings: Settings,
    begin: Mapping[Place, int],
    end: Mapping[Place, int],
    while_reading: Callable[[], None] = lambda: None,
) -> Iterator[Record]:
    """The records that ``messages`` answers, byte for byte."""
    return map(record_of, messages(settings, begin, end, while_reading))


def messages(
    settings: Settings,
    begin: Mapping[Place, int],
    end: Mapping[Place, int],
    while_reading: Callable[[], None] = lambda: None,
) -> Iterator[Any]:
    """The messages between two offsets of each partition, per partition in order; the end is exclusive.

    Args:
        while_reading: called several times a second; what it raises ends the reading.

    Raises:
        ServerUnavailable: nothing arrives for ``connect_seconds``.
    """
    open_places = {place for place, offset in end.items() if offset > begin[place]}
    client = reader(settings, {"enable.partition.eof": True})
    try:
        client.assign([TopicPartition(*place, begin[place]) for place in open_places])
        deadline = time.monotonic() + settings.connect_seconds
        while open_places:
            found = client.consume(1_000, 0.2)
            while_reading()
            if found:
                deadline = time.monotonic() + settings.connect_seconds
            elif time.monotonic() > deadline:
                raise ServerUnavailable(f"Kafka at {settings.kafka} sends nothing of {sorted(open_places)}")
            yield from _taken(found, end, open_places)
    finally:
        client.close()


def _taken(messages: Sequence[Any], end: Mapping[Place, int], open_places: set[Place]) -> Iterator[Any]:
    """The messages before their partition's end; closes the partitions that have come to it."""
    for message in messages:
        place = partition_of(message)
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
            raise ServerUnavailable(f"{place} cannot be read: {error.str()}")
        if error is None and message.offset() < end[place]:
            yield message
        if error is not None or message.offset() + 1 >= end[place]:
            open_places.discard(place)


def partition_of(message: Any) -> tuple[str, int]:
    return message.topic(), message.partition()


def _made(kind: Callable[..., Client], options: Mapping[str, Any]) -> Client:
    """A client.

    Raises:
        ConfigurationError: librdkafka does not know an option, or not its value.
    """
    try:
        return kind(options, logger=_CLIENT_LOG)
    except KafkaException as error:
        raise ConfigurationError(
            f"STREAMS_KAFKA_OPTIONS do not make a client: {error.args[0].str()}; "
            "they are named as in https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md"
        ) from error


def _common(settings: Settings) -> dict[str, Any]:
    return {
        "bootstrap.servers": settings.kafka,
        "client.id": "fencepost",
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 2_000,
        "error_cb": _Complaints(),
        **settings.kafka_options,
    }


class _Complaints:
    """Says that brokers are away, and says it again only after a while: librdkafka tries many times a second."""

    _EVERY_SECONDS = 10.0

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def __call__(self, error: KafkaError) -> None:
        name = error.name()
        if time.monotonic() >= self._next.get(name, 0.0):
            self._next[name] = time.monotonic() + self._EVERY_SECONDS
            logger.warning("Kafka: %s%s", error.str(), "" if error.fatal() else "; trying again")
