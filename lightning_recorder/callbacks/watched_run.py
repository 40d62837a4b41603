"""Watch every step of a fit: read its values, detect spikes, replay bad steps and create findings."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.logged_values import LoggedValues
from lightning_recorder.callbacks.replay import Replay, ReplayError, other_values, replay, runs_alone
from lightning_recorder.callbacks.row_search import FoundRow, describe_row, find_row
from lightning_recorder.callbacks.trainer import device_of, is_automatic, largest_rate
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.insight import NON_FINITE, SPIKE, UNBOUNDED, Finding
from lightning_recorder.internals.autograd import counted_version, without_functions
from lightning_recorder.internals.compiled import compiled_modules
from lightning_recorder.internals.module_tree import named_parameters_of, parameters_of, takes_hooks
from lightning_recorder.internals.norms import local_values, norms_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.module_names import named_submodules
from lightning_recorder.reductions.kernels.fused import norm_of, prepare
from lightning_recorder.watch import (
    CommunicationError,
    KeptBatch,
    KeptParameters,
    ModuleFlags,
    ParameterCopies,
    Reading,
    ReadingQueue,
    SpikeDetector,
    StateKeeper,
    StepSeries,
    verdict,
)
from lightning_recorder.watch.spikes import LEAST, RECENT

__all__ = ["Discovery", "WatchedRun"]

_MOST_REPLAYS = 5
_MOST_SEARCHES = 5  # the maximum number of searches for the bad sample of a step, and of searches in the first steps
_EARLY = 10.0  # in the first steps, the factor of a spike is multiplied by this, and one sample must make the spike
_MOST_KEPT = 4  # the maximum number of steps whose batches are kept until their values have arrived
_KIND = attrgetter("dtype", "device")
_FULL_LOSS_SCALE = 1.0  # above this loss scale, gradients that are not finite are an overflow of half precision
_WAIT = "StepWatch(wait=True), StepWatch(keep_parameters=True) or StepWatch(every_module=True)"
_STALE = "its batches give finite values with the parameters of {steps} before, the last ones that were kept"

_Row: TypeAlias = tuple[KeptBatch, FoundRow, str]  # a sample, with its batch and ``"loss"`` or ``"gradient norm"``
_Spike: TypeAlias = tuple[str, float, float]  # ``"loss"`` or ``"gradient norm"``, the value, and the running median


@dataclass(frozen=True)
class Discovery:
    """A finding, and the data of its step."""

    finding: Finding
    reading: Reading  # the values of the step
    batch: KeptBatch | None  # the batch of the finding, if it is still kept
    # the parameters from before the step, in the order of the model, if they are known
    parameters: Sequence[Tensor] | None
    is_new: bool  # False if the same rule has already reported a finding for the same module and path
    is_worse: bool = False  # True if the earlier finding was a note, and this finding is not


@dataclass
class _Step:
    """The optimizer step in progress."""

    batches: list[KeptBatch] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    # By optimizer. If an optimizer computes the gradients several times, like LBFGS, the first evaluation is kept.
    norms: dict[int, tuple[list[nn.Parameter], list[Tensor]]] = field(default_factory=dict)
    totals: dict[int, Tensor | float] = field(default_factory=dict)
    optimizer_steps: int = 0
    """The number of optimizer steps since the last batch began."""
    reading: Reading | None = None
    """The values of the step so far, if they were read before the optimizer stepped."""
    has_bad_gradient: bool = False
    """True if a NaN or an infinity was found in the gradients before the optimizer steps."""
    has_ended: bool = False
    row: _Row | None = None
    """The sample that makes a spike."""
    bad: Finding | None = None
    """The finding about the step, if it is known before the optimizer steps."""


class WatchedRun:
    """Watches the steps of one fit."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        series: StepSeries,
        on_discovery: Callable[[Discovery], object],
        *,
        on_spike: Callable[[int], object],
        spikes: float,
        wait: bool,
        keep_parameters: bool | Literal["auto"],
        every_module: bool,
        name_row: Callable[[list[int] | None, int], str],
    ) -> None:
        device = device_of(pl_module)
        self._trainer, self._pl_module, self._series = trainer, pl_module, series
        self._on_discovery, self._on_spike = on_discovery, on_spike
        self._is_on_host = self._is_host(device)
        self._reads_now, self._acts = wait or self._is_on_host, wait
        if self._is_on_host:
            prepare()
        self._is_automatic = is_automatic(pl_module)
        self._copies: ParameterCopies | None = None
        if keep_parameters and not self._reads_now and (keep_parameters is True or self._is_automatic):
            self._copies = ParameterCopies(list(parameters_of(pl_module)), device, keep_parameters)
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._keeper = StateKeeper(pl_module, device)
        self._queue: ReadingQueue[Reading] = ReadingQueue(device, _MOST_KEPT)
        self._factor = spikes
        self._usual_rows = 0  # the number of samples in the first step of an epoch
        self._spikes = {name: SpikeDetector(spikes) for name in ("loss", "gradient norm")}
        self._rank = f", rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        self._known: dict[tuple[str, str, str], Finding] = {}
        self._was_bad = False
        self._bad: Finding | None = None  # the last finding about a value that is not finite
        self._overflow: int | None = None  # the last step whose gradient norm overflowed
        self._replays, self._searches = 0, [0, 0]  # the second number of searches is for the first steps
        self._left_out: set[int] = set()  # the skipped steps
        self._latest_row: tuple[int, _Row] | None = None  # the last spike that a single sample makes: step and sample
        self._name_row = name_row
        self.unnamed: Finding | None = None
        """A finding about a bad gradient that came from another rank. Reported if no rank names its origin."""
        self._flags: ModuleFlags | None = None
        if every_module:
            compiled = compiled_modules(pl_module)
            modules = named_submodules(pl_module).items()
            self._flags = ModuleFlags(
                {name: each for name, each in modules if name and each not in compiled and takes_hooks(each)}
            )
        self._step = _Step(has_ended=True)
        self._logged = LoggedValues(trainer, device, series.add_logged, is_on_host=self._is_on_host)

    @property
    def bad(self) -> Finding | None:
        """The finding about the current step, if it is known before the optimizer steps."""
        return self._step.bad

    @property
    def has_cause(self) -> bool:
        """True if the finding about the current step names the origin of the bad value or the sample that caused it."""
        return self._step.bad is not None and (self._step.bad is self._bad or self._step.row is not None)

    @property
    def reading(self) -> Reading | None:
        """The values of the current step, if they are known before the optimizer steps."""
        return self._step.reading

    @property
    def has_bad_gradient(self) -> bool:
        """True if a NaN or an infinity was found in the gradients of the current step before the optimizer steps."""
        return self._step.has_bad_gradient

    @staticmethod
    def _is_host(device: torch.device) -> bool:
        """Return True if values can be read without waiting for a device."""
        return device.type == "cpu"

    # The course of a step.

    def start_batch(self, batch: Any, batch_idx: int, step: int, rows: list[int] | None = None) -> None:
        """Begin a batch: keep the state for a replay."""
        # This runs for every batch, so rare cases are recognized without a call.
        if not self._reads_now and (found := self._queue.take()):
            self._arrive(found)
        if self._series.has_logged:
            self._series.replay()
        if self._logged.ended is not None:
            self._logged.settle()
        if self._step.has_ended or (self._step.batches and self._step.batches[-1].step != step):
            self._step = _Step()
            if self._flags is not None:
                self._flags.begin_step()
        self._step.optimizer_steps = 0
        kept = self._keeper.keep(batch, batch_idx, step=step, epoch=self._trainer.current_epoch)
        kept.indices = rows
        self._step.batches.append(kept)
        self._step.indices.append(batch_idx)
        if self._flags is not None:
            self._flags.begin_batch()

    def add_loss(self, loss: Tensor) -> None:
        """Note a loss before its backward pass."""
        if self._step.batches:
            self._step.reading = None
            with without_functions():  # so that a captured graph does not contain the ``detach``
                self._step.batches[-1].losses.append(loss.detach())

    def before_step(self, optimizer: Any) -> None:
        """Measure the gradients that an optimizer is about to use."""
        if not self._step.batches:
            return
        parameters, gradients = [], []
        for group in getattr(optimizer, "param_groups", ()):
            for each in group["params"]:
                gradient = each.grad
                if gradient is not None:
                    parameters.append(each)
                    gradients.append(gradient)
        with pause_recording():
            if parameters:
                norms: list[Tensor] = []
                whole = norm_of(gradients) if self._is_on_host else None
                total: Tensor | float = math.nan if whole is None else whole
                if whole is None or not math.isfinite(whole):  # the norms of the single gradients show which are bad
                    norms = norms_of(gradients)
                    total = _total(norms, on_host=self._reads_now)
                if self._scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
                    total = total / self._scale(gradients[0])  # Lightning leaves unscaling to such an optimizer
                key = id(optimizer)
                # LBFGS computes the gradients several times in a step. Only its first evaluation uses the parameters
                # from before the step. With manual optimization, the same optimizer may begin another step instead.
                is_again = self._is_automatic and key in self._step.totals
                if not is_again or (self._reads_now and not math.isfinite(total)):
                    self._step.norms[key], self._step.totals[key] = (parameters, norms), total
            if self._reads_now:
                self._step.reading = reading = self._reading(self._step.batches)
                if reading.read():
                    self._examine(reading, parameters_are_known=True)
                    is_finding = self._is_finding(reading)
                    self._step.has_bad_gradient = is_finding and not math.isfinite(reading.values[1])
                    self._step.bad = self._bad or self._unnamed(reading, "", is_known=True) if is_finding else None
                else:
                    self._bad = self._step.bad = None
                    loss, norm = reading.values
                    may_spike = loss > self._spikes["loss"].limit or norm > self._spikes["gradient norm"].limit
                    spikes = self._spikes_of(reading) if may_spike and self._factor else []
                    is_early = not spikes and self._factor > 0 and self._spikes["loss"].limit == math.inf
                    if is_early and (early := self._early_spike(reading)) is not None:
                        spikes = [early]
                    if spikes:  # the sample is searched now, while the parameters are still those of the step
                        self._step.row = row = self._row_of_spike(reading, spikes, is_early=is_early)
                        if not is_early or self._is_certain(spikes[0], row):
                            spike = self._spike(spikes, reading, is_early=is_early)
                            self._step.bad = self._with_row(spike, row, reading)
            elif self._copies is not None and self._copies.is_due(step := self._step.batches[-1].step):
                # The device is busy with this step while the host waits for the values of the previous step.
                if found := self._queue.take(wait=self._copies.waits):
                    self._arrive(found)
                self._copies.take(step, self._queue.oldest)
        self._step.optimizer_steps += 1
        if self._logged.is_due or self._step.batches[-1].step >= self._logged.next_due:
            self._logged.before_step(self._step.batches[-1].step)

    def _first(self, losses: list[Tensor]) -> list[Tensor]:
        """Return the loss of the first evaluation of a batch, or the last loss if it is known not to be finite."""
        if self._reads_now and len(losses) > 1 and not math.isfinite(losses[-1]):
            return losses[-1:]
        return losses[:1]

    def end_batch(self, *, is_last: bool, is_left_out: bool = False) -> None:
        """End a batch. With ``is_last``, also end the step. ``is_left_out`` is True if the step was skipped."""
        if not self._step.batches:
            return
        if is_left_out:
            self._left_out.add(self._step.batches[-1].step)
        with without_functions():  # same as KeptBatch.is_changed, with one Python call less in each step
            for tensor, version in self._step.batches[-1].versions:
                if version is not None and counted_version(tensor) != version:
                    self._keeper.must_copy = True
        if self._flags is not None:
            self._flags.end_batch()
        if not is_last:
            return
        self._step.has_ended = True
        if self._logged.is_due:
            self._logged.ended = self._step.batches[-1].step
        if self._step.reading is not None and self._flags is None:  # flags are only complete at the end of the batch
            self._arrive([self._step.reading])
            return
        if not self._reads_now:
            with without_functions():
                self._queue.add(self._reading(self._step.batches))
            return
        with pause_recording():
            reading = self._reading(self._step.batches)
            reading.read()
            self._arrive([reading])

    def abandon_step(self) -> None:
        """Discard the current step after an exception in its batch, if the loop continues."""
        if self._flags is not None and self._step.batches:
            self._flags.end_batch()
        self._step = _Step(has_ended=True)

    def settle_logged(self) -> None:
        """Read the values that Lightning has logged in the last step."""
        self._logged.settle()

    def read_logged(self) -> None:
        """Read the values that Lightning has logged since the last step."""
        self._logged.read()

    def flush(self) -> None:
        """Read all values, waiting for the device, and write them."""
        self._arrive(self._queue.take(wait=True))
        self._logged.settle()
        self._logged.arrive(wait=True)
        self._series.flush()

    def save(self) -> None:
        """Write all steps and wait until they are written. The values of a step in progress are not read."""
        if self._step.has_ended:
            self._arrive(self._queue.take(wait=True))
            self._logged.arrive(wait=True)
        self._series.wait()

    def end(self) -> None:
        """Read and write everything, and remove all hooks."""
        if self._flags is not None:
            self._flags.remove()
        self.flush()
        self._series.end()

    def _reading(self, batches: list[KeptBatch]) -> Reading:
        """Return the mean loss of the batches, before any scaling by the trainer, and the gradient norm of the step."""
        divides = self._is_automatic or getattr(self._trainer, "logs_loss", False)
        # An optimizer that calls its closure several times computes the loss several times. Only one of these losses
        # counts, except in manual optimization.
        if len(batches) == 1 and len(batches[0].losses) == 1:
            losses = batches[0].losses
        else:
            losses = [each for kept in batches for each in (self._first(kept.losses) if divides else kept.losses)]
        loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0] if losses else None
        count = self._trainer.accumulate_grad_batches
        if loss is not None and divides and len(losses) != count:  # Lightning has divided each loss by the count
            loss = loss * (count / len(losses))
        if loss is not None and self._scaler is not None:
            loss = loss / self._scale(loss)
        totals = list(self._step.totals.values())
        norm = totals[0] if len(totals) == 1 else None
        if len(totals) > 1:
            device = next((each.device for each in totals if isinstance(each, Tensor)), "cpu")
            norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(each, device=device) for each in totals]))
        flags = None if self._flags is None else self._flags.flags()
        step, epoch, norms = batches[-1].step, batches[-1].epoch, list(self._step.norms.values())
        return Reading(step, epoch, loss, norm, norms, self._step.indices, flags, list(batches))

    def _scale(self, like: Tensor) -> Tensor:
        """Return the loss scale as a tensor, without waiting for the device."""
        scale: Tensor = self._scaler.scale(torch.ones((), device=like.device))
        return scale

    # Values that have arrived.

    def _arrive(self, readings: list[Reading]) -> None:
        for reading in readings:
            loss, norm = reading.values
            self._series.add(reading.step, reading.epoch, loss, norm)
            if (math.isfinite(loss) and math.isfinite(norm)) or not reading.is_bad:
                self._was_bad = False
                if reading.indices[:1] == [0]:
                    self._usual_rows = reading.rows or self._usual_rows
                is_early = self._factor > 0 and self._spikes["loss"].limit == math.inf
                if is_early and (early := self._early_spike(reading)) is not None:
                    self._report_spike([early], reading, is_early=True)
                # The values of a skipped step must not change the running statistics.
                is_left_out = reading.step in self._left_out
                spikes = []
                for (name, detector), value in zip(self._spikes.items(), reading.values, strict=True):
                    median = detector.median_below(value) if is_left_out else detector.add(value)
                    if median is not None:
                        spikes.append((name, value, median))
                if spikes or self._known:
                    self._report_spikes(spikes, reading)
                fall = self._spikes["loss"].fall() if loss < 0 else None
                if fall is not None and (UNBOUNDED, "", "") not in self._known:
                    self._report(
                        verdict.finding_of_fall(fall, reading, largest_rate(self._trainer), rank=self._after(reading)),
                        reading,
                    )
            elif self._is_finding(reading):
                self._examine(reading, parameters_are_known=False)

    def _is_finding(self, reading: Reading) -> bool:
        """Return True if a value is not finite, unless the loss scaler skips the step because of an overflow."""
        if self._scaler is None or reading.has_bad_loss:
            return reading.is_bad
        return reading.is_bad and float(self._scaler.get_scale()) <= _FULL_LOSS_SCALE

    def _after(self, batch: Reading | int) -> str:
        """Return the words after the batch in a message: the rank, and a hint if it is the last batch of the epoch.

        The last batch often has fewer samples.
        """
        index = batch if isinstance(batch, int) else max(batch.indices, default=0)
        is_last = 1 < self._trainer.num_training_batches == index + 1
        return (", the last of each epoch" if is_last else "") + self._rank

    def _report_spikes(self, spikes: list[_Spike], reading: Reading) -> None:
        """Report the spikes of a step, or a larger value shortly after a spike."""
        if spikes and self._factor:
            self._report_spike(spikes, reading)
            self._on_spike(reading.step)
        if spikes:
            return
        stay, known = self._spikes["loss"].stays(), self._known.get((SPIKE, "", "loss"))
        if stay is not None and known is not None and known.is_note:
            self._tell(verdict.with_stay(known, stay), reading, known)
        for (name, detector), value in zip(self._spikes.items(), reading.values, strict=True):
            if (SPIKE, "", name) in self._known and (median := detector.exceeds_spike()) is not None:
                self._report_spike([(name, value, median)], reading, records=0)

    def _report_spike(
        self, spikes: list[_Spike], reading: Reading, records: int = 1, *, is_early: bool = False
    ) -> None:
        if self._reads_now:
            row = self._step.row
        else:
            with self._with_kept(self._kept_for(reading)):
                row = self._row_of_spike(reading, spikes, is_early=is_early)
        if row is not None and row[1].is_only:
            self._latest_row = reading.step, row
        if is_early and not self._is_certain(spikes[0], row):
            return
        # A user who waits for the values can act on a spike, so it is never reduced to a note about a steep region.
        may_pass = row is None and not self._acts
        found = self._spike(spikes, reading, may_pass=may_pass, is_early=is_early)
        self._report(self._with_row(replace(found, records=records), row, reading), reading)

    def _spike(
        self, spikes: list[_Spike], reading: Reading, *, may_pass: bool = False, is_early: bool = False
    ) -> Finding:
        return verdict.finding_of_spike(
            spikes,
            reading,
            factor=self._factor,
            is_clipped=bool(self._trainer.gradient_clip_val),
            share=self._spikes["loss"].share(reading.values[0]),
            highest=self._spikes["gradient norm"].highest,
            is_usual=may_pass and self._spikes["loss"].is_usual(reading.values[0]),
            rank=self._after(reading),
            usual_rows=self._usual_rows,
            is_early=is_early,
        )

    def _spikes_of(self, reading: Reading) -> list[_Spike]:
        """Return the values of a step that would be spikes, each with its name and the running median."""
        named = zip(self._spikes.items(), reading.values, strict=True)
        medians = [(name, value, each.median_below(value)) for (name, each), value in named if math.isfinite(value)]
        return [(name, value, median) for name, value, median in medians if median is not None]

    def _early_spike(self, reading: Reading) -> _Spike | None:
        """Return the loss if it would be a spike but is among the first steps, where the median is not reliable."""
        loss = reading.values[0]
        median = self._spikes["loss"].early_median_below(loss) if math.isfinite(loss) else None
        return None if median is None else ("loss", loss, median)

    def _is_certain(self, early: _Spike, row: _Row | None) -> bool:
        """Return True if a spike among the first steps is large enough to report and a single sample makes it."""
        return row is not None and early[1] >= _EARLY * self._factor * early[2]

    # The sample that makes a step bad.

    def _row_of_spike(self, reading: Reading, spikes: list[_Spike], *, is_early: bool = False) -> _Row | None:
        """Return the sample that makes a spike, or None if there is no spike or no such sample.

        Among the first steps and after a rise, the training may diverge, so that all samples are bad, and some worse
        than others. A sample is then only returned if the step without it has usual values.
        """
        is_small = 0 < 2 * reading.rows < self._usual_rows
        if not spikes or not self._factor or is_small or self._is_after_spike(reading):
            return None
        series, value, median = spikes[0]
        batches = [each for each in reading.batches if each.losses]
        if not batches:
            return None
        batch = max(batches, key=lambda each: float(each.losses[-1])) if len(batches) > 1 else batches[0]
        share = math.sqrt(median / value)  # the limit is the geometric mean of the median and the spike

        limit = share * value
        if is_early:
            limit = min(limit, self._spikes["loss"].recent_limit)
        must_be_only = is_early or any(each.rise() for each in self._spikes.values())
        return self._find_row(batch, lambda found: not found <= limit, reading, series, must_be_only=must_be_only)

    def _is_after_spike(self, reading: Reading) -> bool:
        """Return True if a step follows soon after a spike. The spike then explains a bad value, not the samples."""
        known = [each.last_step for each in self._known.values() if each.rule == SPIKE]
        return any(0 < reading.step - step <= RECENT for step in known if step not in self._left_out)

    def _row_of_bad(self, reading: Reading, batch: KeptBatch | None) -> _Row | None:
        """Return the sample that makes the loss or the gradients of a step not finite."""
        batch = reading.batches[0] if batch is None and len(reading.batches) == 1 else batch
        series = "loss" if reading.has_bad_loss else "gradient norm"
        if batch is None:
            return None
        return self._find_row(batch, lambda found: not math.isfinite(found), reading, series)

    def _find_row(
        self,
        batch: KeptBatch,
        is_bad: Callable[[float], bool],
        reading: Reading,
        series: str,
        *,
        must_be_only: bool = False,
    ) -> _Row | None:
        if self._searches[must_be_only] >= _MOST_SEARCHES or not runs_alone(self._trainer, self._pl_module):
            return None
        self._searches[must_be_only] += 1
        try:
            if self._trainer.world_size > 1:  # this replay raises an error if the step communicates
                replay(self._trainer, self._pl_module, [batch])
            found = find_row(
                self._trainer,
                self._pl_module,
                batch,
                is_bad,
                of_gradient=series != "loss",
                must_be_only=must_be_only,
            )
        except Exception:  # noqa: BLE001 - the step of the user may raise anything for a part of its batch
            return None
        return None if found is None else (batch, found, series)

    def _with_row(self, finding: Finding, row: _Row | None, reading: Reading) -> Finding:
        """Return a finding extended by the sample that caused it, or else by the rows of its batch."""
        if row is None:
            rows = [index for each in reading.batches for index in each.indices or ()]
            return verdict.with_batch(finding, rows) if rows else finding
        batch, found, series = row
        name = self._name_row(batch.indices, found.place)
        about = describe_row(batch.batch, found.place)
        others = None if found.is_only else found.others
        finding = verdict.with_row(finding, name, series, found.value, found.without, about, others)
        return replace(finding, numbers={**finding.numbers, **_numbers_of_row(row)})

    # Bad values.

    def _examine(self, reading: Reading, *, parameters_are_known: bool) -> None:
        """Find the origin of a bad value. Only the first of consecutive bad steps is examined."""
        if self._was_bad or not self._is_finding(reading):
            return
        if parameters_are_known and not reading.has_bad_loss and not _has_bad_gradient(reading):
            self._overflow = reading.step  # the norm overflowed, but no gradient did
            return
        self._was_bad = True
        if reading.step == self._overflow and not reading.has_bad_loss:
            self._report(self._with_rise(verdict.finding_of_overflow(reading, rank=self._after(reading))), reading)
            return
        kept = None if parameters_are_known else self._kept_for(reading)
        is_known = parameters_are_known or kept is not None
        batch: KeptBatch | None = None
        try:
            found, because = self._replayed(reading, kept) if is_known else (None, "")
        except (ReplayError, CommunicationError) as error:
            found, because = None, str(error)
        except Exception as error:  # noqa: BLE001 - the step of the user may raise anything
            found, because = None, f"running the step again failed: {describe_error(error)}"
            warn(f"StepWatch could not run step {reading.step} again: {describe_error(error)}")
        origin, index = None, 0
        flagged = reading.flags.origin() if found is None and reading.flags is not None else None
        if flagged is not None:
            origin, index = flagged[0], reading.indices[flagged[1]]
        elif found is not None and found.origin is not None and found.batch is not None:
            origin, batch, index = found.origin, found.batch, found.batch.batch_idx
        if origin is not None:
            finding = verdict.finding_of_origin(origin, reading, index, rank=self._after(index))
            if kept is not None and flagged is None and kept.step < reading.step:
                finding = verdict.with_older_parameters(finding, reading.step - kept.step)
        else:
            is_stale = kept is not None and kept.step < reading.step and found is not None
            finding = self._unnamed(reading, because, is_known=is_known and not is_stale)
            if self._trainer.world_size > 1 and not reading.has_bad_loss and found is not None:
                self.unnamed = finding  # another rank may name the origin
                return
        if kept is not None:
            values = kept.values if kept.step == reading.step else None
        else:
            values = [each.detach() for each in parameters_of(self._pl_module)] if is_known else None
        # A bad value in a batch or a constant is not a consequence of earlier steps, so a spike before it does not
        # matter.
        is_given = origin is not None and (origin.has_constant or origin.source.startswith("batch"))
        is_of_parameter = origin is not None and origin.source.startswith("parameter ")
        # After a spike or a rise, any sample may make the step bad, so no sample is named.
        is_after = self._is_after_spike(reading) or any(each.rise() for each in self._spikes.values())
        if is_known and not is_of_parameter and (is_given or not is_after):
            with self._with_kept(kept):
                finding = self._with_row(finding, self._row_of_bad(reading, batch), reading)
        self._report(finding if is_given else self._with_rise(finding), reading, batch, values)

    def _with_rise(self, finding: Finding) -> Finding:
        """Return a finding extended by the rise of the loss or of the gradient norm before it, if there was a rise."""
        for series, detector in self._spikes.items():
            rise = detector.fall() or detector.rise()
            if rise is None:
                continue
            finding = verdict.with_rise(finding, series, rise, largest_rate(self._trainer))
            if self._latest_row is not None and "row" not in finding.numbers:
                step, (batch, found, what) = self._latest_row
                if rise.last > rise.before and 0 < finding.first_step - step <= LEAST:
                    name, about = self._name_row(batch.indices, found.place), describe_row(batch.batch, found.place)
                    finding = verdict.with_row_before(finding, name, what, step, found.value / found.without, about)
                    return replace(finding, numbers={**finding.numbers, **_numbers_of_row(self._latest_row[1])})
            return finding
        return finding

    def _kept_for(self, reading: Reading) -> KeptParameters | None:
        """Return the newest copy of the parameters from before this step, taken at this step or an earlier one."""
        return None if self._copies is None else self._copies.latest(reading.step)

    def _with_kept(self, kept: KeptParameters | None) -> AbstractContextManager[None]:
        if kept is None:
            return nullcontext()
        return other_values(list(parameters_of(self._pl_module)), kept.values)

    def _replayed(self, reading: Reading, kept: KeptParameters | None) -> tuple[Replay | None, str]:
        if self._replays >= _MOST_REPLAYS:
            return None, f"{_MOST_REPLAYS} steps have been run again before"
        if not reading.batches:
            return None, "its batch was no longer kept"
        if kept is not None and not runs_alone(self._trainer, self._pl_module):
            return None, "in manual optimization, the values must be read before the optimizer steps"
        self._replays += 1
        steps, age = self._step.optimizer_steps, 0 if kept is None else reading.step - kept.step
        with self._with_kept(kept):
            found = replay(self._trainer, self._pl_module, reading.batches, steps=steps, is_exact=not age)
        if found.origin is None and age:
            return found, _STALE.format(steps="1 step" if age == 1 else f"{age} steps")
        if found.origin is None:
            return found, "its batches give finite values when they are run again: a hook or the accumulation made it"
        return found, ""

    def _unnamed(self, reading: Reading, because: str, *, is_known: bool) -> Finding:
        step = reading.step
        option = (
            "run it again with StepWatch(every_module=True), or with ActivationRecorder, GradientRecorder and "
            f"ParameterRecorder, each with every_n_train_steps=1, schedule=Schedule(step_window=({max(0, step - 1)}, "
            f"{step + 1}))"
        )
        if not is_known:
            because = because or "the optimizer had stepped when the values arrived from the device"
            option = _WAIT
        names = {id(each): name for name, each in named_parameters_of(self._pl_module)}
        bad = [names.get(id(parameter), "") for parameter in _bad_parameters(reading)]
        modules = [name for name in names.values() if name in bad]
        return verdict.finding_without_origin(
            reading, reading.indices, because=because, option=option, modules=modules, rank=self._after(reading)
        )

    def _report(
        self,
        finding: Finding,
        reading: Reading,
        batch: KeptBatch | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        key = finding.rule, finding.module, finding.path
        known = self._known.get(key)
        if known is not None and finding.rule == SPIKE:
            finding = verdict.with_spike(known, finding)
        elif known is not None:
            finding = replace(known, last_step=finding.last_step, records=known.records + 1)
        self._tell(finding, reading, known, batch, parameters)

    def _tell(
        self,
        finding: Finding,
        reading: Reading,
        known: Finding | None,
        batch: KeptBatch | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        """Replace the known finding of the same rule, module and path, and pass the new finding to the callback."""
        self._known[finding.rule, finding.module, finding.path] = finding
        if finding.rule == NON_FINITE:
            self._bad = finding
        is_worse = known is not None and known.is_note and not finding.is_note
        batch = batch or next(iter(reading.batches), None)
        self._on_discovery(Discovery(finding, reading, batch, parameters, known is None, is_worse))


def _numbers_of_row(row: _Row) -> dict[str, float]:
    batch, found, _ = row
    numbers = {"place": float(found.place)}
    if batch.indices is not None and found.place < len(batch.indices):
        numbers["row"] = float(batch.indices[found.place])
    return numbers


def _total(norms: list[Tensor], *, on_host: bool) -> Tensor | float:
    """Return the total norm of several tensors from their norms."""
    device = norms[0].device
    if on_host and device.type == "cpu":  # for ten tensors, half the time of the two kernels below
        return math.sqrt(sum([value * value for value in map(float, norms)]))
    if set(map(_KIND, norms)) != {(torch.float32, device)}:
        norms = [each.to(device, torch.float32) for each in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _has_bad_gradient(reading: Reading) -> bool:
    parameters = (each for group, _ in reading.norms for each in group)
    gradients = (local_values(each.grad) for each in parameters if each.grad is not None)
    return any(not bool(torch.isfinite(each).all()) for each in gradients)


def _bad_parameters(reading: Reading) -> list[nn.Parameter]:
    found = []
    for parameters, norms in reading.norms:
        found += [each for each, norm in zip(parameters, norms, strict=False) if not math.isfinite(norm)]
    return found


def log_of_rank(message: str) -> None:
    """Log a message on a rank other than 0. Only rank 0 lists the findings at the end."""
    logging.getLogger("lightning.pytorch").info(message)
