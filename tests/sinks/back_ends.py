"""Runs of the real back ends, offline, each with what it takes to begin one and to end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["COMET_QUIET", "comet_experiment", "mlflow_run", "wandb_run"]

COMET_QUIET: dict[str, Any] = {
    "auto_output_logging": False,
    "display_summary_level": 0,
    "log_code": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "log_git_patch": False,
}
"""The options of an experiment that looks at nothing of the machine."""


@contextmanager
def wandb_run(folder: Path, **settings: Any) -> Iterator[Any]:
    """A run of Weights & Biases that lies in the folder."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="tests", dir=str(folder), reinit="create_new", **settings)
    try:
        yield run
    finally:
        run.finish()


@contextmanager
def mlflow_run(database: str, folder: Path) -> Iterator[tuple[Any, str]]:
    """A client and a run of an experiment of its own, whose artifacts lie in the folder."""
    from mlflow import MlflowClient

    client = MlflowClient(database)
    experiment = client.create_experiment(str(folder), artifact_location=folder.as_uri())
    run_id = client.create_run(experiment).info.run_id
    yield client, run_id
    client.set_terminated(run_id)


@contextmanager
def comet_experiment(folder: Path) -> Iterator[Any]:
    """An offline experiment of Comet; the folder has its zip file when it has ended."""
    import comet_ml

    folder.mkdir(parents=True, exist_ok=True)
    experiment = comet_ml.OfflineExperiment(offline_directory=str(folder), **COMET_QUIET)
    try:
        yield experiment
    finally:
        experiment.end()
