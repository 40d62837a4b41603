"""Slow reference for the tensors that each tap should see: one tap at a time, with gradients in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_recorder.selection import Selection
from lightning_recorder.taps import Receiver, Site
from tests.taps.models import Checkpointed, Model, Precision, make

Seen = list[tuple[Site, Tensor]]


def copies_into(seen: Seen) -> Receiver:
    """Return a receiver that appends copies to a list."""
    return lambda site, tensor: seen.append((site, tensor.clone()))


def assert_seen(seen: Seen, expected: Seen, precision: Precision) -> None:
    """Assert that each site has tensors of these dtypes with about these values, in this order."""
    # A sum with cancellation is as uncertain as its largest term.
    largest = max((tensor.abs().max().item() for _, tensor in expected), default=1.0)
    atol = precision.atol * max(1.0, largest)
    assert sorted(site for site, _ in seen) == sorted(site for site, _ in expected)
    for site in {site for site, _ in expected}:
        ours, theirs = ([tensor for each, tensor in stream if each == site] for stream in (seen, expected))
        torch.testing.assert_close(ours, theirs, rtol=precision.rtol, atol=atol)


def outputs(name: str, precision: Precision) -> Seen:
    """Return the outputs from the second way to compute the loss."""
    found: Seen = []

    def see(name: str, path: str, tensor: Tensor) -> Tensor:
        found.append((Site(name, path), tensor.detach().clone()))
        return tensor

    module, x = make(name, precision.dtype)
    torch.manual_seed(1)
    precision.reference(module, x, see)
    return found


def output_gradients(name: str, precision: Precision) -> Seen:
    """Return the gradients of these outputs, last call first, in the dtype of the outputs."""
    shown: Seen = []

    def see(name: str, path: str, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            shown.append((Site(name, path), tensor))
        return tensor

    module, x = make(name, precision.dtype)
    torch.manual_seed(1)
    return _gradients(precision.reference(module, x, see), shown)


def _gradients(loss: Tensor, shown: Seen) -> Seen:
    if not shown:
        return []
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, [tensor for _, tensor in shown], allow_unused=True)
    return [(site, grad) for (site, _), grad in zip(shown, grads, strict=True) if grad is not None][::-1]


def inputs(name: str, precision: Precision) -> Seen:
    """Return copies of all arguments, made before the calls."""
    found: Seen = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                replaced(args, "in", lambda path, tensor: found.append((Site(name, path), tensor.detach().clone())))
                replaced(kwargs, "in", lambda path, tensor: found.append((Site(name, path), tensor.detach().clone())))

        return hook

    module, x = make(name, precision.dtype)
    for each, submodule in Selection("**").resolve(module).items():
        submodule.register_forward_pre_hook(note(each), with_kwargs=True)
    torch.manual_seed(1)
    precision.forward(module, x)
    return [(site, tensor) for site, tensor in found if not torch._C._functorch.is_functorch_wrapped_tensor(tensor)]


def input_gradients(name: str, precision: Precision) -> Seen:
    """Return the gradients through each module alone, computed in float64, in the input dtype, last call first."""
    types: dict[Site, list[torch.dtype]] = {}
    for site, tensor in inputs(name, precision):
        types.setdefault(site, []).append(tensor.dtype)
    module, x = _in_float64(name, precision)
    probes: Seen = []
    for each, submodule in Selection("**").resolve(module).items():
        submodule.register_forward_pre_hook(Probe(each, probes), with_kwargs=True)
    torch.manual_seed(1)
    return [(site, grad.to(types[site].pop())) for site, grad in _gradients(module(x), list(probes))]


class Probe:
    """A hook that passes copies of its inputs to a module, so that their gradients come only through this module."""

    def __init__(self, name: str, probes: Seen) -> None:
        self.name = name
        self.probes = probes

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found: dict[int, Tensor] = {}

        def probe(path: str, tensor: Tensor) -> Tensor:
            usable = tensor.requires_grad and torch.is_grad_enabled()
            if not usable or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return tensor
            if id(tensor) not in found:
                copy = tensor.clone()
                self.probes.append((Site(self.name, path), copy))
                found[id(tensor)] = copy.clone()  # the module may change it in place
            return found[id(tensor)]

        return replaced(args, "in", probe), replaced(kwargs, "in", probe)


def parameters(name: str, precision: Precision) -> Seen:
    """Return the parameters by name of each module that was called outside transforms, in order of the call ends."""
    found: Seen = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            transformed = torch._C._functorch.peek_interpreter_stack() is not None
            if torch._C._current_graph_task_id() == -1 and not transformed:
                found.extend((site, tensor.detach().clone()) for site, tensor in _owned(name, module))

        return hook

    module, x = make(name, precision.dtype)
    for each, submodule in Selection("**").resolve(module).items():
        submodule.register_forward_hook(note(each))
    torch.manual_seed(1)
    precision.forward(module, x)
    return found


def parameter_gradients(name: str, precision: Precision) -> Seen:
    """Return the gradients of the parameters, computed in float64, in the dtype of the parameters."""
    module, x = _in_float64(name, precision)
    shown = [
        (site, parameter)
        for each, submodule in Selection("**").resolve(module).items()
        for site, parameter in _owned(each, submodule)
        if parameter.requires_grad
    ]
    torch.manual_seed(1)
    return [(site, grad.to(precision.dtype)) for site, grad in _gradients(module(x), shown)]


def _owned(name: str, module: nn.Module) -> Seen:
    """Return the parameters that a module uses without calling the module that holds them."""
    found = module.named_parameters(remove_duplicate=False)
    inside = ("out_proj.", "parametrizations.") if hasattr(module, "in_proj_weight") or name == "stem" else ()
    return [(Site(name, path), each) for path, each in found if "." not in path or path.startswith(inside)]


def _in_float64(name: str, precision: Precision) -> tuple[Model, Tensor]:
    module, x = make(name, precision.dtype)
    if name == "lazy":  # the initial values of its parameters
        torch.manual_seed(1)
        precision.forward(module, x)
    if isinstance(module, Checkpointed):
        module.use_reentrant = False  # not supported by autograd.grad
    return module.double(), x.detach().double().requires_grad_()


def replaced(value: Any, path: str, replace: Callable[[str, Tensor], Any]) -> Any:
    """Return a nested value with each tensor replaced."""
    if isinstance(value, Tensor):
        return replace(path, value)
    if isinstance(value, PackedSequence):
        return value._replace(data=replace(f"{path}.data", value.data))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = {name: replaced(getattr(value, name), f"{path}.{name}", replace) for name in names}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {key: replaced(part, f"{path}.{key}", replace) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(getattr(value, name), f"{path}.{name}", replace) for name in value._fields))
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(part, f"{path}[{index}]", replace) for index, part in enumerate(value))
    return value
