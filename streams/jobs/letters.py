"""The records that travel for a job: to a retry topic, or to the dead-letter topic. The original goes byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from streams.app import Processor
from streams.errors import Failure
from streams.event import FP_ATTEMPT, FP_DUE, FP_ERROR, FP_JOB, Headers, Record
from streams.stores.outbox import OutboxMessage

_ERROR_LENGTH = 1_000


@dataclass(frozen=True, slots=True)
class WakeUp:
    """What a retry record says: run this job, if it still waits after this attempt. ``due`` in milliseconds."""

    job_id: int
    attempt: int
    due: int


def retry(
    processor: Processor, record: Record, job_id: int, attempt: int, due: int, delay_seconds: float
) -> OutboxMessage:
    headers = (
        *record.headers,
        (FP_JOB, b"%d" % job_id),
        (FP_ATTEMPT, b"%d" % attempt),
        (FP_DUE, b"%d" % due),
    )
    return OutboxMessage(processor.retry_topic(delay_seconds), record.key, record.value, headers)


def dead(processor: Processor, record: Record, job_id: int, attempts: int, failure: Failure) -> OutboxMessage:
    error = {
        "job": job_id,
        "group": processor.group,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "attempts": attempts,
        "class": failure.error_class,
        "message": failure.message[:_ERROR_LENGTH],
        "fingerprint": failure.fingerprint,
    }
    headers: Headers = (*record.headers, (FP_ERROR, orjson.dumps(error)))
    return OutboxMessage(processor.dead_letter_topic, record.key, record.value, headers)


def wake_up(record: Record) -> WakeUp | None:
    """What a retry record asks for; None where it is none of ours."""
    values = [record.header(name) for name in (FP_JOB, FP_ATTEMPT, FP_DUE)]
    try:
        job_id, attempt, due = (int(value or b"") for value in values)
    except ValueError:
        return None
    return WakeUp(job_id, attempt, due)
