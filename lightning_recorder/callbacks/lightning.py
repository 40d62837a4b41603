"""The names of Lightning that the callbacks use, with stand-ins for a program that has no Lightning.

A loop without Lightning calls the hooks of the same recorders, through :mod:`lightning_recorder.loops`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_recorder.internals.preserve_state import same_random_numbers

__all__ = [
    "HAS_LIGHTNING",
    "Callback",
    "CheckpointIO",
    "DummyLogger",
    "FSDPStrategy",
    "LightningModule",
    "Logger",
    "Strategy",
    "Trainer",
    "is_overridden",
    "rank_zero_info",
]


def _can_be_imported() -> bool:
    # Some packages that Lightning imports draw random numbers during their import. A plain loop may already be seeded.
    with same_random_numbers(()):
        try:
            import_module("lightning.pytorch")
        except ImportError:
            return False
        return True


HAS_LIGHTNING = _can_be_imported()
"""True if Lightning is installed."""

if TYPE_CHECKING or HAS_LIGHTNING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.strategies import FSDPStrategy, Strategy
    from lightning.pytorch.utilities import rank_zero_info
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:

    class Callback:
        """A base class with the Lightning hooks that a recorder may hide. The hooks do nothing."""

        def _ignore(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        on_train_batch_start = on_train_batch_end = on_before_zero_grad = on_before_backward = _ignore
        on_after_backward = on_before_optimizer_step = _ignore
        on_validation_batch_start = on_validation_batch_end = _ignore

        @property
        def state_key(self) -> str:
            """The key of the state in a checkpoint."""
            return type(self).__qualname__

        def _generate_state_key(self, **kwargs: Any) -> str:
            # Same format as in Lightning, so that a checkpoint can be read with and without Lightning.
            return f"{type(self).__qualname__}{kwargs!r}"

    class _Unknown:
        """A stand-in for Lightning classes in annotations and as a base class."""

    CheckpointIO = FSDPStrategy = LightningModule = Logger = Strategy = Trainer = _Unknown

    class DummyLogger:
        """A stand-in for the logger while a step is run again."""

    def is_overridden(method_name: str, instance: object) -> bool:
        """Return False: without Lightning, no model overrides a method of a LightningModule."""
        return False

    _log = logging.getLogger("lightning_recorder")

    def rank_zero_info(message: str) -> None:
        """Log a message on the first process."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        if not _log.hasHandlers():  # otherwise Python shows warnings only
            _log.addHandler(logging.StreamHandler())
            _log.setLevel(logging.INFO)
        _log.info(message)
