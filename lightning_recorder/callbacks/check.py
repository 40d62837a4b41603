"""Check the first training step before the training begins."""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.callbacks.guard import GuardedCallback, guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.replay import (
    NO_FUNCTION,
    is_unknown,
    loss_of,
    replaced,
    run_manual,
    runs_alone,
    unchanged,
)
from lightning_recorder.callbacks.trainer import device_of, make_directory, recorder_directory
from lightning_recorder.check import Answer, Bench, NoAnswerError, Question, Result
from lightning_recorder.check.batches import named_tensors
from lightning_recorder.check.bench import StepFunctions
from lightning_recorder.check.examination import chosen_questions, examine
from lightning_recorder.check.questions.ranks import QUESTION as RANKS
from lightning_recorder.check.questions.ranks import RankStart
from lightning_recorder.check.questions.ranks import compare as compare_starts
from lightning_recorder.errors import check_bool, check_number
from lightning_recorder.internals.module_tree import named_parameters_of, parameters_of
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.records.file import CHECK
from lightning_recorder.signatures import checked_arguments
from lightning_recorder.statistics import Exchange
from lightning_recorder.statistics.fingerprint import exact_checksum, sample_fingerprints
from lightning_recorder.temporary import write_bytes

__all__ = ["Check"]

_COPIES = 4  # copies of the parameters in memory: one for a pass, one for a training, two for an optimizer's states
_MOST_BYTES = 2**28  # the maximum size of a validation batch that is kept


class Check(GuardedCallback):
    """Answers the questions that an expert asks before a long training, then lets the training start unchanged.

    When the first batch of a fit arrives, the real training step is repeated a few times on this batch, with the real
    model, loss, optimizer and precision. Each question is answered with *ok*, *look*, *wrong*, or with the reason why
    there is no answer. The answers are logged, and written to ``<log_dir>/recorder/check.json``.

    Args:
        questions: The questions to ask: names, and :class:`~lightning_recorder.check.Question` objects of your own. By
            default, all of :data:`~lightning_recorder.check.QUESTIONS`.
        only: End the program after the check, with the exit status 1 if an answer is *wrong*, 2 if no question has an
            answer, and 0 otherwise.
        seconds: The time after which no further question is asked. A check also does at most the work of 30 training
            steps.
        strict: Raise errors of the check instead of warning about them.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.

    Note:
        The training is bitwise the same as without the check: parameters, buffers, attributes of modules, gradients,
        random numbers, optimizers and the position of the loader are restored or never touched. The check uses the
        batch that Lightning has already loaded, and copies it for each pass. Nothing is logged by the repeated steps.
        Side effects outside of the model and of torch, such as writing a file, happen again in each repetition. A
        validation batch is available only if Lightning has run its sanity check. In a run with several processes, only
        the first batches and the parameters of the processes are compared. A resumed run is not checked.

    Example::

        Trainer(callbacks=[Check()])
    """

    @checked_arguments
    def __init__(
        self,
        questions: Iterable[str | Question] | None = None,
        *,
        only: bool = False,
        seconds: float = 20.0,
        strict: bool = False,
    ) -> None:
        super().__init__()
        check_bool("only", only)
        check_bool("strict", strict)
        check_number("seconds", seconds, 0.0)
        self.questions = chosen_questions(questions)
        self.only, self.seconds, self.strict = only, seconds, strict
        self.result: Result | None = None
        """The answers of the last check, if there was one."""
        self._trainer: weakref.ref[Trainer] | None = None
        self._has_warned_of_nested_run = False
        self._validation_batch: Any = None
        self._is_due = False

    def __str__(self) -> str:
        return type(self).__name__

    @override
    def _release(self, trainer: Trainer | None) -> None:
        self._validation_batch, self._is_due = None, False

    @guarded
    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self.result, self._is_due = weakref.ref(trainer), None, True

    @guarded
    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_due and trainer.sanity_checking and batch_idx == dataloader_idx == 0:
            size = sum(each.nbytes for each in named_tensors(batch).values())
            self._validation_batch = own_copies({"batch": batch})["batch"] if size <= _MOST_BYTES else None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._check(trainer, pl_module, batch)
        if self.only and self.result is not None:
            raise SystemExit(self.result.status)

    @guarded
    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer)
        self._trainer = None

    @guarded
    def _check(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Check the step, once per fit."""
        if not self._is_due:
            return
        self._is_due = False
        why = _why_not(trainer, pl_module)
        if why:
            ranks = self._answer_of_ranks(trainer, pl_module, batch)
            self.result = Result(tuple(_without_step(each, why, ranks) for each in self.questions), 0.0, 0.0)
        else:
            if self.only and self._validation_batch is None:
                self._validation_batch = _validation_batch(trainer)
            bench = _bench(trainer, pl_module, batch, self._validation_batch, self.seconds)
            with torch.compiler.set_stance("force_eager"):
                self.result = examine(bench, self.questions)
        self._validation_batch = None
        directory = recorder_directory(trainer)  # on every rank, since Lightning broadcasts it
        if trainer.is_global_zero:
            self._show(directory, self.result)

    def _answer_of_ranks(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Answer | None:
        """Return the answer to the question about ranks; None if it is not asked, or with one rank. A collective."""
        is_asked = any(each.name == RANKS.name for each in self.questions)
        if not is_asked or trainer.world_size < 2 or not Exchange.is_needed():
            return None
        own: RankStart | None = None
        try:
            own = _start_of(trainer, pl_module, batch)
        finally:  # the other ranks wait for this one
            gathered: list[RankStart | None] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, own)
        if trainer.overfit_batches:  # type: ignore[attr-defined]  # set by a connector
            return Answer("no answer", "overfit_batches gives all ranks the same samples on purpose")
        found = [each for each in gathered if each is not None]
        if len(found) < trainer.world_size:
            return Answer("no answer", "the first batch of a rank could not be read")
        try:
            return compare_starts(found)
        except NoAnswerError as error:
            return Answer("no answer", str(error))

    def _show(self, directory: Path | None, result: Result) -> None:
        text = result.text()
        if self.only:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        else:
            rank_zero_info(text)
        make_directory(directory, strict=self.strict)
        if directory is not None and directory.is_dir():
            write_bytes(directory / CHECK, json.dumps(result.to_json(), indent=1).encode())


def _why_not(trainer: Trainer, pl_module: LightningModule) -> str:
    """Return the reason why the run cannot be checked, or an empty string."""
    if trainer.world_size > 1:
        return "the run has several processes: check it with devices=1"
    if trainer.global_step:
        return f"the run is resumed at step {trainer.global_step}"
    if is_unknown(trainer, pl_module):
        return NO_FUNCTION
    needed = _COPIES * sum(each.nbytes for each in parameters_of(pl_module))
    if needed > _free_bytes(device_of(pl_module)):
        return f"{_COPIES} copies of the parameters do not fit into the memory"
    return ""


def _without_step(question: Question, why: str, ranks: Answer | None) -> Answer:
    """Return the answer to a question if the step cannot be repeated. Only the question about ranks can be answered."""
    if ranks is not None and question.name == RANKS.name:
        return replace(ranks, question=question.name, expected=question.expects, asks=question.asks)
    return Answer("no answer", why, question=question.name, asks=question.asks)


def _start_of(trainer: Trainer, pl_module: LightningModule, batch: Any) -> RankStart:
    known = getattr(trainer, "distributed_sampler_kwargs", None)
    samples = sample_fingerprints(batch)
    parameters = {
        name: int(exact_checksum(each))
        for name, each in named_parameters_of(pl_module)
        if type(each.detach()) is Tensor and each.layout is torch.strided
    }
    place = int(known["rank"]) if known else trainer.global_rank
    return RankStart(place, () if samples is None else tuple(samples.tolist()), parameters)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not available on this operating system
        return float("inf")


def _bench(trainer: Trainer, pl_module: LightningModule, batch: Any, validation_batch: Any, seconds: float) -> Bench:
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    loader: Any = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    train = partial(_train, trainer, pl_module)
    evaluate: Callable[[Any], Any] | None = None
    if getattr(trainer, "step_function", None) is not None:
        evaluate = train  # called in evaluation mode
    elif _has_validation(pl_module):
        evaluate = partial(_evaluate, trainer, pl_module)
    functions = StepFunctions(
        train=train,
        evaluate=evaluate,
        unchanged=lambda: unchanged(trainer, pl_module, list(parameters_of(pl_module)), device_of(pl_module)),
        optimizers=list(trainer.optimizers),
        clip=partial(_clip, trainer),
        loss_scale=1.0 if scaler is None else float(scaler.get_scale()),
        is_automatic=runs_alone(trainer, pl_module),
        without_autocast=_without_autocast(trainer),
    )
    return Bench(
        pl_module,
        batch,
        functions,
        validation_batch=validation_batch,
        batch_size=size if isinstance(size, int) else None,
        seconds=seconds,
        loader=loader,
    )


def _has_validation(pl_module: LightningModule) -> bool:
    """Return True if the model overrides the validation step, under either package name of Lightning."""
    return not pl_module.validation_step.__qualname__.startswith("LightningModule.")


def _train(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Tensor | None:
    if not runs_alone(trainer, pl_module):
        losses = _Losses()
        run_manual(trainer, pl_module, batch, 0, losses)
        return sum(losses.found[1:], losses.found[0]) if losses.found else None
    return loss_of(trainer, pl_module, batch, 0)


class _Losses:
    """Collects the losses of a step with manual optimization."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        self.found.append(loss)

    def end_step(self) -> None:
        """Ignore a step of an optimizer."""


def _evaluate(trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
    with trainer.precision_plugin.val_step_context():
        pl_module.validation_step(batch, 0)


def _clip(trainer: Trainer, parameters: list[Any]) -> None:
    value = trainer.gradient_clip_val
    if value:
        by_value = trainer.gradient_clip_algorithm == "value"
        (torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_)(parameters, value)


def _without_autocast(trainer: Trainer) -> Any:
    """Return a function that makes a context without autocast, or None if the run does not use autocast."""
    plugin: Any = trainer.precision_plugin
    if not hasattr(plugin, "autocast_context_manager"):
        return None
    return partial(replaced, plugin, "autocast_context_manager", nullcontext)


def _validation_batch(trainer: Trainer) -> Any:
    """Load a batch of the validation in a program that ends after the check."""
    loaders: Any = trainer.val_dataloaders
    loader = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
    try:
        batch = next(iter(loader))
        return trainer.strategy.batch_to_device(batch)
    except Exception:  # noqa: BLE001 - a loader of the user may raise anything
        return None
