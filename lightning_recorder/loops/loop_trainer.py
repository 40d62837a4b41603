"""A stand-in for the Lightning Trainer with the attributes that the recorders read, for loops without a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_recorder.callbacks.trainer import device_of
from lightning_recorder.internals.data_parallel import is_uneven

__all__ = ["LoopTrainer", "as_root", "free_folder"]

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "_FabricModule")


class _Models(nn.Module):
    """A module whose children are several models, by name."""


def as_root(model: nn.Module | Mapping[str, nn.Module]) -> nn.Module:
    """Return the model whose modules are recorded, without wrappers such as ``DistributedDataParallel``.

    Several models become the children of a new module, so that module names begin with the name of their model.
    """
    if isinstance(model, Mapping):
        root = _Models()
        for name, each in model.items():
            root.add_module(name, as_root(each))
        return root
    while type(model).__name__ in _WRAPPERS and isinstance(model.module, nn.Module):
        model = model.module
    return model


def free_folder(parent: Path) -> Path:
    """Return the first path ``version_<number>`` in a folder that does not exist yet."""
    return next(path for number in count() if not (path := parent / f"version_{number}").exists())


class TensorBoardLogger:
    """A stand-in for Lightning's logger of the same name. Sinks read the folder of the run from it."""

    name = version = ""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = self.save_dir = log_dir


class _CheckpointIO:
    """Reports checkpoints that the loop has written itself, through the interface of a checkpoint IO."""

    def save_checkpoint(self, checkpoint: object, path: object, storage_options: object = None) -> None:
        """Do nothing: the loop has written the file."""

    def remove_checkpoint(self, path: object) -> None:
        """Do nothing: the loop has removed the file."""

    def teardown(self) -> None:
        """Do nothing."""


class PlainLoop:
    """A strategy for the processes of ``torch.distributed``, or for a single process if it is not initialized."""

    def __init__(self, device: torch.device, model: object) -> None:
        self.root_device, self.model = device, model
        self.checkpoint_io: Any = _CheckpointIO()
        self.distributed_sampler_kwargs: dict[str, int] = {}
        if dist.is_available() and dist.is_initialized():
            self.distributed_sampler_kwargs = {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first process."""
        if not self.distributed_sampler_kwargs:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=self.root_device)
        return values[0]

    def reduce(self, tensor: Tensor, *, reduce_op: str) -> Tensor:
        """Reduce a tensor over all processes in place, such as to the maximum, and return it."""
        if self.distributed_sampler_kwargs:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, reduce_op.upper()))
        return tensor

    def process_dataloader(self, loader: Any) -> Any:
        """Return the loader unchanged."""
        return loader


class LoopTrainer:
    """Provides the attributes that the recorders read from a Trainer. ``Monitor`` updates them."""

    fast_dev_run = barebones = sanity_checking = enable_validation = is_last_batch = False
    ckpt_path: str | None = None
    checkpoint_callbacks: tuple[object, ...] = ()
    gradient_clip_algorithm = None
    train_dataloader: Any = None
    val_dataloaders: Any = None
    loader_iterator: Any = None
    """The iterator over the loader of the epoch, if the loop uses :meth:`Monitor.steps`."""
    knows_epochs = False
    """True once the loop has reported the end of an epoch."""
    logs_loss = False
    """True if the loop reports one loss for each batch. The loss of a step is then computed as in a Trainer."""
    has_stepped: bool | None = False
    """True if an optimizer stepped in the batch that is ending."""
    should_stop = interrupted = False
    num_training_batches = num_val_batches = num_test_batches = num_predict_batches = float("inf")
    limit_train_batches = limit_val_batches = None
    max_epochs = max_steps = -1
    check_val_every_n_epoch = val_check_interval = None
    overfit_batches = 0

    def __init__(
        self,
        root: nn.Module,
        callbacks: list[Any],
        loggers: list[Any],
        log_dir: str,
        *,
        model: object,
        log_every_n_steps: int,
        optimizers: list[Any],
        scaler: Any = None,
        step_function: Any = None,
        accumulate_grad_batches: int = 1,
        clip: float | None = None,
    ) -> None:
        self.callbacks, self.loggers = callbacks, loggers
        self.log_dir = self.default_root_dir = log_dir
        self.log_every_n_steps, self.optimizers = log_every_n_steps, optimizers
        self.step_function = step_function
        self.accumulate_grad_batches, self.gradient_clip_val = accumulate_grad_batches, clip
        self.strategy: Any = PlainLoop(device_of(root), model)  # type: ignore[arg-type]  # any module
        ranks = self.strategy.distributed_sampler_kwargs
        self.distributed_sampler_kwargs = ranks
        self.world_size, self.global_rank = ranks.get("num_replicas", 1), ranks.get("rank", 0)
        self.num_devices = 1
        self.is_global_zero = self.global_rank == 0
        self.is_uneven = is_uneven(model)
        """True if the ranks may have different numbers of batches. Ranks are then neither compared nor merged."""
        self.precision_plugin = SimpleNamespace(
            scaler=scaler, train_step_context=nullcontext, val_step_context=nullcontext, forward_context=nullcontext
        )
        self.precision = "unknown"
        self.state = SimpleNamespace(fn="fit", status="running")
        self.steps = 0
        """The number of batches that ended in an optimizer step."""
        self.is_evaluating = False
        self.current_epoch = 0
        self.save: Any = None

    @property
    def global_step(self) -> int:
        """The current step, counted from 0. An evaluation belongs to the step before it, as in Lightning."""
        return max(0, self.steps - 1) if self.is_evaluating else self.steps

    def save_checkpoint(self, path: Path) -> None:
        """Save the models and the optimizers. Called by a watch that stops the run at a finding."""
        if self.save is not None:
            self.save(path)
