"""Measure the time of a forward and of a backward pass, and the peak memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from lightning_recorder.check.answer import Answer, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]


def answer(bench: Bench) -> Answer:
    """Measure a forward and a backward pass."""
    devices = {each.device for each in bench.parameters.values() if each.device.type == "cuda"}
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    with bench.restored():
        start = _now(devices)
        seen = bench.forward(bench.batch)
        middle = _now(devices)
        if seen.loss is not None:
            bench.gradients(seen.loss)
        end = _now(devices)
    numbers = {"forward_ms": 1e3 * (middle - start), "backward_ms": 1e3 * (end - middle)}
    numbers["parameters"] = float(sum(each.numel() for each in bench.parameters.values()))
    text = f"forward {numbers['forward_ms']:.3g} ms, backward {numbers['backward_ms']:.3g} ms"
    if devices:
        numbers["peak_bytes"] = float(sum(torch.cuda.max_memory_allocated(each) for each in devices))
        text += f", {numbers['peak_bytes'] / 2**20:.3g} MiB at the peak"
    return Answer("ok", f"{text}, {numbers['parameters']:,.0f} trained numbers", numbers)


def _now(devices: set[torch.device]) -> float:
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()


QUESTION = Question(
    "cost", "What will it cost?", "no expectation: a measurement", answer, steps=1.0, needs_repetition=False
)
