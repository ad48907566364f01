"""From a record to a decision. Runs the user's function; touches nothing outside the process."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streams.app import Processor
from streams.broker.registry import RegistryUnavailable
from streams.consume.failures import failure_of
from streams.effects import DatabaseEffect, Effects, Publish
from streams.errors import Failure, Halt, UndecodableRecord
from streams.event import CE_ID, CE_TYPE, FP_VERSION, TRACEPARENT, Event, Record, require_size
from streams.schema.catalog import encode, type_name
from streams.stores.outbox import OutboxMessage

MAX_INDEXED_BYTES = 1_024
"""Keys and event ids are looked up in the database, and PostgreSQL indexes no more than 2,704 bytes of a row."""

_NAMESPACE = uuid.UUID("9d4a1d2c-0f5e-4f2a-8a3e-1f6f0f9f7b11")


@dataclass(slots=True)
class Apply:
    """The effects to apply, and the derived messages to send."""

    effects: list[DatabaseEffect]
    messages: list[OutboxMessage]


@dataclass(slots=True)
class Filter:
    """Nothing to do here, by the processor's own declaration."""


@dataclass(slots=True)
class Fail:
    failure: Failure


@dataclass(slots=True)
class Stop:
    """The handler asked for its partition to stop."""

    reason: str


Decision = Apply | Filter | Fail | Stop


@dataclass(slots=True)
class Item:
    """A record with what was decided about it.

    Attributes:
        version: the resource's, 0 where the record carries none.
        attempts_left: how often it may still be tried after this time.
    """

    record: Record
    event_id: str
    version: int
    decision: Decision
    attempts_left: int


class Dispatcher:
    """Decodes records of one processor and asks its handler.

    Args:
        resource_types: from topic name to resource type.
        decode: makes an event of a value; by default the processor's catalog does.
    """

    def __init__(
        self,
        processor: Processor,
        resource_types: dict[str, str],
        decode: Callable[[bytes], Any] | None = None,
    ) -> None:
        self._processor = processor
        self._resource_types = resource_types
        self._project = processor.project
        self._decode = decode or processor.catalog.decode
        self._events = processor.events
        self._versioned = processor.versions != "none"
        self._attempts = processor.retry.attempts

    def decide(self, record: Record) -> Item:
        """Never raises for what a record or a handler does: that is the decision's content.

        Raises:
            RegistryUnavailable: the record's schema cannot be asked for now; nothing was decided.
        """
        headers = dict(record.headers)
        event_id, version = "", 0
        try:
            event_id = _event_id(headers.get(CE_ID)) or _place(record)
            version = _version(headers.get(FP_VERSION)) if self._versioned or FP_VERSION in headers else 0
            decision = self._decide(record, headers, event_id, version)
        except RegistryUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything, and none of it is lost
            decision = Stop(str(error)) if isinstance(error, Halt) else Fail(failure_of(error))
        return Item(record, event_id or _place(record), version, decision, self._attempts - 1)

    def _decide(
        self, record: Record, headers: dict[str, bytes | None], event_id: str, version: int
    ) -> Decision:
        if record.key is None and (self._versioned or self._processor.ordering == "key"):
            raise UndecodableRecord("the record has no key, by which the processor keeps versions and order")
        if record.key is not None and len(record.key) > MAX_INDEXED_BYTES:
            raise UndecodableRecord(
                f"the key has {len(record.key)} bytes; at most {MAX_INDEXED_BYTES} can be kept in order"
            )
        if self._versioned and version == 0:
            raise UndecodableRecord(
                f"the record has no {FP_VERSION} header; such records need versions='none'"
            )
        if record.value is None:
            if not self._processor.tombstones:
                return Filter()
            data = None
        else:
            data = self._decode(record.value)
            if self._events is not None and type(data) not in self._events:
                return Filter()
        kind = headers.get(CE_TYPE)
        effects = Effects()
        self._project(
            Event(
                event_id,
                type(data).__name__ if kind is None else kind.decode(),
                self._resource_types[record.topic],
                "" if record.key is None else _text(record.key),
                version,
                data,
                record,
            ),
            effects,
        )
        return _applied(event_id, record, effects)


def _applied(event_id: str, record: Record, effects: Effects) -> Apply:
    changes: list[DatabaseEffect] = []
    messages: list[OutboxMessage] = []
    for effect in effects.collected:
        if isinstance(effect, Publish):
            messages.append(_derived(event_id, record, effect, len(messages)))
        else:
            changes.append(effect)
    return Apply(changes, messages)


def _derived(event_id: str, record: Record, effect: Publish, index: int) -> OutboxMessage:
    # From the cause, not at random: a second run of the handler makes the same id, and consumers see a duplicate.
    derived_id = uuid.uuid5(_NAMESPACE, f"{event_id}/{effect.topic}/{index}")
    headers: list[tuple[str, bytes | None]] = [(CE_ID, str(derived_id).encode()), *effect.headers]
    trace = record.header(TRACEPARENT)
    if trace is not None:
        headers.append((TRACEPARENT, trace))
    value = effect.data
    if value is not None and not isinstance(value, bytes):
        value = encode(effect.data)
        headers.append((CE_TYPE, type_name(effect.data).encode()))
    key = record.key if effect.key is None else effect.key
    require_size(effect.topic, key, value, headers)
    return OutboxMessage(effect.topic, key, value, tuple(headers), derived_id)


def _place(record: Record) -> str:
    """What stands for the id of a record that has none: where it is."""
    return f"{record.topic}/{record.partition}/{record.offset}"


def _event_id(header: bytes | None) -> str:
    if not header:
        return ""
    if len(header) > MAX_INDEXED_BYTES or b"\x00" in header:
        raise UndecodableRecord(f"{CE_ID} cannot be kept: {header[:40]!r}, {len(header)} bytes")
    return header.decode(errors="backslashreplace")


def _version(header: bytes | None) -> int:
    if header is None:
        return 0
    try:
        version = int(header)
    except ValueError as error:
        raise UndecodableRecord(f"{FP_VERSION} is not a number: {header[:40]!r}") from error
    if not 1 <= version < 2**63:
        raise UndecodableRecord(f"{FP_VERSION} is {version}; versions count from 1")
    return version


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise UndecodableRecord(f"the key is not UTF-8: {key[:40]!r}") from error
