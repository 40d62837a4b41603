"""The gradients of the tensors that modules give."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_recorder.autograd import is_transformed
from lightning_recorder.structure import iter_tensors
from lightning_recorder.taps.base import Tap

__all__ = ["OutputGradientTap"]


class OutputGradientTap(Tap):
    """Hands over the gradient of the loss with respect to each output tensor of the modules.

    The hook sits on the output tensor and not on the module: a full backward hook raises where an in-place operation
    follows, stays silent for dictionaries and dataclasses, and puts a node into the autograd graph that changes the
    last bits of the gradients. The gradient is that of the tensor, so for an output which is used twice it is the sum
    of both uses, and for a module that returns its input that of the input.

    Under gradient checkpointing with ``use_reentrant=True`` the graph is built inside the backward pass; the hooks are
    put on there. A backward pass that is run twice, as by ``torch.autograd.grad`` for a gradient penalty, hands over
    both gradients. Backward passes after the tap was removed are not seen.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with OutputGradientTap({"head": net}, lambda site, grad: print(site.name, grad.tolist())):
        ...     (3 * net(torch.ones(1, 2))).sum().backward()
        head [[3.0]]
    """

    def _see_output(self, name: str, output: Any) -> None:
        for path, tensor in iter_tensors(output):
            if tensor.requires_grad and not is_transformed(tensor):
                self._keep(tensor.register_hook(_GradientHook(self, name, path)))


class _GradientHook:
    """A tensor hook that belongs to one tap."""

    # Read by torch when it pickles the tensor: says that leaving the hook out is intended, so that nobody is warned of
    # it.
    __torch_unserializable__ = True

    def __init__(self, tap: OutputGradientTap, name: str, path: str) -> None:
        self._tap = tap
        self._name = name
        self._path = path

    def __call__(self, grad: Tensor | None) -> None:
        # torch calls the hook of an output that took no part in the loss with None.
        if grad is not None and self._tap.attached:
            self._tap._guarded(self._name, self._tap._hand_over, [(self._path, grad)])
