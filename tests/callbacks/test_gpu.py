"""Training on a GPU, with the same laws as on a CPU."""

from __future__ import annotations

import math
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    StepWatch,
    TensorDumper,
    default_recorders,
)
from lightning_recorder.reductions import statistics
from lightning_recorder.reductions.kernels import fused_cuda
from lightning_recorder.statistics import sites
from tests.callbacks.models import LEAVES, Classifier, digits
from tests.callbacks.small import WEIGHTS_ONLY
from tests.callbacks.test_noninterference import Gan, Gpt2, Mlp, Reentrant, assert_same

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    # Torch reads .grad of tensors that are not leaves while it traces, and ignores the warning.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

PACKAGE = "/lightning_recorder/"
KINDS = (ActivationRecorder, GradientRecorder, ParameterRecorder)


def fit(model: LightningModule, folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    """Train on :func:`digits`, seeded, on the GPU and without console output."""
    seed_everything(5, verbose=False)
    options = {
        "max_epochs": 2,
        "accelerator": "gpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        **options,
    }
    ckpt = options.pop("ckpt_path", None)
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with torch.device("cpu"):
        batches = digits()
    trainer.fit(model, batches, ckpt_path=ckpt, **WEIGHTS_ONLY)
    return trainer


def recorders(sink: MemorySink, **options: Any) -> list[Any]:
    """Return recorders of activations, gradients and parameters on every step."""
    options = {
        "every_n_train_steps": 1,
        "sinks": [sink],
        "strict": True,
        "outputs": Outputs(curves="all", plots=False),
        **options,
    }
    return [kind(**options) for kind in KINDS]


def trained(kind: type[LightningModule], folder: Path, callbacks: list[Any], **options: Any) -> list[Any]:
    """Train a new model, and return everything that training computes."""
    seed_everything(1, verbose=False)
    model = kind()
    trainer = fit(model, folder, callbacks, **options)
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return [model.losses, dict(model.state_dict()), states, torch.get_rng_state(), torch.cuda.get_rng_state()]


@pytest.fixture(params=["torch", "triton"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute the statistics with torch, or with the kernels."""
    chosen = str(request.param)
    if chosen == "torch":
        monkeypatch.setattr(fused_cuda, "add_tensor_on_device", lambda *args: False)
        monkeypatch.setattr(statistics, "_QUICK", ())
        monkeypatch.setattr(sites, "add_tensor_on_device", lambda *args: False)
    return chosen


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "64-true"])
@pytest.mark.parametrize("kind", [Classifier, Mlp, Gpt2, Reentrant])
def test_training_is_bitwise_the_same(kind: type[Classifier], precision: str, tmp_path: Path) -> None:
    """Losses, parameters, optimizer and random states are those of a bare fit."""
    options: dict[str, Any] = {"precision": precision}
    bare = trained(kind, tmp_path / "bare", [], **options)
    try:
        assert_same(trained(kind, tmp_path / "again", [], **options), bare)
    except AssertionError:
        pytest.skip("two bare fits differ, since some kernels of cuDNN are not deterministic")
    callbacks = [*recorders(MemorySink()), GraphRecorder(strict=True), StepWatch(strict=True)]
    assert_same(trained(kind, tmp_path / "recorded", callbacks, **options), bare)


def test_two_optimizers(tmp_path: Path) -> None:
    """A GAN with manual optimization trains as without recorders."""
    bare = trained(OnDevice, tmp_path / "bare", [])
    callbacks = [*recorders(MemorySink()), GraphRecorder(strict=True), StepWatch(strict=True)]
    assert_same(trained(OnDevice, tmp_path / "recorded", callbacks), bare)


class Still(Classifier):
    """The model without dropout, whose masks differ between a CPU and a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()  # type: ignore[assignment]  # another module


class Smooth(Still):
    """Layers whose gradients are no rounding noise, as those before a normalization are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 10)
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh())  # type: ignore[assignment]  # another encoder


class OnDevice(Gan):
    """The model with noise that is drawn on the device."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        with torch.device(self.device):
            return super().training_step(batch, batch_idx)


def numbers(sink: MemorySink) -> dict[tuple[str, int], float]:
    """Return all scalars by tag and step."""
    return {(tag, step): value for tag, by_step in sink.scalars.items() for step, value in by_step.items()}


def test_records_are_those_of_a_cpu(way: str, tmp_path: Path) -> None:
    """In double precision, a GPU gives the scalars and the counts of the histograms that a CPU gives."""
    on_cpu, on_gpu = MemorySink(), MemorySink()
    for sink, accelerator in ((on_cpu, "cpu"), (on_gpu, "gpu")):
        trained(Smooth, tmp_path / accelerator, recorders(sink), accelerator=accelerator, precision="64-true")
    assert set(numbers(on_gpu)) == set(numbers(on_cpu))
    different = {
        key: (numbers(on_gpu)[key], value)
        for key, value in numbers(on_cpu).items()
        if not math.isclose(numbers(on_gpu)[key], value, rel_tol=1e-6, abs_tol=1e-9)
    }
    assert different == {}
    for tag, by_step in on_cpu.histograms.items():
        for step, expected in by_step.items():
            found = on_gpu.histograms[tag][step]
            assert sum(found.counts) == sum(expected.counts)
            assert math.isclose(found.max, expected.max, rel_tol=1e-6, abs_tol=1e-9)


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collect the places in this package that wait for the GPU, except those in its own threads."""
    found: list[str] = []

    def note(message: Any, *args: Any, **options: Any) -> None:
        stack = traceback.extract_stack()
        ours = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in stack if PACKAGE in frame.filename]
        if "synchroniz" in str(message) and ours and "lightning" not in threading.current_thread().name:
            found.append(" ".join(ours))

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", note)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Within(Callback):
    """Collects the waits from the second batch of a training to its last but one."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.found: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            self._waits = waits()
            self.found = self._waits.__enter__()
        if trainer.global_step == self.last:
            self._waits.__exit__(None, None, None)


def test_the_debug_mode_sees_a_wait() -> None:
    """A wait in a file of a folder of that name is found."""
    space: dict[str, Any] = {}
    exec(compile("def wait(x):\n    return x.sum().item()\n", f"{PACKAGE}wait.py", "exec"), space)
    with waits() as found:
        space["wait"](torch.ones(3, device="cuda"))
    assert found == ["wait.py:2"]


@pytest.mark.parametrize(("every", "records"), [(1, 12), (5, 3)])
def test_nothing_waits_for_the_gpu(every: int, records: int, way: str, tmp_path: Path) -> None:
    """From the second batch on, no callback waits for the GPU."""
    within = Within(10)
    sink = MemorySink()
    callbacks = [within, *recorders(sink, every_n_train_steps=every), StepWatch(strict=True)]
    fit(Classifier(), tmp_path, callbacks)
    assert len(sink.scalars[f"activations/{LEAVES[0]}/rms"]) == records
    assert sorted(set(within.found)) == []


def test_a_resumed_run_continues(tmp_path: Path) -> None:
    """A run that is resumed on a GPU has the parameters and records of an uninterrupted one."""
    whole, first, second = MemorySink(), MemorySink(), MemorySink()
    expected = trained(Still, tmp_path / "whole", recorders(whole))
    options: dict[str, Any] = {"limit_train_batches": 6}
    seed_everything(1, verbose=False)
    trainer = fit(Still(), tmp_path / "first", recorders(first), max_epochs=1, **options)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    seed_everything(1, verbose=False)
    model = Still()
    fit(model, tmp_path / "second", recorders(second), ckpt_path=tmp_path / "one.ckpt", **options)
    assert_same(dict(model.state_dict()), expected[1])
    late = {key: repr(value) for key, value in numbers(whole).items() if key[1] >= 6}
    assert {key: repr(value) for key, value in numbers(second).items()} == late


class Poisoned(Classifier):
    """A model whose second convolution gives an infinity in the fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.conv2.register_forward_hook(self._poison)
        self.steps = 0

    def _poison(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * math.inf if self.steps == 4 else output

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("options", "is_named"), [({}, True), ({"wait": True}, True), ({"keep_parameters": False}, False)]
)
def test_the_watch_names_the_step_and_the_module(options: dict[str, bool], is_named: bool, tmp_path: Path) -> None:
    """The first step that is not finite is named, and also the module, unless no copy of the parameters is kept."""
    watch = StepWatch(strict=True, **options)  # type: ignore[arg-type]  # all are booleans
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(Poisoned(), tmp_path, [watch])
    (finding,) = watch.found
    assert finding.first_step == 3
    assert (finding.module == "encoder.conv2") == is_named


def test_the_default_set_writes_everything(tmp_path: Path) -> None:
    """The default recorders, the graph and the dumps of tensors work."""
    callbacks = [*default_recorders(every_n_train_steps=3), TensorDumper("head", at="steps", every_n_train_steps=3)]
    trainer = fit(Classifier(), tmp_path, callbacks, logger=True)
    (graph,) = [each for each in callbacks if isinstance(each, GraphRecorder)]
    assert graph.graph is not None
    devices = {meta.device for node in graph.graph.nodes for meta in node.outputs}
    assert devices == {"cuda:0"}
    assert list(Path(str(trainer.log_dir)).rglob("*.safetensors"))


class Nested(Mlp):
    """A reentrant checkpoint in a reentrant checkpoint, around two calls of the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(32, 32)

    def twice(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        given: Tensor = checkpoint(self.shared, x * 2, use_reentrant=True)
        return given

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.twice, self.encoder(x.requires_grad_()), use_reentrant=True)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the outer one first runs without
def test_calls_apart_in_nested_checkpoints(tmp_path: Path) -> None:
    """Gradients have the number of their forward call as on a CPU, also in nested reentrant checkpoints."""
    sinks = {}
    for accelerator in ("cpu", "gpu"):
        sinks[accelerator] = MemorySink()
        recorder = GradientRecorder("shared", every_n_train_steps=1, sinks=[sinks[accelerator]], per_call=True)
        seed_everything(1, verbose=False)
        model = Nested()
        model.encoder.get_submodule("3").p = 0.0  # type: ignore[assignment]  # masks differ between a CPU and a GPU
        fit(model, tmp_path / accelerator, [recorder], accelerator=accelerator, precision="64-true")
    found, expected = (numbers(sinks[name]) for name in ("gpu", "cpu"))
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert math.isclose(found[key], value, rel_tol=1e-6, abs_tol=1e-9), key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("way", ["eager", "inside", "skip"])
def test_compiled(way: Any, mode: str, tmp_path: Path) -> None:
    """A compiled model is recorded. With ``"skip"``, training is bitwise that of the compiled model."""

    def run(folder: Path, callbacks: list[Any]) -> dict[str, Tensor]:
        torch._dynamo.reset()
        seed_everything(1, verbose=False)
        model = Still()
        model.compile(mode=mode)
        fit(model, folder, callbacks)
        return dict(model.state_dict())

    bare = run(tmp_path / "bare", [])
    sink = MemorySink()
    kinds: list[Any] = [
        kind(every_n_train_steps=5, sinks=[sink], strict=True, outputs=Outputs(plots=False), compiled=way)
        for kind in KINDS
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(tmp_path / "recorded", kinds)
    if way == "skip":
        try:
            assert_same(run(tmp_path / "again", []), bare)
        except AssertionError:
            pytest.skip("two bare fits differ, since torch chooses kernels by their speed at that moment")
        assert_same(found, bare)
    else:  # eager code rounds differently, and so do the kernels of the graph that records
        assert list(sink.scalars[f"activations/{LEAVES[0]}/rms"]) == [0, 4, 9]


class Wide(Classifier):
    """So many layers that their statistics would share rows of memory on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64) for _ in range(260)])  # type: ignore[assignment]  # another encoder
        self.head = nn.Linear(64, 10)
        self.dropout = nn.Identity()  # type: ignore[assignment]  # another module


def test_another_default_device(tmp_path: Path) -> None:
    """A program that creates all its tensors on the GPU gets the same records."""
    found = []
    for device in (None, "cuda"):
        sink = MemorySink()
        seed_everything(1, verbose=False)
        model = Wide()
        torch.set_default_device(device)
        try:
            fit(model, tmp_path / str(device), [*recorders(sink), StepWatch(strict=True)], max_steps=3)
        finally:
            torch.set_default_device(None)
        found.append({key: repr(value) for key, value in numbers(sink).items()})
    assert found[0] == found[1]


def test_memory_of_the_device(tmp_path: Path) -> None:
    """Recorders need less than 8 MiB on the device beyond what training needs; blocks of statistics take 1 MiB each."""

    def most(folder: Path, callbacks: list[Any]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fit(Classifier(), folder, callbacks)
        return torch.cuda.max_memory_allocated()

    bare = most(tmp_path / "bare", [])
    assert most(tmp_path / "recorded", recorders(MemorySink())) - bare < 2**23
