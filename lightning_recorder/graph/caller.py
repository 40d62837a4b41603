"""Who called a function of torch: the model, what trains it, or a function of the user's with a gradient of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from lightning_recorder.autograd import CALL_OF_FUNCTION, CALL_OF_MODULE

__all__ = ["Caller", "CustomCall", "find_caller"]

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
# A function of the wrapper's stands between the model and what it gave.
_WRAPPER = "torch.nn.parallel.distributed"
# A metric counts for whoever asks it: the model, or the trainer that logs.
_BETWEEN = ("torch", "torchmetrics", "lightning_recorder", "contextlib", "functools")


class _Part(Enum):
    """Whose code a frame runs."""

    BETWEEN = 0
    MODEL = 1
    TRAINER = 2


@dataclass(frozen=True)
class CustomCall:
    """A call of an ``autograd.Function`` of the user's that is going on.

    Args:
        function: The class.
        frame: Tells one call from another that is going on at the same time.
        arguments: What it was called with.
        depth: How many such calls are going on, it and those inside it.
        new: Whether nobody has asked inside it before.
    """

    function: type
    frame: int
    arguments: Any
    depth: int = 1
    new: bool = True


@dataclass(frozen=True)
class Caller:
    """Who called.

    Args:
        trainer: Whether the trainer or an optimiser did, and not the model.
        source: The line of the model's code, as ``models/net.py:42``; empty where there is none.
        custom: The call of an ``autograd.Function`` inside which it happened.
    """

    trainer: bool = False
    source: str = ""
    custom: CustomCall | None = None


def find_caller() -> Caller:
    """Who called the function that is being recorded.

    The first frame that is neither torch's nor ours decides. An ``autograd.Function`` is looked for up to the call of a
    module: what a module does inside one is the module's. Of nested ones it is the outermost.
    """
    frame: FrameType | None = sys._getframe(1)
    deciding: FrameType | None = None
    trainer = False
    custom: CustomCall | None = None
    looking = CALL_OF_FUNCTION is not None
    while frame is not None and (deciding is None or looking):
        code = frame.f_code
        if looking and code is CALL_OF_MODULE:
            looking = False
        elif looking and code is CALL_OF_FUNCTION:
            function: type = frame.f_locals["cls"]
            if function.__module__ == _WRAPPER:
                return Caller(trainer=True)
            # A checkpoint runs a part of the model, which is recorded as such.
            if function.__module__ != "torch.utils.checkpoint":
                # Where it was applied is what the user asks for.
                custom, deciding = _custom_call(function, frame, custom), None
        elif (part := _part(frame)) is not _Part.BETWEEN:
            # Behind a trainer's frame there is no function of a model that is still going on.
            looking &= part is _Part.MODEL
            if deciding is None:
                deciding, trainer = frame, part is _Part.TRAINER
        frame = frame.f_back
    source = f"{_short_path(deciding.f_code.co_filename)}:{deciding.f_lineno}" if deciding and not trainer else ""
    return Caller(trainer, source, custom)


def _custom_call(function: type, frame: FrameType, inside: CustomCall | None) -> CustomCall:
    given = frame.f_locals
    depth = 1 if inside is None else inside.depth + 1
    # The next call may lie at the same place in memory, and nothing may keep a frame, which would keep its tensors. So
    # a mark is left on it: one that only debuggers ask for, of a frame that is torch's.
    new, frame.f_trace_lines = frame.f_trace_lines, False
    return CustomCall(function, id(frame), (given.get("args"), given.get("kwargs")), depth, new)


def _part(frame: FrameType) -> _Part:
    code = frame.f_code
    # By the id of the code, which is kept alive beside it: its hash would go through all of its constants.
    known = _parts.get(id(code))
    if known is None:
        known = _parts[id(code)] = (code, _part_of(str(frame.f_globals.get("__name__", "")), code.co_name))
    return known[1]


_parts: dict[int, tuple[CodeType, _Part]] = {}


def _part_of(module: str, function: str) -> _Part:
    if module.startswith(_TRAINERS):
        # torch's averaged copy of a model, among its optimisers, has a forward.
        is_model = _MODELS_AMONG_THEM in module or (module == "torch.optim.swa_utils" and function == "forward")
        return _Part.MODEL if is_model else _Part.TRAINER
    # A function mode of the user's stands between a function and who called it.
    return _Part.BETWEEN if module.partition(".")[0] in _BETWEEN or function == "__torch_function__" else _Part.MODEL


@lru_cache
def _short_path(path: str) -> str:
    """The path of a file without what differs from machine to machine."""
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = path.replace("\\", "/").rpartition(f"/{folder}/")
        if found:
            return inside
    try:
        relative = os.path.relpath(path)
    except ValueError:  # on another drive of Windows
        return path
    return path if relative.startswith("..") else relative.replace("\\", "/")
