"""Recording inside compiled code, which is the default on a CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
    StepWatch,
    default_recorders,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.internals import compiled_operators
from tests.callbacks.models import LEAVES, digits, fit, hooks_left
from tests.callbacks.test_compiled import QUIET, Bare, Losses, _fresh, compiled
from tests.callbacks.test_compiled_functions import receipt
from tests.callbacks.test_noninterference import assert_same

# Torch reads .grad of tensors that are not leaves while it traces, and ignores the warning.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

fresh = _fresh  # a fixture for every test
KINDS: list[type[StatisticsCallback]] = [ActivationRecorder, GradientRecorder, ParameterRecorder]


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    """Every test ends with all recordings switched off."""
    yield
    assert compiled_operators.ACTIVE == ""


def recorders(sink: MemorySink, **options: Any) -> list[StatisticsCallback]:
    """Return recorders of activations, gradients and parameters, without the functions that compiled code hides."""
    options = {
        "every_n_train_steps": 3,
        "sinks": [sink],
        "strict": True,
        "outputs": QUIET,
        **options,
    }
    hidden: dict[str, Any] = {"functions": False}
    return [kind(**options, **({} if kind is ParameterRecorder else hidden)) for kind in KINDS]


def compilations() -> tuple[int, int, int]:
    """Return the numbers of graphs, graph breaks and recompilations."""
    return (
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        sum(counters["recompiles"].values()),
    )


def train(model: Any, given: Any, folder: Path, callbacks: list[Any], **options: Any) -> list[Any]:
    """Train, and return everything that training computes."""
    counters.clear()
    losses = Losses()
    trainer = fit(given, folder, [*callbacks, losses], logger=False, **{"max_epochs": 2, **options})
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return [losses.losses, dict(model.state_dict()), states, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("how", "backend"),
    [("fit", "eager"), ("submodule", "aot_eager"), ("module.compile", "eager"), ("model.compile", "eager")],
)
def test_recorded_steps_are_a_second_graph_and_training_is_the_same(how: str, backend: str, tmp_path: Path) -> None:
    """There is one graph for recorded steps and one for the others, and training is bitwise that of the bare run."""
    model, given = compiled(how, backend)
    bare = train(model, given, tmp_path / "bare", [])
    assert compilations() == (1, 0, 0)
    for every, graphs, steps in ((1, 1, [*range(12)]), (10, 2, [0, 9]), (0, 1, [])):
        torch._dynamo.reset()
        model, given = compiled(how, backend)
        sink = MemorySink()
        callbacks = recorders(sink, every_n_train_steps=every or 1)
        if not every:
            for each in callbacks:
                each.disable()
        recorded = train(model, given, tmp_path / str(every), [*callbacks, StepWatch(strict=True)])
        assert_same(recorded, bare)
        assert compilations() == (graphs, 0, 0)
        tags = [f"{group}/{name}/mean" for group in ("activations", "gradients") for name in LEAVES]
        assert [list(sink.scalars.get(tag, {})) for tag in tags] == [steps] * len(tags)
        assert list(sink.scalars.get("parameters/encoder.conv1/weight/update_ratio", {})) == steps
        assert hooks_left(model) == []


@pytest.mark.parametrize("how", ["fit", "submodule"])
def test_records_are_those_of_the_eager_recorders(how: str, tmp_path: Path) -> None:
    """With a backend that computes like eager code, all statistics and histograms are equal to the bit."""
    found = []
    for stance in ("eager", "inside"):
        torch._dynamo.reset()
        _, given = compiled(how, "aot_eager" if how == "submodule" else "eager")
        sink = MemorySink()
        options: dict[str, Any] = {"compiled": stance, "every_n_train_steps": 2, "sinks": [sink], "strict": True}
        options |= {"outputs": QUIET, "functions": False}
        both = ActivationRecorder(tensors=["inputs", "outputs"], **options)
        fit(given, tmp_path / stance, [both, GradientRecorder(**options)], logger=False)
        histograms = sink.histograms.items()
        counts = {tag: {step: each.counts.tolist() for step, each in steps.items()} for tag, steps in histograms}
        found.append((sink.scalars, counts))
    assert len([tag for tag in found[0][0] if tag.endswith("/rms")]) == 3 * len(LEAVES)
    assert found[1] == found[0]


def test_without_records_the_graph_is_that_of_the_bare_run(tmp_path: Path) -> None:
    """The graph of unrecorded steps has the inputs and the operations that it has without hooks."""
    graphs: list[tuple[set[str], list[Any]]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        # The order of the inputs is the order in which torch.compile first sees them, which depends on the hooks.
        given = {node.name for node in graph.graph.nodes if node.op == "placeholder"}
        graphs.append((given, [node.format_node() for node in graph.graph.nodes if node.op != "placeholder"]))
        return graph.forward

    for callbacks in ([], recorders(MemorySink(), every_n_train_steps=0)):
        torch._dynamo.reset()
        _, given = compiled("fit", keep)  # type: ignore[arg-type]  # a backend can be a function
        for each in callbacks:
            each.disable()
        fit(given, tmp_path, [*callbacks], logger=False, max_steps=2)
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]


class Block(nn.Module):
    """A residual block with an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.act = nn.ReLU(inplace=True)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.act(self.inner(x)))  # type: ignore[no-any-return]  # of a module


class Stack(nn.Module):
    """Three blocks, with or without checkpoints; the first block may run twice."""

    def __init__(self, *, checkpoints: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints, self.shared = checkpoints, shared

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.blocks[0](x) if self.shared else x


class Stacked(Bare):
    """A model with a stack of equal blocks."""

    learns_with: Callable[..., torch.optim.Optimizer] = torch.optim.Adam

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64))  # type: ignore[assignment]  # another encoder
        self.stack = Stack(**options)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stack(self.encoder(x)))
        return logits

    def configure_optimizers(self) -> Any:
        return self.learns_with(self.parameters(), lr=1e-2)


NETS: dict[str, dict[str, bool]] = {
    "regional": {"shared": True},
    "fullgraph": {},
    "dynamic": {},
    "checkpoint": {"checkpoints": True},
}


def stacked(how: str, backend: str = "aot_eager") -> Stacked:
    """Return a model whose stack is compiled in one of the ways."""
    torch._dynamo.reset()
    model = Stacked(**NETS[how])
    if how == "regional":
        for block in model.stack.blocks:
            block.compile(backend=backend)
    else:
        model.stack.compile(backend=backend, fullgraph=how == "fullgraph", dynamic=how == "dynamic" or None)
    return model


@pytest.mark.parametrize("how", list(NETS))
def test_ways_of_compiling(how: str, tmp_path: Path) -> None:
    """Equal blocks share one graph, checkpoints are recorded once, and the records are those of the eager recorders."""
    found = []
    for stance in (None, "eager", "inside"):
        model, sink = stacked(how, "aot_eager" if how == "regional" else "eager"), MemorySink()
        callbacks = recorders(sink, compiled=stance, every_n_train_steps=4) if stance else []
        found.append((train(model, model, tmp_path / str(stance), callbacks), compilations(), sink))
    (bare, graphs, _), (_, _, eager), (recorded, inside_graphs, inside) = found
    assert graphs == (1, 0, 0)
    assert inside_graphs == (2, 0, 0)
    assert_same(recorded, bare)
    assert inside.scalars == eager.scalars
    assert len([tag for tag in inside.scalars if tag.endswith("/zero_fraction")]) == 23  # nn.Flatten has no gradient


@pytest.mark.parametrize("how", ["regional", "fullgraph"])
def test_calls_of_a_shared_block_are_kept_apart(how: str, tmp_path: Path) -> None:
    """With ``per_call=True``, the activations of each call are those that the eager recorder finds."""
    found = []
    for stance in ("eager", "inside"):
        model, sink = stacked(how), MemorySink()
        model.stack.shared = True
        options: dict[str, Any] = {"compiled": stance, "every_n_train_steps": 3, "strict": True, "sinks": [sink]}
        options["outputs"] = Outputs(plots=False, curves="all")
        recorder = ActivationRecorder(per_call=True, tensors=["inputs", "outputs"], **options)
        train(model, model, tmp_path / stance, [recorder])
        found.append(sink.scalars)
    assert compilations() == (2, 0, 0)
    places = {tag.rpartition("/")[0] for tag in found[1] if "blocks.0.inner" in tag}
    assert len(places) == 4  # two calls, each with an input and an output
    assert found[1] == found[0]


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder])
def test_some_of_several_equal_blocks(kind: type[StatisticsCallback], tmp_path: Path) -> None:
    """A block that is recorded and an equal one that is not share the graph of unrecorded steps only."""
    model, sink = stacked("regional", "eager"), MemorySink()
    chosen = ["stack.blocks.1.inner", "stack.blocks.1.outer", "stack.blocks.2.outer"]
    recorder = kind(chosen, compiled="inside", every_n_train_steps=3, sinks=[sink], strict=True)
    train(model, model, tmp_path, [recorder])
    group = recorder.group
    means = {tag: list(steps) for tag, steps in sink.scalars.items() if tag.endswith("/rms")}
    assert means == {f"{group}/{name}/rms": [0, 2, 5, 8, 11] for name in chosen}
    assert compilations()[0] == 4  # three combinations of recorded modules, and unrecorded steps
    assert hooks_left(model) == []


def test_a_second_run_that_records_more(tmp_path: Path) -> None:
    """A recorder of more modules than that of an earlier run has graphs of its own for recorded steps."""
    model, given = compiled("submodule", "eager")
    for chosen in (["encoder.conv1"], ["encoder.conv1", "encoder.norm", "encoder.conv2"]):
        sink = MemorySink()
        recorder = ActivationRecorder(
            chosen, compiled="inside", every_n_train_steps=3, sinks=[sink], outputs=Outputs(dumps=False)
        )
        train(model, given, tmp_path, [recorder])
        means = {tag: list(steps) for tag, steps in sink.scalars.items() if tag.endswith("/rms")}
        assert means == {f"activations/{name}/rms": [0, 2, 5, 8, 11] for name in chosen}


def test_recorders_with_different_intervals(tmp_path: Path) -> None:
    """There is one graph for each combination of recorders that occurs: both, one of them, and none."""
    model, given = compiled("fit", "eager")
    sink = MemorySink()
    options: dict[str, Any] = {"compiled": "inside", "sinks": [sink], "strict": True, "outputs": QUIET}
    every_second = ActivationRecorder(every_n_train_steps=2, **options)
    every_fourth = GradientRecorder(every_n_train_steps=4, **options)
    train(model, given, tmp_path, [every_second, every_fourth])
    assert compilations() == (3, 0, 0)
    assert list(sink.scalars["activations/head/rms"]) == [0, 1, 3, 5, 7, 9, 11]
    assert list(sink.scalars["gradients/head/rms"]) == [0, 3, 7, 11]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_last_batch_of_another_size(dynamic: bool | None, tmp_path: Path) -> None:
    """A smaller last batch is recorded, and needs another graph only if it does without recorders."""
    numbers, sink = [], MemorySink()
    for callbacks in ([], recorders(sink, every_n_train_steps=1)):
        torch._dynamo.reset()
        torch.manual_seed(2)
        model = Bare()
        model.encoder.compile(backend="eager", dynamic=dynamic)
        loader = DataLoader(digits().dataset, batch_size=10)  # 10, 10, 10, 10, 8
        train(model, model, tmp_path, callbacks, loader=loader, max_epochs=1)
        numbers.append(compilations())
        if callbacks:
            counts = [each.counts.sum() for each in sink.histograms["activations/encoder.relu/histogram"].values()]
            assert counts == [2560, 2560, 2560, 2560, 2048]
    assert numbers[0] == numbers[1]
    assert numbers[0][0] == (1 if dynamic else 2)


def test_training_and_validation_alternate(tmp_path: Path) -> None:
    """Training and validation are recorded in graphs of their own, which are compiled once."""
    model, given = compiled("submodule", "eager")
    sink = MemorySink()
    schedule = Schedule(stages=("train", "validate"))
    recorder = ActivationRecorder(
        compiled="inside", every_n_train_steps=1, schedule=schedule, sinks=[sink], strict=True, outputs=QUIET
    )
    train(model, given, tmp_path, [recorder], validation=digits(2), max_epochs=3)
    # Training, the sanity check, and validation.
    assert compilations() == (3, 0, 0)
    assert list(sink.scalars["activations/encoder.norm/rms"]) == list(range(18))
    assert list(sink.scalars["activations_validate/encoder.norm/rms"]) == [5, 11, 17]


def test_a_resumed_run_continues(tmp_path: Path) -> None:
    """A run that resumes in a window of several steps has the same records as with the eager recorders."""
    found = []
    for stance in ("eager", "inside"):
        sink, path = MemorySink(), None
        for steps in (4, 8):
            torch._dynamo.reset()
            _, given = compiled("submodule", "eager")
            recorder = ActivationRecorder(
                compiled=stance,
                every_n_train_steps=1,
                reduce=8,
                sinks=[sink],
                outputs=Outputs(plots=False, dumps=False),
                functions=False,  # compiled code hides them
            )
            saving = ModelCheckpoint(dirpath=tmp_path / stance, every_n_train_steps=4, save_top_k=-1)
            trainer = fit_from(given, tmp_path / stance, [recorder, saving], path, steps)
            path = str(trainer.checkpoint_callback.best_model_path)
        found.append(sink.scalars)
    assert found[0] == found[1]
    # The first run also writes what it has not written when it ends.
    assert list(found[0]["activations/encoder.norm/rms"]) == [3, 7]


def fit_from(given: Any, folder: Path, callbacks: list[Any], path: str | None, steps: int) -> Any:
    """Train up to a step on one epoch of eight batches, from a checkpoint if there is a path."""
    seed_everything(5, verbose=False)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=callbacks,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(given, digits(4), ckpt_path=path)
    return trainer


class Pipeline(nn.Sequential):
    """A class of the user that inherits its forward method from torch."""


EAGER: dict[str, str] = {
    "compiled before": r"Encoder was compiled before .*; call torch\._dynamo\.reset\(\) before the run",
    "torch's own module": r"'encoder' is a Sequential .*; use torch\.compile\(module\)",
    "torch's own method": r"'encoder' is a Pipeline .*; use torch\.compile\(module\)",
    "per_call": "per_call=True needs it for gradients",
    "inputs": "the gradients of inputs need it; tensors='outputs' does not",
}


@pytest.mark.parametrize("how", list(EAGER))
def test_code_that_cannot_be_traced_runs_eagerly(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The recorders then run recorded steps eagerly and say why. The advice of the message makes them record inside."""
    torch.manual_seed(2)
    model, wraps = Bare(), how.startswith("torch's own")
    if wraps:
        kind = nn.Sequential if how == "torch's own module" else Pipeline
        model.encoder = kind(model.encoder)  # type: ignore[assignment]  # has the same interface
    model.encoder.compile(backend="eager")
    if how == "compiled before":
        fit(model, tmp_path, logger=False)
    options: dict[str, Any] = {"every_n_train_steps": 3, "functions": False, "strict": True}
    sink = MemorySink()
    tensors = "inputs" if how == "inputs" else "outputs"
    recorder = GradientRecorder(sinks=[sink], per_call=how == "per_call", tensors=tensors, **options)
    with caplog.at_level("INFO"):
        fit(model, tmp_path, [recorder], logger=False)  # a warning is an error
    said = re.compile(f"GradientRecorder runs compiled code eagerly .*: {EAGER[how]}")
    assert len([each for each in caplog.messages if said.match(each)]) == 1
    assert re.match(f"eager: .*{EAGER[how]}", receipt(tmp_path)["gradients"]["compiled"])
    # The first module has no input gradient.
    assert len([tag for tag in sink.scalars if tag.endswith("/rms")]) == len(LEAVES) - (how == "inputs")

    torch._dynamo.reset()
    if wraps:
        model.encoder._compiled_call_impl = None
        model.encoder = torch.compile(model.encoder, backend="eager")  # type: ignore[assignment]  # as above
    sink = MemorySink()
    train(model, model, tmp_path, [GradientRecorder(sinks=[sink], compiled="inside", **options)])
    assert len([tag for tag in sink.scalars if tag.endswith("/rms")]) == len(LEAVES)
    assert compilations() == (2, 0, 0)


def test_inside_warns_if_it_is_not_possible(tmp_path: Path) -> None:
    """``compiled="inside"`` gives a warning, and the run is recorded anyway."""
    model = Bare()
    model.encoder.compile(backend="eager")
    sink = MemorySink()
    options: dict[str, Any] = {"every_n_train_steps": 3, "functions": False}
    recorder = GradientRecorder(compiled="inside", per_call=True, sinks=[sink], **options)
    with pytest.warns(RecorderWarning, match=f"GradientRecorder runs compiled code eagerly .*: {EAGER['per_call']}"):
        fit(model, tmp_path, [recorder], logger=False)
    assert len([tag for tag in sink.scalars if tag.endswith("/rms")]) == len(LEAVES)


@pytest.mark.parametrize("choice", ["auto", "eager", "skip"])
def test_the_receipt_says_how_compiled_modules_were_recorded(choice: str, tmp_path: Path) -> None:
    """The file and the text have the way that was taken; they say nothing of parameters and uncompiled models."""
    for model in (compiled("submodule", "eager")[1], Bare()):
        is_compiled = hasattr(model.encoder, "_orig_mod")
        sink = MemorySink()
        fit(model, tmp_path, recorders(sink, compiled=choice), logger=False)
        way = {"auto": "inside", "eager": "eager", "skip": ""}[choice] if is_compiled else ""
        ways = {label: about["compiled"] for label, about in receipt(tmp_path).items()}
        assert ways == {"activations": way, "gradients": way, "parameters": ""}
        told = "Compiled modules were recorded inside their compiled code." in str(sink.texts)
        assert told == (way == "inside")


def test_a_disabled_recorder_does_not_tell_of_a_compilation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the time of compilation only if a step is recorded."""
    for is_disabled in (True, False):
        _, given = compiled("submodule", "eager")
        recorder = ActivationRecorder(strict=True, outputs=QUIET)
        if is_disabled:
            recorder.disable()
        with caplog.at_level("INFO"):
            fit(given, tmp_path, [recorder], logger=False)
        told = [each for each in caplog.messages if each.startswith("compiling the recorded step")]
        assert len(told) == (not is_disabled)


class Idle(Bare):
    """Has modules that it never calls, inside and outside of compiled code, and one that a compiled function calls."""

    def __init__(self, *, has_function: bool) -> None:
        super().__init__()
        self.idle, self.encoder.idle, self.hidden = nn.Identity(), nn.Identity(), nn.Identity()
        self.encoder = torch.compile(self.encoder, backend="eager")  # type: ignore[assignment]  # has the same interface
        self.function = torch.compile(self._scale, backend="eager") if has_function else self._scale

    def _scale(self, x: Tensor) -> Tensor:
        result: Tensor = self.hidden(x * 2)
        return result

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function(x))


@pytest.mark.parametrize("has_function", [False, True])
def test_modules_that_are_never_called_are_not_reported_as_compiled(has_function: bool, tmp_path: Path) -> None:
    """Only compiled functions can hide calls of modules beside compiled modules, and the reason names them."""
    fit(Idle(has_function=has_function), tmp_path, [ActivationRecorder(strict=True, outputs=QUIET)], logger=False)
    modules = receipt(tmp_path)["activations"]["modules"]
    why = {name: modules[name].get("why", "") for name in ("idle", "encoder.idle", "hidden")}
    never = "never called: no recorded step called it"
    if has_function:
        hidden = "compiled: no call of it outside of compiled code (Idle._scale), which stays compiled unless "
        never = hidden = f"{hidden}compiled='eager'"
    else:
        hidden = ""
    assert why == {"idle": never, "encoder.idle": never, "hidden": hidden}


def test_on_a_device_without_tests_the_default_is_eager() -> None:
    """``"auto"`` records inside compiled code on a CPU only, and ``"inside"`` on any device."""
    for kind in (ActivationRecorder, GradientRecorder):
        assert kind()._why_eager(torch.device("cpu")) == ""
        assert "compiled='inside' does it on a cuda device" in kind()._why_eager(torch.device("cuda", 1))
        assert kind(compiled="inside")._why_eager(torch.device("cuda", 1)) == ""


def test_recorders_that_can_and_cannot_record_inside(tmp_path: Path) -> None:
    """If one recorder needs eager steps, the others record the same steps, and each tensor is counted once."""
    model, given = compiled("submodule", "eager")
    sink = MemorySink()
    options: dict[str, Any] = {"every_n_train_steps": 3, "sinks": [sink], "strict": True, "outputs": QUIET}
    options["statistics"] = ["count"]
    both = [ActivationRecorder(**options), GradientRecorder(tensors=["inputs", "outputs"], **options)]
    train(model, given, tmp_path, both)
    activations, gradients = (
        [sink.scalars[f"{group}/{name}/count"] for name in LEAVES] for group in ("activations", "gradients")
    )
    assert activations == gradients
    assert all(list(each) == [0, 2, 5, 8, 11] and len(set(each.values())) == 1 for each in activations)
    assert compilations() == (1, 0, 0)


def test_a_second_run_of_the_same_model_is_recorded(tmp_path: Path) -> None:
    """After a recorded run, further runs use the graphs of the first one and are recorded completely."""
    model, given = compiled("submodule", "eager")
    for folder in ("first", "second"):
        sink = MemorySink()
        train(model, given, tmp_path / folder, recorders(sink))
        tags = [tag for tag in sink.scalars if tag.startswith("gradients/") and tag.endswith("/rms")]
        assert [list(sink.scalars[tag]) for tag in tags] == [[0, 2, 5, 8, 11]] * len(LEAVES)
        assert compilations() == ((2, 0, 0) if folder == "first" else (0, 0, 0))


def test_an_exception_in_a_recorded_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """An exception ends the run as it does without recorders, with the recordings switched off and no hook left."""

    class Failing(Bare):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if batch_idx == 2:
                batch = [batch[0][:, :, :, :0], batch[1]]  # raises in the compiled head
            return super().training_step(batch, batch_idx)

    model = Failing()
    model.head.__class__ = type("Head", (nn.Linear,), {"__module__": __name__})
    model.encoder.compile(backend="eager")
    sink = MemorySink()
    with pytest.raises(RuntimeError):
        fit(model, tmp_path, recorders(sink, every_n_train_steps=1), logger=False)
    assert hooks_left(model) == []
    assert compiled_operators.ACTIVE == ""
    assert {0, 1} <= set(sink.scalars["activations/encoder.conv1/rms"])


def test_the_time_of_the_compilation_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first recorded step logs the time of its compilation, once for all recorders."""
    _, given = compiled("fit", "eager")
    with caplog.at_level("INFO"):
        fit(given, tmp_path, recorders(MemorySink()), logger=False)
    said = [each for each in caplog.messages if each.startswith("compiling the recorded step: ")]
    assert len(said) == 1
    assert math.isfinite(float(said[0].removeprefix("compiling the recorded step: ").removesuffix(" s")))


def test_the_gradients_of_accumulated_and_scaled_losses(tmp_path: Path) -> None:
    """The scale of the gradients is that of the eager recorders and is no constant of the graph."""
    found = []
    for stance in ("eager", "inside"):
        torch._dynamo.reset()
        _, given = compiled("submodule", "eager")
        sink = MemorySink()
        options: dict[str, Any] = {"compiled": stance, "every_n_train_steps": 1, "sinks": [sink], "strict": True}
        options |= {"outputs": QUIET, "functions": False}
        fit(
            given,
            tmp_path / stance,
            [GradientRecorder(**options)],
            logger=False,
            accumulate_grad_batches=2,
            precision="bf16-mixed",
        )
        found.append(sink.scalars)
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_low_precision(precision: str, tmp_path: Path) -> None:
    """In 16-bit formats, training is bitwise that of the compiled run and the records are those of eager recorders."""
    found = []
    for stance in (None, "eager", "inside"):
        model, sink = stacked("dynamic", "eager"), MemorySink()
        model.learns_with = torch.optim.SGD  # the epsilon of Adam is zero in float16
        callbacks = recorders(sink, compiled=stance) if stance else []
        trained = train(model, model, tmp_path / str(stance), callbacks, precision=precision)
        found.append((trained, compilations(), sink.scalars))
    (bare, graphs, _), (_, _, eager), (recorded, inside_graphs, inside) = found
    assert (graphs, inside_graphs) == ((1, 0, 0), (2, 0, 0))
    assert_same(recorded, bare)
    assert len(inside) > 0
    assert inside == eager


def test_the_default_set_records_inside_and_captures_the_graph(tmp_path: Path) -> None:
    """``default_recorders()`` runs compiled code eagerly only in the step whose graph is captured."""
    model, given = compiled("submodule", "eager")
    callbacks = default_recorders(every_n_train_steps=2, strict=True)
    train(model, given, tmp_path, callbacks)
    graph = next(each for each in callbacks if isinstance(each, GraphRecorder)).graph
    assert graph is not None
    assert set(LEAVES) <= {node.name for node in graph.nodes}
    activations = next(each for each in callbacks if isinstance(each, ActivationRecorder))
    assert set(LEAVES) <= {site.name for site in activations.latest}
    assert compilations() == (2, 0, 0)


def test_callbacks_that_capture_graphs_do_not_support_it() -> None:
    """``compiled="inside"`` raises for a GraphRecorder, with the values that it supports."""
    with pytest.raises(ArgumentError, match="compiled must be 'eager' or 'skip', got 'inside'"):
        GraphRecorder(compiled="inside")  # type: ignore[arg-type]  # on purpose


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
def test_inductor_records_in_a_second_graph(tmp_path: Path) -> None:
    """With torch's own backend, training in bfloat16 stays bitwise that of the compiled run.

    ``test_compiled_counters`` has the test in float32.
    """
    found = []
    for callbacks in ([], recorders(MemorySink(), every_n_train_steps=4)):
        model = stacked("fullgraph", "inductor")
        found.append(train(model, model, tmp_path, callbacks, precision="bf16-mixed"))
    assert compilations() == (2, 0, 0)
    assert_same(found[1], found[0])
