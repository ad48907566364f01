"""What callers may catch, and how a handler tells the processor what its failure means.

Every error of fencepost derives from ``StreamsError``. The three failure classes at the end are for
handlers to raise: they decide whether a record is tried again, buried, or stops its partition.
"""

from __future__ import annotations

from dataclasses import dataclass


class StreamsError(Exception):
    """The root of all errors that fencepost raises on purpose."""


class ConfigurationError(StreamsError):
    """A setting, an option or a declaration is wrong; the message says what to change."""


class Busy(StreamsError):
    """Somebody else is at the same work, which one alone may do; let it end first."""


class NotLetIn(ConfigurationError):
    """A server does not know whom the URL names, or cannot be found: a wrong URL at a start, later a passing trouble."""


class ServerUnavailable(StreamsError):
    """A server does not answer, or lacks what fencepost needs of it; the message says what to do."""


class VersionConflict(StreamsError):
    """Another writer appended to the resource first; reload it and decide again. Nothing was written."""

    def __init__(self, resource_type: str, resource_id: str, expected: int, actual: int) -> None:
        self.resource_type, self.resource_id = resource_type, resource_id
        self.expected, self.actual = expected, actual
        super().__init__(
            f"{resource_type} {resource_id} is at version {actual}, the append expected {expected}"
        )


class IdempotencyMismatch(StreamsError):
    """An idempotency key was used before with another request. Nothing was written."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"idempotency key {key!r} was used before with another request")


class NotInTransaction(StreamsError):
    """An append outside a transaction would not be one with the business change it belongs to."""


class SchemaError(StreamsError):
    """An event class and its Avro schema do not fit, or a schema cannot be read."""


class RelayBlocked(StreamsError):
    """The relay cannot go on without losing or reordering something; the message says what an operator must do."""


class Fenced(StreamsError):
    """The partition belongs to another worker now; nothing of the transaction may be committed."""


class Transient(StreamsError):
    """Raised by a handler: a passing failure, worth another attempt.

    ``delay_seconds`` asks for a delay of its own, as a rate limit does; otherwise the retry policy decides.
    """

    def __init__(self, message: str = "", *, delay_seconds: float | None = None) -> None:
        self.delay_seconds = delay_seconds
        super().__init__(message)


class Permanent(StreamsError):
    """Raised by a handler: this record can never succeed as things stand; bury it without further attempts."""


class Halt(StreamsError):
    """Raised by a handler: stop the partition. Nothing is skipped, and nothing goes on until a person looked."""


class UnknownSchema(Transient):
    """The record's schema fingerprint is in no catalog here yet; a deployment may still bring it."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        super().__init__(f"no schema with fingerprint {fingerprint} in the catalog")


class UndecodableRecord(Permanent):
    """The record's bytes are not what its schema, or its headers, promise."""


class RecordTooLarge(Permanent):
    """A record that its topic would not take, and that would stop the relay for all others. Nothing was written."""

    def __init__(self, topic: str, key_bytes: int, value_bytes: int, header_bytes: int, limit: int) -> None:
        self.size = key_bytes + value_bytes + header_bytes
        super().__init__(
            f"a record for {topic} has {self.size:,} bytes (key {key_bytes:,}, value {value_bytes:,}, headers "
            f"{header_bytes:,}), more than {limit:,}; put the content elsewhere and send where it is"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a record did not pass, as data: what is stored, shown and grouped by."""

    error_class: str
    message: str
    fingerprint: str
    permanent: bool
    delay_seconds: float | None = None
