"""The tensors that modules give."""

from __future__ import annotations

from typing import Any

from lightning_recorder.autograd import in_backward
from lightning_recorder.structure import iter_tensors
from lightning_recorder.taps.base import Tap

__all__ = ["OutputTap"]


class OutputTap(Tap):
    """Hands over each output tensor of the modules, at the moment when the module returns.

    An in-place operation that follows does not matter, since the receiver has read the tensor by then. A forward pass
    that ``torch.utils.checkpoint`` repeats inside the backward pass is not a second call and is passed over.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
        >>> with OutputTap(dict(net.named_children()), lambda site, tensor: print(*site, tuple(tensor.shape))):
        ...     _ = net(torch.ones(5, 2))
        0 out (5, 3)
        1 out (5, 3)
    """

    def _see_output(self, name: str, output: Any) -> None:
        if not in_backward():
            self._hand_over(name, iter_tensors(output))
