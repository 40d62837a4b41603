"""A call of a torch function: its name, its input tensors, and its caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_recorder.internals.autograd import CALL_OF_FUNCTION, CALL_OF_MODULE
from lightning_recorder.notebook import cell_or_path
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = [
    "PLAIN",
    "Caller",
    "CustomCall",
    "find_caller",
    "function_name",
    "installed_packages",
    "tensors_in",
    "writes",
]

# Types that cannot hold tensors. They are checked first, because every argument of every function is checked.
_OF_PYTHON = (type(None), type(...), bool, int, float, str, complex, slice, range)
PLAIN = frozenset((*_OF_PYTHON, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format))
_SEQUENCES = (tuple, list)

# Further names of the same operation. relu_ and relu also get the same name, since they compute the same values.
_SAME = {
    "radd": "add",
    "rmul": "mul",
    "truediv": "div",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
}

# A trainer's own arithmetic on the loss (dividing it by the number of micro-batches, scaling it, logging it) is not
# part of the model. Neither is the arithmetic of an optimizer.
_TRAINERS = (
    "lightning.",
    "lightning_fabric.",
    "lightning_utilities.",
    "pytorch_lightning.",
    "torch.optim.",
    "torch.amp.grad_scaler",
)
_MODELS_AMONG_THEM = ".demos."  # the models that Lightning ships
# Lightning's functions that run callbacks and loggers: code of users that is not part of the model.
_RUNS_CALLBACKS = "_call_callback_hooks"
_RUNS_LOGGERS = ".logger_connector"
# DistributedDataParallel inserts an autograd.Function of its own between the model and its output.
_WRAPPER = "torch.nn.parallel.distributed"
# Packages that are skipped in the search for the caller. So the functions of a metric are attributed to the code that
# calls the metric: the model, or the trainer that logs.
_BETWEEN = ("torch", "torchmetrics", "lightning_recorder", "contextlib", "functools")


@lru_cache(4096)
def function_name(func: Any) -> str:
    """Return the common name of a function: ``add`` for ``Tensor.__add__``, ``T`` for the getter of ``Tensor.T``."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    name = name.strip("_")
    return _SAME.get(name, name)


def writes(func: Any) -> bool:
    """Return True if, by its name, a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in the values, at any depth of nesting, in order."""
    found: list[Tensor] = []
    for each in values:
        kind: type = type(each)
        if kind is Tensor or kind is Parameter:
            found.append(each)
        elif kind not in PLAIN and not (kind in _SEQUENCES and all(type(part) in PLAIN for part in each)):
            found.extend(tensor for _, tensor in iter_tensors(each, unknown=ignore_unknown))
    return found


class _Part(Enum):
    """The owner of the code that a frame runs."""

    BETWEEN = 0
    MODEL = 1
    TRAINER = 2
    FOREIGN = 3
    MODULE_CALL = 4
    CUSTOM_CALL = 5


# Globals are faster than attributes of the enumeration: each frame is compared with several of them.
_BETWEEN_PART, _MODEL_PART = _Part.BETWEEN, _Part.MODEL
_FOREIGN_PART, _MODULE_CALL, _CUSTOM_CALL = _Part.FOREIGN, _Part.MODULE_CALL, _Part.CUSTOM_CALL


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom ``autograd.Function`` that is in progress."""

    function: type  # the subclass of ``autograd.Function``
    frame: int  # the id of the call's frame, which distinguishes calls that are in progress at the same time
    arguments: Any  # the positional and keyword arguments of the call
    depth: int = 1  # the number of nested calls in progress, including this one
    new: bool = True  # True if this is the first function recorded inside the call


@dataclass(frozen=True)
class Caller:
    """The caller of a torch function."""

    trainer: bool = False  # True if the trainer or an optimizer made the call, False if the model did
    source: str = ""  # the line of the model's code, such as ``models/net.py:42``; empty if there is none
    custom: CustomCall | None = None  # the enclosing call of an ``autograd.Function``


_OF_TRAINER = Caller(trainer=True)


def find_caller(*, outermost: bool = False, skip: int = 0) -> Caller:
    """Find the caller of the function that is being recorded.

    The innermost frame outside of torch and this package is the caller. The search for an enclosing
    ``autograd.Function`` ends at a module call, because the functions in a module belong to the module. If several
    ``autograd.Function`` calls are nested, the outermost one is returned.

    Args:
        outermost: Also search the frames around the caller for the trainer. Callbacks and loggers that the trainer
            runs then count as the trainer.
        skip: The number of calling frames to skip. They must belong to this package.
    """
    frame: FrameType | None = sys._getframe(1 + skip)
    deciding: FrameType | None = None
    custom: CustomCall | None = None
    looking = CALL_OF_FUNCTION is not None
    while frame is not None:
        try:
            part = _parts[id(frame.f_code)]
        except KeyError:
            part = _part(frame)
        if part is _BETWEEN_PART:
            frame = frame.f_back
            continue
        if part is _MODEL_PART:
            if deciding is None:
                deciding = frame
        elif part is _MODULE_CALL:
            looking = False
        elif part is _CUSTOM_CALL:
            function: type | None = frame.f_locals["cls"] if looking else None
            if function is not None and function.__module__ == _WRAPPER:
                return _OF_TRAINER
            # A checkpoint runs a part of the model, which is recorded as usual.
            if function is not None and function.__module__ != "torch.utils.checkpoint":
                # The source line of a custom function is the line that applies it.
                custom, deciding = _custom_call(function, frame, custom), None
        else:
            if deciding is None or (outermost and part is _FOREIGN_PART):
                return _OF_TRAINER if custom is None else Caller(True, "", custom)
            # The frames around a trainer's frame cannot belong to the model.
            break
        if deciding is not None and not looking and not outermost:
            break
        frame = frame.f_back
    known = Caller() if deciding is None else _callers.get((id(deciding.f_code), deciding.f_lasti)) or _new(deciding)
    return known if custom is None else Caller(False, known.source, custom)


# Keyed by the id of the code and the offset in it: computing a line number takes longer than the rest of the search.
_callers: dict[tuple[int, int], Caller] = {}


def _new(frame: FrameType) -> Caller:
    code = frame.f_code
    found = _callers[id(code), frame.f_lasti] = Caller(source=f"{_short_path(code.co_filename)}:{frame.f_lineno}")
    return found


def _custom_call(function: type, frame: FrameType, inside: CustomCall | None) -> CustomCall:
    given = frame.f_locals
    depth = 1 if inside is None else inside.depth + 1
    # The id of a frame does not identify a call, because the next call may reuse the address. A reference to the frame
    # would keep its tensors alive. So the frame, which is one of torch's, is marked by an attribute that only debuggers
    # read.
    new, frame.f_trace_lines = frame.f_trace_lines, False
    return CustomCall(function, id(frame), (given.get("args"), given.get("kwargs")), depth, new)


# Keyed by the id of the code object, because hashing a code object visits all of its constants. ``_codes`` keeps the
# code objects alive, so that no id is reused.
_parts: dict[int, _Part] = {}
_codes: list[CodeType] = []


def _part(frame: FrameType) -> _Part:
    code = frame.f_code
    if code is CALL_OF_MODULE or code is CALL_OF_FUNCTION:
        found = _MODULE_CALL if code is CALL_OF_MODULE else _CUSTOM_CALL
    else:
        found = _part_of(str(frame.f_globals.get("__name__", "")), code.co_name)
    _codes.append(code)
    _parts[id(code)] = found
    return found


def _part_of(module: str, function: str) -> _Part:
    if module.startswith(_TRAINERS):
        # torch.optim also contains AveragedModel, which has a forward.
        if _MODELS_AMONG_THEM in module or (module == "torch.optim.swa_utils" and function == "forward"):
            return _Part.MODEL
        foreign = function == _RUNS_CALLBACKS or _RUNS_LOGGERS in module
        return _Part.FOREIGN if foreign else _Part.TRAINER
    # The frame of another function mode lies between a function and its caller.
    return _Part.BETWEEN if module.partition(".")[0] in _BETWEEN or function == "__torch_function__" else _Part.MODEL


@lru_cache
def _short_path(path: str) -> str:
    """Return the path of a file without the folders that differ between machines."""
    if inside := _inside_of_packages(path):
        return inside
    if (cell := cell_or_path(path)) != path:
        return cell
    try:
        relative = os.path.relpath(path)
    except ValueError:  # on another drive of Windows
        return path
    return path if relative.startswith("..") else relative.replace("\\", "/")


def _inside_of_packages(path: str) -> str:
    """Return the path of a file in a folder of installed packages; an empty string if it is in no such folder."""
    path = path.replace("\\", "/")
    for name in ("site-packages", "dist-packages"):
        _, found, inside = path.rpartition(f"/{name}/")
        if found:
            return inside
    # pip install --target writes into any folder.
    folders = (f"{each.replace(chr(92), '/').rstrip('/')}/" for each in sys.path if each)
    return next((path[len(each) :] for each in folders if path.startswith(each) and _has_packages(each)), "")


@lru_cache
def _has_packages(folder: str) -> bool:
    """Return True for a folder into which pip has installed a package."""
    try:
        return any(Path(folder).glob("*.dist-info"))
    except OSError:
        return False


def installed_packages(sources: Iterable[str]) -> tuple[str, ...]:
    """Return the first folders of those code lines of a graph that are in installed packages, such as ``timm``."""
    first = {each.partition("/")[0].partition(":")[0] for each in sources}
    files = {each: getattr(sys.modules.get(each.removesuffix(".py")), "__file__", None) for each in first if each}
    return tuple(sorted(each for each, file in files.items() if file and _inside_of_packages(file)))
