"""What is known about the samples of a run, for the rules about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_recorder.untrusted import check_fields

__all__ = ["DataFacts", "DrawFacts", "EpochFacts", "EpochOfRanks", "LoaderFacts", "RankFacts", "ValidationFacts"]


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
        is_divided: True for a sampler that gives each rank a part of the data set.
        is_limited: True if an epoch of this rank has a part of the samples only, because there are several ranks or
            because of ``limit_train_batches``.
        values: The number of different values in the inputs of a sample, at most 64; 0 if it is not known.
    """

    sampler: str = ""
    dataset: str = ""
    is_loader: bool = False
    is_iterable: bool = False
    workers: int = 0
    samples: int | None = None
    has_rows: bool = False
    is_overfit: bool = False
    is_divided: bool = False
    is_limited: bool = False
    values: int = 0


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
        contents: The number of samples with different values, also if the identity of a sample is its index.
        equal: The number of batches whose samples have different indices and the same inputs, if these are others than
            in the batch before.
        overwritten: The number of batches that were written to while they were used, among ``checked`` ones.
        checked: The number of batches that were looked at for it.
        once: The share of samples that came once.
        every: The number of times that each sample came, if it is the same for all; otherwise 0.
        most: The number of times that the most frequent sample came.
        first_repeat: The number of samples up to the batch in which one came again; 0 if none did, or among the first
            8,192 samples.
        near: The share of samples that were in one of the four batches before, if the indices are not known.
        random_near: The same if the samples were drawn at random.
        is_same_order: True if the samples came in the order of the epoch before, and both epochs are whole.
        is_ascending: True if the indices ascend, or are not known.
        seen: The number of different samples in this and all earlier epochs, if all are whole; otherwise 0.
        passed: The number of these epochs.
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
    contents: float = 0.0
    equal: int = 0
    overwritten: int = 0
    checked: int = 0
    once: float = 1.0
    every: int = 0
    most: int = 0
    first_repeat: int = 0
    near: float = 0.0
    random_near: float = 0.0
    is_same_order: bool = False
    is_ascending: bool = True
    seen: float = 0.0
    passed: int = 0


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
        common_rows: The number of rows of one data set object that are in the data sets of both loaders, whatever an
            augmentation makes of them.
        rows: The number of rows in that of validation.
    """

    samples: int
    distinct: float
    compared: int
    common: int
    step: int
    is_same_data: bool = False
    common_rows: int = 0
    rows: int = 0


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
class EpochOfRanks:
    """The samples of a whole epoch on all ranks.

    Args:
        ranks: The number of ranks that should have different samples.
        epoch: The epoch.
        samples: The smallest number of samples that a rank has in it.
        compared: The number of different samples that are compared.
        shared: The share of these that several ranks have.
        distinct: The smallest share of different samples among those of a rank.
    """

    ranks: int
    epoch: int
    samples: int
    compared: int
    shared: float
    distinct: float


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
        rank_epoch: The comparison of ranks in the epoch whose samples they share most, if there are several ranks.
        others: The same for each further loader of the training, in order.
    """

    loader: LoaderFacts = field(default_factory=LoaderFacts)
    epochs: tuple[EpochFacts, ...] = ()
    validation: ValidationFacts | None = None
    ranks: RankFacts | None = None
    draws: DrawFacts | None = None
    rank_epoch: EpochOfRanks | None = None
    others: tuple[DataFacts, ...] = ()

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
