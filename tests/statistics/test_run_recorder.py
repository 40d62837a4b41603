"""Tests of the recording of a training run in a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import RecorderWarning, StatisticsRecorder
from lightning_recorder.reductions import Change, Reduction
from lightning_recorder.schedule import Reduce, Sampling
from lightning_recorder.statistics import OverheadLimit, Record, RunPhase, RunRecorder
from lightning_recorder.taps import Site

SITE = Site("m", "out")


@dataclass
class Loop:
    """A loop whose only module outputs the given values at each batch."""

    sampling: Sampling
    reduce: Reduce = "step"
    options: dict[str, Any] = field(default_factory=dict)
    extra: Sequence[Reduction] = ()
    module: nn.Module = field(default_factory=nn.Identity)
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        recorder = StatisticsRecorder({"m": self.module}, extra=self.extra)
        self.run = RunRecorder(recorder, self.sampling, self.records.append, reduce=self.reduce, **self.options)

    def step(self, step: int, *batches: float, epoch: int = 0, overflowed: bool = False) -> None:
        for place, value in enumerate(batches):
            self.run.start_batch(step, epoch)
            self.module(torch.tensor([value]))
            self.run.end_batch(stepped=place == len(batches) - 1, overflowed=overflowed)

    def epoch(self, steps: Sequence[int], epoch: int = 0) -> None:
        for step in steps:
            self.step(step, float(step), epoch=epoch)
        self.run.end_epoch(steps[-1])

    @property
    def shown(self) -> dict[int, float]:
        """Return the sum of the recorded values by the step of the record."""
        return {record.step: total(record) for record in self.records}


def total(record: Record) -> float:
    found = record.snapshot.statistics()
    return found[SITE].scalars["mean"] * found[SITE].scalars["count"] if found else 0.0


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("step", {0: 0, 1: 1, 3: 3, 5: 5, 7: 7}),
        (3, {2: 0 + 1, 5: 3 + 5, 7: 7}),
        ("epoch", {3: 0 + 1 + 3, 7: 5 + 7}),
        (100, {7: 0 + 1 + 3 + 5 + 7}),
    ],
)
def test_what_becomes_one_record(reduce: Reduce, expected: dict[int, float]) -> None:
    """The steps since the last record are merged, and the remaining ones form a record at the end."""
    loop = Loop(Sampling(2), reduce)
    loop.epoch(range(4))
    loop.epoch(range(4, 8), epoch=1)
    loop.run.finish()
    assert loop.shown == expected


def test_accumulated_batches_are_one_step() -> None:
    """All batches of a recorded step count, and those of other steps do not."""
    loop = Loop(Sampling(2))
    loop.step(0, 1.0, 2.0)
    loop.step(1, 4.0, 8.0, 16.0)
    loop.step(2, 32.0)
    assert loop.shown == {0: 3.0, 1: 28.0}
    assert not loop.module._forward_hooks


@pytest.mark.parametrize("reduce", ["step", 2])
def test_a_step_without_an_end_is_in_no_record(reduce: Reduce) -> None:
    """A step that was started but not ended is discarded and repeated."""
    loop = Loop(Sampling(1), reduce)
    loop.step(0, 1.0)
    loop.run.start_batch(1, 0)
    loop.module(torch.tensor([10.0]))
    loop.run.end_epoch(0)
    loop.step(1, 2.0)
    assert loop.shown == ({0: 1.0, 1: 2.0} if reduce == "step" else {1: 3.0})


@pytest.mark.parametrize("reduce", ["step", 3])
def test_steps_that_overflow_are_counted_apart(reduce: Reduce) -> None:
    """A step that the optimizer skipped is only in a record that is marked as overflowed."""
    loop = Loop(Sampling(1), reduce)
    loop.step(0, 1.0)
    loop.step(1, 10.0, overflowed=True)
    loop.step(2, 100.0)
    assert loop.run.overflow_steps == 1
    marked = {record.step: total(record) for record in loop.records if record.overflowed}
    plain = {record.step: total(record) for record in loop.records if not record.overflowed}
    assert (marked, plain) == (({1: 10.0}, {0: 1.0, 2: 100.0}) if reduce == "step" else ({}, {2: 101.0}))
    assert [record.overflow_steps for record in loop.records] == ([0, 1, 1] if reduce == "step" else [1])


@pytest.mark.parametrize("batches", [1, 2])
def test_a_step_that_overflows_is_no_predecessor(batches: int) -> None:
    """The step after one that the optimizer skipped is compared with the one before it."""
    loop = Loop(Sampling(1), extra=[Change()])
    values = [1.0, 4.0, math.inf, math.nan, -2.0]
    for step, value in enumerate(values):
        loop.step(step, *([value] * batches), overflowed=not math.isfinite(value))
    changes = {record.step: record.snapshot.statistics()[SITE].scalars for record in loop.records}
    assert changes[1]["ratio_to_previous"] == (4 + batches - 1) / batches
    assert changes[4]["ratio_to_previous"] == (0.5 + batches - 1) / batches
    assert changes[4]["cosine_to_previous"] == (-1 + batches - 1) / batches


def test_disabled_in_between() -> None:
    """While recording is disabled, no step is recorded, and there are no records."""
    loop = Loop(Sampling(1))
    loop.step(0, 1.0)
    loop.run.enabled = False
    loop.step(1, 2.0)
    assert not loop.module._forward_hooks
    loop.run.enabled = True
    loop.step(2, 4.0)
    assert loop.shown == {0: 1.0, 2: 4.0}


@pytest.mark.parametrize(("reduce", "expected"), [(2, {1: 3.0, 5: 16.0}), ("epoch", {5: 19.0})])
def test_disabled_in_a_window(reduce: Reduce, expected: dict[int, float]) -> None:
    """A window in which recording was enabled for some steps is a record, and one without them is none."""
    loop = Loop(Sampling(1), reduce)
    for step, is_enabled in enumerate([True, True, False, False, True, False]):
        loop.run.enabled = is_enabled
        loop.step(step, 2.0**step)
    loop.run.end_epoch(5)
    loop.step(6, 100.0, epoch=1)
    loop.run.end_epoch(6)
    assert loop.shown == expected


def test_disabled_after_a_resume() -> None:
    """The statistics of a checkpoint are in a record, also if recording is disabled afterwards."""
    first, second = Loop(Sampling(1), 3), Loop(Sampling(1), 3)
    first.step(0, 1.0)
    second.run.load_state_dict(first.run.state_dict(), 1, 0)
    second.run.enabled = False
    for step in range(1, 6):
        second.step(step, 2.0)
    assert second.shown == {2: 1.0}


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("reduce", ["step", 3, "epoch"])
def test_a_saved_run_resumes_bitwise(reduce: Reduce, at: int) -> None:
    """A run that resumes from a state saved at any step has the same records as an uninterrupted run."""
    values = torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()

    def go(loop: Loop, steps: Sequence[int]) -> None:
        for step in steps:
            loop.step(step, values[step], epoch=step // 4)
            if step % 4 == 3:
                loop.run.end_epoch(step)

    whole = Loop(Sampling(1), reduce)
    go(whole, range(8))
    first = Loop(Sampling(1), reduce)
    go(first, range(at))
    saved = copy.deepcopy(first.run.state_dict())
    second = Loop(Sampling(1), reduce)
    second.run.load_state_dict(saved, at, at // 4)
    go(second, range(at, 8))
    assert {**first.shown, **second.shown} == whole.shown


def test_an_aborted_step_is_repeated() -> None:
    """After a failure, the record includes the interrupted step, and the state does not."""
    loop = Loop(Sampling(1), 5)
    loop.step(0, 1.0)
    loop.run.start_batch(1, 0)
    loop.module(torch.tensor([10.0]))
    loop.run.abort()
    assert loop.shown == {1: 11.0}
    again = Loop(Sampling(1), 5)
    again.run.load_state_dict(loop.run.state_dict(), 1, 0)
    for step in range(1, 5):
        again.step(step, 10.0)
    assert again.shown == {4: 41.0}


def test_an_incomplete_window_stays_in_the_state() -> None:
    """An incomplete window at the end of a run is written, and a resumed run completes it."""
    loop = Loop(Sampling(1), 4)
    loop.step(0, 1.0)
    loop.step(1, 2.0)
    loop.run.finish()
    again = Loop(Sampling(1), 4)
    again.run.load_state_dict(loop.run.state_dict(), 2, 0)
    again.step(2, 4.0)
    again.step(3, 8.0)
    assert (loop.shown, again.shown) == ({1: 3.0}, {3: 15.0})


def test_who_cannot_write_a_record_is_given_no_other() -> None:
    """A failing callback causes one warning, and the loop continues without hooks."""
    given = []

    def refuse(record: Record) -> None:
        given.append(record.step)
        raise OSError("disk full")

    module = nn.Identity()
    run = RunRecorder(StatisticsRecorder({"m": module}), Sampling(1), refuse, name="it")

    def step(number: int) -> None:
        run.start_batch(number, 0)
        module(torch.ones(1))
        run.end_batch(stepped=True)

    with pytest.warns(RecorderWarning, match="^it is off for the rest of the run: OSError: disk full$"):
        step(0)
    step(1)
    assert (given, run.failed) == ([0], True)
    assert not module._forward_hooks


class Ticking(nn.Module):
    """A recorder that takes a second of a fake clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.now += 1.0
        return x


def test_the_budget_widens_the_cadence() -> None:
    """If the hooks take half as long as a step, an overhead of 0.1 means recording every fifth step."""
    module = Ticking()
    loop = Loop(Sampling(1), options={"budget": OverheadLimit(0.1), "clock": lambda: module.now}, module=module)
    states = loop.run.recorder.states
    add = states.add

    def slowly(site: Site, tensor: Tensor, factor: float = 1.0, *, extra: bool = True) -> None:
        module.now += 0.5
        add(site, tensor, factor, extra=extra)

    states.add = slowly  # type: ignore[method-assign]  # simulates a slow recorder
    for step in range(20):
        loop.step(step, 1.0)
    # The first record is excluded, the second one is measured, and the third one applies the new interval.
    assert list(loop.shown) == [0, 1, 2, 4, 9, 14, 19]
    assert loop.run.every_n_train_steps == 5


def test_the_first_recorded_step_is_announced() -> None:
    """If a record spans several steps, the first recorded step is announced once."""
    warned: list[int] = []
    loop = Loop(Sampling(2), "epoch", options={"announce": lambda step, ms: warned.append(step)})
    loop.epoch(range(6))
    assert warned == [0]


def test_the_phases_of_a_run() -> None:
    """Each batch, each step and the end of the run lead to the documented phase."""
    run = Loop(Sampling(3)).run  # steps 0, 2, 5, ... are due
    assert run.phase is RunPhase.WAITING
    calls: list[tuple[Callable[[], object], RunPhase]] = [
        (partial(run.start_batch, 0, 0), RunPhase.RECORDING),
        (partial(run.end_batch, stepped=False), RunPhase.RECORDING),
        (partial(run.start_batch, 0, 0), RunPhase.RECORDING),
        (partial(run.end_batch, stepped=True), RunPhase.WAITING),
        (partial(run.skip_batch, 1, 0), RunPhase.IDLE),
        (partial(run.start_batch, 1, 0), RunPhase.WAITING),
        (partial(run.end_batch, stepped=True), RunPhase.ARMED),
        (partial(run.skip_batch, 2, 0), RunPhase.ARMED),
        (partial(run.start_batch, 2, 0), RunPhase.RECORDING),
        (partial(run.end_epoch, 1), RunPhase.WAITING),
        (run.finish, RunPhase.ENDED),
    ]
    for number, (call, phase) in enumerate(calls):
        call()
        assert run.phase is phase, number


def test_a_batch_in_an_open_window_is_not_idle() -> None:
    """While a window has unwritten statistics, each batch must be ended, so that the window can be written."""
    loop = Loop(Sampling(3), 4)
    loop.step(0, 1.0)
    assert loop.run.skip_batch(1, 0)
    assert loop.run.phase is RunPhase.WAITING


def test_a_recorder_that_aborts_has_ended() -> None:
    """After a failure during a step, the recorder is at its end, and a second abort makes no record."""
    loop = Loop(Sampling(1))
    loop.run.start_batch(0, 0)
    loop.module(torch.ones(1))
    for _ in range(2):
        loop.run.abort()
        assert loop.run.phase is RunPhase.ENDED
    assert loop.shown == {0: 1.0}
