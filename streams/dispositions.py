"""The words in which processors and their store talk about records."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

Lane = tuple[str, bytes | None]
"""A topic and a key in it: what order is kept for."""

Partition = tuple[str, int]
"""A topic and a partition of it."""


class Disposition(StrEnum):
    """Every offset below the fence has exactly one; the names are columns of ``fencepost.fence``."""

    APPLIED = "applied"  # its effects are in the database
    STALE = "stale"  # its resource is at this version, or a later one, already
    DUPLICATE = "duplicate"  # the same event is applied, or waits, under another offset
    FILTERED = "filtered"  # the processor does not handle this kind
    RETRIED = "retried"  # failed for a passing reason; a job will try again
    BEHIND = "behind"  # waits for an earlier record of its lane
    DEAD = "dead"  # cannot succeed; a job holds it for redrive


@dataclass(frozen=True, slots=True)
class Known:
    """What the database says about the lanes of a batch.

    Attributes:
        versions: the version each lane has applied; absent means none.
        waiting: lanes with unfinished jobs, and which of the batch's versions are among them.
        seen: event ids in the inbox.
    """

    versions: dict[Lane, int] = field(default_factory=dict)
    waiting: dict[Lane, set[int]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)


def standing_of(version: int, current: int, *, strict: bool) -> Disposition | None:
    """How a version stands to the one that is applied: stale, behind a missing one, or None where it is next."""
    if version <= current:
        return Disposition.STALE
    if strict and version > current + 1:
        return Disposition.BEHIND
    return None
