"""The labels of calls and containers, the check of the flow at construction, and arguments of torchinfo."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError, FlowError, RecorderWarning
from lightning_recorder.wrapped.net import RecordedNet
from tests.graph.nets import Net

X = torch.arange(10.0).reshape(2, 5) / 10


def _nested(net: Any, x: Tensor) -> Tensor:
    for blocks in net.parts.values():
        for block in blocks:
            x = block(x)
    return net.head(net.parts["p"][0](x))  # type: ignore[no-any-return]


def _direct(net: Any, x: Tensor) -> Tensor:
    return net.enc.inner(net.head(net.enc(x)))  # type: ignore[no-any-return]


def _interrupted(net: Any, x: Tensor) -> Tensor:
    return net.blocks[1](net.head(net.blocks[0](x)))  # type: ignore[no-any-return]


def _in_turn(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def _shared(net: Any, x: Tensor) -> Tensor:
    return net.head(net.act(net.b(net.a(x))))  # type: ignore[no-any-return]


def _sharing() -> nn.Module:
    """Return a net that shares an activation with both of its parts."""
    act = nn.ReLU()
    return Net(_shared, act=act, a=nn.Sequential(_linear(), act), b=nn.Sequential(_linear(), act), head=_linear())


def _linear() -> nn.Linear:
    return nn.Linear(5, 5)


# The labels that torchinfo 1.8.0 gives to these nets.
TORCHINFO: dict[str, tuple[Callable[[], nn.Module], dict[tuple[int, int], str], dict[tuple[int, int], str]]] = {
    "nested containers": (
        lambda: Net(
            _nested,
            parts=nn.ModuleDict({"p": nn.ModuleList([_linear()]), "q": nn.ModuleList([_linear(), nn.ReLU()])}),
            head=_linear(),
        ),
        {
            (0, 1): "",
            (3, 1): "parts.p.0",
            (3, 2): "parts.q.0",
            (3, 3): "parts.q.1",
            (3, 4): "parts.p.0",
            (1, 2): "head",
        },
        {(1, 1): "parts", (2, 1): "parts.p", (2, 2): "parts.q", (2, 3): "parts.p"},
    ),
    "a part called by another module": (
        lambda: Net(_direct, enc=Net(lambda net, x: net.inner(x), inner=_linear()), head=_linear()),
        {(0, 1): "", (1, 1): "enc", (2, 1): "enc.inner", (1, 2): "head", (2, 2): "enc.inner"},
        {(1, 3): "enc"},
    ),
    "a shared module": (
        _sharing,
        {
            (0, 1): "",
            (1, 1): "a",
            (2, 1): "a.0",
            (2, 2): "act",
            (1, 3): "b",
            (2, 3): "b.0",
            (2, 4): "act",
            (2, 5): "act",
            (1, 4): "head",
        },
        {(1, 2): "b"},
    ),
    "an interrupted list": (
        lambda: Net(_interrupted, blocks=nn.ModuleList([_linear(), _linear()]), head=_linear()),
        {(0, 1): "", (2, 1): "blocks.0", (1, 2): "head", (2, 2): "blocks.1"},
        {(1, 1): "blocks", (1, 3): "blocks"},
    ),
}


@pytest.mark.parametrize("case", TORCHINFO)
def test_labels_are_those_of_torchinfo(case: str) -> None:
    """A container takes a position before the calls of its contents, and again after calls of other modules.

    A position for a module around a call, inside of which the call is not made, has no row.
    """
    make, labels, containers = TORCHINFO[case]
    wrapped = RecordedNet(make(), input_data=X)
    assert dict(wrapped.labels) == labels
    rows = {row.label: row.name for row in wrapped.summary.rows}
    assert rows == {**labels, **{label: name for label, name in containers.items() if name not in labels.values()}}
    for label, name in containers.items():
        is_called = name in labels.values()
        about = f"'{name}' as the title of a call" if is_called else f"the container '{name}', which is not called"
        with pytest.raises(ArgumentError, match=rf"^{re.escape(str(label))} is {about}"):
            wrapped.record(label)


def test_the_message_about_a_container_names_its_calls() -> None:
    """Recording a container is an error with the labels of the calls inside, at most five of them."""
    blocks = nn.ModuleList(nn.Sequential(_linear(), nn.Tanh()) for _ in range(2))
    wrapped = RecordedNet(Net(_in_turn, blocks=blocks), input_data=X)
    with pytest.raises(ArgumentError, match=r"; the calls inside it are \(2, 1\), .*, \(2, 2\), \(3, 3\), …$"):
        wrapped.record((1, 1))


def _by_value(net: Any, x: Tensor) -> Tensor:
    return net.a(x) if x.sum() > 0 else net.b(x)  # type: ignore[no-any-return]


def test_values_that_may_choose_a_branch_are_named_at_construction() -> None:
    """A net that reads the value of a tensor causes a warning with the line, unless its flow may vary."""
    net = Net(_by_value, a=_linear(), b=_linear())
    with pytest.warns(RecorderWarning, match=r"^Net reads the value of a tensor at test_calls\.py:\d+\. If its calls"):
        wrapped = RecordedNet(net, input_data=torch.ones(1, 5))
    wrapped.record((0, 1))
    with pytest.raises(FlowError, match="missing"):
        wrapped(-torch.ones(1, 5))
    RecordedNet(net, input_data=torch.ones(1, 5), force_static_flow=False)


def test_values_read_by_torch_itself_are_no_branches() -> None:
    """Printing a tensor or computing a cumulative average in batch norm causes no warning."""

    def forward(net: Any, x: Tensor) -> Tensor:
        str(x)
        return net.norm(x)  # type: ignore[no-any-return]

    RecordedNet(Net(forward, norm=nn.BatchNorm1d(5, momentum=None)), input_size=(3, 5))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"device": "meta"}, r"^the model is on cpu, and is not moved: call model.to\('meta'\) first"),
        ({"device": 1.5}, "device takes a device such as 'cpu'"),
        ({"verbose": 1}, r"RecordedNet has no argument verbose: write print\(RecordedNet\(net, …\)\), without it"),
        ({"row_settings": ["depth"]}, "write nothing: each row has the name and the label"),
        ({"col_name": ["trainable"]}, "did you mean col_names"),
        ({"mask": X}, r"write input_kwargs=\{'mask': …\} for an argument of the model"),
        ({"col_names": ["groups"]}, "col_names must be one or more of 'input_size', "),
    ],
)
def test_arguments_of_torchinfo_are_answered_with_ours(argument: dict[str, Any], message: str) -> None:
    """An argument of torchinfo's summary without an equivalent is an error with the code to write instead."""
    with pytest.raises(ArgumentError, match=message):
        RecordedNet(nn.Linear(5, 5), input_data=X, **argument)


def test_inputs_are_on_the_given_device() -> None:
    """A device that the net is on is accepted, and a net without tensors runs where its inputs are put."""
    assert RecordedNet(nn.Linear(5, 5), input_size=(2, 5), device=torch.device("cpu")).summary.input_bytes == 40
    devices: list[torch.device] = []
    net = Net(lambda _, x: devices.append(x.device))
    RecordedNet(net, input_data=X, device="meta")
    RecordedNet(net, input_size=(2, 5), device="meta")
    assert devices == [torch.device("meta")] * 2
