"""Compare the first batches and the parameters of several ranks.

Each rank should train on its own part of the data and start from the same parameters. An iterable data set that does
not use its rank, or a loader without a distributed sampler, yields the same samples on all ranks.
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
_FEWEST = 8  # the minimum number of different samples; fewer samples may be equal on purpose


@dataclass(frozen=True)
class RankStart:
    """The first batch and the initial parameters of a rank."""

    place: int  # the index among ranks that should have different samples; equal for ranks of a tensor-parallel group
    samples: tuple[int, ...]  # the fingerprints of the samples in the first batch; empty if they are not known
    parameters: dict[str, int]  # by name, a checksum of each parameter that is not sharded


def compare(ranks: Sequence[RankStart]) -> Answer:
    """Compare the starts of all ranks and return the answer.

    Raises:
        NoAnswerError: If the samples are not known, or if all ranks should have the same samples.
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
    """Raise NoAnswerError: with several processes there is no bench, and ``Check`` calls :func:`compare` instead."""
    raise NoAnswerError("the run has one process")


QUESTION = Question(
    "ranks",
    "Do the ranks load other samples?",
    "ranks that start with equal parameters and load different samples",
    answer,
    steps=0.0,
    needs_repetition=False,
)
