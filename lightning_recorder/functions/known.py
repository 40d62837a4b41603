"""The functions of torch that can be recorded, by which a call is recognized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.functions.table import FUNCTIONS
from lightning_recorder.graph.capture.function_calls import function_name

__all__ = ["KNOWN"]


def _known() -> dict[Callable[..., Any], str]:
    """Return the name of each function of torch, each method of a tensor, and those that work in place."""
    found = {}
    for name in (*FUNCTIONS, "expit", "logsigmoid", "_threshold"):
        for spelled in (name, f"{name}_"):
            for place in (torch.nn.functional, torch, Tensor, torch.special):
                function = getattr(place, spelled, None)
                if callable(function) and function_name(function) in FUNCTIONS:
                    found[function] = function_name(function)
    return found


KNOWN: Mapping[Callable[..., Any], str] = MappingProxyType(_known())
"""The name of each function and method in :data:`FUNCTIONS`."""
