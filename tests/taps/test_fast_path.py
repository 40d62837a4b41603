"""Tests of the fast path of a tap and its fallback to the receiver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_recorder import StatisticsRecorder
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.reductions import Norms
from lightning_recorder.taps import InputGradientTap, InputTap, OutputGradientTap, OutputTap, Site, Tap

each_tap = pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])


class Seen:
    """A tap on a module, with the names of the sites that were tried on the fast path and those received."""

    def __init__(self, kind: type[Tap], module: nn.Module, answer: Callable[[], bool] = lambda: True, **options: Any):
        self.asked: list[Site] = []
        self.received: list[Site] = []
        self.tap = kind({"m": module}, lambda site, tensor: self.received.append(site), **options)

        def fast_path(site: Site, tensor: Tensor) -> bool:
            self.asked.append(site)
            return answer()

        self.tap.fast_path = fast_path

    def step(self, module: nn.Module, give: Callable[[Any], Tensor] = lambda output: output) -> None:
        """Run a training step with the tap attached."""
        with self.tap:
            give(module(torch.ones(2, 2))).sum().backward()


SITE = Site("m", "out")


@each_tap
def test_what_is_taken_is_not_received(kind: type[Tap]) -> None:
    """A tensor that the fast path accepts is not received, and its module counts as called."""
    seen = Seen(kind, module := nn.Linear(2, 2))
    seen.step(module)
    seen.step(module)
    assert (seen.asked, seen.received, seen.tap.called) == ([SITE] * 2, [], {"m"})


def failing() -> bool:
    """A fast path that raises an error."""
    raise ZeroDivisionError


@each_tap
@pytest.mark.parametrize("answer", [lambda: False, failing], ids=["refused", "raised"])
def test_what_is_not_taken_is_received(kind: type[Tap], answer: Callable[[], bool]) -> None:
    """A tensor that the fast path rejects or fails on is received without a warning."""
    seen = Seen(kind, module := nn.Linear(2, 2), answer, strict=True)
    seen.step(module)
    assert (seen.asked, seen.received) == ([SITE], [SITE])


def fail(site: Site, tensor: Tensor) -> None:
    """A receiver that raises."""
    raise ZeroDivisionError


class Own(Tensor):
    """A tensor subclass with unknown contents."""


class Gives(nn.Module):
    """Returns the result of a function of a layer's output."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        """Return the result of the function."""
        return self.make(self.layer(x))


def test_an_output_of_several_tensors_is_received() -> None:
    """Tensors inside a nested output are each received."""
    seen = Seen(OutputTap, module := Gives(lambda x: {"a": x, "b": (x + 1,)}))
    seen.step(module, lambda output: output["a"])
    assert (seen.asked, seen.received) == ([], [Site("m", "out.a"), Site("m", "out.b[0]")])


def test_a_tensor_of_another_class_is_received() -> None:
    """A tensor of a subclass is received, because it is not a plain tensor."""
    seen = Seen(OutputTap, module := Gives(lambda x: x.as_subclass(Own)))
    seen.step(module)
    assert (seen.asked, seen.received) == ([], [SITE])


@each_tap
def test_a_condition_is_kept(kind: type[Tap]) -> None:
    """With a condition every tensor is received."""
    for holds in (True, False):
        seen = Seen(kind, module := nn.Linear(2, 2), condition=lambda holds=holds: holds)
        seen.step(module)
        assert (seen.asked, seen.received) == ([], [SITE] * holds)


@each_tap
def test_time_is_measured(kind: type[Tap]) -> None:
    """With a stopwatch every tensor is received, and the time is measured."""
    seen = Seen(kind, module := nn.Linear(2, 2))
    ticks = iter(range(100))
    seen.tap.stopwatch = watch = Stopwatch(clock=lambda: float(next(ticks)))
    seen.step(module)
    assert (seen.asked, seen.received) == ([], [SITE])
    # Attaching, the forward pass, and the backward pass if there is a hook for it.
    assert watch.take_ms() == 1000 * (2 if kind is OutputTap else 3)


@each_tap
def test_a_paused_tap_takes_nothing(kind: type[Tap]) -> None:
    """While the tap is paused, no tensor is accepted or received."""
    seen = Seen(kind, module := nn.Linear(2, 2))
    seen.tap.attach()
    seen.tap.pause()
    module(torch.ones(2, 2)).sum().backward()
    seen.tap.remove()
    assert (seen.asked, seen.received) == ([], [])


def test_a_module_that_is_left_alone_stays_so() -> None:
    """After an error of the receiver the module is not tried on the fast path again."""
    module = nn.Linear(2, 2)
    seen = Seen(OutputTap, module, lambda: False)
    seen.tap._receive = fail
    with pytest.warns(UserWarning, match="could not record module 'm'"):
        seen.step(module)
    seen.step(module)
    assert seen.asked == [SITE]


def test_a_recomputed_forward_pass_is_recorded_once() -> None:
    """A forward pass that gradient checkpointing repeats is not recorded again."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap:
        x = torch.ones(2, 2, requires_grad=True)
        checkpoint(module, x, use_reentrant=False).sum().backward()
    assert (seen.asked, seen.received) == ([SITE], [])


def test_our_own_arithmetic_is_not_recorded() -> None:
    """Calls while a recorder computes do not belong to the model and are ignored."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap, pause_recording():
        module(torch.ones(2, 2))
    assert (seen.asked, seen.received) == ([], [])


def test_a_transform_is_skipped() -> None:
    """Tensors inside a torch.func transform, which have no readable values, are ignored."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap:
        torch.vmap(module)(torch.ones(3, 2))
    assert (seen.asked, seen.received) == ([], [])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")  # models are still traced
def test_nothing_is_recorded_while_a_model_is_traced() -> None:
    """Calls while torch.jit.trace runs are ignored."""
    seen = Seen(OutputTap, module := nn.Linear(2, 2))
    with seen.tap:
        torch.jit.trace(module, torch.ones(2, 2), check_trace=False)
    assert (seen.asked, seen.received) == ([], [])


# Statistics recorder


@each_tap
def test_both_ways_give_the_same(kind: type[Tap]) -> None:
    """The statistics are bitwise equal with the fast path and with a second reduction, which disables it."""
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
    """The factor is also applied on the fast path."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    recorder.factor = 0.5
    with recorder:
        for _ in range(2):
            module(torch.tensor([2.0, 4.0]))
    assert recorder.collect()[SITE].mean == 1.5


def test_the_fast_path_takes_an_only_input() -> None:
    """The fast path is tried for a single positional tensor, and for none of several arguments."""
    seen = Seen(InputTap, module := nn.Bilinear(2, 2, 2))
    with seen.tap:
        module(torch.ones(2, 2), torch.ones(2, 2))
    assert (seen.asked, seen.received) == ([], [Site("m", "in[0]"), Site("m", "in[1]")])
    single = Seen(InputTap, linear := nn.Linear(2, 2))
    single.step(linear)
    assert (single.asked, single.received) == ([Site("m", "in[0]")], [])


@pytest.mark.parametrize("kind", [InputTap, OutputTap, InputGradientTap, OutputGradientTap])
def test_calls_that_are_kept_apart_have_numbered_paths(kind: type[Tap]) -> None:
    """The paths of later calls end with their number, with and without the fast path, and start anew when attached."""
    module = nn.Linear(2, 2)
    path = "in[0]" if kind in (InputTap, InputGradientTap) else "out"
    expected = [Site("m", path), Site("m", f"{path}#2")]
    for is_taken in (True, False):
        seen = Seen(kind, module, lambda: is_taken)  # noqa: B023 - called in this iteration
        seen.tap.per_call = True
        for _ in range(2):
            with seen.tap:
                module(module(torch.ones(2, 2, requires_grad=True))).sum().backward()
        found = seen.asked if is_taken and kind is not InputGradientTap else seen.received
        order = expected if kind in (InputTap, OutputTap) else expected[::-1]
        assert found == order * 2


class Counted(TorchFunctionMode):
    """Counts the functions that it sees."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_the_fast_path_reads_without_function_modes() -> None:
    """A mode around the model, such as ours for functions, sees none of the properties that the statistics read."""
    module, x = nn.Identity(), torch.ones(4, 2)
    recorder = StatisticsRecorder({"m": module})
    counts = []
    for enabled in (True, False):
        with recorder if enabled else nullcontext():
            module(x)  # makes the state
            with Counted() as mode:
                module(x)
        counts.append(mode.calls)
    assert recorder.collect()[SITE].count == 16
    assert counts[0] <= counts[1] + 2  # the type of the tensor is looked at before
