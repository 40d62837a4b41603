"""Write the folder of a finding during the fit, and run its step again from the folder in a new process."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.lightning import HAS_LIGHTNING, Callback, LightningModule, Trainer
from lightning_recorder.callbacks.replay import Replay, replay
from lightning_recorder.callbacks.run_settings import logged_hparams
from lightning_recorder.callbacks.trainer import device_of
from lightning_recorder.callbacks.watched_run import Discovery
from lightning_recorder.errors import RecorderError, describe_error
from lightning_recorder.graph import Graph, to_text
from lightning_recorder.internals.module_tree import is_training, named_modules_of, parameters_of, plain_dict
from lightning_recorder.internals.random_states import foreign_code
from lightning_recorder.privacy import hide_secrets
from lightning_recorder.records.file import STATES
from lightning_recorder.watch import KeptBatch, Reading
from lightning_recorder.watch.incident import CHECKPOINT, Incident, read_incident, write_incident
from lightning_recorder.watch.verdict import finding_of_origin

__all__ = ["make_model", "need_parameters", "reproduce", "save_incident"]

_MOST_NODES = 400  # the maximum number of nodes in the text of the graph
_NO_LIGHTNING = (
    "running an incident again needs Lightning: pip install lightning. Without it, record a loop with "
    "lightning_recorder.Monitor"
)


def save_incident(
    folder: Path,
    trainer: Trainer,
    pl_module: LightningModule,
    discovery: Discovery,
    *,
    max_bytes: int,
    save_batch: bool,
    save_parameters: bool,
) -> None:
    """Write the folder of a finding. Raise OSError if a file cannot be written."""
    kept, values = discovery.batch, discovery.parameters
    if kept is None:
        return
    write_incident(
        folder,
        _about_run(trainer, pl_module, kept),
        kept,
        state=_state_before(pl_module, kept, values) if save_parameters and values is not None else {},
        records=_latest_records(trainer),
        graph=_graph_up_to(trainer, discovery.finding.module),
        max_bytes=max_bytes,
        save_batch=save_batch,
        has_script=hasattr(type(pl_module), "training_step"),  # without it, the loop is in the user's program
    )


def _state_before(pl_module: LightningModule, kept: KeptBatch, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers before a batch, with their names in ``state_dict``."""
    before = {id(each): value for each, value in zip(parameters_of(pl_module), parameters, strict=True)}
    before |= {id(plain_dict(table).get(name)): value for table, name, value in kept.buffers}
    with foreign_code():
        state = pl_module.state_dict(keep_vars=True)
    return {name: before.get(id(each), each) for name, each in state.items() if isinstance(each, Tensor)}


def _latest_records(trainer: Trainer) -> dict[str, Any]:
    found = {}
    for each in trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
        latest, step = getattr(each, "latest", None), getattr(each, "latest_step", None)
        if isinstance(each, RecorderCallback) and latest and step is not None:
            sites = {".".join(filter(None, site)): dict(seen.scalars) for site, seen in latest.items()}
            found[each.label(trainer)] = {"step": step, "sites": sites}
    return found


def _graph_up_to(trainer: Trainer, module: str) -> str:
    """Return the recorded graph up to the calls of a module, as text; empty if there is none."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
    graph = next((each.graph for each in callbacks if isinstance(getattr(each, "graph", None), Graph)), None)
    if graph is None:
        return ""
    inside = {node.id for node in graph.module_calls() if node.name == module} if module else set()
    ends = [node.id for node in graph.nodes if node.id in inside or node.parent in inside]
    last = max(ends, default=max(node.id for node in graph.nodes))
    nodes = tuple(node for node in graph.nodes if node.id <= last)[-_MOST_NODES:]
    nodes = nodes if nodes[0] == graph.nodes[0] else (graph.nodes[0], *nodes)
    ids = {node.id for node in nodes}
    nodes = tuple(node if node.parent in ids or node.parent is None else replace(node, parent=0) for node in nodes)
    edges = tuple(each for each in graph.edges if each.source in ids and each.target in ids)
    return to_text(replace(graph, nodes=nodes, edges=edges))


def _about_run(trainer: Trainer, pl_module: LightningModule, kept: KeptBatch) -> dict[str, Any]:
    """Return the settings of a run that a replay of one of its steps needs, as JSON values."""
    kind = type(pl_module)
    # Secrets are left out, so that the model uses its default instead of a wrong value.
    hparams = {
        name: value
        for name, value in logged_hparams(pl_module).items()
        if _is_plain(value) and hide_secrets(value, name) == value
    }
    file = None
    with suppress(TypeError, OSError):
        file = str(Path(inspect.getfile(kind)).resolve())
    return {
        "step": kept.step,
        "epoch": kept.epoch,
        "batch_idx": kept.batch_idx,
        "global_step": trainer.global_step,
        "model": {"module": kind.__module__, "name": kind.__qualname__, "file": file, "hparams": hparams},
        "precision": str(trainer.precision),
        "accelerator": str(device_of(pl_module).type),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "eval": [name for name, module in named_modules_of(pl_module) if not is_training(module)],
        "rank": trainer.global_rank,
        "rows": kept.indices,
        "losses": [repr(float(each)) for each in kept.losses],
        "counters": _counters(pl_module, kept),
    }


def _counters(pl_module: LightningModule, kept: KeptBatch) -> dict[str, dict[str, int | float]]:
    """Return the attributes of modules that change from batch to batch, such as counts of calls."""
    names = {id(vars(module)): name for name, module in named_modules_of(pl_module)}
    found: dict[str, dict[str, int | float]] = {}
    for (owner, key), value in kept.counters:
        if id(owner) in names and math.isfinite(value):
            found.setdefault(names[id(owner)], {})[key] = value
    return found


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def make_model(folder: Path) -> LightningModule:
    """Create a model of the class that had the incident, with the recorded hyperparameters.

    Raises:
        RecorderError: If the class cannot be found, or needs arguments that were not recorded.
    """
    about = read_incident(folder).about["model"]
    try:
        if about["module"] == "__main__":
            found: Any = _loaded(Path(about["file"]))
        else:
            sys.path.insert(0, str(Path.cwd()))
            found = importlib.import_module(about["module"])
        for name in about["name"].split("."):
            found = getattr(found, name)
        model: LightningModule = found(**about["hparams"])
    except Exception as error:
        raise RecorderError(
            f"the model {about['module']}.{about['name']} cannot be made: {describe_error(error)}. Make it in "
            "replay.py: secrets, and hyperparameters that are not logged, are not in incident.json"
        ) from error
    return model


def _loaded(path: Path) -> Any:
    """Import a script without running its main part."""
    spec = importlib.util.spec_from_file_location("incident_model", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["incident_model"] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def reproduce(folder: str | Path, model: LightningModule, *, checkpoint: str | Path | None = None) -> Replay:
    """Run the step of an incident again, and print the origin of its bad value.

    Args:
        folder: The folder of the incident.
        model: The model. Its parameters and buffers are loaded.
        checkpoint: A checkpoint with the parameters. Defaults to the parameters in the folder, or to the checkpoint
            in the folder.

    Raises:
        RecorderError: If there are no parameters, the batch was not written, or the files do not fit the model.
    """
    if not HAS_LIGHTNING:
        raise RecorderError(_NO_LIGHTNING)
    folder = Path(folder)
    incident = read_incident(folder)
    again = _Again(incident)
    try:
        model.load_state_dict(_state(folder, incident, checkpoint))
        trainer = _trainer(incident.about, again)
    except RecorderError:
        raise
    except Exception as error:
        raise RecorderError(f"the step of {folder} cannot be run with this model: {describe_error(error)}") from error
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        setattr(model, name, _same_batch)  # the batch of the incident was transferred before it was written
    with suppress(_Done):
        trainer.fit(model, DataLoader(_Single(), batch_size=None))
    if again.found is None:
        raise RecorderError("the step was not run")
    print(_verdict(again.found, incident))  # noqa: T201 - the output of the script
    return again.found


def _trainer(about: Mapping[str, Any], again: _Again) -> Trainer:
    return Trainer(
        accelerator="cpu" if about["accelerator"] == "cpu" else "auto",
        devices=1,
        precision=about["precision"],
        accumulate_grad_batches=about["accumulate_grad_batches"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[again],
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )


def need_parameters(folder: Path, checkpoint: str | Path | None = None) -> None:
    """Raise :class:`RecorderError` if neither a checkpoint nor the folder of an incident has parameters."""
    files = [folder / each for each in STATES] if checkpoint is None else [Path(checkpoint)]
    if not any(each.exists() for each in files):
        raise RecorderError(
            f"{folder} has no parameters: run `python replay.py CHECKPOINT` with a checkpoint from before step "
            f"{read_incident(folder).about['step']}, or train again with StepWatch(save_parameters=True)"
        )


def _state(folder: Path, incident: Incident, checkpoint: str | Path | None) -> Mapping[str, Any]:
    need_parameters(folder, checkpoint)
    if checkpoint is None and incident.state is not None:
        return incident.state
    path = folder / CHECKPOINT if checkpoint is None else Path(checkpoint)
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return state


def _verdict(found: Replay, incident: Incident) -> str:
    about = incident.about
    if found.origin is None:
        return (
            f"step {about['step']}: the loss and all gradients are finite, so the bad value came from something that "
            "is not in this folder, such as other parameters or a counter outside of the model"
        )
    reading = Reading(about["step"], about["epoch"], None, None, [], [about["batch_idx"]])
    return finding_of_origin(found.origin, reading, about["batch_idx"]).line


def _same_batch(batch: Any, *args: Any) -> Any:
    return batch


class _Single(Dataset[int]):
    """A dataset with one item, so that the loop runs one batch."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


class _Done(BaseException):
    """Ends the fit after the replay."""


class _Again(Callback):
    """Runs the step at the first batch, and ends the fit."""

    def __init__(self, incident: Incident) -> None:
        self._incident = incident
        self.found: Replay | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        incident, about = self._incident, self._incident.about
        loop: Any = trainer.fit_loop
        with suppress(AttributeError):  # the model may read these counters
            loop.epoch_progress.current.processed = about["epoch"]
            progress = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
            progress.total.completed = about["global_step"]
        from lightning.fabric.utilities import move_data_to_device

        batch = move_data_to_device(incident.batch, pl_module.device)
        kept = KeptBatch(batch, about["batch_idx"], about["step"], about["epoch"], incident.random, [], [])
        pl_module.train()
        modules = dict(named_modules_of(pl_module))
        if unknown := [name for name in (*about["eval"], *about.get("counters", {})) if name not in modules]:
            raise RecorderError(f"the model has no module {unknown[0]!r}, which incident.json names")
        for name in about["eval"]:
            modules[name].training = False
        for name, values in about.get("counters", {}).items():
            table = vars(modules[name])
            table.update({key: value for key, value in values.items() if type(table.get(key)) in (int, float)})
        self.found = replay(trainer, pl_module, [kept])
        raise _Done
