"""Proof that every event of the store is in its topic, by reading both.

The store is asked first which versions there are. Then the relay gets time to confirm all that was committed until
then, and only after that the topic's end is taken and everything before it read. So what is not found there did not
arrive, however many events come in meanwhile. Of each resource a few integers are kept; where there are too many of
them, several passes over the topic each look after a share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from streams.broker import kafka
from streams.broker.kafka import Place
from streams.broker.partitioner import partition_of
from streams.errors import ServerUnavailable
from streams.event import FP_POSITION, FP_VERSION, Record
from streams.observe.repair import Gaps
from streams.observe.versions import Share, Sight, Stretch, Versions
from streams.settings import Settings
from streams.stores.postgres import Connection

RESOURCES_IN_MEMORY = 1_000_000

_EXAMPLES = 20
_BATCH = 1_000
_POLL_SECONDS = 0.05
_MAX_VERSION = 2**63 - 1
# A record is sent after its event, but its time is of the relay's clock and the event's of the database's.
_CLOCKS_APART = timedelta(minutes=5)
_EVER = datetime.max.replace(tzinfo=UTC)

# Versions run without a hole, so the first and the last say which there are.
_STORED = (
    "SELECT resource_id, min(version), max(version) FROM fencepost.event WHERE resource_type = %s GROUP BY 1"
)
_STORED_SINCE = """
SELECT resource_id, min(version), max(version) FROM fencepost.event
WHERE resource_type = %s AND recorded_at >= %s GROUP BY 1"""

_NOT_STORED = """
SELECT count(*) FROM unnest(%s::text[], %s::bigint[]) AS r (id, version)
WHERE NOT EXISTS (SELECT FROM fencepost.event e
    WHERE e.resource_type = %s AND e.resource_id = r.id AND e.version = r.version)"""

_RECORDED_BEFORE = """
SELECT r.place, count(*)
FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::timestamptz[]) WITH ORDINALITY AS r (id, first, last, until, place)
JOIN fencepost.event e ON e.resource_type = %s AND e.resource_id = r.id AND e.version BETWEEN r.first AND r.last
WHERE e.recorded_at < r.until GROUP BY 1"""

# A mark of our own, since what a service has committed without waiting for the disk lies behind the written log, and
# in front of what is committed now. It goes to no topic.
_MARK = "SELECT pg_logical_emit_message(true, 'fencepost', 'audit')::text, pg_current_xact_id()::text"
# By the place in the log, or where the tables are polled by whether the last snapshot shows the mark.
_CONFIRMED = """
SELECT pg_visible_in_snapshot(%(xid)s::xid8, sent) AND cardinality(unsent) = 0 FROM fencepost.relay_cursor WHERE slot = %(slot)s
UNION ALL
SELECT confirmed_flush_lsn >= %(mark)s::pg_lsn FROM pg_replication_slots
WHERE slot_name = %(slot)s AND NOT EXISTS (SELECT FROM fencepost.relay_cursor WHERE slot = %(slot)s)"""

_BLOCKED = """
SELECT key, convert_from(header_values[array_position(header_names, 'fp_version')], 'UTF8')
FROM fencepost.relay_blocked WHERE slot = %s AND topic = %s AND 'fp_version' = ANY(header_names) AND key IS NOT NULL"""

_Position = tuple[int, int, int]

Progress = Callable[[str, int, int | None], None]
"""Is told what is being done, how far it has come, and how far it will go, where that is known."""


@dataclass(frozen=True, slots=True)
class TopicAudit:
    """One topic compared with the store.

    Attributes:
        stored: events of the resource type.
        relayed: those of them that the topic holds.
        expired: those that retention has deleted, as far as can be told: they are from before the oldest record that
            remains in their partition, and no earlier event of their resource remains.
        repeated: records of an event that the topic held before.
        out_of_order: events that first appear after a later version of their resource.
        republished: events that do so since they were sent again later, by a repair.
        blocked: events that the broker refused, or that wait behind such: ``streams relay blocked`` shows them.
        unknown: records of no event of the store, such as one whose transaction was rolled back.
        settled: whether the relay had confirmed all of the events; otherwise some may still be on their way.
        records: how many records were read, in so many passes over the topic.
        examples: the first of the missing events, as resource id and version.
    """

    topic: str
    stored: int
    relayed: int
    expired: int
    repeated: int
    out_of_order: int
    republished: int
    blocked: int
    unknown: int
    settled: bool
    records: int
    passes: int
    examples: tuple[tuple[str, int], ...] = ()

    @property
    def missing(self) -> int:
        return self.stored - self.relayed - self.expired - self.blocked

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.out_of_order or self.unknown)


class TopicAuditor:
    """Compares topics with the store.

    Args:
        connection: in autocommit.
        since: only events that were recorded since then; all of them are to be in the topic.
        wait_seconds: how long to wait for the relay, at most.
        limit: of how many resources the versions are kept at once.
        progress: called several times a second.
    """

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        *,
        since: datetime | None = None,
        wait_seconds: float = 0.0,
        limit: int = RESOURCES_IN_MEMORY,
        progress: Progress = lambda *_: None,
    ) -> None:
        self._connection, self._settings = connection, settings
        self._since, self._limit, self._progress = since, limit, progress
        self._wait_seconds = wait_seconds

    def audit(self, resource_type: str, gaps: Gaps | None = None) -> TopicAudit:
        """Reads a topic and compares it with the store.

        Args:
            gaps: is told what is missing.

        Raises:
            ServerUnavailable: the broker does not answer, or the topic is not there.
        """
        found = _Found(self._settings.topic_prefix + resource_type)
        strangers = _Strangers(self._connection, resource_type)
        shares = [Share()]
        while shares:
            share, versions = self._stored(resource_type, shares)
            found.settled = self._settle() and found.settled
            kept = self._read(share, versions, strangers, found)
            found.stored += versions.expected
            found.relayed += versions.expected
            blocked = self._blocked(found.topic, share)
            missing = self._missing(resource_type, versions, kept, found)
            for stretch in (part for whole in missing for part in _without(whole, blocked, found)):
                found.miss(stretch)
                if gaps is not None:
                    gaps.add(resource_type, stretch)
            found.passes += 1
        return found.result(unknown=strangers.count())

    def _stored(self, resource_type: str, shares: list[Share]) -> tuple[Share, Versions]:
        """Takes the next share and its versions; what makes it too large is split off, and goes to the others."""
        share, versions = shares.pop(), Versions()
        what = f"{resource_type}: reading the store"
        query, since = (_STORED, ()) if self._since is None else (_STORED_SINCE, (self._since,))
        with self._connection.cursor() as cursor:
            rows = cursor.stream(query, (resource_type, *since))
            for count, (resource_id, first, last) in enumerate(rows):
                if count % _BATCH == 0:
                    self._progress(what, count, None)
                key = resource_id.encode()
                if not share.holds(key):
                    continue
                versions.expect(key, first, last)
                while len(versions) > self._limit:
                    share, other = share.halves()
                    shares.append(other)
                    versions = versions.only(share)
        return share, versions

    def _settle(self) -> bool:
        """Waits until the relay has confirmed what is committed by now; answers whether it did in time."""
        mark, xid = self._connection.execute(_MARK).fetchone() or (None, None)
        parameters = {"mark": mark, "xid": xid, "slot": self._settings.slot}
        deadline = time.monotonic() + self._wait_seconds
        while True:
            row = self._connection.execute(_CONFIRMED, parameters).fetchone()
            if row is not None and row[0]:
                return True
            if row is None or time.monotonic() > deadline:
                # Whoever did not come for this topic is not waited for at each of the others.
                self._wait_seconds = 0.0
                return False
            self._progress("waiting for the relay", 0, None)
            time.sleep(_POLL_SECONDS)

    def _read(
        self, share: Share, versions: Versions, strangers: _Strangers, found: _Found
    ) -> dict[Place, _Kept]:
        """Reads the topic to its end; answers what each of its partitions still holds."""
        begins, ends = self._range(found.topic)
        kept = {place: _Kept(begins[place] > 0) for place in ends}
        total = found.records + sum(end - begins[place] for place, end in ends.items())
        what = found.topic if found.passes == 0 else f"{found.topic}, pass {found.passes + 1}"

        def tell() -> None:
            self._progress(what, found.records, total)

        for message in kafka.messages(self._settings, begins, ends, tell):
            found.records += 1
            place = kept[kafka.partition_of(message)]
            if place.oldest is None:
                place.oldest, place.is_cut = message.timestamp()[1], message.offset() > 0
            key = message.key() or b""
            if not share.holds(key):
                continue
            headers = dict(
                message.headers() or ()
            )  # once: to search for each name costs more than all else here
            version = _version(headers.get(FP_VERSION))
            position = _position(headers.get(FP_POSITION))
            match versions.see(key, version):
                case Sight.REPEATED:
                    found.repeated += 1
                case Sight.LATE if position > place.newest:
                    found.republished += 1
                case Sight.LATE:
                    found.out_of_order += 1
                case Sight.UNEXPECTED:
                    strangers.meet(key, version)
            place.newest = max(place.newest, position)
        tell()
        return kept

    def _range(self, topic: str) -> tuple[dict[Place, int], dict[Place, int]]:
        """From where to where each partition is read."""
        ends = kafka.end_offsets(self._settings, [topic])
        if not ends:
            raise ServerUnavailable(f"topic {topic} is not there; run: streams topics apply")
        if self._since is None:
            return kafka.begin_offsets(self._settings, [topic]), ends
        return kafka.offsets_since(self._settings, [topic], self._since - _CLOCKS_APART), ends

    def _missing(
        self, resource_type: str, versions: Versions, kept: dict[Place, _Kept], found: _Found
    ) -> Iterator[Stretch]:
        """What is not in the topic, without what has expired; counts that."""
        batch: list[tuple[Stretch, datetime | None]] = []
        for stretch in versions.gaps():
            found.relayed -= stretch.events
            # Retention deletes from the beginning: behind an event that is still there, nothing has expired.
            may_expire = self._since is None and versions.is_first(stretch)
            place = found.topic, partition_of(stretch.key, len(kept))
            batch.append((stretch, kept[place].until if may_expire else None))
            if len(batch) >= _BATCH:
                yield from self._unexpired(resource_type, batch, found)
                batch.clear()
        yield from self._unexpired(resource_type, batch, found)

    def _blocked(self, topic: str, share: Share) -> dict[bytes, set[int]]:
        """The versions that were set aside, by key."""
        found: dict[bytes, set[int]] = {}
        for key, version in self._connection.execute(_BLOCKED, (self._settings.slot, topic)):
            if share.holds(key):
                found.setdefault(key, set()).add(int(version))
        return found

    def _unexpired(
        self, resource_type: str, batch: Sequence[tuple[Stretch, datetime | None]], found: _Found
    ) -> Iterator[Stretch]:
        doubtful = [(stretch, until) for stretch, until in batch if until is not None]
        expired: dict[Stretch, int] = {}
        if doubtful:
            columns = zip(*((s.key.decode(), s.first, s.last, until) for s, until in doubtful), strict=True)
            rows = self._connection.execute(_RECORDED_BEFORE, (*map(list, columns), resource_type))
            expired = {doubtful[place - 1][0]: count for place, count in rows}
        for stretch, _ in batch:
            gone = expired.get(stretch, 0)
            found.expired += gone
            if gone < stretch.events:
                yield Stretch(stretch.key, stretch.first + gone, stretch.last)


def _without(stretch: Stretch, blocked: dict[bytes, set[int]], found: _Found) -> Iterator[Stretch]:
    """What is left of a stretch without what was set aside; counts that."""
    first = stretch.first
    for version in sorted(v for v in blocked.get(stretch.key, ()) if stretch.first <= v <= stretch.last):
        found.blocked += 1
        if first < version:
            yield Stretch(stretch.key, first, version - 1)
        first = version + 1
    if first <= stretch.last:
        yield Stretch(stretch.key, first, stretch.last)


def topic(connection: Connection, settings: Settings, resource_type: str) -> TopicAudit:
    """Compares a whole topic with the store, without waiting for the relay.

    Raises:
        ServerUnavailable: the broker does not answer, or the topic is not there.
    """
    return TopicAuditor(connection, settings).audit(resource_type)


def resource_types(connection: Connection) -> list[str]:
    """The types of the resources in the store."""
    return [
        row[0]
        for row in connection.execute("SELECT DISTINCT resource_type FROM fencepost.resource ORDER BY 1")
    ]


def records(settings: Settings, name: str) -> Iterator[Record]:
    """Every record that a topic holds now; per partition in the order of the log.

    Raises:
        ServerUnavailable: the broker does not answer, or the topic is not there.
    """
    ends = kafka.end_offsets(settings, [name])
    if not ends:
        raise ServerUnavailable(f"topic {name} is not there; run: streams topics apply")
    return kafka.read(settings, dict.fromkeys(ends, 0), ends)


@dataclass(slots=True)
class _Found:
    """What a topic came to, as far as it has been read."""

    topic: str
    stored: int = 0
    relayed: int = 0
    expired: int = 0
    repeated: int = 0
    out_of_order: int = 0
    republished: int = 0
    blocked: int = 0
    settled: bool = True
    records: int = 0
    passes: int = 0
    examples: list[tuple[str, int]] = field(default_factory=list)

    def miss(self, stretch: Stretch) -> None:
        wanted = range(stretch.first, stretch.last + 1)[: _EXAMPLES - len(self.examples)]
        self.examples.extend((stretch.key.decode(), version) for version in wanted)

    def result(self, *, unknown: int) -> TopicAudit:
        return TopicAudit(
            topic=self.topic,
            stored=self.stored,
            relayed=self.relayed,
            expired=self.expired,
            repeated=self.repeated,
            out_of_order=self.out_of_order,
            republished=self.republished,
            blocked=self.blocked,
            unknown=unknown,
            settled=self.settled,
            records=self.records,
            passes=self.passes,
            examples=tuple(self.examples),
        )


@dataclass(slots=True)
class _Kept:
    """What a partition still holds.

    Attributes:
        is_cut: whether it has lost records to retention.
        oldest: the time of its oldest record, in milliseconds; None where it is empty.
        newest: the highest position in the database's log among its records so far.
    """

    is_cut: bool
    oldest: int | None = None
    newest: _Position = (0, 0, 0)

    @property
    def until(self) -> datetime | None:
        """Events recorded before this may have been deleted; None where nothing was."""
        if not self.is_cut:
            return None
        return _EVER if self.oldest is None else datetime.fromtimestamp(self.oldest / 1000, UTC)


class _Strangers:
    """Records that were not expected: of events that came in meanwhile, or of none at all. The store knows which."""

    def __init__(self, connection: Connection, resource_type: str) -> None:
        self._connection, self._resource_type = connection, resource_type
        self._waiting: list[tuple[str, int]] = []
        self._unknown = 0

    def meet(self, key: bytes, version: int) -> None:
        try:
            resource_id = key.decode()
        except UnicodeDecodeError:
            resource_id = ""
        if not version or not resource_id or "\x00" in resource_id:  # no event can have such a name
            self._unknown += 1
            return
        self._waiting.append((resource_id, version))
        if len(self._waiting) >= _BATCH:
            self._ask()

    def count(self) -> int:
        """How many are of no event."""
        self._ask()
        return self._unknown

    def _ask(self) -> None:
        if not self._waiting:
            return
        columns = zip(*self._waiting, strict=True)
        row = self._connection.execute(_NOT_STORED, (*map(list, columns), self._resource_type)).fetchone()
        self._unknown += row[0] if row else 0
        self._waiting.clear()


def _version(header: bytes | None) -> int:
    """The version that a record carries; 0 where it carries none that can be."""
    try:
        version = int(header or 0)
    except ValueError:
        return 0
    return version if 0 < version <= _MAX_VERSION else 0


def _position(header: bytes | None) -> _Position:
    """Where a record's row stands in the database's log; the beginning where it does not say."""
    try:
        high, low, number = (header or b"").split(b"/")
        return int(high, 16), int(low, 16), int(number)
    except ValueError:
        return 0, 0, 0
