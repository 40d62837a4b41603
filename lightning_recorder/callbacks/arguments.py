"""Validation of the arguments of the callbacks, and unique names for their files and tags."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_recorder.errors import ArgumentError, check_integer, did_you_mean
from lightning_recorder.reductions import DeadChannels, HigherMoments, Norms, Reduction
from lightning_recorder.reductions.user import UserReduction, as_reductions
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics import SHOWN_STATISTICS

if TYPE_CHECKING:
    from lightning_recorder.callbacks.base import RecorderCallback
    from lightning_recorder.callbacks.statistics import StatisticsCallback

__all__ = [
    "check_compiled",
    "check_name",
    "check_names",
    "check_tags",
    "checked_histograms",
    "checked_reductions",
    "checked_sinks",
    "checked_statistics",
    "in_words",
    "labels",
]

_LONGEST_NAME = 200  # bytes; a file name may have 255, including the name of a checkpoint as its prefix

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
    """Return whether histograms are shown, and the number of values of a tensor that they count, if it is limited.

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
        ArgumentError: If one of them is no reduction, no metric and no function of two arguments.
    """
    return tuple(as_reductions(given))


def check_compiled(value: object, allowed: Sequence[str]) -> None:
    """Raise if the value is not a valid ``compiled`` argument.

    Args:
        value: The value.
        allowed: The values that the callback supports.

    Raises:
        ArgumentError: Names the allowed values.
    """
    if value not in allowed:
        *first, last = map(repr, allowed)
        raise ArgumentError(f"compiled must be {', '.join(first)} or {last}, got {value!r}")


def check_name(name: object) -> None:
    """Raise if the name of a callback cannot be part of a file name.

    Raises:
        ArgumentError: Says what a name must be.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"name must be a string, got {name!r}")
    if name and (Path(name).name != name or "\\" in name):
        raise ArgumentError(f"name must be a file name without a folder, got {name!r}")
    if "\0" in name or "\ufffd" in (text := name.encode("utf-8", "surrogatepass").decode("utf-8", "replace")):
        raise ArgumentError(f"name must be a file name without invalid characters, got {name!r}")
    if len(text.encode()) > _LONGEST_NAME:
        raise ArgumentError(f"name must be a file name of at most {_LONGEST_NAME} bytes, got {name!r:.80}")


def checked_sinks(given: object) -> list[Sink]:
    """Return the sinks as a list.

    Raises:
        ArgumentError: If they are not a list of instances of :class:`Sink`.
    """
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
    """Return a setting in a form that is equal in every process."""
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


# Tags of evaluations, overflows and pictures begin with the name of the recorder and one of these suffixes.
_SUFFIXES = ("_validate", "_test", "_predict", "_overflow", "_plots", "_grad", "_grad_plots")


def labels(group: str, names: Sequence[str], resumed: Sequence[str] = ()) -> list[str]:
    """Return a unique label for each recorder of a group.

    Args:
        group: The kind of recording.
        names: The names of the recorders in the order of the trainer's callbacks; empty for a recorder without a name.
        resumed: The labels that recorders without a name had in the resumed run; empty if unknown.

    Example:
        >>> labels("activations", ["", "slow", "", "2", ""])
        ['activations', 'activations-slow', 'activations-3', 'activations-2', 'activations-4']
        >>> labels("activations", ["", ""], ["", "activations"])
        ['activations-2', 'activations']
    """
    found = [f"{group}-{name}" if name else "" for name in names]
    taken = {_normalized(label) for label in found if label}
    for place, label in enumerate(resumed):
        if label and not found[place] and _normalized(label) not in taken:
            found[place] = label
            taken.add(_normalized(label))
    number = 1
    for place, label in enumerate(found):
        if label:
            continue
        while _normalized(free := group if number == 1 else f"{group}-{number}") in taken:
            number += 1
        found[place] = free
        taken.add(_normalized(free))
    return found


def check_names(recorder: RecorderCallback, recorders: Sequence[RecorderCallback]) -> None:
    """Check that the name of a recorder does not make it share files or tags with another recorder of the trainer.

    Args:
        recorder: The recorder to compare with the others.
        recorders: All recorders of the trainer.

    Raises:
        ArgumentError: If two recorders would share files or tags. The message says how to fix it.
    """
    if sum(each is recorder for each in recorders) > 1:
        raise ArgumentError(f"callbacks contains the same {recorder} twice: remove one of them")
    for other in recorders:
        if other is not recorder and other.group == recorder.group:
            _check_pair(recorder, other)


def _check_pair(one: RecorderCallback, other: RecorderCallback) -> None:
    kind = type(one).__name__
    if not one.name and not other.name:
        if type(one) is type(other) and one._keeps_state and one.state_key == other.state_key:
            raise ArgumentError(
                f"callbacks contains two equal {kind}: give one of them a name, as {kind}(name='second')"
            )
        return
    if one.name == other.name:
        raise ArgumentError(f"two {kind} have the name {one.name!r}: give each of them its own name=")
    if _normalized(one.name) == _normalized(other.name):
        raise ArgumentError(
            f"two {kind} have the names {one.name!r} and {other.name!r}, which are the same on some file systems: give "
            "each of them a name= of its own"
        )
    first, second = sorted((one.name, other.name), key=len)
    if first and any(_normalized(first + suffix) == _normalized(second) for suffix in _SUFFIXES):
        raise ArgumentError(
            f"two {kind} have the names {first!r} and {second!r}, and tags of {first!r} begin with {second!r} as well: "
            "give one of them another name="
        )


def check_tags(recorder: StatisticsCallback, alike: Sequence[StatisticsCallback], modules: Collection[str]) -> None:
    """Check that no earlier recorder of the same name writes the same tags.

    Args:
        recorder: The recorder to compare with the others.
        alike: The recorders of its group, in the order of the trainer's callbacks.
        modules: The names of the modules that it records.

    Raises:
        ArgumentError: If both record the same module and neither has a name.
    """
    for other in alike:
        if other is recorder:
            return
        shared = [name for name in modules if name in other.recorded_modules]
        if shared and other.name == recorder.name and recorder._tag_kinds & other._tag_kinds:
            kind = type(recorder).__name__
            more = f" and {len(shared) - 1} more modules" if shared[1:] else ""
            raise ArgumentError(
                f"two {kind} without a name record {shared[0]!r}{more} under the same tags: give one of them a name, "
                f"as {kind}(name='second'), or select other modules"
            )


def _normalized(name: str) -> str:
    """Return a normalized name, equal for names that some file systems do not distinguish."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).rstrip(" .")
