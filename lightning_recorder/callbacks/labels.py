"""Unique labels of recorders, so that no two recorders share files or tags."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

from lightning_recorder.errors import ArgumentError

__all__ = ["Labelled", "Tagged", "check_names", "check_tags", "labels"]


class Labelled(Protocol):
    """The attributes of a recorder that the checks read."""

    group: ClassVar[str]
    name: str
    _keeps_state: ClassVar[bool]

    @property
    def state_key(self) -> str:
        """The key of the recorder's state in a checkpoint."""


class Tagged(Protocol):
    """The attributes of a recorder of statistics that the check of tags reads."""

    name: str

    @property
    def _tag_kinds(self) -> set[str]:
        """The kinds of tags that the recorder writes."""

    @property
    def recorded_modules(self) -> Collection[str]:
        """The names of the recorded modules."""


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


def check_names(recorder: Labelled, recorders: Sequence[Labelled]) -> None:
    """Check that the name of a recorder does not make it share files or tags with another recorder of the trainer.

    Raises:
        ArgumentError: If two recorders would share files or tags. The message says how to fix it.
    """
    if sum(each is recorder for each in recorders) > 1:
        raise ArgumentError(f"callbacks contains the same {recorder} twice: remove one of them")
    for other in recorders:
        if other is not recorder and other.group == recorder.group:
            _check_pair(recorder, other)


def _check_pair(one: Labelled, other: Labelled) -> None:
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


def check_tags(recorder: Tagged, alike: Sequence[Tagged], modules: Collection[str]) -> None:
    """Check that no earlier recorder of the same name writes the same tags.

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
