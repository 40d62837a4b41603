"""The arguments of the recorders of statistics, checked and in the form in which they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.recorders import SHOWN_STATISTICS
from lightning_recorder.reductions import Reduction

__all__ = ["checked_statistics", "in_words", "recorder_options"]


def checked_statistics(given: str | Sequence[str]) -> tuple[str, ...]:
    """The scalars that are to be shown, if there are such."""
    names = (given,) if isinstance(given, str) else _listed("statistics", given)
    unknown = [name for name in names if name not in SHOWN_STATISTICS]
    if unknown:
        hint = "; histograms are chosen by histograms=True or False" if "histogram" in unknown else ""
        hint = hint or "; further ones are given by extra=[…]"
        known, got = ", ".join(SHOWN_STATISTICS), ", ".join(map(repr, unknown))
        raise ArgumentError(f"statistics knows {known}; got {got}{hint}")
    return names


def recorder_options(extra: object, quantiles: object, sample: int | None, strict: bool) -> dict[str, Any]:
    """What a recorder is made with."""
    if sample is not None:
        check_integer("histogram_sample", sample, 1)
    return {
        "extra": (extra,) if isinstance(extra, Reduction) else _reductions(_listed("extra", extra)),
        "quantiles": _listed("quantiles", quantiles),
        "sample": sample,
        "strict": strict,
    }


def in_words(value: object) -> object:
    """A setting in a form that is the same in every process."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, list)):
        return [in_words(each) for each in value]
    return value


def _reductions(given: tuple[Any, ...]) -> tuple[Reduction, ...]:
    """The further reductions, if they are that."""
    for each in given:
        if not isinstance(each, Reduction):
            called = f"the class {each.__name__}: write {each.__name__}()" if isinstance(each, type) else repr(each)
            raise ArgumentError(f"extra takes reductions, which are instances of Reduction, got {called}")
    return given


def _listed(name: str, given: object) -> tuple[Any, ...]:
    """What was given as a tuple, so that each fit finds all of it, also where it can be gone through only once."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ArgumentError(f"{name} takes a list, got {given!r}")
    return tuple(given)
