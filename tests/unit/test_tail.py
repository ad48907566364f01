"""How the ends of topics are read, and which records are left out because of what stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest

from streams.event import FP_POSITION, Record
from streams.observe import metrics
from streams.relay import tail
from streams.relay.pgoutput import position_text
from streams.relay.rows import Produced
from streams.relay.tail import Tail
from streams.settings import Settings

Place = tuple[str, int]
PLACE: Place = ("t", 0)


class Log:
    """A topic of one partition, in place of the broker."""

    def __init__(self, records: Mapping[int, Record], begin: int, end: int) -> None:
        self.records, self.begin, self.end = records, begin, end
        self.stretches: list[tuple[int, int]] = []

    def end_offsets(self, *_: object) -> dict[Place, int]:
        return {PLACE: self.end}

    def begin_offsets(self, *_: object) -> dict[Place, int]:
        return {PLACE: self.begin}

    def read(
        self, _: object, begin: dict[Place, int], end: dict[Place, int], while_reading: Callable[[], None]
    ) -> Iterator[Record]:
        self.stretches.append((begin[PLACE], end[PLACE]))
        while_reading()
        return (record for at, record in sorted(self.records.items()) if begin[PLACE] <= at < end[PLACE])


def ours(offset: int, position: int, key: bytes = b"k") -> Record:
    header = (FP_POSITION, position_text(position).encode() + b"/1")
    return Record("t", 0, offset, key, b"%d" % position, (header,))


def produced(position: int, key: bytes | None = b"k") -> Produced:
    header = (FP_POSITION, position_text(position).encode() + b"/1")
    return "t", key, b"%d" % position, [header]


def tail_of(
    monkeypatch: pytest.MonkeyPatch,
    records: list[Record],
    *,
    begin: int = 0,
    end: int | None = None,
    while_reading: Callable[[], None] = lambda: None,
) -> tuple[Tail, Log]:
    log = Log({record.offset: record for record in records}, begin, len(records) if end is None else end)
    monkeypatch.setattr(
        tail,
        "kafka",
        SimpleNamespace(end_offsets=log.end_offsets, begin_offsets=log.begin_offsets, read=log.read),
    )
    return Tail(Settings.load(), 100, while_reading), log


def test_a_record_that_is_there_need_not_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = tail_of(monkeypatch, [ours(0, 50), ours(1, 150)])
    found.read("t")
    assert found.horizon == 150
    assert found.need_not_send(produced(150))
    assert not found.need_not_send(produced(160))


def test_once_a_record_of_a_key_was_sent_the_later_ones_of_the_key_are_sent_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker refused the one at 150 and took the one at 160."""
    found, _ = tail_of(monkeypatch, [ours(0, 50), ours(1, 160), ours(2, 170, b"other")])
    found.read("t")
    assert not found.need_not_send(produced(150))
    assert not found.need_not_send(produced(160))
    assert found.need_not_send(produced(170, b"other"))


def test_stretches_follow_each_other_and_end_at_what_is_certainly_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, log = tail_of(monkeypatch, [ours(70_000, 50), ours(99_999, 150)], end=100_000)
    found.read("t")
    assert log.stretches == [(98_000, 100_000), (82_000, 98_000), (0, 82_000)]
    assert found.need_not_send(produced(150))


def test_a_stretch_that_begins_with_a_confirmed_record_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    found, log = tail_of(monkeypatch, [ours(98_000, 50), ours(99_999, 150)], end=100_000)
    found.read("t")
    assert log.stretches == [(98_000, 100_000)]


def test_a_topic_of_other_producers_is_searched_to_a_limit_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = metrics.RELAY_TAILS_CUT._value.get()
    found, log = tail_of(monkeypatch, [], end=5_000_000)
    found.read("t")
    assert log.stretches[0][1] == 5_000_000
    assert log.stretches[-1][0] == 4_000_000
    assert all(
        later[1] == earlier[0] for earlier, later in zip(log.stretches, log.stretches[1:], strict=False)
    )
    assert "the last 1,000,000 records of t/0 hold none that is certainly confirmed" in caplog.text
    assert metrics.RELAY_TAILS_CUT._value.get() == before + 1


def test_a_topic_that_is_read_whole_is_no_limit_met(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, log = tail_of(monkeypatch, [ours(999_999, 150)], end=1_000_000)
    found.read("t")
    assert log.stretches[-1][0] == 0
    assert not caplog.text


def test_what_the_callback_raises_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stopped() -> None:
        raise Stopped

    found, _ = tail_of(monkeypatch, [ours(0, 150)], while_reading=stopped)
    with pytest.raises(Stopped):
        found.read("t")
