"""Tests of the rules about what a loss gets: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from tests.insight.records import Examination, brief, examined
from tests.insight.rules.test_operations import NAMES, Function, Loss, Step, classes, examine, mlp, rows, trained_step

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


@pytest.mark.parametrize("score", [lambda y: (y * y.roll(1, 0)).sum(1, keepdim=True), lambda y: y[:, :1] - y[:, 1:]])
def test_weighted_logarithms_of_scores_of_pairs(score: Callable[[Tensor], Tensor]) -> None:
    """The weights of pairs, as of words that occur together or of two answers, are no targets of classes."""
    found = examine(mlp(2), lambda y, w: -(w * score(y).sigmoid().log()).mean(), rows, torch.rand(8, 1))
    assert not {"one-class", "cut-off-logits"} & {each.rule for each in found}


def test_cosines_that_are_multiplied_with_a_temperature() -> None:
    """A factor below 1 leaves the cosines too close to each other; the least loss is that with the factor."""
    (found,) = of_pairs(8, scale=10.0).findings()
    assert found.verdict.endswith(
        "gets cosines × 0.1 as logits of 8 classes: it cannot fall below 1.91, and is 2.08 for a guess"
    )


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


@pytest.mark.parametrize(
    ("out", "target", "is_wrong"),
    [(1, torch.ones(8, 1), True), (1, torch.zeros(8).long(), True), (2, torch.ones(8).long(), False)],
)
def test_a_cross_entropy_of_one_class(out: int, target: Tensor, is_wrong: bool) -> None:
    """Logits of a single class have the probability 1, whether the targets are numbers or probabilities."""
    found = [each for each in examine(mlp(out), F.cross_entropy, rows, target) if each.rule == "one-class"]
    assert brief(found) == [("warning", "one-class", "")] * is_wrong
    assert all("gets logits [8, 1] of a single class" in each.verdict for each in found)


class TwoNets(nn.Module):
    """A loss between two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = mlp(3), mlp(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.kl_div(self.one(x).log_softmax(1), self.other(x).softmax(1), reduction="batchmean")


@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, F.cross_entropy, F.mse_loss])
def test_exchanged_arguments_of_a_loss(loss: Loss) -> None:
    """A target in the place of the prediction is a finding, unless the loss is symmetric."""
    target = torch.rand(8, 3)
    is_wrong = loss is not F.mse_loss
    found = trained_step(Step(mlp(3), lambda y, target: loss(target, y)), rows, target)
    assert brief(found) == [("warning", "exchanged-sides", "")] * is_wrong
    assert trained_step(Step(mlp(3), loss), rows, target) == []
    assert "exchanged-sides" not in {each.rule for each in trained_step(TwoNets(), rows)}


@pytest.mark.parametrize(
    ("loss", "is_wrong"),
    [
        (lambda y, t: F.kl_div(t, y.log_softmax(1), reduction="sum"), True),
        (lambda y, t: F.kl_div(t, y.log_softmax(1), reduction="sum", log_target=True), False),
        (lambda y, t: F.kl_div(t.log_softmax(1), y.softmax(1), reduction="sum"), False),
        (lambda y, t: F.cross_entropy(t, y.softmax(1)), False),
        (lambda y, t: F.gaussian_nll_loss(t, y, torch.ones_like(y)), False),  # symmetric
    ],
)
def test_outputs_that_are_targets_of_a_divergence(loss: Loss, is_wrong: bool) -> None:
    """The reverse divergence of a student from the outputs of a teacher in the batch is fine."""
    found = trained_step(Step(mlp(3), loss), rows, torch.rand(8, 3))
    assert [each.rule for each in found].count("exchanged-sides") == is_wrong
