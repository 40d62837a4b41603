"""One recorded run and one server for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, Outputs
from tests.browser.server import tensorboard
from tests.callbacks.models import Classifier, fit


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with all three callbacks."""
    folder = tmp_path_factory.mktemp("run")
    recorders = [ActivationRecorder(outputs=Outputs(plots=False)), GradientRecorder(outputs=Outputs(plots=False))]
    fit(Classifier(), folder, [GraphRecorder(), *recorders], max_epochs=3)
    return folder / "lightning_logs"


@pytest.fixture(scope="session")
def address(recorded_run: Path) -> Iterator[str]:
    """The address of a TensorBoard server over that run."""
    with tensorboard(recorded_run) as running:
        yield running
