"""The background writer of captured tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.outputs.dump_folder import DumpContent, DumpFolder
from lightning_recorder.outputs.statistics_dumps import Event
from lightning_recorder.sinks import BackgroundQueue
from lightning_recorder.tensors import BufferPool, Captured

__all__ = ["TENSOR_DUMP_TIMES", "TensorDumps"]

TENSOR_DUMP_TIMES = ("checkpoints", "steps", "epochs")
"""The times at which tensors can be dumped."""

_WAITING = 2  # the number of captured steps that may wait; then the training waits, because memory is bounded


@dataclass(frozen=True)
class _Step:
    step: int
    epoch: int
    captured: Captured


class TensorDumps:
    """Write captured tensors.

    Args:
        folder: The folder of the dumps.
        at: The times of the dumps, some of ``TENSOR_DUMP_TIMES``. Dumps at checkpoints and at the end of epochs contain
            the tensors of the latest captured step.
        event: A condition. A step is also dumped if the statistics of any of its tensors meet it.
        buffers: The pool that receives the memory of the written tensors.
        name: The name of the recorder in warnings.
        strict: Raise errors.

    Note:
        Captured tensors stay on their device until they are written. While one step is written, two may wait, and
        handing over another one blocks. The latest step is also kept, on the CPU.
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
        self._buffers = buffers
        self._at = at
        self._event = event
        self._name = name
        self._strict = strict
        self._queue = BackgroundQueue(_WAITING)
        self._latest: _Step | None = None
        self._failed = False
        self._has_warned = False
        self.steps = self.tensors = 0
        """The number of captured steps, and the number of their tensors."""

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
        """True if no more dumps are written because of an error, which causes a warning."""
        return self._failed

    def _write_step(self, latest: _Step) -> None:
        snapshot = latest.captured.snapshot
        matching = []
        if self._event is not None and snapshot is not None:
            matching = self._event.sites(snapshot.statistics())
        if matching:
            self.folder.write(_content(latest, event=[list(site) for site in matching]), "event")
        elif "steps" in self._at:
            self.folder.write(_content(latest), "step")
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
            self.folder.write(_content(self._latest), "epoch")

    def write_beside(self, checkpoint: Path) -> None:
        """Dump the latest step next to a checkpoint. A no-op without a step. Pending errors are not raised here."""
        self._queue.put(partial(self._contained, partial(self._write_beside, checkpoint)))

    def _write_beside(self, checkpoint: Path) -> None:
        if self._latest is not None:
            self.folder.write_beside(_content(self._latest), checkpoint)

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


def _content(latest: _Step, **entries: object) -> DumpContent:
    captured = latest.captured
    missing = [*captured.left_out, *captured.unsupported]
    if missing:
        entries["left_out"] = missing
    return DumpContent(latest.step, latest.epoch, captured.tensors, None, entries)
