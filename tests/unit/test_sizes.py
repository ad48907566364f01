"""A record that no topic would take is refused where it is made, since in the log it would stop the relay for all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import schemas
from streams import Effects, Permanent, RecordTooLarge, append, publish
from streams.event import MAX_RECORD_BYTES, require_size
from streams.testing import MemoryStore

HUGE = b"\x00" * MAX_RECORD_BYTES


def test_the_limit_itself_is_taken() -> None:
    require_size("t", b"k", HUGE[: MAX_RECORD_BYTES - 6], [("name", b"v")])


def test_key_value_and_headers_are_added_and_named() -> None:
    with pytest.raises(
        RecordTooLarge, match=r"15,728,641 bytes \(key 1, value 15,728,634, headers 6\)"
    ) as caught:
        require_size("t", b"k", HUGE[:-6], [("näme", b"v"), ("", None)])
    assert caught.value.size == MAX_RECORD_BYTES + 1
    assert isinstance(caught.value, Permanent)


def test_the_limit_leaves_room_below_what_topics_take() -> None:
    from streams.topics import _MAX_BYTES  # noqa: PLC0415

    assert _MAX_BYTES - MAX_RECORD_BYTES >= 1024 * 1024


def into_the_store() -> None:
    event = schemas.CustomerChanged("x" * MAX_RECORD_BYTES, "", "")
    append(MemoryStore().connect(), "customer", "c1", [event], 0)


def into_the_outbox() -> None:
    publish(MemoryStore().connect(), "t", "key", HUGE)


def as_an_effect() -> None:
    Effects().publish("t", HUGE, key="key")


@pytest.mark.parametrize("write", [into_the_store, into_the_outbox, as_an_effect])
def test_it_is_refused_at_its_source(write: Callable[[], None]) -> None:
    with pytest.raises(RecordTooLarge, match="put the content elsewhere"):
        write()
