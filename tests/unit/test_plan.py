"""What becomes of each record: invariants 7, 8, 9 and 13 for one batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.app import Ordering, Processor, Versions
from streams.consume.dispatch import Apply, Decision, Fail, Filter, Item, Stop
from streams.consume.plan import Planner
from streams.dispositions import Disposition, Known, standing_of
from tests.unit.records import filtered, item, passing, permanent, processor, stop

APPLIED, STALE, DUPLICATE = Disposition.APPLIED, Disposition.STALE, Disposition.DUPLICATE
FILTERED, RETRIED, BEHIND, DEAD = (
    Disposition.FILTERED,
    Disposition.RETRIED,
    Disposition.BEHIND,
    Disposition.DEAD,
)
LANE = ("events.stock", b"k")
VERSIONS: list[Versions] = ["strict", "latest", "none"]
STRICT = processor()
LATEST = processor(versions="latest")
UNVERSIONED = processor(versions="none")
LOOSE = processor(versions="none", ordering="none")


def at(version: int, waiting: set[int] | None = None, seen: set[str] | None = None) -> Known:
    return Known({LANE: version} if version else {}, {LANE: waiting} if waiting else {}, seen or set())


def planned(of: Processor, known: Known, *items: Item) -> list[Disposition]:
    return [disposition for _, disposition in Planner(of, known).plan(items)]


@pytest.mark.parametrize("of", [STRICT, LATEST, UNVERSIONED, LOOSE])
def test_what_is_next_is_applied(of: Processor) -> None:
    assert planned(of, at(0), item(1), item(2), item(3)) == [APPLIED] * 3


@pytest.mark.parametrize("of", [STRICT, LATEST])
def test_what_is_not_newer_is_stale_whatever_the_handler_said(of: Processor) -> None:
    assert planned(of, at(5), item(4), item(5, permanent()), item(5, stop())) == [STALE] * 3


@pytest.mark.parametrize("of", [STRICT, LATEST])
def test_a_version_that_comes_twice_in_a_batch_applies_once(of: Processor) -> None:
    assert planned(of, at(0), item(1), item(1), item(2)) == [APPLIED, STALE, APPLIED]


def test_under_strict_what_comes_after_a_gap_waits() -> None:
    assert planned(STRICT, at(1), item(3), item(4), item(2)) == [BEHIND, BEHIND, APPLIED]


def test_under_strict_a_lane_that_is_not_known_begins_at_one() -> None:
    assert planned(STRICT, at(0), item(2)) == [BEHIND]


def test_under_latest_a_gap_is_no_matter() -> None:
    assert planned(LATEST, at(1), item(7), item(3), item(8)) == [APPLIED, STALE, APPLIED]


@pytest.mark.parametrize("of", [STRICT, LATEST])
def test_what_waits_already_is_a_duplicate(of: Processor) -> None:
    assert planned(of, at(1, waiting={2, 3}), item(2), item(3), item(4)) == [DUPLICATE, DUPLICATE, BEHIND]


@pytest.mark.parametrize("of", [STRICT, LATEST, UNVERSIONED])
def test_the_followers_of_a_failing_record_wait_and_other_keys_go_on(of: Processor) -> None:
    items = item(1, passing()), item(1, key=b"other"), item(2), item(2, key=b"other"), item(3)
    assert planned(of, at(0), *items) == [RETRIED, APPLIED, BEHIND, APPLIED, BEHIND]


@pytest.mark.parametrize("of", [STRICT, LATEST, UNVERSIONED])
def test_two_failing_keys_wait_each_for_itself(of: Processor) -> None:
    items = (item(n, passing() if n == 1 else None, key=key) for n in (1, 2) for key in (b"a", b"b", b"c"))
    changed = [one if one.record.key != b"c" else item(one.version, key=b"c") for one in items]
    assert planned(of, at(0), *changed) == [RETRIED, RETRIED, APPLIED, BEHIND, BEHIND, APPLIED]


@pytest.mark.parametrize("of", [STRICT, LATEST])
def test_a_failing_record_that_comes_again_is_a_duplicate(of: Processor) -> None:
    assert planned(of, at(0), item(1, passing()), item(1, passing())) == [RETRIED, DUPLICATE]


def test_a_follower_waits_even_if_its_handler_failed_for_good() -> None:
    assert planned(STRICT, at(0), item(1, passing()), item(2, permanent())) == [RETRIED, BEHIND]


def test_under_strict_the_followers_of_a_dead_letter_wait() -> None:
    assert planned(STRICT, at(0), item(1, permanent()), item(2), item(3)) == [DEAD, BEHIND, BEHIND]


def test_under_latest_the_followers_of_a_dead_letter_pass() -> None:
    assert planned(LATEST, at(0), item(1, permanent()), item(2), item(3)) == [DEAD, APPLIED, APPLIED]


@pytest.mark.parametrize("of", [UNVERSIONED, LOOSE])
def test_without_versions_the_followers_of_a_dead_letter_pass(of: Processor) -> None:
    assert planned(of, at(0), item(1, permanent()), item(2)) == [DEAD, APPLIED]


def test_without_order_nothing_waits() -> None:
    assert planned(LOOSE, at(0), item(1, passing()), item(2), item(3)) == [
        RETRIED,
        APPLIED,
        APPLIED,
    ]


def test_without_versions_a_lane_that_waits_takes_what_follows() -> None:
    assert planned(UNVERSIONED, at(0, waiting={0}), item(0, event_id="x")) == [BEHIND]


@pytest.mark.parametrize("of", [UNVERSIONED, LOOSE])
def test_without_versions_an_event_is_known_by_its_id(of: Processor) -> None:
    items = item(0, event_id="old"), item(0, event_id="new"), item(0, event_id="new")
    assert planned(of, at(0, seen={"old"}), *items) == [DUPLICATE, APPLIED, DUPLICATE]


@pytest.mark.parametrize("decision", [Apply([], []), filtered(), passing(), permanent()])
def test_without_versions_whatever_this_group_answers_for_enters_the_inbox(decision: Decision) -> None:
    planner = Planner(LOOSE, at(0, seen={"old"}))
    planner.plan([item(0, event_id="old"), item(0, decision, event_id="new")])
    assert planner.received == ["new"]


@pytest.mark.parametrize("of", [STRICT, LATEST])
def test_what_is_filtered_moves_the_version_too(of: Processor) -> None:
    planner = Planner(of, at(0))
    assert [d for _, d in planner.plan([item(1, filtered()), item(2)])] == [FILTERED, APPLIED]
    assert planner.advanced == {LANE: 2}


@pytest.mark.parametrize("of", [STRICT, LATEST])
@pytest.mark.parametrize("decision", [passing(), permanent(), stop()])
def test_what_does_not_pass_moves_no_version(of: Processor, decision: Decision) -> None:
    planner = Planner(of, at(0))
    planner.plan([item(1, decision)])
    assert planner.advanced == {}


@pytest.mark.parametrize("of", [STRICT, LATEST, UNVERSIONED, LOOSE])
def test_a_halt_leaves_out_the_rest_of_its_partition_only(of: Processor) -> None:
    items = (
        item(1, key=b"a", partition=0),
        item(1, stop(), key=b"b", partition=0),
        item(1, key=b"c", partition=0),
        item(1, key=b"d", partition=1),
    )
    planner = Planner(of, at(0))
    assert [i.record.key for i, _ in planner.plan(items)] == [b"a", b"d"]
    (halted,) = planner.halted.values()
    assert (halted.item, halted.reason, halted.retry) == (items[1], "a person must look", False)


def test_a_record_at_which_its_partition_halts_may_come_again() -> None:
    planner = Planner(LOOSE, at(0))
    planner.plan([item(0, event_id="before"), item(0, stop(), event_id="halted")])
    assert planner.received == ["before"]


@pytest.mark.parametrize("versions", VERSIONS)
def test_ordered_by_partition_a_passing_failure_is_tried_in_place(versions: Versions) -> None:
    of = processor(versions=versions, ordering="partition")
    items = item(1, key=b"a"), item(1, passing(), key=b"b"), item(1, key=b"c"), item(1, key=b"d", partition=1)
    planner = Planner(of, at(0))
    assert [i.record.key for i, _ in planner.plan(items)] == [b"a", b"d"]
    (halted,) = planner.halted.values()
    assert (halted.item, halted.reason, halted.retry) == (items[1], "it took too long", True)


def test_ordered_by_partition_a_permanent_failure_is_buried_and_others_go_on() -> None:
    of = processor(ordering="partition")
    assert planned(of, at(0), item(1, permanent(), key=b"a"), item(1, key=b"b")) == [DEAD, APPLIED]


@pytest.mark.parametrize("ordering", ["key", "partition"])
def test_with_one_attempt_a_passing_failure_is_final(ordering: Ordering) -> None:
    of = processor(ordering=ordering)
    assert planned(of, at(0), item(1, passing(), attempts_left=0)) == [DEAD]


@pytest.mark.parametrize(
    ("version", "strict", "standing"),
    [
        (5, True, STALE),
        (6, True, None),
        (7, True, BEHIND),
        (5, False, STALE),
        (6, False, None),
        (7, False, None),
    ],
)
def test_a_version_stands_to_the_one_applied(
    version: int, strict: bool, standing: Disposition | None
) -> None:
    assert standing_of(version, 5, strict=strict) is standing


def test_planning_leaves_what_is_known_as_it_was() -> None:
    known = at(1, waiting={3}, seen={"x"})
    planned(STRICT, known, item(2), item(4), item(5, passing()))
    planned(UNVERSIONED, known, item(0, event_id="y"))
    assert known == at(1, waiting={3}, seen={"x"})


decisions: st.SearchStrategy[Decision] = st.sampled_from(
    [Apply([], []), Apply([], []), Apply([], []), filtered(), passing(), permanent(), stop()]
)
items = st.builds(
    item,
    st.integers(1, 8),
    decisions,
    key=st.sampled_from([b"a", b"b"]),
    partition=st.integers(0, 1),
)
histories = st.fixed_dictionaries(
    {
        "versions": st.dictionaries(
            st.sampled_from([("events.stock", b"a"), ("events.stock", b"b")]), st.integers(1, 4)
        ),
        "waiting": st.dictionaries(
            st.sampled_from([("events.stock", b"a"), ("events.stock", b"b")]),
            st.sets(st.integers(1, 8), min_size=1),
        ),
    }
).map(lambda parts: Known(**parts))  # type: ignore[arg-type]


@given(histories, st.lists(items, max_size=40))
def test_under_strict_the_versions_applied_to_a_lane_are_consecutive(known: Known, batch: list[Item]) -> None:
    planner = Planner(STRICT, known)
    reached = dict(known.versions)
    for one, disposition in planner.plan(batch):
        lane = (one.record.topic, one.record.key)
        if disposition in (APPLIED, FILTERED):
            assert one.version == reached.get(lane, 0) + 1
            reached[lane] = one.version
    assert planner.advanced == {lane: v for lane, v in reached.items() if v != known.versions.get(lane)}


@given(histories, st.lists(items, max_size=40))
def test_under_latest_the_versions_applied_to_a_lane_rise_and_pass_nothing_that_waits(
    known: Known, batch: list[Item]
) -> None:
    reached, waiting = dict(known.versions), {lane: set(of) for lane, of in known.waiting.items()}
    for one, disposition in Planner(LATEST, known).plan(batch):
        lane = (one.record.topic, one.record.key)
        if disposition in (APPLIED, FILTERED):
            assert one.version > reached.get(lane, 0)
            assert not waiting.get(lane)
            reached[lane] = one.version
        elif disposition in (RETRIED, BEHIND):
            waiting.setdefault(lane, set()).add(one.version)


@given(st.sampled_from([STRICT, LATEST, UNVERSIONED, LOOSE]), histories, st.lists(items, max_size=40))
def test_every_record_before_a_halt_has_exactly_one_disposition(
    of: Processor, known: Known, batch: list[Item]
) -> None:
    planner = Planner(of, known)
    answered = [one for one, _ in planner.plan(batch)]
    assert answered == [one for one in batch if not _halted_before(planner, batch, one)]


def _halted_before(planner: Planner, batch: Sequence[Item], one: Item) -> bool:
    halted = planner.halted.get((one.record.topic, one.record.partition))
    places = [id(other) for other in batch]
    return halted is not None and places.index(id(one)) >= places.index(id(halted.item))


def test_the_dispositions_of_one_item_follow_from_its_decision() -> None:
    outcomes = {
        type(decision): planned(STRICT, at(0), item(1, decision))
        for decision in (Apply([], []), filtered(), passing(), stop())
    }
    assert outcomes == {Apply: [APPLIED], Filter: [FILTERED], Fail: [RETRIED], Stop: []}
