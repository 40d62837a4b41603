"""The callback behind the recorders of activations and gradients: when to record, and where the statistics go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback, guarded
from lightning_recorder.callbacks.checkpoints import listen, stop_listening
from lightning_recorder.callbacks.run import logged_step, recorder_directory
from lightning_recorder.dumps import remove_dump, write_dump
from lightning_recorder.errors import ArgumentError, tell
from lightning_recorder.recorders import SiteStatistics, Snapshot, StatisticsRecorder
from lightning_recorder.reductions import SCALAR_STATISTICS, Reduction
from lightning_recorder.schedule import EveryNSteps
from lightning_recorder.selection import Selection
from lightning_recorder.sinks import BackgroundQueue, Sink
from lightning_recorder.tags import make_tag
from lightning_recorder.taps import Site, Tap

__all__ = ["DEFAULT_STATISTICS", "StatisticsCallback"]

DEFAULT_STATISTICS = ("mean", "std", "rms", "min", "max", "zero_fraction")
"""The scalars that are shown by default; NaN and infinities are counted as well and shown once there are any."""


class StatisticsCallback(RecorderCallback):
    """Records statistics of a tap's tensors on the sampled steps of a fit.

    The base of :class:`~lightning_recorder.ActivationRecorder` and :class:`~lightning_recorder.GradientRecorder`.
    """

    group: ClassVar[str]
    """First part of the tags and name of the dumps."""
    tap: ClassVar[type[Tap]]
    """Which tensors are recorded."""

    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        exclude: str | Sequence[str] | None = None,
        every_n_train_steps: int | None = None,
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        extra: Sequence[Reduction] = (),
        quantiles: Sequence[float] = (),
        histograms: bool = True,
        histogram_sample: int | None = None,
        dump: bool = True,
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(sinks=sinks, strict=strict)
        self.selection = Selection(names, types, exclude)
        self.schedule = None if every_n_train_steps is None else EveryNSteps(every_n_train_steps)
        self.statistics = (statistics,) if isinstance(statistics, str) else tuple(statistics)
        unknown = [name for name in self.statistics if name not in SCALAR_STATISTICS]
        if unknown:
            hint = "; histograms are chosen by histograms=True or False" if "histogram" in unknown else ""
            hint = hint or "; further ones are given by extra=[…]"
            known, got = ", ".join(SCALAR_STATISTICS), ", ".join(map(repr, unknown))
            raise ArgumentError(f"statistics knows {known}; got {got}{hint}")
        self._make_recorder = partial(
            StatisticsRecorder,
            extra=extra if isinstance(extra, Reduction) else _listed("extra", extra),
            quantiles=_listed("quantiles", quantiles),
            sample=histogram_sample,
        )
        self._make_recorder({}, self.tap)  # raises what is wrong now and not when the fit starts
        self.histograms = histograms
        self.dump = dump
        self._latest: dict[Site, SiteStatistics] = {}
        self._latest_step: int | None = None
        self._queue = BackgroundQueue()
        self._recorder: StatisticsRecorder | None = None
        self._due = self.schedule
        self._window: int | None = None
        self._window_global_step = 0
        self._ever_nonfinite: set[Site] = set()
        self._epoch = 0
        self._dump_label = self.group

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        modules = self.selection.resolve(pl_module)
        if not modules:
            tell(f"{type(self).__name__} records nothing: {type(pl_module).__name__} has no submodules")
            return
        self._due = self.schedule or EveryNSteps(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set in Trainer.__init__
        self._queue = BackgroundQueue()
        self._recorder = self._make_recorder(modules, self.tap, strict=self.strict)
        self._window = None
        self.open_sinks(trainer, recorder_directory(trainer))
        if self.dump:
            alike = [each for each in trainer.callbacks if type(each) is type(self)]  # type: ignore[attr-defined]  # set in Trainer.__init__
            place = next((index for index, each in enumerate(alike) if each is self), 0)
            self._dump_label = self.group + (f"-{place + 1}" if place else "")
            listen(trainer, self)

    @override
    def release(self, trainer: Trainer | None) -> None:
        self._stop_recording()
        if trainer is not None:
            self._flush(trainer)
            stop_listening(trainer, self)
        self._recorder = None
        # After a fault a second one is no news.
        with nullcontext() if trainer is not None else suppress(Exception):
            self._queue.drain()

    @property
    def latest(self) -> dict[Site, SiteStatistics]:
        """What was recorded last, by site; waits for what is being written."""
        self._queue.wait()
        return self._latest

    @property
    def latest_step(self) -> int | None:
        """The step of :attr:`latest`, as ``self.log`` counts; ``None`` when there is none."""
        self._queue.wait()
        return self._latest_step

    def factor(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """What each recorded tensor is multiplied by."""
        return 1.0

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # When a model's own on_train_batch_start ends the epoch, the batch before this one had a start and no end.
        if self._recorder is not None:
            self._recorder.pause()
        if self._recorder is None or self._due is None:
            return
        step = logged_step(trainer)
        if step != self._window:
            self._flush(trainer)
        if self._due(step):
            if self._window is None:
                self._window, self._window_global_step = step, trainer.global_step
            self._recorder.factor = self.factor(trainer, pl_module)
            self._recorder.attach()
        else:
            self._stop_recording()

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None and self._due is not None and self._due(logged_step(trainer) + 1):
            self._recorder.pause()
        else:
            self._stop_recording()
        # While batches are accumulated the optimiser has not stepped yet, and the window of its step stays open.
        if self._window is not None and trainer.global_step != self._window_global_step:
            self._flush(trainer)

    @guarded
    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_recording()

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_recording()
        self._flush(trainer)

    @guarded
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_recording()
        self._flush(trainer)

    def checkpoint_saved(self, path: Path) -> None:
        """Write what was recorded last beside a checkpoint."""
        latest = self.latest
        if not latest:
            return
        tensors: dict[str, Tensor] = {}
        samples: dict[str, int] = {}
        for site, seen in latest.items():
            values = {name: torch.tensor(value, dtype=torch.float64) for name, value in seen.scalars.items()}
            for statistic, tensor in {**values, **seen.tensors, "histogram": seen.bins}.items():
                tensors[make_tag("", *site, statistic)] = tensor
            samples[make_tag("", *site)] = int(seen.scalars["count"])
        about = {
            "step": self._latest_step,
            "epoch": self._epoch,
            "stage": "train",
            "rank": 0,
            "checkpoint": path.name,
            "group": self.group,
        }
        write_dump(self._dump_path(path), tensors, samples, **about)

    def checkpoint_removed(self, path: Path) -> None:
        """Remove the dump beside a checkpoint that is gone."""
        remove_dump(self._dump_path(path))

    def _dump_path(self, checkpoint: Path) -> Path:
        return checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}.{self._dump_label}.safetensors")

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()

    def _flush(self, trainer: Trainer) -> None:
        """Write the open window and close it."""
        step, self._window = self._window, None
        if step is None or self._recorder is None:
            return
        if trainer.is_global_zero:
            self._do(partial(self._conclude, self._recorder.snapshot(), step, trainer.current_epoch))
        self._recorder.reset()

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job in the background, or here and now if a sink wants that."""
        if self._sink is None or self._sink.any_thread:
            self._queue.submit(job)
        else:
            job()

    def _conclude(self, snapshot: Snapshot, step: int, epoch: int) -> None:
        """Make the statistics of a window and write them."""
        self._latest, self._latest_step, self._epoch = snapshot.statistics(), step, epoch
        if self._sink is None or not self._latest:
            return
        scalars: dict[str, float] = {}
        for site, seen in self._latest.items():
            if seen.scalars["nan_count"] or seen.scalars["inf_count"]:
                self._ever_nonfinite.add(site)
            bad = ("nan_count", "inf_count") if site in self._ever_nonfinite else ()
            further = [name for name in seen.scalars if name not in SCALAR_STATISTICS]
            shown = dict.fromkeys([*self.statistics, *bad, *further])
            scalars.update({make_tag(self.group, *site, statistic): seen.scalars[statistic] for statistic in shown})
        if scalars:
            self._sink.write_scalars(step, scalars)
        if self.histograms:
            # The tag of a histogram is the site's own, so that the page shows it beside the scalars of the site.
            self._sink.write_histograms(
                step, {make_tag(self.group, *site, "histogram"): seen.histogram for site, seen in self._latest.items()}
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_recorder": None, "_window": None}


def _listed(name: str, given: object) -> tuple[Any, ...]:
    """What was given as a tuple, so that each fit finds all of it, also where it can be gone through only once."""
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{name} takes a list, got {given!r}")
    return tuple(given)
