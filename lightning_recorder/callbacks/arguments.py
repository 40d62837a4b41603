"""Validation of the arguments of the callbacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_recorder.errors import ArgumentError, check_integer, did_you_mean
from lightning_recorder.reductions import DeadChannels, HigherMoments, Norms, Reduction
from lightning_recorder.reductions.user import UserReduction, as_reductions
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics import SHOWN_STATISTICS

__all__ = [
    "check_compiled",
    "check_name",
    "checked_histograms",
    "checked_reductions",
    "checked_sinks",
    "checked_statistics",
    "in_words",
]

_LONGEST_NAME = 200  # bytes; a file name may have 255 bytes, including a checkpoint name as its prefix

_STATISTIC_SYNONYMS = {
    "sd": "std", "stddev": "std", "variance": "std", "var": "std", "average": "mean", "avg": "mean", "sparsity":
    "zero_fraction", "maximum": "max", "minimum": "min", "nans": "nan_count", "infs": "inf_count",
    "median": "quantile_0.5",
}  # fmt: skip


def checked_statistics(given: str | Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the statistics to show, and the quantiles among them as fractions.

    Raises:
        ArgumentError: If a name is not a statistic that can be shown.
    """
    names = (given,) if isinstance(given, str) else _listed("statistics", given)
    found = [(name, _quantile(name)) for name in names]
    unknown = [name for name, share in found if share is None and name not in SHOWN_STATISTICS]
    if unknown:
        known, got = ", ".join(SHOWN_STATISTICS), ", ".join(map(repr, unknown))
        raise ArgumentError(
            f"statistics must be one or more of {known}, quantile_<q>; got {got}{_where_it_is(unknown[0])}"
        )
    shares = dict.fromkeys(share for _, share in found if share is not None)
    return tuple(name for name, share in found if share is None), tuple(shares)


def _quantile(name: object) -> float | None:
    """Return the fraction of a name such as ``"quantile_0.99"``, or ``None`` if it is no quantile."""
    number = re.fullmatch(r"quantile_(\d*\.?\d+(?:e-\d+)?)", name) if isinstance(name, str) else None
    share = None if number is None else float(number[1])
    if share is not None and share > 1:
        hint = f": write 'quantile_{share / 100:g}'" if share <= 100 else ""
        raise ArgumentError(f"statistics takes quantiles between 0 and 1, got {name!r}{hint}")
    return share


def _where_it_is(name: object) -> str:
    """Return the end of an error message: a hint on how to get a statistic that ``statistics`` does not accept."""
    if name == "histogram":
        return ": outputs=Outputs(histograms=True) or False chooses those"
    if isinstance(name, str) and name.startswith(("quantile", "percentile")):
        return ": 'quantile_0.99' shows the value below which 99 % of the values are"
    meant = did_you_mean(name, (*SHOWN_STATISTICS, "quantile_0.5"), _STATISTIC_SYNONYMS)
    extra = next((each.__name__ for each in (DeadChannels, HigherMoments, Norms) if name in each.statistics), "")
    if extra:
        return f": extra=[{extra}()] shows it, without naming it in statistics"
    return meant or "; extra=[…] shows the statistics of further reductions"


def checked_histograms(given: object) -> tuple[bool, int | None]:
    """Return True if histograms are shown, and the maximum number of values that they count per tensor, if limited.

    Raises:
        ArgumentError: If the argument is neither a bool nor a positive integer.
    """
    if isinstance(given, bool):
        return given, None
    if not isinstance(given, int):
        raise ArgumentError(f"histograms must be True, False or the number of values to count, got {given!r}")
    check_integer("histograms", given, 1)
    return True, given


def checked_reductions(given: object) -> tuple[Reduction | UserReduction, ...]:
    """Return the extra reductions as a tuple.

    Raises:
        ArgumentError: If an item is neither a reduction nor a metric nor a function of two arguments.
    """
    return tuple(as_reductions(given))


def check_compiled(value: object, allowed: Sequence[str]) -> None:
    """Raise ArgumentError if the value is not a valid ``compiled`` argument."""
    if value not in allowed:
        *first, last = map(repr, allowed)
        raise ArgumentError(f"compiled must be {', '.join(first)} or {last}, got {value!r}")


def check_name(name: object) -> None:
    """Raise ArgumentError if the name of a callback cannot be part of a file name."""
    if not isinstance(name, str):
        raise ArgumentError(f"name must be a string, got {name!r}")
    if name and (Path(name).name != name or "\\" in name):
        raise ArgumentError(f"name must be a file name without a folder, got {name!r}")
    if "\0" in name or "\ufffd" in (text := name.encode("utf-8", "surrogatepass").decode("utf-8", "replace")):
        raise ArgumentError(f"name must be a file name without invalid characters, got {name!r}")
    if len(text.encode()) > _LONGEST_NAME:
        raise ArgumentError(f"name must be a file name of at most {_LONGEST_NAME} bytes, got {name!r:.80}")


def checked_sinks(given: object) -> list[Sink]:
    """Return the sinks as a list. Raise ArgumentError if they are not a list of instances of :class:`Sink`."""
    if isinstance(given, Sink):
        raise ArgumentError(f"sinks takes a list of sinks, got a single one: write sinks=[{type(given).__name__}(…)]")
    if not isinstance(given, Iterable):
        raise ArgumentError(f"sinks takes a list of sinks, got {given!r}")
    found = []
    for sink in given:
        if not isinstance(sink, Sink):
            called = f"the class {sink.__name__}: write {sink.__name__}()" if isinstance(sink, type) else repr(sink)
            raise ArgumentError(f"sinks takes Sink instances, got {called}")
        found.append(sink)
    return found


def in_words(value: object) -> object:
    """Return a setting in a form that compares equal in all processes."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, list)):
        return [in_words(each) for each in value]
    return value


def _listed(name: str, given: object) -> tuple[Any, ...]:
    """Return an argument as a tuple, so that an iterator is not exhausted after the first fit."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ArgumentError(f"{name} takes a list, got {given!r}")
    return tuple(given)
