"""Two recorded runs for all tests of the page: a ReLU of the second one is dead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, Outputs, ParameterRecorder
from lightning_recorder.reductions import ChannelMoments
from tests.callbacks.models import Classifier, fit

STEPS = 12


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the runs ``healthy`` and ``sick``."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("healthy", "sick"):
        torch.manual_seed(0)
        model = Classifier()
        if name == "sick":
            nn.init.constant_(model.encoder.norm.bias, -100.0)
        outputs = Outputs(plots=False)
        kinds = (ActivationRecorder, GradientRecorder, ParameterRecorder)
        recorders = [kind(every_n_train_steps=1, outputs=outputs) for kind in kinds]
        fit(model, folder / name, [GraphRecorder(), *recorders], max_steps=STEPS, max_epochs=-1)
    return folder


@pytest.fixture(scope="session")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with another activation and one module more, which also recorded each channel."""
    folder = tmp_path_factory.mktemp("changed")
    torch.manual_seed(0)
    model = Classifier()
    model.encoder.relu = nn.GELU()  # type: ignore[assignment]  # another class than before
    model.dropout = nn.Sequential(nn.Dropout(0.2), nn.Tanh())  # type: ignore[assignment]
    activations = ActivationRecorder(
        every_n_train_steps=1, extra=[ChannelMoments()], tensors=["inputs", "outputs"], outputs=Outputs(plots=False)
    )
    fit(model, folder, [GraphRecorder(), activations], max_steps=STEPS, max_epochs=-1)
    return folder
