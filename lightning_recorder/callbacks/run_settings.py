"""The settings of a fit and the checksums of its batches, which explain why two runs differ."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.privacy import hide_secrets
from lightning_recorder.statistics import batch_fingerprint

__all__ = ["BatchFingerprints", "logged_hparams", "run_settings"]

_MOST_GROUPS = 8
_LONGEST = 200  # the maximum number of characters of a value
_OF_TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "num_devices")


def run_settings(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Return the settings of a fit as JSON values.

    Returns:
        A dictionary with ``trainer``, ``optimizers`` (the class and the parameter groups of each), ``data``, ``seeds``
        and ``hparams``. Entries that cannot be read are left out. Secrets are hidden.
    """
    parts: dict[str, Callable[[], Any]] = {
        "trainer": lambda: _trainer(trainer),
        "optimizers": lambda: [_optimizer(each) for each in trainer.optimizers],
        "data": lambda: _data(trainer.train_dataloader),
        "seeds": lambda: {"seed_everything": os.environ.get("PL_GLOBAL_SEED"), "torch": torch.random.initial_seed()},
        "hparams": lambda: {name: _plain(each) for name, each in logged_hparams(pl_module).items() if _is_plain(each)},
    }
    found = {}
    for name, read in parts.items():
        with suppress(Exception):  # a trainer of another version, or an unusual loader
            found[name] = hide_secrets(read())
    return found


def logged_hparams(pl_module: LightningModule) -> dict[str, Any]:
    """Return the hyperparameters for the loggers. Empty after ``save_hyperparameters(logger=False)``."""
    # Lightning has no public name for this.
    is_logged = hasattr(type(pl_module), "training_step") and getattr(pl_module, "_log_hyperparams", False)
    return {str(name): value for name, value in pl_module.hparams.items()} if is_logged else {}


def _trainer(trainer: Trainer) -> dict[str, Any]:
    settings = {name: _plain(getattr(trainer, name, None)) for name in _OF_TRAINER}
    return {**settings, "strategy": type(trainer.strategy).__name__}


def _optimizer(optimizer: Any) -> dict[str, Any]:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps it
    groups = [
        {str(name): _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in optimizer.param_groups[:_MOST_GROUPS]
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _data(loader: Any) -> dict[str, Any]:
    found = {"batch_size": _plain(getattr(loader, "batch_size", None))}
    sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    about = {"sampler": sampler, "dataset": dataset}
    found |= {name: type(each).__name__ for name, each in about.items() if each is not None}  # a loop may have none
    with suppress(Exception):  # an iterable dataset has no length
        found["samples"] = len(dataset)  # type: ignore[arg-type]  # raises TypeError, which is caught
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()  # a capturable optimizer has tensors
    return list(value) if isinstance(value, tuple) else value if _is_json(value) else str(value)[:_LONGEST]


def _is_plain(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
    return is_scalar or _is_json(value) or (isinstance(value, tuple) and all(map(_is_json, value)))


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0  # JSON has no NaN
    return value is None or isinstance(value, (bool, int)) or (isinstance(value, str) and len(value) <= _LONGEST)


_latest: weakref.WeakKeyDictionary[Trainer, tuple[tuple[int, int, int], Tensor | None]] = weakref.WeakKeyDictionary()
"""The epoch, step, batch index and checksums of the latest recorded batch, which the recorders of a trainer share."""


class BatchFingerprints:
    """The checksums of the batches since the last record."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._found: Tensor | None = None

    def begin(self, trainer: Trainer) -> None:
        """Begin a fit."""
        _latest.pop(trainer, None)

    def add(self, trainer: Trainer, batch: Any, step: int, batch_idx: int, *, apart: bool) -> None:
        """Add the checksums of a recorded batch. With ``apart``, discard the checksums of earlier steps.

        Use ``apart`` if each step has its own record.
        """
        latest, which = _latest.get(trainer), (trainer.current_epoch, step, batch_idx)
        if latest is None or latest[0] != which:
            latest = _latest[trainer] = (which, batch_fingerprint(batch))
        before = None if apart and step != self._step else self._found
        found = latest[1]
        self._step, self._found = step, found if before is None or found is None else before * 31 + found

    def take(self) -> Tensor | None:
        """Return the collected checksums and clear them."""
        found, self._found, self._step = self._found, None, None
        return found
