"""The two sides of a loss are recorded: the prediction, the target, and the share of ignored targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.functions import FUNCTIONS, ChosenFunctions, FunctionOutputTap
from lightning_recorder.functions.losses import share_of_ends, share_of_next, some_of
from lightning_recorder.graph import GraphCapture
from lightning_recorder.reductions import ChannelMoments
from lightning_recorder.statistics import StatisticsRecorder
from lightning_recorder.taps import Site

SCORES = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [2.0, 2.0, 1.0]])
CLASSES = torch.tensor([2, -100, 0])


class Criterion(nn.Module):
    """A model with a loss module and loss functions."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.criterion(x, CLASSES.clamp(min=0))
        return loss + F.mse_loss(input=x, target=2 * x) + F.cross_entropy(x, CLASSES, reduction="none").sum()


def recorded(net: nn.Module) -> dict[Site, Tensor]:
    """Return the recorded tensors of one call by site."""
    found = {}

    def receive(site: Site, tensor: Tensor) -> None:
        found[site] = tensor.clone()

    with FunctionOutputTap(ChosenFunctions(net, FUNCTIONS), receive, strict=True):
        net(SCORES)
    return found


def test_sides_of_functions_and_modules() -> None:
    """A loss function has its own name, a loss module that of the module; classes and targets to ignore are counted."""
    found = recorded(Criterion())
    sides = {f"{name} {path}": tensor for (name, path), tensor in found.items() if path != "out"}
    assert list(sides) == [
        "criterion in.prediction",
        "criterion in.target",
        "criterion in.target.ignored",
        "criterion in.prediction.classes",
        "criterion in.target.classes",
        "mse_loss in.prediction",
        "mse_loss in.target",
        "cross_entropy in.prediction",
        "cross_entropy in.target",
        "cross_entropy in.target.ignored",
        "cross_entropy in.prediction.classes",
        "cross_entropy in.target.classes",
    ]
    assert sides["criterion in.target.ignored"].tolist() == [False, True, True]
    assert sides["cross_entropy in.target.ignored"].tolist() == [False, True, False]
    assert torch.equal(sides["mse_loss in.target"], 2 * SCORES)
    assert [site.name for site in found if site.path == "out"] == ["mse_loss", "cross_entropy"]


def test_the_graph_has_no_operation_of_the_tap() -> None:
    """Looking for targets to ignore leaves no trace in a graph that is captured in the same step."""
    net = Criterion()

    def names(*, taps: bool) -> list[Any]:
        with GraphCapture(net, SCORES) as capture:
            recorded(net) if taps else net(SCORES)
        return [node.name for node in capture.graph().nodes]

    assert names(taps=True) == names(taps=False)


@pytest.mark.parametrize(
    ("name", "more"),
    [("cosine_embedding_loss", [Site("cosine_embedding_loss", "in.target")]), ("triplet_margin_loss", [])],
)
def test_losses_without_two_sides(name: str, more: list[Site]) -> None:
    """A loss that compares predictions with each other has an output, and the labels of pairs if it takes some."""

    class Compared(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return getattr(F, name)(x, x + 1, torch.ones(3) if name.startswith("cosine") else x - 1)

    assert set(recorded(Compared())) == {Site(name, "out"), *more}


def test_large_sides_are_cut() -> None:
    """The first samples of a large prediction are recorded, about a million values."""
    assert some_of(torch.zeros(4, 1 << 19)).shape == (2, 1 << 19)
    assert some_of(torch.zeros(2, 1 << 21)).shape == (1, 1 << 21)
    assert some_of(torch.zeros(3, 5)).shape == (3, 5)


def test_extra_reductions_leave_out_losses() -> None:
    """A reduction that needs channels is not applied to a loss, so that it gives no warning."""
    net = Criterion()
    chosen = ChosenFunctions(net, FUNCTIONS)
    with StatisticsRecorder({"head": net.head}, extra=ChannelMoments(), functions=chosen, strict=True) as recorder:
        net.head(SCORES).relu()
        net(SCORES)
    found = recorder.collect()
    assert "channel_mean" in found[Site("relu", "out")].tensors
    assert "channel_mean" not in found[Site("cross_entropy", "in.prediction")].tensors
    assert found[Site("cross_entropy", "in.target.ignored")].scalars["mean"] == pytest.approx(1 / 3)


def test_the_token_after_the_next_one() -> None:
    """Targets that are shifted twice are those two positions ahead; equal neighbors do not count."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    twice = F.pad(tokens[:, 2:], (0, 2), value=-100)
    shares = [share_of_next(each, tokens, ahead=2) for each in (twice, twice[:, :-1], tokens)]
    assert [float(each) for each in shares if each is not None] == [1.0, 1.0, 0.0]
    assert share_of_next(twice[:, :3], tokens, ahead=2) is None


@pytest.mark.parametrize(
    ("labels", "lengths", "blank", "share"),
    [
        (torch.tensor([[1, 2, 0], [2, 1, 1]]), torch.tensor([2, 3]), 0, 0.0),  # padding
        (torch.tensor([[1, 0, 0], [2, 1, 1]]), torch.tensor([2, 3]), 0, 1 / 6),
        (torch.tensor([[1, 2, 0], [2, 1, 1]]), (2, 3), 0, 0.0),
        (torch.tensor([1, 0, 2, 1, 1]), torch.tensor([2, 3]), 0, 0.2),
        (torch.tensor([1, 0, 2, 1, 1]), torch.tensor([2, 3]), 3, 0.0),
    ],
)
def test_blanks_among_the_labels(labels: Tensor, lengths: Any, blank: int, share: float) -> None:
    """The share of labels of ctc_loss that are the blank does not count the padding behind them."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.CTCLoss(blank)

        def forward(self, x: Tensor) -> Tensor:
            sizes = (torch.tensor([6, 6]), lengths) if isinstance(lengths, Tensor) else ((6, 6), lengths)
            loss: Tensor = self.criterion(x.log_softmax(-1), labels, *sizes)
            return loss

    found: dict[Site, Tensor] = {}

    def receive(site: Site, tensor: Tensor) -> None:
        found[site] = tensor

    net = Step()
    with FunctionOutputTap(ChosenFunctions(net, FUNCTIONS), receive):
        net(torch.randn(6, 2, 4))
    (blanks,) = [tensor for site, tensor in found.items() if site.path == "in.target.blank"]
    assert float(blanks.float().mean()) == pytest.approx(share)


class Weighted(nn.Module):
    """A model of weighted losses of three classes, or of two."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)


THREE, ONE = torch.tensor([2.0, 0.5, 1.0]), torch.tensor(3.0)
HALF = torch.tensor([1.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("loss", "weights", "of_targets"),
    [
        (lambda x: F.cross_entropy(x, CLASSES, THREE), THREE, [1.0, 0.0, 2.0]),
        (lambda x: nn.CrossEntropyLoss(THREE, ignore_index=0)(x, CLASSES.clamp(min=0)), THREE, [1.0, 0.0, 0.0]),
        (lambda x: F.nll_loss(x, CLASSES, weight=THREE), THREE, [1.0, 0.0, 2.0]),
        (lambda x: F.binary_cross_entropy_with_logits(x[:, 0], HALF, pos_weight=ONE), [1.0, 3.0], [3.0, 1.0, 2.0]),
        (lambda x: nn.BCEWithLogitsLoss(pos_weight=ONE[None])(x[:, :1], HALF[:, None]), [1.0, 3.0], [[3], [1], [2]]),
    ],
)
def test_weights_of_classes(loss: Any, weights: Any, of_targets: list[Any]) -> None:
    """The weights of a loss are recorded for the classes and for the targets, which is 0 for one to ignore."""
    found = {path: tensor for (_, path), tensor in recorded(Weighted(loss)).items()}
    assert torch.equal(found["in.target.weights"], torch.as_tensor(weights))
    assert torch.equal(found["in.target.weight"], torch.tensor(of_targets, dtype=torch.float32))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, CLASSES),
        lambda x: F.cross_entropy(x, x.softmax(1), THREE),  # a target of probabilities
        lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=THREE),  # one for each output
        lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), x.abs()),  # of single values
        lambda x: F.multi_margin_loss(x, CLASSES.clamp(min=0), weight=THREE),
    ],
)
def test_other_weights_are_not_recorded(loss: Any) -> None:
    """Weights of single values, of several outputs and of probabilities are none of classes."""
    assert not [path for _, path in recorded(Weighted(loss)) if "weight" in path]


@pytest.mark.parametrize(
    ("tokens", "targets", "share"),
    [
        ([[5, 6, 1, 1], [7, 8, 9, 1]], [[6, 1, -100, -100], [8, 9, 1, -100]], 1.0),
        ([[5, 6, 1, 1], [7, 8, 9, 1]], [[6, -100, -100, -100], [8, 9, 1, -100]], 0.5),
        ([[5, 6, 1, 1], [7, 8, 9, 1]], [[6, -100, -100], [8, 9, -100]], 0.0),
        ([[1, 1, 5, 1], [1, 7, 8, 1]], [[-100, 5, 1], [7, 8, 1]], 1.0),  # padding or a start before the text
        ([[1, 1, 5, 6], [1, 7, 8, 1]], [[-100, 5, 6], [7, 8, -100]], -1.0),  # a text that does not end
        ([[5, 1, 6, 1], [7, 1, 8, 1]], [[1, 6, -100], [1, 8, -100]], 1.0),  # the first of two packed texts
    ],
)
def test_ends_among_the_targets(tokens: list[list[int]], targets: list[list[int]], share: float) -> None:
    """The first end token behind a text counts, with or without a target for the last token."""
    found = share_of_ends(torch.tensor(targets), torch.tensor(tokens), 1)
    assert found is not None
    assert float(found) == share
    assert share_of_ends(torch.zeros(5), torch.tensor(tokens), 1) is None
