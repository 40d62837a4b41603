"""Classes are counted exactly: over calls, batches and ranks, in memory and in files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.bins import CLASSES
from lightning_recorder.functions import FUNCTIONS, ChosenFunctions
from lightning_recorder.records.classes import classes_in
from lightning_recorder.statistics import StatisticsRecorder
from lightning_recorder.taps import Site

LOGITS = torch.eye(5)[torch.tensor([0, 1, 1, 4])]


class Loss(nn.Module):
    """A model that is a loss function of its inputs."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = getattr(F, self.name)(prediction, target, **self.options)
        return loss


def recorder_of(loss: Loss, **options: Any) -> StatisticsRecorder:
    """Return a recorder of the functions of a loss."""
    return StatisticsRecorder({}, functions=ChosenFunctions(loss, FUNCTIONS), strict=True, **options)


def classes(name: str, prediction: Tensor, target: Tensor, **options: Any) -> tuple[Any, Any]:
    """Return the counted classes of the prediction and of the target of a loss."""
    loss = Loss(name, **options)
    with recorder_of(loss) as recorder:
        loss(prediction, target)
    found = recorder.collect()
    sites = [Site(name, f"in.{side}.classes") for side in ("prediction", "target")]
    one, other = (found[site].classes if site in found else None for site in sites)
    return one, other


def test_classes_of_both_sides() -> None:
    """The most probable class of each prediction and the class of each target are counted."""
    assert classes("cross_entropy", LOGITS, torch.tensor([0, 3, 3, 2])) == ({0: 1, 1: 2, 4: 1}, {0: 1, 2: 1, 3: 2})


def test_probabilities_as_targets() -> None:
    """If the targets are probabilities, the most probable class of each is counted."""
    assert classes("cross_entropy", LOGITS, LOGITS.flip(0))[1] == {0: 1, 1: 2, 4: 1}


def test_dimensions_behind_the_classes() -> None:
    """The classes are dimension 1, as for a segmentation."""
    prediction = torch.zeros(2, 3, 4, 4)
    prediction[0, 2] = 1
    assert classes("cross_entropy", prediction, torch.ones(2, 4, 4).long()) == ({0: 16, 2: 16}, {1: 32})


@pytest.mark.parametrize("ignored", [-100, 3])
def test_ignored_targets_are_no_class(ignored: int) -> None:
    """A target to ignore is not counted, whether its number is that of a class or not."""
    target = torch.tensor([ignored, 1, ignored, 2])
    assert classes("cross_entropy", LOGITS, target, ignore_index=ignored)[1] == {1: 1, 2: 1}


@pytest.mark.parametrize(
    ("name", "prediction"),
    [
        ("binary_cross_entropy_with_logits", torch.tensor([[-1.0], [0.5], [2.0]])),
        ("binary_cross_entropy", torch.tensor([[0.1], [0.6], [0.9]])),
    ],
)
def test_two_classes(name: str, prediction: Tensor) -> None:
    """One prediction for each sample is of two classes; several predictions are no classes."""
    assert classes(name, prediction, torch.tensor([[0.0], [1.0], [0.0]])) == ({0: 1, 1: 2}, {0: 2, 1: 1})
    assert classes(name, prediction.T, torch.tensor([[0.0, 1.0, 0.0]])) == (None, None)


@pytest.mark.parametrize("count", [CLASSES, CLASSES + 1])
def test_the_number_of_classes_is_limited(count: int) -> None:
    """1000 classes are counted, the first and the last one, too; more are not."""
    target = torch.tensor([0, count - 1])
    found = classes("cross_entropy", F.one_hot(target, count).float(), target)
    assert found == (({0: 1, CLASSES - 1: 1},) * 2 if count == CLASSES else (None, None))


def test_the_target_stays_as_it_is() -> None:
    """Counting does not write to the targets of the user."""
    target = torch.tensor([0, 1, -100, 4])
    classes("cross_entropy", LOGITS, target)
    assert target.tolist() == [0, 1, -100, 4]


def test_statistics_are_those_of_class_numbers() -> None:
    """The mean, the extrema and the other statistics of such a site are those of the numbers of the classes."""
    loss, target = Loss("cross_entropy"), torch.tensor([0, 3, 3, 2])
    with recorder_of(loss, quantiles=[0.5]) as recorder:
        loss(LOGITS, target)
    found = recorder.collect()[Site("cross_entropy", "in.target.classes")]
    numbers = target.double()
    assert found.dtype is torch.int64
    expected = {"mean": numbers.mean(), "std": numbers.std(correction=0), "rms": numbers.square().mean().sqrt()}
    assert {name: found.scalars[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()})
    assert [found.scalars[name] for name in ("count", "min", "max", "zero_fraction", "nan_count")] == [4, 0, 3, 0.25, 0]


def test_a_sample_counts_all_classes() -> None:
    """The histograms of a recorder may be samples; classes are counted exactly."""
    loss = Loss("cross_entropy")
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(5, (100,), generator=generator)
    with recorder_of(loss, sample=7) as recorder:
        loss(torch.rand(100, 5, generator=generator), target)
    found = recorder.collect()[Site("cross_entropy", "in.target.classes")]
    assert list(found.classes.values()) == target.bincount(minlength=5).tolist()


def test_a_histogram_has_the_classes() -> None:
    """The classes can be read off the histogram that rules get."""
    loss, target = Loss("cross_entropy"), torch.tensor([0, 1, 998, 999, 1, 7])
    with recorder_of(loss) as recorder:
        loss(torch.zeros(6, CLASSES), target)
    found = recorder.collect()[Site("cross_entropy", "in.target.classes")]
    assert classes_in(found.histogram) == found.classes == {0: 1, 1: 2, 7: 1, 998: 1, 999: 1}
