"""fencepost: event-sourced stream processing on Kafka and PostgreSQL.

What services and processors import. ``streams/DESIGN.md`` tells how it works.
"""

from streams.app import App, Topic
from streams.backoff import Retry
from streams.effects import Effects
from streams.errors import (
    ConfigurationError,
    Halt,
    IdempotencyMismatch,
    NotInTransaction,
    Permanent,
    RecordTooLarge,
    RelayBlocked,
    SchemaError,
    ServerUnavailable,
    StreamsError,
    Transient,
    VersionConflict,
)
from streams.event import Event
from streams.publish import Appended, Decider, Snapshots, StoredEvent, append, execute, load, publish
from streams.schema import Catalog
from streams.settings import Settings

__all__ = [
    "App",
    "Appended",
    "Catalog",
    "ConfigurationError",
    "Decider",
    "Effects",
    "Event",
    "Halt",
    "IdempotencyMismatch",
    "NotInTransaction",
    "Permanent",
    "RecordTooLarge",
    "RelayBlocked",
    "Retry",
    "SchemaError",
    "ServerUnavailable",
    "Settings",
    "Snapshots",
    "StoredEvent",
    "StreamsError",
    "Topic",
    "Transient",
    "VersionConflict",
    "append",
    "execute",
    "load",
    "publish",
]
