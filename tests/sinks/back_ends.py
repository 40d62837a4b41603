"""Offline runs of the real back ends, with what each needs to begin and to end."""

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
"""Return options for an experiment that does not inspect the machine."""


@contextmanager
def wandb_run(folder: Path, **settings: Any) -> Iterator[Any]:
    """Return a Weights & Biases run that is stored in the folder."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="tests", dir=str(folder), reinit="create_new", **settings)
    try:
        yield run
    finally:
        run.finish()


@contextmanager
def mlflow_run(database: str, folder: Path) -> Iterator[tuple[Any, str]]:
    """Return a client and a run in a new experiment, whose artifacts are stored in the folder."""
    from mlflow import MlflowClient

    client = MlflowClient(database)
    experiment = client.create_experiment(str(folder), artifact_location=folder.as_uri())
    run_id = client.create_run(experiment).info.run_id
    yield client, run_id
    client.set_terminated(run_id)


@contextmanager
def comet_experiment(folder: Path) -> Iterator[Any]:
    """Return an offline Comet experiment. The folder contains its ZIP file after it has ended."""
    import comet_ml

    folder.mkdir(parents=True, exist_ok=True)
    experiment = comet_ml.OfflineExperiment(offline_directory=str(folder), **COMET_QUIET)
    try:
        yield experiment
    finally:
        experiment.end()
