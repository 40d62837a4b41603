"""Recordings of a real training loop, shared by the tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder import StatisticsRecorder
from lightning_recorder.recordings import RecordWriter, SiteStatistics, records_path
from lightning_recorder.taps import OutputGradientTap, OutputTap, Site

Expected = dict[str, dict[int, Mapping[Site, SiteStatistics]]]


def make_net() -> nn.Sequential:
    """Return two linear layers with an activation, named ``encoder.fc``, ``encoder.act`` and ``head``."""
    encoder = nn.Sequential(OrderedDict(fc=nn.Linear(6, 5), act=nn.ReLU()))
    return nn.Sequential(OrderedDict(encoder=encoder, head=nn.Linear(5, 3)))


def site_of(
    name: str,
    path: str,
    scalars: Mapping[str, float],
    bins: Tensor | None = None,
    dtype: Any = None,
    shape: tuple[int, ...] | None = None,
) -> tuple[Site, SiteStatistics]:
    """Return a site and its statistics, for a writer of records."""
    found = SiteStatistics(scalars, dtype=dtype, shape=shape)
    return Site(name, path), found if bins is None else replace(found, bins=bins)


def record_run(
    log_dir: Path,
    *,
    steps: Iterable[int] = range(4),
    seed: int = 0,
    change: Callable[[nn.Module], object] = lambda net: None,
    at: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Expected:
    """Train from step 0, write the records of the given steps, and return them.

    Args:
        log_dir: The folder of the run.
        steps: The recorded steps.
        seed: The seed of the parameters and the batch.
        change: A function that changes the model before step ``at``.
        at: The step before which ``change`` is applied.
        dtype: The dtype of the model and the batch.
    """
    torch.manual_seed(seed)
    net = make_net().to(dtype)
    batch, target = torch.randn(16, 6).to(dtype), torch.randint(0, 3, (16,))
    chosen = {name: each for name, each in net.named_modules() if name and not isinstance(each, nn.Sequential)}
    recorders = {
        "activations": StatisticsRecorder(chosen, OutputTap),
        "gradients": StatisticsRecorder(chosen, OutputGradientTap),
    }
    writers = {label: RecordWriter(records_path(log_dir / "recorder", label)) for label in recorders}
    for label, writer in writers.items():
        writer.begin(label=label, group=label)
    expected: Expected = {label: {} for label in recorders}
    wanted = sorted(steps)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(wanted[-1] + 1):
        if step == at:
            change(net)
        optimizer.zero_grad()
        if step in wanted:
            with recorders["activations"], recorders["gradients"]:
                _loss(net, batch, target).backward()
            for label, recorder in recorders.items():
                found = expected[label][step] = recorder.collect()
                writers[label].write({"step": step, "epoch": step // 2}, found)
                recorder.reset()
        else:
            _loss(net, batch, target).backward()
        optimizer.step()
    return expected


def _loss(net: nn.Module, batch: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(batch).float(), target)


def write_simple(log_dir: Path, rms: dict[int, float], label: str = "activations", site: str = "fc") -> RecordWriter:
    """Write records of one site and one statistic, given by step."""
    writer = RecordWriter(records_path(log_dir / "recorder", label))
    writer.begin(label=label, group=label.partition("-")[0])
    for step, value in rms.items():
        writer.write({"step": step}, [site_of(site, "out", {"rms": value})])
    return writer
