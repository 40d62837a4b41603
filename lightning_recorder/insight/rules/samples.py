"""The rules about the samples of the batches: repeated, shared between ranks or stages, or sorted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.insight.data_facts import EpochFacts
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import DATA, rule


def _found(evidence: Evidence, verdict: str, first: int, last: int, **numbers: float) -> Finding:
    found = evidence.view(evidence.activations, "").found(verdict, None, since=None, others=(), **numbers)
    return replace(found, first_step=first, last_step=last, records=1)


def _of_epoch(evidence: Evidence, epoch: EpochFacts, verdict: str, **numbers: float) -> Finding:
    return _found(evidence, verdict, epoch.first_step, epoch.last_step, **numbers)


def _epochs(evidence: Evidence) -> tuple[EpochFacts, ...]:
    """Return the epochs to examine: none if the trainer repeats batches on purpose."""
    return () if evidence.data.loader.is_overfit else evidence.data.epochs


@rule(
    "same-samples-on-ranks",
    statistic="share of the samples of a rank that another rank has in the same step",
    usual="0, as each rank has a part of the data of its own",
    why="The data are not divided between the ranks: an iterable data set without a share for each, or a sampler "
    "with use_distributed_sampler=False.",
    next="Divide an iterable data set by the rank, with torch.utils.data.distributed or split_dataset_by_node; use "
    "a DistributedSampler for a map-style one.",
    false_alarms="Ranks of one tensor-parallel group, overfit_batches, and fewer than 16 samples do not count.",
    needs=(DATA,),
    explains={"same-samples-by-workers": ("any",), "batch-repeats": ("any",)},
    is_lasting=True,
)
def same_samples_on_ranks(
    evidence: Evidence, *, share: float = 0.9, steps: int = 4, samples: int = 16
) -> Iterator[Finding]:
    """Yield ranks that get the same samples in the same steps."""
    found = evidence.data.ranks
    if found is None or evidence.data.loader.is_overfit or found.shared < share:
        return
    if found.steps >= steps and found.keys >= samples:
        which = "all" if len(found.same) >= found.ranks else "ranks " + ", ".join(map(str, found.same)) + " of"
        verdict = f"{which} {found.ranks} ranks get the same samples in each of {found.steps} compared steps"
        yield _found(evidence, verdict, found.step, found.step, share=found.shared, ranks=found.ranks)


@rule(
    "same-samples-by-workers",
    statistic="share of the samples of an epoch that come from each worker exactly once",
    usual="0, as each worker has a part of an iterable data set of its own",
    why="The iterable data set does not divide its samples between the workers.",
    next="Use torch.utils.data.get_worker_info() in __iter__, and yield every n-th sample.",
    false_alarms="Random draws: each sample would come from each worker a different number of times.",
    needs=(DATA,),
    explains={"batch-repeats": ("any",)},
    is_lasting=True,
)
def same_samples_by_workers(evidence: Evidence, *, share: float = 0.8, samples: int = 16) -> Iterator[Finding]:
    """Yield workers of which each yields all samples."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        if loader.workers > 1 and each.by_workers >= share and each.distinct >= samples:
            verdict = (
                f"each of the {loader.workers} workers yields all samples: {each.by_workers:.0%} of the samples came "
                f"exactly {loader.workers} times in epoch {each.epoch}"
            )
            yield _of_epoch(evidence, each, verdict, share=each.by_workers, workers=loader.workers)
            return


@rule(
    "batch-repeats",
    statistic="number of different batches in an epoch, by the indices or the values of their samples",
    usual="each batch of an epoch has other samples",
    why="A sampler that does not advance, or a loader, a cache or a buffer that returns the same batch again.",
    next="Look at the sampler and at the code that makes a batch. Use overfit_batches to repeat a batch on purpose.",
    false_alarms="overfit_batches, and data sets that have hardly more samples than the batches, do not count. A "
    "loader that is no DataLoader is a note.",
    needs=(DATA,),
    explains={"few-samples": ("any",), "sorted-by-class": ("any",), "constant-input": ("any",)},
    is_lasting=True,
)
def batch_repeats(
    evidence: Evidence,
    *,
    batches: int = 8,
    times: float = 4.0,
    unused: float = 4.0,
    cached: float = 0.5,
    consecutive: float = 0.9,
    in_a_row: int = 20,
) -> Iterator[Finding]:
    """Yield an epoch that has a few batches again and again."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        if each.batches < batches:
            continue
        numbers = {"batches": each.batches, "distinct": each.distinct_batches}
        if each.cached >= cached * each.batches:
            verdict = (
                f"{each.cached} of {each.batches} batches of epoch {each.epoch} have the values of an earlier batch, "
                "although their indices differ"
            )
            following = "Look for a cache or a buffer that the data set or collate_fn reuses."
            yield replace(_of_epoch(evidence, each, verdict, cached=each.cached, **numbers), next=following)
            return
        # A data set with few samples is repeated on purpose.
        has_more = loader.samples is not None and loader.samples >= unused * each.distinct
        if loader.has_rows and has_more and each.distinct_batches * times <= each.batches:
            count = round(each.distinct_batches)
            what = "the same batch" if count == 1 else f"the same {count} batches"
            verdict = (
                f"epoch {each.epoch} has {what} again and again: {each.distinct:.0f} of the {loader.samples} samples "
                f"in {each.batches} batches"
            )
            yield _of_epoch(evidence, each, verdict, **numbers)
            return
        if not loader.has_rows and each.consecutive >= consecutive * (each.batches - 1):
            verdict = f"{each.consecutive + 1} of {each.batches} batches of epoch {each.epoch} have the same samples"
            found = _of_epoch(evidence, each, verdict, consecutive=each.consecutive, **numbers)
            yield found if loader.is_loader and each.batches >= in_a_row else replace(found, severity="note")
            return


@rule(
    "few-samples",
    statistic="number of different samples in an epoch, against that of the data set and of the draws",
    usual="an epoch has each sample once",
    why="A sampler that draws from a few indices only.",
    next="Print some indices of the sampler, and compare them with the length of the data set.",
    false_alarms="Weights, a curriculum or episodes: it is a note unless the same few samples come in the next epoch, "
    "too.",
    needs=(DATA,),
    is_lasting=True,
)
def few_samples(evidence: Evidence, *, unused: float = 20.0, times: float = 10.0) -> Iterator[Finding]:
    """Yield an epoch that has a few samples of its data set alone."""
    loader, epochs = evidence.data.loader, _epochs(evidence)
    for each in epochs:
        if loader.samples is None or not loader.has_rows or not each.is_whole:
            continue
        if each.distinct * unused <= loader.samples and each.distinct * times <= each.samples:
            verdict = (
                f"epoch {each.epoch} has {each.distinct:.0f} of the {loader.samples} samples, each about "
                f"{each.samples / max(1.0, each.distinct):.0f} times"
            )
            found = _of_epoch(evidence, each, verdict, distinct=each.distinct, samples=each.samples)
            # A curriculum or episodes have others in the next epoch, and weights may be zero.
            is_fixed = each.is_same_set and "Weighted" not in loader.sampler
            if is_fixed or each is epochs[-1]:
                yield found if is_fixed else replace(found, severity="note")
                return


@rule(
    "validation-in-training",
    statistic="share of the samples of validation whose values were in a batch of training",
    usual="0",
    why="The data were divided after samples were repeated, or the parts overlap.",
    next="Compare the indices of both parts; divide the data before samples are repeated.",
    false_alarms="The same data in both loaders are a note. Samples with few possible values do not count.",
    needs=(DATA,),
    is_lasting=True,
)
def validation_in_training(
    evidence: Evidence, *, share: float = 0.05, samples: int = 32, distinct: float = 0.99
) -> Iterator[Finding]:
    """Yield samples of validation that are also samples of training."""
    found = evidence.data.validation
    if found is None or evidence.data.loader.is_overfit or found.common < samples:
        return
    measured = found.common / max(1, found.compared)
    # Samples with few possible values, such as three bits, are equal by chance.
    if measured >= share and found.distinct >= distinct * found.samples:
        verdict = f"{measured:.0%} of the samples of validation are also samples of training"
        numbers = {"share": measured, "common": found.common, "compared": found.compared}
        one = _found(evidence, verdict, found.step, found.step, **numbers)
        yield replace(one, severity="note") if found.is_same_data else one


@rule(
    "sorted-by-class",
    statistic="number of samples in an epoch whose class differs from that of the sample before",
    usual="about as many as in a random order",
    why="The data set is sorted by class, and the loader does not shuffle it.",
    next="Use shuffle=True.",
    false_alarms="Batches of one class in a random order, as for metric learning, change more often.",
    needs=(DATA,),
    is_lasting=True,
)
def sorted_by_class(
    evidence: Evidence, *, batches: int = 3, changes: float = 50.0, share: float = 0.05, runs: float = 1.5
) -> Iterator[Finding]:
    """Yield an epoch whose samples come class by class."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        if each.classes < 2 or each.batches < batches or each.random_changes < changes:
            continue
        if 1 <= each.changes <= min(runs * (each.classes - 1), share * each.random_changes):
            verdict = (
                f"the samples are sorted by class: in epoch {each.epoch}, the class changes {each.changes} times in "
                f"{each.samples} samples of {each.classes} classes"
            )
            by = f"; the sampler is {loader.sampler}" if loader.sampler else ""
            yield _of_epoch(evidence, each, verdict + by, changes=each.changes)
            return


@rule(
    "same-augmentation",
    statistic="states of the random number generators in the workers of the loader, after each of their first batches",
    usual="each worker draws other numbers, in each epoch",
    why="Each worker gets a copy of the generator with the same state, and a new copy in each epoch; or worker_init_fn "
    "sets the same seed.",
    next="Draw from torch's generator, which differs by worker and epoch, or seed your own one from "
    "torch.initial_seed() in worker_init_fn.",
    false_alarms="Only generators that draw in each batch count, and only map-style data sets: workers of a stream may "
    "shuffle alike and take a part each.",
    needs=(DATA,),
    is_lasting=True,
)
def same_augmentation(evidence: Evidence) -> Iterator[Finding]:
    """Yield random numbers that are the same in each worker, or in each epoch."""
    found = evidence.data.draws
    if found is None or evidence.data.loader.is_overfit:
        return
    where = [f"all {found.workers} workers"] if found.workers > 1 else []
    where += [f"{found.epochs} epochs in a row"] if found.epochs > 1 else []
    verdict = f"the samples draw the same random numbers in {' and in '.join(where)}, from {found.source}"
    yield _found(evidence, verdict, found.step, found.step, workers=found.workers, epochs=found.epochs)
