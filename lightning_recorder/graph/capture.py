"""Recording the execution graph of what a model really does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.autograd import current_function_mode, in_backward, remove_hook, version_of
from lightning_recorder.errors import tell
from lightning_recorder.graph.caller import called_by_trainer
from lightning_recorder.graph.model import Edge, Graph, Kind, Node, TensorMeta
from lightning_recorder.graph.provenance import Provenance, is_lazy
from lightning_recorder.hooks import ModuleHook
from lightning_recorder.names import named_submodules
from lightning_recorder.structure import iter_tensors
from lightning_recorder.unrecorded import is_unrecorded, unrecorded

__all__ = ["GraphCapture", "capture_graph"]

# In eval mode these compute everything in one fused function, unless a function mode is on: then they take another way,
# whose last bits, and rows of padding, differ. So the mode is taken off while one of them runs.
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_BACKWARD = (Tensor.backward, torch.autograd.backward)
_GRADIENT = cast(Any, Tensor.grad).__get__

Result = TypeVar("Result")

_IGNORED = -1
"""In place of a node's id: a tensor that is followed no further, such as a gradient on its way to the optimiser."""


@dataclass
class _Call:
    """A module call that is going on."""

    node: int
    module: nn.Module | None


class GraphCapture:
    """Records the module calls and torch functions of this thread while it is entered.

    Module calls are seen by module hooks, functions by a ``TorchFunctionMode``; neither changes a value, a gradient or
    a random number, and no tensor is kept alive. Inside a backward pass nothing is recorded; its start is a node.

    What a function of torch's own does inside is not taken apart: ``cross_entropy`` is one node.

    Args:
        module: The model. Its submodules' calls become nodes; it is itself the root.
        inputs: What is fed to the model: tensors in any nesting, each an input node named by its path.
        name: The path under which the paths of the inputs grow.
        scope: Which method of the model is recorded.

    Note:
        Leaving the context takes every hook off. An error in the recording ends it with one warning, and the graph has
        what was seen before.
    """

    def __init__(self, module: nn.Module, inputs: Any = None, *, name: str = "input", scope: str = "forward") -> None:
        self._scope = scope
        self.module = module
        self._nodes: list[Node] = []
        self._edges: dict[tuple[int, int], Edge] = {}
        self._calls: list[_Call] = []
        self._counts: dict[str, int] = {}
        self._provenance = Provenance()
        self._handles: list[RemovableHandle] = []
        self._mode: _CaptureMode | None = None
        self._thread = 0
        self._active = False
        self._paused_in: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._model_tensors: dict[int, tuple[Kind, str, nn.Module]] = {}
        root = self._add(
            "module", "", type_name=type(module).__name__, parameters=_parameters(module.parameters(recurse=False))
        )
        self._calls.append(_Call(root, module))
        with unrecorded():
            given: list[Tensor] = []
            for path, tensor in iter_tensors(inputs, name):
                # A tensor that is given twice, as tokens that are their own labels, is one input.
                if not _is_among(tensor, given):
                    given.append(tensor)
                    self._provenance.bind(tensor, self._add("input", path, outputs=(_meta(tensor),)))

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for name, each in named_submodules(self.module).items():
            self._names[id(each)] = name
            for kind, tensors in (
                ("parameter", each.named_parameters(name, False)),
                ("buffer", each.named_buffers(name, False)),
            ):
                for path, tensor in tensors:
                    self._model_tensors.setdefault(id(tensor), (kind, path, each))  # type: ignore[arg-type]  # a Kind
        self._handles = self._put_on_hooks()
        self._mode = _CaptureMode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self._active = True
        return self

    def _put_on_hooks(self) -> list[RemovableHandle]:
        """Hooks on all modules of the process, of which this thread's calls of this model are taken.

        They are on no module itself: it may be copied, pickled or scripted meanwhile, TorchScript modules are seen too,
        and fused modules, which look for hooks on themselves, stay on their path. torch warns of such hooks where a
        compiled module is called, so a model that has one gets a hook on each of its modules instead.
        """
        if not any(type(each).__name__ == "OptimizedModule" for each in self.module.modules()):
            return [
                register_module_forward_pre_hook(self._before_call),
                register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True),
            ]
        handles = []
        for name, each in named_submodules(self.module).items():
            if name and not isinstance(each, torch.jit.ScriptModule):
                handles.append(each.register_forward_pre_hook(_CaptureHook(self._before_call)))
                after = _CaptureHook(self._after_call)
                handles.append(each.register_forward_hook(after, with_kwargs=True, always_call=True))
        return handles

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._resume()
        while self._handles:
            remove_hook(self._handles.pop())
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def stop(self) -> None:
        """See nothing any more, though the hooks stay on until the context is left."""
        self._active = False
        self._provenance.clear()
        self._model_tensors.clear()
        self._names.clear()

    def graph(self) -> Graph:
        """What was recorded so far."""
        return Graph(
            tuple(self._nodes), tuple(self._edges.values()), self._scope, _parameters(self.module.parameters())
        )

    # What the mode and the hooks call.

    def _watching(self) -> bool:
        return (
            self._active
            and threading.get_ident() == self._thread
            and not is_unrecorded()
            and not in_backward()
            # torch.jit.trace runs the model to record it itself, with tensors for shapes.
            and not torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # public, though not declared so
        )

    def _guarded(self, function: Callable[..., Result], *args: Any) -> Result | None:
        try:
            with unrecorded():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - whatever fails in the recording must not fail in the model
            self.stop()
            tell(f"the graph could not be recorded to its end: {type(error).__name__}: {error}")
            return None

    def _is_part(self, module: nn.Module) -> bool:
        # The root's own call is left alone: under DDP it wraps the training step, on one device it lies inside it.
        # What a fused module does inside is one function.
        inside = self._paused_in is not None and self._paused_in is not module
        return not inside and bool(self._names.get(id(module))) and self._watching()

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if self._is_part(module):
            self._guarded(self._enter_call, self._names[id(module)], module)
        if _is_fused(module) and self._watching():
            self._pause(module)

    def _after_call(self, module: nn.Module, *inputs_and_output: Any) -> None:
        # After a forward that raised, torch leaves the keyword arguments out.
        *inputs, output = inputs_and_output
        if _is_fused(module) and self._watching() and module is self._paused_in:
            self._resume()
        if self._is_part(module):
            self._guarded(self._leave_call, module, inputs, output)

    def _enter_call(self, name: str, module: nn.Module) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        node = self._add(
            "module",
            name,
            type_name=type(module).__name__,
            call=self._counts[name],
            parameters=_parameters(module.parameters(recurse=False)),
        )
        self._calls.append(_Call(node, module))

    def _pause(self, module: nn.Module) -> None:
        """Take the function mode off for a module's call, if no other mode lies above it."""
        if self._mode is not None and current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there
            self._paused_in = module

    def _resume(self) -> None:
        """Put the function mode on again after :meth:`_pause`."""
        if self._paused_in is not None and self._mode is not None:
            self._paused_in = None
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there

    def _leave_call(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # A call whose own hook never came, because a hook of the user raised before it, is left together with the one
        # around it.
        while len(self._calls) > 1:
            call = self._calls.pop()
            if call.module is module:
                break
        else:
            return
        given = [tensor for _, tensor in iter_tensors(output)]
        # A lazy module has become another class, with parameters, since it was entered.
        self._nodes[call.node] = replace(
            self._nodes[call.node],
            type_name=type(module).__name__,
            parameters=_parameters(module.parameters(recurse=False)),
            outputs=tuple(map(_meta, given)),
        )
        taken = [tensor for _, tensor in iter_tensors(inputs)]
        empty = call.node == len(self._nodes) - 1
        passed = [tensor for tensor in given if _is_among(tensor, taken)]
        unseen = [tensor for tensor in given if not _is_among(tensor, taken) and self._known(tensor) is None]
        self._calls.append(call)
        if unseen:
            # Computed where nobody looks: in a fused function, in TorchScript, outside of torch.
            self._note("unseen", taken, unseen, ())
        elif empty and passed:
            self._note("identity", passed, passed, ())
        self._calls.pop()

    def _note(self, name: str, inputs: list[Tensor], outputs: list[Tensor], written: tuple[Tensor, ...]) -> None:
        """A node for one operation with the edges into it, and its outputs bound to it."""
        origins = [(self._origin(tensor), tensor) for tensor in inputs]
        if called_by_trainer() or (origins and all(origin == _IGNORED for origin, _ in origins)):
            passed = origins[0][0] if origins else _IGNORED
            for tensor in outputs:
                self._provenance.bind(tensor, passed)
            return
        node = self._add("op", name, outputs=tuple(map(_meta, outputs)))
        for origin, tensor in origins:
            self._connect(origin, node, tensor)
        for tensor in outputs:
            self._provenance.bind(tensor, node)
        for tensor in written:
            self._provenance.bind(tensor, node, wrote=True)

    def _note_function(self, func: Any, before: list[tuple[Tensor, int | None]], result: Any, inplace: bool) -> None:
        if func == _GRADIENT:
            if result is not None:
                self._provenance.bind(result, _IGNORED)
            return
        inputs = [tensor for tensor, _ in before]
        outputs = [tensor for _, tensor in iter_tensors(result)]
        written = tuple(tensor for tensor, version in before if version_of(tensor) != version)
        if not written and inputs and _is_inference(inputs[0]) and (inplace or _writes(func)):
            # Tensors of inference mode do not count how often they are written to.
            written = (inputs[0],)
        # What gives no new tensor and writes into none is no part of the computation: asking for a shape, or
        # ``contiguous`` and ``to`` of what is so already, which give back the tensor that they took.
        outputs = [tensor for tensor in outputs if _is_among(tensor, written) or not _is_among(tensor, inputs)]
        if outputs or written:
            self._note(_function_name(func), inputs, outputs, written)

    def _note_backward(self, losses: Any) -> None:
        node = self._add("backward", "backward", parent=0)
        for _, loss in iter_tensors(losses):
            self._connect(self._origin(loss), node, loss)

    # The graph as it grows.

    def _add(self, kind: Kind, name: str, *, parent: int | None = None, **about: Any) -> int:
        if parent is None and self._calls:
            parent = self._calls[-1].node
        depth = 0 if parent is None else self._nodes[parent].depth + 1
        self._nodes.append(Node(len(self._nodes), kind, name, parent, depth, **about))
        return len(self._nodes) - 1

    def _connect(self, source: int, target: int, tensor: Tensor) -> None:
        if source == _IGNORED:
            return
        old = self._edges.get((source, target))
        self._edges[source, target] = (
            replace(old, multiplicity=old.multiplicity + 1) if old else Edge(source, target, 1, _meta(tensor))
        )

    def _origin(self, tensor: Tensor) -> int:
        """The node that gave the tensor its present values."""
        known = self._known(tensor)
        return self._add_from_outside(tensor) if known is None else known

    def _known(self, tensor: Tensor) -> int | None:
        """The node that gave the tensor its present values, as far as was seen."""
        if is_lazy(tensor):
            # It has neither a shape nor values yet; what is done to it is its making.
            return _IGNORED
        return self._provenance.of(tensor, own=id(tensor) in self._model_tensors)

    def _add_from_outside(self, tensor: Tensor) -> int:
        kind, name, owner = self._model_tensors.get(id(tensor), ("tensor", "", None))
        parent = next((call.node for call in reversed(self._calls) if call.module is owner), self._calls[-1].node)
        node = self._add(kind, name, parent=parent, outputs=(_meta(tensor),))  # type: ignore[arg-type]  # a Kind
        self._provenance.bind(tensor, node)
        return node


class _CaptureMode(TorchFunctionMode):
    """Shows the capture every function of torch that is called from outside of torch."""

    def __init__(self, owner: GraphCapture) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = self._owner
        if not owner._watching():
            return func(*args, **kwargs)
        # Inside this function no mode is on, so nothing that func does itself is seen: neither the parts of a composite
        # nor a backward pass.
        if func in _BACKWARD:
            owner._guarded(owner._note_backward, args[:1] or kwargs.get("tensors"))
            return func(*args, **kwargs)
        before = owner._guarded(_versions, args, kwargs)
        result = func(*args, **kwargs)
        if before is not None:
            owner._guarded(owner._note_function, func, before, result, bool(kwargs.get("inplace")))
        return result


class _CaptureHook(ModuleHook):
    """A hook of a capture on one module."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)


def capture_graph(module: nn.Module, /, *args: Any, **kwargs: Any) -> Graph:
    """Call a module once and give the graph of the call.

    The module runs as it is, in its train or eval mode, under the caller's grad mode and autocast. An error that it
    raises passes through.

    Args:
        module: The model.
        args: Its arguments; a single tensor becomes the input node ``input``, several ``input[0]``, ``input[1]``, ….
        kwargs: Its keyword arguments; a tensor becomes the input node ``input.<keyword>``.

    Example:
        >>> graph = capture_graph(nn.Linear(2, 3), torch.ones(1, 2))
        >>> [node.name for node in graph.nodes]
        ['', 'input', 'weight', 'bias', 'linear']
    """
    single = len(args) == 1 and not kwargs
    inputs: Any = args[0] if single else dict[Any, Any]([*enumerate(args), *kwargs.items()])
    with GraphCapture(module, inputs) as recording:
        module(*args, **kwargs)
    return recording.graph()


def _parameters(parameters: Iterable[Tensor]) -> int:
    """The number of elements, without parameters that have no shape yet."""
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


def _is_fused(module: nn.Module) -> bool:
    return isinstance(module, _FUSED) and not module.training


def _is_among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _meta(tensor: Tensor) -> TensorMeta:
    try:
        shape = () if is_lazy(tensor) else tuple(int(size) for size in tensor.shape)
    except (RuntimeError, TypeError):
        # Of a nested tensor some sizes are no numbers.
        shape = ()
    return TensorMeta(shape, str(tensor.dtype).removeprefix("torch."))


def _writes(func: Any) -> bool:
    """Whether a function is by its name one that writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


def _versions(args: Any, kwargs: Any) -> list[tuple[Tensor, int | None]]:
    """The tensors that a function takes, with the number of times that each was written to."""
    return [(tensor, version_of(tensor)) for _, tensor in iter_tensors((args, kwargs))]


def _is_inference(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.is_inference()


def _function_name(func: Any) -> str:
    """The function's name as people say it: ``add`` for ``Tensor.__add__``, ``T`` for the getter of ``Tensor.T``."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    name = name.strip("_")
    # relu_ and relu are one operation; whether it reuses memory is no part of what is computed.
    return {
        "radd": "add",
        "rmul": "mul",
        "rsub": "sub",
        "rdiv": "div",
        "truediv": "div",
        "iadd": "add",
        "imul": "mul",
        "isub": "sub",
    }.get(name, name)
