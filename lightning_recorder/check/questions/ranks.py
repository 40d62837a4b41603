"""Compare the first batches and the parameters of several ranks.

Each rank should train on a part of the data of its own, from the same parameters. An iterable data set that does not
ask for its rank, and a loader without a sampler for ranks, give all of them the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from lightning_recorder.check.answer import Answer, NoAnswerError, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION", "RankStart", "compare"]

_SHARE = 0.9
_FEWEST = 8  # different samples; fewer may be equal on purpose


@dataclass(frozen=True)
class RankStart:
    """The state with which a rank begins."""

    place: int  # the number of the rank among those that should have different samples; equal for tensor-parallel ranks
    samples: tuple[int, ...]  # the fingerprints of the samples of its first batch; empty if they are not known
    parameters: dict[str, int]  # a checksum of each parameter by its name, without sharded ones


def compare(ranks: Sequence[RankStart]) -> Answer:
    """Return the answer for the beginnings of all ranks.

    Raises:
        NoAnswerError: If the samples are not known, or if all ranks should have the same.
    """
    known = [each.parameters for each in ranks]
    differing = [name for name, number in known[0].items() if any(each.get(name, number) != number for each in known)]
    if differing:
        more = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
        text = f"the {len(ranks)} ranks start with other values of {differing[0]}{more}"
        return Answer("wrong", text, module=differing[0])
    parts = {each.place: set(each.samples) for each in ranks}
    if len(parts) < 2:
        raise NoAnswerError("all ranks train on the same batches, as with tensor parallelism")
    if not all(parts.values()):
        raise NoAnswerError("the samples of the first batches are not known")
    shared = [len(one & other) / len(one) for one, other in permutations(parts.values(), 2)]
    numbers = {"share": max(shared), "ranks": float(len(parts))}
    if max(shared) < _SHARE:
        return Answer("ok", f"the first batches of {len(parts)} ranks have other samples", numbers)
    is_sure = max(map(len, parts.values())) >= _FEWEST
    text = f"{max(shared):.0%} of the samples in the first batch of a rank are also in that of another one"
    return Answer("wrong" if is_sure else "look", text, numbers)


def answer(bench: Bench) -> Answer:
    """Return no answer: with several processes, there is no bench, and :class:`~lightning_recorder.Check` compares."""
    raise NoAnswerError("the run has one process")


QUESTION = Question(
    "ranks",
    "Do the ranks load other samples?",
    "ranks that start with equal parameters and load different samples",
    answer,
    steps=0.0,
    needs_repetition=False,
)
