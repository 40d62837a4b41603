"""Fixtures that keep back ends off the network and out of the user's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an empty home folder in which every library is configured to stay silent."""
    home = tmp_path_factory.mktemp("home")
    silent = {
        "HOME": str(home),
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DIR": str(home),
        "WANDB_CACHE_DIR": str(home / "cache"),
        "WANDB_CONFIG_DIR": str(home / "config"),
        "WANDB_DATA_DIR": str(home / "data"),
        "WANDB_ARTIFACT_DIR": str(home / "artifacts"),
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_DISABLE_GIT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(home),
        "COMET_LOGGING_CONSOLE": "CRITICAL",
        "COMET_LOGGING_FILE": "",
        "COMET_DISPLAY_SUMMARY_LEVEL": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in silent.items():
            patch.setenv(name, value)
        yield home
        import wandb

        wandb.teardown()  # ends its process and discards the environment that it has read


@pytest.fixture(scope="module")
def database(offline: Path) -> Iterator[str]:
    """Return the URI of an MLflow store in SQLite, shared because creating its tables takes seconds."""
    import mlflow

    yield f"sqlite:///{offline / 'mlflow.db'}"
    mlflow.set_tracking_uri("")  # Lightning's logger has set it for the whole process
