"""The rules about the samples of the batches: repeated, shared between ranks or stages, or sorted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.insight.data_facts import EpochFacts
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import found_in, listed, step_of
from lightning_recorder.insight.rule import DATA, GRAPH, rule


def _found(evidence: Evidence, verdict: str, first: int, last: int, **numbers: float) -> Finding:
    found = evidence.view(evidence.activations, "").found(verdict, None, since=None, others=(), parts=(), **numbers)
    return replace(found, first_step=first, last_step=last, records=1)


def _of_epoch(evidence: Evidence, epoch: EpochFacts, verdict: str, **numbers: float) -> Finding:
    return _found(evidence, verdict, epoch.first_step, epoch.last_step, **numbers)


def _epochs(evidence: Evidence) -> tuple[EpochFacts, ...]:
    """Return the epochs to examine: none if the trainer repeats batches on purpose."""
    return () if evidence.data.loader.is_overfit else evidence.data.epochs


_NEXT_STREAM = (
    "Shuffle the shards with the same seed on all ranks, and divide them by the rank and then by the worker, such as "
    "with nodesplitter=wds.split_by_node or split_dataset_by_node."
)


_WHY_INDICES_OF_RANKS = (
    "Each rank has a data set of its own, which is as it should be; or an augmentation changes the values of the same "
    "samples."
)
_NEXT_INDICES_OF_RANKS = "Use a DistributedSampler if all ranks have the same data set."


@rule(
    "same-samples-on-ranks",
    statistic="share of the samples of a rank that another rank has in the same step",
    usual="0, as each rank has a part of the data of its own",
    why="The data are not divided between the ranks: an iterable data set without a share for each, or a sampler "
    "with use_distributed_sampler=False.",
    next="Divide an iterable data set by the rank, with torch.utils.data.distributed or split_dataset_by_node; use "
    "a DistributedSampler for a map-style one.",
    false_alarms="Ranks of one tensor-parallel group, overfit_batches, fewer than 16 samples, and draws with "
    "replacement do not count. The same indices with other values are a note, as each rank may have a data set of its "
    "own. Ranks that share samples of an epoch in other steps are a note, unless a sampler or a stream should divide "
    "them.",
    needs=(DATA,),
    explains={"same-samples-by-workers": ("any",), "batch-repeats": ("any",), "repeated-samples": ("any",)},
    is_lasting=True,
)
def same_samples_on_ranks(
    evidence: Evidence,
    *,
    share: float = 0.9,
    steps: int = 4,
    samples: int = 16,
    overlap: float = 0.05,
    compared: int = 64,
    distinct: float = 0.98,
    equal: float = 0.05,
) -> Iterator[Finding]:
    """Yield the ranks that get the same samples in the same steps or in the same epoch."""
    found, loader = evidence.data.ranks, evidence.data.loader
    if loader.is_overfit:
        return
    if found is not None and found.shared >= share and found.steps >= steps and found.keys >= samples:
        which = "all" if len(found.same) >= found.ranks else "ranks " + ", ".join(map(str, found.same)) + " of"
        what = "the same samples" if found.shared == 1 else f"samples of which {found.shared:.0%} are the same"
        if found.equal < equal:  # each rank may index another data set
            what = what.replace("samples", "indices")
            verdict = (
                f"{which} {found.ranks} ranks read {what} in each of {found.steps} compared steps, and get other values"
            )
            one = _found(evidence, verdict, found.step, found.step, share=found.shared, ranks=found.ranks)
            yield replace(one, severity="note", why=_WHY_INDICES_OF_RANKS, next=_NEXT_INDICES_OF_RANKS)
            return
        verdict = f"{which} {found.ranks} ranks get {what} in each of {found.steps} compared steps"
        yield _found(evidence, verdict, found.step, found.step, share=found.shared, ranks=found.ranks)
        return
    whole = evidence.data.rank_epoch
    if whole is None or whole.shared < overlap or whole.compared < compared or whole.distinct < distinct:
        return
    if whole.shared * whole.compared < whole.ranks:  # a sampler fills up ranks with repeated samples
        return
    is_whole = loader.samples is not None and whole.samples >= share * loader.samples
    # Shared samples may be intended, for example if each rank has an infinite sampler or a separate data set.
    if not loader.is_iterable and not loader.is_divided and (not is_whole or whole.equal < overlap):
        return
    verdict = (
        f"{whole.shared:.0%} of the samples of epoch {whole.epoch} come on several of the {whole.ranks} ranks, in "
        "other steps"
    )
    one = _found(evidence, verdict, 0, 0, share=whole.shared, ranks=whole.ranks)
    if loader.is_iterable and whole.shared >= share:
        yield replace(one, why="The ranks read the same part of the stream, in other orders.", next=_NEXT_STREAM)
    elif loader.is_iterable:
        yield replace(one, severity="note", why="The ranks read parts of the stream that overlap.", next=_NEXT_STREAM)
    elif loader.is_divided:
        why = "The parts of the ranks are disjoint only if the sampler has the same seed and epoch on all of them."
        yield replace(one, why=why, next="Give it the same seed on all ranks, and call set_epoch on all of them.")
    else:
        why = "Each rank goes through the whole data set, since no sampler divides it."
        yield replace(one, severity="note", why=why, next="Use a DistributedSampler if this is not meant.")


@rule(
    "same-samples-by-workers",
    statistic="share of the samples of an epoch that come from each worker exactly once",
    usual="0, as each worker has a part of an iterable data set of its own",
    why="The iterable data set does not divide its samples between the workers.",
    next="Use torch.utils.data.get_worker_info() in __iter__, and yield every n-th sample.",
    false_alarms="Random draws: each sample would come from each worker a different number of times.",
    needs=(DATA,),
    explains={"batch-repeats": ("any",), "repeated-samples": ("any",)},
    is_lasting=True,
)
def same_samples_by_workers(
    evidence: Evidence, *, share: float = 0.8, samples: int = 16, before: float = 0.95
) -> Iterator[Finding]:
    """Yield workers that each load all samples."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        if loader.workers < 2 or each.distinct < samples:
            continue
        # The workers of a wrapped loader are unknown. Without workers, one pass over the samples follows the other.
        is_mixed = each.is_whole and 0 < each.first_repeat <= before * each.distinct
        is_wrapped = loader.is_iterable and not loader.is_loader
        measured = float(is_wrapped and is_mixed and each.every == loader.workers) or each.by_workers
        if measured >= share:
            verdict = (
                f"each of the {loader.workers} workers yields all samples: {measured:.0%} of the samples came "
                f"exactly {loader.workers} times in epoch {each.epoch}"
            )
            yield _of_epoch(evidence, each, verdict, share=measured, workers=loader.workers)
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
    explains={
        "few-samples": ("any",),
        "sorted-by-class": ("any",),
        "constant-input": ("any",),
        "repeated-samples": ("any",),
    },
    is_lasting=True,
)
def batch_repeats(
    evidence: Evidence,
    *,
    batches: int = 8,
    times: float = 3.0,
    unused: float = 4.0,
    cached: float = 0.5,
    consecutive: float = 0.9,
    in_a_row: int = 20,
) -> Iterator[Finding]:
    """Yield an epoch that repeats a few batches."""
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
        # A data set with few samples may be repeated on purpose, so more samples must be available than are used.
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


_WHY_INDICES = "Several indices give the same sample: the data set is repeated, or computes another index."
_NEXT_INDICES = "Compare the samples of two indices of the data set."


@rule(
    "few-samples",
    statistic="number of different samples in an epoch, against that of the data set and of the draws",
    usual="an epoch has each sample once",
    why="A sampler that draws from a few indices only.",
    next="Print some indices of the sampler, and compare them with the length of the data set.",
    false_alarms="Weights, a curriculum or episodes: it is a note unless the same few samples come in the next epoch, "
    "too. Indices with the values of others are a note, if nearly all samples have several or an eighth of the indices "
    "would do. Samples with fewer than 6 different values are equal by chance.",
    needs=(DATA,),
    is_lasting=True,
)
def few_samples(
    evidence: Evidence,
    *,
    unused: float = 20.0,
    times: float = 10.0,
    indices: float = 8.0,
    single: float = 0.05,
    drawn: int = 64,
    values: int = 6,
) -> Iterator[Finding]:
    """Yield an epoch that uses only a few samples of its data set."""
    loader, epochs = evidence.data.loader, _epochs(evidence)
    for each in epochs:
        many = loader.has_rows and each.distinct >= drawn and loader.values >= values
        are_few = 0 < each.contents * indices <= each.distinct
        are_twice = each.is_whole and each.contents > 0 and each.once == 1.0 and each.contents_once <= single
        if many and (are_few or are_twice) and not each.equal and not each.cached:
            verdict = (
                f"{each.distinct:.0f} indices of the data set gave {each.contents:.0f} different samples in epoch "
                f"{each.epoch}"
            )
            found = _of_epoch(evidence, each, verdict, distinct=each.contents, indices=each.distinct)
            yield replace(found, severity="note", why=_WHY_INDICES, next=_NEXT_INDICES)
            return
        if loader.samples is None or not loader.has_rows or not each.is_whole:
            continue
        if each.distinct * unused <= loader.samples and each.distinct * times <= each.samples:
            verdict = (
                f"epoch {each.epoch} has {each.distinct:.0f} of the {loader.samples} samples, each about "
                f"{each.samples / max(1.0, each.distinct):.0f} times"
            )
            found = _of_epoch(evidence, each, verdict, distinct=each.distinct, samples=each.samples)
            # Few samples are intended with a curriculum or episodes, whose next epoch has other samples, and with
            # sampling weights, some of which may be zero.
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
    false_alarms="The same data in both loaders are a note, and so is a loader of samples of training alone beside one "
    "of others. Samples with few possible values do not count.",
    needs=(DATA,),
    is_lasting=True,
)
def validation_in_training(
    evidence: Evidence, *, share: float = 0.05, samples: int = 32, distinct: float = 0.99
) -> Iterator[Finding]:
    """Yield a finding if validation samples are also training samples."""
    found = evidence.data.validation
    if found is None or evidence.data.loader.is_overfit:
        return
    validation = "validation" if found.loader is None else f"loader {found.loader} of validation"
    if found.common_rows >= max(samples, share * found.rows):
        # Rows are compared first, since an augmentation changes the values of a sample, but not its row.
        verdict = (
            f"{found.common_rows} of the {found.rows} samples of {validation} are rows of the data set that are also "
            "samples of training"
        )
        one = _found(evidence, verdict, found.step, found.step, common=found.common_rows, compared=found.rows)
        yield replace(one, severity="note") if found.is_same_data else one
        return
    if found.common < samples:
        return
    measured = found.common / max(1, found.compared)
    # Samples with few possible values, such as three bits, may be equal by chance, so they must be distinct here.
    if measured >= share and found.distinct >= distinct * found.samples:
        verdict = f"{measured:.0%} of the samples of {validation} are also samples of training"
        numbers = {"share": measured, "common": found.common, "compared": found.compared}
        one = _found(evidence, verdict, found.step, found.step, **numbers)
        yield replace(one, severity="note") if found.is_same_data else one


@rule(
    "target-in-inputs",
    statistic="number of samples that were compared, if the same value of the inputs is the target in each of them",
    usual="none, as no value of the inputs is the target",
    why="A column of the target was left in the features, or a window of a series ends with the value to predict.",
    next="Leave this value out of the inputs: drop the column, or end the window one step before the target.",
    false_alarms="Tasks that select a value of the input on purpose. Only the first batches of floats with one target "
    "for each sample are compared, if their targets differ. A step that selects from the inputs or masks them, and a "
    "value in an earlier step of a sequence, are left out.",
    needs=(DATA,),
    is_lasting=True,
)
def target_in_inputs(evidence: Evidence, *, samples: int = 64) -> Iterator[Finding]:
    """Yield a finding if an input value equals the target in each sample."""
    loader, epochs, step = evidence.data.loader, evidence.data.epochs, step_of(evidence)
    if not epochs or loader.target_place < 0 or loader.compared < samples:
        return
    inputs = [node for node in step.graph.nodes if node.kind == "input" and node.outputs]
    floats = [node for node in inputs if "float" in node.outputs[0].dtype and len(node.outputs[0].shape) > 1]
    # The step may drop this value from the inputs, for example by slicing.
    if any(user.name in _SELECTIONS for node in floats for user in step.users(node)):
        return
    # A window that has its target ends with it. Another step may be the target on purpose, to train a memory.
    shapes = [node.outputs[0].shape[1:] for node in floats]
    if all(len(shape) == 2 and not _is_last_step(loader.target_place, shape) for shape in shapes):
        return
    verdict = f"value {loader.target_place} of the inputs is the target in each of {loader.compared} compared samples"
    numbers = {"compared": loader.compared, "place": loader.target_place}
    yield _of_epoch(evidence, epochs[0], verdict, **numbers)


def _is_last_step(place: int, shape: tuple[int, ...]) -> bool:
    """Return True if a value is in the last step of a sequence, ``[steps, features]`` or ``[features, steps]``."""
    return place // shape[1] == shape[0] - 1 or place % shape[1] == shape[1] - 1


_SELECTIONS = (
    "getitem",
    "select",
    "narrow",
    "index_select",
    "split",
    "chunk",
    "unbind",
    "unfold",
    "cat",
    "where",
    "mul",
)


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
    """Yield an epoch whose samples are sorted by class."""
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
    """Yield a finding if each worker or each epoch draws the same random numbers."""
    found = evidence.data.draws
    if found is None or evidence.data.loader.is_overfit:
        return
    where = [f"all {found.workers} workers"] if found.workers > 1 else []
    where += [f"{found.epochs} epochs in a row"] if found.epochs > 1 else []
    verdict = f"the samples draw the same random numbers in {' and in '.join(where)}, from {found.source}"
    yield _found(evidence, verdict, found.step, found.step, workers=found.workers, epochs=found.epochs)


@rule(
    "reused-buffer",
    statistic="batches whose samples have different indices and the same inputs, and batches that are written to while "
    "they are used",
    usual="each sample has inputs of its own, which stay as they are during a step",
    why="If the data set fills one array for each sample, all samples of a batch are the last one.",
    next="Return a copy: array.copy() or tensor.clone().",
    false_alarms="Inputs that never change, such as a grid, do not count, nor do writes by torch. Without indices, a "
    "batch of one sample may be meant, and is a note.",
    needs=(DATA,),
    explains={"constant-input": ("any",), "batch-repeats": ("any",), "few-samples": ("any",)},
    is_lasting=True,
)
def reused_buffer(
    evidence: Evidence, *, batches: int = 8, share: float = 0.9, overwritten: int = 2
) -> Iterator[Finding]:
    """Yield an epoch whose samples or batches are overwritten while they are in use."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        if each.batches >= batches and each.equal >= share * each.batches:
            verdict = (
                f"all samples of a batch have the same inputs, in {each.equal} of {each.batches} batches of epoch "
            )
            verdict += f"{each.epoch}" + (", although their indices differ" if loader.has_rows else "")
            found = _of_epoch(evidence, each, verdict, equal=each.equal, batches=each.batches)
            yield found if loader.has_rows else replace(found, severity="note")
            return
        if each.overwritten >= overwritten:
            verdict = (
                f"{each.overwritten} of {each.checked} batches of epoch {each.epoch} got other values after they had "
                "left the loader, which torch has not written"
            )
            found = _of_epoch(evidence, each, verdict, overwritten=each.overwritten, checked=each.checked)
            yield replace(found, why=_WHY_OVERWRITTEN)
            return


_WHY_OVERWRITTEN = (
    "Something other than torch writes into the batch while it is used, such as a loader, a collate_fn or a stream "
    "that fills its buffer again."
)
_NAMES = ("Weighted", "Distributed")
"""Parts of the class names of samplers that repeat or leave out samples on purpose."""


@rule(
    "repeated-samples",
    "note",
    statistic="number of times that each sample comes in an epoch",
    usual="once, or a few passes over all samples one after the other",
    why="Several workers or readers read the same part of a stream, a shuffle buffer keeps what it has given, or the "
    "batches of a sampler overlap.",
    next="Count the samples of an epoch without the training.",
    false_alarms="Passes over all samples, draws with replacement, weights and samples that come more than twice do "
    "not count.",
    needs=(DATA,),
    is_lasting=True,
)
def repeated_samples(
    evidence: Evidence,
    *,
    samples: int = 64,
    before: float = 0.95,
    near: float = 0.05,
    times: float = 3.0,
    least: float = 0.01,
    most: float = 0.3,
) -> Iterator[Finding]:
    """Yield an epoch in which samples are repeated before all other samples have been used."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        if not each.is_whole or each.distinct < samples or not 0 < each.first_repeat <= before * each.distinct:
            continue
        numbers = {"samples": each.samples, "distinct": each.distinct}
        verdict = ""
        if not loader.has_rows and each.every > 1:
            verdict = f"each of the {each.distinct:.0f} samples comes exactly {each.every} times in epoch {each.epoch}"
        elif not loader.has_rows and each.near >= max(near, times * each.random_near):
            verdict = (
                f"{each.near:.0%} of the samples of epoch {each.epoch} were in one of the four batches before; it has "
                f"{each.distinct:.0f} different ones in {each.samples}"
            )
        elif loader.has_rows and each.most == 2 and least <= 1 - each.once <= most and not _is_named(loader.sampler):
            verdict = f"{1 - each.once:.0%} of the samples of epoch {each.epoch} come twice, and the others once"
        if verdict:
            yield _of_epoch(evidence, each, verdict, **numbers)
            return


def _is_named(sampler: str) -> bool:
    return any(each in sampler for each in _NAMES)


@rule(
    "unused-samples",
    "note",
    statistic="number of samples of the data set that come in no epoch",
    usual="none, or less than a batch",
    why="A batch sampler drops the batches that are not full, always with the same samples, or leaves samples out.",
    next="Compare the indices of an epoch with the length of the data set. Leaving samples out may be meant, such as "
    "those that are too long.",
    false_alarms="A part that is chosen by SubsetRandomSampler, weights, several ranks, limit_train_batches, and less "
    "than 5 % or more than 30 % of the data set do not count.",
    needs=(DATA,),
    is_lasting=True,
)
def unused_samples(
    evidence: Evidence, *, epochs: int = 2, samples: int = 64, least: float = 0.05, most: float = 0.3
) -> Iterator[Finding]:
    """Yield a finding if some samples are used in no epoch."""
    loader = evidence.data.loader
    each = next((each for each in reversed(_epochs(evidence)) if each.passed >= epochs), None)
    if each is None or loader.samples is None or loader.samples < samples or loader.is_limited:
        return
    unused = loader.samples - each.seen
    per_batch = each.samples / max(1, each.batches)
    is_meant = _is_named(loader.sampler) or "Subset" in loader.sampler or each.once != 1.0
    if not is_meant and max(per_batch, least * loader.samples) < unused <= most * loader.samples:
        verdict = f"about {unused:.0f} of the {loader.samples} samples came in none of {each.passed} epochs"
        yield _of_epoch(evidence, each, verdict, unused=unused, epochs=each.passed)


@rule(
    "same-order",
    "note",
    statistic="the order of the indices in an epoch and in the one before",
    usual="another order in each epoch, or ascending indices without a shuffle",
    why="The order was drawn once, or is drawn with the same seed in each epoch.",
    next="Draw a new order in each call of __iter__, or call set_epoch before each epoch.",
    false_alarms="Ascending indices, and several passes in one epoch, do not count.",
    needs=(DATA,),
    is_lasting=True,
)
def same_order(evidence: Evidence, *, batches: int = 8, samples: int = 64) -> Iterator[Finding]:
    """Yield an epoch that repeats the shuffled order of the previous epoch."""
    loader = evidence.data.loader
    for each in _epochs(evidence):
        is_shuffled = loader.has_rows and not each.is_ascending and not each.first_repeat
        if is_shuffled and each.is_same_order and each.batches >= batches and each.distinct >= samples:
            verdict = (
                f"epoch {each.epoch} has its {each.samples} samples in the same shuffled order as the epoch before"
            )
            yield _of_epoch(evidence, each, verdict, samples=each.samples)
            return


@rule(
    "carried-state",
    statistic="tensors that a step gets from the step before, and the sampler of the loader",
    usual="a state is carried only over batches that follow each other",
    why="The batches are shuffled, so the state of a sample, such as a cache of keys and values, is that of another.",
    next="Reset the state at the beginning of each step, or load the batches in their order without a shuffle.",
    false_alarms="Only a tensor from outside of the step counts, with one entry for each sample, if the step leaves a "
    "detached tensor of the same shape that it does not use itself. Loaders without a RandomSampler are left out.",
    needs=(DATA, GRAPH),
    is_lasting=True,
)
def carried_state(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a state of each sample goes from step to step, although the samples are shuffled."""
    step = step_of(evidence)
    sizes = {node.outputs[0].shape[:1] for node in step.graph.nodes if node.kind == "input" and node.outputs}
    if evidence.data.loader.sampler != "RandomSampler" or len(sizes) != 1 or () in sizes:
        return
    kept = [node for node in step.operations if node.name == "detach" and not step.users(node) and node.outputs]
    for node in step.graph.nodes:
        shape = node.outputs[0].shape if node.kind == "tensor" and node.outputs else ()
        is_of_samples = len(shape) > 1 and (shape[:1] in sizes or (len(shape) == 3 and shape[1:2] in sizes))
        users = [each for each in step.users(node) if "parameter" in step.roots[each.id]]
        same = [each for each in kept if each.outputs[0].shape == shape and "parameter" in step.roots[each.id]]
        if is_of_samples and "float" in node.outputs[0].dtype and users and same:
            verdict = (
                f"{step.place(users[0])} reads a tensor {listed(shape)} from before the step, and "
                f"{step.place(same[0])} detaches one of this shape, which the step does not use: a state goes from "
                "batch to batch, although the sampler shuffles"
            )
            yield found_in(evidence, step.owner(users[0]), verdict)
            return
