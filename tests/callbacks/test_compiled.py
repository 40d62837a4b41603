"""The callbacks on models that are compiled as a whole or in parts, which run eagerly on recorded steps."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.graph import Graph
from tests.callbacks.models import LEAVES, Classifier, fit, hooks_left
from tests.callbacks.test_noninterference import assert_same
from tests.pairs import pairwise

BACKENDS = ["eager", "aot_eager"]
QUIET = Outputs(curves="all", plots=False)  # pictures take most of the time of a short fit
ENCODER = ["encoder.conv1", "encoder.norm", "encoder.relu", "encoder.conv2"]


class Bare(Classifier):
    """Does not log, because with this torch version a compiled LightningModule of this Lightning version cannot log."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


class Losses(Callback):
    """Stores the loss of each step outside the model."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Reset compilation before and after a test, and leave no stance behind."""
    gc.collect()  # frees recorders that other tests have left attached
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert stance() == "default"


def stance() -> str:
    """Return the compiler stance of the process."""
    return str(torch._dynamo.eval_frame._stance.stance)


def compiled(how: str, backend: str) -> tuple[Classifier, Any]:
    """Return a compiled model and the model to pass to ``fit``."""
    torch.manual_seed(2)
    model = Bare()
    if how == "fit":
        return model, torch.compile(model, backend=backend)
    if how == "module.compile":
        model.encoder.compile(backend=backend)
    elif how == "model.compile":
        model.compile(backend=backend)
    else:
        model.encoder = torch.compile(model.encoder, backend=backend)  # type: ignore[assignment]  # has the same interface
    return model, model


HOWS = ["fit", "submodule", "module.compile", "model.compile"]


def recorders(sink: MemorySink, **options: Any) -> list[Callback]:
    """Return all callbacks, recording every third step, on which compiled code runs eagerly."""
    options = {
        "compiled": "eager",
        "every_n_train_steps": 3,
        "sinks": [sink],
        "strict": True,
        "outputs": QUIET,
        **options,
    }
    kinds: list[type[StatisticsCallback]] = [ActivationRecorder, GradientRecorder, ParameterRecorder]
    return [GraphRecorder(formats=(), strict=True), *(kind(**options) for kind in kinds)]


class Trained(NamedTuple):
    """The results, records and compilations of a run."""

    result: list[Any]
    scalars: dict[str, dict[int, float]]
    graph: Graph | None
    compiled: tuple[int, dict[str, int], dict[str, int]]
    hooks: list[str]


Runs = Callable[[str, str], list[Trained]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that trains a compiled model without and with all callbacks, once for each way."""

    @functools.cache
    def train(how: str, backend: str) -> list[Trained]:
        found = []
        for is_recorded in (False, True):
            torch._dynamo.reset()
            counters.clear()
            model, given = compiled(how, backend)
            losses, sink = Losses(), MemorySink()
            callbacks = recorders(sink) if is_recorded else []
            folder = tmp_path_factory.mktemp("run")
            trainer = fit(given, folder, [*callbacks, losses], logger=False, max_epochs=2)
            states = [optimizer.state_dict() for optimizer in trainer.optimizers]
            result = [losses.losses, dict(model.state_dict()), states, torch.get_rng_state()]
            graph = next((each.graph for each in callbacks if isinstance(each, GraphRecorder)), None)
            graphs = counters["stats"]["unique_graphs"]
            made = (graphs, dict(counters["graph_break"]), dict(counters["recompiles"]))
            found.append(Trained(result, sink.scalars, graph, made, hooks_left(model)))
        return found

    return train


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", HOWS)
def test_compiled_models_are_recorded_and_compiled_once(how: str, backend: str, runs: Runs) -> None:
    """All modules are recorded under their own names, with one graph, no graph break and no recompilation."""
    _, recorded = runs(how, backend)
    scalars = recorded.scalars
    for group in ("activations", "gradients"):
        tags = [tag for tag in scalars if tag.startswith(f"{group}/") and tag.endswith("/rms")]
        assert {f"{group}/{name}/rms" for name in LEAVES} <= set(tags)  # and those of functions
        assert all(list(scalars[tag]) == [0, 2, 5, 8, 11] for tag in tags)
    assert list(scalars["parameters/encoder.conv1/weight/update_ratio"]) == [0, 2, 5, 8, 11]
    assert recorded.graph is not None
    assert set(LEAVES) <= {node.name for node in recorded.graph.nodes}
    assert recorded.compiled == (1, {}, {})
    assert recorded.hooks == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", HOWS)
def test_compiled_training_is_bitwise_the_same(how: str, backend: str, runs: Runs) -> None:
    """With a backend that computes like eager code, a run with all callbacks is bitwise equal to one without."""
    bare, recorded = runs(how, backend)
    assert_same(recorded.result, bare.result)


@pytest.mark.parametrize("how", HOWS)
def test_steps_without_a_record_run_the_compiled_code(how: str, tmp_path: Path) -> None:
    """In a run of twelve steps, the seven unrecorded ones run the compiled graph and the five recorded ones do not."""
    runs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return call

    _, given = compiled(how, counting)  # type: ignore[arg-type]  # a backend can be a function
    fit(given, tmp_path, recorders(MemorySink()), logger=False, max_epochs=2)
    assert len(runs) == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
def test_code_of_inductor_is_compiled_once(tmp_path: Path) -> None:
    """With torch's own backend there is also one graph, and training continues with it."""
    _, given = compiled("submodule", "inductor")
    sink = MemorySink()
    fit(given, tmp_path, recorders(sink), logger=False)
    assert list(sink.scalars["activations/encoder.norm/rms"]) == [0, 2, 5]
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}
    assert dict(counters["recompiles"]) == {}


@pytest.mark.parametrize(
    ("how", "fails", "own"),
    pairwise(["fit", "submodule"], [False, True], ["default", "eager_on_recompile", "fail_on_recompile"]),
)
def test_the_users_own_stance_is_restored(how: str, fails: bool, own: str, tmp_path: Path) -> None:
    """The user's stance is restored on each unrecorded step and after a fit or an error."""
    seen: list[str] = []

    class Seeing(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(stance())
            if fails and batch_idx == 5:
                raise ZeroDivisionError("of the user")

    _, given = compiled(how, "eager")
    callbacks = [*recorders(MemorySink(), every_n_train_steps=2), Seeing()]
    if own == "fail_on_recompile":  # compile first, since nothing compiles under this stance
        fit(given, tmp_path / "before", logger=False, max_steps=1)
    with torch.compiler.set_stance(own):
        if fails:
            with pytest.raises(ZeroDivisionError, match="of the user"):
                fit(given, tmp_path, callbacks, logger=False)
        else:
            fit(given, tmp_path, callbacks, logger=False)
        assert stance() == own
    # Steps 0, 1, 3 and 5 are recorded.
    assert seen == ["force_eager", "force_eager", own, "force_eager", own, "force_eager"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["submodule", "module.compile"])
def test_compiled_modules_can_be_left_out(how: str, backend: str, tmp_path: Path) -> None:
    """With ``skip``, only uncompiled modules are recorded, the receipt lists the others, and all steps run compiled."""
    stances: list[str] = []

    class Seeing(Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            stances.append(stance())

    def train(folder: Path, callbacks: list[Callback]) -> Any:
        torch._dynamo.reset()
        counters.clear()
        model, given = compiled(how, backend)
        losses = Losses()
        trainer = fit(given, folder, [*callbacks, losses, Seeing()], logger=False, max_epochs=2)
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        compilations = [dict(counters[name]) for name in ("stats", "graph_break", "recompiles")]
        return [losses.losses, dict(model.state_dict()), states, torch.get_rng_state(), compilations]

    sink = MemorySink()
    options: dict[str, Any] = {
        "every_n_train_steps": 3,
        "strict": True,
        "sinks": [sink],
        "compiled": "skip",
        "outputs": QUIET,
    }
    callbacks: list[Callback] = [
        ActivationRecorder(**options),
        GradientRecorder(**options),
        ParameterRecorder(**options),
    ]
    bare = train(tmp_path / "bare", [])
    recorded = train(tmp_path / "recorded", callbacks)
    assert_same(recorded, bare)
    assert set(stances) == {"default"}
    assert {tag.split("/")[1] for tag in sink.scalars if tag.startswith("activations")} == {
        "cross_entropy",
        "dropout",
        "head",
    }
    assert {tag.split("/")[1] for tag in sink.scalars if tag.startswith("gradients")} == {"dropout", "head"}
    assert {tag.split("/")[1] for tag in sink.scalars if tag.startswith("parameters")} == {"head"}
    receipt = json.loads((tmp_path / "recorded" / "recorder" / "receipt.json").read_text())
    for group, names in (("activations", ENCODER), ("gradients", ENCODER)):
        why = {name: each.get("why") for name, each in receipt[group]["modules"].items() if name != "cross_entropy"}
        skipped = "compiled: skipped because of compiled='skip'"
        assert why == {"dropout": None, "head": None, **dict.fromkeys(names, skipped)}


@pytest.mark.parametrize("how", ["fit", "model.compile"])
@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
def test_where_all_is_compiled_skip_records_nothing(kind: type[StatisticsCallback], how: str, tmp_path: Path) -> None:
    """With ``skip``, a model compiled as a whole has no records, and one warning is given."""
    model, given = compiled(how, "eager")
    sink = MemorySink()
    with pytest.warns(RecorderWarning, match=f"{kind.__name__} records nothing: .* all are compiled"):
        fit(given, tmp_path, [kind(compiled="skip", every_n_train_steps=1, sinks=[sink], outputs=QUIET)], logger=False)
    assert sink.scalars == {}
    assert counters["stats"]["unique_graphs"] == 1
    assert hooks_left(model) == []


@pytest.mark.parametrize("how", HOWS)
def test_with_skip_a_compiled_part_is_one_node(how: str, tmp_path: Path) -> None:
    """With ``skip``, the recorded step runs the compiled code, which is compiled once and drawn as one node."""
    runs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return call

    _, given = compiled(how, counting)  # type: ignore[arg-type]  # a backend can be a function
    recorder = GraphRecorder(compiled="skip", strict=True)
    fit(given, tmp_path, [recorder], logger=False)
    assert (len(runs), counters["stats"]["unique_graphs"]) == (6, 1)
    assert recorder.graph is not None
    modules = [node.name for node in recorder.graph.nodes if node.kind == "module"]
    ops = [node.name for node in recorder.graph.nodes if node.kind == "op"]
    if how in ("submodule", "module.compile"):
        assert modules == ["", "encoder", "dropout", "head"]
        assert ops == ["unseen", "dropout", "linear", "cross_entropy"]
    else:
        whole = {"fit": ["Bare.training_step"], "model.compile": ["Bare.forward", "cross_entropy"]}
        assert (modules, ops) == ([""], whole[how])


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder, GraphRecorder])
def test_skip_is_nothing_to_a_model_that_is_not_compiled(kind: Any, tmp_path: Path) -> None:
    """With ``skip``, a model without compiled parts is recorded completely."""
    sink = MemorySink()
    recorder = kind(compiled="skip", sinks=[sink], strict=True)
    fit(Bare(), tmp_path, [recorder], logger=False)
    if isinstance(recorder, GraphRecorder):
        assert recorder.graph is not None
    else:
        modules = (
            LEAVES if kind is not ParameterRecorder else ["encoder.conv1", "encoder.norm", "encoder.conv2", "head"]
        )
        assert set(modules) <= {site.name for site in recorder.latest}


class FlexAttention(nn.Module):
    """Mentions ``flex_attention`` in its code but never calls it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(x, x, x)
        return x


class Flex(Bare):
    """A classifier with such a module before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FlexAttention()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.attention(self.encoder(x)))
        return logits


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, GraphRecorder])
@pytest.mark.parametrize(("is_compiled", "skips", "warned"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_compiled_flex_attention_is_warned_of(
    kind: Any, is_compiled: bool, skips: bool, warned: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """If recorded steps run ``flex_attention`` uncompiled, a warning names the module and the fix."""
    model = Flex()
    if is_compiled:
        model.attention.compile(backend="eager")
    fit(model, tmp_path, [kind(compiled="skip" if skips else "eager", strict=True)], logger=False)
    messages = [str(each.message) for each in recwarn if "flex_attention" in str(each.message)]
    assert len(messages) == warned
    for message in messages:
        assert "flex_attention of 'attention'" in message
        assert "compiled='skip'" in message
