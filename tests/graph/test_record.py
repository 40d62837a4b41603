"""Recording a model outside of its training: its inputs, its errors, and the absence of side effects."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_recorder import ArgumentError, ForwardError, RecordedNet, RecordingError
from lightning_recorder.graph import capture_graph, record
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.taps.inspection import hooks_on

Mode = Literal["train", "eval"]

# No side effects.


class Restless(nn.Module):
    """Changes everything that a forward pass can change, and may raise afterwards."""

    written: Tensor
    replaced: Tensor
    new: Any

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.hidden = [nn.BatchNorm1d(4)]
        self.plain = torch.zeros(4)
        self.history: list[Tensor] = []
        self.calls = 0
        self.failing = False

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls += 1
        self.written.add_(1)
        self.replaced = self.replaced + 1
        self.plain.add_(1)
        self.new = random.random() + float(np.random.rand())  # noqa: NPY002 - the global generator is meant
        self.register_forward_hook(lambda *_: None)
        x.mul_(scale).add_(torch.rand(4))
        hidden: Tensor = self.hidden[0](self.frozen(self.norm(self.fc(x))))
        self.history.append(hidden)
        if torch.is_grad_enabled():
            hidden.sum().backward(retain_graph=True)
        self.fc.weight.requires_grad_(False)
        self.fc = linear().train(False)
        if self.failing:
            raise ArithmeticError("on purpose")
        return hidden + self.replaced


def _restless() -> tuple[Restless, dict[str, Tensor]]:
    """Return a model in mixed modes with gradients of its own, and its inputs, one of them computed."""
    net = Restless()
    net.frozen.eval()
    net.norm.weight.requires_grad_(False)
    net.fc.bias.grad = torch.full((4,), 5.0)
    scale = torch.ones(4, requires_grad=True)
    return net, {"x": X.clone().requires_grad_() * 1, "scale": scale}


def _everything(net: Restless, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return all state that a recording could have changed, in a form that can be compared."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers()), **inputs, "plain": net.plain}
    tensors |= {f"hidden.{name}": each for name, each in net.hidden[0].state_dict(keep_vars=True).items()}
    leaves = [each for each in tensors.values() if each.is_leaf]
    return {
        "objects": {name: id(each) for name, each in tensors.items()},
        "values": {name: each.numpy(force=True).tobytes() for name, each in tensors.items()},
        "devices": {name: str(each.device) for name, each in tensors.items()},
        "versions of inputs": [each._version for each in inputs.values()],
        "requires_grad": {name: each.requires_grad for name, each in tensors.items()},
        "gradients": [(id(each.grad), None if each.grad is None else each.grad.tolist()) for each in leaves],
        "flags": [each.training for each in (*net.modules(), *net.hidden)],
        "modules": [(name, id(each)) for name, each in net.named_modules()],
        "attributes": [sorted(vars(each)) for each in net.modules()],
        "calls": (net.calls, net.history),
        "hooks": hooks_on(net),
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002 - see above
        "modes": (torch.overrides._get_current_function_mode_stack(), _get_current_dispatch_mode_stack()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("failing", [False, True], ids=["success", "error"])
@pytest.mark.parametrize("grad_mode", GRAD_MODES.values(), ids=GRAD_MODES)
@pytest.mark.parametrize(
    ("device", "mode"),
    list(product((None, "meta"), (None, "train", "eval"))),
    ids=str,
)
def test_nothing_is_changed(
    device: Literal["meta"] | None,
    mode: Mode | None,
    grad_mode: Callable[[], AbstractContextManager[Any]],
    failing: bool,
) -> None:
    """Values, objects, flags, gradients, attributes, hooks and random numbers are restored, even after an error."""
    net, inputs = _restless()
    net.failing = failing
    before = _everything(net, inputs)
    with grad_mode(), pytest.raises(ForwardError) if failing else nullcontext():
        record(net, input_data=inputs, device=device, mode=mode)
    assert _everything(net, inputs) == before


class _Aside(TorchFunctionMode):
    """A custom function mode that counts functions."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_mode_of_the_user_stays(device: Literal["meta"] | None) -> None:
    """A function mode stays active, even after an error."""
    net = Net(lambda net, x: net.fc(x).view(3, 5), fc=linear())
    with _Aside() as mine:
        with pytest.raises(ForwardError):
            record(net, input_data=X, device=device)
        assert torch.overrides._get_current_function_mode_stack() == [mine]
    assert mine.calls > 0


def test_each_module_runs_in_its_own_mode() -> None:
    """By default each module keeps its mode; train and eval apply to all modules."""
    modes: list[bool] = []

    def note(net: Net, x: Tensor) -> Tensor:
        modes.append(net.training)
        return x

    net = nn.Sequential(Net(note), Net(note))
    net[1].eval()
    for mode in (None, *get_args(Mode)):
        record(net, input_data=X, mode=mode)
    assert modes == [True, False, True, True, False, False]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # scripted models are still in use
def test_flags_of_scripted_and_lazy_modules() -> None:
    """Scripted and lazy modules run in the requested mode, and their own mode is restored."""
    net = nn.Sequential(nn.LazyLinear(4), torch.jit.script(nn.BatchNorm1d(4)))
    record(net, input_data=X, mode="eval")
    assert [each.training for each in net.modules()] == [True, True, True]
    assert {name: each.item() for name, each in net.named_buffers() if each.dim() == 0} == {"1.num_batches_tracked": 0}


# The inputs.


@dataclass
class Batch:
    x: Tensor
    others: list[Tensor]
    size: int = 2


def _sum(value: Any) -> Any:
    """Return the sum of all tensors in a nested value."""
    if isinstance(value, Tensor):
        return value.sum()
    parts = (
        vars(value).values() if isinstance(value, Batch) else value.values() if isinstance(value, Mapping) else value
    )
    return sum((_sum(each) for each in parts if not isinstance(each, int)), torch.zeros(()))


class Call(NamedTuple):
    given: dict[str, Any]
    inputs: list[str]
    """The name, dtype and shape of each input of the model."""


KEYWORDS = {"mask": X, "scale": torch.tensor(2)}
CALLS = {
    "shape": Call({"input_shapes": (2, 3)}, ["input float32 2×3"]),
    "shape as a list": Call({"input_shapes": [2, 3]}, ["input float32 2×3"]),
    "torch.Size": Call({"input_shapes": torch.Size((2, 3))}, ["input float32 2×3"]),
    "scalar": Call({"input_shapes": ()}, ["input float32 scalar"]),
    "empty batch": Call({"input_shapes": (0, 3)}, ["input float32 0×3"]),
    "list of shapes": Call({"input_shapes": [(2, 3), (4,)]}, ["input[0] float32 2×3", "input[1] float32 [4]"]),
    "tuple of shapes": Call({"input_shapes": ((2, 3), [4])}, ["input[0] float32 2×3", "input[1] float32 [4]"]),
    "dtype": Call({"input_shapes": [(2,), (3,)], "dtypes": torch.int64}, ["input[0] int64 [2]", "input[1] int64 [3]"]),
    "dtypes": Call(
        {"input_shapes": [(2,), (3,), (4,)], "dtypes": [torch.bool, torch.complex64, torch.bfloat16]},
        ["input[0] bool [2]", "input[1] complex64 [3]", "input[2] bfloat16 [4]"],
    ),
    "shape and keywords": Call(
        {"input_shapes": (2, 3), "input_kwargs": KEYWORDS},
        ["input[0] float32 2×3", "input.mask float32 2×4", "input.scale int64 scalar"],
    ),
    "tensor": Call({"input_data": X}, ["input float32 2×4"]),
    "integers": Call({"input_data": torch.ones(2, 3, dtype=torch.int32)}, ["input int32 2×3"]),
    "tuple": Call({"input_data": (X, X[0].clone())}, ["input[0] float32 2×4", "input[1] float32 [4]"]),
    "list of one": Call({"input_data": [X]}, ["input float32 2×4"]),
    "given twice": Call({"input_data": (X, X)}, ["input[0] float32 2×4"]),
    "dict": Call({"input_data": KEYWORDS}, ["input.mask float32 2×4", "input.scale int64 scalar"]),
    "a dict as the one argument": Call({"input_data": ({"a": X},)}, ["input.a float32 2×4"]),
    "nested": Call(
        {"input_data": ([X, {"a b": X[0].clone()}],), "input_kwargs": {"k": (X[1].clone(),)}},
        ["input[0][0] float32 2×4", "input[0][1]['a b'] float32 [4]", "input.k[0] float32 [4]"],
    ),
    "dataclass": Call(
        {"input_data": (Batch(X, [X[0].clone()]),)}, ["input.x float32 2×4", "input.others[0] float32 [4]"]
    ),
    "keywords alone": Call({"input_kwargs": KEYWORDS}, ["input.mask float32 2×4", "input.scale int64 scalar"]),
    "data and keywords": Call(
        {"input_data": {"mask": X}, "input_kwargs": {"mask": X[0].clone()}}, ["input.mask float32 [4]"]
    ),
    "nothing": Call({"input_data": ()}, []),
}


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_the_model_is_given(call: Call, device: Literal["meta"] | None) -> None:
    """Inputs may be shapes, tensors, tuples, dictionaries and dataclasses in any nesting, by position or keyword."""
    graph = record(Net(lambda _, *args, **kwargs: _sum((args, kwargs))), device=device, **call.given)
    shown = [f"{node.name} {node.outputs[0].dtype} {node.outputs[0]}" for node in graph.nodes if node.kind == "input"]
    assert shown == call.inputs


def test_keyword_only_arguments() -> None:
    """A model with keyword-only arguments gets them from ``input_data`` and from ``input_kwargs``."""
    net = Net(lambda net, *, x, bias=None: net.fc(x) + bias, fc=linear())
    assert outline(record(net, input_data={"x": X}, input_kwargs={"bias": X.clone()}), outputs=True) == text(
        """
        input.x
        input.bias
        fc: Linear
          linear <- input.x
        add <- linear, input.bias
        output <- add
        """
    )


def test_made_up_inputs() -> None:
    """Generated inputs are zeros for integers, else fixed random numbers in [0, 1) with the parameters' dtype."""
    given: list[Tensor] = []
    net = Net(lambda _, *args: given.extend(args), fc=linear().to(torch.float64))
    for _ in range(2):
        record(net, input_shapes=[(3, 2), (2,)], dtypes=[torch.float64, torch.uint8])
    assert record(net, "", (2, 3)).nodes[1].outputs[0].dtype == "float64"
    numbers, zeros, again = given[:3]
    assert zeros.tolist() == [0, 0]
    assert 0 <= numbers.min().item() < numbers.max().item() < 1
    assert torch.equal(numbers, again)


def test_a_graph_is_that_of_a_plain_call() -> None:
    """The graph is equal to that of a capture of the call; a name replaces the model's class as the title."""
    net = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.ReLU())
    assert record(net, input_data=X) == capture_graph(net, X)
    named = record(net, "mine", (2, 4))
    assert (named.name, named.title, named.root.type_name) == ("mine", "mine", "Sequential")
    assert named.nodes[1:] == capture_graph(net, X).nodes[1:]


# Errors.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give either input_shapes or input_data, got neither"),
        ({"input_shapes": (2, 4), "input_data": X}, "give either input_shapes or input_data, got both"),
        ({"input_shapes": (-1, 4)}, r"input_shapes takes a shape, .*, none negative; got \(-1, 4\)"),
        ({"input_shapes": []}, r"input_shapes takes a shape, .*; got \[\]"),
        ({"input_shapes": 4}, "input_shapes takes a shape, .*; got 4"),
        ({"input_shapes": "2x4"}, "input_shapes takes a shape, .*; got '2x4'"),
        ({"input_shapes": [(2, 4), (2.0, 4)]}, "input_shapes takes a shape, or a list|input_shapes takes a shape"),
        ({"input_shapes": (2, True)}, "input_shapes takes a shape"),
        (
            {"input_shapes": X},
            r"^input_shapes takes shapes, got tensors: write input_data=… for the inputs themselves$",
        ),
        ({"input_shapes": [{"x": X}]}, r"^input_shapes takes shapes, got tensors: write input_data=…"),
        ({"input_shapes": (2, 4), "dtypes": "float32"}, "dtypes takes a torch.dtype, .* 1 inputs, got 'float32'"),
        ({"input_shapes": [(2,)] * 3, "dtypes": [torch.float32]}, "one for each of the 3 inputs"),
        ({"input_data": X, "dtypes": torch.float32}, "dtypes .* needs input_shapes"),
        ({"input_data": 3}, "input_data takes a tensor, .*, got int"),
        ({"input_data": X, "input_kwargs": [1]}, "input_kwargs takes a dictionary of keyword arguments, got list"),
        ({"input_data": X, "device": "gpu"}, "device takes a device such as 'cpu' or 'cuda:0', got 'gpu'"),
        ({"input_data": X, "mode": "test"}, "mode must be 'train', 'eval' or None .*, got 'test'"),
    ],
)
def test_arguments_that_can_never_work(given: dict[str, Any], message: str) -> None:
    """Invalid arguments are rejected before the model runs, and the message states the valid ones."""
    calls: list[Any] = []
    with pytest.raises(ArgumentError, match=message):
        record(Net(lambda _, x: calls.append(x)), **given)
    assert calls == []


@pytest.mark.parametrize("batch", [{"x": X}, (X, X)], ids=["dict", "tuple"])
def test_a_batch_that_is_the_only_argument(batch: Any) -> None:
    """A dictionary or tuple that is the only argument of a model is given in a list; otherwise the error says so."""

    class Taking(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return (batch["x"] if isinstance(batch, dict) else batch[1]).exp()  # type: ignore[no-any-return]

    way_out = r"argument.*; if the whole batch is the only argument, write input_data=\[batch\]$"
    with pytest.raises(ForwardError, match=way_out):
        record(Taking(), input_data=batch)
    with pytest.raises(RecordingError, match=way_out):
        RecordedNet(Taking(), input_data=batch)
    RecordedNet(Taking(), input_data=[batch])
    graph = record(Taking(), input_data=[batch])
    assert outline(graph) == "input.x\nexp <- input.x" if isinstance(batch, dict) else "input[1]\nexp <- input[1]"


def test_a_batch_of_one_for_batch_norm() -> None:
    """If batch norm refuses a batch of one sample, the error names the mode in which it accepts it."""
    net = nn.Sequential(linear(), nn.BatchNorm1d(4))
    with pytest.raises(ForwardError, match=r"Expected more than 1 value .*; record with mode='eval', or give a batch"):
        record(net, input_shapes=(1, 4))
    record(net, input_shapes=(1, 4), mode="eval")
    with pytest.raises(
        RecordingError, match=r"Expected more than 1 value .*; call net\.eval\(\) before, or give a batch"
    ):
        RecordedNet(net, input_size=(1, 4))
    RecordedNet(net.eval(), input_size=(1, 4))


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_model_that_raises(device: Literal["meta"] | None) -> None:
    """The error names the module and the original error, which is its cause, and holds the graph until then."""
    net = nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear(3)), nn.Tanh())
    with pytest.raises(ForwardError, match=r"^module '1\.1' \(Linear\) raised RuntimeError: ") as caught:
        record(net, input_data=X, device=device)
    assert type(caught.value.__cause__) is RuntimeError
    assert outline(caught.value.graph) == text(
        """
        input
        0: Linear
          linear <- input
        1!: Sequential
          1.0: ReLU
            relu <- linear
          1.1!: Linear
            linear#2! <- relu
        """
    )


def test_an_interrupt_is_no_error_of_the_model() -> None:
    """A KeyboardInterrupt propagates unchanged, and the state of the model is restored."""

    def interrupt(net: Any, x: Tensor) -> None:
        net.norm(x)
        raise KeyboardInterrupt

    net = Net(interrupt, norm=nn.BatchNorm1d(4))
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        record(net, input_data=X)
    assert net.norm.num_batches_tracked.item() == 0  # type: ignore[union-attr, operator]  # a buffer


class Shadowing(nn.Module):
    """A model with an attribute that hides a method of ``nn.Module``, which torch itself does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.modules = [self.layer]  # type: ignore[method-assign, assignment]  # on purpose

    def forward(self, x: Tensor) -> Tensor:
        return self.modules[0](x)  # type: ignore[index, no-any-return]


def test_a_model_may_have_an_attribute_named_modules() -> None:
    """A list named ``modules`` is no obstacle to a recording, a summary, or a picture of a part with such a list."""
    for net in (Shadowing(), nn.Sequential(Shadowing())):
        graph = record(net, "net", (2, 4), mode="eval")
        assert [node.name for node in graph.nodes if node.kind == "op"] == ["linear"]
        assert RecordedNet(net, input_size=(2, 4)).summary.total_params == 20
