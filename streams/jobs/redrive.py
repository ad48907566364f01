"""Dead letters back to work: a plan first, then one ledger row and one retry record each.

A redriven record goes to its own group's retry topic, never to the shared topic, where other groups would see it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from streams.app import App, Processor
from streams.dispositions import Disposition, Lane, standing_of
from streams.errors import ConfigurationError
from streams.jobs import letters
from streams.points import reach
from streams.stores.jobs import Job, Jobs, find_jobs
from streams.stores.ledger import Ledger
from streams.stores.outbox import insert_messages
from streams.stores.postgres import Connection

_PAGE = 500


class Expectation(StrEnum):
    """What a redrive is expected to come to, judged by the version the group has applied."""

    APPLY = "apply"  # it is the next version of its resource
    SUPERSEDED = "superseded"  # its resource has gone past it; it will be dropped as stale
    GAP = "gap"  # an earlier version is missing; it will wait for that one


@dataclass(frozen=True)
class Selection:
    """Which dead letters: all of a group's, unless narrowed."""

    group: str
    job_id: int | None = None
    key: bytes | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Planned:
    job: Job
    expectation: Expectation


def select(connection: Connection, selection: Selection) -> Iterator[Job]:
    """The dead letters of a selection, oldest first, in pages."""
    conditions = ["consumer_group = %(group)s", "status = 'dead_letter'", "id > %(after)s"]
    if selection.job_id is not None:
        conditions.append("id = %(job_id)s")
    if selection.key is not None:
        conditions.append("key = %(key)s")
    if selection.fingerprint is not None:
        conditions.append("error_fingerprint = %(fingerprint)s")
    parameters = {
        "group": selection.group,
        "job_id": selection.job_id,
        "key": selection.key,
        "fingerprint": selection.fingerprint,
        "after": 0,
    }
    while page := find_jobs(connection, " AND ".join(conditions), parameters, _PAGE):
        yield from page
        parameters["after"] = page[-1].id


def plan(connection: Connection, processor: Processor, selection: Selection) -> Iterator[Planned]:
    """What a redrive would do, record by record, changing nothing."""
    planned: dict[Lane, int] = {}
    ledger = Ledger(connection, processor.group)
    for job in select(connection, selection):
        applied = ledger.versions(job.topic, [job.key]) if job.key is not None else {}
        current = max(applied.get(job.lane, 0), planned.get(job.lane, 0))
        expectation = _expect(processor, job, current)
        if expectation is Expectation.APPLY and job.version:
            # Those behind it in this plan are judged as if it had gone through.
            planned[job.lane] = job.version
        yield Planned(job, expectation)


def execute(connection: Connection, processor: Processor, planned: Planned, requested_by: str) -> bool:
    """Sends one dead letter back; False where somebody else did so first. Done twice it is done once."""
    jobs = Jobs(connection, processor.group, requested_by)
    with connection.transaction():
        due = jobs.redrive(planned.job, planned.expectation.value, requested_by)
        if due is None:
            return False
        message = letters.retry(processor, planned.job.record, planned.job.id, 0, due, 0)
        insert_messages(connection, [message])
        reach("redrive.requested")
    return True


def processor_of(app: App, group: str) -> Processor:
    """The processor whose group this is, by the group's name or its own.

    Raises:
        ConfigurationError: there is none.
    """
    by_group = {processor.group: processor for processor in app.processors.values()}
    return by_group[group] if group in by_group else app.processor(group)


def parse_key(text: str) -> bytes:
    if not text:
        raise ConfigurationError("an empty key selects nothing")
    return text.encode()


def _expect(processor: Processor, job: Job, current: int) -> Expectation:
    if processor.versions == "none" or not job.version:
        return Expectation.APPLY
    match standing_of(job.version, current, strict=processor.versions == "strict"):
        case Disposition.STALE:
            return Expectation.SUPERSEDED
        case Disposition.BEHIND:
            return Expectation.GAP
        case _:
            return Expectation.APPLY
