"""Cases of a test with several parameters, chosen instead of all combinations."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

__all__ = ["covering", "pairs", "pairwise"]

T = TypeVar("T")


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of the values of all factors, in which each two values of two factors occur together.

    Most faults need a certain value of one or two parameters, few need those of three [1]_.

    .. [1] Kuhn, Wallace and Gallo, Software Fault Interactions and Implications for Software Testing, 2004.
    """
    places = list(product(*(range(len(factor)) for factor in factors)))
    chosen = covering(places, [pairs(each) for each in places])
    return [tuple(factor[at] for factor, at in zip(factors, each, strict=True)) for each in chosen]


def pairs(values: Sequence[Hashable]) -> set[Hashable]:
    """Return each two values of a case, with their places."""
    return set(combinations(enumerate(values), 2))


def covering(cases: Sequence[T], covered: Sequence[Collection[Hashable]]) -> list[T]:
    """Return few of the cases, in their order, which together cover all that any case does."""
    missing = set().union(*covered)
    chosen = set()
    # Cases that cover most of what is still missing come first.
    for new in range(max(map(len, covered), default=0), 0, -1):
        for place, each in enumerate(covered):
            if len(missing.intersection(each)) >= new:
                chosen.add(place)
                missing.difference_update(each)
    return [case for place, case in enumerate(cases) if place in chosen]
