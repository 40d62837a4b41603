"""Track the loss scale of a trainer and the steps skipped because of overflow."""

from __future__ import annotations

from lightning.pytorch import Trainer

__all__ = ["LossScale"]


class LossScale:
    """Tracks the scale of a ``GradScaler`` across the steps of a batch. The scale is 1 without a ``GradScaler``.

    If the gradients of a step are not finite, the optimizer skips the step and the scale shrinks. It shrinks at no
    other time, so a smaller scale means a skipped step.

    Note:
        On a GPU, reading the scale synchronizes with the device.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """The current loss scale."""
        self.overflowed = False
        """True if a step of this batch was skipped."""

    def begin_batch(self, trainer: Trainer) -> None:
        """Read the scale before a batch."""
        self.value, self.overflowed = _scale(trainer), False

    def end_step(self, trainer: Trainer) -> bool:
        """Check whether the previous step was skipped; return True if the scale has changed."""
        before, self.value = self.value, _scale(trainer)
        self.overflowed |= self.value < before
        return self.value != before


def _scale(trainer: Trainer) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
