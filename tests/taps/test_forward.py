"""Tests of the taps for inputs and outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder.selection import Selection
from lightning_recorder.taps import InputTap, OutputTap, Site
from tests.taps import references
from tests.taps.models import Precision, each_model, each_precision, make
from tests.taps.references import Seen, assert_seen, copies_into

SQUARE = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))


def tapped(module: nn.Module, *batches: Tensor) -> list[tuple[Site, Tensor]]:
    """Return copies of the tensors that a tap on all submodules records in one forward pass per batch."""
    seen: list[tuple[Site, Tensor]] = []
    with OutputTap(Selection("**").resolve(module), lambda site, tensor: seen.append((site, tensor.clone()))):
        for batch in batches:
            module(batch)
    return seen


@each_model
@each_precision
def test_outputs_are_those_of_the_reference(name: str, precision: Precision) -> None:
    """Each output tensor of each call is recorded once, in the order of the calls, with its value at that time."""
    module, x = make(name, precision.dtype)
    seen: Seen = []
    torch.manual_seed(1)
    with OutputTap(Selection("**").resolve(module), copies_into(seen)):
        precision.forward(module, x)
    assert_seen(seen, references.outputs(name, precision), precision)


@each_model
@each_precision
def test_inputs_are_the_arguments(name: str, precision: Precision) -> None:
    """Each tensor in the arguments is recorded once per call, in order, with its value before the call."""
    module, x = make(name, precision.dtype)
    seen: Seen = []
    torch.manual_seed(1)
    with InputTap(Selection("**").resolve(module), copies_into(seen)):
        precision.forward(module, x).backward()
    expected = references.inputs(name, precision)
    assert [site for site, _ in seen] == [site for site, _ in expected]
    assert [tensor.dtype for _, tensor in seen] == [tensor.dtype for _, tensor in expected]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(seen, expected, strict=True))


@each_model
@each_precision
def test_inputs_after_the_call_are_as_the_module_leaves_them(name: str, precision: Precision) -> None:
    """With ``after`` the arguments are recorded when the call ends; those changed in place contain the results."""
    module, x = make(name, precision.dtype)
    before: Seen = []
    after: Seen = []
    results: Seen = []
    chosen = Selection("**").resolve(module)
    torch.manual_seed(1)
    with (
        InputTap(chosen, copies_into(before)),
        InputTap(chosen, copies_into(after), after=True),
        OutputTap(chosen, copies_into(results)),
    ):
        precision.forward(module, x).backward()
    in_place = {"in-place": "relu", "residual": "branch.0"}.get(name)
    changed = {in_place, "branch"} if name == "residual" else {in_place}
    assert sorted(site for site, _ in after) == sorted(site for site, _ in before)
    for site in {site for site, _ in before}:
        ours, theirs = ([tensor for each, tensor in stream if each == site] for stream in (after, before))
        assert all(map(torch.equal, ours, theirs)) == (site.name not in changed)
    assert [tensor.tolist() for site, tensor in after if site.name == in_place] == [
        tensor.tolist() for site, tensor in results if site.name == in_place
    ]


def test_the_order_is_that_of_the_calls() -> None:
    """Tensors are recorded when their module returns: children before their parent, output parts in order."""
    module, x = make("lstm")
    assert [site for site, _ in tapped(module, x)] == [
        ("stem", "out"),
        ("lstm", "out[0]"),
        ("lstm", "out[1][0]"),
        ("lstm", "out[1][1]"),
    ]
    module, x = make("residual")
    assert [site.name for site, _ in tapped(module, x)] == ["stem", "branch.0", "branch.1", "branch"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_are_seen_without_autograd(mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    """With no_grad and in inference mode the same outputs are recorded."""
    module, x = make("plain")
    expected = tapped(module, x)
    with mode():
        seen = tapped(module, x)
    assert [site for site, _ in seen] == [site for site, _ in expected]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(seen, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_pass_is_no_second_call(use_reentrant: bool) -> None:
    """A checkpointed block is recorded once, although the backward pass calls its modules again."""
    calls: list[str] = []
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    block[0].register_forward_hook(lambda *_: calls.append("forward"))
    seen: list[str] = []
    with OutputTap(dict(block.named_children()), lambda site, _: seen.append(site.name)):
        out = checkpoint(block, torch.ones(1, 2, requires_grad=True), use_reentrant=use_reentrant)
        assert isinstance(out, Tensor)
        out.sum().backward()
    assert calls == ["forward", "forward"]
    assert seen == ["0", "1", "2"]


def test_an_output_is_seen_as_other_hooks_left_it() -> None:
    """If a hook of the user replaces an output, the replacement is recorded."""
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, output: output * 2)
    seen: list[float] = []
    with OutputTap({"m": module}, lambda _, tensor: seen.append(tensor.item())):
        assert module(torch.tensor(3.0)).item() == 6.0
    assert seen == [6.0]


def test_a_module_under_two_names_is_seen_under_both() -> None:
    """A module under two names is recorded under both."""
    module = nn.ReLU()
    seen: list[str] = []
    with OutputTap({"a": module, "b": module}, lambda site, _: seen.append(site.name)):
        module(torch.ones(1))
    assert seen == ["a", "b"]


class Strange(nn.Module):
    """Returns tensors that are not plain arrays, and one that is."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            x.to_sparse(),
            torch.nested.nested_tensor([x, x[:1]]),
            torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
            torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
            x,
        ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # once per process
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*deprecated:UserWarning")  # also once
def test_a_tensor_that_is_no_array_is_handed_over() -> None:
    """Sparse, nested and quantised outputs are passed to the receiver unchanged."""
    seen: list[tuple[str, bool]] = []
    module = Strange()
    with OutputTap({"m": module}, lambda site, tensor: seen.append((site.path, tensor.is_nested))):
        module(torch.eye(2))
    assert seen == [("out[0]", False), ("out[1]", True), ("out[2]", True), ("out[3]", False), ("out[4]", False)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.13 deprecates tracing, which still works
def test_a_traced_call_is_skipped() -> None:
    """Nothing is recorded while torch.jit traces the model, so that the trace contains no recording."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen: list[Site] = []
    with OutputTap(dict(net.named_children()), lambda site, _: seen.append(site)):
        traced = torch.jit.trace(net, torch.ones(1, 2), check_trace=False)
        assert seen == []
    assert torch.equal(traced(torch.ones(3, 2)), net(torch.ones(3, 2)))
