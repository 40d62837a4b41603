"""Tests of the garbage collector during a recording."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_recorder.graph import GraphCapture
from lightning_recorder.internals.garbage_collection import RareCollections


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (100_000, 5, 5)])
def test_a_capture_lets_the_collector_run_rarely(before: tuple[int, int, int]) -> None:
    """During a capture, collections are rarer but not off; nested captures and errors restore the setting."""
    gc.set_threshold(*before)
    expected = (50_000, 10, 10) if before[0] == 700 else before
    net = nn.Linear(1, 1)

    def fail() -> None:
        with GraphCapture(net, torch.ones(1)):
            assert gc.get_threshold() == expected
            with GraphCapture(net, torch.ones(1)):
                net(torch.ones(1))
            assert gc.get_threshold() == expected
            net(torch.ones(2))

    with pytest.raises(RuntimeError):
        fail()
    assert gc.get_threshold() == before


def test_a_setting_of_the_user_is_kept() -> None:
    """A threshold that the program sets during a recording stays."""
    collector = RareCollections()
    collector.hold()
    gc.set_threshold(1234)
    collector.release()
    assert gc.get_threshold()[0] == 1234
