"""The package's own arithmetic is excluded from recordings."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_recorder.internals.pause_recording import is_paused, pause_recording


def test_it_is_on_inside_only() -> None:
    """The switch is on inside the block and off before and after it."""
    seen = [is_paused()]
    with pause_recording():
        seen.append(is_paused())
    assert [*seen, is_paused()] == [False, True, False]


def test_it_nests() -> None:
    """Leaving an inner block keeps the outer one active."""
    with pause_recording():
        with pause_recording():
            pass
        assert is_paused()
    assert not is_paused()


def test_it_ends_with_an_exception() -> None:
    """An exception propagates and turns the switch off."""
    with pytest.raises(IndexError), pause_recording():
        [].pop()
    assert not is_paused()


def test_autograd_is_off_inside_and_as_before_after() -> None:
    """Autograd is off inside, and its previous state is restored afterwards."""
    x = torch.ones(1, requires_grad=True)
    tracked: list[bool] = []
    for outside in (torch.enable_grad, torch.no_grad):
        with outside():
            with pause_recording():
                tracked.append((x * 2).requires_grad)
            tracked.append((x * 2).requires_grad)
    assert tracked == [False, True, False, False]


def test_it_is_a_matter_of_one_thread() -> None:
    """Other threads, such as that of a dataloader, are still recorded."""
    seen: list[bool] = []
    with pause_recording():
        thread = threading.Thread(target=lambda: seen.append(is_paused()))
        thread.start()
        thread.join()
        seen.append(is_paused())
    assert seen == [False, True]
