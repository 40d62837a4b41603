"""Who called a function of torch: the model, or what trains it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["called_by_trainer"]

# A trainer's own arithmetic on the loss (dividing it by the number of micro-batches, scaling it, logging it) is no part
# of the model, nor is an optimiser's.
_TRAINERS = (
    "lightning.",
    "lightning_fabric.",
    "lightning_utilities.",
    "pytorch_lightning.",
    "torch.optim.",
    "torch.amp.grad_scaler",
)
_MODELS_AMONG_THEM = ".demos."  # the models that Lightning ships
_BETWEEN = ("torch", "lightning_recorder", "contextlib", "functools")


def called_by_trainer() -> bool:
    """Whether the trainer or an optimiser called the function, and not the model.

    The first frame that is neither torch's nor ours decides.
    """
    for frame in _frames(sys._getframe(1)):
        name = str(frame.f_globals.get("__name__", ""))
        function = frame.f_code.co_name
        if name.startswith(_TRAINERS):
            # torch's averaged copy of a model, among its optimisers, has a forward.
            return _MODELS_AMONG_THEM not in name and not (name == "torch.optim.swa_utils" and function == "forward")
        # A function mode of the user's stands between a function and who called it.
        if name.partition(".")[0] not in _BETWEEN and function != "__torch_function__":
            return False
    return False


def _frames(start: FrameType | None) -> Iterator[FrameType]:
    while start is not None:
        yield start
        start = start.f_back
