"""The inputs for a single run of a model, either given or generated from shapes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError, InputError, InputTypeError
from lightning_recorder.internals.module_tree import buffers_of, parameters_of
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = [
    "arguments",
    "as_arguments",
    "checked_device",
    "make_inputs",
    "shapes_in",
    "way_out",
]

_TOO_FEW_VALUES = "Expected more than 1 value per channel when training"  # the error of batch norm for one sample


def checked_device(net: nn.Module, device: torch.device | str | None) -> torch.device | None:
    """Return the requested device for inputs after checking that the net is on it. None leaves inputs where they are.

    Raises:
        InputError: If the net is on another device.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputTypeError(f"device takes a device such as 'cpu' or 'cuda:0', got {device!r}") from error
    there = {tensor.device for tensor in (*parameters_of(net), *buffers_of(net))}
    if there and all(each.type != wanted.type or wanted.index not in (None, each.index) for each in there):
        found = " and ".join(sorted(map(str, there)))
        raise InputError(
            f"the model is on {found}, and is not moved: call model.to({str(wanted)!r}) first, or leave out "
            f"device={str(wanted)!r}"
        )
    return wanted


def arguments(
    data: Any, kwargs: Mapping[str, Any] | None, device: torch.device | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a run. Tensors are copied, and moved if a device is given.

    Raises:
        InputTypeError: If an argument has an unsupported type.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputTypeError(f"input_kwargs takes a dictionary of keyword arguments, got {type(kwargs).__name__}")
    if device is not None:
        moved = own_copies({"data": data, "kwargs": dict(kwargs or {})}, lambda tensor: tensor.to(device, copy=True))
        data, kwargs = moved["data"], moved["kwargs"]
    more = dict(kwargs or {})
    if isinstance(data, Mapping):
        return (), {**data, **more}
    if isinstance(data, Tensor):
        return (data,), more
    if isinstance(data, (tuple, list)):
        return tuple(data), more
    raise InputTypeError(
        "input_data takes a tensor, a tuple or list of positional arguments, or a dictionary of keyword arguments, got "
        + type(data).__name__
    )


def as_arguments(net: nn.Module, data: Any) -> Any:
    """Wrap a tuple, list or dictionary in a list if the net takes the whole container as its only argument."""
    return [data] if isinstance(data, (tuple, list, Mapping)) and _takes_one(net, *arguments(data, None)) else data


def way_out(net: nn.Module, error: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, in_eval: str) -> str:
    """Return a message about an error of a call, and how to avoid the error if that is known."""
    if _TOO_FEW_VALUES in str(error):
        return f"{error}; {in_eval}, or give a batch of two samples"
    if _takes_one(net, args, kwargs):
        return f"{error}; if the whole batch is the only argument, write input_data=[batch]"
    return str(error)


def _takes_one(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a net accepts one argument, but not the given arguments."""
    try:
        signature = inspect.signature(net.forward)
        signature.bind(object())
    except (TypeError, ValueError):  # the net does not accept exactly one argument, or has no signature
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return True
    return False


def make_inputs(
    net: nn.Module, input_size: Any, dtypes: Any, device: torch.device | None = None, *, name: str = "input_size"
) -> tuple[Tensor, ...]:
    """Return tensors of the given shapes: zeros for integers and booleans, otherwise random numbers.

    The tensors are on the given device, by default the device of the net.

    Raises:
        ArgumentError: If a shape or dtype is invalid. The message calls the shapes ``name``.
    """
    sizes = shapes_in(input_size, name)
    tensors = [*parameters_of(net), *buffers_of(net)]
    device = device or (tensors[0].device if tensors else torch.get_default_device())
    default = next((each.dtype for each in tensors if each.dtype.is_floating_point), torch.get_default_dtype())
    if isinstance(dtypes, (tuple, list)):
        each_dtype: list[Any] = list(dtypes)
    else:
        each_dtype = [default if dtypes is None else dtypes] * len(sizes)
    if len(each_dtype) != len(sizes) or not all(isinstance(each, torch.dtype) for each in each_dtype):
        raise ArgumentError(f"dtypes takes a torch.dtype, or one for each of the {len(sizes)} inputs, got {dtypes!r}")
    if device.type == "meta":
        return tuple(
            torch.empty(size, device=device, dtype=dtype) for size, dtype in zip(sizes, each_dtype, strict=True)
        )
    # A separate generator leaves the state of the default generators unchanged.
    generator = torch.Generator().manual_seed(0)
    return tuple(
        (
            torch.rand(size, generator=generator, device="cpu", dtype=torch.float32)
            if dtype.is_floating_point or dtype.is_complex
            else torch.zeros(size, device="cpu")
        ).to(device, dtype)
        for size, dtype in zip(sizes, each_dtype, strict=True)
    )


def shapes_in(input_size: Any, name: str) -> list[tuple[int, ...]]:
    """Return a list of shapes, given one shape or several shapes.

    Raises:
        ArgumentError: If the argument is invalid. The message calls it ``name``.
    """
    sequence = isinstance(input_size, (tuple, list))
    several = sequence and len(input_size) > 0 and all(isinstance(size, (tuple, list)) for size in input_size)
    sizes = list(input_size) if several else [input_size]
    for size in sizes:
        # An empty list is not a list of shapes; an empty tuple is the shape of a scalar.
        valid = isinstance(size, (tuple, list)) and size != []
        if any(True for _ in iter_tensors(input_size, unknown=ignore_unknown)):
            raise InputTypeError(f"{name} takes shapes, got tensors: write input_data=… for the inputs themselves")
        if not valid or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in size):
            raise (ArgumentError if valid else InputTypeError)(
                f"{name} takes a shape, as in (1, 3), or a list of shapes, none negative; got {input_size!r}"
            )
    return [tuple(size) for size in sizes]
