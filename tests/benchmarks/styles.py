"""The ways of recording that are measured side by side, each on every leaf's output and its gradient."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder import Selection, StatisticsRecorder
from lightning_recorder.callbacks.statistics import DEFAULT_STATISTICS as SHOWN
from lightning_recorder.records.tags import make_tag
from lightning_recorder.reductions.kernels import fused
from lightning_recorder.sinks import BackgroundQueue, TensorBoardSink
from lightning_recorder.statistics import Snapshot
from lightning_recorder.taps import OutputGradientTap, OutputTap

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


def every(n: int, *, in_one_pass: bool = True, sample: int | None = None) -> Callable[[nn.Module], Any]:
    """This package on each n-th step, written to TensorBoard each time, but at most each tenth step.

    As the callbacks do it: hooks are taken off unless the next step is recorded, too, and results are written in the
    background.
    """

    @contextmanager
    def recorded(module: nn.Module) -> Iterator[Step]:
        leaves = Selection().resolve(module)
        recorders = {
            "activations": StatisticsRecorder(leaves, OutputTap, sample=sample),
            "gradients": StatisticsRecorder(leaves, OutputGradientTap, sample=sample),
        }
        queue = BackgroundQueue()
        with tempfile.TemporaryDirectory() as folder, TensorBoardSink(folder) as sink:

            def step(number: int, train: Callable[[], None]) -> None:
                if number % n:
                    train()
                    return
                for recorder in recorders.values():
                    recorder.attach()
                with nullcontext() if in_one_pass else passes_of_torch():
                    train()
                for recorder in recorders.values():
                    recorder.pause() if n == 1 else recorder.remove()
                if number % max(n, 10) == 0:
                    for group, recorder in recorders.items():
                        queue.submit(partial(write, sink, number, group, recorder.snapshot()))
                        recorder.reset()

            yield step
            for recorder in recorders.values():
                recorder.remove()

    return recorded


def write(sink: TensorBoardSink, number: int, group: str, snapshot: Snapshot) -> None:
    """Write what the callbacks write by default."""
    seen = snapshot.statistics()
    scalars = {make_tag(group, *site, name): each.scalars[name] for site, each in seen.items() for name in SHOWN}
    sink.write_scalars(number, scalars)
    sink.write_histograms(number, {make_tag(group, *site, "histogram"): each.histogram for site, each in seen.items()})


@contextmanager
def passes_of_torch() -> Iterator[None]:
    """The statistics without the C function, as where there is no compiler."""
    kernel, fused._Loaded.kernel = fused._Loaded.kernel, None
    try:
        yield
    finally:
        fused._Loaded.kernel = kernel


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


def four_numbers(writer: SummaryWriter, tag: str, number: int, tensor: Tensor) -> None:
    """The statistics of Composer's ActivationMonitor, with nowhere to write to."""
    composer_numbers(tensor)


def composer_numbers(tensor: Tensor) -> dict[str, float]:
    """The statistics of Composer's ActivationMonitor: mean norm, mean maximum, skewness and kurtosis."""
    values = tensor.float()
    rows = values.flatten(1) if values.dim() > 1 else values.unsqueeze(0)
    centered = rows - rows.mean(-1, keepdim=True)
    deviation = centered.square().mean(-1, keepdim=True).sqrt() + 1e-12
    return {
        "l2_norm": rows.norm(dim=-1).mean().item(),
        "max": rows.max(dim=-1).values.mean().item(),
        "skewness": (centered / deviation).pow(3).mean().item(),
        "kurtosis": (centered / deviation).pow(4).mean().item(),
    }


@contextmanager
def wandb_watch(module: nn.Module) -> Iterator[Step]:
    """wandb.watch with log="all", on every step of an offline run; it records parameters and their gradients."""
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(console="off", silent=True))
        run.watch(module, log="all", log_freq=1)

        def step(number: int, train: Callable[[], None]) -> None:
            train()
            run.log({"number": number})

        yield step
        run.unwatch(module)
        run.finish()


@contextmanager
def torchexplorer_watch(module: nn.Module) -> Iterator[Step]:
    """torchexplorer.watch of inputs, outputs and their gradients on every step, with nowhere to write to."""
    import torchexplorer

    torchexplorer.watch(module, log=["io", "io_grad"], log_freq=1, backend="none", verbose=False)
    yield lambda number, train: train()


STYLES: dict[str, Callable[[nn.Module], Any]] = {
    "bare": bare,
    "bare again": bare,
    "empty hooks": empty_hooks,
    "lightning_recorder, every step": every(1),
    "lightning_recorder, 1 in 10": every(10),
    "lightning_recorder, 1 in 50": every(50),
    "the same, histogram of 4096 values, every step": every(1, sample=4096),
    "torch's passes, histogram of 4096 values, every step": every(1, in_one_pass=False, sample=4096),
    "torch's passes, histogram of 4096 values, 1 in 10": every(10, in_one_pass=False, sample=4096),
    "torch's passes, histogram of 4096 values, 1 in 50": every(50, in_one_pass=False, sample=4096),
    "torch's passes, every step": every(1, in_one_pass=False),
    "Composer's four numbers": hand_written(four_numbers),
    ".item() and histc": hand_written(items_and_histc),
    "wandb.watch, all": wandb_watch,
    "torchexplorer": torchexplorer_watch,
    "TensorBoard add_histogram, as Bolts": hand_written(add_histogram),
}
