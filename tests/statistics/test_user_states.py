"""The states of functions and metrics of the user."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor

from lightning_recorder import RecorderWarning
from lightning_recorder.reductions.user import UserReduction
from lightning_recorder.statistics.user_states import UserStates, merge_snapshots
from lightning_recorder.taps import Site

HEAD, TAIL = Site("head", "out"), Site("tail", "out")


def total(before: Tensor, new: Tensor) -> Tensor:
    """Sum all values."""
    return before.sum() + new.sum()


def values(states: UserStates) -> dict[Site, Any]:
    return {site: state.value for site, state in states.snapshot().states.items()}


def test_an_unscaled_gradient_does_not_underflow() -> None:
    """A tensor in half precision is multiplied by the inverse loss scale in float32."""
    states = UserStates(UserReduction(torch.maximum))
    states.add(HEAD, torch.tensor([2.0**-10], dtype=torch.float16), 2.0**-16)
    assert values(states)[HEAD].tolist() == [2.0**-26]


def test_a_discarded_step_is_not_in_the_result() -> None:
    """Restored states are those at the time of the copy, and a site that came later is gone."""
    states = UserStates(UserReduction(total))
    states.add(HEAD, torch.ones(2), 1.0)
    saved = states.saved()
    states.add(HEAD, torch.ones(3), 1.0)
    states.add(TAIL, torch.ones(3), 1.0)
    states.restore(saved)
    states.add(HEAD, torch.ones(1), 1.0)
    assert values(states) == {HEAD: 3.0}


@pytest.mark.parametrize("given", [torch.add, torchmetrics.MeanMetric()], ids=["function", "metric"])
def test_a_reset_starts_anew(given: Any) -> None:
    """After a reset, only sites with new tensors have a result, and it has no earlier tensors."""
    states = UserStates(UserReduction(given))
    for site in (HEAD, TAIL):
        states.add(site, torch.ones(1), 1.0)
    states.reset()
    assert values(states) == {}
    states.add(TAIL, torch.full((1,), 5.0), 1.0)
    assert values(states) == {TAIL: 5.0}


@pytest.mark.parametrize("given", [total, torchmetrics.CatMetric()], ids=["function", "metric"])
def test_saved_states_continue(given: Any) -> None:
    """A state that is loaded elsewhere continues as if it had not been saved."""
    whole, first, second = (UserStates(UserReduction(given)) for _ in range(3))
    for place, batch in enumerate(torch.arange(6.0).view(3, 2)):
        whole.add(HEAD, batch, 1.0)
        if place == 2:
            second.load_state_dict(first.state_dict())
        (first if place < 2 else second).add(HEAD, batch, 1.0)
    assert torch.equal(values(second)[HEAD], values(whole)[HEAD])


def pairs(before: Any, new: Tensor) -> tuple[int, dict[str, list[float]]]:
    """Count the batches, and list their sums in double precision."""
    count, sums = before if isinstance(before, tuple) else (1, {"sums": [before.double().sum().item()]})
    return count + 1, {"sums": [*sums["sums"], new.double().sum().item()]}


@pytest.mark.parametrize("between", [1, 2])
def test_results_that_are_no_tensors_continue_as_they_are(between: int) -> None:
    """A number stays a number, with all of its digits, and a tuple stays a tuple, in a file as well."""
    whole, first, second = (UserStates(UserReduction(pairs)) for _ in range(3))
    batches = torch.rand(5, 3)
    for batch in batches:
        whole.add(HEAD, batch, 1.0)
    for batch in batches[:between]:
        first.add(HEAD, batch, 1.0)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for batch in batches[between:]:
        second.add(HEAD, batch, 1.0)
    assert values(second) == values(whole)
    assert isinstance(values(second)[HEAD][0], int)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_function_may_draw_random_numbers(kind: str) -> None:
    """The numbers that a function draws, for example for a sample, are not missing in the training."""
    draw = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.rand}[kind]

    def function(before: Tensor, new: Tensor) -> Tensor:
        draw()
        return before + new

    states = UserStates(UserReduction(function))
    states.add(HEAD, torch.ones(2), 1.0)
    draw()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator
    expected = [draw(), draw()]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator
    found = [draw()]
    states.add(HEAD, torch.ones(2), 1.0)
    assert [*found, draw()] == expected


def test_a_result_that_cannot_be_saved_gives_one_warning() -> None:
    """A checkpoint is without results that contain objects, and recording continues."""
    states = UserStates(UserReduction(lambda before, new: [object()], "words"))
    for _ in range(2):
        states.add(HEAD, torch.ones(1), 1.0)
    with pytest.warns(RecorderWarning, match="a checkpoint is without the unwritten results of words"):
        assert states.state_dict() == []


def test_a_site_left_out_on_one_rank_is_in_no_result() -> None:
    """Results of ranks are merged for sites that no rank has left out."""
    ranks = [UserStates(UserReduction(torch.add)) for _ in range(2)]
    for states in ranks:
        states.add(HEAD, torch.ones(1), 1.0)
        states.add(TAIL, torch.ones(2), 1.0)
    with pytest.warns(RecorderWarning, match="add .* does not support 'out' of module 'tail'"):
        ranks[1].add(TAIL, torch.ones(3, 3), 1.0)
    merged = merge_snapshots(ranks[0].reduction, [each.snapshot().payload for each in ranks])
    assert {site: state.value for site, state in merged.states.items()} == {HEAD: 2.0}
