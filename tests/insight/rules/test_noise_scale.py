"""The gradient noise scale: its algebra, its interval, and its note."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.insight import Finding
from lightning_recorder.insight.rules.noise_scale import noise_scale
from lightning_recorder.statistics import EVERY_PARAMETER_PART, OptimizerRecorder
from tests.insight.records import Examination

MEAN, STD = torch.tensor([0.6, 0.8, 0.0]), torch.tensor([1.0, 2.0, 3.0])
SCALE = 14.0  # of samples: the sum of the variances, divided by the squared norm of the mean


class Quadratic(nn.Module):
    """A loss whose gradient is the mean of the samples, so that its covariance is that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, samples: Tensor) -> Tensor:
        return (samples @ self.weight).mean()


def drawn(steps: int, batches: int, size: int) -> Tensor:
    """Return samples of a known mean and covariance, ``[steps, batches, samples, features]``."""
    generator = torch.Generator().manual_seed(0)
    return MEAN + STD * torch.randn(steps, batches, size, 3, generator=generator)


def trained(steps: Tensor, **options: Any) -> list[Finding]:
    """Return the notes of a training."""
    return [each for each in examined(steps, **options).findings() if each.rule == "gradient-noise"]


def examined(steps: Tensor, *, used: Sequence[bool] = (), names: Sequence[str] = ("blocks.0",)) -> Examination:
    """Train with a step of SGD for each entry of the samples, at a learning rate of zero, and record each step."""
    net = nn.ModuleDict({name.replace(".", "_"): Quadratic() for name in names})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    modules = dict(zip(names, net.values(), strict=True))
    recorder, batches = OptimizerRecorder(modules, [optimizer], parts=EVERY_PARAMETER_PART), steps.shape[1]
    recorder.batches, recorder.batch_factor = batches, float(batches)
    found = Examination()
    for step, of_step in enumerate(steps):
        with recorder:
            for place, batch in enumerate(of_step):
                recorder.observe_batch((batch,))
                if not used or used[place]:
                    (sum(each(batch) for each in modules.values()) / batches).backward()
            optimizer.step()
            optimizer.zero_grad()
        about = {"step": step, "epoch": 0, "stage": "train", "group": "parameters", "recorder": "parameters"}
        found.add(recorder.collect().having(about={**about, **recorder.about()}))
        recorder.reset()
    return found


def test_the_scale_is_exact() -> None:
    """Norms that are exactly their expectations give the exact scale, at each number of batches."""
    signal, noise = 1.7, 9.1
    for batches in (2, 3, 16):
        whole, single = np.full(8, signal + noise / batches), np.full(8, signal + noise)
        assert noise_scale(whole, single, batches) == pytest.approx((noise / signal,) * 3, rel=1e-6)


def test_each_record_is_unbiased() -> None:
    """Signal and noise of a step are those of its batches with the usual corrections, from their gradients alone."""
    gradients = drawn(1, 5, 4)[0].mean(1).double()
    whole, single = float(gradients.mean(0).square().sum()), float(gradients.square().sum(1).mean())
    noise = float(gradients.var(0).sum())
    expected = noise / (whole - noise / 5)
    assert noise_scale(np.full(9, whole), np.full(9, single), 5).value == pytest.approx(expected, rel=1e-9)


def test_the_interval_contains_the_scale() -> None:
    """About 95 % of the intervals contain the known scale, and one without a signal has no upper end."""
    gradients = drawn(400 * 12, 4, 16).mean(2).double().numpy().reshape(400, 12, 4, 3)
    found = [noise_scale((each.mean(1) ** 2).sum(1), (each**2).sum(2).mean(1), 4) for each in gradients]
    inside = [each.low <= SCALE / 16 <= each.high for each in found]
    assert 0.90 <= np.mean(inside) <= 0.99
    nothing = gradients[0] - gradients[0].mean((0, 1))
    unknown = noise_scale((nothing.mean(1) ** 2).sum(1), (nothing**2).sum(2).mean(1), 4)
    assert unknown.high == math.inf
    assert 0 < unknown.low < math.inf


def test_the_note_has_the_scale_of_a_known_covariance() -> None:
    """The scale of the recorded gradients is that of the samples, in samples, beside the size of a step."""
    (note,) = trained(drawn(64, 4, 16))
    assert note.is_note
    assert note.numbers["step"] == 64
    assert note.numbers["low"] < SCALE < note.numbers["high"] < 2 * note.numbers["low"]
    assert note.numbers["samples"] == pytest.approx(SCALE, rel=0.25)
    assert "a step has 64" in note.verdict
    assert note.trace is not None
    assert len(note.trace.steps) > 4


def test_the_note_has_the_average_over_the_run() -> None:
    """A scale that grows has another average over the run than in its second half; without a signal there is none."""
    quiet, loud = drawn(128, 4, 16).split(64)
    quiet = MEAN + (quiet - MEAN) / 2  # a quarter of the covariance
    (note,) = trained(torch.cat([quiet, loud]))
    assert note.numbers["samples"] == pytest.approx(SCALE, rel=0.3)
    assert note.trace is not None
    assert note.numbers["mean over the run"] == pytest.approx(np.mean(note.trace.values))
    assert note.numbers["mean over the run"] == pytest.approx(SCALE * 5 / 8, rel=0.3)
    assert f", and {note.numbers['mean over the run']:.3g} on average over the run; a step has 64" in note.verdict
    without = torch.cat([quiet - quiet.mean((0, 1, 2)), loud, loud])
    assert "on average" not in trained(without)[0].verdict


def test_each_block_has_a_scale() -> None:
    """Blocks with the same gradients have the same scale, which is also that of the model."""
    (note,) = trained(drawn(32, 4, 16), names=("blocks.0", "blocks.1"))
    assert note.numbers["blocks.0"] == pytest.approx(note.numbers["samples"])
    assert note.numbers["blocks.1"] == pytest.approx(note.numbers["samples"])
    for end in ("low", "high"):
        assert note.numbers[f"blocks.0, {end}"] == pytest.approx(note.numbers[end])
    low, high = (f"{note.numbers[end]:.3g}" for end in ("low", "high"))
    assert f"greatest in blocks.0 ({note.numbers['samples']:.3g}, between {low} and {high})" in note.verdict


@pytest.mark.parametrize(("batches", "used"), [(1, ()), (2, (True, False))])
def test_steps_without_a_second_gradient_have_no_note(batches: int, used: Sequence[bool]) -> None:
    """One batch a step says nothing about its noise, and neither do fewer backward passes than batches."""
    assert not trained(drawn(16, batches, 16), used=used)
