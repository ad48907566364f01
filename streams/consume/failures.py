"""Exceptions as data: what a failure is called, whether it may pass, and what it is grouped by."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from streams.errors import Failure, Permanent, SchemaError, Transient
from streams.stores.postgres import describe

_MESSAGE_LENGTH = 2_000
# What differs between two failures of one kind: numbers, ids, quoted values.
_PARTICULARS = re.compile(r"""[0-9a-f]{8}-[0-9a-f-]{27}|'[^']*'|"[^"]*"|\d+""")


def failure_of(error: BaseException) -> Failure:
    """An exception as data, with a fingerprint that is the same for all failures of its kind."""
    kind = type(error).__name__
    message = f"{error}"[:_MESSAGE_LENGTH].replace("\x00", "\\0")
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
    kind, words, permanent = describe(error)
    return replace(failure_of(error), error_class=kind, message=words[:_MESSAGE_LENGTH], permanent=permanent)
