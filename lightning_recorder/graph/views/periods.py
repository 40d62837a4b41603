"""Periodic stretches in a sequence of numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence

__all__ = ["period_of", "repetitions"]

_SHORT = 8  # every period up to this length is tried
_LONGEST_TURN = 4  # the longest period that :func:`period_of` finds
_MOST = 3  # the maximum number of periods above _SHORT to try at a position


def repetitions(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the start, end and period of the periodic stretches.

    A stretch is at least two periods long and cannot be extended. All stretches with a period of at most eight are
    returned. Stretches with a longer period are returned if the period occurs at least three times. The run time is
    proportional to ``n log n``.

    Args:
        values: The sequence; only the equality of its elements matters.

    Example:
        >>> repetitions([7, 1, 2, 1, 2, 1, 2, 9])
        [(1, 7, 2)]
    """
    found: list[tuple[int, int, int]] = []
    for period in range(1, min(_SHORT, len(values) // 2) + 1):
        place = 0
        while place + period < len(values):
            end = _end(values, place, period)
            if end - place >= 2 * period:
                found.append((place, end, period))
            place = end - period + 1
    seen: dict[int, int] = {}
    for place, period in _candidates(values):
        # Stretches with the same period are found from left to right.
        if place < seen.get(period, 0):
            continue
        start = place
        while start and values[start - 1] == values[start - 1 + period]:
            start -= 1
        end = seen[period] = _end(values, place, period)
        if end - start >= 2 * period:
            found.append((start, end, period))
    return found


def period_of(values: Sequence[Hashable]) -> int:
    """Return the smallest period of a sequence, from 1 to 4; 1 if there is none.

    The sequence must have at least two periods, but the last value may be missing.

    Example:
        >>> period_of([0, 4, 0]), period_of([3, 3, 3]), period_of([0, 1, 2, 0])
        (2, 1, 1)
    """
    periods = range(1, min(_LONGEST_TURN, (len(values) + 1) // 2) + 1)
    return next((each for each in periods if values[each:] == values[:-each]), 1)


def _end(values: Sequence[int], start: int, period: int) -> int:
    """Return the end of the stretch that begins at ``start`` and has this period."""
    place = start
    while place + period < len(values) and values[place] == values[place + period]:
        place += 1
    return place + period


def _candidates(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield candidates for stretches as positions and periods above eight.

    At a candidate, a window of at least half the period recurs after one period.
    """
    ranks = list(values)
    size = 1
    while 2 * size < len(values):
        if size >= _SHORT:
            places: dict[int, list[int]] = {}
            for place, rank in enumerate(ranks):
                places.setdefault(rank, []).append(place)
            for place in range(0, len(ranks), size):
                same = places[ranks[place]]
                first = bisect_left(same, place + size + 1)
                for other in same[first : first + _MOST]:
                    if other - place <= 2 * size:
                        yield place, other - place
        # Windows of twice the size are equal if both of their halves are equal.
        numbers: dict[tuple[int, int], int] = {}
        ranks = [
            numbers.setdefault(pair, len(numbers))
            for pair in zip(ranks[: len(ranks) - size], ranks[size:], strict=True)
        ]
        size *= 2
