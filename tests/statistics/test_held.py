"""Facts about the parameters that no optimizer has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.statistics.held import HeldParameters

WIDE = (40, 48)


def normal(std: float) -> Callable[[nn.Module], object]:
    def init(layer: Any) -> None:
        nn.init.trunc_normal_(layer.weight, std=std)
        nn.init.zeros_(layer.bias)

    return init


def moved(layer: Any) -> None:
    """Move the parameters as little as a step of Adam does."""
    with torch.no_grad():
        for each in layer.parameters():
            each.add_(1e-3 * torch.randn_like(each).sign())


def nothing(layer: nn.Module) -> None:
    """Leave the layer as it was made."""


def channels_last(layer: Any) -> None:
    layer.to(memory_format=torch.channels_last)


def only_statistics(layer: Any) -> None:
    layer(3 + torch.randn(8, 16, 4))


def constant(layer: Any) -> None:
    nn.init.constant_(layer.weight, 0.1)


def loaded(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight) * 0.05)
        layer.bias.normal_()


@pytest.mark.parametrize(
    ("make", "change", "is_as_made"),
    [
        (lambda: nn.Linear(*WIDE), nothing, True),
        (lambda: nn.Linear(*WIDE, bias=False), nothing, True),
        (lambda: nn.Linear(*WIDE).bfloat16(), nothing, True),
        (lambda: nn.Linear(*WIDE), normal(0.02), True),
        (lambda: nn.Linear(*WIDE), moved, None),
        (lambda: nn.Linear(*WIDE), loaded, False),
        (lambda: nn.Linear(*WIDE, bias=False), moved, None),
        (lambda: nn.Linear(4, 4), nothing, None),
        (lambda: nn.Conv2d(8, 16, 3), channels_last, True),
        (lambda: nn.Conv2d(8, 16, 3), moved, None),
        (lambda: nn.LSTM(16, 32), nothing, True),
        (lambda: nn.GRU(16, 32), nothing, True),
        (lambda: nn.MultiheadAttention(32, 4), nothing, True),
        (lambda: nn.LayerNorm(16), nothing, True),
        (lambda: nn.LayerNorm(16), moved, False),
        (lambda: nn.LayerNorm(16), constant, None),
        (lambda: nn.BatchNorm1d(16), nothing, True),
        (lambda: nn.BatchNorm1d(16), only_statistics, None),
        (lambda: nn.Embedding(64, 32), nothing, None),
    ],
)
def test_layers_as_they_were_made(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], object], is_as_made: bool | None
) -> None:
    """The values of a layer show that it was never trained, that it was, or neither."""
    torch.manual_seed(1)
    layer = make().requires_grad_(False)
    change(layer)
    found = HeldParameters(nn.ModuleDict({"layer": layer, "head": nn.Linear(2, 2)}), [nn.Parameter(torch.ones(1))])
    assert found.layers["layer"] is is_as_made


def test_layers_of_an_optimizer_are_left_out() -> None:
    """Only layers that no optimizer has are examined, at most 32 of them, evenly over the model."""
    net = nn.Sequential(*(nn.LayerNorm(2) for _ in range(100)))
    found = HeldParameters(net, list(net[50:].parameters()))
    assert len(found.layers) == 32
    assert [*found.layers][::31] == ["0", "49"]
    assert found.facts() == {"as_made": list(found.layers), "learned": []}


class Pair(nn.Module):
    """A network and its copy, which nothing freezes."""

    def __init__(self, *, is_equal: bool = True, name: str = "other") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.name = name
        setattr(self, name, copy.deepcopy(self.net))
        if not is_equal:
            for place in (0, 2):
                nn.init.normal_(self.copy[place].weight)

    @property
    def copy(self) -> Any:
        return getattr(self, self.name)


def facts_of(model: Pair, follow: Callable[[Pair, int], object], *, before: bool = False, steps: int = 30) -> Any:
    """Return the facts about the copy after some steps with SGD, of which each fifth is recorded."""
    optimizer = torch.optim.SGD(model.net.parameters(), 0.05)
    held = HeldParameters(model, list(model.net.parameters()))
    for step in range(steps):
        if held.waits:
            held.look(step)
        if step % 5 == 0:
            held.begin(step)
        if before:
            follow(model, step)
        optimizer.zero_grad()
        model.net(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        if not before:
            follow(model, step)
    (found,) = held.facts()["copies"]
    return found


def average(factor: float) -> Callable[[Pair, int], None]:
    def follow(model: Pair, step: int) -> None:
        for one, other in zip(model.copy.parameters(), model.net.parameters(), strict=True):
            one.data.mul_(1 - factor).add_(other.data, alpha=factor)  # the version of ``one`` does not count this

    return follow


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("factor", [0.01, 0.5, 0.995, 1.0])
def test_the_factor_of_an_average(factor: float, before: bool) -> None:
    """The factor is measured within one step, whether the average is computed before or after the optimizer's step."""
    torch.manual_seed(3)
    found = facts_of(Pair(), average(factor), before=before)
    assert found["factor"] == pytest.approx(factor, rel=1e-3)
    assert (found["copy"], found["of"], found["begins_equal"]) == ("other", "net", True)
    # Before the first step, the original has not moved, so that the average of both changes nothing.
    assert (found["records"], found["factors"]) == (6, 6 - before)
    assert found["followed"] >= 5
    assert (found["lag"] < 0.2) == (factor > 0.9)


def test_a_copy_that_stays() -> None:
    """A copy that nothing changes has not followed; a step without a change of the original does not count."""
    torch.manual_seed(3)
    found = facts_of(Pair(), lambda model, step: None)
    assert (found["followed"], found["records"], found["factor"]) == (0, 6, None)
    assert found["moved"] > 1e-3
    assert (found["buffers_followed"], found["buffers_moved"]) == (False, True)


@pytest.mark.parametrize(("every", "followed"), [(2, 12), (5, 12), (7, 8)])
def test_a_copy_that_is_replaced_at_intervals(every: int, followed: int) -> None:
    """A copy that is replaced every few steps lags, also if the interval is that of the records."""
    torch.manual_seed(3)

    def follow(model: Pair, step: int) -> None:
        if step % every == 0:
            model.copy.load_state_dict(model.net.state_dict())

    found = facts_of(Pair(), follow, steps=60)
    assert (found["followed"], found["records"]) == (followed, 12)
    assert found["factors"] < 12 or found["lag"] > 1
    assert found["buffers_followed"]


@pytest.mark.parametrize(
    ("every", "moves"),
    [(20, [[0, 1], [20, 21], [40, 41]]), (17, [[0, 1], [16, 20], [31, 35], [51, 55]]), (5, [])],
)
def test_the_steps_at_which_a_copy_moves(every: int, moves: list[list[int]]) -> None:
    """The steps are known to one, or to the interval of the records; a copy that follows in each record has none."""
    torch.manual_seed(3)

    def follow(model: Pair, step: int) -> None:
        if step % every == 0:
            model.copy.load_state_dict(model.net.state_dict())

    assert facts_of(Pair(), follow, steps=60)["moves"] == moves


@pytest.mark.parametrize(("name", "copies"), [("other", 0), ("target", 1)])
def test_a_part_with_other_values(name: str, copies: int) -> None:
    """A part with the shapes of a trained one and other values is a copy by its name only."""
    held = HeldParameters(model := Pair(is_equal=False, name=name), list(model.net.parameters()))
    held.begin(0)
    assert held.waits == bool(copies)


def test_equal_blocks_are_no_copies() -> None:
    """A frozen block among trained blocks of the same shapes is none of their copies."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    held = HeldParameters(net, list(net[2:].parameters()))
    held.begin(0)
    assert not held.waits


def test_values_do_not_change() -> None:
    """A look draws no random numbers and leaves tensors, versions and gradients as they are."""
    model = Pair()
    state = torch.get_rng_state()
    values = copy.deepcopy(model.state_dict())
    versions = [each._version for each in model.parameters()]
    held = HeldParameters(model, list(model.net.parameters()))
    held.begin(0)
    held.look(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [each._version for each in model.parameters()] == versions
    assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())


class Hostile(nn.Linear):
    """A layer whose properties fail."""

    @property
    def running_mean(self) -> Tensor:
        raise RuntimeError("a property of the user was read")


def test_no_code_of_the_user_runs() -> None:
    """Attributes are read as they are stored."""
    net = nn.ModuleDict({"a": Hostile(40, 48).requires_grad_(False), "b": nn.Linear(2, 2)})
    assert HeldParameters(net, list(net["b"].parameters())).layers == {"a": True}
