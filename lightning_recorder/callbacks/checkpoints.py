"""Seeing where checkpoints are written and when they are removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer

from lightning_recorder.errors import tell

__all__ = ["CheckpointListener", "listen", "stop_listening"]


class CheckpointListener(Protocol):
    """Who wants to know of checkpoints."""

    def checkpoint_saved(self, path: Path) -> None:
        """A checkpoint was written to this path, by this process."""

    def checkpoint_removed(self, path: Path) -> None:
        """The checkpoint at this path was removed, by this process."""


class _ObservedCheckpointIO(CheckpointIO):
    """Passes everything on to the trainer's own checkpoint IO and tells the listeners afterwards.

    ``on_save_checkpoint`` of a callback runs before the file is written and is told no path, and nothing at all is told
    of removals. One observer serves all callbacks of a trainer, because wrappers that are taken off in the order in
    which they were put on would leave one behind.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner
        self.listeners: list[CheckpointListener] = []

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def _tell(self, what: Callable[[CheckpointListener], None], path: Any) -> None:
        if "://" in str(path):
            # Beside an object in a bucket there is no file to be written with plain means.
            return
        for listener in list(self.listeners):
            try:
                what(listener)
            except Exception as error:  # noqa: BLE001, PERF203 - a dump that fails in any way must not cost the checkpoint
                self.listeners.remove(listener)
                name, kind = type(listener).__name__, type(error).__name__
                tell(f"{name} writes no more dumps beside checkpoints: {kind}: {error}")


def listen(trainer: Trainer, listener: CheckpointListener) -> None:
    """Tell a listener of the checkpoints of a trainer from now on."""
    strategy = trainer.strategy
    observed = strategy.checkpoint_io
    if not isinstance(observed, _ObservedCheckpointIO):
        plain, observed = observed, _ObservedCheckpointIO(observed)
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
