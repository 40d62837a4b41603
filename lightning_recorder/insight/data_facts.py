"""Facts about the samples of a run, for the rules about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_recorder.untrusted import check_fields

__all__ = ["DataFacts", "DrawFacts", "EpochFacts", "EpochOfRanks", "LoaderFacts", "RankFacts", "ValidationFacts"]


@dataclass(frozen=True)
class LoaderFacts:
    """The data loader of the training."""

    sampler: str = ""  # the class of the sampler, or of the batch sampler if it is no ``BatchSampler``; empty for none
    dataset: str = ""  # the class of the data set
    is_loader: bool = False  # True for a ``DataLoader``
    is_iterable: bool = False  # True for an iterable data set
    workers: int = 0  # the number of worker processes
    samples: int | None = None  # the length of a map-style data set
    # True if the index of each sample is known. It is then the identity of a sample, whatever an augmentation makes of
    # it.
    has_rows: bool = False
    is_overfit: bool = False  # True for a trainer with ``overfit_batches``, which repeats batches on purpose
    is_divided: bool = False  # True for a sampler that gives each rank a part of the data set
    # True if an epoch of this rank has a part of the samples only, because there are several ranks or because of
    # ``limit_train_batches``
    is_limited: bool = False
    values: int = 0  # the number of different values in the inputs of a sample, at most 64; 0 if it is not known
    # the place of a value of the inputs that is the target, in each of ``compared`` samples; -1 if there is none
    target_place: int = -1
    compared: int = 0


@dataclass(frozen=True)
class EpochFacts:
    """The samples of one epoch on the first rank."""

    epoch: int
    first_step: int
    last_step: int  # the last step that is examined
    batches: int  # the number of batches
    samples: int  # the number of samples in them
    distinct: float  # the number of different samples
    distinct_batches: float  # the number of batches with different sets of samples
    consecutive: int = 0  # the number of batches with the same samples as the one before
    cached: int = 0  # the number of batches with the values of an earlier one and other indices
    # the share of samples that each worker has given exactly once; 0 with less than two workers
    by_workers: float = 0.0
    is_whole: bool = False  # True if the epoch ended by itself, and each of its batches was examined
    is_same_set: bool = False  # True if its samples are those of the epoch before
    # the number of classes, if the batches are pairs with one whole number for each sample; otherwise 0
    classes: int = 0
    changes: int = 0  # the number of samples whose class differs from that of the sample before
    random_changes: float = 0.0  # the same if the samples came in a random order
    contents: float = 0.0  # the number of samples with different values, also if the identity of a sample is its index
    contents_once: float = 1.0  # the share of them that came once
    # the number of batches whose samples have different indices and the same inputs, if these are others than in the
    # batch before
    equal: int = 0
    overwritten: int = 0  # the number of batches that were written to while they were used, among ``checked`` ones
    checked: int = 0  # the number of batches that were looked at for it
    once: float = 1.0  # the share of samples that came once
    every: int = 0  # the number of times that each sample came, if it is the same for all; otherwise 0
    most: int = 0  # the number of times that the most frequent sample came
    # the number of samples up to the batch in which one came again; 0 if none did, or among the first 8,192 samples
    first_repeat: int = 0
    near: float = 0.0  # the share of samples that were in one of the four batches before, if the indices are not known
    random_near: float = 0.0  # the same if the samples were drawn at random
    is_same_order: bool = False  # True if the samples came in the order of the epoch before, and both epochs are whole
    is_ascending: bool = True  # True if the indices ascend, or are not known
    seen: float = 0.0  # the number of different samples in this and all earlier epochs, if all are whole; otherwise 0
    passed: int = 0  # the number of these epochs


@dataclass(frozen=True)
class ValidationFacts:
    """The samples of validation, compared with those of training."""

    samples: int  # the number of samples of a validation
    distinct: float  # the number of different ones
    compared: int  # the number of samples that were looked for in an epoch of training
    common: int  # the number of these that were found
    step: int  # the step at which they were compared
    is_same_data: bool = False  # True if both loaders have the same data set object, or exactly the same samples
    # the number of rows of one data set object that are in the data sets of both loaders, whatever an augmentation
    # makes of them
    common_rows: int = 0
    rows: int = 0  # the number of rows in that of validation
    loader: int | None = None  # the number of the loader, from 1; None with a single one

    @property
    def overlap(self) -> float:
        """The share of the samples that are also samples of training, by their rows or their values."""
        return max(self.common / max(1, self.compared), self.common_rows / max(1, self.rows))


@dataclass(frozen=True)
class RankFacts:
    """The samples of some steps on all ranks."""

    ranks: int  # the number of ranks that should have different samples
    steps: int  # the number of compared steps
    step: int  # the first compared step
    keys: int  # the number of different samples
    shared: float  # the share of samples that another rank has in the same step, on the rank with the largest share
    same: tuple[int, ...] = ()  # the ranks that have the same samples as another one
    # the largest share of common samples whose values are equal, if the identity of a sample is its index; 1 if all of
    # them have the same classes
    equal: float = 1.0


@dataclass(frozen=True)
class EpochOfRanks:
    """The samples of a whole epoch on all ranks."""

    ranks: int  # the number of ranks that should have different samples
    epoch: int
    samples: int  # the smallest number of samples that a rank has in it
    compared: int  # the number of different samples that are compared
    shared: float  # the share of these that several ranks have
    distinct: float  # the smallest share of different samples among those of a rank
    equal: float = 1.0  # the share of the values of samples that several ranks have


@dataclass(frozen=True)
class DrawFacts:
    """The random numbers that workers draw for their samples."""

    source: str  # the generator of which they draw the same, such as ``"dataset.rng"``
    workers: int  # the number of workers that draw the same; 1 if they do not
    epochs: int  # the number of epochs in a row that draw the same; 1 if they do not
    step: int  # the last step of the epoch


@dataclass(frozen=True)
class DataFacts:
    """Facts about the samples of a run, the contents of ``data.json``."""

    loader: LoaderFacts = field(default_factory=LoaderFacts)  # the data loader of the training
    epochs: tuple[EpochFacts, ...] = ()  # the first and the latest epochs, in order
    validation: ValidationFacts | None = None  # the samples of validation, if there are any
    ranks: RankFacts | None = None  # the comparison of ranks, if there are several
    draws: DrawFacts | None = None  # random numbers that are equal in several workers or epochs, if there are any
    # the comparison of ranks in the epoch whose samples they share most, if there are several ranks
    rank_epoch: EpochOfRanks | None = None
    others: tuple[DataFacts, ...] = ()  # the same for each further loader of the training, in order

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
            None if data.get("rank_epoch") is None else _made(EpochOfRanks, data["rank_epoch"]),
            tuple(cls.from_json(each) for each in data.get("others", ())),
        )
        check_fields(found)
        return found


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    known = {name: value for name, value in data.items() if name in kind.__dataclass_fields__}
    return kind(**known)
