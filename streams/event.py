"""What travels: a record as Kafka holds it, and the event a handler sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from streams.errors import RecordTooLarge

# CloudEvents, Kafka binary content mode (https://github.com/cloudevents/spec, kafka-protocol-binding).
CE_SPECVERSION = "ce_specversion"
CE_ID = "ce_id"
CE_TYPE = "ce_type"
CE_SOURCE = "ce_source"
CE_TIME = "ce_time"
CE_SUBJECT = "ce_subject"
# W3C trace context, without a prefix so that every tracer finds it.
TRACEPARENT = "traceparent"
# Fencepost's own.
FP_VERSION = "fp_version"  # the resource's version, decimal
FP_POSITION = (
    "fp_position"  # where the row stands: position of its transaction in the log "/" number of the row
)
FP_JOB = "fp_job"  # on a retry record: the job it wakes
FP_ATTEMPT = "fp_attempt"  # on a retry record: after which attempt it was sent
FP_DUE = "fp_due"  # on a retry record: milliseconds since the epoch, by the database's clock
FP_ERROR = "fp_error"  # on a dead letter: where it came from and why, as bounded JSON

# Topics made by `streams topics apply` take 16 MiB; what is left is for the headers that letters and the relay add.
MAX_RECORD_BYTES = 15 * 1024 * 1024

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(slots=True)
class Record:
    """A record byte for byte; ``value`` is None for a tombstone. ``timestamp`` in milliseconds since the epoch."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int = 0

    def header(self, name: str) -> bytes | None:
        """The last value of a header, as Kafka's own clients answer; None where it is absent or has no value."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


class Event:
    """A decoded record.

    Attributes:
        id: unique to the event, the same on every delivery.
        type: the name of its schema, ``OrderPlaced``.
        resource_type: what it happened to, ``order``.
        resource_id: which one; the record's key.
        version: the resource's version after it, from 1; 0 where the record carries none.
        data: an instance of the event class; None for a tombstone.
    """

    __slots__ = ("data", "id", "record", "resource_id", "resource_type", "type", "version")

    def __init__(
        self,
        id: str,
        type: str,
        resource_type: str,
        resource_id: str,
        version: int,
        data: Any,
        record: Record,
    ) -> None:
        self.id, self.type, self.version, self.data, self.record = id, type, version, data, record
        self.resource_type, self.resource_id = resource_type, resource_id

    @property
    def time(self) -> datetime | None:
        """When the store recorded it, by the database's clock; None where the record does not say."""
        value = self.record.header(CE_TIME)
        return None if value is None else datetime.fromisoformat(value.decode())

    @property
    def traceparent(self) -> str | None:
        value = self.record.header(TRACEPARENT)
        return None if value is None else value.decode()

    def __repr__(self) -> str:
        return f"<{self.type} {self.resource_type}/{self.resource_id} v{self.version} {self.id}>"


def as_headers(pairs: Iterable[tuple[str, bytes | str | None]]) -> Headers:
    """Headers with text values encoded as UTF-8."""
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)


def require_size(
    topic: str,
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | str | None]] = (),
) -> None:
    """Raises RecordTooLarge where a record has more than MAX_RECORD_BYTES."""
    sizes = _size(key), _size(value), sum(_size(name) + _size(content) for name, content in headers)
    if sum(sizes) > MAX_RECORD_BYTES:
        raise RecordTooLarge(topic, *sizes, MAX_RECORD_BYTES)


def _size(content: bytes | str | None) -> int:
    return 0 if content is None else len(content.encode() if isinstance(content, str) else content)
