"""The base class of the recorders of activations, gradients and parameters: the hooks of a training run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.arguments import (
    checked_histograms,
    checked_reductions,
    checked_statistics,
)
from lightning_recorder.callbacks.evaluation_hooks import never_fused
from lightning_recorder.callbacks.guard import BATCH_HOOKS, guarded
from lightning_recorder.callbacks.labels import check_tags
from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.messages import (
    Silence,
    say_mixed,
    say_ran_eagerly,
    warn_of_unmerged,
    why_no_files,
    why_no_step,
)
from lightning_recorder.callbacks.output_options import Outputs, consumers, drawing_time_of
from lightning_recorder.callbacks.resume import ResumingCallback
from lightning_recorder.callbacks.run_settings import BatchFingerprints, run_settings
from lightning_recorder.callbacks.shared_findings import end_findings, findings_of
from lightning_recorder.callbacks.trainer import (
    LossScale,
    calls_closure_once,
    decline,
    device_of,
    is_automatic,
    logged_step,
    make_directory,
    merge_ranks,
    runs_no_model_after_loss,
    stepped,
)
from lightning_recorder.callbacks.watch import add_watch
from lightning_recorder.errors import ArgumentError, SelectionError, warn
from lightning_recorder.insight import Finding
from lightning_recorder.outputs import Coverage, RecordPipeline, RunFindings, SinkFormatter, TagBudget
from lightning_recorder.reductions.row import DEFAULT_STATISTICS
from lightning_recorder.reductions.user import Extras
from lightning_recorder.schedule import Sampling, Schedule, check_reduce
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.signatures import checked_arguments
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics import (
    BaseStatisticsRecorder,
    EvaluationRecorder,
    EvaluationSampler,
    Exchange,
    OverheadLimit,
    Record,
    RunPhase,
    RunRecorder,
    SiteStatistics,
    with_update_ratios,
)
from lightning_recorder.taps import Site

__all__ = ["DEFAULT_STATISTICS", "SampledOptions", "StatisticsCallback", "StatisticsOptions"]


class SampledOptions(TypedDict, total=False):
    """The arguments that all recorders of statistics share. ``StatisticsCallback`` has their defaults."""

    types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None
    exclude: str | Sequence[str] | None
    every_n_train_steps: int | None
    schedule: Schedule
    name: str
    sinks: Iterable[Sink]
    strict: bool


class StatisticsOptions(SampledOptions, total=False):
    """The shared arguments of all recorders of statistics except the recorder of costs."""

    reduce: int | Literal["step", "epoch"]
    statistics: str | Sequence[str]
    extra: Extras
    outputs: Outputs
    compiled: Literal["auto", "eager", "inside", "skip"]


class StatisticsCallback(ResumingCallback):
    """Records statistics of tensors on the sampled steps of a fit.

    Base class of :class:`~lightning_recorder.ActivationRecorder`, :class:`~lightning_recorder.GradientRecorder` and
    :class:`~lightning_recorder.ParameterRecorder`. The arguments are those of
    :class:`~lightning_recorder.GradientRecorder`.
    """

    _compiled_choices: ClassVar[tuple[str, ...]] = ("auto", "eager", "inside", "skip")
    _ignored: ClassVar = {"max_bytes": "", "stages": ""}

    tensors: tuple[str, ...] = ("outputs",)
    """The recorded tensors of a module: ``"inputs"``, ``"outputs"`` or both."""
    loss_scale: LossScale
    _findings: RunFindings | None
    _why_nothing: str
    _fingerprints: BatchFingerprints
    _exchange: Exchange | None

    @checked_arguments
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        exclude: str | Sequence[str] | None = None,
        every_n_train_steps: int | None = None,
        schedule: Schedule = Schedule(),
        reduce: int | Literal["step", "epoch"] = "step",
        statistics: str | Sequence[str] = DEFAULT_STATISTICS,
        extra: Extras = (),
        outputs: Outputs = Outputs(),
        compiled: Literal["auto", "eager", "inside", "skip"] = "auto",
        name: str = "",
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(name=name, compiled=compiled, sinks=sinks, strict=strict)
        self.selection = Selection(names, types, exclude)
        self.sampling = Sampling(every_n_train_steps, **vars(schedule))
        check_reduce(reduce)
        self.reduce = reduce
        self.statistics, quantiles = checked_statistics(statistics)
        self.outputs = outputs
        self.histograms, sample = checked_histograms(outputs.histograms)
        extras = checked_reductions(extra)
        self.options: dict[str, Any] = {"extra": extras, "quantiles": quantiles, "sample": sample, "strict": strict}
        """The keyword arguments of the recorders of this callback."""
        recorder = self._make_recorder({}, "train")  # raises argument errors now instead of when the fit starts
        self._settings = " ".join([f"{self.reduce} {recorder.states.described}", *map(str, self._further_settings)])
        self.__dict__.update(self._idle())

    @override
    def _idle(self) -> dict[str, Any]:
        tags = "-".join(filter(None, [self.group, self.name]))
        by_path = self.group == "parameters"
        budget = TagBudget(self.outputs.max_tags, str(self), stages=len(self.stages), log=rank_zero_info)
        formatter = SinkFormatter(
            tags,
            self.statistics,
            curves=self.outputs.curves,
            histograms=self.histograms,
            budget=budget,
            numbered=self.outputs.numbered_tags,
        )
        return {
            **super()._idle(),
            "loss_scale": LossScale(),
            "_findings": None,
            "_why_nothing": "",  # the reason why a fit had no step to record
            "_fingerprints": BatchFingerprints(),
            "_exchange": None,
            "_pipeline": RecordPipeline(
                formatter,
                name=str(self),
                log=rank_zero_info,
                derive=with_update_ratios if by_path else None,
                strict=self.strict,
            ),
        }

    @abstractmethod
    def _make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        """Return a recorder for the modules in a stage."""

    def _choose(self, pl_module: LightningModule) -> SelectedModules:
        """Return the modules to record. Raise SelectionError if nothing is selected."""
        return self.selection.resolve(pl_module)

    # Start and end of a run.

    @override
    def _begin_run(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        modules, error, is_first = None, None, trainer.is_global_zero
        try:
            modules = self._chosen(pl_module)
            directory = directory if is_first else None
            make_directory(directory, strict=self.strict)
            self._open_sinks(trainer, directory)
            self._begin_results(trainer, pl_module, directory)
            if modules is not None:
                alike = [each for each in self._callbacks_of_group(trainer) if isinstance(each, StatisticsCallback)]
                check_tags(self, alike, modules)
                self._make_workers(trainer, pl_module, modules)
        except (ArgumentError, SelectionError):
            raise
        except Exception as caught:  # noqa: BLE001 - raised below, after the other ranks know
            error, modules = caught, None
        self._exchange = merge_ranks(
            trainer,
            pl_module,
            self._run,
            self.evaluations,
            takes_part=modules is not None,
            about=f"{self.state_key} {self._settings} {None if modules is None else list(modules)}",
            name=str(self),
        )
        if error is not None:
            raise error
        if modules is not None and is_first and trainer.world_size > 1:
            warn_of_unmerged(str(self), self.options["extra"])
        if modules is None and is_first:
            warn(
                f"{self} records nothing: {type(pl_module).__name__} has no submodules, or all are compiled or scripted"
            )
        if modules is not None and "checkpoints" in self._dumps.at and self._run is not None:
            self._checkpoints.begin(trainer)

    def _begin_results(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        label = self.label(trainer)
        self._pipeline.begin(self._sink, directory, label, artifact_sinks=self._artifact_sinks)
        why = why_no_files(trainer, self._directory)
        self._pipeline.receipt.note = f"; {why}" if why else ""
        if trainer.is_global_zero:
            say_mixed(trainer, directory if self.outputs.records else None, label)
            self._pipeline.consumers = consumers(
                self.outputs,
                self._dumps,
                self._pipeline,
                directory,
                group=self.group,
                label=label,
                name=self.name,
                called=str(self),
                ranks=trainer.world_size,
                shown=self._sink is not None and bool(self._sink.sinks),
                limit=drawing_time_of(trainer, label),
                findings=self._found_so_far,
                strict=self.strict,
            )
            if trainer.state.fn == "fit":
                self._begin_findings(trainer, pl_module, directory, label)

    def _begin_findings(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None, label: str) -> None:
        self._why_nothing = ""
        if self.outputs.findings:
            self._findings = findings_of(trainer, pl_module, directory, label, strict=self.strict)
            has_file = directory is not None and self.outputs.records
            self._pipeline.formatter.named = partial(getattr, self._findings, "named")
            wait, report, ignored = self._pipeline.wait, self.outputs.report, self.outputs.ignored_rules
            begin = partial(self._findings.begin, has_file=has_file, wait=wait, report=report, ignored=ignored)
            self._pipeline.consumers.append(begin(label, self.group))
        elif self.outputs.report:
            rank_zero_info(f"{self} does not write report.html, because it has findings=False.")

    def _found_so_far(self) -> Sequence[Finding]:
        return () if self._findings is None else self._findings.current()

    def _make_workers(self, trainer: Trainer, pl_module: LightningModule, modules: SelectedModules) -> None:
        options = {"name": str(self), "rank": trainer.global_rank, "strict": self.strict}
        for stage in self.stages:
            if stage != "train":
                recorder = self._make_recorder(modules, stage)
                self.evaluations[stage] = EvaluationRecorder(recorder, stage, self._on_record, **options)
            elif trainer.state.fn == "fit":
                self._run = RunRecorder(
                    self._make_recorder(modules, stage),
                    self.sampling.with_default(trainer.log_every_n_steps),  # type: ignore[attr-defined]  # set in Trainer.__init__
                    self._on_record,
                    reduce=self.reduce,
                    announce=self._announce,
                    budget=None if (limit := self.sampling.max_overhead) is None else OverheadLimit(limit),
                    device=device_of(pl_module),
                    **options,
                )
        if trainer.is_global_zero and self._samples_validation(trainer, pl_module):
            recorder = self._make_recorder(never_fused(modules, pl_module), "validate")
            self.sampler = EvaluationSampler(recorder, "validate", self._on_record, **options)
        for worker in self._workers:
            worker.recorder.install()

    def _samples_validation(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Return True if the first batches of validations are recorded, to compare them with training."""
        return False

    @property
    def _further_settings(self) -> list[object]:
        """The non-default settings of a subclass. Ranks and resumed runs must share them."""
        return []

    @property
    def _tag_kinds(self) -> set[str]:
        """The kinds of tags. Two recorders of the same name must not write the same kind of tag for a module."""
        return set(self.stages)

    @property
    def recorded_modules(self) -> Collection[str]:
        """The names of the modules that are recorded in the current run."""
        coverage = self._pipeline.coverage
        return () if coverage is None else coverage.modules

    def _chosen(self, pl_module: LightningModule) -> SelectedModules | None:
        """Return the modules to record, or ``None`` if there are none."""
        modules = self._choose(pl_module)
        skipped = self._skip_modules(pl_module, modules, without_hooks=self.group != "parameters")
        is_default = self.selection.is_default
        self._pipeline.coverage = Coverage(
            pl_module, modules, (), skipped=skipped, of=self.group, tensors=self.tensors, is_default=is_default
        )
        return modules or None

    @override
    def _stay_away(self, trainer: Trainer) -> None:
        decline(trainer)

    @override
    def _release(self, trainer: Trainer | None) -> None:
        if trainer is not None and self._run is not None:
            self._checkpoints.end(trainer)
        run, self._run = self._run, None
        evaluations, self.evaluations = self.evaluations, {}
        sampler, self.sampler = self.sampler, None
        exchange, self._exchange = self._exchange, None
        for evaluation in (*evaluations.values(), *([] if sampler is None else [sampler])):
            evaluation.interrupt()
            evaluation.recorder.uninstall()
        if run is not None:
            if trainer is None:
                run.fail()
            with run.contained():
                run.abort()
                if trainer is not None:
                    self._keep_state(run, trainer)
            run.recorder.uninstall()
        if exchange is not None:
            exchange.close(interrupted=trainer is None or trainer.interrupted)
        failed = trainer is None or (run is not None and run.failed)  # a second error is then not reported
        with suppress(Exception) if failed else nullcontext():
            try:
                if self._findings is not None and trainer is not None and not trainer.interrupted:
                    self._findings.catch_up()
                self._pipeline.end()
            finally:
                findings, self._findings = self._findings, None
                if findings is not None:
                    why = "it failed, as a warning said" if failed else self._why_nothing
                    end_findings(findings, self._pipeline.label, self._sink, why)
        if trainer is None or not trainer.interrupted:  # after an exception, keep them: a checkpoint follows
            self._dumps.end()

    @guarded
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.outputs.findings and trainer.state.fn == "fit":
            add_watch(trainer, self)

    @guarded
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._fingerprints.begin(trainer)
        if trainer.is_global_zero:
            self._pipeline.settings.update(run_settings(trainer, pl_module))

    # Batches.

    def record_step(self, step: int) -> None:
        """Record a step in addition to the schedule, unless the recorder is disabled or merges steps into a record."""
        if self._run is not None and self._enabled and self.reduce == "step":
            self._run.requested_step = step

    def _set_up_recorder(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        """Prepare the recorder for a recorded batch."""

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._checkpoints.is_pending:
            self._checkpoints.look(trainer)
        self._pipeline.replay()
        if self._run is None:
            return
        step, epoch = logged_step(trainer), trainer.current_epoch
        if self._kept.waits:
            self._resume(self._run, trainer, step)
        self._run.enabled = self._enabled
        if self._run.skip_batch(step, epoch):
            if self._run.phase is RunPhase.IDLE and "on_train_batch_end" not in vars(self):
                self._hide_hooks(trainer, *BATCH_HOOKS[1:6])  # not the hook of the start: the next batch may be due
            return
        self._show_hooks()
        self._run.start_batch(step, epoch, partial(self._prepare, trainer, pl_module, self._run.recorder))
        if self._run.phase is RunPhase.RECORDING and self._run.is_active:
            with self._run.contained():
                self._fingerprints.add(trainer, batch, step, batch_idx, apart=self.reduce == "step")
                self._run.recorder.observe_batch(batch)

    def _prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        self.loss_scale.begin_batch(trainer)
        self._set_up_recorder(trainer, pl_module, recorder)

    def _end_step(self, trainer: Trainer, pl_module: LightningModule, run: RunRecorder) -> None:
        """Check whether the optimizer skipped the previous step."""
        if self._counts_overflow and self.loss_scale.end_step(trainer):
            self._set_up_recorder(trainer, pl_module, run.recorder)

    @guarded
    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._run is None or self._run.phase is not RunPhase.RECORDING:
            return
        # Lightning clears the gradients between the loss and the backward pass: two calls of the function mode for each
        # parameter.
        if trainer.accumulate_grad_batches == 1 and runs_no_model_after_loss(pl_module, optimizer):
            _end_model(trainer)

    @guarded
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._run is None or self._run.phase is not RunPhase.RECORDING:
            return
        if not is_automatic(pl_module):  # another optimizer may have stepped in this batch
            self._end_step(trainer, pl_module, self._run)
        elif calls_closure_once(pl_module, optimizer):
            _end_model(trainer)
        self._pipeline.find_gradients()

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None and self._run.phase is not RunPhase.IDLE:
            if self._run.phase is RunPhase.RECORDING:
                self._end_step(trainer, pl_module, self._run)
            self._run.end_batch(stepped=stepped(trainer, batch_idx), overflowed=self.loss_scale.overflowed)
            say_ran_eagerly(trainer, self._run.recorder.ran_eagerly)
            with self._run.contained():
                self._pipeline.report_interval(self._run)

    @property
    def _counts_overflow(self) -> bool:
        """True if steps whose gradients overflowed are counted separately."""
        return False

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checkpoints.look(trainer)
        if self._run is not None:
            self._run.end_epoch(max(0, logged_step(trainer) - 1))
            self._pipeline.end_epoch()

    @guarded
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.finish()

    @override
    def _silences(self, trainer: Trainer, function: str) -> Iterator[Silence]:
        if any(worker.failed for worker in self._workers):
            return  # already warned
        self._pipeline.wait()
        is_trained = self._run is None or self._run.has_recorded
        if not is_trained:
            silence = why_no_step(trainer, self.sampling, self._began, is_enabled=self.enabled)
            self._why_nothing = silence.why
            yield silence
        yield from self._evaluation_silences(trainer, function, is_trained=is_trained)
        yield from self._dump_silences(trainer)

    # Records.

    @property
    def latest(self) -> Mapping[Site, SiteStatistics]:
        """The statistics of the latest training record, by site. Waits for pending writes."""
        return self._pipeline.latest_of("train")

    def latest_of(self, stage: str) -> Mapping[Site, SiteStatistics]:
        """Return the statistics of the latest record of a stage, by site. Waits for pending writes.

        With several data loaders, the stage includes the index of the loader, such as ``"validate/0"``.
        """
        return self._pipeline.latest_of(stage)

    @property
    def latest_step(self) -> int | None:
        """The step of :attr:`latest`, as counted by ``self.log``, or ``None`` before the first record."""
        return self._pipeline.latest_step

    def _on_record(self, record: Record) -> None:
        if record.stage == "train":
            record.batch = self._fingerprints.take()
        self._pipeline.add(record, self._run)

    def _announce(self, step: int, recording_ms: float) -> None:
        if self._run is not None:
            self._pipeline.announce(step, recording_ms, self._run)


def _end_model(trainer: Trainer) -> None:
    """End the shared function mode of all recorders.

    Otherwise the hooks of callbacks between the recorders would run under it.
    """
    for each in trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
        if isinstance(each, StatisticsCallback) and each._run is not None:
            each._run.recorder.end_of_model()
