"""The SQL of the event store, as steps for either kind of connection.

Writers of one resource are serialised by its row in ``fencepost.resource``: the row is locked until the
caller's transaction ends, so versions have no hole and the order of commits is the order of versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from streams.errors import IdempotencyMismatch, VersionConflict
from streams.stores.steps import Query, Steps

# How the resource's version moves, by what the caller expects of it.
_CREATE = """
    INSERT INTO fencepost.resource (resource_type, resource_id, version)
    VALUES (%(resource_type)s, %(resource_id)s, %(count)s)
    ON CONFLICT (resource_type, resource_id) DO NOTHING RETURNING version"""
_ADVANCE = """
    UPDATE fencepost.resource SET version = version + %(count)s
    WHERE resource_type = %(resource_type)s AND resource_id = %(resource_id)s AND version = %(expected)s
    RETURNING version"""
_WHATEVER = """
    INSERT INTO fencepost.resource AS r (resource_type, resource_id, version)
    VALUES (%(resource_type)s, %(resource_id)s, %(count)s)
    ON CONFLICT (resource_type, resource_id) DO UPDATE SET version = r.version + %(count)s RETURNING version"""

_INSERT = """
WITH moved AS ({move})
INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload, traceparent)
SELECT %(resource_type)s, %(resource_id)s, moved.version - %(count)s + e.ordinal, e.id, e.type, e.payload, %(traceparent)s
FROM moved, unnest(%(ids)s::uuid[], %(types)s::text[], %(payloads)s::bytea[]) WITH ORDINALITY AS e(id, type, payload, ordinal)
RETURNING version"""

# The three statements that append, by what they expect: a new resource, a version, anything.
CREATE, ADVANCE, WHATEVER = APPENDS = tuple(
    _INSERT.format(move=move) for move in (_CREATE, _ADVANCE, _WHATEVER)
)

VERSION = """
SELECT version FROM fencepost.resource WHERE resource_type = %(resource_type)s AND resource_id = %(resource_id)s"""

FIND_KEY = """
SELECT request_hash, resource_type, resource_id, first_version, last_version
FROM fencepost.append_key WHERE idempotency_key = %(idempotency_key)s"""

KEEP_KEY = """
INSERT INTO fencepost.append_key
    (idempotency_key, request_hash, resource_type, resource_id, first_version, last_version)
VALUES (%(idempotency_key)s, %(request_hash)s, %(resource_type)s, %(resource_id)s, %(first)s, %(last)s)
ON CONFLICT (idempotency_key) DO NOTHING RETURNING true"""

LOAD = """
SELECT version, id, type, payload, traceparent, recorded_at FROM fencepost.event
WHERE resource_type = %(resource_type)s AND resource_id = %(resource_id)s AND version > %(after)s
    AND (%(until)s::bigint IS NULL OR version <= %(until)s)
ORDER BY version"""

FIND_SNAPSHOT = """
SELECT version, state FROM fencepost.snapshot
WHERE resource_type = %(resource_type)s AND resource_id = %(resource_id)s AND tag = %(tag)s"""

KEEP_SNAPSHOT = """
INSERT INTO fencepost.snapshot AS s (resource_type, resource_id, tag, version, state)
VALUES (%(resource_type)s, %(resource_id)s, %(tag)s, %(version)s, %(state)s)
ON CONFLICT (resource_type, resource_id, tag) DO UPDATE SET version = excluded.version, state = excluded.state
WHERE s.version < excluded.version"""


@dataclass(frozen=True, slots=True)
class NewEvent:
    id: UUID
    type: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ``fencepost.event``."""

    version: int
    id: UUID
    type: str
    payload: bytes
    traceparent: str | None
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class Range:
    """The versions an append wrote, both inclusive; ``replayed`` where an idempotency key had written them before."""

    first_version: int
    last_version: int
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Resource:
    type: str
    id: str

    @property
    def parameters(self) -> dict[str, Any]:
        return {"resource_type": self.type, "resource_id": self.id}


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    key: str
    request_hash: bytes

    @classmethod
    def of(cls, key: str, request: bytes) -> IdempotencyKey:
        return cls(key, hashlib.sha256(request).digest())


def append(
    resource: Resource,
    events: Sequence[NewEvent],
    expected: int | None,
    key: IdempotencyKey | None,
    trace: str | None,
) -> Steps[Range]:
    if key is None:
        return (yield from _append(resource, events, expected, trace))
    before = yield from _find(resource, key)
    if before is not None:
        return before
    # A savepoint, so that the one who finds out too late that the key was taken leaves nothing behind.
    yield Query("SAVEPOINT fencepost_append")
    try:
        written = yield from _append(resource, events, expected, trace)
    except VersionConflict:
        yield Query("ROLLBACK TO SAVEPOINT fencepost_append")
        before = yield from _find(resource, key)
        if before is not None:
            return before
        raise
    kept = yield Query(KEEP_KEY, _key_row(resource, key, written))
    if not kept:
        yield Query("ROLLBACK TO SAVEPOINT fencepost_append")
        before = yield from _find(resource, key)
        assert before is not None, "the row that was in the way is committed, and keys are never deleted"  # noqa: S101
        return before
    yield Query("RELEASE SAVEPOINT fencepost_append")
    return written


def find_key(resource: Resource, key: str, request: bytes) -> Steps[Range | None]:
    """What a key appended before, if it did.

    Raises:
        IdempotencyMismatch: for another request.
    """
    return (yield from _find(resource, IdempotencyKey.of(key, request)))


def load(resource: Resource, after: int = 0, until: int | None = None) -> Steps[list[Row]]:
    rows = yield Query(LOAD, {**resource.parameters, "after": after, "until": until})
    return [Row(*row) for row in rows]


def find_snapshot(resource: Resource, tag: str) -> Steps[tuple[int, bytes] | None]:
    rows = yield Query(FIND_SNAPSHOT, {**resource.parameters, "tag": tag})
    return (rows[0][0], rows[0][1]) if rows else None


def keep_snapshot(resource: Resource, tag: str, version: int, state: bytes) -> Steps[None]:
    yield Query(KEEP_SNAPSHOT, {**resource.parameters, "tag": tag, "version": version, "state": state})


def _append(
    resource: Resource, events: Sequence[NewEvent], expected: int | None, trace: str | None
) -> Steps[Range]:
    rows = yield Query(
        WHATEVER if expected is None else CREATE if expected == 0 else ADVANCE,
        {
            **resource.parameters,
            "count": len(events),
            "expected": expected,
            "traceparent": trace,
            "ids": [event.id for event in events],
            "types": [event.type for event in events],
            "payloads": [event.payload for event in events],
        },
    )
    if not rows:
        found = yield Query(VERSION, resource.parameters)
        raise VersionConflict(resource.type, resource.id, expected or 0, found[0][0] if found else 0)
    versions = [version for (version,) in rows]
    return Range(min(versions), max(versions))


def _find(resource: Resource, key: IdempotencyKey) -> Steps[Range | None]:
    rows = yield Query(FIND_KEY, {"idempotency_key": key.key})
    if not rows:
        return None
    request_hash, resource_type, resource_id, first, last = rows[0]
    if (request_hash, resource_type, resource_id) != (key.request_hash, resource.type, resource.id):
        raise IdempotencyMismatch(key.key)
    return Range(first, last, replayed=True)


def _key_row(resource: Resource, key: IdempotencyKey, written: Range) -> dict[str, Any]:
    return {
        **resource.parameters,
        "idempotency_key": key.key,
        "request_hash": key.request_hash,
        "first": written.first_version,
        "last": written.last_version,
    }
