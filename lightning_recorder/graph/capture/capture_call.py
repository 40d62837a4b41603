"""Recording the execution graph of a single call of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_recorder.errors import ForwardError, describe_error
from lightning_recorder.graph.capture.graph_capture import GraphCapture
from lightning_recorder.graph.model import Graph

__all__ = ["capture_call", "capture_graph"]


def capture_graph(module: nn.Module, /, *args: Any, **kwargs: Any) -> Graph:
    """Call a module once and return the graph of the call.

    The module keeps its train or eval mode and runs under the caller's grad mode and autocast.

    Args:
        module: The model.
        args: Its positional arguments. A single tensor becomes the input node ``input``, several become ``input[0]``,
            ``input[1]``, ….
        kwargs: Its keyword arguments. A tensor becomes the input node ``input.<keyword>``.

    Raises:
        ForwardError: If the model raises. It names the module that raised and holds the graph recorded until then.

    Example:
        >>> import torch
        >>> graph = capture_graph(nn.Linear(2, 3), torch.ones(1, 2))
        >>> [node.name for node in graph.nodes]
        ['', 'input', 'weight', 'bias', 'linear', 'output']
    """
    return capture_call(module, args, kwargs)


def capture_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, costs: bool = False) -> Graph:
    """Call a module once and return the graph of the call; see :func:`capture_graph` and :class:`GraphCapture`."""
    single = len(args) == 1 and not kwargs
    inputs: Any = args[0] if single else dict[Any, Any]([*enumerate(args), *kwargs.items()])
    recording = GraphCapture(module, inputs, costs=costs)
    try:
        with recording:
            recording.add_outputs(module(*args, **kwargs))
    except Exception as error:
        graph = recording.graph()
        raise ForwardError(f"{_where_it_failed(graph)} raised {describe_error(error)}", graph) from error
    return recording.graph()


def _where_it_failed(graph: Graph) -> str:
    inner = [graph.root, *(node for node in graph.nodes if node.failed and node.kind == "module")][-1]
    return f"module {inner.name!r} ({inner.type_name})" if inner.name else f"the model itself ({inner.type_name})"
