"""Gradients of outputs that the model changes in place, in complete fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder import GradientRecorder, MemorySink, Selection
from lightning_recorder.taps import OutputGradientTap
from tests.callbacks.models import Classifier, fit

LAYERS = ["first", "second", "relu", "third", "flatten", "head"]


class Rows(Classifier):
    """A model of pixel rows with in-place operations on the outputs of its layers, or on copies of them."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.encoder = self.dropout = nn.Identity()  # type: ignore[assignment]  # not used
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu, self.flatten = nn.ReLU(inplace=True), nn.Flatten()
        self.head = nn.Linear(64, 10)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        def after(y: Tensor) -> Tensor:
            return y.clone() if self.copies else y

        x = x[:, 0]
        y = after(self.first(x))
        y += x
        z = after(self.second(y))
        z *= 0.5
        rows = after(self.third(after(self.relu(z))))
        rows += y
        rows[:, 0] = 0.0
        flat = F.relu(after(self.flatten(rows)), inplace=True)
        logits: Tensor = after(self.head(flat))
        logits /= 2
        return logits


def recorded(copies: bool, folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, Tensor]]:
    """Fit, and return the statistics of the gradients and the parameters."""
    sink = MemorySink()
    torch.manual_seed(0)
    model = Rows(copies)
    recorder = GradientRecorder(LAYERS, statistics=["mean", "rms"], every_n_train_steps=1, sinks=[sink])
    fit(model, folder, [recorder], logger=False)
    return sink.scalars, model.state_dict()


def test_each_layer_of_a_model_that_adds_in_place_is_recorded(tmp_path: Path) -> None:
    """Each layer has the same record at each step as if the in-place operations used copies of the outputs."""
    found, parameters = recorded(False, tmp_path / "in place")
    expected, same = recorded(True, tmp_path / "copies")
    assert {tag.split("/")[1] for tag in found} == set(LAYERS)
    assert found == expected
    assert all(torch.equal(parameters[name], same[name]) for name in parameters)


class Halved(Rows):
    """Scales part of the output of ``flatten`` in place through a view, while its input is used elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x[:, 0])
        half = self.flatten(rows)[:, :32]
        half.mul_(2)
        logits: Tensor = self.head(F.pad(half, (0, 32)))
        return logits


def test_a_gradient_that_is_unknown_has_its_reason(tmp_path: Path) -> None:
    """If an in-place change loses the gradient of a module, the receipt names this as the reason."""
    fit(Halved(False), tmp_path, [GradientRecorder(["first", "flatten", "head"])], logger=False)
    about = json.loads((tmp_path / "recorder" / "receipt.json").read_text(encoding="utf-8"))["gradients"]
    assert about["modules"]["flatten"] == {
        "type": "Flatten",
        "fired": False,
        "why": "changed in place: its output is a view that was changed after the module returned it",
    }
    assert [about["modules"][name]["fired"] for name in ("first", "head")] == [True, True]


def wav2vec2_step(how: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the gradients of the outputs, by the tap or by copies, and the gradients of the parameters."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - transformers uses this generator for the masks
    config = transformers.Wav2Vec2Config(  # type: ignore[call-arg]  # mypy misreads its decorator
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        vocab_size=12,
        mask_time_prob=0.5,
        mask_time_length=2,
        mask_feature_prob=0.3,
        mask_feature_length=2,
        layerdrop=0.0,
    )
    # In float64, since copies change the order in which autograd sums gradients, and so their last bits.
    model = transformers.Wav2Vec2ForCTC(config).train().double()
    sounds, labels = torch.randn(2, 1600, dtype=torch.float64), torch.randint(1, 12, (2, 5))
    modules = Selection("**").resolve(model)
    seen: dict[str, Tensor] = {}

    def copied(name: str, output: Tensor) -> Tensor:
        copy = output.clone()
        copy.register_hook(lambda grad: seen.update({name: grad.clone()}))
        return copy

    def put_on(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor) and output.requires_grad:
                return copied(name, output)
            return output

        module.register_forward_hook(hook)

    if how == "copies":
        for name, module in modules.items():
            put_on(name, module)
        model(sounds, labels=labels).loss.backward()
    else:
        watched = modules if how == "tap" else {}
        with OutputGradientTap(watched, lambda site, grad: seen.update({site.name: grad.clone()}), strict=True):
            model(sounds, labels=labels).loss.backward()
    return seen, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_each_module_of_wav2vec2_is_recorded() -> None:
    """With masks written in place, all modules have the same gradients as copies of their outputs."""
    seen, grads = wav2vec2_step("tap")
    expected, _ = wav2vec2_step("copies")
    _, bare = wav2vec2_step("bare")
    assert expected.keys() <= seen.keys()
    assert {"wav2vec2.feature_projection.projection", "wav2vec2.feature_projection.dropout", "lm_head"} <= seen.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(seen[name], grad, rtol=1e-8, atol=1e-12)
    assert all(map(torch.equal, grads, bare))
