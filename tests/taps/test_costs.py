"""The costs of module calls: times with a clock that only the model advances, and the memory that autograd keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder.taps import CostTap, Site


class Clock:
    """A clock that stands still until something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.now += ctx.seconds
        return grads[0], None, None


class Work(nn.Module):
    """A layer whose call and whose backward pass take a known time."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.forward_s
        x = self.fc(x)
        made: Tensor = _Takes.apply(x, self.clock, self.backward_s)  # type: ignore[no-untyped-call]  # torch is untyped
        return made


def measure(net: nn.Module, step: Callable[[], Tensor], clock: Clock, steps: int = 1) -> dict[str, list[float]]:
    """Return the costs of all modules in some steps, by the name of the module and the path."""
    found: dict[str, list[float]] = {}

    def receive(site: Site, value: Tensor) -> None:
        found.setdefault(f"{site.name} {site.path}", []).append(float(value))

    tap = CostTap(dict(net.named_modules()), receive, strict=True, clock=clock)
    for _ in range(steps):
        tap.attach()
        step().backward()
        tap.pause()
    tap.remove()
    return found


def test_times_are_those_of_the_calls() -> None:
    """A module has the time of its call and of its backward pass, and a container the sum of what it contains."""
    clock = Clock()
    net = nn.Sequential(Work(clock, 1.0, 4.0), Work(clock, 2.0, 8.0))
    found = measure(net, lambda: net(torch.ones(2, 4)).sum(), clock, steps=2)
    assert found["0 forward_ms"] == [1000.0] * 2
    assert found["1 forward_ms"] == [2000.0] * 2
    assert found[" forward_ms"] == [3000.0] * 2
    assert found["1 backward_ms"] == [8000.0] * 2
    assert found["0 backward_ms"] == [4000.0] * 2  # to the gradient of its weight, as its input needs none
    assert found[" backward_ms"] == [12000.0] * 2
    assert found["0.fc forward_ms"] == found["0.fc backward_ms"] == [0.0] * 2


def test_calls_of_a_shared_module_are_apart() -> None:
    """Each call of a module that is called twice has its own time, without what happens between the calls."""
    clock = Clock()
    shared, other = Work(clock, 1.0, 4.0), Work(clock, 2.0, 8.0)
    net = nn.ModuleDict({"shared": shared, "other": other})
    x = torch.ones(2, 4, requires_grad=True)
    found = measure(net, lambda: shared(other(shared(x))).sum(), clock)
    assert found["shared forward_ms"] == [1000.0] * 2
    assert found["shared backward_ms"] == [4000.0] * 2
    assert found["other backward_ms"] == [8000.0]


def test_hooks_of_the_tap_do_not_count() -> None:
    """The time that the tap itself takes for the modules inside a call is not the time of the call."""

    class Ticking(Clock):
        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    clock = Ticking()
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    found = measure(net, lambda: net(torch.ones(2, 4)).sum(), clock)
    # Each reading takes a second, and a hook reads the clock when it begins and when it ends. Of the four seconds of a
    # call inside another one, those between these two readings are left out.
    assert found["0.0 forward_ms"] == found["0.1 forward_ms"] == [1000.0]
    assert found["0 forward_ms"] == [5000.0]
    assert found[" forward_ms"] == [7000.0]


def saved_by_hooks(net: nn.Module, x: Tensor) -> int:
    """Return the bytes that autograd packs in a call, counted by torch's hooks instead of the graph."""
    own = {each.untyped_storage().data_ptr() for each in (*net.parameters(), *net.buffers())}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            sizes[address] = tensor.untyped_storage().nbytes()
            kept.append(tensor)  # so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    return sum(sizes.values())


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 4), nn.ReLU()),
        nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Softmax(-1)),
        nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.SiLU()),
    ],
    ids=["feed-forward", "transformer", "convolution"],
)
def test_saved_bytes_are_those_that_autograd_packs(net: nn.Module) -> None:
    """The memory that a model keeps for the backward pass is what torch's own hooks see, split among its parts."""
    x = torch.randn(2, 3, 4)
    found = measure(net, lambda: net(x).sum(), Clock())
    assert found[" saved_bytes"] == [saved_by_hooks(net, x)]
    assert sum(found[f"{name} saved_bytes"][0] for name, _ in net.named_children()) == found[" saved_bytes"][0]


def test_the_memory_of_the_device_is_the_largest_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module has the largest memory at the begin or the end of its call; a container also counts the calls inside."""
    allocated = iter((1, 2, 7, 3, 4, 5))  # the container, the first module, the second one, the container
    monkeypatch.setattr(CostTap, "_allocated", lambda _: next(allocated))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = measure(net, lambda: net(torch.ones(2, 4)).sum(), Clock())
    assert [found[f"{name} allocated_bytes"] for name in ("", "0", "1")] == [[7.0], [7.0], [4.0]]


def test_a_checkpoint_saves_nothing_inside() -> None:
    """A checkpointed module keeps nothing, and what it computes again is part of the backward pass."""
    clock = Clock()
    work = Work(clock, 1.0, 4.0)
    net = nn.ModuleDict({"work": work})
    x = torch.ones(2, 4, requires_grad=True)
    found = measure(net, lambda: checkpoint(work, x, use_reentrant=False).sum(), clock)
    assert found["work forward_ms"] == [1000.0]
    assert found["work saved_bytes"] == [0.0]


def test_nothing_is_kept_and_gradients_are_equal() -> None:
    """Gradients have the same bits with the tap, and neither hooks nor tensors remain."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    x = torch.randn(2, 4)
    net(x).square().sum().backward()
    expected = [each.grad.clone() for each in net.parameters() if each.grad is not None]
    net.zero_grad()
    measure(net, lambda: net(x).square().sum(), Clock())
    assert all(torch.equal(each.grad, other) for each, other in zip(net.parameters(), expected, strict=True))  # type: ignore[arg-type]  # set above
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in net.modules())
    assert not any(each._backward_hooks for each in net.parameters())
