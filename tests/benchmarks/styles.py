"""The ways of recording that are measured side by side, each on every leaf's output and its gradient."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder import OutputGradientTap, OutputTap, Selection, StatisticsRecorder, TensorBoardSink

Step = Callable[[int, Callable[[], None]], None]
"""Runs a training step with its number, recorded or not."""


@contextmanager
def bare(module: nn.Module) -> Iterator[Step]:
    """Nothing is recorded."""
    yield lambda number, train: train()


@contextmanager
def empty_hooks(module: nn.Module) -> Iterator[Step]:
    """A forward hook on each leaf that does nothing, and a hook on each output that does nothing."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: None)

    handles = [leaf.register_forward_hook(hook) for leaf in Selection().resolve(module).values()]
    yield lambda number, train: train()
    for handle in handles:
        handle.remove()


def every(n: int) -> Callable[[nn.Module], Any]:
    """This package on each n-th step, written to TensorBoard each time, but at most each tenth step."""

    @contextmanager
    def ours(module: nn.Module) -> Iterator[Step]:
        leaves = Selection().resolve(module)
        recorders = {
            "activations": StatisticsRecorder(leaves, OutputTap),
            "gradients": StatisticsRecorder(leaves, OutputGradientTap),
        }
        with tempfile.TemporaryDirectory() as folder, TensorBoardSink(folder) as sink:

            def step(number: int, train: Callable[[], None]) -> None:
                if number % n:
                    train()
                    return
                with recorders["activations"], recorders["gradients"]:
                    train()
                if number % max(n, 10) == 0:
                    for group, recorder in recorders.items():
                        seen = recorder.collect()
                        recorder.reset()
                        sink.write_scalars(
                            number,
                            {
                                f"{group}/{site.name}/{name}": value
                                for site, each in seen.items()
                                for name, value in each.scalars.items()
                            },
                        )
                        sink.write_histograms(
                            number, {f"{group}/{site.name}": each.histogram for site, each in seen.items()}
                        )

            yield step

    return ours


def hand_written(reduce: Callable[[SummaryWriter, str, int, Tensor], None]) -> Callable[[nn.Module], Any]:
    """Hooks as people write them: each tensor is reduced to numbers on the spot."""

    @contextmanager
    def style(module: nn.Module) -> Iterator[Step]:
        number = 0
        with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:

            def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
                def see(module: nn.Module, args: Any, output: Any) -> None:
                    if isinstance(output, Tensor):
                        reduce(writer, f"activations/{name}", number, output.detach())
                        if output.requires_grad:
                            output.register_hook(lambda grad: reduce(writer, f"gradients/{name}", number, grad))

                return see

            handles = [leaf.register_forward_hook(hook(name)) for name, leaf in Selection().resolve(module).items()]

            def step(current: int, train: Callable[[], None]) -> None:
                nonlocal number
                number = current
                train()

            yield step
            for handle in handles:
                handle.remove()

    return style


def items_and_histc(writer: SummaryWriter, tag: str, number: int, tensor: Tensor) -> None:
    """Four numbers by ``item()`` and a histogram of 64 bins between the extremes."""
    low, high = tensor.min().item(), tensor.max().item()
    tensor.mean().item()
    tensor.std(correction=0).item()
    torch.histc(tensor, 64, low, high).tolist()


def add_histogram(writer: SummaryWriter, tag: str, number: int, tensor: Tensor) -> None:
    """TensorBoard's own histogram of the raw tensor."""
    writer.add_histogram(tag, tensor, number)


STYLES: dict[str, Callable[[nn.Module], Any]] = {
    "bare": bare,
    "bare again": bare,
    "empty hooks": empty_hooks,
    "lightning_recorder, every step": every(1),
    "lightning_recorder, 1 in 10": every(10),
    "lightning_recorder, 1 in 50": every(50),
    ".item() and histc": hand_written(items_and_histc),
    "TensorBoard add_histogram": hand_written(add_histogram),
}
