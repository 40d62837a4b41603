"""Tests of the rules about targets of the model itself: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import GraphCapture, capture_graph
from tests.insight.records import Examination, Values, brief, examined, record
from tests.insight.rules.test_operations import NAMES, Loss, classes, mlp, of_batch, rows


class Views(nn.Module):
    """Two views of each sample, whose embeddings a loss compares."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.head, self.loss = mlp(7), nn.Linear(7, 7), loss

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.net(x), self.net(x + 0.1 * torch.randn_like(x))
        loss = self.loss(self.head(one), two) + self.loss(self.head(two), one)
        loss.backward()
        return loss


def pulled(p: Tensor, z: Tensor) -> Tensor:
    return -F.cosine_similarity(p, z).mean()


def of_views(loss: Loss = pulled, *, last: float = 0.3, records: int = 8) -> Examination:
    """Return the examination of a run with two views, in whose records the outputs differ less and less."""
    spreads = [0.8, *[last] * (records - 1)]
    layers: dict[str, Values] = {name: {"batch_spread": spreads} for name in ("net.2", "head")}
    return examined(layers, graph=capture_graph(Views(loss), rows), records=records)


def test_two_views_without_a_stop_gradient() -> None:
    """A loss that pulls two views together is a finding if neither is detached and nothing holds them apart."""

    def with_negatives(p: Tensor, z: Tensor) -> Tensor:
        return F.cross_entropy(p @ z.mT, torch.arange(8))

    def with_variance(p: Tensor, z: Tensor) -> Tensor:
        return F.mse_loss(p, z) + F.relu(1 - z.std(0)).mean()

    def with_classes(p: Tensor, z: Tensor) -> Tensor:
        return F.mse_loss(p, z) + F.cross_entropy(p, classes)

    def with_both_variances(p: Tensor, z: Tensor) -> Tensor:
        return F.mse_loss(p, z) - p.std(0).mean() - z.std(0).mean()

    detached: Loss = lambda p, z: pulled(p, z.detach())  # noqa: E731 - one of several losses
    (found,) = of_views(last=0.05, records=9).findings()
    assert brief([found]) == [("warning", "no-stop-gradient", "head")]
    for loss in (detached, with_negatives, with_variance, with_classes, with_both_variances):
        assert "no-stop-gradient" not in {each.rule for each in of_views(loss).findings()}


class Learner(nn.Module):
    """A step of Q-learning, whose target may have a gradient."""

    def __init__(self, *, is_detached: bool, is_copy: bool = False) -> None:
        super().__init__()
        self.net, self.is_detached = mlp(3), is_detached
        self.copy = mlp(3).requires_grad_(False) if is_copy else self.net

    def forward(self, x: Tensor, after: Tensor, reward: Tensor, action: Tensor) -> Tensor:
        target = reward + 0.9 * self.copy(after).max(1)[0]
        value = self.net(x).gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(value, target.detach() if self.is_detached else target)


@pytest.mark.parametrize(
    ("options", "is_wrong"),
    [({"is_detached": False}, True), ({"is_detached": True}, False), ({"is_detached": False, "is_copy": True}, False)],
)
def test_a_target_of_the_same_network(options: dict[str, bool], is_wrong: bool) -> None:
    """A target that follows from the best output of the same network is a finding if it has a gradient."""
    graph = capture_graph(Learner(**options), rows, rows + 1, rows[:, 0], classes)
    layers: dict[str, Values] = {"net.2": {"batch_spread": 0.8}}
    found = [each for each in examined(layers, graph=graph).findings() if each.rule == "no-stop-gradient"]
    assert brief(found) == [("warning", "no-stop-gradient", "net.2")] * is_wrong


class Bootstrapped(nn.Module):
    """A step of Q-learning with a copy of the network, whose target may go on after the end of an episode."""

    def __init__(self, *, uses_end: bool = False, is_bootstrapped: bool = True) -> None:
        super().__init__()
        self.net, self.copy = mlp(3), mlp(3).requires_grad_(False)
        self.uses_end, self.is_bootstrapped = uses_end, is_bootstrapped

    def forward(self, batch: dict[str, Tensor] | tuple[Tensor, ...]) -> Tensor:
        x, after, target, end, *_ = batch.values() if isinstance(batch, dict) else batch
        if self.is_bootstrapped:
            value = 0.9 * self.copy(after).max(1)[0]
            target = target + (value * (1 - end) if self.uses_end else value)
        loss: Tensor = F.mse_loss(self.net(x)[:, 0], target)
        loss.backward()
        return loss


@pytest.mark.parametrize(
    ("end", "options", "is_wrong"),
    [
        ("done", {}, 1),
        ("is_terminal", {}, 1),
        ("done", {"uses_end": True}, 0),
        ("truncated", {}, 0),  # the end of a recording is no end of an episode
        ("done", {"is_bootstrapped": False}, 0),
    ],
)
def test_the_end_of_an_episode_that_is_ignored(end: str, options: dict[str, bool], is_wrong: int) -> None:
    """The target of a value that does not use the end of episodes is a finding, if the batch has it."""
    batch = {"x": rows, "after": rows + 1, "reward": rows[:, 0], end: (rows[:, 1] > 0).float()}
    found = Examination(capture_graph(Bootstrapped(**options), batch)).findings()
    found = [each for each in found if each.rule == "end-ignored"]
    assert brief(found) == [("warning", "end-ignored", "")] * is_wrong
    assert all(f".{end}, and the target of mse_loss in training_step " in each.verdict for each in found)


class FurtherTargets(nn.Module):
    """A step whose target is a number of the batch plus a value that is right without the end of episodes, or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.copy, self.kind = mlp(3), mlp(3).requires_grad_(False), kind

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        value = self.copy(batch["x" if self.kind == "same state" else "after"])[:, 0]
        factor = {"discount": batch["discount"], "where": 0.9, "fixed": 0.9, "same state": 1.0}[self.kind]
        value = (factor * value).unsqueeze(1)
        if self.kind == "where":
            value = torch.where(batch["discount"][:, None] > 0, value, 0.0)
        loss: Tensor = F.mse_loss(self.net(batch["x"])[:, 0], batch["reward"] + value.squeeze(1))
        loss.backward()
        return loss


@pytest.mark.parametrize(("kind", "is_wrong"), [("discount", 0), ("where", 0), ("same state", 0), ("fixed", 1)])
def test_targets_that_know_the_end_in_another_way(kind: str, is_wrong: int) -> None:
    """A discount of the batch may be 0 at the end, and an advantage plus the value of its own state is a return."""
    done = (rows[:, 1] > 0).float()
    batch = {"x": rows, "after": rows + 1, "reward": rows[:, 0], "discount": 1 - done, "done": done}
    found = Examination(capture_graph(FurtherTargets(kind), batch)).findings()
    assert [each.rule for each in found].count("end-ignored") == is_wrong


@pytest.mark.parametrize(("largest", "is_wrong"), [(1.0, 1), (0.0, 0)])
def test_episodes_that_do_not_end(largest: float, is_wrong: int) -> None:
    """A tensor of ends that is zero in all records marks none, as in tasks that go on for ever."""
    batch = {"x": rows, "after": rows + 1, "reward": rows[:, 0], "done": torch.zeros(8)}
    graph = capture_graph(Bootstrapped(), batch)
    (end,) = (node for node in graph.nodes if node.name.endswith("done"))
    nodes = (replace(node, name="batch.done") if node is end else node for node in graph.nodes)  # as in a fit
    examination = Examination(replace(graph, nodes=tuple(nodes)))
    for step in (0, 10, 20):
        examination.add(record("activations", step, {("", "batch.done"): {"max": largest}}, recorder="batch"))
    assert [each.rule for each in examination.findings()].count("end-ignored") == is_wrong


@pytest.mark.parametrize(("flags", "is_wrong"), [(1, 1), (2, 0)])
def test_the_end_of_an_episode_without_a_name(flags: int, is_wrong: int) -> None:
    """The only truth values of a batch are the ends; of two, one may mark what was cut off."""
    batch = (rows, rows + 1, rows[:, 0], *[rows[:, place] > 0 for place in range(flags)])
    found = Examination(capture_graph(Bootstrapped(), batch)).findings()
    assert [each.rule for each in found].count("end-ignored") == is_wrong


@pytest.mark.parametrize(
    ("size", "uses_end", "ends", "is_wrong"),
    [(0.5**0.5, False, 1, 1), (0.6, False, 1, 0), (0.5**0.5, False, 2, 0), (0.5**0.5, True, 2, 0)],
)
def test_ends_that_are_numbers_without_a_name(size: float, uses_end: bool, ends: int, is_wrong: int) -> None:
    """The only column of numbers 0 and 1 that nothing uses has the ends, unless the target uses another one."""
    batch = (rows, rows + 1, rows[:, 0], *[(rows[:, place] > 0).float() for place in range(ends)])
    graph = capture_graph(Bootstrapped(uses_end=uses_end), batch)
    given = [node for node in graph.nodes if node.kind == "input"]
    names = {node: f"batch[{place}]" for place, node in enumerate(given)}  # as in a fit
    examination = Examination(replace(graph, nodes=tuple(replace(n, name=names.get(n, n.name)) for n in graph.nodes)))
    sites: dict[tuple[str, str], dict[str, float]] = {
        ("", f"batch[{place}]"): {"min": 0.0, "max": 1.0, "mean": 0.5, "rms": size} for place in range(3, 3 + ends)
    }
    for step in (0, 10, 20):
        examination.add(record("activations", step, sites, recorder="batch"))
    assert [each.rule for each in examination.findings()].count("end-ignored") == is_wrong


class ActorCritic(nn.Module):
    """A step of an actor and a critic, with a bonus for the entropy of the policy."""

    def __init__(self, *, is_detached: bool = True, bonus: float = 0.01, is_distribution: bool = False) -> None:
        super().__init__()
        self.actor, self.critic = mlp(3), mlp(1)
        self.is_detached, self.bonus, self.is_distribution = is_detached, bonus, is_distribution

    def forward(self, x: Tensor, action: Tensor, returns: Tensor) -> Tensor:
        value = self.critic(x).squeeze(-1)
        advantage = returns - (value.detach() if self.is_detached else value)
        if self.is_distribution:
            policy = torch.distributions.Categorical(logits=self.actor(x), validate_args=False)
            chosen, entropy = policy.log_prob(action), policy.entropy()
        else:
            logs = self.actor(x).log_softmax(-1)
            chosen = logs.gather(1, action[:, None])[:, 0]
            entropy = -(self.actor(x).softmax(-1) * logs).sum(-1)
        loss: Tensor = F.mse_loss(value, returns) - (chosen * advantage).mean() - self.bonus * entropy.mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("is_distribution", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"is_detached": False}, [("no-stop-gradient", "critic.2")]),
        ({"bonus": -0.01}, [("maximized-loss", "")]),
    ],
)
def test_an_actor_and_a_critic(
    options: dict[str, float | bool], expected: list[tuple[str, str]], is_distribution: bool
) -> None:
    """The advantage must be detached, and the entropy be subtracted."""
    step = ActorCritic(is_distribution=is_distribution, **options)  # type: ignore[arg-type]
    graph = capture_graph(step, rows, classes, rows[:, 0])
    found = examined({"critic.2": {"batch_spread": 0.8}}, graph=graph).findings()
    assert [(each.rule, each.module) for each in found if each.rule in NAMES] == expected


@pytest.mark.parametrize("is_separate", [True, False])
def test_an_estimate_with_an_optimizer_of_its_own(is_separate: bool) -> None:
    """Gradients of the estimate that are set to zero before its optimizer makes a step change nothing."""
    model = ActorCritic()
    actor, critic = torch.optim.SGD(model.actor.parameters(), 0.1), torch.optim.SGD(model.critic.parameters(), 0.1)
    returns = rows[:, 0]
    with GraphCapture(model, (rows, classes, returns)) as capture:
        value = model.critic(rows).squeeze(-1)
        chosen = model.actor(rows).log_softmax(-1).gather(1, classes[:, None])[:, 0]
        (-(chosen * (returns - value)).mean()).backward(retain_graph=True)
        actor.step()
        if is_separate:
            critic.zero_grad()
        F.mse_loss(value, returns).backward()
        critic.step()
    found = examined({"critic.2": {"batch_spread": 0.8}}, graph=capture.graph()).findings()
    assert [each.rule for each in found].count("no-stop-gradient") == (not is_separate)


class Pairs(nn.Module):
    """An encoder of two views."""

    def __init__(self, *last: nn.Module) -> None:
        super().__init__()
        self.net = mlp(4, *last)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        scores = F.normalize(self.net(one), dim=1) @ F.normalize(self.net(other), dim=1).T
        return F.cross_entropy(scores, torch.arange(len(one)))


class Restored(nn.Module):
    """An autoencoder whose target is a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return F.mse_loss(self.net(one) + self.net(other), other)


@pytest.mark.parametrize(
    ("model", "mean", "is_wrong"),
    [(Pairs(), 0.5, True), (Pairs(), 0.51, False), (Pairs(nn.Dropout(0.1)), 0.5, False), (Restored(), 0.5, False)],
)
def test_views_that_are_equal(model: nn.Module, mean: float, is_wrong: bool) -> None:
    """Two equal inputs of the same layers are a note, without dropout that makes their outputs differ."""
    examination = Examination(of_batch(capture_graph(model, rows, torch.randn_like(rows))))
    for step in range(4):
        values = {("", f"batch[{place}]"): {"mean": each, "std": 1.0} for place, each in enumerate((0.5, mean))}
        examination.add(record("activations", step, values, recorder="batch"))
        examination.add(record("activations", step, {("net.0", "out"): {}}))
    found = [each for each in examination.findings() if each.rule == "equal-views"]
    assert brief(found) == [("note", "equal-views", "")] * is_wrong
