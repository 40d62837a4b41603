"""The public options for record files, plots, dumps and uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lightning_recorder.callbacks.arguments import checked_histograms
from lightning_recorder.callbacks.lightning import Trainer
from lightning_recorder.errors import ArgumentError, check_bool, check_callable, check_integer, imported
from lightning_recorder.insight import Finding, check_rules
from lightning_recorder.outputs import (
    DrawingTime,
    DumpFolder,
    Plotter,
    RecordConsumer,
    RecordFile,
    RecordPipeline,
    StatisticsDumps,
    check_dumps,
)
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.signatures import repr_of_changed, with_checked_arguments
from lightning_recorder.statistics import SiteStatistics

__all__ = ["Outputs", "consumers", "drawing_time_of"]


@with_checked_arguments
@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files, plots and uploads of a callback, and their limits.

    A :class:`~lightning_recorder.TensorDumper` uses only ``dump_when``, ``upload`` and the limits in bytes.

    Args:
        histograms: True writes histograms of all values to the loggers, for the first 32 records and then less often:
            for 16 records per doubling of the number of records. The record files have the histograms of all records. A
            number n counts a fixed sample of at most n values of each tensor, one from each of n equal parts; this is
            faster but approximate. False writes no histograms.
        records: Write all records to ``<log_dir>/recorder/records``, for :func:`~lightning_recorder.open_recording`.
            The loss and the gradient norm of every step (``watch``) are also written there, unless all recorders of the
            trainer have ``records=False``. They are watched in any case.
        plots: Draw plots of all records when the fit ends and, in a long fit, after 10, 20, 40, … records, in another
            process. All drawings during a fit together take at most 2 % of its time.
        plot_every_n_records: Draw the plots after every n-th record instead of after 10, 20, 40, … records, without the
            time limit.
        max_images: The maximum number of plots that show a single module over time. It also limits the pictures of
            statistics that are tensors.
        curves: ``"main"`` shows one curve for each module in the loggers: the ``rms`` of its output or of the gradient
            of its output, or the ``update_ratio`` of its largest parameter. The counts of NaN and infinities are shown
            once a record has a NaN or an infinity. ``"all"`` shows all default statistics of each tensor. Statistics
            from the arguments ``statistics`` and ``extra`` of the recorder are shown in any case. The choice does not
            affect histograms, heat maps and record files.
        max_tags: The maximum number of tags for the loggers. If there are more, only some modules are shown: first
            modules with unusual statistics, then an even selection of the others. A module that becomes unusual later
            is shown from then on. One warning is given. Record files and heat maps contain all modules. By default,
            everything is shown up to 400 tags. If there are more, at most 75 tags of the main statistics are shown, or
            with ``curves="main"`` one curve for each of up to 400 modules.
        numbered_tags: Begin the name of each module in a tag with its position in the order of execution, as in
            ``activations/017_blocks.2.fc/rms``, because TensorBoard sorts tags.
        dumps: The times at which statistics are dumped to a file of tensors. ``"checkpoints"`` writes the latest record
            beside each checkpoint. ``"records"`` writes each record, and ``"epochs"`` writes the latest record at the
            end of each epoch, to ``<log_dir>/recorder/dumps``. True means ``"checkpoints"``.
        dump_when: A function of the statistics of a site, such as ``lambda seen: seen.abs_max > 1e4``, or its import
            path. A record, or a sampled step of a :class:`~lightning_recorder.TensorDumper`, is also dumped if the
            function returns true for any of its sites.
        findings: Examine the records of a fit for dead layers, missing gradients, NaN and other faults, log the
            findings, and write them to ``<log_dir>/recorder/findings.json``.
        ignored_rules: The names of rules whose findings are left out during the fit, for all recorders of the trainer,
            such as ``["always-clipped"]``. ``lightning-recorder doctor --ignore`` ignores rules afterwards.
        report: Write the page with findings, graph and all layers to ``<log_dir>/recorder/report.html`` when the fit
            ends; see :meth:`Run.page`. Writing takes up to a second, and a few seconds for long runs. By default, the
            page is written if this takes at most 2 % of the time of the fit. Needs ``records`` and ``findings``.
        upload: Also pass the dumps to the loggers that store files, up to ``max_upload_bytes``.
        max_upload_bytes: The maximum size of all uploads in bytes.
        max_total_bytes: The maximum size of all dumps in bytes, not counting the dumps beside checkpoints. When this
            size is reached, one warning is given and no more dumps are written. By default, 1 GiB of statistics or 4
            GiB of tensors.
        max_bytes: The maximum size in bytes of one step of a :class:`~lightning_recorder.TensorDumper`. Tensors beyond
            this size are left out, and the manifest lists them. The recorders of activations, gradients and parameters
            ignore this argument.

    Raises:
        ArgumentError: If an argument has an invalid value; names the argument.

    Example::

        ActivationRecorder(outputs=Outputs(plots=False, dumps="epochs", upload=True))
    """

    histograms: bool | int = True
    records: bool = True
    plots: bool = True
    plot_every_n_records: int | None = None
    max_images: int = 4
    curves: Literal["main", "all"] = "main"
    max_tags: int | None = None
    numbered_tags: bool = False
    dumps: bool | str | Sequence[Literal["checkpoints", "records", "epochs"]] = True
    dump_when: Callable[[SiteStatistics], object] | str | None = None
    findings: bool = True
    ignored_rules: Sequence[str] = ()
    report: bool | None = None
    upload: bool = False
    max_upload_bytes: int = 2**28
    max_total_bytes: int | None = None
    max_bytes: int = 2**28

    def __post_init__(self) -> None:
        for flag in ("records", "plots", "numbered_tags", "findings", "upload"):
            check_bool(flag, getattr(self, flag))
        if self.report is not None:
            check_bool("report", self.report)
        checked_histograms(self.histograms)
        if self.curves not in ("main", "all"):
            raise ArgumentError(f"curves must be 'main' or 'all', got {self.curves!r}")
        for limit, least in (("max_images", 0), ("max_upload_bytes", 0), ("max_bytes", 1)):
            check_integer(limit, getattr(self, limit), least)
        for limit, least in (("plot_every_n_records", 1), ("max_tags", 1), ("max_total_bytes", 0)):
            if getattr(self, limit) is not None:
                check_integer(limit, getattr(self, limit), least)
        if not isinstance(self.dumps, (bool, str)) and isinstance(self.dumps, Iterable):
            object.__setattr__(self, "dumps", tuple(self.dumps))
        check_dumps(self.dumps)
        object.__setattr__(self, "ignored_rules", check_rules("ignored_rules", self.ignored_rules))
        object.__setattr__(self, "dump_when", imported("dump_when", self.dump_when))
        if self.dump_when is not None:
            check_callable("dump_when", self.dump_when, "seen", " of the statistics of a site")

    def __repr__(self) -> str:
        return repr_of_changed(self)

    def __getstate__(self) -> dict[str, Any]:
        when = None if self.dump_when is None else Portable(self.dump_when, "dump_when")
        return {**self.__dict__, "dump_when": when}

    def __setstate__(self, state: dict[str, Any]) -> None:
        when = None if state["dump_when"] is None else unwrap(state["dump_when"])
        self.__dict__.update(state, dump_when=when)


def consumers(
    outputs: Outputs,
    dumps: StatisticsDumps,
    results: RecordPipeline,
    directory: Path | None,
    *,
    group: str,
    label: str,
    name: str,
    called: str,
    ranks: int,
    shown: bool,
    limit: DrawingTime,
    findings: Callable[[], Sequence[Finding]] = tuple,
    strict: bool = False,
) -> list[RecordConsumer]:
    """Return the consumers that receive the records of a run."""
    folder = DumpFolder(
        label,
        group=group,
        directory=None if directory is None else directory / "dumps",
        max_total_bytes=2**30 if outputs.max_total_bytes is None else outputs.max_total_bytes,
        upload=results.artifact_sinks if outputs.upload else None,
        max_upload_bytes=outputs.max_upload_bytes,
        name=called,
        quiet=not shown,
        strict=strict,
    )
    dumps.begin(folder)
    found: list[RecordConsumer] = [dumps]
    if outputs.records and directory is not None:
        settings = results.settings
        found.append(
            RecordFile(directory, label, group=group, name=name, ranks=ranks, settings=settings, strict=strict)
        )
    if outputs.plots and shown:
        found.append(
            Plotter(
                group,
                label,
                every=outputs.plot_every_n_records,
                max_images=outputs.max_images,
                statistics=results.formatter.statistics,
                show=results.show,
                limit=limit,
                findings=findings,
            )
        )
    return found


_limits: WeakKeyDictionary[Trainer, tuple[DrawingTime, set[str]]] = WeakKeyDictionary()


def drawing_time_of(trainer: Trainer, label: str) -> DrawingTime:
    """Return the time limit for drawing, which all recorders of a fit share."""
    limit, labels = _limits.get(trainer) or (DrawingTime(), set())
    if label in labels:  # the label was used in an earlier fit
        limit, labels = DrawingTime(), set()
    labels.add(label)
    _limits[trainer] = limit, labels
    return limit
