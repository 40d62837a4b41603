"""The callback behind the recorders of activations, gradients and parameters: what is recorded of a trainer's run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.arguments import checked_statistics, in_words, recorder_options
from lightning_recorder.callbacks.base import Compiled, guarded
from lightning_recorder.callbacks.checkpoints import CheckpointWatch
from lightning_recorder.callbacks.evaluation import EvaluationCallback
from lightning_recorder.callbacks.keeping import Keeping
from lightning_recorder.callbacks.ranks import agree, decline
from lightning_recorder.callbacks.run import logged_step, stepped
from lightning_recorder.callbacks.scale import LossScale
from lightning_recorder.callbacks.state import KeptState
from lightning_recorder.compiled import compiled_modules
from lightning_recorder.errors import ArgumentError, SelectionError, check_bool, check_integer, describe_error, tell
from lightning_recorder.recorders import (
    Budget,
    EvaluationRecorder,
    Record,
    Report,
    Results,
    RunRecorder,
    SiteRecorder,
    SiteStatistics,
    TagBudget,
    Watched,
    Worker,
    check_overhead,
    with_gradients,
)
from lightning_recorder.reductions import Reduction
from lightning_recorder.schedule import Reduce, Sampling, check_reduce
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.sinks import Sink
from lightning_recorder.taps import Site

__all__ = ["DEFAULT_STATISTICS", "StatisticsCallback"]

DEFAULT_STATISTICS = ("mean", "std", "rms", "min", "max", "zero_fraction")
"""The scalars that are shown by default; NaN and infinities are counted as well and shown once there are any."""

# By this attribute of a model Lightning allows a rank to have no batches.
_MAY_BE_EMPTY = "allow_zero_length_dataloader_with_multiple_devices"


class StatisticsCallback(EvaluationCallback):
    """Records statistics of tensors on the sampled steps of a fit.

    The base of :class:`~lightning_recorder.ActivationRecorder`, :class:`~lightning_recorder.GradientRecorder` and
    :class:`~lightning_recorder.ParameterRecorder`.

    Args:
        names: Module names or globs, as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`.
        types: Module classes or their names; with ``names``, both must hold.
        exclude: Names or globs to leave out.
        every_n_train_steps: Record the first optimiser step and then each n-th; by default
            ``Trainer(log_every_n_steps=…)``, and every step where ``step_window`` or ``when`` is given. Steps count
            from 0, so 100 records 0, 99, 199, …; 0 records nothing.
        every_n_epochs: Record in the first epoch and then in each n-th.
        first_n_steps: So many steps at the beginning of the run are recorded as well.
        step_window: ``(start, stop)``: nothing before step ``start``, and nothing from ``stop`` on.
        when: A function of the step that says whether it is recorded, or its import path; asked last, at times more
            than once, and the same on all ranks.
        reduce: What becomes one record: ``"step"``, each recorded step; a number n, all recorded steps of a window of n
            optimiser steps; ``"epoch"``, all of an epoch.
        statistics: Which scalars to show, of ``count``, ``mean``, ``std``, ``rms``, ``min``, ``max``,
            ``zero_fraction``, ``nan_count``, ``inf_count``, and of ``rank_mean_min`` and ``rank_mean_max``, the
            extremes of the means that the ranks have each for itself.
        extra: Further reductions, such as ``[Norms(), DeadChannels()]``, computed by torch. Those of their statistics
            that are one number are shown, the others are in the dumps and in ``latest``.
        quantiles: Shares, as 0.99, whose quantiles are read from the histogram and shown as ``quantile_0.99``.
        histograms: Whether to write histograms.
        histogram_sample: How many values of a tensor go into the histogram; by default all.
        max_tags: The most tags that the loggers get; of more modules those evenly spread, which one warning says. The
            files of records have all.
        dump: When the statistics are written to a file of tensors: ``"checkpoints"``, the latest ones beside each;
            ``"records"``, each record, and ``"epochs"``, the latest at the end of each epoch, into
            ``<log_dir>/recorder/dumps``. True stands for ``"checkpoints"``.
        dump_when: A function of the statistics of a site, as ``lambda seen: seen.abs_max > 1e4``, or its import path; a
            record is dumped if it is true of any of its sites.
        max_total_bytes: So much is dumped, beside checkpoints apart, before one warning says that no more is.
        upload: Whether the loggers that keep files get the dumps as well, up to ``max_upload_bytes``.
        max_upload_bytes: So much is uploaded.
        records: Whether all records are kept in ``<log_dir>/recorder/records``, for
            :func:`~lightning_recorder.open_recording`.
        plots: Whether pictures of what was recorded up to now are drawn, when 10, 20, 40, … records are there and when
            the fit ends.
        plot_every_n_records: Draw them at each n-th record instead.
        max_images: The most pictures of single modules over time.
        compiled: What becomes of compiled modules: ``"eager"``, a recorded step runs without the compiled code;
            ``"skip"``, they are not recorded.
        max_overhead: The share of the training time that recording may take, as 0.02. Where it takes more, the cadence
            is widened, which is logged.
        name: Tells this callback from others of its kind, in checkpoints, in the names of dumps and in the tags, which
            then begin with ``<group>-<name>``.
        sinks: Further sinks, beside the loggers of the trainer and the files under ``<log_dir>/recorder``.
        strict: Raise errors of the recorder instead of warning of them.
    """

    group: ClassVar[str]
    """First part of the tags and name of the dumps."""

    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        exclude: str | Sequence[str] | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int = 1,
        first_n_steps: int = 0,
        step_window: Sequence[int] | None = None,
        when: Callable[[int], object] | str | None = None,
        reduce: Reduce = "step",
        statistics: str | Sequence[str] = DEFAULT_STATISTICS,
        extra: Reduction | Sequence[Reduction] = (),
        quantiles: Sequence[float] = (),
        histograms: bool = True,
        histogram_sample: int | None = None,
        max_tags: int = 5000,
        dump: bool | str | Sequence[Literal["checkpoints", "records", "epochs"]] = True,
        dump_when: Callable[[SiteStatistics], object] | str | None = None,
        max_total_bytes: int = 2**30,
        upload: bool = False,
        max_upload_bytes: int = 2**28,
        records: bool = True,
        plots: bool = True,
        plot_every_n_records: int | None = None,
        max_images: int = 4,
        compiled: Compiled = "eager",
        max_overhead: float | None = None,
        name: str = "",
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(name=name, compiled=compiled, sinks=sinks, strict=strict)
        self.selection = Selection(names, types, exclude)
        self.sampling = Sampling(every_n_train_steps, every_n_epochs, first_n_steps, step_window, when)
        check_reduce(reduce)
        self.reduce = reduce
        if max_overhead is not None:
            check_overhead(max_overhead)
        self.max_overhead = max_overhead
        self.statistics = checked_statistics(statistics)
        check_bool("histograms", histograms)
        self.keeping = Keeping(
            dump=dump,
            dump_when=dump_when,
            max_total_bytes=max_total_bytes,
            upload=upload,
            max_upload_bytes=max_upload_bytes,
            records=records,
            plots=plots,
            plot_every_n_records=plot_every_n_records,
            max_images=max_images,
            strict=strict,
        )
        self.options = recorder_options(extra, quantiles, histogram_sample, strict)
        """What the recorders of this callback are made with."""
        recorder = self.make_recorder({}, "train")  # raises what is wrong now and not when the fit starts
        self.histograms = histograms
        self._settings = f"{self.reduce} {recorder.states.described}"
        self._kept = KeptState(self._settings)
        self.loss_scale = LossScale()
        check_integer("max_tags", max_tags, 1)
        tags, budget = "-".join(filter(None, [self.group, name])), TagBudget(max_tags, str(self))
        report = Report(tags, self.statistics, histograms=histograms, budget=budget)
        self._results = Results(report, name=str(self), say=rank_zero_info, summarize=self.summarize, strict=strict)
        self._checkpoints = CheckpointWatch(
            self.checkpoint_saved, self.checkpoint_removed, self._no_more, name=str(self)
        )
        self._run: RunRecorder | None = None
        self.evaluations: dict[str, EvaluationRecorder] = {}
        self._watched: Watched | None = None
        self._has_receipt = False
        self._every_n: int | None = None

    @abstractmethod
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> SiteRecorder:
        """What brings the tensors of the modules in a stage."""

    def choose(self, pl_module: LightningModule) -> SelectedModules:
        """The modules to record.

        Raises:
            SelectionError: If nothing is selected.
        """
        return self.selection.resolve(pl_module)

    @property
    def stages(self) -> tuple[str, ...]:
        """What is recorded of a run: ``"train"`` and the evaluations."""
        return ("train",)

    @override
    def begins_with(self, function: str) -> bool:
        return function in self.stages or (function == "fit" and bool({"train", "validate"} & set(self.stages)))

    # The beginning and the end.

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        modules, error = None, None
        try:
            modules = self._chosen(pl_module)
            directory = self._made(directory) if trainer.is_global_zero else None
            self.open_sinks(trainer, directory)
            self._begin_results(trainer, directory)
            if trainer.is_global_zero:
                self.warn_of_eager_memory(pl_module)
            if modules is not None:
                self._tell_of_others(trainer, modules)
                self._make_workers(trainer, pl_module, modules)
        except (ArgumentError, SelectionError):
            raise
        except Exception as caught:  # noqa: BLE001 - raised again, when the other ranks know
            error, modules = caught, None
        about = f"{self.state_key} {self._settings} {None if modules is None else list(modules)}"
        exchange = agree(trainer, takes_part=modules is not None, about=about, name=str(self))
        for worker in self._workers:
            worker.exchange = exchange
        if exchange is not None and self.evaluations and getattr(pl_module, _MAY_BE_EMPTY, False):
            # Such a rank has no evaluation at all, and would never answer.
            if trainer.is_global_zero:
                tell(f"{self}: evaluations are those of rank 0 alone, since {_MAY_BE_EMPTY} is set")
            for evaluation in self.evaluations.values():
                evaluation.exchange = None
        if error is not None:
            raise error
        if modules is None and trainer.is_global_zero:
            tell(f"{self} records nothing: {type(pl_module).__name__} has no submodules, or all are compiled")
        if modules is not None and "checkpoints" in self.keeping.dumps.at and self._run is not None:
            self._checkpoints.begin(trainer)

    def _begin_results(self, trainer: Trainer, directory: Path | None) -> None:
        label = self.label(trainer, self.group)
        self._results.begin(self._sink, directory, label, keepers=self._keepers)
        if trainer.is_global_zero:
            self._results.outlets = self.keeping.outlets(
                self._results,
                directory,
                group=self.group,
                label=label,
                name=self.name,
                called=str(self),
                ranks=trainer.world_size,
                shown=self._sink is not None and not self._sink.is_empty,
            )

    def _make_workers(self, trainer: Trainer, pl_module: LightningModule, modules: SelectedModules) -> None:
        options = {"name": str(self), "rank": trainer.global_rank, "strict": self.strict}
        for stage in self.stages:
            if stage != "train":
                recorder = self.make_recorder(modules, stage)
                self.evaluations[stage] = EvaluationRecorder(recorder, stage, self._conclude, **options)
            elif trainer.state.fn == "fit":
                self._run = RunRecorder(
                    self.make_recorder(modules, stage),
                    self.sampling.with_default(trainer.log_every_n_steps),  # type: ignore[attr-defined]  # set in Trainer.__init__
                    self._conclude,
                    reduce=self.reduce,
                    announce=self._announce,
                    budget=None if self.max_overhead is None else Budget(self.max_overhead),
                    device=pl_module.device,
                    **options,
                )
        self._every_n = None
        self._has_receipt = False

    @property
    def _workers(self) -> list[Worker]:
        return [*self.evaluations.values(), *([] if self._run is None else [self._run])]

    @override
    def give_up(self) -> bool:
        is_news = not any(worker.failed for worker in self._workers)
        if any(worker.exchange is not None and worker.exchange.is_open for worker in self._workers):
            # The other ranks count on this one to answer, though it has nothing more to give.
            for worker in self._workers:
                worker.fail()
        else:
            self.release(None)
        return is_news

    def _made(self, directory: Path | None) -> Path | None:
        """The folder, if it can be made."""
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if self.strict:
                raise
            tell(f"{self} writes no files, since their folder cannot be made: {describe_error(error)}")
            return None
        return directory

    def _tell_of_others(self, trainer: Trainer, modules: SelectedModules) -> None:
        """Say so if another recorder writes the same tags."""
        for other in self.alike(trainer):
            if other is self:
                return
            shared = [] if other._watched is None else [name for name in modules if name in other._watched.modules]
            if shared and self.tags & other.tags and trainer.is_global_zero:
                tell(
                    f"two callbacks {self} record {shared[0]!r} under the same tags, so their records mix: give one "
                    "a name"
                )

    @property
    def tags(self) -> set[str]:
        """What two recorders of this kind may not both write of a module."""
        return set(self.stages)

    def _chosen(self, pl_module: LightningModule) -> SelectedModules | None:
        """The modules to record, if there are any."""
        modules = self.choose(pl_module)
        compiled = compiled_modules(pl_module) if self.compiled == "skip" else set()
        skipped = [name for name, module in modules.items() if module in compiled]
        for name in skipped:
            del modules[name]
        self._watched = Watched(pl_module, modules, (), skipped=skipped, of=self.group)
        return modules or None

    @override
    def stay_away(self, trainer: Trainer) -> None:
        decline(trainer)

    @override
    def release(self, trainer: Trainer | None) -> None:
        if trainer is not None and self._run is not None:
            self._checkpoints.end(trainer)
        run, self._run = self._run, None
        evaluations, self.evaluations = self.evaluations, {}
        for evaluation in evaluations.values():
            evaluation.interrupt()
        if run is not None:
            if trainer is None:
                run.fail()
            with run.contained():
                run.abort()
                if trainer is not None and not self._kept.waits:
                    self._kept.keep(run.state_dict(), trainer.global_step)
        self._watched = None
        # After a fault a second one is no news.
        failed = trainer is None or (run is not None and run.failed)
        with suppress(Exception) if failed else nullcontext():
            self._results.end()
        if trainer is None or not trainer.interrupted:  # else the checkpoint of the exception is still to come
            self.keeping.dumps.end()

    # Batches.

    def prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: SiteRecorder) -> None:
        """Make the recorder ready for a batch that is recorded."""

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._checkpoints.look(trainer)
        self._results.replay()
        if self._run is None:
            return
        step, epoch = logged_step(trainer), trainer.current_epoch
        if self._kept.waits:
            report, at = self._results.report, trainer.global_step
            why_not = self._kept.hand_over(self._run, report, global_step=at, step=step, epoch=epoch)
            if why_not and trainer.is_global_zero:
                tell(f"{self} begins anew: {why_not}")
        self._run.enabled = self.enabled
        self._run.start_batch(step, epoch, partial(self._prepare, trainer, pl_module, self._run.recorder))

    def _prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: SiteRecorder) -> None:
        self.loss_scale.begin_batch(trainer)
        self.prepare(trainer, pl_module, recorder)

    def _end_step(self, trainer: Trainer, pl_module: LightningModule, run: RunRecorder) -> None:
        """See whether the optimiser has passed the step before over."""
        if self.counts_overflow and self.loss_scale.end_step(trainer):
            self.prepare(trainer, pl_module, run.recorder)

    @guarded
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._run is None or not self._run.records:
            return
        if not pl_module.automatic_optimization:  # another may have stepped in this batch
            self._end_step(trainer, pl_module, self._run)
        if not self._has_receipt and self._watched is not None:
            trained = with_gradients(self._watched.modules) | set(self._watched.trained)
            self._watched = self._watched.having(trained=trained)

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            if self._run.records:
                self._end_step(trainer, pl_module, self._run)
            self._run.end_batch(stepped=stepped(trainer, batch_idx), overflowed=self.loss_scale.overflowed)
            self._tell_cadence(self._run)

    @property
    def counts_overflow(self) -> bool:
        """Whether steps whose gradients overflowed are counted apart."""
        return False

    def _tell_cadence(self, run: RunRecorder) -> None:
        """Say so if the cadence was widened."""
        if self.max_overhead is None or run.every_n_train_steps == self._every_n:
            return
        before, self._every_n = self._every_n, run.every_n_train_steps
        if before is not None:
            share = f"{100 * self.max_overhead:g} %"
            rank_zero_info(f"{self} records every {self._every_n} steps instead of {before}, to take at most {share}")
        tag = f"recorder/{self._results.label}/every_n_train_steps"
        with run.contained():
            self._results.add_scalar(run.last_step, tag, self._every_n)

    @override
    def before_evaluation(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.interrupt()

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checkpoints.look(trainer)
        if self._run is not None:
            self._run.end_epoch(max(0, logged_step(trainer) - 1))
            self._results.end_epoch()

    @guarded
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.finish()
            if not self._run.has_recorded and self._run.every_n_train_steps and trainer.global_step:
                rank_zero_info(f"{self} has recorded no step: none was due by its schedule")

    # Records.

    @property
    def latest(self) -> dict[Site, SiteStatistics]:
        """What was recorded last of the training, by site; waits for what is being written."""
        return self._results.latest_of("train")

    def latest_of(self, stage: str) -> dict[Site, SiteStatistics]:
        """What was recorded last of a stage, by site; where there are several loaders, as ``"validate/0"``."""
        return self._results.latest_of(stage)

    @property
    def latest_step(self) -> int | None:
        """The step of :attr:`latest`, as ``self.log`` counts; ``None`` when there is none."""
        return self._results.latest_step

    def summarize(self, record: Record) -> dict[Site, SiteStatistics]:
        """The statistics of a record."""
        return record.snapshot.statistics()

    def _conclude(self, record: Record) -> None:
        """Have a record written, the first one with its receipt."""
        about = None
        if not self._has_receipt and record.stage == "train" and record.steps and self._run is not None:
            self._has_receipt = True
            about = self._about(self._run)
        self._results.add(record, about)

    def _announce(self, step: int, recording_ms: float) -> None:
        if self._run is not None:
            self._results.announce(step, recording_ms, self._run.recorder.states.sites, self._about(self._run))

    def _about(self, run: RunRecorder) -> tuple[Watched, Sampling, Reduce]:
        """What a receipt is made from."""
        watched = self._watched if self._watched is not None else Watched(nn.Module(), {}, ())
        return watched.having(**run.recorder.traces()), run.sampling, self.reduce

    # Checkpoints.

    def checkpoint_saved(self, path: Path) -> None:
        """Write what was recorded last beside a checkpoint."""
        job = partial(self.keeping.dumps.write_beside, path)
        if self._run is None:  # a checkpoint that is saved for an exception comes when the run has ended
            job()
            return
        with self._run.contained():
            self._results.submit(self.keeping.dumps, job)

    def checkpoint_removed(self, path: Path) -> None:
        """Remove the dump beside a checkpoint that is gone."""
        job = partial(self.keeping.dumps.remove_beside, path)
        job() if self._run is None else self._results.remove(job)

    def _no_more(self) -> None:
        if self._run is None:  # the run has failed, and its exception's checkpoint is saved
            self.keeping.dumps.end()

    @property
    @override
    def state_key(self) -> str:
        chosen = {"name": self.name, **vars(self.selection), **vars(self.sampling), "reduce": self.reduce}
        named = {key: in_words(value) for key, value in chosen.items() if value not in (None, "", 0) and key != "when"}
        return self._generate_state_key(**named, stages=list(self.stages))

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._run is not None:
            with self._run.contained():
                state = self._run.state_dict()
        return self._kept.packed(state, self._results.report)

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._checkpoints.expect()
        if self._run is None or self.state_key not in checkpoint.get("callbacks", {}):
            return
        self._results.wait()
        with self._run.contained():
            if not trainer.interrupted:
                state = self._run.merged_state_dict()
            else:  # the other ranks are not in step any more, and none can be asked
                if trainer.world_size > 1 and trainer.is_global_zero and self._run.holds_states:
                    tell(f"{self}: a checkpoint that is saved after an exception has the statistics of rank 0 alone")
                self._run.abort()
                state = self._run.state_dict()
            checkpoint["callbacks"][self.state_key] = self._kept.packed(state, self._results.report)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._kept.forget()
        is_known = self.state_key in checkpoint.get("callbacks", {})
        if trainer.state.fn == "fit" and not is_known and trainer.is_global_zero:
            tell(
                f"{self} begins anew: the checkpoint has nothing of it, or was saved with another selection or cadence"
            )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept.load(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to a run stays with it.
        return {
            **super().__getstate__(),
            "_run": None,
            "evaluations": {},
            "_watched": None,
            **({} if self._run is None else {"_kept": KeptState(self._settings)}),
        }
