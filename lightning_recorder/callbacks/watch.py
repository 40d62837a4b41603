"""Watch the loss and the gradients of every step, and name the origin of the first bad value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.callbacks.actions import ACTIONS, StepActions
from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.lightning import FSDPStrategy, LightningModule, Trainer
from lightning_recorder.callbacks.reproduce import save_incident
from lightning_recorder.callbacks.shared_findings import end_findings, findings_of
from lightning_recorder.callbacks.trainer import (
    are_ranks_even,
    decline,
    ends_step,
    is_automatic,
    logged_step,
    make_directory,
    stepped,
)
from lightning_recorder.callbacks.watched_run import Discovery, WatchedRun, log_of_rank
from lightning_recorder.callbacks.watched_samples import WatchedSamples
from lightning_recorder.errors import (
    ArgumentError,
    check_bool,
    check_callable,
    check_integer,
    check_number,
    describe_error,
    did_you_mean,
    warn,
)
from lightning_recorder.insight import NON_FINITE, Finding
from lightning_recorder.insight.data_facts import DataFacts
from lightning_recorder.outputs import RunFindings
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.signatures import checked_arguments
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics import Exchange
from lightning_recorder.statistics.snapshot import NOTHING
from lightning_recorder.watch import Reading, Replicas, StepSeries, WatchedRanks
from lightning_recorder.watch.incident import CHECKPOINT, write_finding

__all__ = ["StepWatch", "add_watch"]

_CHOICES = ("warn", "stop", *ACTIONS)


class StepWatch(RecorderCallback):
    """Watches the loss and the gradient norm of every step, and names the origin of the first bad value.

    A watch is added to each trainer that has a recorder of statistics, unless the trainer already has a watch. Your own
    watch replaces the watch of :func:`~lightning_recorder.default_recorders`. The loss and the gradient norm of every
    step are written to the records (``watch``). At the steps that Lightning logs, they are also written to the loggers,
    as ``watch/loss`` and ``watch/grad_norm``. The stage ``logged`` of the records has the learning rates and the values
    that the user logs with ``self.log``. They are read at the first 16 steps, at the steps that Lightning logs, and at
    the end of epochs and validations.

    At the first step whose loss or gradients are not finite, the step is run again with its batch, its random numbers
    and its buffers. The finding names the module, the number of the call, the direction (forward or backward), the
    operation, the line of code and the batch. The training does not change. On a CPU, and with ``wait=True`` on other
    devices, this happens before the optimizer steps. On a GPU, the values arrive a step later, when the parameters may
    already be spoiled. The step is then run again with a copy of the parameters; see ``keep_parameters``. Without a
    copy, the finding names the step and the direction, and the option that would have named the module. A step that a
    ``GradScaler`` skips because of an overflow is no finding.

    A loss or a gradient norm above ``spikes`` times its running median is a finding as well, and the recorders record
    the next step. The value must also exceed the noise of the series, and three times the largest value of the 10 steps
    before, so that high values after a spike are not counted again. A larger value within 10 steps is part of the same
    spike. Among the first 20 steps, only a loss above 10 × ``spikes`` times the median is a spike, and only if a single
    sample makes it. A spike of the gradient norm alone is a note if the trainer clips gradients, and does not end the
    fit. A spike of a loss that stays below half of the first losses is a note, too, unless the loss is still high 50
    steps later. A loss that falls below zero by 10,000 times the size of its first values is a finding as well.

    Args:
        spikes: A value is a spike if it is at least this multiple of the running median; 0 reports no spikes.
        on_finding: The action on a finding. ``"warn"`` logs the finding, once per kind and module. ``"stop"`` also
            saves a checkpoint and ends the fit. ``"skip"``, ``"rollback"`` and ``"lower_lr"`` act on each bad step
            before its optimizer steps. ``"skip"`` skips the step. ``"rollback"`` also restores the state of some steps
            before, and repeats the batches since then. ``"lower_lr"`` lowers the learning rate. A function is called
            with each :class:`~lightning_recorder.insight.Finding`. If the function returns one of these three words,
            this action is done, and the function is called again at the next such step.
        max_actions: The maximum number of actions in a fit.
        rollback_steps: The maximum number of steps that a rollback goes back, by default 50. The batches of the latest
            steps are kept for it, before their transfer to the device. Two copies of the parameters, the buffers and
            the optimizer state are kept as well, and a third one after the start of an epoch. Required if a function
            may return ``"rollback"``.
        lr_factor: The factor of ``"lower_lr"`` for all learning rates, including those of the schedulers.
        wait: Wait for the device before each optimizer step, so that a bad step can be run again exactly. On a CPU,
            there is nothing to wait for.
        keep_parameters: Keep copies of the parameters, so that a bad step can be run again on a device whose values
            arrive late. True copies them before each optimizer step; the device always has work meanwhile. ``"auto"``
            keeps two copies without waiting, if both take less than a tenth of the free memory. It copies as often as
            copying takes less than 1 % of the time of the steps. A bad step may then be run again with the parameters
            of a few steps before, and the finding says so. With manual optimization or sharded parameters, ``"auto"``
            keeps no copies. False never keeps any.
        every_module: Check the outputs of all modules, and the gradients of the outputs, on the device in every step.
            The finding then also names the module, but not the operation, if a step cannot be run again. Every step
            has one more kernel and one more hook call for each output and each gradient.
        check_ranks_every_n_steps: With several ranks, the number of steps between two comparisons of their parameters,
            buffers and optimizer states, in addition to the comparisons at each record; 0 compares after the first step
            only. By default, the ranks are compared after 1, 3, 10, 30, 100, 300, and then every 1,000 steps.
        incidents: Write the state of the step to ``<log_dir>/recorder/incidents/step-<n>``, with a script that runs the
            step again. The finding itself is always written there.
        save_batch: Also write the batch to this folder. Switch it off if the data are private.
        save_parameters: Also write the parameters and buffers from before the step to this folder.
        max_bytes: The maximum size in bytes of the batch, and of the parameters, in each of these folders.
        sinks: Further sinks, in addition to the loggers of the trainer.
        strict: Raise errors of the recorder instead of warning about them.

    Raises:
        ArgumentError: If an argument is invalid; raised at construction. Also if a trainer has two watches of your own;
            raised when its run starts.

    Note:
        Does not wait for the device unless ``wait`` is set: the values are copied to the host without waiting, and read
        when they have arrived. The norms take a few kernels per step. The batch of a step is kept until the values of
        the step have arrived, on a GPU for up to four steps. Under DDP, each rank watches its own batches, and the
        finding names the rank. A replay never communicates. With manual optimization, the loss is the sum of the losses
        passed to ``manual_backward``. If an optimizer such as LBFGS evaluates the loss several times in a step, the
        first evaluation is recorded, as in ``weight.grad`` of ``ParameterRecorder``. With several optimizers, the
        norm is computed over the gradients of all optimizers.

        The watch does not communicate in each step, so the recorded loss of a run with several ranks is the loss of
        rank 0. Under DDP, the gradients and their norm are the same on all ranks. Under FSDP2, each rank measures the
        norm of **its own shards**, and the norm of rank 0 is recorded. ``ParameterRecorder`` records whole gradients.

    Example::

        Trainer(callbacks=[StepWatch(on_finding="stop")])
    """

    group = "watch"
    is_default: bool = False
    """True if the package added this watch. A default watch does nothing if the user has passed another one."""

    @checked_arguments
    def __init__(
        self,
        *,
        spikes: float = 10.0,
        on_finding: Literal["warn", "stop", "skip", "rollback", "lower_lr"] | Callable[[Finding], object] = "warn",
        max_actions: int = 10,
        rollback_steps: int | None = None,
        lr_factor: float = 0.5,
        wait: bool = False,
        keep_parameters: bool | Literal["auto"] = "auto",
        every_module: bool = False,
        check_ranks_every_n_steps: int | None = None,
        incidents: bool = True,
        save_batch: bool = True,
        save_parameters: bool = False,
        max_bytes: int = 2**28,
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(sinks=sinks, strict=strict)
        factor: object = spikes
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not (factor == 0 or factor > 1):
            raise ArgumentError(f"spikes must be a number above 1, or 0 for none, got {spikes!r}")
        if not isinstance(on_finding, str):
            check_callable("on_finding", on_finding, "finding", f", or is one of {', '.join(map(repr, _CHOICES))}")
        elif on_finding not in _CHOICES:
            choices = ", ".join(map(repr, _CHOICES))
            raise ArgumentError(
                f"on_finding must be {choices} or a function, got {on_finding!r}{did_you_mean(on_finding, _CHOICES)}"
            )
        check_integer("max_actions", max_actions, 1)
        if rollback_steps is not None:
            check_integer("rollback_steps", rollback_steps, 1)
        check_number("lr_factor", lr_factor, 0)
        if not 0 < lr_factor < 1:
            raise ArgumentError(f"lr_factor must be between 0 and 1, got {lr_factor!r}")
        if keep_parameters != "auto" and not isinstance(keep_parameters, bool):
            raise ArgumentError(f"keep_parameters must be True, False or 'auto', got {keep_parameters!r}")
        for name, flag in (("wait", wait), ("every_module", every_module), ("incidents", incidents)):
            check_bool(name, flag)
        for name, flag in (("save_batch", save_batch), ("save_parameters", save_parameters)):
            check_bool(name, flag)
        check_integer("max_bytes", max_bytes, 0)
        if check_ranks_every_n_steps is not None:
            check_integer("check_ranks_every_n_steps", check_ranks_every_n_steps, 0)
        self.spikes = float(spikes)
        self.on_finding = on_finding
        self.max_actions, self.rollback_steps, self.lr_factor = max_actions, rollback_steps, lr_factor
        self.wait, self.keep_parameters, self.every_module = wait, keep_parameters, every_module
        self.incidents, self.save_batch, self.save_parameters = incidents, save_batch, save_parameters
        self.max_bytes, self.check_ranks_every_n_steps = max_bytes, check_ranks_every_n_steps
        self.__dict__.update(self._idle())

    @override
    def _idle(self) -> dict[str, Any]:
        idle: dict[str, Any] = {
            "_run": None,
            "_findings": None,
            "_exchange": None,
            "_found": [],
            "_stops_at": None,
            "_samples": None,
            "_actions": None,
            "_ranks": None,
            "_votes": False,
        }
        return {**super()._idle(), **idle}

    _run: WatchedRun | None
    _findings: RunFindings | None
    _exchange: Exchange | None
    _samples: WatchedSamples | None
    _actions: StepActions | None
    _ranks: WatchedRanks | None
    _votes: bool  # True if the ranks decide together when to stop, even if the watch of this rank has failed
    _found: list[Finding]
    _stops_at: int | None

    @property
    def found(self) -> list[Finding]:
        """The findings of this process in the current or the latest fit, in order."""
        return list(self._found)

    @override
    def _callbacks_of_group(self, trainer: Trainer) -> list[RecorderCallback]:
        # A replaced watch must not change the label of the watch that replaces it.
        return [_active_watch(trainer) or self]

    @guarded
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if sum(not each.is_default for each in _watches(trainer)) > 1:
            raise ArgumentError("callbacks contains two StepWatch: pass one with the arguments of both")

    @override
    def _begin_run(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        self._found = []
        self._exchange, self._actions, self._votes = None, None, False
        if self is not _active_watch(trainer):
            return
        refused = ""
        if are_ranks_even(trainer):
            exchange = Exchange(trainer.strategy.root_device)
            act = self.on_finding if isinstance(self.on_finding, str) else "function"
            numbers = self.max_actions, self.rollback_steps, self.lr_factor, self.check_ranks_every_n_steps
            refused = exchange.agree(True, f"watch {act} {numbers}")
            self._exchange = None if refused else exchange
            self._votes = not refused
        is_first, has_records = trainer.is_global_zero, False
        if is_first:
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
            outputs = [
                each.outputs for each in callbacks if isinstance(each, RecorderCallback) and hasattr(each, "outputs")
            ]
            make_directory(directory, strict=self.strict)
            has_records = not outputs or any(each.records for each in outputs)
        self._open_sinks(trainer)
        if is_first:
            self._findings = findings_of(trainer, pl_module, directory, self.group, strict=self.strict)
            self._findings.join(self.group)
        every = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set in Trainer.__init__
        series = StepSeries(
            directory if has_records else None,
            self._sink,
            label=self.group,
            is_logged=lambda step: every > 0 and (step + 1) % every == 0,
        )
        publish: Callable[[DataFacts], object] = _ignore if self._findings is None else self._findings.set_data
        self._samples = WatchedSamples(
            trainer, directory if is_first else None, publish, self._exchange, strict=self.strict
        )
        self._run = WatchedRun(
            trainer,
            pl_module,
            series,
            partial(self._on_discovery, trainer, pl_module),
            on_spike=partial(self._record_next, trainer),
            spikes=self.spikes,
            wait=self.wait or self.on_finding in ACTIONS,
            keep_parameters=self.keep_parameters,
            every_module=self.every_module,
            name_row=partial(self._samples.name_row, pl_module),
        )
        self._actions = self._actions_of(trainer, pl_module, refused)
        shared = self._exchange
        if shared is not None and not isinstance(trainer.strategy, FSDPStrategy):  # FSDP1 shards would seem to differ
            self._ranks = WatchedRanks(
                Replicas(
                    pl_module,
                    trainer.optimizers,
                    trainer.global_rank,
                    lambda: getattr(trainer.strategy, "model", None),
                ),
                lambda value: shared.submit(NOTHING, scope="replicas", value=value),
                self._report_written,
                self.check_ranks_every_n_steps,
            )

    def _actions_of(self, trainer: Trainer, pl_module: LightningModule, refused: str) -> StepActions | None:
        """Return the actions on bad steps, or None if the user has not asked for any or they are impossible."""
        is_asked = self.on_finding in ACTIONS
        if not is_asked and not callable(self.on_finding):
            return None
        why = ""
        if not is_automatic(pl_module):
            is_loop = not hasattr(pl_module, "automatic_optimization")
            what = "in a loop of your own, it" if is_loop else "with manual optimization, training_step itself"
            why = f"{what} steps the optimizers"
        elif trainer.strategy.handles_gradient_accumulation:
            why = f"{type(trainer.strategy).__name__} steps the optimizer itself"
        elif not is_asked and not (self.wait or pl_module.device.type == "cpu"):
            why = "pass wait=True, since the values otherwise arrive after the optimizer has stepped"
        elif trainer.world_size > 1 and not self._votes:
            why = refused or "the processes cannot communicate"
        if why and is_asked and trainer.is_global_zero:
            warn(f"{self} logs findings, but does not act ({self.on_finding!r}): {why}")
        return StepActions(
            trainer,
            pl_module,
            act=self.on_finding,
            limit=0 if why else self.max_actions,
            why_not=why,
            rollback_steps=self.rollback_steps or (50 if is_asked else 0),
            lr_factor=self.lr_factor,
            has_ranks=trainer.world_size > 1 and not why,
            report=self._report_written,
            strict=self.strict,
        )

    def _on_discovery(self, trainer: Trainer, pl_module: LightningModule, discovery: Discovery) -> None:
        finding = discovery.finding
        is_news = discovery.is_new or discovery.is_worse
        key = finding.rule, finding.module, finding.path
        keys = [(each.rule, each.module, each.path) for each in self._found]
        if key in keys:
            self._found[keys.index(key)] = finding
        else:
            self._found.append(finding)
        path = self._incident_path(finding.first_step, trainer.global_rank)
        if path is not None:
            self._write_incident(path, trainer, pl_module, discovery)
        if self._findings is not None:
            self._findings.report(finding)
        elif is_news and not finding.is_note:
            log_of_rank(f"Found at step {finding.first_step}: {finding.line}")
        if is_news and callable(self.on_finding) and self._actions is not None:
            self._actions.ask(finding, discovery.reading.step)
        elif is_news and self.on_finding == "stop" and not finding.is_note:
            self._stops_at = finding.first_step

    def _report_written(self, finding: Finding) -> None:
        """Report and write a finding that does not belong to a single step, on rank 0."""
        if self._findings is None:
            return
        self._findings.report(finding)
        if self._directory is not None:
            path = self._directory / "watched" / "-".join(filter(None, [finding.rule, finding.path]))
            try:
                write_finding(path, finding)
            except Exception as error:
                if self.strict:
                    raise
                warn(f"{self} could not write {path}: {describe_error(error)}")

    def _write_incident(self, path: Path, trainer: Trainer, pl_module: LightningModule, discovery: Discovery) -> None:
        """Write the folder of a finding. An error gives one warning."""
        try:
            write_finding(path, discovery.finding)
            if self.incidents and discovery.is_new:
                save_incident(
                    path,
                    trainer,
                    pl_module,
                    discovery,
                    max_bytes=self.max_bytes,
                    save_batch=self.save_batch,
                    save_parameters=self.save_parameters,
                )
        except Exception as error:
            if self.strict:
                raise
            warn(f"{self} could not write {path}: {describe_error(error)}")

    def _incident_path(self, step: int, rank: int = 0) -> Path | None:
        suffix = f"-rank{rank}" if rank else ""
        return None if self._directory is None else self._directory / "incidents" / f"step-{step}{suffix}"

    def _record_next(self, trainer: Trainer, step: int) -> None:
        """Let the recorders record the step after a spike. Does nothing with several ranks, whose spikes may differ."""
        if trainer.world_size == 1:
            for each in trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
                record_step = getattr(each, "record_step", None)
                if isinstance(each, RecorderCallback) and record_step is not None:
                    record_step(step + 1)

    @override
    def _stay_away(self, trainer: Trainer) -> None:
        if self is _active_watch(trainer):
            decline(trainer)

    @override
    def _release(self, trainer: Trainer | None) -> None:
        run, self._run = self._run, None
        samples, self._samples = self._samples, None
        if samples is not None:
            samples.end()
        ranks, self._ranks = self._ranks, None
        if ranks is not None and trainer is not None and not trainer.interrupted:
            ranks.end()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:  # if the shared channel stayed open, the recorders would not wait for their merges
            exchange.close(interrupted=trainer is None or trainer.interrupted)
        try:
            if run is not None:
                run.end()
            if run is not None and run.unnamed is not None and self._findings is not None:
                self._findings.report(run.unnamed)
        finally:
            findings, self._findings = self._findings, None
            if findings is not None:
                if trainer is not None and self._began is not None and logged_step(trainer) > self._began[0]:
                    findings.note_step()
                end_findings(findings, self.group, self._sink)

    @override
    def _end(self, trainer: Trainer) -> None:
        actions, self._actions, self._votes = self._actions, None, False
        if actions is not None:
            actions.end()
        super()._end(trainer)

    # Batches.

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._hide_hooks(trainer, "on_before_zero_grad", "on_after_backward")
        if self._actions is not None:
            self._actions.begin_batch()
        if self._run is not None and self._enabled:
            step = logged_step(trainer)
            if self._actions is not None:
                samples = self._samples
                start = None if samples is None else partial(samples.start_batch, batch, batch_idx, step)
                rows = self._actions.rows_of(start)
            else:
                rows = None if self._samples is None else self._samples.start_batch(batch, batch_idx, step)
            self._run.start_batch(batch, batch_idx, step, rows)

    @guarded
    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._run is not None:
            self._run.add_loss(loss)

    @guarded
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        run = self._run
        known: tuple[Finding | None, Reading | None] = None, None
        has_cause = False
        try:
            if run is not None and self._enabled:
                run.before_step(optimizer)
                if self._actions is not None:
                    known, has_cause = (run.bad, run.reading), run.has_cause
        finally:  # the other ranks wait for the decision of this one
            if self._actions is not None:
                self._actions.before_step(optimizer, *known, has_cause=has_cause)
        if self.on_finding == "stop" and run is not None and run.has_bad_gradient:
            # Without gradients, the optimizer changes nothing, and the checkpoint has the parameters from before the
            # step. All ranks have the same gradients.
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad = None

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run, is_last, is_left_out, is_repeated = self._run, stepped(trainer, batch_idx), False, False
        if self._actions is not None:
            is_repeated = self._actions.is_repeated
            is_left_out = self._actions.end_batch(has_stepped=is_last)
        try:
            if run is not None:
                run.end_batch(is_last=is_last, is_left_out=is_left_out)
            if self._samples is not None and self._samples.has_end and not is_repeated:
                self._samples.end_batch(batch)
            if self._ranks is not None and ends_step(trainer, batch_idx):
                self._ranks.end_step(logged_step(trainer) + 1, has_stepped=is_last)
        finally:
            if self.on_finding == "stop" and (run is not None or self._votes):
                self._stop(trainer)

    @override
    def _abandon_batch(self, trainer: Trainer, exception: Exception | None) -> None:
        if self._run is not None:
            self._run.abandon_step()

    def _stop(self, trainer: Trainer) -> None:
        """If any rank has a finding, save a checkpoint and end the fit on all ranks."""
        step, self._stops_at = -1 if self._stops_at is None else self._stops_at, None
        if self._votes:
            flag = torch.tensor(float(step), device=trainer.strategy.root_device)
            step = int(trainer.strategy.reduce(flag, reduce_op="max"))
        if step >= 0:
            trainer.should_stop = True
            path = self._incident_path(step)
            if path is not None:
                trainer.save_checkpoint(path / CHECKPOINT)

    @guarded
    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._samples is None or not self._samples.add_validation(batch, batch_idx, dataloader_idx):
            self._hide_hooks(trainer, "on_validation_batch_start")

    @guarded
    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.settle_logged()

    @guarded
    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if self._samples is not None:
            self._samples.end_validation()
        if self._run is not None:
            self._run.read_logged()

    @guarded
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._actions is not None:  # the hook for the start of an epoch does not run if a fit resumes within it
            self._actions.begin_epoch()

    @guarded
    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._actions is not None:
            self._actions.begin_epoch()
        if self._run is not None:  # Lightning computes the metrics of an epoch after its last hook
            self._run.read_logged()

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._run is not None:  # a run that is killed later and resumes from here needs these steps in the records
            self._run.save()
        if self._actions is not None:
            self._actions.add_to_checkpoint(checkpoint)

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.flush()
        if self._samples is not None:
            self._samples.end_epoch()

    @guarded
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.read_logged()
            self._run.flush()
        if self._samples is not None:
            self._samples.end()
        if self._ranks is not None:
            self._ranks.end()
        if not self._votes:
            return
        gathered: list[list[Finding]] = [[] for _ in range(trainer.world_size)]
        torch.distributed.all_gather_object(gathered, self._found)
        if self._findings is not None:
            for each in (each for findings in gathered[1:] for each in findings):
                self._findings.report(each)
        if self._run is not None and any(each.rule == NON_FINITE for findings in gathered for each in findings):
            self._run.unnamed = None

    def __getstate__(self) -> dict[str, Any]:
        act = self.on_finding if isinstance(self.on_finding, str) else Portable(self.on_finding, "on_finding")
        return {**super().__getstate__(), "on_finding": act}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        act = unwrap(state["on_finding"])
        self._lose([act])
        self.on_finding = act if act in _CHOICES or callable(act) else "warn"


def add_watch(trainer: Trainer, after: RecorderCallback) -> None:
    """Insert a :class:`StepWatch` after the recorder whose ``setup`` runs, if the trainer has none.

    Lightning iterates over the callbacks in ``setup``, so it also calls ``setup`` of the inserted watch.
    """
    if not _watches(trainer):
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        watch = StepWatch(strict=after.strict)
        watch.is_default, watch._is_from_environment = True, after._is_from_environment
        callbacks.insert(next(index for index, each in enumerate(callbacks) if each is after) + 1, watch)


def _ignore(data: object) -> None:
    """Ignore facts on a rank that reports no findings."""


def _watches(trainer: Trainer) -> list[StepWatch]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
    return [each for each in callbacks if isinstance(each, StepWatch)]


def _active_watch(trainer: Trainer) -> StepWatch | None:
    """Return the active watch of the trainer: the user's own, or else the first default watch."""
    return min(_watches(trainer), key=lambda each: each.is_default, default=None)
