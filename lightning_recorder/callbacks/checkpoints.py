"""Seeing where checkpoints are written and when they are removed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_recorder.errors import describe_error, tell

__all__ = ["CheckpointWatch"]


class CheckpointListener(Protocol):
    """Who wants to know of checkpoints."""

    def checkpoint_saved(self, path: Path) -> None:
        """A checkpoint was written to this path, by this process."""

    def checkpoint_removed(self, path: Path) -> None:
        """The checkpoint at this path was removed, by this process."""

    def no_more(self) -> None:
        """No other checkpoint will come."""


class CheckpointWatch:
    """Learns of the checkpoints of a run, also of those of which nobody tells.

    The trainer's checkpoint IO tells the first rank of each file. Of a checkpoint that a strategy writes in parts, and
    on the other ranks of any, nobody tells: then the trainer's checkpoint callbacks know what there is, once they have
    saved.

    Args:
        saved: Called with the path of each checkpoint that was saved.
        removed: Called with the path of each that is gone.
        ended: Called when none can come any more, behind an exception too.
        name: What warnings call the recorder.
    """

    def __init__(
        self,
        saved: Callable[[Path], object],
        removed: Callable[[Path], object],
        ended: Callable[[], object] | None = None,
        *,
        name: str = "the recorder",
    ) -> None:
        self._saved, self._removed, self._ended, self._name = saved, removed, ended, name
        self._told: set[Path] = set()
        self._found: dict[Path, int] = {}
        self._is_active = self._is_pending = self._has_failed = False

    def begin(self, trainer: Trainer) -> None:
        """Begin with a run; of one with which it has not begun nothing is told."""
        self._is_active = True
        self._told, self._is_pending, self._has_failed = set(), False, False
        self._found = {path: _written_at(path) for path in _kept(trainer)}
        if trainer.is_global_zero:
            listen(trainer, self)

    def end(self, trainer: Trainer) -> None:
        """End with a run; one that has failed is still told of the checkpoint that is saved for that."""
        # Other ranks remove a checkpoint later than this one may have looked.
        self._is_pending |= self._is_active and bool(self._found)
        self.look(trainer)
        self._is_active = False
        if not trainer.interrupted:
            stop_listening(trainer, self)

    def expect(self) -> None:
        """Say that a checkpoint is being saved."""
        self._is_pending = self._is_active

    def look(self, trainer: Trainer) -> None:
        """See what was saved and removed since the last time, if anything was saved; on all ranks the same."""
        if not self._is_pending:
            return
        self._is_pending = False
        kept = _kept(trainer)
        for path in sorted(kept - self._told):
            written_at = _written_at(path)
            if written_at > self._found.get(path, 0):
                self._found[path] = written_at
                self._call(self._saved, path)
        for path in [path for path in self._found if path not in kept]:
            if not path.exists():
                del self._found[path]
                self._call(self._removed, path)

    def checkpoint_saved(self, path: Path) -> None:
        """Take what checkpoint IO tells."""
        self._told.add(path)
        self._call(self._saved, path)

    def checkpoint_removed(self, path: Path) -> None:
        """As above."""
        self._found.pop(path, None)
        self._call(self._removed, path)

    def no_more(self) -> None:
        """Take it that no checkpoint can come any more."""
        if self._ended is not None:
            self._ended()

    def _call(self, function: Callable[[Path], object], path: Path) -> None:
        """A dump that fails in any way must not cost the checkpoint; after that there is no other one."""
        try:
            if not self._has_failed:
                function(path)
        except Exception as error:  # noqa: BLE001 - as it says
            self._has_failed = True
            tell(f"{self._name} writes no more dumps beside checkpoints: {describe_error(error)}")


def _kept(trainer: Trainer) -> set[Path]:
    """The checkpoints that the trainer's checkpoint callbacks keep."""
    found: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        found.update(getattr(callback, "best_k_models", {}))
        found.update({getattr(callback, "best_model_path", ""), getattr(callback, "last_model_path", "")})
    return {Path(path) for path in found if path and "://" not in str(path)}


def _written_at(path: Path) -> int:
    """When a file, or the newest file of a folder, was written, in nanoseconds; 0 if there is none."""
    try:
        files = list(path.iterdir()) if path.is_dir() else [path]
        return max((file.stat().st_mtime_ns for file in files), default=0)
    except OSError:
        return 0


class _ObservedCheckpointIO(CheckpointIO):
    """Passes everything on to the trainer's own checkpoint IO and tells the listeners afterwards.

    ``on_save_checkpoint`` of a callback runs before the file is written and is told no path, and nothing at all is told
    of removals. One observer serves all callbacks of a trainer, because wrappers that are taken off in the order in
    which they were put on would leave one behind.
    """

    def __init__(self, inner: CheckpointIO, strategy: Strategy) -> None:
        self.inner = inner
        self.listeners: list[CheckpointListener] = []
        self._strategy = weakref.ref(strategy)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        self._tell(lambda listener: listener.checkpoint_saved(Path(path)), path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        self._tell(lambda listener: listener.checkpoint_removed(Path(path)), path)

    def teardown(self) -> None:
        self.inner.teardown()
        strategy = self._strategy()
        if strategy is not None and strategy.checkpoint_io is self:  # behind an exception there is no hook of ours
            strategy.checkpoint_io = self.inner
            for listener in self.listeners:
                listener.no_more()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def _tell(self, what: Callable[[CheckpointListener], None], path: Any) -> None:
        if "://" in str(path):
            # Beside an object in a bucket there is no file to be written with plain means.
            return
        for listener in list(self.listeners):
            what(listener)


def listen(trainer: Trainer, listener: CheckpointListener) -> None:
    """Tell a listener of the checkpoints of a trainer from now on."""
    strategy = trainer.strategy
    observed = strategy.checkpoint_io
    if not isinstance(observed, _ObservedCheckpointIO):
        plain, observed = observed, _ObservedCheckpointIO(observed, strategy)
        strategy.checkpoint_io = observed
        try:
            strategy.checkpoint_io  # noqa: B018 - the XLA strategies look at the type when they are asked
        except TypeError:
            strategy.checkpoint_io = plain
            tell(
                f"{type(strategy).__name__} takes no checkpoint IO of ours: no dumps are written beside its checkpoints"
            )
            return
    if listener not in observed.listeners:
        observed.listeners.append(listener)


def stop_listening(trainer: Trainer, listener: CheckpointListener) -> None:
    """Tell the listener no more; after the last of them the trainer has its own checkpoint IO back."""
    observed = trainer.strategy.checkpoint_io
    if isinstance(observed, _ObservedCheckpointIO):
        if listener in observed.listeners:
            observed.listeners.remove(listener)
        if not observed.listeners:
            trainer.strategy.checkpoint_io = observed.inner
