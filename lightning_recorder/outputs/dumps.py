"""Choose which statistics and captured tensors are dumped, when, and where: next to checkpoints or to a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import (
    ArgumentError,
    RecordingError,
    check_callable,
    check_some,
    describe_call,
    describe_error,
    imported,
    warn,
)
from lightning_recorder.outputs.dump_folder import DumpContent, DumpFolder
from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.records.table import SiteStatistics, Table
from lightning_recorder.records.tags import make_tag
from lightning_recorder.sinks import BackgroundQueue
from lightning_recorder.taps import Site
from lightning_recorder.tensors import BufferPool, Captured

__all__ = ["DUMP_TIMES", "TENSOR_DUMP_TIMES", "Event", "StatisticsDumps", "TensorDumps", "check_dumps"]

DUMP_TIMES = ("checkpoints", "records", "epochs")
"""The times at which the statistics of a recorder can be dumped."""


class Event:
    """A condition on the statistics of a site that triggers a dump.

    Args:
        condition: A function or its import path, such as ``lambda seen: seen.abs_max > 1e4``.
        argument: The name of the argument, for messages.
        name: The name of the recorder, for messages.
        strict: Raise the errors of the function. Otherwise the first error causes a warning, and the function is not
            called again.

    Raises:
        ArgumentError: If the condition is not a function.
    """

    def __init__(
        self,
        condition: Callable[[SiteStatistics], object] | str,
        argument: str,
        *,
        name: str = "the recorder",
        strict: bool,
    ) -> None:
        found = imported(argument, condition)
        check_callable(argument, found, "seen", " of the statistics of a site")
        self._condition: Callable[[SiteStatistics], object] = found  # type: ignore[assignment]  # checked above
        self._argument, self._name = argument, name
        self._strict = strict
        self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_condition": Portable(self._condition, self._argument), "_failed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _condition=unwrap(state["_condition"]))

    def sites(self, found: Mapping[Site, SiteStatistics]) -> list[Site]:
        """Return the sites that meet the condition."""
        try:
            return [] if self._failed else [site for site, seen in found.items() if self._condition(seen)]
        except Exception as error:
            self._failed = True
            message = (
                f"{self._name}: {self._argument} {describe_call(self._condition, error)}; it is not called again, "
                "and no further dump is written because of it"
            )
            if self._strict:
                raise RecordingError(message) from error
            warn(message)
            return []


class StatisticsDumps(RecordConsumer):
    """Dumps the statistics of records.

    Args:
        at: The times of the dumps, any of ``DUMP_TIMES``. Dumps at checkpoints and at the end of epochs contain the
            latest record.
        event: A condition. A record is also dumped if any of its sites meets it.
    """

    def __init__(self, at: Iterable[str] = ("checkpoints",), event: Event | None = None) -> None:
        self.at = tuple(at)
        self.folder: DumpFolder | None = None
        """The folder of the dumps."""
        self._event = event
        self._latest: Table | None = None

    def __str__(self) -> str:
        return "dumps"

    @property
    def has_event(self) -> bool:
        """True if there is a condition on the statistics of records."""
        return self._event is not None

    def begin(self, folder: DumpFolder) -> None:
        """Begin a run."""
        self.folder, self._latest = folder, None

    def end(self) -> None:
        """Release the folder, which may refer to the loggers of the run."""
        self.folder = self._latest = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "folder": None, "_latest": None}  # the folder and the latest record belong to a run

    @override
    def on_record(self, found: Table) -> None:
        if found.stage != "train" or found.about["overflowed"] or not found or self.folder is None:
            return
        self._latest = found
        matching = [] if self._event is None else self._event.sites(found)
        if matching:
            where = {"event": [list(site) for site in matching]}
            self.folder.write(_content(found, where), "event")
        elif "records" in self.at:
            self.folder.write(_content(found), "record")

    @override
    def end_epoch(self) -> None:
        if "epochs" in self.at and self._latest is not None and self.folder is not None:
            self.folder.write(_content(self._latest), "epoch")

    def write_beside(self, checkpoint: Path) -> None:
        """Dump the latest record next to a checkpoint. A no-op if there is no record."""
        if "checkpoints" in self.at and self._latest is not None and self.folder is not None:
            self.folder.write_beside(_content(self._latest), checkpoint)

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the dump next to a checkpoint."""
        if self.folder is not None:
            self.folder.remove_beside(checkpoint)


def check_dumps(value: object) -> tuple[str, ...]:
    """Return the dump times from a ``dumps`` argument.

    Raises:
        ArgumentError: If the argument is invalid.
    """
    if isinstance(value, bool):
        return ("checkpoints",) if value else ()
    try:
        return check_some("dumps", value, DUMP_TIMES)
    except ArgumentError as error:
        more = "" if str(error).endswith("?") else "; True stands for 'checkpoints', False for none"
        raise ArgumentError(f"{error}{more}") from None


def _content(found: Table, entries: Mapping[str, object] | None = None) -> DumpContent:
    """Return the statistics of a record as tensors named ``<site>/<statistic>``."""
    tensors: dict[str, Tensor] = {}
    samples: dict[str, int] = {}
    for site, seen in found.items():
        values = {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in seen.scalars.items()}
        for statistic, tensor in {**values, **seen.tensors, "histogram": seen.bins}.items():
            tensors[make_tag("", *site, statistic)] = tensor
        samples[make_tag("", *site)] = int(seen.scalars["count"])
    return DumpContent(found.step, found.about["epoch"], tensors, samples, entries or {})


TENSOR_DUMP_TIMES = ("checkpoints", "steps", "epochs")
"""The times at which tensors can be dumped."""

_WAITING = 2  # the maximum number of waiting captured steps; with more, the training waits, to bound the memory


@dataclass(frozen=True)
class _Step:
    step: int
    epoch: int
    captured: Captured


class TensorDumps:
    """Writes captured tensors.

    Args:
        folder: The folder of the dumps.
        at: The times of the dumps, any of ``TENSOR_DUMP_TIMES``. Dumps at checkpoints and at the end of epochs contain
            the tensors of the latest captured step.
        event: A condition. A step is also dumped if the statistics of any of its tensors meet it.
        buffers: The pool that reuses the memory of the written tensors.
        name: The name of the recorder in warnings.
        strict: Raise errors.

    Note:
        Captured tensors stay on their device until they are written. While one step is written, two more steps may
        wait. While two steps wait, :meth:`add` blocks. The latest step is also kept on the CPU.
    """

    def __init__(
        self,
        folder: DumpFolder,
        at: tuple[str, ...],
        event: Event | None = None,
        *,
        buffers: BufferPool | None = None,
        name: str = "the recorder",
        strict: bool = False,
    ) -> None:
        self.folder = folder
        self._at, self._event, self._buffers = at, event, buffers
        self._name, self._strict = name, strict
        self._queue = BackgroundQueue(_WAITING)
        self._latest: _Step | None = None
        self._failed = self._has_warned = False
        self.steps = self.tensors = 0
        """The number of captured steps, and the number of captured tensors."""

    def add(self, step: int, epoch: int, captured: Captured) -> None:
        """Queue the tensors of a step."""
        if captured.left_out and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._name}: {len(captured.left_out)} tensors of step {step} are left out, the first is "
                f"{captured.left_out[0]!r}: use a larger max_bytes or fewer samples"
            )
        self.steps += 1
        self.tensors += len(captured.tensors) + len(captured.left_out) + len(captured.unsupported)
        self._submit(partial(self._write_step, _Step(step, epoch, captured)))

    @property
    def failed(self) -> bool:
        """True if no more dumps are written because of an error. A warning was then given."""
        return self._failed

    def _write_step(self, latest: _Step) -> None:
        snapshot = latest.captured.snapshot
        matching = []
        if self._event is not None and snapshot is not None:
            matching = self._event.sites(snapshot.statistics())
        if matching:
            self.folder.write(_tensor_content(latest, event=[list(site) for site in matching]), "event")
        elif "steps" in self._at:
            self.folder.write(_tensor_content(latest), "step")
        unused = latest.captured.tensors
        if {"checkpoints", "epochs"} & set(self._at):
            host = {name: tensor.cpu() for name, tensor in unused.items()}
            before = self._latest
            self._latest = replace(latest, captured=replace(latest.captured, tensors=host))
            kept = {id(tensor) for tensor in host.values()}
            unused = {name: tensor for name, tensor in unused.items() if id(tensor) not in kept}
            if before is not None:
                unused |= {f"before {name}": tensor for name, tensor in before.captured.tensors.items()}
        if self._buffers is not None:
            self._buffers.give_back(unused.values())

    def end_epoch(self) -> None:
        """Write the latest step at the end of an epoch, if requested."""
        if "epochs" in self._at:
            self._submit(self._write_epoch)

    def _write_epoch(self) -> None:
        if self._latest is not None:
            self.folder.write(_tensor_content(self._latest), "epoch")

    def write_beside(self, checkpoint: Path) -> None:
        """Dump the latest step next to a checkpoint. A no-op without a step. Pending errors are not raised here."""
        self._queue.put(partial(self._contained, partial(self._write_beside, checkpoint)))

    def _write_beside(self, checkpoint: Path) -> None:
        if self._latest is not None:
            self.folder.write_beside(_tensor_content(self._latest), checkpoint)

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the dump next to a checkpoint, even if writing has failed."""
        self._queue.put(partial(self.folder.remove_beside, checkpoint))

    def _submit(self, job: Callable[[], object]) -> None:
        self._queue.submit(partial(self._contained, job))

    def _contained(self, job: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            job()
        except Exception as error:
            self._failed = True
            if self._strict:
                raise
            warn(f"{self._name} writes no more dumps: {describe_error(error)}")

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            Exception: The first error, if ``strict``.
        """
        self._queue.drain()


def _tensor_content(latest: _Step, **entries: object) -> DumpContent:
    captured = latest.captured
    missing = [*captured.left_out, *captured.unsupported]
    if missing:
        entries["left_out"] = missing
    return DumpContent(latest.step, latest.epoch, captured.tensors, None, entries)
