"""Tests of the copies of parameters that are kept for a step whose values arrive late."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_recorder.watch import ParameterCopies
from tests.watch.late import Clock

CPU = torch.device("cpu")
SIZE = 4 * 1000


def copies(
    monkeypatch: pytest.MonkeyPatch, *, free: list[int | None], copy: float = 0.001
) -> tuple[nn.Parameter, ParameterCopies]:
    """Return a parameter of 4,000 bytes and its copies; the free memory is the first of a list, then the next one."""
    monkeypatch.setattr(ParameterCopies, "_free_memory", staticmethod(lambda device: free.pop(0)))
    monkeypatch.setattr(ParameterCopies, "_clock_of", staticmethod(lambda device: Clock(copy)))
    parameter = nn.Parameter(torch.zeros(1000))
    return parameter, ParameterCopies([parameter], CPU)


def run(parameter: nn.Parameter, kept: ParameterCopies, steps: int, late: int = 0) -> list[int]:
    """Run steps whose values arrive some steps later, and return those before which a copy was taken."""
    taken = []
    for step in range(steps):
        before = kept.latest(step)
        if kept.is_due(step):
            kept.take(step, step - late if late else None)
        if kept.latest(step) is not before:
            taken.append(step)
        with torch.no_grad():
            parameter.add_(1)
    return taken


def test_a_cheap_copy_is_taken_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has the values from before its step, also when it is overwritten."""
    parameter, kept = copies(monkeypatch, free=[10**6, 10**6])
    assert run(parameter, kept, 20) == list(range(20))
    found = kept.latest(19)
    assert found is not None
    assert found.values[0].eq(19).all()
    older = kept.latest(18)
    assert older is not None
    assert older.values[0].eq(18).all()


@pytest.mark.parametrize(("copy", "every"), [(0.009, 1), (0.015, 2), (0.095, 11)])
def test_the_interval_keeps_the_time_below_a_hundredth(
    copy: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After six measured copies, one is taken so seldom that it takes less than 1 % of the time of the steps."""
    parameter, kept = copies(monkeypatch, free=[10**6, 10**6], copy=copy)
    taken = run(parameter, kept, 40)
    assert kept.every == every
    assert taken[:6] == list(range(6))
    assert {later - one for one, later in itertools.pairwise(taken[5:])} == {every}


@pytest.mark.parametrize("late", [1, 2, 3, 5])
def test_a_step_without_values_has_a_copy_from_before_it(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the values of a step have arrived, a copy from at most twice as many steps before it is kept."""
    parameter, kept = copies(monkeypatch, free=[10**6, 10**6])
    for step in range(50):
        if kept.is_due(step):
            kept.take(step, max(0, step - late))
        for waiting in range(max(0, step - late), step + 1):
            found = kept.latest(waiting)
            assert found is not None
            assert waiting - found.step <= 2 * late
            assert found.values[0].eq(found.step).all()
        with torch.no_grad():
            parameter.add_(1)


@pytest.mark.parametrize(
    ("free", "steps"),
    [
        ([20 * SIZE + 1, 20 * SIZE + 1], 12),
        ([20 * SIZE], 0),
        ([None], 0),
        ([20 * SIZE + 1, 18 * SIZE], 2),  # the optimizer has allocated its state meanwhile
    ],
)
def test_both_copies_take_less_than_a_tenth_of_the_memory(
    free: list[int | None], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none if the memory is scarce or unknown, before the first step or once the optimizer has its state."""
    parameter, kept = copies(monkeypatch, free=free)
    run(parameter, kept, 12)
    assert bool(kept.every) == (steps == 12)
    assert (kept.latest(12) is None) == (steps < 12)
    assert free == []


def test_no_copy_of_lazy_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that have no shape yet are not copied."""
    monkeypatch.setattr(ParameterCopies, "_free_memory", staticmethod(lambda device: 10**9))
    layer = nn.LazyLinear(3)
    kept = ParameterCopies(list(layer.parameters()), CPU)
    assert not kept.is_due(0)
    assert kept.latest(0) is None


def test_true_takes_one_copy_before_each_step_and_waits() -> None:
    """With True, nothing is measured, and the caller waits for the values of the step before."""
    parameter = nn.Parameter(torch.zeros(10))
    kept = ParameterCopies([parameter], CPU, True)
    assert kept.waits
    assert run(parameter, kept, 5) == [0, 1, 2, 3, 4]
    assert kept.latest(3) is None
