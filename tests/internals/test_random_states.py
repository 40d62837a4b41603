"""Tests of kept random states."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from lightning_recorder.internals.random_states import RandomStates


def draw() -> list[float]:
    """Draw from each global generator; the normal numbers of NumPy come in pairs, of which it keeps one."""
    return [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())]  # noqa: NPY002


@pytest.mark.parametrize("through_file", [False, True])
def test_the_same_numbers_follow(through_file: bool) -> None:
    """After the states are restored, all generators repeat their numbers, also from JSON and tensors."""
    np.random.seed(3)  # noqa: NPY002 - the global generator
    for _ in range(3):
        states = RandomStates()
        expected = [draw(), draw()]
        if through_file:
            states = RandomStates.of(states.tensors(), json.loads(json.dumps(states.numbers())))
        states.restore()
        assert [draw(), draw()] == expected


def test_keeping_draws_nothing() -> None:
    """Keeping the states changes none of them."""
    states = RandomStates()
    expected = draw()
    states.restore()
    RandomStates()
    assert draw() == expected


def test_states_are_read_again_only_after_a_draw() -> None:
    """Without a draw, the state of Python is the same object; any draw or seed gives the new state."""
    assert RandomStates().python is RandomStates().python
    changes = (random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: random.seed(3))
    for change in changes:
        change()
        assert RandomStates().python == random.getstate()
