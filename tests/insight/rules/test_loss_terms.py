"""Tests of the rules about the terms of a loss: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import GraphCapture, capture_graph
from tests.insight.records import Examination, brief
from tests.insight.rules.test_operations import NAMES, Loss, Step, classes, examine, mlp, rows


def step_with(loss: Loss, target: Tensor = classes, outputs: int = 3) -> list[str]:
    """Return the rules of the findings about a step with its backward pass."""
    step = Step(mlp(outputs), loss)
    with GraphCapture(step, (rows, target)) as capture:
        step(rows, target).backward()
    return [each.rule for each in Examination(capture.graph()).findings() if each.rule in NAMES]


def of_likelihood(y: Tensor, target: Tensor) -> Tensor:
    return y.log_softmax(1).gather(1, target[:, None]).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, target: -F.cross_entropy(y, target),
        lambda y, target: 0.01 * y.pow(2).mean() - F.cross_entropy(y, target),
        lambda y, target: F.cross_entropy(y, target, reduction="none").mean() * -2,
        of_likelihood,
    ],
)
def test_a_loss_with_the_wrong_sign(loss: Loss) -> None:
    """A negative comparison with the targets, or a positive logarithm of their probabilities, is a finding."""
    assert step_with(loss) == ["maximized-loss"]


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda y, target: F.cross_entropy(y, target) - 0.1 * F.cross_entropy(y, (target + 1) % 3),  # an adversary
        lambda y, target: -of_likelihood(y, target),
        lambda y, target: -F.cross_entropy(y, torch.zeros(8, dtype=torch.long)) + 0 * target.sum(),
        lambda y, target: (-F.cross_entropy(y, target)).exp().neg(),  # what is not linear
    ],
)
def test_negative_terms_that_are_meant(loss: Loss) -> None:
    """Terms beside one of the right sign, targets of the step itself and functions of a loss are fine."""
    assert step_with(loss) == []


@pytest.mark.parametrize(
    ("net", "other", "is_wrong"),
    [
        (mlp(3), lambda net, x: net(x), True),
        (mlp(3), lambda net, x: net(x).detach(), False),
        (mlp(3), lambda net, x: net(x + 1), False),
        (nn.Sequential(nn.Dropout(0.5), mlp(3)), lambda net, x: net(x), False),
    ],
)
def test_a_comparison_with_itself(net: nn.Module, other: Callable[[nn.Module, Tensor], Tensor], is_wrong: bool) -> None:
    """The same function of the same tensors on both sides is a finding, if both have a gradient."""

    class Ratio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            one = F.log_softmax(self.net(x), -1)
            return ((one - F.log_softmax(other(self.net, x), -1)).exp() * target[:, None]).mean()

    found = [each.rule for each in Examination(capture_graph(Ratio(), rows, classes)).findings()]
    assert found.count("compared-with-itself") == is_wrong


class Derivative(nn.Module):
    """A step whose loss has the derivative of the output, in a term of its own or as a change of the input."""

    def __init__(self, use: Callable[[nn.Module, Tensor, Tensor], Tensor], *, create_graph: bool) -> None:
        super().__init__()
        self.net, self.use, self.create_graph = (
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)),
            use,
            create_graph,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=self.create_graph)
        loss = self.use(self.net, x, found)
        loss.backward()
        return loss


@pytest.mark.parametrize(
    ("use", "create_graph", "is_wrong"),
    [
        (lambda net, x, d: (net(x) + d).square().mean(), False, True),
        (lambda net, x, d: (net(x) + d).square().mean(), True, False),
        (lambda net, x, d: net(x + 0.1 * d.sign()).square().mean(), False, False),
        (lambda net, x, d: (net(x) + d.detach()).square().mean(), False, False),
        (lambda net, x, d: net(x).square().mean() * d.norm(), False, False),
    ],
)
def test_a_derivative_without_a_gradient(
    use: Callable[[nn.Module, Tensor, Tensor], Tensor], create_graph: bool, is_wrong: bool
) -> None:
    """A derivative in a term of the loss needs create_graph; one that changes an input, or is detached, does not."""
    found = Examination(capture_graph(Derivative(use, create_graph=create_graph), rows)).findings()
    assert [each.rule for each in found].count("derivative-without-graph") == is_wrong


def focal(y: Tensor, target: Tensor, *, of_mean: bool = False, is_exchanged: bool = False) -> Tensor:
    """Return a focal loss, by default the right one."""
    if of_mean:
        loss = F.cross_entropy(y, target)
        return (1 - (-loss).exp()) ** 2 * loss
    p, labels = y.sigmoid().clamp(1e-6, 1 - 1e-6), F.one_hot(target, 3).float()
    weight = (1 - p if is_exchanged else p) ** 2
    return -(weight * (1 - p).log() * (1 - labels) + (1 - p) ** 2 * p.log() * labels).mean()


def focal_of_samples(y: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(y, target, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda y, t: focal(y, t, of_mean=True), "is computed from the mean cross_entropy of the batch"),
        (lambda y, t: focal(y, t, is_exchanged=True), "a power of the probability whose logarithm"),
        (focal, ""),
        (focal_of_samples, ""),
        (lambda y, t: focal(y[:1], t[:1], of_mean=True), ""),  # sample by sample
        (lambda y, t: F.cross_entropy(y, t) * (1 + 0 * y.exp().mean()), ""),
        (lambda y, t: (y.softmax(1) * y.log_softmax(1)).sum(1).mean() + F.cross_entropy(y, t), ""),  # an entropy
    ],
)
def test_weights_of_a_focal_loss(loss: Loss, words: str) -> None:
    """The weight must fall with the probability, and be that of a sample."""
    found = [each for each in examine(mlp(3), loss, rows, classes) if each.rule == "focal-weight"]
    assert [words in each.verdict for each in found] == [True] * bool(words)


class PolicyGradient(nn.Module):
    """A step of REINFORCE."""

    def __init__(self, sign: float, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.sign, self.scale = mlp(3), sign, scale

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        chosen = self.net(batch["x"]).log_softmax(1).gather(1, batch["action"][:, None])[:, 0]
        loss: Tensor = self.sign * (chosen * self.scale(batch["rewards"])).mean()
        loss.backward()
        return loss


@pytest.mark.parametrize(
    ("sign", "scale", "is_wrong"),
    [
        (1.0, lambda rewards: rewards, 1),
        (1.0, lambda rewards: (rewards - rewards.mean()) / (rewards.std() + 1e-8), 1),
        (-1.0, lambda rewards: rewards, 0),
        (-1.0, lambda rewards: (rewards - rewards.mean()) / (rewards.std() + 1e-8), 0),
        (1.0, lambda rewards: -rewards, 0),
        (1.0, lambda rewards: rewards.mean() - rewards, 0),
        (1.0, lambda rewards: 1 - rewards, 0),
    ],
)
def test_rewards_with_the_wrong_sign(sign: float, scale: Callable[[Tensor], Tensor], is_wrong: int) -> None:
    """A loss that grows with the log-probability of what is rewarded is a finding; minus signs may be anywhere."""
    batch = {"x": rows, "action": classes, "rewards": rows[:, 0]}
    graph = capture_graph(PolicyGradient(sign, scale), batch)
    found = [each for each in Examination(graph).findings() if each.rule == "maximized-loss"]
    assert brief(found) == [("warning", "maximized-loss", "")] * is_wrong
    assert all("the log-probability of actions × rewards in " in each.verdict for each in found)


@pytest.mark.parametrize("is_teacher", [True, False])
def test_probabilities_that_are_none_of_the_policy(is_teacher: bool) -> None:
    """A term with the probabilities of a teacher, or of other samples, is no entropy of the policy."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.teacher = mlp(3), mlp(3).requires_grad_(False)

        def forward(self, x: Tensor, action: Tensor, rewards: Tensor) -> Tensor:
            logs = self.net(x).log_softmax(1)
            others = logs if is_teacher else self.net(x + 1).log_softmax(1)
            given = self.teacher(x).softmax(1) if is_teacher else self.net(x + 1).softmax(1)
            policy = (logs.gather(1, action[:, None])[:, 0] * rewards).mean()
            loss: Tensor = -policy - 0.1 * (given * others).sum(1).mean()
            loss.backward()
            return loss

    found = Examination(capture_graph(Policy(), rows, classes, rows[:, 0])).findings()
    assert [each for each in found if each.rule == "maximized-loss"] == []


def test_an_entropy_that_is_meant_to_be_small() -> None:
    """Without the loss of a policy, a small entropy is an aim, as with samples that have no labels."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y, target) - (y.softmax(1) * y.log_softmax(1)).sum(1).mean()

    assert step_with(loss) == []


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_teacher_compared_with_itself(is_wrong: bool) -> None:
    """A term of the loss whose sides both follow from an output without a gradient is a finding."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.teacher = mlp(3), mlp(3).requires_grad_(False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y, t = self.net(x), self.teacher(x)
            term = F.kl_div((t if is_wrong else y).log_softmax(1), t.softmax(1), reduction="batchmean")
            loss = F.cross_entropy(y, target) + 2 * term
            loss.backward()
            return loss

    found = [each for each in Examination(capture_graph(Distilled(), rows, classes)).findings() if each.rule in NAMES]
    assert brief(found) == [("warning", "compared-with-itself", "teacher.2")] * is_wrong


def test_a_teacher_whose_entropy_is_subtracted() -> None:
    """The entropy of a teacher makes a divergence of the cross-entropy of the student with it."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.teacher = mlp(3), mlp(3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            t = self.teacher(x)
            given = t.softmax(1)
            loss = F.cross_entropy(self.net(x), given) - F.cross_entropy(t, given)
            loss.backward()
            return loss

    found = [each for each in Examination(capture_graph(Distilled(), rows)).findings() if each.rule in NAMES]
    assert found == []
