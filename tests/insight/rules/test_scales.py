"""Tests of the rules about weights and inputs that are too large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Edge, Graph, Node, TensorMeta
from lightning_recorder.insight import Finding
from lightning_recorder.records.table import Floats
from lightning_recorder.statistics import StatisticsRecorder
from tests.insight.records import Examination, Values, brief, chain, examined, network, record, run, trained
from tests.insight.rules.test_operations import Step


@pytest.mark.parametrize(
    ("rms", "name", "alarm"),
    [(0.5, "b", False), (1.9, "b", False), (2.1, "b", True), (3.9, "head", False), (4.1, "head", True)],
)
def test_weights_too_large(rms: float, name: str, alarm: bool) -> None:
    """A weight with 16 inputs and rms 2 scales its input eightfold, which is the limit; for logits it is twice that."""
    names = ("a", "b", "head")
    found = run(None, None, network(*names, **{name: trained(name, rms=rms)}), graph=chain(*names))
    assert brief(found) == ([("warning", "weights-too-large", name)] if alarm else [])


@pytest.mark.parametrize(("begun", "skipped", "alarm"), [(0, 0, True), (70, 0, False), (70, 1, True)])
def test_large_weights_in_a_later_record(begun: int, skipped: int, alarm: bool) -> None:
    """Weights whose first record is after the first one of outputs may have grown, unless the steps were skipped."""
    examination = Examination(chain("a", "b"))
    for step in range(0, 160, 10):
        examination.add(record("activations", step, {("a", "out"): {}, ("b", "out"): {}}))
        if step >= begun:
            about = {"overflow_steps": skipped}
            examination.add(record("parameters", step, {("a", "weight"): {"rms": 3.0}}, about=about))
    assert [each.rule for each in examination.findings()].count("weights-too-large") == alarm


def test_the_scale_of_inputs() -> None:
    """The rms of the input of the first layer is estimated from its output and its weights."""
    layers: dict[str, Values] = {"a": {"rms": 50.0}, "b": {"rms": 50.0}}
    (found,) = run(layers, None, network("a", "b"), graph=chain("a", "b"))
    assert found.verdict == "the input of a has rms 50, estimated from its output and weights"  # 50 / (0.25 √16)
    assert run({"a": {"rms": 15.0}, "b": {"rms": 15.0}}, None, network("a", "b"), graph=chain("a", "b")) == []


@pytest.mark.parametrize(
    ("dtype", "source", "rms", "alarm"),
    [
        ("int64", "op", [50.0] * 8, True),
        ("int64", "op", [15.0] * 8, False),
        ("int64", "op", [2.0] + [50.0] * 7, False),  # the layer has learned to enlarge a constant
        ("float32", "op", [50.0] * 8, False),  # perhaps of an operation that was not observed
        ("int64", "buffer", [50.0] * 8, True),
        ("int64", "input", [50.0] * 8, True),
    ],
)
def test_the_scale_of_time_steps(
    dtype: str, source: Literal["op", "buffer", "input"], rms: list[float], alarm: bool
) -> None:
    """Integers that the step converts to floats are an input, although no batch contains them."""
    nodes = (
        Node(0, "module", "", None, 0, "Net"),
        Node(1, source, "randint", 0, 1, outputs=(TensorMeta((16,), dtype),)),
        Node(2, "op", "float", 0, 1, outputs=(TensorMeta((16,), "float32"),)),
        Node(3, "module", "a", 0, 1, "Linear"),
        Node(4, "op", "linear", 3, 2),
        Node(5, "module", "b", 0, 1, "Linear"),
        Node(6, "op", "linear", 5, 2),
    )
    graph = Graph(nodes, tuple(Edge(*ends) for ends in ((1, 2), (2, 4), (4, 6))))
    layers: dict[str, Values] = {"a": {"rms": rms}, "b": {"rms": 1.0}}
    found = [each for each in run(layers, None, network("a", "b"), graph=graph) if each.rule == "input-scale"]
    assert brief(found) == [("warning", "input-scale", "a")] * alarm
    assert all(("from integers" in each.why) == (source != "input") for each in found)


def test_a_recorded_input_that_is_too_large_is_measured() -> None:
    """The scale of the data is that of the recorded input instead of an estimate."""
    findings = run({"a": {}}, inputs={"a": {"rms": 300.0}}, graph=chain("a"))
    (found,) = [each for each in findings if each.rule == "input-scale"]
    assert found.verdict == "the input in[0] of a has rms 300"
    assert found.path == "in[0]"


@pytest.mark.parametrize(
    ("path", "alarm"), [("weight", True), ("weight_mu", True), ("weight_rho", False), ("weight_log_sigma", False)]
)
def test_deviations_of_random_weights_are_no_weights(path: str, alarm: bool) -> None:
    """What a Bayesian layer makes its deviations of multiplies no input."""
    parameters = {
        name.replace("weight", path): each for name, each in network("a", "b", a=trained("a", rms=7.0)).items()
    }
    found = run(None, None, parameters, graph=chain("a", "b"))
    assert brief(found) == [("warning", "weights-too-large", "a")] * alarm


@pytest.mark.parametrize(("path", "alarm"), [("kernel", True), ("weight", False)])
def test_weights_of_keras_have_their_outputs_last(path: str, alarm: bool) -> None:
    """A kernel of 100 inputs and 4 outputs scales its input tenfold at rms 1, a weight of that shape twice."""
    parameters = {
        name.replace("weight", path): each for name, each in network("a", "b", a=trained("a", rms=1.0)).items()
    }
    found = run(None, None, parameters, graph=chain("a", "b"), shapes={("a", path): (100, 4)})
    assert brief(found) == [("warning", "weights-too-large", "a")] * alarm


@pytest.mark.parametrize(("weight", "path"), [("kernel", "batch[0]"), ("weight", "out")])
def test_a_large_batch_of_a_layer_with_a_weight_of_another_name(weight: str, path: str) -> None:
    """The scale of the batch is measured where it cannot be estimated from the output and the weight of the layer."""
    nodes = (
        Node(0, "module", "", None, 0),
        Node(1, "input", "batch[0]", 0, 1),
        Node(2, "module", "a", 0, 1, "Dense"),
        Node(3, "op", "conv2d", 2, 2),
    )
    graph = Graph(nodes, (Edge(1, 3),))
    parameters: dict[str, Values] = {f"a/{weight}": {"rms": 1e-3}, f"a/{weight}.grad": {}, f"a/{weight}.update": {}}
    examination = examined({"a": {"rms": 1.0}}, None, parameters, graph=graph, shapes={("a", weight): (4, 16)})
    for step in range(0, 80, 10):
        examination.add(record("activations", step, {("", "batch[0]"): {"rms": 150.0}}, recorder="batch"))
    assert [each.path for each in examination.findings() if each.rule == "input-scale"] == [path]


def of_tiny_inputs(ratio: float, zeros: float = 0.0, batch: Mapping[str, float] | None = None) -> list[Finding]:
    """Return the findings of a run by the first weight's gradient against its bias's, and the values of the batch."""
    grads = [1e-3 * ratio * (1 + row / 10) for row in range(8)]
    bias: dict[str, Values] = {"a/bias": {}, "a/bias.grad": {"rms": 1e-3}}
    weights = {**network("a", "b", a=trained("a", grad=grads)), **bias}
    weights["a/weight.grad"] = {**weights["a/weight.grad"], "zero_fraction": zeros}
    examination = examined({"a": {}}, None, weights, graph=chain("a", "b"))
    for row in range(8 if batch else 0):
        examination.add(record("activations", 10 * row, {("", "batch[0]"): batch or {}}, recorder="batch"))
    return examination.findings()


def test_a_first_step_that_is_not_finite_gives_no_warning_of_numpy() -> None:
    """The batch has no row that counts if the only record has a NaN, and the NaN is the finding."""
    examination = examined({"a": {"nan_count": 8.0}}, graph=chain("a"), records=1)
    examination.add(record("activations", 0, {("", "batch[0]"): {"rms": 1.0}}, recorder="batch"))
    assert [each.rule for each in examination.findings()] == ["non-finite"]


@pytest.mark.parametrize(("ratio", "zeros", "alarm"), [(1.5e-3, 0.0, True), (0.2, 0.0, False), (1.5e-3, 0.95, False)])
def test_tiny_inputs(ratio: float, zeros: float, alarm: bool) -> None:
    """The gradients of the first weight and its bias show tiny inputs; rows of a few ones are no finding."""
    found = of_tiny_inputs(ratio, zeros)
    assert brief(found) == [("warning", "input-scale", "a")] * alarm
    assert all("the input of a is tiny, about 0.002" in each.verdict for each in found)


@pytest.mark.parametrize(
    ("last", "rms", "zeros", "alarm"),
    [
        (nn.ReLU(), 2e-3, 0.1, True),
        (nn.ReLU(), 0.3, 0.1, False),  # pixels from 0 to 1
        (nn.ReLU(), [2e-3] * 7 + [0.02], 0.1, False),
        (nn.ReLU(), 2e-3, 0.95, False),  # few points in an empty image
        (nn.BatchNorm2d(2), 2e-3, 0.1, False),
    ],
)
def test_tiny_images(last: nn.Module, rms: float | list[float], zeros: float, alarm: bool) -> None:
    """Pixels that are divided by 255 twice are a finding, unless a normalization after the first layer scales them."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), last, nn.Flatten(), nn.Linear(32, 3))
    graph = capture_graph(Step(net, F.cross_entropy), torch.randn(8, 1, 6, 6), torch.arange(8) % 3)
    nodes = tuple(replace(node, name="batch[0]") if node.name == "input[0]" else node for node in graph.nodes)
    examination = Examination(replace(graph, nodes=nodes))
    for row in range(8):
        size = rms if isinstance(rms, float) else rms[row]
        sites = {("", "batch[0]"): {"rms": size, "zero_fraction": zeros}, ("net.0", "out"): {}}
        examination.add(record("activations", 10 * row, sites))
    found = [each for each in examination.findings() if each.rule == "input-scale"]
    assert [each.verdict for each in found] == ["batch[0], the input of net.0, has rms 0.002"] * alarm


@pytest.mark.parametrize(("rms", "zeros", "alarm"), [(1.5e-3, 0.0, True), (1.0, 0.0, False), (1.5e-3, 0.98, False)])
def test_tiny_inputs_of_a_known_batch(rms: float, zeros: float, alarm: bool) -> None:
    """The batch itself must be tiny. Rows of bags of words are small, because most of their values are zero."""
    found = of_tiny_inputs(1.5e-3, batch={"rms": rms, "zero_fraction": zeros})
    assert brief(found) == [("warning", "input-scale", "a")] * alarm


@pytest.mark.parametrize(
    ("limit", "rms", "reader", "alarm"),
    [
        (("max_norm", "0.001"), 2.5e-4, "mean", True),
        (("max_norm", "1.0"), 0.2, "mean", False),
        (("max_norm", "0.001"), 2.5e-4, "layer_norm", False),
        (("padding_idx", "0"), 2.5e-4, "mean", False),
    ],
)
def test_embeddings_that_are_kept_tiny(limit: tuple[str, str], rms: float, reader: str, alarm: bool) -> None:
    """An embedding that max_norm keeps tiny is a finding, unless a normalization enlarges it."""
    nodes = [
        *(Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)),
        *(Node(2, "module", "words", 0, 1, "Embedding"), Node(3, "op", "embedding", 2, 2, arguments=(limit,))),
        Node(4, "op", reader, 0, 1),
    ]
    found = run({"words": {"rms": rms}}, graph=Graph(tuple(nodes), (Edge(1, 3), Edge(3, 4))))
    assert brief(found) == [("warning", "input-scale", "words")] * alarm


GROWTH: dict[str, tuple[Callable[[Floats], Floats], bool]] = {
    "linear": (lambda t: 0.5 + 20 * t, True),
    "exponential": (lambda t: 0.5 * np.exp(4 * t), True),
    "slower and slower": (lambda t: 20 * np.sqrt(t + 1e-3), False),
    "a logarithm": (lambda t: 8 * np.log1p(20 * t), False),
    "to a limit": (lambda t: 20 * t.clip(max=0.6), False),
    "small": (lambda t: 0.5 + 5 * t, False),
    "large from the start": (lambda t: 50 + 20 * t, False),
}


@pytest.mark.parametrize("kind", GROWTH)
def test_outputs_that_grow_without_a_limit(kind: str) -> None:
    """Growth that does not slow down is a note with its rate; normal growth is none, nor is that of a short run."""
    curve, grows = GROWTH[kind]
    rms = curve(np.linspace(0, 1, 24)).tolist()
    for every in (100, 10):
        found = run({"a": {"rms": 1.0}, "b": {"rms": rms}}, None, {}, graph=chain("a", "b"), records=24, every=every)
        notes = [each for each in found if each.rule == "norm-growth"]
        assert [each.module for each in notes] == (["b"] if grows and every == 100 else [])
        if notes and kind == "linear":
            assert notes[0].is_note
            assert notes[0].numbers["rate"] == pytest.approx(20 / 2.3)


def test_weights_that_grow_without_a_limit() -> None:
    """The rms of a weight counts with the number of its inputs."""
    rms = np.linspace(0.2, 2.0, 24).tolist()
    (note,) = run({"b": {}}, None, trained("a", rms=rms), records=24, every=100)
    assert note.verdict == (
        "a.weight grows by 0.783 in 1,000 steps and does not slow down: its rms in the last third of the run is 1.73"
    )
    assert run({"b": {}}, None, trained("a", rms=[each / 2 for each in rms]), records=24, every=100) == []


@pytest.mark.parametrize(("fault", "grows"), [("drift", True), ("z-loss", False), ("none", False)])
def test_logits_that_drift(fault: str, grows: bool) -> None:
    """A direction that the softmax does not see lets logits grow for ever; a z-loss ends that."""
    torch.manual_seed(0)
    x, net = torch.randn(256, 8), nn.Linear(8, 4)
    y = (x[:, :4] + 0.5 * torch.randn(256, 4)).argmax(1)
    optimizer, found = torch.optim.Adam(net.parameters(), lr=0.03), Examination(chain("net"))

    def loss_of(logits: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y)
        if fault != "none":
            loss = loss - 0.1 * logits.mean()
        return loss + 0.1 * logits.logsumexp(1).square().mean() if fault == "z-loss" else loss

    for step in range(1201):
        recorder = StatisticsRecorder({"net": net})
        with recorder if step % 100 == 0 else nullcontext():
            loss = loss_of(net(x))
        if step % 100 == 0:
            about = {"group": "activations", "recorder": "activations", "stage": "train", "step": step, "epoch": 0}
            found.add(recorder.collect().having(about=about))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    notes = [each for each in found.findings() if each.rule == "norm-growth"]
    assert [each.module for each in notes] == ["net"] * grows
    if grows:
        rms = found.evidence().outputs[0].rms
        assert notes[0].numbers["rate"] == pytest.approx((rms[12] - rms[6]) / 0.6, rel=0.1)


@pytest.mark.parametrize(
    ("name", "is_position"),
    [
        *(
            (name, True)
            for name in ("pos_embed", "position_embeddings", "relpos", "posemb", "wpe", "pos0", "rotary_emb")
        ),
        *((name, True) for name in ("rope", "LlamaRoPE")),
        *((name, False) for name in ("composition", "posterior", "positive", "transpose", "proposal", "property")),
    ],
)
def test_constant_positions_are_those_of_encodings(name: str, is_position: bool) -> None:
    """A constant output is one of positions if its name says so, and not if another word has the same letters."""
    found = run({name: {"min": 1.0, "max": 1.0}}, shapes={(name, "out"): (2, 8, 16)})
    assert ("constant-positions" in {each.rule for each in found}) == is_position
