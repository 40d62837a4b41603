"""Notifications of saved and removed checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_recorder.callbacks.lightning import CheckpointIO, Strategy, Trainer
from lightning_recorder.errors import describe_error, warn

__all__ = ["CheckpointWatch", "why_no_checkpoint"]


class CheckpointWatch:
    """Watches the checkpoints of a run, including those that no checkpoint IO reports.

    The trainer's checkpoint IO reports each file to rank 0. It does not report checkpoints that a strategy writes in
    parts, and it reports nothing to the other ranks. For these, the watch reads the paths from the trainer's checkpoint
    callbacks after they have saved.

    Args:
        saved: Called with the path of each saved checkpoint.
        removed: Called with the path of each removed checkpoint.
        ended: Called when no more checkpoints can follow, also after an exception.
        name: The name of the recorder in warnings.
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
        self._reported: set[Path] = set()
        self._found: dict[Path, int] = {}
        self._is_active = self._has_failed = False
        self.is_pending = False
        """True if a checkpoint was announced since the last :meth:`look`. If False, :meth:`look` does nothing."""

    def begin(self, trainer: Trainer) -> None:
        """Start watching a run. The functions given to the constructor are called from now on."""
        self._is_active = True
        self._reported, self.is_pending, self._has_failed = set(), False, False
        self._found = {path: _written_at(path) for path in _kept(trainer)}
        if trainer.is_global_zero:
            _listen(trainer, self)

    def end(self, trainer: Trainer) -> None:
        """Stop watching a run. After a failure, the checkpoint that is saved for the exception is still reported."""
        # Look once more, because another rank may remove a checkpoint after the last look of this rank.
        self.is_pending |= self._is_active and bool(self._found)
        self.look(trainer)
        self._is_active = False
        if not trainer.interrupted:
            _stop_listening(trainer, self)

    def expect(self) -> None:
        """Announce that a checkpoint is being saved."""
        self.is_pending = self._is_active

    def look(self, trainer: Trainer) -> None:
        """Report checkpoints saved and removed since the last call, on every rank, if a save was announced."""
        if not self.is_pending:
            return
        self.is_pending = False
        kept = _kept(trainer)
        for path in sorted(kept - self._reported):
            written_at = _written_at(path)
            if written_at > self._found.get(path, 0):
                self._found[path] = written_at
                self._call(self._saved, path)
        for path in [path for path in self._found if path not in kept]:
            if not path.exists():
                del self._found[path]
                self._call(self._removed, path)

    def note_saved_checkpoint(self, path: Path) -> None:
        """Handle a save that the checkpoint IO reports."""
        self._reported.add(path)
        self._call(self._saved, path)

    def note_removed_checkpoint(self, path: Path) -> None:
        """Handle a removal that the checkpoint IO reports."""
        self._found.pop(path, None)
        self._call(self._removed, path)

    def saving_ended(self) -> None:
        """Handle the end of the run's checkpoints."""
        if self._ended is not None:
            self._ended()

    def _call(self, function: Callable[[Path], object], path: Path) -> None:
        """Call ``function``. An error gives a warning and ends the dumps, but does not affect the checkpoint."""
        try:
            if not self._has_failed:
                function(path)
        except Exception as error:  # noqa: BLE001 - a failed dump must not lose the checkpoint
            self._has_failed = True
            warn(f"{self._name} writes no more dumps beside checkpoints: {describe_error(error)}")


def why_no_checkpoint(trainer: Trainer) -> str:
    """Return the reason why nothing was written beside the checkpoints of a run."""
    if not trainer.checkpoint_callbacks:
        return "the run saves no checkpoints"
    folders = [str(getattr(callback, "dirpath", "") or "") for callback in trainer.checkpoint_callbacks]
    if any("://" in folder for folder in folders):
        return f"no dumps are written beside checkpoints in {next(each for each in folders if '://' in each)}"
    return "no checkpoint was saved after the first recorded step"


def _kept(trainer: Trainer) -> set[Path]:
    """Return the checkpoints that the trainer's checkpoint callbacks currently keep."""
    found: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        found.update(getattr(callback, "best_k_models", {}))
        found.update({getattr(callback, "best_model_path", ""), getattr(callback, "last_model_path", "")})
    return {Path(path) for path in found if path and "://" not in str(path)}


def _written_at(path: Path) -> int:
    """Return the modification time of a file, or of the newest file in a folder, in nanoseconds; 0 if there is none."""
    try:
        files = list(path.iterdir()) if path.is_dir() else [path]
        return max((file.stat().st_mtime_ns for file in files), default=0)
    except OSError:
        return 0


class _ObservedCheckpointIO(CheckpointIO):
    """Wraps the trainer's checkpoint IO and notifies the listeners after each operation.

    The hook ``on_save_checkpoint`` is not enough: it runs before the file is written and receives no path, and there is
    no hook for removals. One wrapper serves all callbacks of a trainer, because several wrappers that are removed in
    the order in which they were added would leave one behind.
    """

    def __init__(self, inner: CheckpointIO, strategy: Strategy) -> None:
        self.inner = inner
        self.listeners: list[CheckpointWatch] = []
        self._strategy = weakref.ref(strategy)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        self._notify(lambda listener: listener.note_saved_checkpoint(Path(path)), path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        self._notify(lambda listener: listener.note_removed_checkpoint(Path(path)), path)

    def teardown(self) -> None:
        self.inner.teardown()
        strategy = self._strategy()
        if strategy is not None and strategy.checkpoint_io is self:  # after an exception, no callback hook runs
            strategy.checkpoint_io = self.inner
            for listener in self.listeners:
                listener.saving_ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def _notify(self, what: Callable[[CheckpointWatch], None], path: Any) -> None:
        if "://" in str(path):
            # A remote checkpoint, such as an object in a bucket, has no local folder for a dump.
            return
        for listener in list(self.listeners):
            what(listener)


def _listen(trainer: Trainer, listener: CheckpointWatch) -> None:
    """Notify a listener of the checkpoints of a trainer from now on."""
    strategy = trainer.strategy
    observed = strategy.checkpoint_io
    if not isinstance(observed, _ObservedCheckpointIO):
        plain, observed = observed, _ObservedCheckpointIO(observed, strategy)
        strategy.checkpoint_io = observed
        try:
            strategy.checkpoint_io  # noqa: B018 - the property of XLA strategies checks the type on read
        except TypeError:
            strategy.checkpoint_io = plain
            warn(
                f"{type(strategy).__name__} does not accept a checkpoint IO plugin: no dumps are written beside its "
                "checkpoints"
            )
            return
    if listener not in observed.listeners:
        observed.listeners.append(listener)


def _stop_listening(trainer: Trainer, listener: CheckpointWatch) -> None:
    """Remove a listener. Removing the last one restores the trainer's own checkpoint IO."""
    observed = trainer.strategy.checkpoint_io
    if isinstance(observed, _ObservedCheckpointIO):
        if listener in observed.listeners:
            observed.listeners.remove(listener)
        if not observed.listeners:
            trainer.strategy.checkpoint_io = observed.inner
