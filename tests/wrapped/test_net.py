"""RecordedNet: labels, activations, flow, and the absence of side effects on the net."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import warnings
import weakref
from collections import UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from lightning_recorder.errors import ArgumentError, FlowError, RecorderWarning, RecordingError
from lightning_recorder.tensors import ForwardOutput
from lightning_recorder.wrapped.net import RecordedNet
from tests.taps.inspection import hooks_on

X = torch.arange(10.0).reshape(2, 5) / 10


def toy() -> nn.Sequential:
    """Build two layers with activations, the net of the documentation."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())


def wrap(net: nn.Module | None = None, *labels: Any, **kwargs: Any) -> RecordedNet:
    """Wrap a net that takes ``X``, recording some labels."""
    wrapped = RecordedNet(net or toy(), **(kwargs if "input_data" in kwargs else {"input_size": (2, 5), **kwargs}))
    wrapped.record(*labels)
    return wrapped


def tensor(wrapped: RecordedNet, label: tuple[int, int]) -> Tensor:
    """Return an activation that is a tensor."""
    found = wrapped.activations[label]
    assert isinstance(found, Tensor)
    return found


class Reused(nn.Module):
    """A net that calls one layer three times, under two names, and one with its own name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 5)
        self.again = self.layer
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.again(self.layer(x))))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """A net with blocks in a list, called from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Branching(nn.Module):
    """A net that calls one of two branches, the first as often as given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.head = nn.Linear(5, 2)
        self.plan = "a"

    def forward(self, x: Tensor) -> Tensor:
        for name in self.plan:
            x = getattr(self, name)(x)
        return self.head(x)  # type: ignore[no-any-return]


# Labels.


def test_labels_count_the_calls_of_each_depth() -> None:
    """The net is (0, 1), and calls are numbered from 1 per depth in the order in which they begin."""
    inner = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.ReLU()))
    wrapped = wrap(nn.Sequential(inner, nn.Linear(5, 2)))
    assert dict(wrapped.labels) == {(0, 1): "", (1, 1): "0", (2, 1): "0.0", (2, 2): "0.1", (3, 1): "0.1.0", (1, 2): "1"}


def test_each_call_of_a_reused_module_has_a_label() -> None:
    """A module that is called three times has three labels, all with its first name, and three activations."""
    net = Reused()
    wrapped = wrap(net, "layer")
    assert dict(wrapped.labels) == {(0, 1): "", (1, 1): "layer", (1, 2): "layer", (1, 3): "layer", (1, 4): "head"}
    assert wrapped.recording == ((1, 1), (1, 2), (1, 3))
    wrapped(X)
    expected = X
    for label in wrapped.recording:
        expected = net.layer(expected)
        assert torch.equal(tensor(wrapped, label), expected)


def test_depth_is_that_of_the_name() -> None:
    """A child of a module list is one deeper than the list, which takes a position although it is never called."""
    wrapped = wrap(Blocks(), "blocks.0", (2, 1))
    assert dict(wrapped.labels) == {
        (0, 1): "",
        (2, 1): "blocks.1",
        (3, 1): "blocks.1.0",
        (3, 2): "blocks.1.1",
        (2, 2): "blocks.0",
        (3, 3): "blocks.0.0",
        (3, 4): "blocks.0.1",
        (1, 2): "head",
    }
    assert wrapped.recording == ((2, 1), (2, 2))


def test_a_module_that_is_never_called_has_no_label() -> None:
    """The projection of an attention layer, which is never called, has no label, and the message says so."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.rand(1, 3, 4)
    wrapped = RecordedNet(attention, input_data=(x, x, x))
    assert dict(wrapped.labels) == {(0, 1): ""}
    with pytest.raises(ArgumentError, match=r"^module 'out_proj' was not called when the net was labeled$"):
        wrapped.record("out_proj")
    wrapped.record("")
    output, weights = wrapped(x, x, x)
    assert wrapped.activations == {(0, 1): {"out[0]": output, "out[1]": weights}}


# Selecting calls.


def test_order_and_duplicates_do_not_matter() -> None:
    """The recording is sorted without duplicates, given as pairs, lists or names; no arguments select nothing."""
    wrapped = wrap()
    found = [wrapped.recording]
    for labels in ([(1, 3), "0", (0, 1), [1, 3], "2", (0, 1)], [""], []):
        wrapped.record(*labels)
        found.append(wrapped.recording)
    assert found == [(), ((0, 1), (1, 1), (1, 3)), ((0, 1),), ()]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [(1, 9), (0, 1), (7, 1)],
            r"^no call has the label \(1, 9\); the last ones are \(0, 1\), \(1, 4\); no call has the label \(7, 1\); ",
        ),
        ([(1, 3), "stem"], r"^there is no module 'stem'; the closest names are '0', '1', '2'$"),
        ([1, 3], r"^a label is a pair: did you mean record\(\(1, 3\)\)\?$"),
        ([1], r"^no call has the label 1; "),
        ([[[1], 3]], r"^no call has the label \[\[1\], 3\]; "),
    ],
)
def test_unknown_labels_are_refused(labels: list[Any], message: str) -> None:
    """Unknown labels raise a ValueError that names all of them, and the recording is unchanged."""
    wrapped = wrap(None, (1, 2))
    with pytest.raises(ArgumentError, match=message) as raised:
        wrapped.record(*labels)
    assert isinstance(raised.value, ValueError)
    assert wrapped.recording == ((1, 2),)


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    """For a misspelled name, similar names are suggested."""
    with pytest.raises(ArgumentError, match=r"the closest names are 'blocks.1.0', "):
        wrap(Blocks(), "block.1.0")


# Activations.


def test_activations_are_the_outputs_of_the_latest_forward() -> None:
    """Activations are empty before the first forward, then those of the latest, in the order in which calls ended."""
    wrapped = wrap(None, (0, 1), (1, 3), (1, 1))
    assert wrapped.activations == {}
    wrapped(X + 1)
    output = wrapped(X)
    hidden = F.linear(X, wrapped.net[0].weight, wrapped.net[0].bias)  # type: ignore[index]
    assert list(wrapped.activations) == [(1, 1), (1, 3), (0, 1)]
    assert torch.equal(tensor(wrapped, (1, 1)), hidden)
    assert torch.equal(tensor(wrapped, (1, 3)).relu(), output)
    assert tensor(wrapped, (0, 1)) is output
    wrapped(X, dont_record=True)
    assert wrapped.activations == {}


def test_activations_are_read_only() -> None:
    """The mapping of activations is read-only, and a mapping that was read is unaffected by the next forward."""
    wrapped = wrap(None, (0, 1))
    first = wrapped(X)
    activations = wrapped.activations
    with pytest.raises(TypeError):
        activations[0, 1] = X  # type: ignore[index]
    wrapped(X + 1)
    assert activations[0, 1] is first


class InPlace(nn.Module):
    """A net that writes to the output of each layer in every way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(5, 5) for _ in range(4))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        h = self.b(h.clone())
        h *= 2
        h = self.c(h).add_(1)
        h = self.d(h)
        h[:, 1:3].zero_()
        return h  # type: ignore[no-any-return]


def test_writing_to_an_output_does_not_change_its_activation() -> None:
    """An activation has the values that its module returned, whatever in-place operation follows."""
    net = InPlace()
    expected: dict[str, Tensor] = {}
    for name, module in net.named_children():
        module.register_forward_hook(lambda _m, _a, out, name=name: expected.update({name: out.detach().clone()}))
    wrapped = wrap(net, *"abcd", "act")
    output = wrapped(X)
    names = wrapped.labels
    assert {names[label] for label in wrapped.activations} == set(expected)
    for label in wrapped.activations:
        assert torch.equal(tensor(wrapped, label), expected[names[label]]), names[label]
    assert not torch.equal(output, expected["d"])


def test_an_output_written_to_after_the_forward_is_kept() -> None:
    """Writing to the net's output after the forward does not change its activation."""
    wrapped = wrap(None, (0, 1))
    with torch.no_grad():
        output = wrapped(X)
    expected = output.clone()
    assert tensor(wrapped, (0, 1)) is output
    output.add_(1)
    assert torch.equal(tensor(wrapped, (0, 1)), expected)


def test_an_output_that_modules_share_is_copied_once() -> None:
    """An output shared by a child and its parent is copied once, and again after a write between them."""
    wrapped = wrap(
        nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.ReLU(inplace=True)), *[(0, 1), (1, 1), (1, 2), (2, 1)]
    )
    with torch.no_grad():
        wrapped(X).zero_()
    layer, block, act, whole = (tensor(wrapped, label) for label in [(2, 1), (1, 1), (1, 2), (0, 1)])
    assert layer is block
    assert act is whole
    assert torch.equal(block.relu(), whole)
    assert whole.any()


def test_activations_are_part_of_the_graph() -> None:
    """Gradients with respect to an activation equal those of the bare output; copies lead to the parameters."""
    wrapped = wrap(None, (1, 1))
    output = wrapped(X)
    (grad,) = torch.autograd.grad(output.sum(), tensor(wrapped, (1, 1)), retain_graph=True)
    net = wrapped.net
    assert isinstance(net, nn.Sequential)
    hidden = net[0](X).detach().requires_grad_()
    (expected,) = torch.autograd.grad(net[1:](hidden).sum(), hidden)
    assert torch.equal(grad, expected)

    wrapped = wrap(InPlace(), "a")
    wrapped(X)
    assert isinstance(wrapped.net, InPlace)
    weight = wrapped.net.a.weight
    (grad,) = torch.autograd.grad(tensor(wrapped, (1, 1)).sum(), weight)
    assert torch.equal(grad, X.sum(0).expand(5, 5))


def test_inference_mode_is_recorded() -> None:
    """In inference mode, where tensors have no version, activations are correct despite in-place writes."""
    wrapped = wrap(InPlace(), "a", "act", (0, 1))
    with torch.inference_mode():
        output = wrapped(X)
        expected = F.linear(X, wrapped.net.a.weight, wrapped.net.a.bias)  # type: ignore[union-attr,arg-type]
    assert torch.equal(tensor(wrapped, (1, 1)), expected)
    assert torch.equal(tensor(wrapped, (1, 2)), expected.relu())
    assert torch.equal(tensor(wrapped, (0, 1)), output)


@dataclass
class Answer:
    """An output with named parts."""

    logits: Tensor
    hidden: dict[str, Any]
    steps: int = 3


class Nested(nn.Module):
    """A net that returns a dataclass with a dictionary in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 2)

    def forward(self, x: Tensor) -> Answer:
        out, state = self.lstm(x)
        return Answer(out, {"state": list(state), "none": None})


def test_nested_outputs_are_given_by_path() -> None:
    """Outputs that are tuples, dictionaries or dataclasses are recorded as their tensors by path."""
    wrapped = wrap(Nested(), "", "lstm")
    answer = wrapped(X)
    h, c = answer.hidden["state"]
    assert wrapped.activations == {
        (1, 1): {"out[0]": answer.logits, "out[1][0]": h, "out[1][1]": c},
        (0, 1): {"out.logits": answer.logits, "out.hidden.state[0]": h, "out.hidden.state[1]": c},
    }


def test_the_users_hooks_come_first() -> None:
    """An output changed by the user's hook is recorded as changed."""
    wrapped = wrap(None, (1, 1))
    cast(Any, wrapped.net)[0].register_forward_hook(lambda *_: torch.ones(2, 4))
    wrapped(X)
    assert torch.equal(tensor(wrapped, (1, 1)), torch.ones(2, 4))


def test_a_forward_that_raises_leaves_no_activations() -> None:
    """After an error of the net there are no activations and no hooks, and the next forward is correct."""
    wrapped = wrap(None, (0, 1), (1, 1))
    wrapped(X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        wrapped(torch.ones(2, 6))
    assert wrapped.activations == {}
    assert hooks_on(wrapped.net) == []
    assert wrapped(X) is wrapped.activations[0, 1]


def test_recorded_modules_and_parameters() -> None:
    """Recorded modules are returned by label, their parameters once each by the net's names."""
    net = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 5), nn.ReLU())
    wrapped = wrap(net, (1, 3), (1, 1), (2, 1))
    assert wrapped.net is net
    expected = {(1, 1): net[0], (1, 3): net[2], (2, 1): net.get_submodule("0.0")}
    assert wrapped.recorded_modules == expected
    parameters = dict(net.named_parameters())
    assert list(wrapped.recorded_params) == ["0.0.weight", "0.0.bias"]
    assert all(wrapped.recorded_params[name] is parameters[name] for name in wrapped.recorded_params)
    wrapped.record()
    assert (wrapped.recorded_modules, wrapped.recorded_params) == ({}, {})


# Postprocessing.


def test_one_postprocessing_is_applied_to_all() -> None:
    """A single function is applied to each recorded output after recording, and its result is passed on."""
    wrapped = wrap(None, (1, 1), (1, 3))
    net = wrapped.net
    assert isinstance(net, nn.Sequential)
    output = wrapped(X, activation_postproc=lambda out: out * 2)
    hidden = net[0](X)
    expected = net[2]((2 * hidden).relu())
    assert torch.equal(tensor(wrapped, (1, 1)), hidden)
    assert torch.equal(tensor(wrapped, (1, 3)), expected)
    assert torch.equal(output, (2 * expected).relu())


def test_a_postprocessing_reads_what_is_recorded_so_far() -> None:
    """During the forward pass, the activations have those of the calls that have ended; after an error, none."""
    wrapped = wrap(None, (1, 1), (1, 3))
    seen: list[list[Any]] = []
    wrapped(X, activation_postproc=lambda out: seen.append(list(wrapped.activations)))
    assert seen == [[(1, 1)], [(1, 1), (1, 3)]]

    def fail(output: Tensor) -> None:
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        wrapped(X, activation_postproc=fail)
    assert dict(wrapped.activations) == {}


def test_a_list_has_one_for_each_recorded_call() -> None:
    """Functions in a list apply to recorded calls in the order in which the calls end; extra ones are ignored."""
    wrapped = wrap(None, (0, 1), (1, 1))
    net = wrapped.net
    seen: list[str] = []

    def first(out: Tensor) -> None:
        seen.append("first")
        out.zero_()

    def second(out: Tensor) -> Tensor:
        seen.append("second")
        return out + 1

    def third(out: Tensor) -> Tensor:
        raise AssertionError

    output = wrapped(X, activation_postproc=[first, second, third])
    assert seen == ["first", "second"]
    assert torch.equal(tensor(wrapped, (1, 1)), F.linear(X, net[0].weight, net[0].bias))  # type: ignore[index]
    assert torch.equal(output, cast(nn.Sequential, net)[1:](torch.zeros(2, 4)) + 1)


def test_a_list_that_is_too_short_is_refused() -> None:
    """A list that is too short or has non-callables raises a ValueError before anything runs."""
    wrapped = wrap(None, (0, 1), (1, 1))
    calls: list[None] = []
    wrapped.net.register_forward_pre_hook(lambda *_: calls.append(None))
    with pytest.raises(ArgumentError, match=r"^activation_postproc has 1 entries for 2 recorded calls$"):
        wrapped(X, activation_postproc=[torch.relu])
    with pytest.raises(ArgumentError, match=r"^activation_postproc takes a callable or a list of them, got "):
        wrapped(X, activation_postproc=[torch.relu, 3])
    with pytest.raises(ArgumentError, match=r"^activation_postproc takes a callable or a list of them, got 3$"):
        wrapped(X, activation_postproc=3)
    assert calls == []


def test_what_is_not_recorded_is_postprocessed() -> None:
    """With ``dont_record`` outputs are still postprocessed."""
    wrapped = wrap(None, (0, 1))
    output = wrapped(X, activation_postproc=lambda out: torch.full_like(out, 7), dont_record=True)
    assert torch.equal(output, torch.full((2, 3), 7.0))
    assert wrapped.activations == {}


# Flow.


def test_other_calls_are_refused() -> None:
    """A run with other module calls than the labeled one raises an error that names missing and extra calls."""
    net = Branching()
    wrapped = wrap(net, "head")
    wrapped(X)
    net.plan = "ba"
    with pytest.raises(FlowError, match=r": extra 'b'\. With force_static_flow=False"):
        wrapped(X)
    assert wrapped.activations == {}
    net.plan = "b"
    with pytest.raises(FlowError, match=r": missing \(1, 1\) 'a'; extra 'b'\. "):
        wrapped(X)
    net.plan = "aa"
    with pytest.raises(FlowError, match=r": extra 'a' \(call 2\)\. "):
        wrapped(X)
    assert hooks_on(net) == []


def test_another_order_is_refused() -> None:
    """A run with the same calls in another order raises an error that names the first difference."""
    net = Branching()
    net.plan = "ab"
    wrapped = wrap(net, "head")
    net.plan = "ba"
    with pytest.raises(FlowError, match=r": another order: \(1, 1\) was 'a' when it was labeled, and now is 'b'\. "):
        wrapped(X)


def test_dynamic_flow_is_matched_by_module_and_number() -> None:
    """With dynamic flow each recorded call is identified by module and number, whatever is called before it."""
    net = Branching()
    net.plan = "aa"
    wrapped = wrap(net, (1, 2), "head", force_static_flow=False)
    net.plan = "abbaba"
    output = wrapped(X)
    second = net.a(net.b(net.b(net.a(X))))
    assert wrapped.labels[1, 3] == "head"
    assert list(wrapped.activations) == [(1, 2), (1, 3)]
    assert torch.equal(tensor(wrapped, (1, 2)), second)
    assert torch.equal(tensor(wrapped, (1, 3)), output)
    net.plan = "abb"
    with pytest.raises(FlowError, match=r"^recorded calls that did not finish: \(1, 2\) 'a' \(call 2\)$"):
        wrapped(X)
    assert wrapped.activations == {}


def test_other_shapes_are_the_same_flow() -> None:
    """Inputs of another shape than the labeled one are recorded unchanged."""
    wrapped = wrap(None, (1, 1))
    wrapped(torch.ones(7, 3, 5))
    assert tensor(wrapped, (1, 1)).shape == (7, 3, 4)


class Retrying(nn.Module):
    """A module that calls itself again after a failure and finally succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor, tries: int = 2) -> Tensor:
        if tries == 0:
            raise RuntimeError
        try:
            return cast(Tensor, self(x, tries - 1))
        except RuntimeError:
            return self.layer(x) + tries  # type: ignore[no-any-return]


def test_calls_that_raise_keep_their_label_to_themselves() -> None:
    """If a net catches the error of an inner call of the same module, outer calls keep their own labels."""
    net = nn.Sequential(Retrying())
    wrapped = wrap(net, "", "0.layer", (1, 1), (1, 2))
    assert dict(wrapped.labels) == {(0, 1): "", (1, 1): "0", (1, 2): "0", (1, 3): "0", (2, 1): "0.layer"}
    output = wrapped(X)
    assert list(wrapped.activations) == [(2, 1), (1, 2), (1, 1), (0, 1)]
    assert all(wrapped.activations[label] is output for label in [(0, 1), (1, 1), (1, 2)])
    wrapped.record((1, 3))
    with pytest.raises(FlowError, match=r"\(1, 3\) '0' \(call 3\)$"):
        wrapped(X)


class Careful(nn.Module):
    """A module that calls a layer whose hooks may raise, and then falls back to another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x)  # type: ignore[no-any-return]
        except ValueError:
            return self.second(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_hook_of_the_user_may_raise(where: str) -> None:
    """If a user's hook raises before or after the forward and the net continues, the other calls are recorded."""

    def refuse(*_: Any) -> None:
        raise ValueError

    net = Careful()
    register = net.first.register_forward_pre_hook if where == "before" else net.first.register_forward_hook
    register(refuse)
    wrapped = wrap(net, "", "second")
    output = wrapped(X)
    assert {label: found is output for label, found in wrapped.activations.items()} == dict.fromkeys(
        wrapped.recording, True
    )
    labels = ["second"] if where == "before" else ["first", "second"]
    assert list(wrapped.labels.values()) == ["", *labels]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_block_is_recorded_once(use_reentrant: bool) -> None:
    """Recomputations by a checkpoint are not counted, and gradients equal those of the bare net."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
            self.calls = 0
            self.block[0].register_forward_hook(self._count)

        def _count(self, *_: Any) -> None:
            self.calls += 1

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, checkpoint(self.block, x, use_reentrant=use_reentrant))

    expected = gradients(Checkpointed(), X.clone().requires_grad_())
    net = Checkpointed()
    wrapped = RecordedNet(net, input_data=X.clone().requires_grad_())
    wrapped.record(*wrapped.labels)
    x = X.clone().requires_grad_()
    output = wrapped(x)
    kept = wrapped.activations
    assert list(kept) == [(2, 1), (2, 2), (1, 1), (0, 1)]
    output.sum().backward()
    assert net.calls == 2
    assert dict(wrapped.activations) == dict(kept)
    assert_same([each.grad for each in net.parameters()], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_wrapper_keeps_its_activations(use_reentrant: bool) -> None:
    """A wrapper inside a checkpoint keeps its activations when the forward is recomputed."""
    expected = gradients(toy(), X)
    wrapped = wrap(None, (0, 1), (1, 2))
    output = checkpoint(wrapped, X.clone().requires_grad_(), use_reentrant=use_reentrant)
    kept = wrapped.activations
    output.sum().backward()
    assert dict(wrapped.activations) == dict(kept)
    assert len(kept) == 2
    assert_same([each.grad for each in wrapped.parameters()], expected)


class Penalised(nn.Module):
    """A net that computes a gradient inside its forward, through a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = checkpoint(self.block, x, use_reentrant=False)
            (grad,) = torch.autograd.grad(h.sum(), x)
        return self.block(grad)  # type: ignore[no-any-return]


def test_a_backward_pass_inside_the_forward_is_not_recorded() -> None:
    """Recomputations in a backward pass inside the net's own forward have no label."""
    net = Penalised()
    wrapped = wrap(net, "block.0")
    assert list(wrapped.labels.values()) == ["", "block", "block.0", "block.1", "block", "block.0", "block.1"]
    wrapped(X)
    first, second = (tensor(wrapped, label) for label in wrapped.recording)
    assert torch.equal(first, net.block[0](X))
    slope = (1 - first.tanh() ** 2) @ cast(Tensor, net.block[0].weight)
    torch.testing.assert_close(second, net.block[0](slope))


@pytest.mark.parametrize("training", [True, False])
def test_fused_layers_have_the_same_calls_in_every_mode(training: bool) -> None:
    """A transformer labeled in one mode is recorded in the other, although one of them could be fused."""
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2).train(training)
    x = torch.rand(2, 3, 8)
    wrapped = RecordedNet(net, input_data=x)
    wrapped.record("layers.0.linear1", "")
    for mode in (True, False):
        net.train(mode)
        with torch.no_grad():
            output = wrapped(x)
            torch.testing.assert_close(output, net(x))
        hidden = tensor(wrapped, next(label for label, name in wrapped.labels.items() if name == "layers.0.linear1"))
        assert hidden.shape == (2, 3, 16)


def test_reparametrised_weights_are_recorded() -> None:
    """Modules that compute a weight have labels, and their state is restored after the labeling."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)))
    before = state_of(net)
    wrapped = wrap(net, "0", "0.parametrizations.weight.0")
    assert state_of(net) == before
    output = wrapped(X)
    weight = tensor(wrapped, (4, 1))
    assert torch.equal(F.linear(X, weight, cast(Tensor, net[0].bias)), output)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Start and end each test without compiled code, and without recorders of earlier tests, which keep code eager."""
    gc.collect()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_parts_are_recorded() -> None:
    """A compiled part is recorded under the names of its modules, and runs compiled if nothing is recorded."""
    runs: list[None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(None)
            return graph.forward(*args)

        return run

    net = toy()
    compiled = nn.Sequential(cast(nn.Module, torch.compile(net, backend=backend)))
    compiled(X)
    wrapped = wrap(compiled)
    assert [wrapped.labels[2, idx] for idx in range(1, 5)] == ["0.0", "0.1", "0.2", "0.3"]
    assert len(runs) == 1
    wrapped.record("0.0")
    wrapped(X)
    assert torch.equal(tensor(wrapped, (2, 1)), net[0](X))
    assert len(runs) == 1
    wrapped(X, dont_record=True)
    assert len(runs) == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_wrapper_records() -> None:
    """A compiled wrapper runs compiled while nothing is recorded, and eagerly otherwise."""
    compilations: list[None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compilations.append(None)
        return graph.forward

    wrapped = wrap()
    compiled = torch.compile(wrapped, backend=backend)
    expected = wrapped.net(X)
    assert torch.equal(compiled(X), expected)
    assert len(compilations) == 1
    wrapped.record((1, 1))
    assert torch.equal(compiled(X), expected)
    assert len(compilations) == 1
    assert torch.equal(tensor(wrapped, (1, 1)), cast(Any, wrapped.net)[0](X))


# No side effects.


def gradients(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the gradients of the parameters after one backward pass through the sum of the output."""
    net(x).sum().backward()
    return [each.grad for each in net.parameters()]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Return True if lists of tensors are bitwise equal."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


def noisy() -> nn.Sequential:
    """A net with running statistics, random numbers and in-place operations."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 4), nn.BatchNorm1d(4)
    )


def test_training_is_not_changed() -> None:
    """Losses, parameters, gradients, buffers and random numbers equal those of the bare net bit for bit."""

    def train(wrapped: bool) -> list[Tensor | None]:
        net: nn.Module = noisy()
        torch.manual_seed(1)
        if wrapped:
            net = RecordedNet(net, input_size=(6, 5))
            net.record(*net.labels)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        losses: list[Tensor | None] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = net(torch.randn(6, 5)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *net.parameters(), *(each.grad for each in net.parameters()), *net.buffers(), torch.rand(3)]

    assert_same(train(True), train(False))


def state_of(net: nn.Module) -> dict[str, Any]:
    """Return everything that a run may change in a net, tensors as bytes, and the states of all generators."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - the global generator is intended
    return {
        "tensors": {name: each.numpy(force=True).tobytes() for name, each in net.state_dict().items()},
        "objects": {name: id(each) for name, each in (*net.named_buffers(), *net.named_parameters())},
        "modes": [each.training for each in net.modules()],
        "attributes": [sorted(vars(each)) for each in net.modules()],
        "hooks": hooks_on(net),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(numpy),
    }


class Restless(nn.Module):
    """A module that changes its attributes at every call."""

    cache: Tensor | None
    replaced: Tensor
    written: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.tensor([0.0, -0.0]))
        self.register_buffer("written", torch.tensor([torch.nan, -0.0]))
        self.register_buffer("cache", None)
        self.plain = torch.zeros(2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        self.written.add_(1)
        self.plain.add_(1)
        self.cache = self.written.clone()
        self.new = random.random() + float(np.random.rand())  # noqa: NPY002 - the global generator is intended
        x.mul_(2)
        return x + self.replaced.sum()


def test_labelling_leaves_no_trace() -> None:
    """Wrapping does not change buffers, attributes, training flags, random numbers or the given tensors."""
    net = nn.Sequential(noisy(), Restless())
    net.get_submodule("0.3").eval()
    x = torch.randn(3, 5)
    before, given = state_of(net), x.clone()
    RecordedNet(net, input_data=x)
    assert state_of(net) == before
    RecordedNet(net[1], input_data={"x": x})
    RecordedNet(net[1], input_data=[x[:, :2]])
    assert state_of(net) == before
    restless = net[1]
    assert isinstance(restless, Restless)
    assert (restless.calls, restless.plain.tolist()) == (0, [0.0, 0.0])
    assert (torch.equal(x, given), x._version) == (True, 0)


def test_a_pending_backward_pass_survives_the_labelling() -> None:
    """A graph that saved a buffer can still run backward after the net was wrapped."""
    net = noisy().eval()
    out = net(torch.ones(3, 5))
    RecordedNet(net, input_size=(3, 5))
    out.sum().backward()


def test_a_labelling_that_raises_names_the_module() -> None:
    """An error of the net becomes one that names the module that raised, and there are no side effects either."""
    net = nn.Sequential(noisy(), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))
    before = state_of(net)
    message = r"^the labeling run failed in module '1\.1' \(Linear\): RuntimeError: mat1 and mat2 shapes"
    with pytest.raises(RecordingError, match=message) as raised:
        RecordedNet(net, input_size=(3, 5))
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert state_of(net) == before
    with pytest.raises(RecordingError, match=r"^the labeling run failed in the net itself \(Linear\): TypeError"):
        RecordedNet(nn.Linear(2, 2), input_data=(X, X))


def test_lazy_modules_are_initialized() -> None:
    """Wrapping initializes lazy modules, with running statistics unchanged and without drawing random numbers."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    torch.manual_seed(3)
    wrapped = RecordedNet(net, input_size=(3, 5))
    assert torch.equal(torch.rand(2), expected)
    assert (type(net[0]), net[0].weight.shape) == (nn.Linear, (4, 5))
    statistics = {name: each.tolist() for name, each in net[1].named_buffers()}
    assert statistics == {"running_mean": [0.0] * 4, "running_var": [1.0] * 4, "num_batches_tracked": 0}
    assert wrapped.summary.total_params == 24 + 8 + 10


def test_a_net_without_recording_has_no_hooks() -> None:
    """The net has hooks only while a recorded forward runs."""
    found: list[int] = []

    class Spy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
            found.append(len(hooks_on(self)))
            return super().forward(input)

    wrapped = wrap(nn.Sequential(Spy(5, 2)))
    wrapped(X)
    wrapped(X, activation_postproc=torch.relu)
    wrapped.record((0, 1))
    wrapped(X, dont_record=True)
    wrapped(X)
    dynamic = wrap(wrapped.net, (0, 1), force_static_flow=False)
    dynamic(X)
    # Two hooks and three entries for their options; with dynamic flow only recorded modules have hooks.
    assert found == [5, 0, 0, 0, 5, 5, 0]
    assert hooks_on(wrapped.net) == []


# Lifetime.


def test_two_wrappers_do_not_disturb_each_other() -> None:
    """Two wrappers of one net have independent recordings and activations, and each can be deleted."""
    net = toy()
    first, second = wrap(net, (1, 1)), wrap(net, (1, 3), (0, 1))
    first(X)
    kept = tensor(first, (1, 1))
    second(X + 1)
    assert list(first.activations) == [(1, 1)]
    assert tensor(first, (1, 1)) is kept
    assert list(second.activations) == [(1, 3), (0, 1)]
    del second
    first(X)
    assert torch.equal(tensor(first, (1, 1)), kept)


def test_threads_record_their_own_calls() -> None:
    """Two threads with separate wrappers of one net record their own outputs while the net has hooks of both."""
    meeting = threading.Barrier(2, timeout=60)

    class Meeting(nn.Module):
        waiting = False

        def forward(self, x: Tensor) -> Tensor:
            if self.waiting:
                meeting.wait()
            return x * 2

    net = nn.Sequential(Meeting(), nn.Linear(5, 3), Meeting())
    wrappers = [wrap(net, (1, 1), (0, 1)) for _ in range(2)]
    Meeting.waiting = True
    inputs = [X, X + 1]
    failures: list[BaseException] = []

    def work(wrapped: RecordedNet, x: Tensor) -> None:
        try:
            for _ in range(20):
                output = wrapped(x)
                assert torch.equal(tensor(wrapped, (1, 1)), x * 2)
                assert tensor(wrapped, (0, 1)) is output
        except BaseException as error:  # noqa: BLE001 - passed on to the main thread
            failures.append(error)
            meeting.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(wrappers, inputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hooks_on(net) == []


def copies(wrapped: RecordedNet, path: Path) -> list[RecordedNet]:
    """Return copies made in each of the usual ways."""
    torch.save(wrapped, path)
    return [
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        torch.load(path, weights_only=False),
    ]


def test_copies_are_independent(tmp_path: Path) -> None:
    """A copy, a pickle and a saved file have the labels and the recording, their own net and no activations."""
    wrapped = wrap(None, (1, 1), (0, 1))
    expected = wrapped(X)
    for other in copies(wrapped, tmp_path / "net.pt"):
        assert (other.labels, other.recording, other.summary) == (wrapped.labels, wrapped.recording, wrapped.summary)
        assert repr(other) == repr(wrapped)
        assert other.activations == {}
        assert torch.equal(other(X), expected)
        assert other.net is not wrapped.net
        other.record()
        assert other.load_state_dict(wrapped.state_dict()) == ([], [])
        with torch.no_grad():
            cast(Any, other.net)[0].weight.zero_()
    assert wrapped.recording == ((0, 1), (1, 1))
    assert len(wrapped.activations) == 2
    assert torch.equal(wrapped(X), expected)


def test_a_copy_made_during_a_forward_is_whole() -> None:
    """A net that copies itself while it is recorded creates a copy without our hooks."""

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            made.append(copy.deepcopy(self.layer))
            return self.layer(x)  # type: ignore[no-any-return]

    made: list[nn.Module] = []
    wrapped = wrap(Copying(), "layer")
    output = wrapped(X)
    assert torch.equal(made[-1](X), output)
    assert list(wrapped.activations) == [(1, 1)]


def test_nothing_outlives_the_wrapper() -> None:
    """The net and the activations are freed with the wrapper, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        wrapped = wrap(None, (1, 1), (0, 1))
        wrapped(X).sum().backward()
        activation, net = weakref.ref(tensor(wrapped, (1, 1))), weakref.ref(wrapped.net)
        assert activation() is not None
        wrapped(X)
        assert activation() is None
        activation = weakref.ref(tensor(wrapped, (1, 1)))
        del wrapped
        assert (activation(), net()) == (None, None)
    finally:
        gc.enable()


def test_it_is_a_module_like_any_other() -> None:
    """Modes, dtypes and parameters of the wrapper are those of the net."""
    wrapped = wrap(noisy(), (0, 1))
    wrapped.eval()
    assert not any(each.training for each in wrapped.net.modules())
    wrapped.double()
    assert list(map(id, wrapped.parameters())) == list(map(id, wrapped.net.parameters()))
    assert wrapped(X.double()).dtype == torch.float64
    assert tensor(wrapped, (0, 1)).dtype == torch.float64


# State dictionaries.


class Named(nn.Module):
    """A net with children that have the wrapper's own attribute names, and one with several versions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 5)
        self._net = nn.ModuleDict({"_net": nn.Linear(5, 5)})
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self._net["_net"](self.net(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [toy, noisy, Named])
def test_state_dictionaries_are_those_of_the_net(make: Callable[[], nn.Module]) -> None:
    """Keys and values equal the net's, in its order, and load into the net, the wrapper and back."""
    net = make()
    wrapped, other = wrap(net), wrap(make())
    expected = net.state_dict()
    state = wrapped.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    for target, source in ((other, state), (other, expected), (other.net, state)):
        for each in other.parameters():
            nn.init.zeros_(each)
        assert target.load_state_dict(source) == ([], [])
        assert all(torch.equal(each, expected[key]) for key, each in other.state_dict().items())


def test_state_dictionaries_with_the_name_of_the_wrapped_net() -> None:
    """The state dictionary of a wrapper that does not hide the wrapped net, as scio's, can be loaded."""
    net, wrapped = toy(), wrap(toy())
    assert wrapped.load_state_dict({f"_net.{key}": each for key, each in net.state_dict().items()}) == ([], [])
    assert all(torch.equal(each, net.state_dict()[key]) for key, each in wrapped.state_dict().items())


def test_a_wrapper_inside_a_module() -> None:
    """In a larger module the keys are those of the bare net in its place, and load both ways."""
    bare = nn.ModuleDict({"a": nn.Linear(2, 2), "net": Named(), "z": nn.Linear(2, 2)})
    whole = nn.ModuleDict({"a": nn.Linear(2, 2), "net": wrap(Named()), "z": nn.Linear(2, 2)})
    assert sorted(whole.state_dict()) == sorted(bare.state_dict())
    assert whole.load_state_dict(bare.state_dict()) == ([], [])
    assert all(torch.equal(each, whole.state_dict()[key]) for key, each in bare.state_dict().items())
    assert bare.load_state_dict(whole.state_dict()) == ([], [])
    assert copy.deepcopy(whole).load_state_dict(whole.state_dict(), assign=True) == ([], [])


def test_missing_keys_are_named_as_in_the_net() -> None:
    """Missing and unexpected keys have the names of the state dictionary."""
    state = toy().state_dict()
    state["bogus"] = state.pop("2.bias")
    wrapped = wrap()
    assert wrapped.load_state_dict(state, strict=False) == (["2.bias"], ["bogus"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "2.bias"'):
        wrapped.load_state_dict(state)
    whole = nn.ModuleDict({"enc": wrapped})
    inner = {f"enc.{key}": value for key, value in state.items()}
    assert whole.load_state_dict(inner, strict=False) == (["enc.2.bias"], ["enc.bogus"])


def test_versions_of_modules_are_kept() -> None:
    """Each module loads with the version under which it was saved, from the file of a wrapper or of a bare net."""
    seen: list[Any] = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state, prefix, local_metadata, *others)

    net = nn.Sequential(Versioned(5, 2))
    wrapped = wrap(net)
    whole = nn.ModuleDict({"enc": wrapped})
    bare_state = net.state_dict()
    for _ in range(2):
        wrapped.load_state_dict(bare_state)
    wrapped.load_state_dict(wrapped.state_dict())
    net.load_state_dict(wrapped.state_dict())
    whole.load_state_dict(whole.state_dict())
    assert seen == [7] * 5
    entries = len(bare_state._metadata)  # type: ignore[attr-defined]
    wrapped.load_state_dict(bare_state)
    assert len(bare_state._metadata) == entries  # type: ignore[attr-defined]
    assert dict(wrapped.state_dict()._metadata)["0"] == {"version": 7}  # type: ignore[attr-defined]


# Inputs.


def test_one_of_size_and_data_is_needed() -> None:
    """Passing neither of input_size and input_data, or both, is rejected; keyword arguments alone are accepted."""
    assert RecordedNet(toy(), input_kwargs={"input": X}).summary.total_params == 39
    with pytest.raises(ArgumentError, match=r"^give input_size, input_data or input_kwargs$"):
        RecordedNet(toy())
    with pytest.raises(ArgumentError, match=r"^give input_size or input_data, not both$"):
        RecordedNet(toy(), input_size=(2, 5), input_data=X)


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_size": (2, -5)},
        {"input_size": (2, 5.0)},
        {"input_size": "25"},
        {"input_size": []},
        {"input_size": 5},
        {"input_size": [(2, 5), (True,)]},
        {"input_size": [(2, 5), 3]},
        {"input_size": (2, 5), "dtypes": [torch.float32] * 2},
        {"input_size": (2, 5), "dtypes": "float32"},
        {"input_size": (2, 5), "depth": -1},
        {"input_data": 3},
        {"input_data": X, "input_kwargs": [X]},
    ],
    ids=str,
)
def test_arguments_that_can_never_work(arguments: dict[str, Any]) -> None:
    """Invalid shapes, dtypes, depths and inputs raise a ValueError."""
    with pytest.raises(ArgumentError):
        RecordedNet(toy(), **arguments)


def test_only_nets_are_wrapped() -> None:
    """A net that is not a module is rejected."""
    with pytest.raises(ArgumentError, match=r"^net must be a torch.nn.Module, got str$"):
        RecordedNet(cast(Any, "net"), input_size=(1,))


class Noting(nn.Module):
    """A net that stores its arguments."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # Not a list, which would be emptied again after the labeling.
        self.given: UserList[tuple[tuple[Any, ...], dict[str, Any]]] = UserList()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.given.append((args, kwargs))


def test_inputs_are_made_to_measure() -> None:
    """Inputs have the given shapes and dtypes: zeros for integers and booleans, else random numbers in [0, 1)."""
    net = Noting()
    sizes, dtypes = [(2, 3), (4,), (5,), ()], [torch.float64, torch.int64, torch.bool, torch.bfloat16]
    RecordedNet(net, input_size=sizes, dtypes=dtypes, input_kwargs={"flag": True})
    ((args, kwargs),) = net.given
    assert [(tuple(each.shape), each.dtype) for each in args] == list(zip(sizes, dtypes, strict=True))
    assert kwargs == {"flag": True}
    assert (args[1].tolist(), args[2].tolist()) == ([0] * 4, [False] * 5)
    assert 0 <= args[0].min().item() < args[0].max().item() < 1


def test_inputs_have_the_dtype_of_the_net() -> None:
    """Without dtypes the inputs have the dtype of the net's first floating-point parameter."""
    net = Noting(torch.bfloat16)
    RecordedNet(net, input_size=(2, 3))
    assert net.given[0][0][0].dtype == torch.bfloat16


def test_inputs_are_made_on_the_device_of_the_net() -> None:
    """The inputs of a net on the meta device are on the meta device."""
    wrapped = RecordedNet(toy().to("meta"), input_size=(2, 5))
    assert wrapped.summary.mult_adds == 2 * (20 + 12)
    wrapped.record((0, 1))
    assert wrapped(X.to("meta")).shape == tensor(wrapped, (0, 1)).shape == (2, 3)


def test_inputs_that_cannot_be_copied_are_given_as_they_are() -> None:
    """The net receives copies of tensors, including nested non-leaf ones, and uncopyable objects as they are."""
    net, lock, computed = Noting(), threading.Lock(), X.clone().requires_grad_() * 2
    RecordedNet(net, input_data=[{"a": [computed]}, lock], input_kwargs={"k": X})
    (((nested, given), kwargs),) = net.given
    assert given is lock
    assert torch.equal(nested["a"][0], computed)
    assert nested["a"][0] is not computed
    assert kwargs["k"] is not X


# Real models.


@pytest.mark.filterwarnings("ignore:.*get_max_cache_shape.*")
def test_gpt2() -> None:
    """GPT-2 is wrapped with keyword arguments, and the outputs of its blocks equal its own hidden states."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=8, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=True
    )
    net = cast(nn.Module, GPT2LMHeadModel(config)).eval()
    inputs = {"input_ids": torch.arange(12).reshape(2, 6) % 11}
    wrapped = RecordedNet(net, input_data=inputs)
    blocks = [label for label, name in wrapped.labels.items() if name.startswith("transformer.h.") and label[0] == 3]
    assert blocks == [(3, 1), (3, 2), (3, 3)]
    wrapped.record(*blocks, "lm_head", "")
    output = wrapped(**inputs, output_hidden_states=True)
    bare = net(**inputs, output_hidden_states=True)
    assert torch.equal(output.logits, bare.logits)
    # The last hidden state is normalized.
    for label, hidden in zip(blocks[:-1], bare.hidden_states[1:-1], strict=True):
        assert torch.equal(tensor(wrapped, label), hidden)
    whole = wrapped.activations[0, 1]
    assert isinstance(whole, dict)
    assert whole["out.logits"] is output.logits
    assert torch.equal(tensor(wrapped, (1, 2)), bare.logits)


def test_resnet() -> None:
    """A ResNet in training is bitwise unchanged when everything is recorded."""
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    torch.manual_seed(0)
    bare = ResNetForImageClassification(config)
    wrapped = RecordedNet(copy.deepcopy(bare), input_size=(2, 3, 16, 16))
    wrapped.record(*wrapped.labels)
    images, labels = torch.rand(2, 3, 16, 16), torch.tensor([0, 1])
    losses = [net(pixel_values=images, labels=labels).loss for net in (bare, wrapped)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert_same([each.grad for each in wrapped.parameters()], [each.grad for each in bare.parameters()])
    assert_same(list(wrapped.buffers()), list(bare.buffers()))
    assert set(wrapped.activations) == set(wrapped.labels)


# Arbitrary nets.


def trees(depth: int = 3) -> st.SearchStrategy[nn.Module]:
    """Generate nested sequences of layers from five features to five, some in-place or used twice."""
    makes: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(5, 5),
        nn.Tanh,
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Dropout(0.5),
        nn.Identity,
    ]
    leaf = st.sampled_from(makes).map(lambda make: make())
    if depth == 0:
        return leaf

    def sequence(parts: list[nn.Module], twice: bool) -> nn.Module:
        return nn.Sequential(*parts, *parts[:1]) if twice else nn.Sequential(*parts)

    branch = st.builds(sequence, st.lists(trees(depth - 1), min_size=1, max_size=3), st.booleans())
    return st.one_of(leaf, branch)


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 2**16))
def test_any_tree_agrees_with_plain_hooks(parts: list[nn.Module], seed: int) -> None:
    """Labels and activations of any net equal those of hooks that count the calls and clone the outputs."""
    net = nn.Sequential(*parts)
    begun: list[tuple[str, int]] = []
    outputs: dict[int, Tensor] = {}
    open_calls: list[int] = []
    handles = []

    def before(name: str) -> None:
        open_calls.append(len(begun))
        begun.append((name, len([part for part in name.split(".") if part])))

    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: before(name)))
        handles.append(
            module.register_forward_hook(lambda _m, _a, out: outputs.update({open_calls.pop(): out.detach().clone()}))
        )
    torch.manual_seed(seed)
    expected = net(X.clone())
    for handle in handles:
        handle.remove()
    labels = {
        (depth, 1 + sum(other == depth for _, other in begun[:place])): place for place, (_, depth) in enumerate(begun)
    }

    wrapped = wrap(net, input_data=X)
    assert dict(wrapped.labels) == {label: begun[place][0] for label, place in labels.items()}
    wrapped.record(*labels)
    torch.manual_seed(seed)
    assert torch.equal(wrapped(X.clone()), expected)
    assert set(wrapped.activations) == set(labels)
    assert all(torch.equal(tensor(wrapped, label), outputs[place]) for label, place in labels.items())


def test_parameters_have_the_names_of_the_state_dictionary() -> None:
    """Parameters and buffers have the names of the state dictionary and of the net, with an optional prefix."""
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    wrapped = wrap(net)
    assert dict(wrapped.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert dict(wrapped.named_buffers()).keys() == dict(net.named_buffers()).keys()
    assert [name for name, _ in wrapped.named_parameters(prefix="x")][:2] == ["x.0.weight", "x.0.bias"]
    assert {*dict(wrapped.named_parameters()), *dict(wrapped.named_buffers())} == wrapped.state_dict().keys()


class Result:
    """An object of an unknown class."""

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean


class Opaque(nn.Module):
    """A net that returns an object that holds a tensor."""

    def forward(self, x: Tensor) -> Result:
        return Result(x * 2)


def test_an_output_of_an_unknown_class_is_named() -> None:
    """A recorded output whose tensors cannot be found causes a warning that names it."""
    wrapped = wrap(Opaque(), "")
    with pytest.warns(RecorderWarning, match="RecordedNet ignores the tensors inside the Result at 'out' of module ''"):
        wrapped(X)
    assert wrapped.activations == {(0, 1): {}}


def test_the_parts_of_the_net_are_reached_through_the_wrapper() -> None:
    """Attributes that the wrapper lacks are taken from the net, so code that follows parameter names finds them."""
    wrapped = wrap()
    assert wrapped.get_submodule("2") is wrapped.net.get_submodule("2")
    doubled = {name: value * 2 for name, value in wrapped.state_dict().items()}
    expected = torch.func.functional_call(wrapped.net, doubled, (X,))
    assert torch.equal(torch.func.functional_call(wrapped, doubled, (X,)), expected)
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nothing'"):
        wrapped.nothing  # noqa: B018  # the point of the test


def test_recorders_see_nothing_of_the_labelling_run() -> None:
    """A recorder on the net before it is wrapped does not record the generated input."""
    net = toy()
    with ForwardOutput().children(net) as recorder:
        wrapped = wrap(net)
        assert [recorder.calls(each) for each in range(4)] == [0] * 4
        wrapped(X)
        assert [recorder.calls(each) for each in range(4)] == [1] * 4


def test_a_net_with_a_scripted_part_is_wrapped() -> None:
    """A TorchScript module has a label like any other module, and its output is recorded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch 2.13; scripting still works
        net = nn.Sequential(torch.jit.script(nn.Linear(5, 4)), nn.ReLU())
    wrapped = wrap(net, "0")
    assert torch.equal(wrapped(X), net(X))
    assert dict(wrapped.labels) == {(0, 1): "", (1, 1): "0", (1, 2): "1"}
    recorded = wrapped.activations[1, 1]
    assert isinstance(recorded, Tensor)
    assert torch.equal(recorded, net[0](X))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which torch's encoder itself uses
def test_a_padded_encoder_is_wrapped() -> None:
    """An encoder that packs padded rows into nested tensors in eval mode is labeled, and its output is unchanged."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False, False, True, True, True]])
    wrapped = RecordedNet(encoder, input_data=x, input_kwargs={"src_key_padding_mask": mask})
    with torch.no_grad():
        assert torch.equal(wrapped(x, src_key_padding_mask=mask), encoder(x, src_key_padding_mask=mask))
    assert {"layers.0", "layers.1"} <= set(wrapped.labels.values())
