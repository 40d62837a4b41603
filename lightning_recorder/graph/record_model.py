"""Recording of a model outside of its training, from shapes or data, without side effects."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_recorder.errors import ArgumentError, ForwardError, InputError
from lightning_recorder.graph.capture.graph_capture import capture_call
from lightning_recorder.graph.model import Graph
from lightning_recorder.inputs import arguments, checked_device, make_inputs, way_out
from lightning_recorder.internals.autograd import fake_mode
from lightning_recorder.internals.module_tree import (
    buffers_of,
    modules_of,
    named_buffers_of,
    named_parameters_of,
    parameters_of,
)
from lightning_recorder.internals.preserve_state import ModuleState, own_copies, same_gradients, same_random_numbers
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import iter_tensors

__all__ = ["check_model", "record"]


def record(
    net: nn.Module,
    name: str = "",
    input_shapes: Any = None,
    input_data: Any = None,
    *,
    input_kwargs: Mapping[str, Any] | None = None,
    dtypes: Any = None,
    device: torch.device | str | None = None,
    mode: Literal["train", "eval"] | None = None,
    costs: bool = False,
) -> Graph:
    """Run a model once and return the complete graph of the run.

    The run has no side effects, even if the model raises: train flags, buffers such as those of batch norm, attributes,
    random number generators, devices, ``requires_grad`` and gradients of parameters and inputs are restored. During the
    run the parameters have no gradients.

    Args:
        net: The model.
        name: The name of the graph in a picture; by default the class of the model.
        input_shapes: The shape of the input, or a list of shapes. The inputs are filled with random numbers. Inputs
            with an integer or boolean dtype are filled with zeros.
        input_data: The arguments of the model, instead of shapes: a tensor, a tuple or list of positional arguments, or
            a dictionary of keyword arguments, with tensors in any nesting.
        input_kwargs: Further keyword arguments.
        dtypes: The dtype of the inputs made from ``input_shapes``, or a list with one dtype for each input. The default
            is the dtype of the model's parameters.
        device: ``"meta"`` computes only shapes, which needs no memory or time for values, for example for a model that
            is too large to run. The model stays on its own device. Any other value must be the device of the model, and
            the inputs are copied to this device. By default the inputs stay where they are.
        mode: Run in ``"train"`` or ``"eval"`` mode; by default each module keeps its mode.
        costs: Also measure wall time, floating-point operations and the bytes that autograd keeps; see
            :class:`GraphCapture`.

    Raises:
        InputError: If both or neither of ``input_shapes`` and ``input_data`` are given, or if the model is on another
            device. The error is a ``RuntimeError``, a ``ValueError`` and, for inputs of a wrong type, a ``TypeError``.
        ArgumentError: If another argument is invalid.
        ForwardError: If the model raises. The error names the module that raised and holds the graph recorded so far.

    Note:
        The run initializes lazy modules, which stay initialized. These changes by the model are not undone: to the
        values of its own parameters, to NumPy arrays, and to objects of classes other than those of torch and Python's
        containers.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> graph = record(net, "small", (2, 4))
        >>> [(node.name, str(node.outputs[0])) for node in graph.module_calls()]
        [('0', '2×8'), ('1', '2×8')]
    """
    check_model(net)
    if mode not in (None, "train", "eval"):
        raise InputError(f"mode must be 'train', 'eval' or None to keep the mode of each module, got {mode!r}")
    fake = fake_mode() if str(device) == "meta" else None
    place = None if fake else checked_device(net, device)
    # Under the fake mode, inputs made from shapes take no memory.
    with fake or nullcontext():
        args, kwargs = _arguments(net, input_shapes, input_data, input_kwargs, dtypes, place)
    tensors = (*parameters_of(net), *buffers_of(net), *(tensor for _, tensor in iter_tensors((args, kwargs))))
    state = ModuleState(modules_of(net))
    with same_random_numbers({tensor.device for tensor in tensors}), same_gradients(state.parameters.values()):
        try:
            for module in modules_of(net) if mode else ():
                module.training = mode == "train"
            graph = _fake_graph(net, args, kwargs, fake, costs) if fake else _real_graph(net, args, kwargs, costs)
        except ForwardError as error:
            message = way_out(net, error, args, kwargs, in_eval="record with mode='eval'")
            raise ForwardError(message, error.graph) from error.__cause__
        finally:
            state.restore()
    if name:
        graph = replace(graph, name=name)
    return graph


def check_model(net: object) -> None:
    """Raise an error for a model that cannot be recorded."""
    if isinstance(net, (str, Path)):
        raise ArgumentError(
            f"the model must be an nn.Module or a graph, got a path: write Graph.from_json({str(net)!r}) to read it"
        )
    if not isinstance(net, nn.Module):
        called = f"the class {net.__name__}: create an instance first" if isinstance(net, type) else repr(net)
        raise ArgumentError(f"the model must be an nn.Module, got {called}")


def _arguments(
    net: nn.Module, shapes: Any, data: Any, more: Mapping[str, Any] | None, dtypes: Any, device: torch.device | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (shapes is None) == (data is None) and (shapes is not None or more is None):
        given = "both" if shapes is not None else "neither"
        raise InputError(f"give either input_shapes or input_data, got {given}")
    if dtypes is not None and shapes is None:
        raise ArgumentError("dtypes gives the dtypes of input_shapes, and needs input_shapes")
    if shapes is None:
        return arguments(() if data is None else data, more, device)
    return arguments(make_inputs(net, shapes, dtypes, device, name="input_shapes"), more, device)


def _real_graph(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], costs: bool) -> Graph:
    copies = own_copies({**dict(enumerate(args)), **kwargs})
    given = tuple(copies[index] for index in range(len(args)))
    return capture_call(net, given, {key: copies[key] for key in kwargs}, costs=costs)


def _fake_graph(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fake: Any, costs: bool) -> Graph:
    """Return the graph of a call in which all parameters, buffers and inputs have shapes but no values."""
    lazy = [name for name, each in (*named_parameters_of(net), *named_buffers_of(net)) if is_uninitialized(each)]
    if lazy:
        raise ArgumentError(
            f"device='meta' needs the shape of {lazy[0]!r}, which is known after the first run of the model"
        )
    stand = _Stand(net, costs)
    own = {name: fake.from_tensor(tensor) for name, tensor in (*named_parameters_of(stand), *named_buffers_of(stand))}
    copies = own_copies({**dict(enumerate(args)), **kwargs}, fake.from_tensor)
    try:
        with fake:
            graph: Graph = torch.func.functional_call(
                stand, own, tuple(copies[index] for index in range(len(args))), {key: copies[key] for key in kwargs}
            )
    except ForwardError as error:
        if type(error.__cause__).__name__ in _NO_VALUES:
            hint = "the model reads the values of a tensor, but device='meta' has no values: record without it"
            raise ForwardError(f"{error}; {hint}", error.graph) from error.__cause__
        raise
    return graph


# The errors that torch raises if a number of elements, a branch or an index depends on values.
_NO_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")


class _Stand(nn.Module):
    """A module that captures the graph of the model while ``functional_call`` has replaced the model's tensors."""

    def __init__(self, net: nn.Module, costs: bool) -> None:
        super().__init__()
        self.net = net
        self.costs = costs

    def forward(self, *args: Any, **kwargs: Any) -> Graph:
        return capture_call(self.net, args, kwargs, costs=self.costs)
