"""Access to private names of torch with their fallbacks, and tensor storage."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_recorder.internals import autograd
from lightning_recorder.internals.autograd import (
    current_function_mode,
    in_backward,
    is_transformed,
    version_counter,
)
from lightning_recorder.internals.storage import address_of, is_uninitialized, storage_of
from lightning_recorder.taps import InputGradientTap, gradient, input_gradient


def test_what_has_no_shape_yet() -> None:
    """Parameters and buffers of a lazy module are uninitialized until its first call; other tensors never are."""
    lazy = nn.LazyBatchNorm1d()
    assert [is_uninitialized(each) for each in (lazy.weight, lazy.running_mean)] == [True, True]
    lazy(torch.ones(2, 3))
    assert not any(map(is_uninitialized, (lazy.weight, lazy.running_mean, torch.ones(1), None, "weight")))


def test_views_share_their_memory() -> None:
    """A view shares the storage of its base; a copy has its own."""
    base = torch.ones(4)
    storages = [storage_of(each) for each in (base, base[1:], base.clone())]
    one, view, copy = (address_of(each) for each in storages if each is not None)
    assert one == view != copy


@pytest.mark.parametrize(
    "make", [lambda: torch.eye(2).to_sparse(), lambda: nn.LazyLinear(2).weight], ids=["sparse", "lazy"]
)
def test_tensors_without_memory_of_their_own(make: object) -> None:
    """Sparse and uninitialized tensors have no storage."""
    assert callable(make)
    assert storage_of(make()) is None


def test_a_forward_pass_is_no_backward_pass() -> None:
    """Outside of a backward pass, before and after one, ``in_backward`` returns False."""
    x = torch.ones(2, requires_grad=True)
    before = in_backward()
    x.sum().backward()
    assert (before, in_backward()) == (False, False)


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_gradient_hook_is_inside_a_backward_pass(how: str) -> None:
    """Inside a hook called by ``Tensor.backward`` or ``autograd.grad``, ``in_backward`` returns True."""
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(in_backward()))
    if how == "backward":
        y.sum().backward()
    else:
        torch.autograd.grad(y.sum(), x)
    assert seen == [True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_is_inside_a_backward_pass(use_reentrant: bool) -> None:
    """The first run of a checkpointed function is outside of a backward pass; the recomputation is inside."""
    seen: list[bool] = []

    def double(x: Tensor) -> Tensor:
        seen.append(in_backward())
        return x.sin() * 2

    checkpoint(double, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]


def test_a_wrapper_of_a_transform_is_known() -> None:
    """A tensor inside ``vmap`` or ``func.grad`` is a wrapper; a tensor outside, even the transform's result, is not."""
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(is_transformed(x))
        return x.sum()

    results = [torch.func.vmap(function)(torch.ones(2, 3)), torch.func.grad(function)(torch.ones(3))]
    assert seen == [True, True]
    assert [is_transformed(tensor) for tensor in (*results, torch.ones(3))] == [False, False, False]


def test_the_innermost_function_mode_is_known() -> None:
    """Inside function modes the innermost one is returned; outside of them, None."""
    with BaseTorchFunctionMode() as outer:
        found: list[object] = []
        with BaseTorchFunctionMode() as inner:
            found.append(current_function_mode())
        found.append(current_function_mode())
    assert found == [inner, outer]
    assert current_function_mode() is None


def test_a_version_counter_counts_writes_and_keeps_no_memory() -> None:
    """The counter of a view counts in-place operations on the shared memory and owns no memory itself."""
    base = torch.zeros(1000)
    counter = version_counter(base.view(10, 100))
    assert counter is not None
    before = counter._version
    base[0] = 1
    base.view(-1).add_(1)
    assert (counter._version - before, counter.untyped_storage().nbytes()) == (2, 0)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the module as if torch had none of the private names."""
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    monkeypatch.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
    monkeypatch.delattr(torch._C._functorch, "peek_interpreter_stack")
    monkeypatch.delattr(torch.overrides, "_get_current_function_mode")
    spec = importlib.util.spec_from_file_location("older_autograd", autograd.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_torch_without_the_private_names_costs_a_detail(older: ModuleType) -> None:
    """Without the private names of torch, every function returns its fallback and nothing raises."""
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(older.in_backward()))
    y.sum().backward()

    def function(x: Tensor) -> Tensor:
        seen.append(older.is_transformed(x))
        return x

    torch.func.vmap(function)(torch.ones(2))
    assert seen == [False, False]
    with BaseTorchFunctionMode():
        assert older.current_function_mode() is None
    assert (older.graph_task(), older.sequence_number(), older.in_transform()) == (-1, 0, None)


def test_input_gradients_are_found_without_the_private_names(
    older: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the private names, the gradient of an input through its module is the same, found by a longer search."""
    monkeypatch.setattr(gradient, "graph_task", older.graph_task)
    for name in ("is_transformed", "sequence_number"):
        monkeypatch.setattr(input_gradient, name, getattr(older, name))
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True) * 3
    seen: list[Tensor] = []
    with InputGradientTap({"layer": layer}, lambda _, grad: seen.append(grad.clone()), strict=True):
        (layer(x) + layer(x * 2)).sum().backward()
    assert [grad.tolist() for grad in seen] == [layer.weight.sum(0, keepdim=True).tolist()] * 2
