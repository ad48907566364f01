"""Where the relay's rows come from. Three ways to read them keep one contract: log stream, slot peek, polling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streams.errors import ServerUnavailable
from streams.relay.pgoutput import Columns, Relation


class StandBy(ServerUnavailable):
    """Another relay is at work for this slot; this one waits for it to end."""


@dataclass(frozen=True)
class Server:
    """Which server holds the log. A copy of it has the same system; from its promotion on, another timeline."""

    system: str
    timeline: int
    written: int


# Refuses a server that is not the one read so far; the second argument answers the history of a timeline.
RequireSame = Callable[[Server, Callable[[int], str]], None]

# One relay at a time, whichever way it reads. PostgreSQL frees the lock with the connection that took it.
LOCK = "SELECT pg_try_advisory_lock(hashtext('fencepost.relay'), hashtext({}))"
# Who does not speak for so long is taken for dead, and another relay takes over.
SILENCE_SECONDS = 10


class Sink(Protocol):
    """Takes what a source reads: rows in the order of their commits, in brackets."""

    def table(self, relation: Relation) -> None:
        """A table whose rows follow; again whenever its columns have changed."""

    def begin(self, commit: int, position: int) -> None:
        """Rows that are one transaction, or one page of a poll.

        Args:
            commit: what is compared with positions found in topics, to tell whether the rows may be there already.
            position: what stands in the records.
        """

    def insert(self, oid: int, row: Columns) -> None:
        """A row of that table."""

    def commit(self, end: int) -> None:
        """The end of the bracket; reported when the broker has all of it."""

    def nothing_before(self, end: int) -> None:
        """Everything before this position was handed over."""


class Source(Protocol):
    """Reads committed rows, each at least once, per resource in the order of commits.

    Messages of the outbox come in the order of commits from the log. Polled, those of one key whose writers did not wait
    for each other come in the order in which they were written, if they are found at once.

    What has been reported is not read again, also not after a crash. What has not been is read again, after a crash
    from its first row on. A source belongs to one thread and one connection, and holds the relay's lock with it.
    """

    confirmed: int
    """Up to here the log of the server is safe elsewhere."""
    ended: bool
    """Whether it has given all that it will; another source goes on."""

    def begin(self, require_same: RequireSame) -> int:
        """Takes the lock and finds the place to go on from; answers the position before which all is confirmed.

        Raises:
            StandBy: another relay holds the lock.
            RelayBlocked: going on from here would lose something.
        """

    def take(self, sink: Sink, limit: int) -> bool:
        """Hands over what is there, about ``limit`` messages at most, without waiting; answers whether there may be more."""

    def wait(self, seconds: float) -> None:
        """Waits until there may be more, or for so long."""

    def report(self, position: int, *, now: bool = False) -> None:
        """Everything up to this position is safe. To be called several times a second, or the lock is lost."""

    def close(self) -> None:
        """Lets the connection and the lock go."""
