"""Facts about the samples of a run, for the rules about samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_recorder.untrusted import check_fields

__all__ = ["DataFacts", "DrawFacts", "EpochFacts", "EpochOfRanks", "LoaderFacts", "RankFacts", "ValidationFacts"]


@dataclass(frozen=True)
class LoaderFacts:
    """The data loader of the training."""

    sampler: str = ""  # the class name of the sampler, or of a batch sampler of another class; empty for none
    dataset: str = ""  # the class name of the data set
    is_loader: bool = False  # True for a ``DataLoader``
    is_iterable: bool = False  # True for an iterable data set
    workers: int = 0  # the number of worker processes
    samples: int | None = None  # the length of a map-style data set
    # True if the index of each sample is known. Samples are then compared by index, so augmentations do not matter.
    has_rows: bool = False
    is_overfit: bool = False  # True for a trainer with ``overfit_batches``, which repeats batches on purpose
    is_divided: bool = False  # True for a sampler that divides the data set among the ranks
    # True if an epoch on this rank has only some of the samples, because of several ranks or ``limit_train_batches``
    is_limited: bool = False
    values: int = 0  # the number of different values in the inputs of a sample, at most 64; 0 if it is not known
    # the index of an input value that equals the target in each of ``compared`` samples; -1 if there is none
    target_place: int = -1
    compared: int = 0
    weights: int | None = None  # the number of weights of a WeightedRandomSampler


@dataclass(frozen=True)
class EpochFacts:
    """The samples of one epoch on the first rank."""

    epoch: int
    first_step: int
    last_step: int  # the last step that is examined
    batches: int  # the number of batches in the epoch
    samples: int  # the number of samples in these batches
    distinct: float  # the number of different samples
    distinct_batches: float  # the number of batches with different sets of samples
    consecutive: int = 0  # the number of batches with the same samples as the previous batch
    cached: int = 0  # the number of batches with the values of an earlier batch, but other indices
    # the share of samples that each worker loaded exactly once; 0 with fewer than two workers
    by_workers: float = 0.0
    is_whole: bool = False  # True if the epoch ended by itself, and each of its batches was examined
    is_same_set: bool = False  # True if the previous epoch had the same samples
    # the number of classes, if each batch is a pair of inputs and one integer per sample; otherwise 0
    classes: int = 0
    changes: int = 0  # the number of samples whose class differs from the previous sample's class
    random_changes: float = 0.0  # the expected value of ``changes`` for a random order
    contents: float = 0.0  # the number of different samples by value, even if the indices are known
    contents_once: float = 1.0  # the share of ``contents`` that were used exactly once
    # the number of batches in which all samples have different indices but the same inputs. Batches with the inputs of
    # the previous batch do not count.
    equal: int = 0
    overwritten: int = 0  # the number of ``checked`` batches that were overwritten while they were used
    checked: int = 0  # the number of batches that were checked for overwriting
    once: float = 1.0  # the share of samples that were used exactly once
    every: int = 0  # how many times each sample was used, if the number is equal for all samples; otherwise 0
    most: int = 0  # how many times the most frequent sample was used
    # the number of samples up to the first batch with a repeated sample; 0 if none repeats among the first 8,192
    first_repeat: int = 0
    near: float = 0.0  # the share of samples that were in one of the four previous batches, if the indices are unknown
    random_near: float = 0.0  # the expected value of ``near`` for samples drawn at random
    is_same_order: bool = False  # True if both epochs are whole and this one repeats the order of the previous one
    is_ascending: bool = True  # True if the indices ascend or are unknown
    seen: float = 0.0  # the number of different samples in this and all earlier epochs, if all are whole; otherwise 0
    passed: int = 0  # the number of epochs that ``seen`` counts


@dataclass(frozen=True)
class ValidationFacts:
    """The validation samples, compared with the training samples."""

    samples: int  # the number of samples in a validation
    distinct: float  # the number of different samples in it
    compared: int  # the number of validation samples that were searched for in an epoch of training
    common: int  # the number of ``compared`` samples that were found
    step: int  # the step at which the samples were compared
    is_same_data: bool = False  # True if both loaders have the same data set object, or exactly the same samples
    # the number of rows of one data set object that both loaders read. Rows are compared by index, so augmentations do
    # not matter.
    common_rows: int = 0
    rows: int = 0  # the number of rows in the validation data set
    loader: int | None = None  # the number of the validation loader, from 1; None for a single loader

    @property
    def overlap(self) -> float:
        """The share of the validation samples that are also training samples, compared by row or by value."""
        return max(self.common / max(1, self.compared), self.common_rows / max(1, self.rows))


@dataclass(frozen=True)
class RankFacts:
    """The samples of some steps on all ranks."""

    ranks: int  # the number of ranks that should have different samples
    steps: int  # the number of compared steps
    step: int  # the first compared step
    keys: int  # the number of different samples
    shared: float  # the share of samples that another rank has in the same step; the largest over the ranks
    same: tuple[int, ...] = ()  # the ranks that have the same samples as another rank
    # the largest share of common samples whose values are equal, if samples are compared by index; 1 if all of them
    # have the same classes
    equal: float = 1.0


@dataclass(frozen=True)
class EpochOfRanks:
    """The samples of a whole epoch on all ranks."""

    ranks: int  # the number of ranks that should have different samples
    epoch: int
    samples: int  # the number of samples in the epoch on the rank with the fewest
    compared: int  # the number of different samples that are compared
    shared: float  # the share of ``compared`` samples that several ranks have
    distinct: float  # the share of different samples on the rank with the smallest share
    equal: float = 1.0  # the share of sample values that several ranks have


@dataclass(frozen=True)
class DrawFacts:
    """The random numbers that worker processes draw for their samples, such as for augmentations."""

    source: str  # the generator that repeats its numbers, such as ``"dataset.rng"``
    workers: int  # the number of workers that draw the same numbers; 1 if all draw different ones
    epochs: int  # the number of consecutive epochs with the same numbers; 1 if they differ
    step: int  # the last step of the epoch


@dataclass(frozen=True)
class DataFacts:
    """Facts about the samples of a run, the contents of ``data.json``."""

    loader: LoaderFacts = field(default_factory=LoaderFacts)  # the data loader of the training
    epochs: tuple[EpochFacts, ...] = ()  # the first and the latest epochs, in order
    validation: ValidationFacts | None = None  # the samples of validation, if there are any
    ranks: RankFacts | None = None  # the comparison of ranks, if there are several
    draws: DrawFacts | None = None  # random numbers that are equal in several workers or epochs, if there are any
    # the comparison of ranks in the epoch with the most shared samples, if there are several ranks
    rank_epoch: EpochOfRanks | None = None
    others: tuple[DataFacts, ...] = ()  # the facts about each further training loader, in order

    @classmethod
    def from_json(cls, data: Any) -> DataFacts:
        """Return the facts from the output of :func:`dataclasses.asdict`.

        Raises:
            LookupError, TypeError, ValueError: If the data are damaged.
        """
        ranks = data["ranks"]
        found = cls(
            _made(LoaderFacts, data["loader"]),
            tuple(_made(EpochFacts, each) for each in data["epochs"]),
            None if data["validation"] is None else _made(ValidationFacts, data["validation"]),
            None if ranks is None else _made(RankFacts, {**ranks, "same": tuple(ranks["same"])}),
            None if data.get("draws") is None else _made(DrawFacts, data["draws"]),
            None if data.get("rank_epoch") is None else _made(EpochOfRanks, data["rank_epoch"]),
            tuple(cls.from_json(each) for each in data.get("others", ())),
        )
        check_fields(found)
        return found


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    known = {name: value for name, value in data.items() if name in kind.__dataclass_fields__}
    return kind(**known)
