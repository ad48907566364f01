"""Intervals keep what sets would: which versions were seen, in which order, and which were not."""

from __future__ import annotations

import itertools
import sys

from hypothesis import given
from hypothesis import strategies as st

from streams.observe.versions import Intervals, Share, Sight, Stretch, Versions

KEYS = [b"a", b"b", b"c"]
EXPECTED = st.dictionaries(
    st.sampled_from(KEYS),
    st.integers(1, 6).flatmap(lambda first: st.tuples(st.just(first), st.integers(first, first + 8))),
)
SEEN = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 16)), max_size=60)


def made(expected: dict[bytes, tuple[int, int]]) -> Versions:
    versions = Versions()
    for key, (first, last) in expected.items():
        versions.expect(key, first, last)
    return versions


@given(EXPECTED, SEEN)
def test_versions_are_told_apart_as_sets_would(
    expected: dict[bytes, tuple[int, int]], seen: list[tuple[bytes, int]]
) -> None:
    versions = made(expected)
    model: dict[bytes, set[int]] = {key: set() for key in expected}
    for key, version in seen:
        first, last = expected.get(key, (0, -1))
        if not first <= version <= last:
            wanted = Sight.UNEXPECTED
        elif version in model[key]:
            wanted = Sight.REPEATED
        else:
            wanted = Sight.LATE if any(version < other for other in model[key]) else Sight.NEW
            model[key].add(version)
        assert versions.see(key, version) is wanted
    missing = {(key, v) for key, (first, last) in expected.items() for v in range(first, last + 1)}
    missing -= {(key, version) for key, found in model.items() for version in found}
    gaps = list(versions.gaps())
    assert [(gap.key, v) for gap in gaps for v in range(gap.first, gap.last + 1)] == sorted(
        missing, key=lambda each: (list(expected).index(each[0]), each[1])
    )
    assert sum(gap.events for gap in gaps) == len(missing)
    assert {gap.key for gap in gaps if versions.is_first(gap)} == {
        key for key, (first, _) in expected.items() if (key, first) in missing
    }
    assert versions.expected == sum(last - first + 1 for first, last in expected.values())


@given(st.sets(st.integers(0, 40), min_size=1), st.randoms(use_true_random=False))
def test_intervals_meet_whatever_the_order(numbers: set[int], random: object) -> None:
    order = sorted(numbers)
    random.shuffle(order)  # type: ignore[attr-defined]
    intervals = Intervals(order[0], order[0] + 1)
    assert [intervals.add(number) for number in order[1:]] == [True] * (len(order) - 1)
    assert not any(intervals.add(number) for number in order)
    pairs = list(intervals.pairs())
    assert [number for begin, end in pairs for number in range(begin, end)] == sorted(numbers)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(pairs)), "none touches the next"


def test_holes_that_are_filled_leave_nothing_behind() -> None:
    versions = made({b"a": (1, 1_000)})
    for version in (*range(2, 1_001, 2), *range(999, 0, -2)):
        versions.see(b"a", version)
    assert list(versions.gaps()) == []
    assert not versions._scattered


@given(st.lists(st.binary(max_size=8), unique=True), st.integers(0, 5))
def test_every_key_is_in_one_share(keys: list[bytes], splits: int) -> None:
    shares = [Share()]
    for _ in range(splits):
        head, *rest = shares
        shares = [*rest, *head.halves()]
    for key in keys:
        assert sum(share.holds(key) for share in shares) == 1


def test_a_share_of_the_resources_is_expected_without_the_others() -> None:
    keys = [b"%d" % number for number in range(100)]
    versions = made(dict.fromkeys(keys, (2, 5)))
    left, right = (versions.only(half) for half in Share().halves())
    assert len(left) + len(right) == 100
    assert 20 < len(left) < 80
    assert left.expected == 4 * len(left)
    (first, *_) = left.gaps()
    assert first == Stretch(next(key for key in keys if Share(0, 2).holds(key)), 2, 5)


def test_a_resource_takes_a_few_integers_however_many_versions_it_has() -> None:
    def size(versions: Versions) -> int:
        arrays = (versions._first, versions._last, versions._begin, versions._end)
        return sum(map(sys.getsizeof, arrays)) + sys.getsizeof(versions._scattered)

    few, many = made({b"a": (1, 10)}), made({b"a": (1, 100_000)})
    for version in range(1, 100_001):
        many.see(b"a", version)
    assert size(few) == size(many)
