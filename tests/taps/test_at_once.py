"""What a tap has taken at once, past its receiver, and what it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder import Norms, StatisticsRecorder
from lightning_recorder.stopwatch import Stopwatch
from lightning_recorder.taps import OutputGradientTap, OutputTap, Site, Tap
from lightning_recorder.unrecorded import unrecorded

each_tap = pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])


class Seen:
    """A tap on a module with what was asked about and what was received, by the names of the sites."""

    def __init__(self, kind: type[Tap], module: nn.Module, answer: Callable[[], bool] = lambda: True, **options: Any):
        self.asked: list[Site] = []
        self.received: list[Site] = []
        self.tap = kind({"m": module}, lambda site, tensor: self.received.append(site), **options)

        def at_once(site: Site, tensor: Tensor) -> bool:
            self.asked.append(site)
            return answer()

        self.tap.at_once = at_once

    def step(self, module: nn.Module, give: Callable[[Any], Tensor] = lambda output: output) -> None:
        """A step of training with the tap on."""
        with self.tap:
            give(module(torch.ones(2, 2))).sum().backward()


SITE = Site("m", "out")


@each_tap
def test_what_is_taken_is_not_received(kind: type[Tap]) -> None:
    """A tensor that was taken at once goes nowhere else, and its module counts as called."""
    seen = Seen(kind, module := nn.Linear(2, 2))
    seen.step(module)
    seen.step(module)
    assert (seen.asked, seen.received, seen.tap.called) == ([SITE] * 2, [], {"m"})


def failing() -> bool:
    """An answer that is an error."""
    raise ZeroDivisionError


@each_tap
@pytest.mark.parametrize("answer", [lambda: False, failing], ids=["refused", "raised"])
def test_what_is_not_taken_is_received(kind: type[Tap], answer: Callable[[], bool]) -> None:
    """A tensor that is refused, or about which the question raises, is received, and nothing is told."""
    seen = Seen(kind, module := nn.Linear(2, 2), answer, strict=True)
    seen.step(module)
    assert (seen.asked, seen.received) == ([SITE], [SITE])


def fail(site: Site, tensor: Tensor) -> None:
    """A receiver that raises."""
    raise ZeroDivisionError


class Own(Tensor):
    """A class that may be anything inside."""


class Gives(nn.Module):
    """Gives what a function makes of what a layer gives."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        """What the function makes."""
        return self.make(self.layer(x))


def test_an_output_of_several_tensors_is_received() -> None:
    """Tensors inside a nested output are received each."""
    seen = Seen(OutputTap, module := Gives(lambda x: {"a": x, "b": (x + 1,)}))
    seen.step(module, lambda output: output["a"])
    assert (seen.asked, seen.received) == ([], [Site("m", "out.a"), Site("m", "out.b[0]")])


def test_a_tensor_of_another_class_is_received() -> None:
    """A tensor of a class of its own is no plain one."""
    seen = Seen(OutputTap, module := Gives(lambda x: x.as_subclass(Own)))
    seen.step(module)
    assert (seen.asked, seen.received) == ([], [SITE])


@each_tap
def test_a_condition_is_kept(kind: type[Tap]) -> None:
    """With a condition everything goes past it."""
    for holds in (True, False):
        seen = Seen(kind, module := nn.Linear(2, 2), condition=lambda holds=holds: holds)
        seen.step(module)
        assert (seen.asked, seen.received) == ([], [SITE] * holds)


@each_tap
def test_time_is_measured(kind: type[Tap]) -> None:
    """With a stopwatch on, the whole way is gone and measured."""
    seen = Seen(kind, module := nn.Linear(2, 2))
    ticks = iter(range(100))
    seen.tap.stopwatch = watch = Stopwatch(clock=lambda: float(next(ticks)))
    seen.step(module)
    assert (seen.asked, seen.received) == ([], [SITE])
    # Putting the hook on, the forward pass, and the backward pass where there is a hook.
    assert watch.take_ms() == 1000 * (2 if kind is OutputTap else 3)


@each_tap
def test_a_paused_tap_takes_nothing(kind: type[Tap]) -> None:
    """What comes while the tap is paused is neither taken nor received."""
    seen = Seen(kind, module := nn.Linear(2, 2))
    seen.tap.attach()
    seen.tap.pause()
    module(torch.ones(2, 2)).sum().backward()
    seen.tap.remove()
    assert (seen.asked, seen.received) == ([], [])


def test_a_module_that_is_left_alone_stays_so() -> None:
    """After a fault of the receiver the module is asked no more."""
    module = nn.Linear(2, 2)
    seen = Seen(OutputTap, module, lambda: False)
    seen.tap._receive = fail
    with pytest.warns(UserWarning, match="could not record module 'm'"):
        seen.step(module)
    seen.step(module)
    assert seen.asked == [SITE]


def test_a_recomputed_forward_pass_is_taken_once() -> None:
    """What gradient checkpointing computes a second time is not a second call."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap:
        x = torch.ones(2, 2, requires_grad=True)
        checkpoint(module, x, use_reentrant=False).sum().backward()
    assert (seen.asked, seen.received) == ([SITE], [])


def test_our_own_arithmetic_is_not_taken() -> None:
    """What is called while a recorder computes is none of the model's."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap, unrecorded():
        module(torch.ones(2, 2))
    assert (seen.asked, seen.received) == ([], [])


def test_a_transform_is_passed_over() -> None:
    """Inside a transform of torch.func there are no values to take."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap:
        torch.vmap(module)(torch.ones(3, 2))
    assert (seen.asked, seen.received) == ([], [])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")  # models are still traced
def test_nothing_is_taken_while_a_model_is_traced() -> None:
    """What torch.jit.trace records is no step."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap:
        torch.jit.trace(module, torch.ones(2, 2), check_trace=False)
    assert (seen.asked, seen.received) == ([], [])


# In a recorder of statistics


@each_tap
def test_both_ways_give_the_same(kind: type[Tap]) -> None:
    """Taken at once or beside a further reduction, for which it is not, the statistics are the same to the bit."""
    module = nn.Linear(2, 2)
    recorders = [StatisticsRecorder({"m": module}, kind, extra=extra) for extra in ((), [Norms()])]
    for _ in range(3):
        x = torch.randn(5, 2)
        with recorders[0], recorders[1]:
            module(x).square().sum().backward()
    one, other = (recorder.collect()[SITE] for recorder in recorders)
    assert one.scalars == {name: other.scalars[name] for name in one.scalars}
    assert torch.equal(one.bins, other.bins)
    assert (one.dtype, one.shape) == (other.dtype, other.shape) == (torch.float32, (5, 2))


def test_a_factor_is_kept() -> None:
    """What is taken at once is multiplied by the factor, too."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    recorder.factor = 0.5
    with recorder:
        for _ in range(2):
            module(torch.tensor([2.0, 4.0]))
    assert recorder.collect()[SITE].mean == 1.5
