"""The rules about the samples of the batches: repeated, shared between ranks or stages, or sorted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.insight.data_facts import EpochFacts
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule

__all__ = ["RULES"]


def _found(rule: Rule, verdict: str, first: int, last: int, **numbers: float) -> Finding:
    return Finding(
        rule=rule.name,
        severity=rule.severity,
        module="",
        path="",
        first_step=first,
        last_step=last,
        records=1,
        verdict=verdict,
        why=rule.why,
        next=rule.next,
        usual=rule.usual,
        numbers={name: float(value) for name, value in numbers.items()},
    )


def _epochs(evidence: Evidence) -> tuple[EpochFacts, ...]:
    """Return the epochs to examine: none if the trainer repeats batches on purpose."""
    return () if evidence.data.loader.is_overfit else evidence.data.epochs


def _same_on_ranks(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    found, limits = evidence.data.ranks, rule.thresholds
    if found is None or evidence.data.loader.is_overfit or found.shared < limits["share"]:
        return
    if found.steps < limits["steps"] or found.keys < limits["samples"]:
        return
    which = "all" if len(found.same) >= found.ranks else "ranks " + ", ".join(map(str, found.same)) + " of"
    verdict = f"{which} {found.ranks} ranks get the same samples in each of {found.steps} compared steps"
    yield _found(rule, verdict, found.step, found.step, share=found.shared, ranks=found.ranks)


def _by_each_worker(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    loader, limits = evidence.data.loader, rule.thresholds
    for each in _epochs(evidence):
        if loader.workers > 1 and each.by_workers >= limits["share"] and each.distinct >= limits["samples"]:
            verdict = (
                f"each of the {loader.workers} workers yields all samples: {each.by_workers:.0%} of the samples came "
                f"exactly {loader.workers} times in epoch {each.epoch}"
            )
            yield _found(rule, verdict, each.first_step, each.last_step, share=each.by_workers, workers=loader.workers)
            return


def _batch_repeats(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    loader, limits = evidence.data.loader, rule.thresholds
    for each in _epochs(evidence):
        if each.batches < limits["batches"]:
            continue
        numbers = {"batches": each.batches, "distinct": each.distinct_batches}
        first, last = each.first_step, each.last_step
        if each.cached >= limits["cached"] * each.batches:
            verdict = (
                f"{each.cached} of {each.batches} batches of epoch {each.epoch} have the values of an earlier batch, "
                "although their indices differ"
            )
            following = "Look for a cache or a buffer that the data set or collate_fn reuses."
            yield replace(_found(rule, verdict, first, last, cached=each.cached, **numbers), next=following)
            return
        # A data set with few samples is repeated on purpose.
        has_more = loader.samples is not None and loader.samples >= limits["unused"] * each.distinct
        if loader.has_rows and has_more and each.distinct_batches * limits["times"] <= each.batches:
            count = round(each.distinct_batches)
            what = "the same batch" if count == 1 else f"the same {count} batches"
            verdict = (
                f"epoch {each.epoch} has {what} again and again: {each.distinct:.0f} of the {loader.samples} samples "
                f"in {each.batches} batches"
            )
            yield _found(rule, verdict, first, last, **numbers)
            return
        if not loader.has_rows and each.consecutive >= limits["consecutive"] * (each.batches - 1):
            verdict = f"{each.consecutive + 1} of {each.batches} batches of epoch {each.epoch} have the same samples"
            found = _found(rule, verdict, first, last, consecutive=each.consecutive, **numbers)
            yield found if loader.is_loader and each.batches >= limits["in a row"] else replace(found, severity="note")
            return


def _few_samples(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    loader, limits = evidence.data.loader, rule.thresholds
    for each in _epochs(evidence):
        if loader.samples is None or not loader.has_rows or not each.is_whole:
            continue
        is_few = each.distinct * limits["unused"] <= loader.samples and each.distinct * limits["times"] <= each.samples
        if is_few:
            verdict = (
                f"epoch {each.epoch} has {each.distinct:.0f} of the {loader.samples} samples, each about "
                f"{each.samples / max(1.0, each.distinct):.0f} times"
            )
            found = _found(rule, verdict, each.first_step, each.last_step, distinct=each.distinct, samples=each.samples)
            # A curriculum or episodes have others in the next epoch, and weights may be zero.
            is_fixed = each.is_same_set and "Weighted" not in loader.sampler
            if is_fixed or each is _epochs(evidence)[-1]:
                yield found if is_fixed else replace(found, severity="note")
                return


def _validation_in_training(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    found, limits = evidence.data.validation, rule.thresholds
    if found is None or evidence.data.loader.is_overfit or found.common < limits["samples"]:
        return
    share = found.common / max(1, found.compared)
    # Samples with few possible values, such as three bits, are equal by chance.
    if share < limits["share"] or found.distinct < limits["distinct"] * found.samples:
        return
    verdict = f"{share:.0%} of the samples of validation are also samples of training"
    one = _found(rule, verdict, found.step, found.step, share=share, common=found.common, compared=found.compared)
    yield replace(one, severity="note") if found.is_same_data else one


def _sorted(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    loader, limits = evidence.data.loader, rule.thresholds
    for each in _epochs(evidence):
        if each.classes < 2 or each.batches < limits["batches"] or each.random_changes < limits["changes"]:
            continue
        is_grouped = each.changes <= limits["runs"] * (each.classes - 1)
        if is_grouped and each.changes >= 1 and each.changes <= limits["share"] * each.random_changes:
            verdict = (
                f"the samples are sorted by class: in epoch {each.epoch}, the class changes {each.changes} times in "
                f"{each.samples} samples of {each.classes} classes"
            )
            by = f"; the sampler is {loader.sampler}" if loader.sampler else ""
            yield _found(rule, verdict + by, each.first_step, each.last_step, changes=each.changes)
            return


RULES = (
    Rule(
        name="same-samples-on-ranks",
        severity="warning",
        statistic="share of the samples of a rank that another rank has in the same step",
        thresholds={"share": 0.9, "steps": 4, "samples": 16},
        persistence=0,
        usual="0, as each rank has a part of the data of its own",
        why="The data are not divided between the ranks: an iterable data set without a share for each, or a sampler "
        "with use_distributed_sampler=False.",
        next="Divide an iterable data set by the rank, with torch.utils.data.distributed or split_dataset_by_node; use "
        "a DistributedSampler for a map-style one.",
        false_alarms="Ranks of one tensor-parallel group, overfit_batches, and fewer than 16 samples do not count.",
        examine=_same_on_ranks,
        explains={"same-samples-by-workers": ("any",), "batch-repeats": ("any",)},
        is_lasting=True,
    ),
    Rule(
        name="same-samples-by-workers",
        severity="warning",
        statistic="share of the samples of an epoch that come from each worker exactly once",
        thresholds={"share": 0.8, "samples": 16},
        persistence=0,
        usual="0, as each worker has a part of an iterable data set of its own",
        why="The iterable data set does not divide its samples between the workers.",
        next="Use torch.utils.data.get_worker_info() in __iter__, and yield every n-th sample.",
        false_alarms="Random draws: each sample would come from each worker a different number of times.",
        examine=_by_each_worker,
        explains={"batch-repeats": ("any",)},
        is_lasting=True,
    ),
    Rule(
        name="batch-repeats",
        severity="warning",
        statistic="number of different batches in an epoch, by the indices or the values of their samples",
        thresholds={"batches": 8, "times": 4, "unused": 4, "cached": 0.5, "consecutive": 0.9, "in a row": 20},
        persistence=0,
        usual="each batch of an epoch has other samples",
        why="A sampler that does not advance, or a loader, a cache or a buffer that returns the same batch again.",
        next="Look at the sampler and at the code that makes a batch. Use overfit_batches to repeat a batch on "
        "purpose.",
        false_alarms="overfit_batches, and data sets that have hardly more samples than the batches, do not count. A "
        "loader that is no DataLoader is a note.",
        examine=_batch_repeats,
        explains={"few-samples": ("any",), "sorted-by-class": ("any",), "constant-input": ("any",)},
        is_lasting=True,
    ),
    Rule(
        name="few-samples",
        severity="warning",
        statistic="number of different samples in an epoch, against that of the data set and of the draws",
        thresholds={"unused": 20, "times": 10},
        persistence=0,
        usual="an epoch has each sample once",
        why="A sampler that draws from a few indices only.",
        next="Print some indices of the sampler, and compare them with the length of the data set.",
        false_alarms="Weights, a curriculum or episodes: it is a note unless the same few samples come in the next "
        "epoch, too.",
        examine=_few_samples,
        is_lasting=True,
    ),
    Rule(
        name="validation-in-training",
        severity="warning",
        statistic="share of the samples of validation whose values were in a batch of training",
        thresholds={"share": 0.05, "samples": 32, "distinct": 0.99},
        persistence=0,
        usual="0",
        why="The data were divided after samples were repeated, or the parts overlap.",
        next="Compare the indices of both parts; divide the data before samples are repeated.",
        false_alarms="The same data in both loaders are a note. Samples with few possible values do not count.",
        examine=_validation_in_training,
        is_lasting=True,
    ),
    Rule(
        name="sorted-by-class",
        severity="warning",
        statistic="number of samples in an epoch whose class differs from that of the sample before",
        thresholds={"batches": 3, "changes": 50.0, "share": 0.05, "runs": 1.5},
        persistence=0,
        usual="about as many as in a random order",
        why="The data set is sorted by class, and the loader does not shuffle it.",
        next="Use shuffle=True.",
        false_alarms="Batches of one class in a random order, as for metric learning, change more often.",
        examine=_sorted,
        is_lasting=True,
    ),
)
