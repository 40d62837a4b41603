"""What is known about the samples of a run, for the rules about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_recorder.untrusted import check_fields

__all__ = ["DataFacts", "DrawFacts", "EpochFacts", "LoaderFacts", "RankFacts", "ValidationFacts"]


@dataclass(frozen=True)
class LoaderFacts:
    """The data loader of the training.

    Args:
        sampler: The class of the sampler, or of the batch sampler if it is no ``BatchSampler``; empty for none.
        dataset: The class of the data set.
        is_loader: True for a ``DataLoader``.
        is_iterable: True for an iterable data set.
        workers: The number of worker processes.
        samples: The length of a map-style data set.
        has_rows: True if the index of each sample is known. It is then the identity of a sample, whatever an
            augmentation makes of it.
        is_overfit: True for a trainer with ``overfit_batches``, which repeats batches on purpose.
    """

    sampler: str = ""
    dataset: str = ""
    is_loader: bool = False
    is_iterable: bool = False
    workers: int = 0
    samples: int | None = None
    has_rows: bool = False
    is_overfit: bool = False


@dataclass(frozen=True)
class EpochFacts:
    """The samples of one epoch on the first rank.

    Args:
        epoch: The epoch.
        first_step: Its first step.
        last_step: The last step that is examined.
        batches: The number of batches.
        samples: The number of samples in them.
        distinct: The number of different samples.
        distinct_batches: The number of batches with different sets of samples.
        consecutive: The number of batches with the same samples as the one before.
        cached: The number of batches with the values of an earlier one and other indices.
        by_workers: The share of samples that each worker has given exactly once; 0 with less than two workers.
        is_whole: True if the epoch ended by itself, and each of its batches was examined.
        is_same_set: True if its samples are those of the epoch before.
        classes: The number of classes, if the batches are pairs with one whole number for each sample; otherwise 0.
        changes: The number of samples whose class differs from that of the sample before.
        random_changes: The same if the samples came in a random order.
    """

    epoch: int
    first_step: int
    last_step: int
    batches: int
    samples: int
    distinct: float
    distinct_batches: float
    consecutive: int = 0
    cached: int = 0
    by_workers: float = 0.0
    is_whole: bool = False
    is_same_set: bool = False
    classes: int = 0
    changes: int = 0
    random_changes: float = 0.0


@dataclass(frozen=True)
class ValidationFacts:
    """The samples of validation, compared with those of training.

    Args:
        samples: The number of samples of a validation.
        distinct: The number of different ones.
        compared: The number of samples that were looked for in an epoch of training.
        common: The number of these that were found.
        step: The step at which they were compared.
        is_same_data: True if both loaders have the same data set object, or exactly the same samples.
    """

    samples: int
    distinct: float
    compared: int
    common: int
    step: int
    is_same_data: bool = False


@dataclass(frozen=True)
class RankFacts:
    """The samples of some steps on all ranks.

    Args:
        ranks: The number of ranks that should have different samples.
        steps: The number of compared steps.
        step: The first compared step.
        keys: The number of different samples.
        shared: The share of samples that another rank has in the same step, on the rank with the largest share.
        same: The ranks that have the same samples as another one.
    """

    ranks: int
    steps: int
    step: int
    keys: int
    shared: float
    same: tuple[int, ...] = ()


@dataclass(frozen=True)
class DrawFacts:
    """The random numbers that workers draw for their samples.

    Args:
        source: The generator of which they draw the same, such as ``"dataset.rng"``.
        workers: The number of workers that draw the same; 1 if they do not.
        epochs: The number of epochs in a row that draw the same; 1 if they do not.
        step: The last step of the epoch.
    """

    source: str
    workers: int
    epochs: int
    step: int


@dataclass(frozen=True)
class DataFacts:
    """What is known about the samples of a run, the contents of ``data.json``.

    Args:
        loader: The data loader of the training.
        epochs: The first and the latest epochs, in order.
        validation: The samples of validation, if there are any.
        ranks: The comparison of ranks, if there are several.
        draws: Random numbers that are equal in several workers or epochs, if there are any.
    """

    loader: LoaderFacts = field(default_factory=LoaderFacts)
    epochs: tuple[EpochFacts, ...] = ()
    validation: ValidationFacts | None = None
    ranks: RankFacts | None = None
    draws: DrawFacts | None = None

    @classmethod
    def from_json(cls, data: Any) -> DataFacts:
        """Return the facts for the output of :func:`dataclasses.asdict`.

        Raises:
            LookupError, TypeError, ValueError: If they are damaged.
        """
        ranks = data["ranks"]
        found = cls(
            _made(LoaderFacts, data["loader"]),
            tuple(_made(EpochFacts, each) for each in data["epochs"]),
            None if data["validation"] is None else _made(ValidationFacts, data["validation"]),
            None if ranks is None else _made(RankFacts, {**ranks, "same": tuple(ranks["same"])}),
            None if data.get("draws") is None else _made(DrawFacts, data["draws"]),
        )
        check_fields(found)
        return found


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    known = {name: value for name, value in data.items() if name in kind.__dataclass_fields__}
    return kind(**known)
