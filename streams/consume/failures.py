"""Exceptions as data: what a failure is called, whether it may pass, and what it is grouped by."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from streams.errors import Failure, Permanent, SchemaError, Transient
from streams.stores.postgres import may_pass

_MESSAGE_LENGTH = 2_000
# What differs between two failures of one kind: numbers, ids, quoted values.
_PARTICULARS = re.compile(r"""0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|'[^']*'|"[^"]*"|\d+""")


def failure_of(error: BaseException) -> Failure:
    """An exception as data, with a fingerprint that is the same for all failures of its kind."""
    kind = type(error).__name__
    message = _words(error)
    first_line = message.splitlines()[0] if message else ""
    shape = _PARTICULARS.sub("_", first_line)
    return Failure(
        error_class=kind,
        message=message,
        fingerprint=hashlib.sha256(f"{kind}:{shape}".encode()).hexdigest()[:12],
        permanent=isinstance(error, Permanent | SchemaError),
        delay_seconds=error.delay_seconds if isinstance(error, Transient) else None,
    )


def refusal(error: BaseException) -> Failure:
    """What the database said of one record's effects, as a failure."""
    return replace(failure_of(error), permanent=not may_pass(error))


def _words(error: BaseException) -> str:
    """What an exception says, bounded, and without what neither JSON nor PostgreSQL can hold."""
    try:
        words = str(error)
    except Exception as broken:  # noqa: BLE001 - an exception of the user's, whose __str__ is the user's too
        words = f"(its message cannot be made: {type(broken).__name__})"
    return words.strip()[:_MESSAGE_LENGTH].replace("\x00", "\\0").encode(errors="backslashreplace").decode()
