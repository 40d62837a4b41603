"""The loss scale of a trainer, and the steps that are passed over for it."""

from __future__ import annotations

from lightning.pytorch import Trainer

__all__ = ["LossScale"]


class LossScale:
    """Follows the scale of a ``GradScaler`` through the steps of a batch; it is 1 without one.

    A step whose gradients are not finite is passed over by the optimiser. Then the scale shrinks, and at no other time.

    Note:
        On a GPU, reading the scale waits for the device.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """The scale at which the gradients are computed now."""
        self.overflowed = False
        """Whether a step of this batch was passed over."""

    def begin_batch(self, trainer: Trainer) -> None:
        """See what the scale is before a batch."""
        self.value, self.overflowed = _scale(trainer), False

    def end_step(self, trainer: Trainer) -> bool:
        """See what has become of the step before; the answer is whether the scale is another one now."""
        before, self.value = self.value, _scale(trainer)
        self.overflowed |= self.value < before
        return self.value != before


def _scale(trainer: Trainer) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
