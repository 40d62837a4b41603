"""Counting of the floating-point operations of a run, and the lines that read values of tensors."""

from __future__ import annotations

import sys
from contextlib import suppress
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["OperationCounter"]

Shape = tuple[int, ...]


def _attention_operations(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the two products of ``softmax(q kᵀ) v``, with shapes ``[..., heads, length, features]``."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _lstm_operations(x: Shape, weight_ih: Shape, weight_hh: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of one layer and direction over ``x`` of shape ``[length, batch, features]``."""
    return 2 * x[0] * x[1] * (prod(weight_ih) + prod(weight_hh))


def _layer_operations(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of attention over ``[batch, length, features]`` with its four projections."""
    features = query[-1]
    projections = features * (2 * prod(query) + prod(key) + prod(value))
    return 2 * projections + 2 * prod(query[:-1]) * key[-2] * 2 * features


def _encoder_operations(source: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a whole ``nn.TransformerEncoderLayer``: attention and two linear layers of equal size."""
    linear: Shape = args[_LINEAR]
    return _layer_operations(source, source, source) + 2 * 2 * prod(source[:-1]) * prod(linear)


_LINEAR = 13  # the place of the weight of the first linear layer behind the input

# Fused operations that torch has no formula for.
_MORE_FORMULAS = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_operations),
        ("mkldnn_rnn_layer", _lstm_operations),
        ("_native_multi_head_attention", _layer_operations),
        ("_transformer_encoder_layer_fwd", _encoder_operations),
    )
    if hasattr(torch.ops.aten, name)
}


_TORCH = str(Path(torch.__file__).parent)
# torch wraps dispatch modes in functions of these files, which keep its compiler away.
_WRAPPERS = (f"{_TORCH}/_compile.py", f"{_TORCH}/_dynamo/eval_frame.py")


def _reading_line() -> list[str]:
    """Return the line that reads the value of a tensor, unless torch itself does, for example to print the tensor."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return []
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"]


class OperationCounter(TorchDispatchMode):
    """Count the floating-point operations of this thread with the formulas of torch's ``FlopCounterMode``.

    That mode itself would register hooks on all modules of the process, which other threads call too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.operations = 0
        self.reads: list[str] = []
        """The lines of the model that read the value of a tensor, such as ``net.py:12``."""
        self._formulas = FlopCounterMode(display=False, custom_mapping=_MORE_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if packet is torch.ops.aten._local_scalar_dense:
            self.reads += _reading_line()
        formula = self._formulas.get(packet)
        if formula is None and torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            # In inference mode composite operations are not decomposed before dispatch.
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is not None:
            # A formula may not support the arguments; the table is then incomplete, but the net still runs.
            with suppress(Exception):
                self.operations += int(formula(*args, **kwargs, out_val=output))
        return output
