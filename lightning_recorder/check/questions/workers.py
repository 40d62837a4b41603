"""Find workers that load the same samples.

Each worker of a loader has a copy of an iterable data set. Unless the data set depends on the worker's number, every
sample is loaded once per worker.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from lightning_recorder.check.answer import Answer, NoAnswerError, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_MARKS = ("get_worker_info", "worker_id", "split_by_worker", "num_workers")


def answer(bench: Bench) -> Answer:
    """Check if the code of an iterable data set uses the number of its worker."""
    dataset, workers = getattr(bench.loader, "dataset", None), getattr(bench.loader, "num_workers", 0)
    if bench.loader is None or not isinstance(workers, int):
        raise NoAnswerError("the loader is none of torch")
    if workers < 2:
        return Answer("ok", "one worker loads the data" if workers else "the process of the training loads the data")
    if not isinstance(dataset, IterableDataset):
        return Answer("ok", f"a sampler divides the samples among {workers} workers")
    if getattr(bench.loader, "worker_init_fn", None) is not None or _asks(dataset):
        return Answer("ok", f"the data set asks which of {workers} workers it is in")
    text = (
        f"{type(dataset).__name__} does not ask which worker it is in: each of {workers} workers may load all samples"
    )
    return Answer("look", text)


def _asks(dataset: Any) -> bool:
    """Return True if the code of the data set, or of a wrapped data set, mentions workers or cannot be read."""
    if type(dataset).__module__.partition(".")[0] in (
        "torch",
        "torchdata",
        "datasets",
        "webdataset",
        "streaming",
        "litdata",
    ):
        return True
    try:
        text = inspect.getsource(type(dataset))
    except (OSError, TypeError):
        return True
    inner = [each for each in vars(dataset).values() if isinstance(each, IterableDataset)]
    return any(mark in text for mark in _MARKS) or any(map(_asks, inner))


QUESTION = Question(
    "workers",
    "Are workers told apart?",
    "each worker of an iterable data set loads other samples",
    answer,
    steps=0.0,
    needs_repetition=False,
)
