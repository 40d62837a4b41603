"""Tests of the rules about losses: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import GraphCapture, capture_graph
from tests.insight.records import Examination, Values, brief, examined, record
from tests.insight.rules.test_operations import NAMES, Function, Loss, Step, classes, examine, mlp, rows

TORCH_WARNS = pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")


@TORCH_WARNS
def test_a_loss_of_unequal_shapes() -> None:
    """A column that is compared with a vector is a finding with both shapes, the result and the line."""
    (found,) = examine(mlp(1), F.mse_loss, rows, torch.randn(8))
    assert brief([found]) == [("warning", "loss-shapes", "")]
    assert found.verdict.endswith("compares a prediction [8, 1] with a target [8]: torch expands both to [8, 8]")
    assert "test_operations.py:" in found.verdict


def test_a_loss_of_unequal_shapes_by_hand() -> None:
    """The difference of a column and a vector is found in a loss that is written by hand, with the prediction first."""
    losses: list[Loss] = [lambda y, target: (y - target).pow(2).mean(), lambda y, target: (target - y).abs().sum()]
    for loss in losses:
        (found,) = examine(mlp(1), loss, rows, torch.randn(8))
        assert found.rule == "loss-shapes"
        assert found.verdict.endswith("compares a prediction [8, 1] with a target [8]: torch expands both to [8, 8]")


def test_differences_that_are_meant() -> None:
    """Pairs of predictions, and a target of another size than the batch, are fine."""
    pairs = examine(mlp(1), lambda y, target: (y - y.squeeze(-1)).pow(2).mean() + 0 * target.sum(), rows, rows)
    assert pairs == []
    assert examine(mlp(3), lambda y, target: (y - target).pow(2).mean(), rows, torch.randn(3)) == []


@TORCH_WARNS
@pytest.mark.parametrize("target", [torch.randn(8, 1), torch.randn(1, 1), torch.tensor(0.5)])
def test_shapes_that_are_meant(target: Tensor) -> None:
    """Equal shapes, an explicit dimension of size 1 and a target without dimensions are fine."""
    assert examine(mlp(1), F.mse_loss, rows, target) == []


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, lambda x, y: F.binary_cross_entropy_with_logits(x, F.one_hot(y) + 0.0)]
)
def test_logits_that_are_cut_off(loss: Loss) -> None:
    """A ReLU before a loss that expects logits is a finding, a linear layer is not."""
    (found,) = examine(mlp(3, nn.ReLU()), loss, rows, classes)
    assert brief([found]) == [("warning", "cut-off-logits", "net.3")]
    assert examine(mlp(3), loss, rows, classes) == []


def ctc(y: Tensor, labels: Tensor) -> Tensor:
    return F.ctc_loss(y.unsqueeze(1), labels.view(1, 8) % 2 + 1, torch.tensor([8]), torch.tensor([4]))


def divergence(y: Tensor, labels: Tensor) -> Tensor:
    return F.kl_div(y, F.one_hot(labels, 3).float(), reduction="batchmean")


@pytest.mark.parametrize("loss", [F.nll_loss, ctc, divergence, lambda y, labels: divergence(y / 2, labels)])
def test_a_loss_that_expects_logarithms(loss: Loss) -> None:
    """A linear layer before a loss that expects logarithms is a finding, log_softmax is not."""
    (found,) = examine(mlp(3), loss, rows, classes)
    assert brief([found]) == [("warning", "no-log-softmax", "net.2")]
    assert examine(mlp(3, nn.LogSoftmax(-1)), F.nll_loss, rows, classes) == []
    assert examine(mlp(3), lambda y, labels: loss(y.log_softmax(-1), labels), rows, classes) == []


class Distilled(nn.Module):
    """A student and a teacher, whose logits become the target of a function."""

    def __init__(self, target: Function) -> None:
        super().__init__()
        self.student, self.teacher, self.target = mlp(3), mlp(3).requires_grad_(False), target

    def forward(self, x: Tensor) -> Tensor:
        target = self.target(self.teacher(x))
        loss: Tensor = F.kl_div(self.student(x).log_softmax(-1), target, reduction="batchmean")
        return loss


def test_a_divergence_from_logits() -> None:
    """The target of kl_div must not be the logits of a teacher."""
    (found,) = [
        each for each in Examination(capture_graph(Distilled(lambda y: y), rows)).findings() if each.rule in NAMES
    ]
    assert brief([found]) == [("warning", "no-log-softmax", "teacher.2")]
    assert found.verdict.endswith("as its target")
    for fine in (lambda y: y.softmax(-1), lambda y: (y / 4).softmax(-1)):
        found_now = Examination(capture_graph(Distilled(fine), rows)).findings()
        assert [each for each in found_now if each.rule in NAMES] == []


class Critic(nn.Module):
    """A step of a critic, and one of its generator."""

    def __init__(self, last: nn.Module, is_one_signed: bool = False) -> None:
        super().__init__()
        self.g, self.d, self.sign = nn.Linear(3, 5), mlp(1, last), -1 if is_one_signed else 1

    def forward(self, x: Tensor) -> Tensor:
        fake = self.g(x[:, :3])
        (self.d(fake.detach()).mean() - self.sign * self.d(x).mean()).backward()
        loss: Tensor = self.sign * -self.d(fake).mean()
        loss.backward()
        return loss


@pytest.mark.parametrize(
    ("last", "is_one_signed", "is_wrong"),
    [(nn.Sigmoid(), False, True), (nn.Tanh(), False, True), (nn.Identity(), False, False), (nn.Sigmoid(), True, False)],
)
def test_scores_of_a_critic_that_are_cut_off(last: nn.Module, is_one_signed: bool, is_wrong: bool) -> None:
    """The critic of a Wasserstein GAN has no activation at its end; a mean activation may be a penalty."""
    found = Examination(capture_graph(Critic(last, is_one_signed), rows)).findings()
    assert (
        brief([each for each in found if each.rule == "cut-off-logits"])
        == [("warning", "cut-off-logits", "d.3")] * is_wrong
    )


def test_a_softmax_over_one_entry() -> None:
    """A softmax over a single output is a finding, also without a dimension, and a sigmoid is not."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(y.squeeze(-1), (target > 0).float())

    (found,) = examine(mlp(1, nn.Softmax(-1)), loss, rows, classes)
    assert brief([found]) == [("warning", "one-class", "net.3")]
    assert "dimension 1 of [8, 1], which has one entry: its output is always 1" in found.verdict
    assert examine(mlp(1, nn.Sigmoid()), loss, rows, classes) == []


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


@pytest.mark.parametrize(("last", "is_wrong"), [([nn.Dropout()], True), ([nn.Dropout(0.0)], False), ([], False)])
def test_dropout_of_logits(last: list[nn.Module], is_wrong: bool) -> None:
    """Dropout behind the last layer is a finding with a cause of its own, and one before it is not."""
    found = examine(nn.Sequential(nn.Dropout(), *mlp(3, *last)), F.cross_entropy, rows, classes)
    assert brief(found) == [("warning", "cut-off-logits", "net.4")] * is_wrong


def of_pairs(classes: int, scale: float = 1.0, is_normalized: bool = True) -> Examination:
    """Return the examination of a loss that gets the products of pairs as logits."""

    def loss(y: Tensor, other: Tensor) -> Tensor:
        one, two = (F.normalize(each, dim=-1) if is_normalized else each for each in (y, other))
        return F.cross_entropy(one @ two.T / scale, torch.zeros(len(y), dtype=torch.long))

    return Examination(capture_graph(Step(mlp(7), loss), rows, torch.randn(classes, 7)))


def test_cosines_as_logits() -> None:
    """Cosines without a temperature are a finding with the least loss that they can have."""
    (found,) = of_pairs(8).findings()
    assert found.rule == "cosine-logits"
    assert found.verdict.endswith("of 8 classes: it cannot fall below 0.666, and is 2.08 for a guess")
    for each in (of_pairs(8, scale=0.1), of_pairs(8, is_normalized=False), of_pairs(3)):
        assert each.findings() == []


def of_overlap(*last: nn.Module, low: float | Sequence[float] = -3.0, records: int = 4) -> Examination:
    """Return the examination of a dice loss."""

    def dice(y: Tensor, target: Tensor) -> Tensor:
        return 1 - (2 * (y * target).sum() + 1) / (y.sum() + target.sum() + 1)

    graph = capture_graph(Step(mlp(3, *last), dice), rows, torch.rand(8, 3))
    return examined({"net.2": {"min": low}}, graph=graph, records=records)


def test_an_overlap_of_logits() -> None:
    """A dice loss of the output of a layer that is negative is a finding; one of a sigmoid is not."""
    (found,) = of_overlap().findings()
    assert brief([found]) == [("warning", "overlap-of-logits", "net.2")]
    assert of_overlap(nn.Sigmoid()).findings() == of_overlap(low=0.0).findings() == []


@pytest.mark.parametrize("kind", ["Sigmoid", "Tanh", "Softplus"])
def test_logits_with_a_range(kind: str) -> None:
    """An activation with a range before cross_entropy is a finding."""
    (found,) = examine(mlp(3, getattr(nn, kind)()), F.cross_entropy, rows, classes)
    assert brief([found]) == [("warning", "cut-off-logits", "net.3")]


def own_square(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error without a function of torch."""
    return ((x - y) ** 2).mean()


@pytest.mark.parametrize("loss", [own_square, lambda x, y: (y - x).abs().mean()])
def test_a_loss_of_the_step_itself_of_unequal_shapes(loss: Loss) -> None:
    """The difference of a column and a vector is a finding; equal shapes and an offset for all samples are none."""
    (found,) = examine(mlp(1), loss, rows, torch.randn(8))
    assert brief([found]) == [("warning", "loss-shapes", "")]
    assert "the difference in training_step" in found.verdict
    for net, target in ((mlp(1), torch.randn(8, 1)), (mlp(3), torch.randn(3)), (mlp(1), torch.tensor(0.5))):
        assert examine(net, loss, rows, target) == []


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
    ("scale", "is_wrong"),
    [
        (lambda y: y / 20 / 20, True),
        (lambda y: y.mul(5).float() * 5.0, True),
        (lambda y: y / 20, False),
        (lambda y: y / 20 * 20, False),
        (lambda y: y * 1.0 * 1.0, False),
        (lambda y: (y / 20).tanh() / 20, False),
    ],
)
def test_logits_that_are_scaled_twice(scale: Function, is_wrong: bool) -> None:
    """The same factor twice before cross_entropy is a finding; one factor, or its inverse behind it, is not."""
    found = examine(mlp(3), lambda y, target: F.cross_entropy(scale(y), target), rows, classes)
    assert brief(found) == [("warning", "scaled-twice", "")] * is_wrong


def test_weights_of_samples_behind_a_mean() -> None:
    """Weights of the samples that a mean is multiplied with are a finding; those of each loss, or a number, are not."""

    def weighted(reduction: str) -> Loss:
        return lambda y, t: (F.cross_entropy(y, t, reduction=reduction) * torch.where(t == 1, 9.0, 1.0)).mean()

    (found,) = examine(mlp(3), weighted("mean"), rows, classes)
    assert brief([found]) == [("warning", "loss-shapes", "")]
    assert found.verdict.endswith("which is then multiplied with [8] weights: each sample counts the same")
    assert examine(mlp(3), weighted("none"), rows, classes) == []
    assert examine(mlp(3), lambda y, t: F.cross_entropy(y, t) * t.float().mean(), rows, classes) == []


def by_hand(y: Tensor, t: Tensor) -> Tensor:
    """Return the cross-entropy of probabilities, as Keras writes it out."""
    shares = (y / y.sum(-1, keepdim=True)).clip(1e-7, 1 - 1e-7)
    return -(F.one_hot(t, y.shape[-1]) * shares.log()).sum(-1).mean()


def of_places(y: Tensor, t: Tensor) -> Tensor:
    """Return the same for the numbers of the classes."""
    shares = (y / y.sum(-1, keepdim=True)).clip(1e-7, 1 - 1e-7)
    return F.nll_loss(shares.log(), t, reduction="none").mean()


def binary(y: Tensor, t: Tensor) -> Tensor:
    target = F.one_hot(t, y.shape[-1])
    return -(target * y.log() + (1 - target) * (1 - y).log()).mean()


@pytest.mark.parametrize(
    ("last", "loss", "place"),
    [
        ([nn.Sigmoid()], by_hand, "net.3"),
        ([nn.ReLU()], by_hand, "net.3"),
        ([], of_places, "net.2"),
        ([nn.Sigmoid()], of_places, "net.3"),
        ([nn.Softmax(-1)], of_places, None),
        ([nn.ReLU(), nn.Softmax(-1)], by_hand, "net.3"),
        ([nn.ReLU()], lambda y, t: F.binary_cross_entropy(y.clamp(1e-6, 1 - 1e-6), F.one_hot(t) + 0.0), "net.3"),
        ([], lambda y, t: F.binary_cross_entropy(y.clamp(0, 1)[:, 0], (t > 0) + 0.0), "net.2"),
        ([nn.Softmax(-1)], by_hand, None),
        ([nn.Sigmoid()], binary, None),
        ([nn.Sigmoid()], lambda y, t: F.binary_cross_entropy(y.clamp(1e-6, 1 - 1e-6), F.one_hot(t) + 0.0), None),
    ],
)
def test_probabilities_that_are_none(last: list[nn.Module], loss: Loss, place: str | None) -> None:
    """A loss that gets other numbers than probabilities is a finding, also if it is written out."""
    found = [each for each in examine(mlp(3, *last), loss, rows, classes) if each.rule == "cut-off-logits"]
    assert brief(found) == ([] if place is None else [("warning", "cut-off-logits", place)])


def test_one_output_for_a_cross_entropy_of_classes() -> None:
    """The single output of a sigmoid is always 1 in a cross-entropy of several classes."""
    found = examine(mlp(1, nn.Sigmoid()), lambda y, t: by_hand(y, t * 0), rows, classes)
    assert "one-class" in {each.rule for each in found}


def test_cosines_that_are_multiplied_with_a_temperature() -> None:
    """A factor below 1 leaves the cosines too close to each other; the least loss is that with the factor."""
    (found,) = of_pairs(8, scale=10.0).findings()
    assert found.verdict.endswith(
        "gets cosines × 0.1 as logits of 8 classes: it cannot fall below 1.91, and is 2.08 for a guess"
    )


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


class Pairs(nn.Module):
    """A contrastive loss of the products of all pairs of vectors."""

    def __init__(self, *, has_diagonal: bool, is_one_view: bool = True, is_split: bool = False) -> None:
        super().__init__()
        self.net, self.has_diagonal, self.is_one_view = mlp(4), has_diagonal, is_one_view
        self.is_split = is_split

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.net(x), dim=1)
        if self.is_split:
            z, other = z.chunk(2)
        else:
            other = z if self.is_one_view else F.normalize(self.net(x + 1), dim=1)
        logits = z @ other.T / 0.1
        if not self.has_diagonal:
            logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


@pytest.mark.parametrize(
    ("options", "is_wrong"),
    [
        ({"has_diagonal": True}, True),
        ({"has_diagonal": False}, False),
        ({"has_diagonal": True, "is_one_view": False}, False),
        ({"has_diagonal": True, "is_split": True}, False),
    ],
)
def test_products_of_vectors_with_themselves(options: dict[str, bool], is_wrong: bool) -> None:
    """The diagonal of the products of vectors with themselves must be left out."""
    found = Examination(capture_graph(Pairs(**options), rows)).findings()
    assert [each.rule for each in found].count("cosine-logits") == is_wrong


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


@pytest.mark.parametrize(("is_flat", "is_wrong"), [(False, True), (True, False)])
def test_a_penalty_of_parts_of_a_gradient(is_flat: bool, is_wrong: bool) -> None:
    """The norm of a gradient must be that of a whole sample."""

    def use(net: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        d = d.flatten(1) if is_flat else d
        loss: Tensor = net(x.flatten(1)).mean() + 10 * ((d.norm(2, dim=1) - 1) ** 2).mean()
        return loss

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            loss = use(self.net, x, found)
            loss.backward()
            return loss

    found = Examination(capture_graph(Penalty(), torch.randn(8, 3, 4))).findings()
    assert [each.rule for each in found].count("loss-shapes") == is_wrong


def test_a_gradient_of_a_field() -> None:
    """A distance has a gradient at each point, whose norm is 1."""

    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 7), nn.Softplus(), nn.Linear(7, 1))

        def forward(self, points: Tensor) -> Tensor:
            points = points.clone().requires_grad_()
            distance = self.net(points)
            (d,) = torch.autograd.grad(distance, points, torch.ones_like(distance), create_graph=True)
            loss: Tensor = distance.abs().mean() + 0.1 * ((d.norm(2, dim=-1) - 1) ** 2).mean()
            loss.backward()
            return loss

    found = Examination(capture_graph(Distance(), torch.randn(8, 6, 3))).findings()
    assert [each for each in found if each.rule == "loss-shapes"] == []
