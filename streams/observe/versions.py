"""Which versions of many resources there are to be, and which were seen, in a few integers a resource.

A topic usually holds the versions of a resource without a hole, so one interval says it all. Only those that have holes
take more: an interval for each stretch.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Self

_SCATTERED = -1


class Sight(Enum):
    """What a version is to those that were seen before it."""

    NEW = "new"
    LATE = "late"  # new, and a later one of its resource came before it
    REPEATED = "repeated"
    UNEXPECTED = "unexpected"  # of another resource, or beyond the versions that are to be there


@dataclass(frozen=True, slots=True)
class Share:
    """The keys whose hash leaves the remainder ``index`` when divided by ``of``."""

    index: int = 0
    of: int = 1

    def holds(self, key: bytes) -> bool:
        return self.of == 1 or zlib.crc32(key) % self.of == self.index

    def halves(self) -> tuple[Share, Share]:
        return Share(self.index, self.of * 2), Share(self.index + self.of, self.of * 2)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Versions of one resource that follow one another, both ends inclusive."""

    key: bytes
    first: int
    last: int

    @property
    def events(self) -> int:
        return self.last - self.first + 1


class Intervals:
    """A set of integers as the ascending bounds of its intervals: where each begins, and where it has ended."""

    def __init__(self, begin: int, end: int) -> None:
        self.bounds = array("q", (begin, end))

    def add(self, number: int) -> bool:
        """Answers whether it is new."""
        bounds = self.bounds
        # How many bounds lie at it or below: an odd number of them means inside an interval.
        place = bisect_right(bounds, number)
        if place % 2:
            return False
        continues = place > 0 and bounds[place - 1] == number
        leads_on = place < len(bounds) and bounds[place] == number + 1
        if continues and leads_on:
            del bounds[place - 1 : place + 1]
        elif continues:
            bounds[place - 1] = number + 1
        elif leads_on:
            bounds[place] = number
        else:
            bounds[place:place] = array("q", (number, number + 1))
        return True

    def pairs(self) -> Iterator[tuple[int, int]]:
        bounds = iter(self.bounds)
        return zip(bounds, bounds, strict=True)


class Versions:
    """The versions of resources that are to be there, and those that were seen."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._first, self._last = array("q"), array("q")
        # The one interval that was seen, its end exclusive; both _SCATTERED where there are more of them.
        self._begin, self._end = array("q"), array("q")
        self._scattered: dict[int, Intervals] = {}
        self.expected = 0
        """How many versions are to be there."""

    def __len__(self) -> int:
        """How many resources there are."""
        return len(self._places)

    def expect(self, key: bytes, first: int, last: int) -> None:
        """These versions of a resource, both ends inclusive, are to be there."""
        self._places[key] = len(self._places)
        self._first.append(first)
        self._last.append(last)
        self._begin.append(0)
        self._end.append(0)
        self.expected += last - first + 1

    def only(self, share: Share) -> Self:
        """What is to be there of a share of the keys; nothing of it seen."""
        made = type(self)()
        for key, place in self._places.items():
            if share.holds(key):
                made.expect(key, self._first[place], self._last[place])
        return made

    def see(self, key: bytes, version: int) -> Sight:
        place = self._places.get(key)
        if place is None or not self._first[place] <= version <= self._last[place]:
            return Sight.UNEXPECTED
        begin, end = self._begin[place], self._end[place]
        if version == end:
            self._end[place] = version + 1
            return Sight.NEW
        if begin <= version < end:
            return Sight.REPEATED
        if end == 0:
            self._begin[place], self._end[place] = version, version + 1
            return Sight.NEW
        return self._see_apart(place, version)

    def gaps(self) -> Iterator[Stretch]:
        """The versions that were not seen, per resource in ascending order."""
        for key, place in self._places.items():
            after = self._first[place]
            for begin, end in self._seen(place):
                if begin > after:
                    yield Stretch(key, after, begin - 1)
                after = end
            if after <= self._last[place]:
                yield Stretch(key, after, self._last[place])

    def is_first(self, stretch: Stretch) -> bool:
        """Whether nothing that is to be there comes before these versions of their resource."""
        return stretch.first == self._first[self._places[stretch.key]]

    def _see_apart(self, place: int, version: int) -> Sight:
        seen = self._scattered.get(place)
        if seen is None:
            seen = self._scattered[place] = Intervals(self._begin[place], self._end[place])
            self._begin[place] = self._end[place] = _SCATTERED
        late = version < seen.bounds[-1]
        if not seen.add(version):
            return Sight.REPEATED
        if len(seen.bounds) == 2:  # noqa: PLR2004 - one interval
            self._begin[place], self._end[place] = seen.bounds
            del self._scattered[place]
        return Sight.LATE if late else Sight.NEW

    def _seen(self, place: int) -> Iterator[tuple[int, int]]:
        seen = self._scattered.get(place)
        if seen is not None:
            yield from seen.pairs()
        elif self._end[place]:
            yield self._begin[place], self._end[place]
