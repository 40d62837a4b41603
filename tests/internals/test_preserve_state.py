"""Snapshot and restoration of everything that running a model may change."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.internals.preserve_state import ModuleState, own_copies, same_gradients, same_random_numbers
from lightning_recorder.internals.storage import is_uninitialized


class Part(nn.Module):
    """A module with an attribute of each kind."""

    written: Tensor
    replaced: Tensor
    extra: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.calls = 0
        self.act: nn.Module = nn.ReLU()


# Module attributes.


def test_attributes_are_put_back_as_the_objects_that_they_were() -> None:
    """Reassigned, added and deleted attributes are restored, including parameters, buffers and submodules."""
    part = Part()
    before = {**vars(part), **part._parameters, **part._buffers, **part._modules}
    state = ModuleState([part])
    part.weight = nn.Parameter(torch.zeros(3))
    part.replaced = torch.ones(3)
    part.register_buffer("new", torch.ones(1))
    part.act = nn.Tanh()
    part.register_buffer("written", part._buffers.pop("written"))
    part.calls += 1
    part.extra = "other"
    del part.plain
    state.restore()
    after = {**vars(part), **part._parameters, **part._buffers, **part._modules}
    assert set(after) == set(before)
    assert [name for name in before if after[name] is not before[name]] == []
    assert list(part.state_dict()) == ["weight", "written", "replaced"]


def test_values_of_tensors_are_put_back() -> None:
    """Values of buffers and of tensors in attributes are restored in the same tensor objects."""
    part = Part()
    state = ModuleState([part])
    for tensor in (part.written, part.plain):
        tensor.add_(7)
    state.restore()
    assert (part.written.tolist(), part.plain.tolist()) == ([0.0, 0.0], [0.0, 0.0])


def test_values_of_parameters_are_left() -> None:
    """Parameters are not copied wherever they are, so writes to them persist."""
    part = Part()
    part.extra = [nn.Parameter(torch.zeros(2))]
    state = ModuleState([part])
    with torch.no_grad():
        part.weight.add_(1)
        part.extra[0].add_(1)
    state.restore()
    assert (part.weight.tolist(), part.extra[0].tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_putting_back_does_not_count_as_writing() -> None:
    """A graph that saved a buffer can still run backward after the buffer is restored."""
    part = Part()
    x = torch.ones(2, requires_grad=True)
    loss = (x * part.written).sum()
    state = ModuleState([part])
    part.written.data.add_(1)
    state.restore()
    loss.backward()
    assert part.written._version == 0
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("outside", [False, True], ids=["restored inside", "restored outside"])
def test_tensors_of_inference_mode(outside: bool) -> None:
    """Buffers created in inference mode are restored inside and outside of it."""
    with torch.inference_mode():
        part = Part()
        state = ModuleState([part])
        part.written.add_(1)
        if not outside:
            state.restore()
    if outside:
        state.restore()
    assert part.written.tolist() == [0.0, 0.0]


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1, 2], lambda each: each.append(3)),
    "emptied list": (lambda: [1, 2], lambda each: each.clear()),
    "sorted list": (lambda: [2, 1], lambda each: each.sort()),
    "dict": (lambda: {"a": 1, "b": 2}, lambda each: each.update(a=3, c=4)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda each: each.update(a=each.pop("a"))),
    "set": (lambda: {1, 2}, lambda each: each.add(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda each: each.append(3)),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda each: (each["b"], each["a"].append(2))),
    "Counter": (lambda: Counter("aab"), lambda each: each.update("abc")),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda each: each.move_to_end("a")),
    "list in a dict in a list": (lambda: [{"a": [1]}], lambda each: each[0]["a"].append(2)),
}


@pytest.mark.parametrize(("make", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_contents_of_containers_are_put_back(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    """A list, dictionary or set is the same object with the same contents in the same order."""
    part = Part()
    part.extra = notes = make()
    state = ModuleState([part])
    change(notes)
    assert str(notes) != str(make())
    state.restore()
    assert part.extra is notes
    assert str(notes) == str(make())


def test_a_container_that_holds_itself() -> None:
    """A list that contains itself is restored like any other."""
    part = Part()
    part.extra = [1]
    part.extra.append(part.extra)
    state = ModuleState([part])
    part.extra.append(2)
    state.restore()
    assert len(part.extra) == 2
    assert part.extra[1] is part.extra


def test_derived_containers_are_left() -> None:
    """A list subclass is not restored, since it may run arbitrary code when it is refilled."""

    class Log(list[int]):
        def clear(self) -> None:
            raise AssertionError

    part = Part()
    part.extra = Log()
    state = ModuleState([part])
    part.extra.append(1)
    state.restore()
    assert part.extra == [1]


def test_tensors_in_containers_are_put_back() -> None:
    """Tensor values of a cache in a dictionary are restored."""
    part = Part()
    part.extra = {"keys": [torch.zeros(2)]}
    state = ModuleState([part])
    part.extra["keys"][0].add_(1)
    state.restore()
    assert part.extra["keys"][0].tolist() == [0.0, 0.0]


def test_hooks_are_removed() -> None:
    """A hook that a forward pass registered is removed, and the user's hooks keep their order."""
    part = Part()
    first, second = (part.register_forward_hook(lambda *_: None) for _ in range(2))
    state = ModuleState([part])
    part.register_forward_hook(lambda *_: None)
    part.register_forward_pre_hook(lambda *_: None)
    first.remove()
    state.restore()
    assert list(part._forward_hooks) == [first.id, second.id]
    assert len(part._forward_pre_hooks) == 0


def test_modules_in_plain_lists() -> None:
    """Modules in a plain list may be called like submodules: their buffers and training flags are restored."""
    norm = nn.BatchNorm1d(2)
    part, hidden = Part(), nn.Sequential(norm)
    part.extra = [hidden]
    state = ModuleState([part])
    hidden(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    hidden.eval()
    state.restore()
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert (hidden.training, norm.training) == (True, True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # scripted models are in use all the same
def test_scripted_modules() -> None:
    """Buffers and training flags of TorchScript modules are restored."""
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(2)))
    state = ModuleState(scripted.modules())
    scripted(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    scripted.eval()
    state.restore()
    (mean,) = (each for name, each in scripted.named_buffers() if name.endswith("running_mean"))
    assert mean.tolist() == [0.0, 0.0]
    assert [each.training for each in scripted.modules()] == [True, True]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_frozen_modules() -> None:
    """A frozen TorchScript module, which has no training flag, is supported."""
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.ReLU()).eval()))
    state = ModuleState(frozen.modules())
    state.restore()
    assert not hasattr(frozen, "training")


def test_lazy_modules_stay_initialized() -> None:
    """A lazy module stays initialized; only its training flag is restored."""
    lazy = nn.LazyLinear(3)
    state = ModuleState([lazy])
    lazy(torch.ones(1, 2))
    lazy.training = False
    state.restore()
    assert type(lazy) is nn.Linear
    assert not is_uninitialized(lazy.weight)
    assert (lazy.weight.shape, lazy.training) == ((3, 2), True)


def test_a_module_is_recorded_once() -> None:
    """A module is restored to its state at the first snapshot."""
    part = Part()
    state = ModuleState([part])
    part.calls = 1
    state.take(part)
    part.calls = 2
    state.restore()
    assert part.calls == 0


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda own: torch.rand(1, generator=own).item()),
        (lambda: random.Random(1), lambda own: own.random()),
        (lambda: np.random.default_rng(1), lambda own: own.random()),
    ],
    ids=["torch", "Python", "NumPy"],
)
def test_generators_of_a_module(make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
    """A module's own generator returns the same number again."""
    part = Part()
    part.extra = {"generator": make()}
    state = ModuleState([part])
    first = draw(part.extra["generator"])
    state.restore()
    assert draw(part.extra["generator"]) == first


# Gradients.


def test_gradients_and_requires_grad() -> None:
    """Inside there are no gradients; afterwards the original objects and values are restored."""
    one, other, frozen = (nn.Parameter(torch.ones(2), requires_grad=flag) for flag in (True, True, False))
    one.grad = gradient = torch.tensor([5.0, 6.0])
    with same_gradients([one, other, frozen]):
        inside = [each.grad for each in (one, other, frozen)]
        (one * other).sum().backward()
        other.requires_grad_(False)
        frozen.requires_grad_()
    assert inside == [None, None, None]
    assert one.grad is gradient
    assert gradient.tolist() == [5.0, 6.0]
    assert other.grad is None
    assert [each.requires_grad for each in (one, other, frozen)] == [True, True, False]


def test_gradients_after_an_error() -> None:
    """Gradients are restored after an error too; non-leaf tensors, which store none, are ignored."""
    one = nn.Parameter(torch.ones(2))
    one.grad = gradient = torch.ones(2)
    with pytest.raises(ArithmeticError), same_gradients([one, one * 2]):
        raise ArithmeticError
    assert one.grad is gradient


# Copies.


@dataclass
class Batch:
    x: Tensor
    size: int


def test_copies_are_the_nets_own() -> None:
    """Tensors at any depth are copied with equal values, dtype and requires_grad; a leaf's copy is a leaf."""
    given = torch.ones(2, requires_grad=True)
    computed = torch.ones(2, requires_grad=True) * 2
    values = {0: given, "k": [{"a": computed}, (torch.tensor(3),)], 1: Batch(torch.zeros(2), 5)}
    copies = own_copies(values)
    assert list(copies) == [0, "k", 1]
    first, second, (third,) = copies[0], copies["k"][0]["a"], copies["k"][1]
    for copy, tensor in ((first, given), (second, computed), (third, torch.tensor(3)), (copies[1].x, torch.zeros(2))):
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.requires_grad, copy.is_leaf) == (tensor.dtype, tensor.requires_grad, tensor.is_leaf)
    first.data.add_(1)
    copies[1].x.add_(1)
    assert (given.tolist(), values[1].x.tolist(), copies[1].size) == ([1.0, 1.0], [0.0, 0.0], 5)  # type: ignore[attr-defined]  # a Batch


def test_a_net_may_write_to_the_copy_of_a_computed_tensor() -> None:
    """Like the computed tensor, its copy can be written to in place and differentiated through."""
    leaf = torch.ones(2, requires_grad=True)
    computed = leaf * 2
    (copy,) = own_copies({0: computed}).values()
    copy.mul_(3).sum().backward()
    assert (computed.tolist(), leaf.grad) == ([2.0, 2.0], None)


def test_what_is_given_twice_stays_one() -> None:
    """A tensor or list that occurs twice is copied once."""
    x = torch.ones(2)
    both = [x]
    copies = own_copies({0: x, 1: both, 2: both})
    assert copies[0] is copies[1][0]
    assert copies[1] is copies[2]
    assert copies[1] is not both


def test_what_refuses_to_be_copied() -> None:
    """An object that cannot be copied is passed as is, and the tensors next to it are still copied."""
    lock, x = threading.Lock(), torch.ones(2)
    copies = own_copies({0: lock, 1: x})
    assert copies[0] is lock
    assert copies[1] is not x


def test_copies_of_another_kind() -> None:
    """A custom function can provide the replacement of a tensor."""
    x = torch.ones(2, 3)
    copies = own_copies({0: [x]}, lambda tensor: tensor.to("meta"))
    assert (copies[0][0].device.type, copies[0][0].shape) == ("meta", (2, 3))


# Random numbers.


def _drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002 - the global generator is intended


@pytest.mark.parametrize("failing", [False, True], ids=["success", "error"])
def test_random_numbers_continue_as_before(failing: bool) -> None:
    """torch, Python and NumPy draw the same numbers as without the block, even after an error."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - see above
    expected = _drawn()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002 - see above
    with suppress(ArithmeticError), same_random_numbers({torch.device("cpu"), torch.device("meta")}):
        inside = _drawn()
        if failing:
            raise ArithmeticError
    assert inside == expected
    assert _drawn() == expected
