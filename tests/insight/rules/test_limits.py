"""A change of any limit of any rule changes a finding: no limit is unread, and none is far from all cases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.insight import RULES, Finding, Rule
from lightning_recorder.insight.data_facts import (
    DataFacts,
    EpochFacts,
    EpochOfRanks,
    LoaderFacts,
    RankFacts,
    ValidationFacts,
)
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.records.histogram import EDGES
from lightning_recorder.reductions import Histogram
from tests.insight.records import Values, chain, examined, network, parts, record, trained
from tests.insight.rules import test_noise_scale as noise
from tests.insight.rules.test_blocks import PRE, Model, OverPositions, with_values_times
from tests.insight.rules.test_classes import of_an_ignored_class, run_of_classes, run_of_weights
from tests.insight.rules.test_held_parts import of_copy, of_layers, of_rewards
from tests.insight.rules.test_latent import Autoencoder, noise_of_a_shape
from tests.insight.rules.test_losses import of_overlap, of_pairs
from tests.insight.rules.test_normalization import momentum_of, of_a_norm
from tests.insight.rules.test_operations import Shaped, Step, mlp, rows
from tests.insight.rules.test_optimization import by, of_student
from tests.insight.rules.test_own_targets import of_views
from tests.insight.rules.test_progress import run_of_errors, run_of_shares
from tests.insight.rules.test_sequences import (
    Numbered,
    Scaled,
    counted,
    first_token,
    loss_of_tokens,
    padded,
    read_by,
    with_factor,
)
from tests.insight.rules.test_target_sources import of_adversaries, of_ends, of_tokens
from tests.insight.rules.test_targets import of_generator, of_numbers
from tests.insight.rules.test_wiring import Codes
from tests.insight.test_odd_blocks import Stage

CASES: dict[str, Callable[[], Iterator[Evidence]]] = {}
"""A function for each rule that yields evidence near its limits, usually just below and just above each of them."""

OUT = ("act", "out")
ABOVE, BELOW = 1.5, 0.75  # of a limit: a limit that is doubled or halved is on the other side
NAN = math.nan


def case(*args: Any, **kwargs: Any) -> Evidence:
    return examined(*args, **kwargs).evidence()


def cases(name: str) -> Callable[[Callable[[], Iterator[Evidence]]], None]:
    def add(function: Callable[[], Iterator[Evidence]]) -> None:
        CASES[name] = function

    return add


def weight(**statistics: float | Sequence[float]) -> dict[str, Values]:
    """Return a weight with a gradient and an update."""
    own = {name: value for name, value in statistics.items() if name not in ("grad", "update")}
    return {
        "a/weight": {"update_ratio": 1e-3, "learning_rate": 0.1, **own},
        "a/weight.grad": {"rms": statistics.get("grad", 1e-3)},
        "a/weight.update": {"rms": statistics.get("update", 1e-3)},
    }


def renamed(values: dict[str, Values], name: str) -> dict[str, Values]:
    return {f"{name}{key[1:]}": value for key, value in values.items()}


def shape_of(name: str, *shape: int) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(name, path): shape for path in ("weight", "out")}


def sizes(**values: float | Sequence[float]) -> dict[str, Values]:
    """Return the rms of modules."""
    return {name: {"rms": value} for name, value in values.items()}


def blocks(values: Sequence[float], path: str = "") -> dict[str, Values]:
    """Return the rms of a layer in each block."""
    return {f"blocks.{place}.fc{path}": {"rms": value} for place, value in enumerate(values)}


def fork(*heads: str, stem: Sequence[str] = ("stem",)) -> Graph:
    """Return the graph of a chain of modules that several heads follow; without any, the heads take the input."""
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)]
    edges, last = [], 1
    for number, name in enumerate([*stem, *heads], 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "f", 2 * number, 2)]
        edges.append(Edge(last, 2 * number + 1))
        last = 2 * number + 1 if name in stem else last
    return Graph(tuple(nodes), tuple(edges))


def histogram(*values: float, bins: Any = EDGES) -> dict[tuple[str, str], Histogram]:
    found = np.array(values)
    counts, edges = np.histogram(found, bins=bins)
    return {OUT: Histogram(edges, counts, found.min(), found.max(), found.sum(), (found**2).sum())}


def last(number: int, value: float, others: float, records: int = 8) -> list[float]:
    """Return the values of a run that has another one in the last records."""
    return [others] * (records - number) + [value] * number


@cases("non-finite")
def _() -> Iterator[Evidence]:
    for step in (2, 3):
        yield case({"a": {"nan_count": [float(row == step) for row in range(5)]}}, None, trained("a"), records=5)


@cases("no-activation")
def _() -> Iterator[Evidence]:
    linear = [torch.nn.Linear(5, 5) for _ in range(3)]
    for net in (torch.nn.Sequential(*linear), torch.nn.Sequential(*linear[:2], torch.nn.ReLU(), linear[2])):
        yield case(graph=capture_graph(Step(net, F.mse_loss), rows, rows))


@cases("single-unit")
def _() -> Iterator[Evidence]:
    for outputs in (2, 3):
        net = torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.ReLU(), torch.nn.Linear(1, outputs))
        yield case(graph=capture_graph(Step(net, F.cross_entropy), rows, torch.arange(8) % 2))


@cases("target-scale")
def _() -> Iterator[Evidence]:
    graph = capture_graph(Step(mlp(2), F.mse_loss), rows, torch.randn(8, 2))
    runs = [[15.0] * 8, [7.5] * 8, [15.0] * 7, last(4, 15.0, 1.0), last(3, 15.0, 1.0)]
    for ratios in runs:
        bias: dict[str, Values] = {"net.2/bias": {}, "net.2/bias.grad": {"rms": ratios}}
        yield case({"net.2": {"rms": 1.0}}, None, bias, graph=graph, records=len(ratios))
    for target, prediction in ((75.0, 1.0), (37.0, 1.0), (150.0, 10.0), (150.0, 20.0)):
        sides: dict[str, Any] = {
            "targets": {"mse_loss": {"rms": target}},
            "predictions": {"mse_loss": {"rms": prediction}},
        }
        yield case(**sides, graph=graph)


def with_targets(
    loss: Any, *last: torch.nn.Module, outputs: int = 1, target: Tensor | None = None, **options: Any
) -> Evidence:
    target = torch.randn(8, outputs) if target is None else target
    graph = capture_graph(Step(mlp(outputs, *last), loss), rows, target)
    records = options.pop("records", 8)
    shapes = {(loss.__name__, "in.target"): options.pop("shape", (16, 16))}
    return case(targets={loss.__name__: options}, graph=graph, records=records, shapes=shapes)


@cases("no-stop-gradient")
def _() -> Iterator[Evidence]:
    for spread, records in ((0.8, 9), (0.5, 9), (0.5, 8)):
        yield of_views(last=0.75 * spread, records=records).evidence()


@cases("discriminator-wins")
def _() -> Iterator[Evidence]:
    for fake, fall, records, recent in (
        *((0.03, 100.0, 8, 8), (0.015, 100.0, 8, 8), (0.01, 45.0, 8, 8), (0.01, 22.5, 8, 8)),
        *((0.01, 100.0, 7, 7), (0.01, 100.0, 9, 4), (0.01, 100.0, 9, 3)),
    ):
        sigmoid = torch.nn.Sigmoid()
        yield of_adversaries(sigmoid, real=0.99, fake=fake, fall=fall, records=records, recent=recent).evidence()


@cases("cosine-logits")
def _() -> Iterator[Evidence]:
    for number in (6, 30):
        yield of_pairs(number).evidence()
    yield of_pairs(3).evidence()


@cases("overlap-of-logits")
def _() -> Iterator[Evidence]:
    for low, records in ((-0.15, 4), (-0.075, 4), (-0.15, 3)):
        yield of_overlap(low=low, records=records).evidence()
    yield of_overlap(low=last(3, -3.0, 0.0)).evidence()
    yield of_overlap(low=last(4, -3.0, 0.0)).evidence()


@cases("output-range")
def _() -> Iterator[Evidence]:
    for beyond, records in ((0.15, 4), (0.075, 4), (0.15, 3)):
        yield with_targets(F.mse_loss, torch.nn.Sigmoid(), min=0.0, max=1 + beyond, records=records)
    yield with_targets(F.mse_loss, torch.nn.Sigmoid(), min=0.0, max=last(4, 1.15, 1.0))
    yield with_targets(F.mse_loss, torch.nn.Sigmoid(), min=0.0, max=last(3, 1.15, 1.0))
    for highest in (3.5, 5.0):
        yield of_generator(torch.nn.Sigmoid(), 0.0, highest).evidence()


@cases("classes-by-error")
def _() -> Iterator[Evidence]:
    for off, records in ((0.75e-6, 4), (1.5e-6, 4), (0.0, 3)):
        values: dict[str, Any] = {"min": 0.0, "max": 1.0, "mean": 0.25 + off, "rms": 0.5}
        yield with_targets(F.mse_loss, torch.nn.Sigmoid(), records=records, **values)
    for number in (3, 4):
        means = last(number, 0.25, 0.5)
        yield with_targets(F.mse_loss, torch.nn.Sigmoid(), min=0.0, max=1.0, mean=means, rms=0.5)
    for end in (0.19, 0.27):  # the squares are 0.04 and 0.07
        graph = capture_graph(Step(mlp(1, torch.nn.Sigmoid()), F.mse_loss), rows, torch.rand(8, 1))
        sides: dict[str, Any] = {"targets": {"mse_loss": {"min": 0.0, "max": 1.0, "mean": 0.25, "rms": 0.5}}}
        yield case(sizes(**{"net.3": 1.0}), {"net.3": {"rms": last(4, end, 1.0)}}, **sides, graph=graph)


@cases("classes-as-numbers")
def _() -> Iterator[Evidence]:
    for classes, records in ((3, 4), (2, 4), (3, 3), (20, 4), (21, 4)):
        yield of_numbers(torch.arange(8) % 3, [classes - 1.0] * records).evidence()
    for number in (3, 4):  # of 8 records have the last class
        yield of_numbers(torch.arange(8) % 3, last(number, 2.0, 1.0)).evidence()


@cases("constant-target")
def _() -> Iterator[Evidence]:
    classes = torch.arange(8) % 3
    for records, count in ((8, 15.0), (7, 15.0), (8, 8.0), (8, 7.0)):
        yield with_targets(F.cross_entropy, outputs=3, target=classes, records=records, count=count, min=1.0, max=1.0)


@cases("padding-as-target")
def _() -> Iterator[Evidence]:
    tokens = torch.arange(48).view(8, 6) % 11
    embedding, head = torch.nn.Embedding(11, 8, padding_idx=0), torch.nn.Linear(8, 11)

    class Language(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = embedding, head

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embedding(ids[:, :-1])).transpose(1, 2), ids[:, 1:])

    graph = capture_graph(Language(), tokens)
    for zeros, records in ((0.3, 4), (0.15, 4), (0.3, 3), (last(3, 0.3, 0.1), 8), (last(4, 0.3, 0.1), 8)):
        yield case(targets={"cross_entropy": {"zero_fraction": zeros}}, graph=graph, records=records)


@cases("scaled-twice")
def _() -> Iterator[Evidence]:
    for factor in (3.0, 1.5):
        net = mlp(3, Shaped(lambda y, factor=factor: y / factor / factor))  # type: ignore[misc]  # bound here
        yield case(graph=capture_graph(Step(net, F.cross_entropy), rows, torch.arange(8) % 3))


@cases("norm-momentum")
def _() -> Iterator[Evidence]:
    for momentum in (0.95, 0.6, 0.75e-3, 1.5e-3):
        yield momentum_of(momentum).evidence()
    for variance in (1.4, 1.7):
        yield momentum_of(1e-4, variance=variance).evidence()
    yield momentum_of(0.95, every=11).evidence()  # 77 steps
    yield momentum_of(0.95, every=5).evidence()
    yield momentum_of(0.9e-3, every=200).evidence()


@cases("zero-norm")
def _() -> Iterator[Evidence]:
    for rms, size in ((0.0375, 8), (0.075, 8), (0.0, 4), (0.0, 3)):
        yield of_a_norm(rms, size=size).evidence()


@cases("dropout-in-evaluation")
def _() -> Iterator[Evidence]:
    graph = chain("relu", "drop", "fc", relu="ReLU", drop="Dropout")
    for more in (0.03, 0.015):
        zeros: dict[str, Values] = {"relu": {"zero_fraction": 0.5}, "drop": {"zero_fraction": 0.5 + more}}
        layers: dict[str, Values] = {"relu": {}, "drop": {}, "fc": {}}
        yield case(layers, None, network("fc"), validation=zeros, graph=graph)


@cases("label-smoothing")
def _() -> Iterator[Evidence]:
    for smoothing in (0.9, 0.45):
        loss = partial(F.cross_entropy, label_smoothing=smoothing)
        yield case(graph=capture_graph(Step(mlp(3), loss), rows, torch.arange(8) % 3))


@cases("unused-codes")
def _() -> Iterator[Evidence]:
    x = torch.randn(64, 5)
    graph = capture_graph(Step(Codes(), F.mse_loss), x, x)
    for used, number, records in ((3, 100, 8), (4, 100, 8), (2, 100, 8), (2, 100, 7), (1, 30, 8), (0, 15, 8)):
        book: dict[str, Values] = {
            "net.codes/weight": {},
            "net.codes/weight.grad": {"zero_fraction": 1 - used / number},
        }
        yield case(None, None, book, graph=graph, shapes=shape_of("net.codes", number, 5), records=records)


@cases("softmax-dimension")
def _() -> Iterator[Evidence]:
    for factor in (1 + 0.01 * ABOVE, 1 + 0.01 * BELOW):
        shapes = {OUT: (4, 8, 8)}
        yield case({"act": {"mean": factor / 4}}, graph=chain("act", "fc", act="Softmax"), shapes=shapes)


def heads(*given: Values, records: int = 8, others: int = 0) -> Evidence:
    """Return the evidence of one layer with these heads, and of further layers with healthy ones."""
    layers: dict[str, Sequence[Values]] = {f"blocks.{place}.attn.softmax": [{}] for place in range(1, others + 1)}
    return parts({"blocks.0.attn.softmax": given, **layers}, records=records).evidence()


def experts(*loads: float | Sequence[float], records: int = 8, **others: float) -> Evidence:
    """Return the evidence of a router with these shares of its experts."""
    given: list[Values] = [{"load": each, **others} for each in loads]
    return parts({"mlp.gate.topk": given}, kind="router", records=records).evidence()


@cases("constant-positions")
def _() -> Iterator[Evidence]:
    ones: dict[str, Values] = {"rotary": {"min": 1.0, "max": 1.0}}
    for records, positions in ((1, 8), (2, 8), (2, 3), (2, 4)):
        yield case(ones, records=records, shapes={("rotary", "out"): (1, positions, 16)})
    for lows in ([1.0, 0.5, 1.0], [0.5, 1.0, 1.0]):
        yield case({"rotary": {"min": lows, "max": 1.0}}, records=3, shapes={("rotary", "out"): (1, 6, 16)})


@cases("wrong-positions")
def _() -> Iterator[Evidence]:
    for length in (3, 4):
        tokens, net = torch.arange(4 * length).reshape(4, length) % 11, Numbered(lambda x: counted(x).clamp(max=1))
        yield case(graph=capture_graph(Step(net, loss_of_tokens), tokens, tokens))


@cases("embedding-scale")
def _() -> Iterator[Evidence]:
    for factor, size in ((4.0, 4.0), (5.0, 4.0), (5.0, 1.0), (10.0, 1.0), (50.0, 1.0)):
        yield with_factor(Scaled(factor), size).evidence()


@cases("attention-scores-grow")
def _() -> Iterator[Evidence]:
    for factor in (1.2, 0.7):
        yield heads({"max_logit": [factor * each for each in (10, 20, 30, 40, 50, 60, 70, 80)]})
    for first in (15.0, 45.0, 80.0):
        yield heads({"max_logit": [first, first, first, 100, 100, 110, 125, 130]})
    for last in (104.0, 112.0, 150.0, 230.0):
        yield heads({"max_logit": [10, 10, 10, 100, 100, last, last, last]})
    for records in (5, 6):
        yield heads({"max_logit": [10, 20, 60, 70, 80, 90]}, records=records)


@cases("set-back")
def _() -> Iterator[Evidence]:
    for records in (3, 4):
        yield case(None, None, weight(rms=1.0, mean=0.1), records=records)


@cases("zero-projection")
def _() -> Iterator[Evidence]:
    joined = {("att", "in_proj_weight"): (48, 16)}
    for records in (2, 3):
        values: dict[str, Values] = {"att/in_proj_weight": {"zero_fraction": 1 / 3, "update_ratio": 1e-3}}
        yield case(None, None, values, shapes=joined, records=records)
        values = {"att/in_proj_weight": {"update_ratio": 1e-3}, "att/in_proj_weight.grad": {"zero_fraction": 1 / 3}}
        yield case(None, None, values, shapes=joined, records=records)


@cases("gradient-noise")
def _() -> Iterator[Evidence]:
    for records, samples in ((8, 4), (12, 16)):  # intervals whose ends differ by factors of 8 and 15
        yield noise.examined(noise.drawn(records, 2, samples)).evidence()


@cases("padding-is-read")
def _() -> Iterator[Evidence]:
    def read(zeros: Sequence[float], spreads: Sequence[float]) -> Evidence:
        graph = padded(lambda out, states: out[:, -1]).graph
        values: dict[str, Values] = {
            "net.tokens": {"zero_fraction": zeros},
            "net.head": {"batch_spread": spreads},
        }
        return case(values, graph=graph, records=len(zeros))

    for zero, spread, number in ((0.45, 0.07, 8), (0.25, 0.07, 8), (0.45, 0.15, 8), (0.45, 0.07, 7)):
        yield read([zero] * number, [spread] * number)
    yield read(last(8, 0.45, 0.0, 9), [0.07] * 9)
    yield read([0.45] * 9, last(7, 0.07, 1.0, 9))


@cases("dead-heads")
def _() -> Iterator[Evidence]:
    for records in (2, 3):
        yield heads({"value_rms": 0.0}, {"logit_std": 0.0}, records=records)
    for size in (0.75e-7, 1.5e-7):
        yield heads({"value_rms": size}, {"logit_std": size})


@cases("one-hot-heads")
def _() -> Iterator[Evidence]:
    one: Values = {"top_key": 0.99, "most_ratio": 0.05}
    for records in (2, 3):
        yield heads(one, records=records)
    for changed in ({"top_key": 0.96}, {"most_ratio": 0.15}, {"most_ratio": 0.3}, {"keys": 4.0}, {"keys": 8.0}):
        yield heads({**one, **changed})
    for healthy in (0, 1, 2):
        yield heads(one, *[{}] * healthy)
    yield heads({**one, "top_key": 0.5})


@cases("attention-sink")
def _() -> Iterator[Evidence]:
    for records in (2, 3):
        yield heads({"first_key": 0.95}, records=records)
    for share in (0.6, 0.95):
        yield heads({"first_key": share})
    for keys in (6.0, 12.0):
        yield heads({"first_key": 0.95, "keys": keys})


@cases("mask-inverted")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield heads({"blind": 1.0}, records=records)
    for share in (0.15, 0.075):
        yield heads({"blind": share})
    for future in (0.8, 1.0):
        yield heads({"future": future, "visible": 0.5})
    for visible in (0.5, 0.95):
        yield heads({"future": 1.0, "visible": visible})


@cases("attends-padding")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield heads({"padding": 0.2}, records=records)
    for share in (0.0075, 0.015, 0.7, 1.0):
        yield heads({"padding": share})


@cases("sees-later-keys")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield heads({"future": 0.5}, others=4, records=records)
    for share in (0.75e-3, 1.5e-3):
        yield heads({"future": share}, others=4)
    for seeing, number in ((1, 2), (1, 3), (1, 4), (2, 3), (1, 1)):
        layers: dict[str, Sequence[Values]] = {
            f"blocks.{place}.attn.softmax": [{"future": 0.5 * (place < seeing)}] for place in range(number)
        }
        yield parts(layers).evidence()
    # In attention of a sequence to itself, next tokens as targets leave no doubt.
    tokens = torch.arange(20).reshape(2, 10) % 11
    graph = capture_graph(with_values_times(1.0), tokens)
    for share in (1.0, 0.6):
        of_blocks: dict[str, Sequence[Values]] = {
            f"blocks.{place}.attn.softmax": [{"future": 0.5 * place}] for place in range(2)
        }
        examination = parts(of_blocks, graph=graph)
        for row in range(8):
            examination.add(
                record("activations", row * 10, {("loss", "in.target.next"): {"mean": share}}, recorder="losses")
            )
        yield examination.evidence()


@cases("mixes-tokens")
def _() -> Iterator[Evidence]:
    graph = capture_graph(Model(**{**PRE, "norm": OverPositions}), torch.arange(20).reshape(2, 10) % 11)
    for share, records in ((1.0, 1), (1.0, 2), (0.6, 8)):
        examination = parts({"attn.softmax": [{}]}, records=records, graph=graph)
        for row in range(records):
            sites = {("loss", "in.target.next"): {"mean": share}}
            examination.add(record("activations", row * 10, sites, recorder="losses"))
        yield examination.evidence()


@cases("own-key-hidden")
def _() -> Iterator[Evidence]:
    for own, future, share, records in (
        (0.0, 0.0, 1.0, 1),
        (0.0, 0.0, 1.0, 2),
        (0.0, 0.0, 0.6, 8),
        (0.0, 0.1, 1.0, 8),
        (0.0075, 0.0, 1.0, 8),
        (0.015, 0.0, 1.0, 8),
    ):
        layers: dict[str, Sequence[Values]] = {"attn.softmax": [{"own": own, "future": future}]}
        examination = parts(layers, records=records)
        for row in range(records):
            sites = {("loss", "in.target.next"): {"mean": share}}
            examination.add(record("activations", row * 10, sites, recorder="losses"))
        yield examination.evidence()


@cases("attends-the-target")
def _() -> Iterator[Evidence]:
    for future, share, records in ((0.5, 1.0, 1), (0.5, 1.0, 2), (0.75e-3, 1.0, 8), (1.5e-3, 1.0, 8), (0.5, 0.6, 8)):
        layers: dict[str, Sequence[Values]] = {"attn.softmax": [{"future": future}]}
        examination = parts(layers, records=records)
        for row in range(records):
            sites = {("loss", "in.target.next"): {"mean": share}}
            examination.add(record("activations", row * 10, sites, recorder="losses"))
        yield examination.evidence()


@cases("shifted-twice")
def _() -> Iterator[Evidence]:
    for after in (0.95, 0.6):
        yield of_tokens(next=0.1, after_next=after).evidence()


@cases("odd-attention")
def _() -> Iterator[Evidence]:
    for times in (2.0, 4.0):
        yield case(graph=capture_graph(with_values_times(times), torch.arange(20).reshape(2, 10) % 11))


@cases("equal-query-and-key")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield heads({"alike": 1.0}, records=records)
    yield heads({"alike": 0.7})


@cases("first-token-is-read")
def _() -> Iterator[Evidence]:
    for length, records in ((4, 2), (3, 2), (6, 2), (4, 1)):
        yield read_by(first_token, length=length, records=records).evidence()
    for number in (1, 2, 3):
        yield read_by(first_token, future=last(number, 0.0, 0.1)).evidence()


@cases("attention-scale")
def _() -> Iterator[Evidence]:
    for factor, spread, size in ((1.0, 4.0, 16), (1.0, 2.0, 16), (1.0, 4.0, 4), (1.0, 4.0, 64), (1.0, 4.0, 3)):
        yield scaled(factor, spread, size)
    for times in (1.5, 3.0):
        yield scaled(times / 4, 4.0, 16)
    for std, wider in ((0.9, 1.0), (1.8, 1.0), (1.8, 1.5)):
        yield scaled(1.0, std, 16, wider=wider)
    for off in (1.0, 1.03, 1.07):
        yield scaled(off / 4, 1.0, 16, twice=True)


def scaled(factor: float, spread: float, size: int, *, twice: bool = False, wider: float = 0.0) -> Evidence:
    """Return the evidence of attention whose scores have a factor and vary by this much.

    With ``wider``, it has a weight that is distributed as in new layers, but for this factor of its largest value.
    """

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            query = x * factor if twice else x
            return F.scaled_dot_product_attention(query, x + 1, x + 2, scale=None if twice else factor)

    graph = capture_graph(torch.nn.Sequential(Attention()), torch.randn(2, 2, 5, size))
    layer: dict[str, Sequence[Values]] = {"0.scaled_dot_product_attention": [{"logit_std": spread}]}
    found = parts(layer, graph=graph)
    if wider:
        values = {key: float(value) for key, value in uniform(wider=wider)["a/weight"].items()}  # type: ignore[arg-type]
        found.add(record("parameters", 0, {("0.q", "weight"): values}))
    return found.evidence()


@cases("router-collapse")
def _() -> Iterator[Evidence]:
    for records in (3, 4):
        yield experts(0.5, 0.5, 0.0, 0.0, records=records)
    for rest in (0.02, 0.04, 0.1):
        yield experts(0.5 - rest, 0.5 - rest, rest, rest)
    for number in (2, 3, 4, 7, 8):
        yield experts(0.5, 0.5, *[0.0] * (number - 2))


@cases("starved-expert")
def _() -> Iterator[Evidence]:
    for records in (3, 4):
        yield experts(0.4, 0.3, 0.3, 0.0, records=records)
    for share in (0.015 / 4, 0.03 / 4):
        yield experts(0.4, 0.3, 0.3, share)
    for tokens in (45.0, 90.0):
        yield experts(0.4, 0.3, 0.3, 0.0, tokens=tokens)
    for number in (1, 2, 3):
        yield experts(*[1 / (4 - number)] * (4 - number), *[0.0] * number, chosen=1.0)


@cases("router-drift")
def _() -> Iterator[Evidence]:
    for records in (8, 9):
        yield drifting(0.07, records)
    for last in (0.07, 0.02, 0.001, 0.2):
        yield drifting(last, 9)


def drifting(last: float, records: int) -> Evidence:
    """Return the evidence of a router that sends this share of the choices to three of four experts in the end."""
    third = [0.25] * 3 + [(0.25 + last) / 2] * (records - 6) + [last] * 3
    return experts([1 - 3 * each for each in third], third, third, third, chosen=1.0, records=records)


@cases("learning-rate-too-large")
def _() -> Iterator[Evidence]:
    for ratio in (0.2, 0.1):
        yield case(None, None, weight(update_ratio=ratio))
    for first in (0.75, 0.375):
        yield case(None, None, weight(update_ratio=[first, *[0.01] * 7]))
    for records in (2, 3):
        yield case(None, None, weight(update_ratio=0.2), records=records)
    for shrunk in (0.375, 0.75):
        yield case(None, None, weight(update_ratio=0.2, rms=last(4, shrunk, 1.0)))
    for gain in (0.045, 0.0225):  # of 16 inputs
        yield case(None, None, weight(update_ratio=[0.75, *[0.01] * 7], rms=gain / 4))


@cases("weight-decay-too-strong")
def _() -> Iterator[Evidence]:
    for decay, records in ((0.15, 3), (0.075, 3), (0.15, 2)):
        yield case(None, None, weight(weight_decay=decay), records=records)


@cases("decayed-norm")
def _() -> Iterator[Evidence]:
    for shrunk, by_decay, records in ((0.5, 0.6, 3), (0.8, 0.6, 3), (0.5, 0.95, 3), (0.5, 0.6, 2)):
        decay = -math.log(by_decay) / (10 * (records - 1)) / 0.1
        norm = weight(mean=last(1, shrunk, 1.0, records), weight_decay=decay)
        yield case({"a": {}}, None, norm, graph=chain("a", a="LayerNorm"), records=records)


def uniform(**statistics: float | Sequence[float]) -> dict[str, Values]:
    """Return a weight that is distributed as in new layers of torch, but for a factor of its largest value."""
    high = 0.5 * math.sqrt(3) * float(np.float64(statistics.pop("wider", 1.0)))  # type: ignore[arg-type]
    return weight(rms=0.5, min=-high, max=high, **statistics)


@cases("always-clipped")
def _() -> Iterator[Evidence]:
    about = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm", "groups": [{"optimizer": "SGD"}]}
    for norm, records in ((75.0, 3), (37.5, 3), (75.0, 2), (1500.0, 3), (750.0, 3)):
        yield case(None, None, weight(grad=norm / 16), about=about, records=records)
    for norm, ratio, wider, records in (
        *((150.0, 7.5e-5, 1.0, 10), (75.0, 7.5e-5, 1.0, 10), (150.0, 1.5e-4, 1.0, 10), (150.0, 7.5e-5, 1.0, 9)),
        *((150.0, 7.5e-5, 1.075, 10), (150.0, 7.5e-5, 1.0375, 10)),
    ):
        new = uniform(wider=wider, grad=norm / 16, update_ratio=ratio)
        yield case(None, None, new, about=about, records=records)
    new = uniform(grad=150.0 / 16, update_ratio=7.5e-5, wider=1.5)
    yield case(None, None, new, about=about, records=10, shapes=shape_of("a", 10, 20))


@cases("eval-mode")
def _() -> Iterator[Evidence]:
    for number in (1, 2):
        mode = {"a": {"eval_mode": last(number, 1.0, NAN)}}
        yield case(mode, None, weight(), graph=chain("a", "b", a="BatchNorm1d"))


@cases("strong-dropout")
def _() -> Iterator[Evidence]:
    for share in ("0.9", "0.5"):
        node = Node(1, "op", "dropout", 0, 1, arguments=(("p", share), ("training", "True")))
        yield case(graph=Graph((Node(0, "module", "", None, 0, "Net"), node), ()))


@cases("nothing-moves")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield case(None, None, {"a/weight": {}, "a/weight.update": {"rms": 0.0}}, records=records)
        yield case(None, {"a": {}}, trained("a", grad=0.0), records=records)


@cases("learning-rate-vanishes")
def _() -> Iterator[Evidence]:
    for tiny, number, records in (
        (7.5e-4, 5, 10),
        (1.5e-3, 5, 10),
        (1e-4, 5, 10),
        (1e-4, 3, 10),
        (1e-4, 4, 6),
        (1e-4, 3, 5),
    ):
        yield case(None, None, weight(learning_rate=last(number, tiny, 1.0, records)), records=records)


@cases("warmup-too-long")
def _() -> Iterator[Evidence]:
    for highest, planned, records, given in (
        (0.15, 70, 8, 0.1),
        (0.07, 70, 8, 0.1),
        (0.07, 95, 8, 0.1),
        (0.03, 110, 8, 0.1),
        (0.03, 50, 6, 0.1),
        (0.03, 40, 5, 0.1),
        (0.03, 70, 8, 0.4),
        (0.03, 70, 8, 0.6),
    ):
        about = {"groups": [{"initial_lr": given}], "planned_steps": planned}
        rising = weight(learning_rate=[highest * given * (row + 1) / records for row in range(records)])
        yield case(None, None, rising, about=about, records=records)
    for share, epoch in ((0.015, 2), (0.03, 2), (0.015, 1)):  # with manual optimization
        about = {"groups": [{"initial_lr": 0.1}], "epoch": epoch}
        yield case(None, None, weight(learning_rate=share * 0.1), about=about)


@cases("schedule-length")
def _() -> Iterator[Evidence]:
    for length, times in ((100, 20), (100, 50), (107, 20), (115, 20)):
        about = {"class": "OneCycleLR", "interval": "epoch", "length": length, "times": times, "unit": 100}
        yield case(None, None, weight(), about={"schedules": [about]})


@cases("constant-input")
def _() -> Iterator[Evidence]:
    bias: dict[str, Values] = {"a/bias": {}, "a/bias.grad": {"rms": 1.0}}
    for apart, records in ((0.0015, 4), (0.00075, 4), (0.0, 3)):
        grad = [1.0] * (records - 1) + [1.0 + apart]
        yield case({"a": {}}, None, weight(grad=grad) | bias, graph=chain("a", "b"), records=records)
    for number in (7, 8):
        table: dict[str, Values] = {"a/weight": {}, "a/weight.grad": {"zero_fraction": 1 - 1 / number}}
        yield case({"a": {}}, None, table, graph=chain("a", a="Embedding"), shapes=shape_of("a", number, 4))


@cases("gradients-accumulate")
def _() -> Iterator[Evidence]:
    def layers(number: int, wrong: int, values: Sequence[float]) -> Evidence:
        names = [f"layer_{place}" for place in range(number)]
        biases: dict[str, Values] = {f"{name}/bias": {} for name in names}
        for place, name in enumerate(names):
            biases[f"{name}/bias.grad"] = {"rms": values if place < wrong else 0.5}
        return case(None, {name: {"rms": 1.0} for name in names}, biases, graph=chain(*names))

    yield layers(2, 2, [2.0] * 8)
    yield layers(2, 2, [1.125] * 8)
    yield layers(2, 2, last(2, 2.0, 0.5))
    yield layers(2, 2, last(1, 2.0, 0.5))
    yield layers(2, 2, [2.0, math.nan] * 4)
    yield layers(8, 3, [2.0] * 8)
    yield layers(12, 2, [2.0] * 8)
    yield layers(2, 1, [2.0] * 8)


@cases("loss-imbalance")
def _() -> Iterator[Evidence]:
    for factor, records in ((450.0, 3), (225.0, 3), (450.0, 2)):
        yield case(None, sizes(stem=1.0, one=factor, two=1.0), graph=fork("one", "two"), records=records)


@cases("weights-too-large")
def _() -> Iterator[Evidence]:
    for gain, graph in ((12.0, None), (6.0, None), (24.0, chain("b", "a")), (12.0, chain("b", "a"))):
        yield case(sizes(b=1.0, a=1.0), None, weight(rms=gain / 4), graph=graph)


@cases("input-scale")
def _() -> Iterator[Evidence]:
    for rms in (30.0, 15.0):
        yield case({"a": {}}, inputs={"a": {"rms": rms}}, graph=chain("a", "b"))
    for ratio, records, zeros in (
        (0.015, 4, 0.0),
        (0.0075, 4, 0.0),
        (0.0075, 3, 0.0),
        (0.0075, 4, 0.95),
        (0.0075, 4, 0.6),
    ):
        tiny: dict[str, Values] = {
            "a/weight": {},
            "a/weight.grad": {"rms": ratio, "zero_fraction": zeros},
            "a/bias": {},
            "a/bias.grad": {"rms": 1.0},
        }
        yield case({"a": {}}, None, tiny, graph=chain("a", "b"), records=records)


@cases("two-optimizers")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        both: dict[str, Values] = {"a/weight": {"count": 512.0}, "b/weight": {"count": 256.0}}
        yield case(None, None, both, about={"groups": [{"parameters": 3}]}, records=records)


@cases("frozen")
def _() -> Iterator[Evidence]:
    for frozen in (1, 2):
        names = ["a", *(f"f{place}" for place in range(frozen)), *(["b"] if frozen > 1 else ["b", "c"])]
        missing = {name: {"fired": False, "why": "frozen"} for name in names if name[0] == "f"}
        own = [name for name in names if name[0] != "f"]
        parameters = {key: value for name in own for key, value in trained(name).items()}
        coverage = {"parameters": {"modules": missing}}
        yield case({name: {} for name in names}, None, parameters, graph=chain(*names), coverage=coverage)


@cases("never-trained")
def _() -> Iterator[Evidence]:
    for numbers in ((4, 0), (3, 0), (2, 3), (3, 3), (3, 2), (3, 5)):
        yield of_layers(*numbers).evidence()


@cases("copy-stays")
def _() -> Iterator[Evidence]:
    for length in (60, 140):
        yield of_copy(length=length).evidence()
    for length in (1400, 2800):
        yield of_copy(of_rewards, length=length).evidence()
    for moved in (0.75e-3, 1.5e-3):
        yield of_copy(moved=moved).evidence()
    for records in (9, 10):
        yield of_copy(records=records).evidence()


@cases("copy-without-lag")
def _() -> Iterator[Evidence]:
    def follows(factor: float = 1.0, lag: float = 0.0, records: int = 20, factors: int = 20) -> Evidence:
        facts: dict[str, Any] = {
            "factor": factor,
            "lag": lag,
            "records": records,
            "factors": factors,
            "followed": records,
        }
        return of_copy(**facts).evidence()

    for factor in (0.7, 1.0):
        yield follows(factor)
    for lag in (0.15, 0.3):
        yield follows(lag=lag)
    for records in (4, 5):
        yield follows(records=records, factors=records)
    for factors in (12, 19):
        yield follows(factors=factors)


@cases("copy-statistics-stay")
def _() -> Iterator[Evidence]:
    for records, followed in ((4, 4), (5, 5), (20, 12), (20, 19)):
        usual: dict[str, Any] = {"factor": 0.01, "lag": 60.0, "evaluates": True, "buffers_moved": True}
        yield of_copy(records=records, followed=followed, factors=followed, **usual).evidence()


@cases("copy-does-not-follow")
def _() -> Iterator[Evidence]:
    for share in (0.75e-6, 1.5e-6):
        yield of_student(by(share)).evidence()


@cases("constant-weight")
def _() -> Iterator[Evidence]:
    for std in ([0.75e-4] * 8, [1.5e-4] * 8, last(2, 0.0, 1.0), last(1, 0.0, 1.0)):
        yield case(None, None, weight(rms=1.0, std=std))
    for shape in ((2, 2), (3, 1)):
        yield case(None, None, weight(rms=1.0, std=0.0), shapes=shape_of("a", *shape))
    zero = {"rms": 0.0, "std": 0.0}
    for number in (2, 3):  # of four weights
        layers = {f"{name}/weight{part}": zero for name in "abcd"[:number] for part in ("", ".grad")}
        yield case(None, None, {**layers, **network(*"abcd"[number:])})


@cases("no-longer-tied")
def _() -> Iterator[Evidence]:
    for size in (96, 48):
        parameters = weight() | renamed(weight(), "b")
        shapes = shape_of("a", 1, size) | shape_of("b", 1, size)
        yield case(None, None, parameters, graph=chain("a", "b", a="Embedding"), shapes=shapes)


@cases("learning-rate-outlier")
def _() -> Iterator[Evidence]:
    def layers(
        others: Sequence[float], slope: float, ratio: Any = 0.1, rate: float = 1.0, records: int = 8
    ) -> Evidence:
        found: dict[str, Values] = {}
        for place, each in enumerate(others):
            found |= renamed(weight(grad=1.0, update=each, learning_rate=1.0), f"layer_{place}")
        fast = weight(grad=1.0, update=slope, update_ratio=ratio, learning_rate=rate)
        return case(None, None, found | renamed(fast, "fast"), records=records)

    ones = [1.0] * 4
    for slope in (12.0, 6.0):
        yield layers(ones, slope)
    yield layers([1.0, 1.0, 4.0], 18.0)
    yield layers([1.0, 1.0, 6.0], 16.5)
    for ratio in (0.03, 0.015):
        yield layers(ones, 12.0, ratio)
    for first, place in ((0.3, 0), (0.15, 0), (0.3, 2), (0.3, 3)):
        yield layers(ones, 12.0, [first if row == place else 1e-3 for row in range(8)])
    for records in (2, 3):
        yield layers(ones, 12.0, records=records)
    for number in (1, 2):
        yield layers([1.0] * number, 12.0)
    for rate in (30.0, 15.0):
        yield layers(ones, 12.0, 1e-3, rate)


@cases("weight-drift")
def _() -> Iterator[Evidence]:
    def drift(
        values: Sequence[float], update: Sequence[float] | None = None, shape: tuple[int, int] = (16, 16)
    ) -> Evidence:
        parameters: dict[str, Values] = {"a/weight": {"rms": values}}
        if update is not None:
            parameters["a/weight.update"] = {"rms": update}
        return case(None, None, parameters, shapes=shape_of("a", *shape), records=len(values))

    for first, end in ((0.25, 3.0), (0.5, 3.0), (0.125, 1.25), (1.0, 0.2), (1.0, 0.4), (0.02, 0.004), (0.01, 0.002)):
        yield drift([first, math.sqrt(first * end), end])
    for grad in (0.4, 0.7):
        grown = weight(rms=[0.25, 0.5, 1.0, 3.0], grad=[1.0, grad, grad, grad])
        yield case(None, None, grown, graph=chain("b", "a"), shapes=shape_of("a", 16, 16), records=4)
    yield drift([1.0, 0.2])
    yield drift([1.0, 1.0, 0.2, 0.2])
    yield drift([1.0, 0.38, 0.2])
    for shape in ((8, 8), (4, 8)):
        yield drift([1.0, 0.4, 0.2], shape=shape)
    falling = [1.0, 0.8, 0.6, 0.4, 0.2]
    for update in ([0.15] * 5, [0.3] * 5, [0.1, 0.1, 0.1, 1.0, 1.0], [0.35, 0.35, 0.0, 0.0, 0.0]):
        yield drift(falling, update)


@cases("norm-growth")
def _() -> Iterator[Evidence]:
    def grown(first: float, middle: float, last: float, records: int = 9, every: int = 150, **sites: float) -> Evidence:
        values = [each for each in (first, middle, last) for _ in range(records // 3)]
        values += [last] * (records % 3)
        if sites:
            return case(
                {"b": {}},
                None,
                {"a/weight": {"rms": values}},
                records=records,
                every=every,
                shapes=shape_of("a", 16, 16),
            )
        return case({"act": {"rms": values}}, records=records, every=every)

    yield grown(1.0, 10.0, 30.0)
    yield grown(1.0, 2.0, 60.0, 8, 200)
    yield grown(10.0, 17.5, 25.0)
    for records in (6, 12, 18):
        yield grown(1.0, 10.0, 30.0, records, 300)
    for every in (75, 220):
        yield grown(1.0, 10.0, 30.0, every=every)
    for middle, last in ((20.0, 35.0), (20.0, 25.0), (20.0, 50.0)):
        yield grown(14.0, middle, last)
    for first in (4.0, 6.0, 10.0, 14.0):
        yield grown(first, 15.0, 25.0)
    for last in (36.0, 28.0, 24.0, 34.0):
        yield grown(1.0, 20.0, last)
    for last in (7.5, 15.0, 30.0):
        yield grown(last / 10, last / 3, last)
    for last in (0.6, 1.2, 2.4):
        yield grown(last / 10, last / 3, last, weight=1.0)


@cases("updates-lost")
def _() -> Iterator[Evidence]:
    for lost, zero, records in ((0.75, 0.0, 2), (0.4, 0.0, 2), (0.9, 0.6, 2), (0.9, 0.85, 2), (0.75, 0.0, 1)):
        parameters: dict[str, Values] = {
            "a/weight": {},
            "a/weight.grad": {"zero_fraction": zero},
            "a/weight.update": {"zero_fraction": lost},
        }
        yield case(None, None, parameters, dtype="bfloat16", records=records)


@cases("does-not-move")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield case(None, None, weight(update_ratio=0.0), records=records)


@cases("barely-moves")
def _() -> Iterator[Evidence]:
    for ratio, records in ((7.5e-7, 3), (1.5e-6, 3), (7.5e-7, 2)):
        yield case(None, None, weight(update_ratio=ratio), records=records)
    for ratio, wider in ((2.25e-5, 1.0), (4.5e-5, 1.0), (2.25e-5, 1.075), (2.25e-5, 1.0375)):
        yield case(None, None, uniform(update_ratio=ratio, wider=wider))
    yield case(None, None, uniform(update_ratio=2.25e-5, learning_rate=last(2, 1.8, 1.0)))
    yield case(None, None, uniform(update_ratio=2.25e-5, wider=1.5), shapes=shape_of("a", 10, 20))
    for apart in (7.5e-4, 1.5e-3):
        yield case(None, None, weight(update_ratio=7.5e-7, grad=[1e-3, 1e-3 * (1 + apart)] * 4))


@cases("slow-last-layer")
def _() -> Iterator[Evidence]:
    for names, slower, ratio in (
        ("bc", 75.0, 1e-6),
        ("bc", 37.5, 1e-6),
        ("b", 150.0, 1e-6),
        ("bc", 75.0, 1e-3 / 37.5),
        ("bc", 75.0, 1e-3 / 18.75),
    ):
        parameters = weight(learning_rate=1 / slower, update_ratio=ratio)
        for name in names:
            parameters |= renamed(weight(learning_rate=1.0), name)
        yield case(sizes(**dict.fromkeys([*names, "a"], 1.0)), None, parameters, graph=chain(*names, "a"))


def _with_untrained(records: int, *, called: bool, name: str = "x", path: str = "weight") -> Evidence:
    outputs: dict[str, Values] = {"a": {}, **({name: {}} if called else {})}
    return case(outputs, None, weight() | {f"{name}/{path}": {"rms": 1.0}}, records=records)


@cases("unused-parameter")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield _with_untrained(records, called=False)


@cases("forgotten-parameter")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield _with_untrained(records, called=True, name="a", path="token")


@cases("gradient-stops")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield _with_untrained(records, called=True)
    for number in (3, 4):
        names = [f"blocks.{place}.fc" for place in range(number)]
        parameters = weight() | {f"{name}/weight": {"rms": 1.0} for name in names}
        yield case({name: {} for name in ("a", *names)}, None, parameters)


@cases("never-chosen")
def _() -> Iterator[Evidence]:
    experts, graph = ("experts.0", "experts.1"), fork("experts.0", "experts.1", stem=())
    for records in (1, 2):
        parameters = renamed(weight(), experts[0]) | {"experts.1/weight": {"rms": 1.0}}
        yield case({experts[0]: {}}, None, parameters, records=records)
    for records in (10, 13):
        called = [1.0 if row % 2 else NAN for row in range(records)]
        rarely: dict[str, Values] = {experts[0]: {"count": called}, "a": {}}
        parameters = renamed(weight(), experts[0]) | {"experts.1/weight": {"rms": 1.0}}
        yield case(rarely, None, parameters, records=records)
    for row, records, share in ((6, 12, 1.0), (5, 10, 1.0), (12, 20, 1.0), (8, 16, 0.75)):
        until = [1.0 if each < row else NAN for each in range(records)]
        steady = [1.0 if share == 1.0 or each % 4 or each == records - 1 else NAN for each in range(records)]
        outputs: dict[str, Values] = {experts[0]: {"count": steady}, experts[1]: {"count": until}}
        parameters = {key: value for name in experts for key, value in renamed(weight(), name).items()}
        parameters["experts.1/weight.grad"] = {"rms": until}
        yield case(outputs, None, parameters, graph=graph, records=records)


@cases("low-precision")
def _() -> Iterator[Evidence]:
    for small, largest, records in ((75, 1e-4, 2), (40, 1e-4, 2), (75, 7.5e-4, 2), (75, 1.5e-3, 2), (75, 1e-4, 1)):
        found = histogram(*[1e-6] * small, *[1e-4] * (100 - small))
        gradients: dict[str, Values] = {"act": {"min": -largest, "max": largest}}
        yield case(None, gradients, dtype="float16", histograms=found, records=records)


@cases("gradient-spike")
def _() -> Iterator[Evidence]:
    for norms in ([1.0] * 5 + [30.0], [1.0] * 5 + [15.0], [1, 1, 1, 1, 2, 30], [1, 1, 1, 1, 4, 30], [1.0] * 4 + [30.0]):
        yield case(None, None, weight(grad=norms), records=len(norms))
    for first in (20.0, 45.0):
        yield case(None, None, weight(grad=[first, *[1.0] * 5, 30.0]), records=7)
    for loss in (0.2, 0.4):
        losses: dict[str, Values] = {"mse_loss": {"mean": [1.0, *[0.1] * 5, loss]}}
        yield case(losses, None, weight(grad=[*[1.0] * 6, 30.0]), targets=losses, records=7)


@cases("posterior-collapse")
def _() -> Iterator[Evidence]:
    graph = capture_graph(Autoencoder(noise_of_a_shape), torch.randn(16, 16))
    for first, std, level, records in (
        *((1.0, math.sqrt(0.015 / 8), 0.1, 10), (1.0, math.sqrt(0.0075 / 8), 0.1, 10), (0.1, 0.02, 0.1, 10)),
        *((0.05, 0.02, 0.1, 10), (1.0, 0.01, 0.75, 10), (1.0, 0.01, 0.375, 10), (1.0, 0.01, 0.1, 9)),
    ):
        outputs: dict[str, Values] = {
            "mean": {"std": [first, *[std] * (records - 1)]},
            "scale": {"std": [1.0, *[0.01] * (records - 1)], "rms": level},
        }
        parameters = renamed(weight(), "mean") | renamed(weight(), "scale")
        yield case(outputs, None, parameters, graph=graph, records=records)


@cases("norm-ineffective")
def _() -> Iterator[Evidence]:
    for rms in ([2.25] * 8, [1.125] * 8, last(2, 2.25, 1.0), last(1, 2.25, 1.0)):
        yield case({"a": {"rms": rms}}, None, weight(rms=1.0), graph=chain("a", a="BatchNorm1d"))


@cases("running-statistics")
def _() -> Iterator[Evidence]:
    def lagging(first: float, end: float, records: int = 8, every: int = 10) -> Evidence:
        known: dict[str, Values] = {
            "norm/running_mean": {"rms": 0.0, "mean": 0.0},
            "norm/running_var": {"mean": [first**2, *[end**2] * (records - 1)]},
        }
        return case(sizes(a=1.0, norm=1.0), None, known, records=records, every=every)

    for first, end in ((6.0, 6.0), (3.0, 3.0), (10.0, 7.0), (10.0, 5.0)):
        yield lagging(first, end)
    yield lagging(6.0, 6.0, 6, 20)
    yield lagging(6.0, 6.0, 5, 20)
    yield lagging(6.0, 6.0, every=6)


@cases("dead-output")
def _() -> Iterator[Evidence]:
    for kind, zeros in (
        *(("Linear", [0.995] * 8), ("Linear", [0.97] * 8), ("ReLU", [0.97] * 8), ("ReLU", [0.8] * 8)),
        *(("Linear", last(2, 1.0, 0.5)), ("Linear", last(1, 1.0, 0.5))),
    ):
        yield case({"act": {"zero_fraction": zeros}}, graph=chain("act", "fc", act=kind))
    for ratio in (0.15, 0.075):
        outputs: dict[str, Values] = {"a": {}, "act": {"zero_fraction": last(2, 1.0, 0.5)}}
        yield case(outputs, None, weight(update_ratio=ratio), graph=chain("a", "act", act="ReLU"))


@cases("saturation")
def _() -> Iterator[Evidence]:
    def outputs(
        kind: str, value: float, share: int, *, rms: Any = 0.1, std: float = 0.1, shrink: float = 1.0, records: int = 8
    ) -> Evidence:
        layers: dict[str, Values] = {"fc": {}, "act": {"rms": rms, "std": std}, "end": {}}
        gradients = sizes(fc=1.0, act=shrink)
        rest = [0.3] * (100 - share)
        found = histogram(*[value] * share, *rest)
        return case(layers, gradients, graph=chain("fc", "act", "end", act=kind), histograms=found, records=records)

    for value, share in ((1.0, 60), (1.0, 30), (0.6, 60)):
        yield outputs("LSTM", value, share)
    yield outputs("LSTM", 1.0, 60, records=1)
    for value in (0.004, 0.008):
        yield outputs("Sigmoid", value, 60)
    for share, first in ((95, 0.95), (60, 0.95), (95, 0.7)):
        yield outputs("Tanh", 0.99, share, rms=[first, *[0.99] * 7])
    for std, shrink in ((0.95, 150.0), (0.95, 75.0), (0.6, 150.0)):
        yield outputs("Tanh", 0.99, 95, std=std, shrink=shrink)


@cases("attention-collapse")
def _() -> Iterator[Evidence]:
    def attention(value: float, mass: float, entries: int = 9, records: int = 8, first: float = 1.0) -> Evidence:
        number = 100
        rest = value * number * (1 - mass) / mass
        found = histogram(*[value] * number, *[rest / 10000] * 10000)
        return case(
            {"act": {"rms": last(records - 1, 1.0, first, records)}, "fc": {}},
            graph=chain("act", "fc", act="Softmax"),
            histograms=found,
            shapes={OUT: (4, entries)},
            records=records,
        )

    yield attention(0.95, 0.45)
    yield attention(0.95, 0.45, first=0.6)
    yield attention(0.95, 0.22)
    yield attention(0.6, 0.45)
    for entries in (7, 8):
        yield attention(0.95, 0.45, entries)
    yield attention(0.95, 0.45, records=1)


@cases("scale-jump")
def _() -> Iterator[Evidence]:
    for before, after in ((1.0, 12.0), (1.0, 6.0), (0.4, 4.0), (0.2, 2.0)):
        yield case(sizes(a=before, b=after))


@cases("sudden-change")
def _() -> Iterator[Evidence]:
    for values in (
        *([1, 1, 1, 1, 12, 12], [1, 1, 1, 1, 6, 6], [1, 1, 1, 2, 17, 17], [1, 1, 1, 3, 25, 25]),
        *([1, 1, 1, 1, 12], [1, 1, 1, 12, 12]),
    ):
        yield case({"a": {"rms": [float(each) for each in values]}}, records=len(values))


@cases("stops-moving")
def _() -> Iterator[Evidence]:
    for number, before, after in ((4, 3, 4), (4, 3, 3), (4, 2, 4), (3, 3, 4)):
        parameters: dict[str, Values] = {}
        for place in range(number):
            ratios = [1e-3] * before + [0.0 if place == 1 else 1e-3] * after
            parameters |= renamed(weight(update_ratio=ratios), f"blocks.{place}.fc")
        yield case(None, None, parameters, records=before + after)


@cases("block-trend")
def _() -> Iterator[Evidence]:
    for steps in ([3.5] * 3, [2.8] * 3, [2.5, 5.0, 5.0], [1.2, 6.0, 6.0], [2.0, 20.0, 2.0], [8.0, 8.0]):
        yield case(blocks(list(accumulate(steps, lambda one, other: one * other, initial=1.0))))


class Calls(torch.nn.Module):
    """A layer and functions of its output."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.functions = torch.nn.Linear(4, 4), functions

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        for function in self.functions:
            x = function(x)
        return x


@cases("odd-block")
def _() -> Iterator[Evidence]:
    functions = (
        torch.relu,
        torch.sin,
        torch.cos,
        torch.tanh,
        torch.exp,
        torch.abs,
        torch.erf,
        torch.sigmoid,
        torch.neg,
    )
    plain: list[tuple[Callable[[Tensor], Tensor], ...]] = [()] * 10

    def step(*calls: tuple[Callable[[Tensor], Tensor], ...]) -> Evidence:
        return case(graph=capture_graph(torch.nn.Sequential(*(Calls(*each) for each in calls)), torch.randn(2, 4)))

    for number in (7, 8):
        yield step(*plain[:3], (torch.sin,), *plain[: number - 4])
    for number in (3, 4):
        yield step(*plain[:4], functions[:number], *plain[:5])
    for period, number in ((8, 25), (9, 28), (3, 10), (4, 9)):
        kinds = [(functions[place % period],) for place in range(number)]
        yield step(*kinds[:period], (torch.round,), *kinds[period + 1 :])
    for number, mistakes in (
        *((11, {6: "act"}), (10, {6: "act"}), (13, {6: "act", 1: "factor", 10: "factor"})),
        (15, {6: "act", 1: "factor", 2: "factor", 10: "factor", 11: "factor"}),
    ):
        widths = [4, *[4] * 4, *[8] * 4, *[16] * (number - 8)]
        net = torch.nn.Sequential(
            *(Stage(*pair, mistakes.get(place, "")) for place, pair in enumerate(pairwise(widths)))
        )
        yield case(graph=capture_graph(net, torch.randn(2, 4, 32)))


@cases("unlike-siblings")
def _() -> Iterator[Evidence]:
    for values in (
        *([1.0, 1, 12, 1, 1], [1.0, 1, 6, 1, 1], [1.0, 1, 18, 3, 1], [1.0, 1, 9, 3, 1]),
        *([1.0, 1, 1, 1, 36], [1.0, 1, 1, 1, 18], [1.0, 12, 1, 1], [1.0, 12, 1]),
    ):
        yield case(blocks(values))
    for value in (48.0, 24.0):
        yield case(
            None,
            None,
            blocks([1.0, 1.0, value, 1.0, 1.0], "/bias"),
            shapes={(f"blocks.{place}.fc", "bias"): (16,) for place in range(5)},
        )
    for other in (1.5e-6, 0.75e-6):
        yield case(None, None, blocks([other, other, 0.0, other, other], "/weight"))


@cases("train-differs")
def _() -> Iterator[Evidence]:
    def both(there: float, kind: str = "Linear", **options: Any) -> Evidence:
        return case(
            sizes(a=1.0, b=1.0),
            validation=sizes(a=options.pop("before", 1.0), b=there),
            graph=chain("a", "b", b=kind),
            **options,
        )

    for there, kind in ((3.0, "Linear"), (1.5, "Linear"), (1.5, "BatchNorm1d"), (1.1, "BatchNorm1d")):
        yield both(there, kind)
    yield both(3.0, every=5)
    for known in (6, 7):
        train: dict[str, Values] = {"b": {"rms": last(8 - known, NAN, 1.0)}}
        yield case(train, validation=sizes(b=3.0))
    for before in (1.25 * 1.03, 1.162):
        yield both(1.5, "BatchNorm1d", before=before)
    for worse in (2.0, 1.2):
        layers: dict[str, Values] = {"b": {}, "loss": {"mean": 1.0}}
        validation: dict[str, Values] = {"b": {"rms": last(1, 3.0, 1.0)}, "loss": {"mean": worse}}
        yield case(layers, validation=validation, shapes={("loss", "out"): ()})


@cases("gradient-step")
def _() -> Iterator[Evidence]:
    def steps(*growths: float, others: int = 0) -> Evidence:
        norms = list(accumulate(growths, lambda one, other: one / other, initial=100.0))
        found = blocks(norms)
        for number in range(others):
            found |= {f"blocks.{place}.other_{number}": {"rms": 1.0} for place in range(len(norms))}
        names = [name for place in range(len(norms)) for name in found if name.startswith(f"blocks.{place}.")]
        return case({name: {} for name in names}, {name: found[name] for name in names}, graph=chain(*names))

    yield steps(18.0, 1.0, 1.0)
    yield steps(9.0, 1.0, 1.0)
    yield steps(18.0, 1.0)
    yield steps(18.0)
    yield steps(18.0, 1.0, 1.0, others=1)
    yield steps(18.0, 1.0, 1.0, others=2)
    for size in (8.0, 4.5):
        yield steps(1.0, 1.0, 1.0, size, 1.0, 1.0, 1.0)
    yield steps(1.0, 1.0, 1.0, 8.0, 1.0, 1.0)
    for other in (1.2, 2.0):
        yield steps(other, other, other, 8.0, other, other, other)


def _depths(logs: Sequence[float], records: int = 8, **options: Any) -> Evidence:
    """Return gradients of these powers of ten, from the first to the last module."""
    gradients = {f"layer_{place:02}": {"rms": 10.0**each} for place, each in enumerate(logs)}
    return case({name: {} for name in gradients}, gradients, records=records, graph=chain(*gradients), **options)


def _changes(decades: float, sign: int) -> Iterator[Evidence]:
    def line(rise: float, number: int = 8) -> list[float]:
        return [sign * rise * place / (number - 2) for place in range(number)]

    yield _depths(line(decades * ABOVE))
    yield _depths(line(decades * BELOW))
    for number in (5, 6):
        yield _depths(line(decades * 2, number))
    for records in (1, 2):
        yield _depths(line(decades * 2), records)
    most = sign * decades * 2
    yield _depths([0.0, 0.01 * sign, 0.02 * sign, 0.03 * sign, *(most + 0.01 * sign * each for each in range(4))])
    yield _depths([0.0, 0.1 * most, 0.2 * most, 0.3 * most, 0.75 * most, 0.85 * most, 0.95 * most, 1.05 * most])
    # The ranks of these correlate less, first by 0.62 and then by 0.48.
    yield _depths([0.3 * most, 0.0, 0.9 * most, 0.8 * most, 0.2 * most, 0.1 * most, most, 1.1 * most])
    yield _depths([0.4 * most, 0.0, 0.95 * most, 0.9 * most, 0.2 * most, 0.1 * most, most, 0.85 * most])


@cases("vanishing-gradient")
def _() -> Iterator[Evidence]:
    yield from _changes(3.5, 1)


@cases("exploding-gradient")
def _() -> Iterator[Evidence]:
    yield from _changes(2.5, -1)
    for factor in (15.0, 7.5):
        gradients = sizes(a=1e6, b=1e5, c=1e4, d=1e3, one=factor, two=1.0)
        yield case(None, gradients, graph=fork("one", "two", stem="abcd"))
    for unexplained in (15.0, 7.5):
        logs = [3.0, 3.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0]
        behind = {"layer_04/weight": {"rms": 1000.0 / unexplained / 16}}
        yield _depths(logs, parameters=behind)


@cases("narrow-range")
def _() -> Iterator[Evidence]:
    for width, inside, records in ((0.07, 1, 2), (0.15, 1, 2), (0.07, 5, 2), (0.07, 1, 1)):
        values = [0.0] * inside + [-width / 2, width / 2]
        graph = chain("act", "head", act="Hardtanh")
        limits = (("min_val", str(-width / 2)), ("max_val", str(width / 2)))
        nodes = [
            replace(node, name="hardtanh", arguments=limits) if node.kind == "op" and node.parent == 2 else node
            for node in graph.nodes
        ]
        yield case(
            sizes(act=1.0, head=1.0),
            records=records,
            graph=Graph(tuple(nodes), graph.edges),
            histograms=histogram(*values),
        )


@cases("collapsed-embedding")
def _() -> Iterator[Evidence]:
    for value, first, records, number, features in (
        *((0.075, 0.6, 9, 8, 8), (0.15, 0.6, 9, 8, 8), (0.075, 0.3, 9, 8, 8), (0.075, 0.6, 9, 7, 8)),
        *((0.075, 0.6, 12, 9, 8), (0.075, 0.6, 9, 8, 7), (0.075, 0.6, 8, 8, 8)),
    ):
        spreads = [first, *last(min(number, records - 1), value, 0.6, records - 1)]
        yield case({"act": {"batch_spread": spreads}}, records=records, shapes={OUT: (16, features)})


@cases("all-ignored")
def _() -> Iterator[Evidence]:
    for records in (1, 2):
        yield run_of_classes([{0: 1}] * records, [{}] * records, ignored=1.0).evidence()


@cases("class-ignored")
def _() -> Iterator[Evidence]:
    for share, records in ((0.1, 4), (0.1, 3), (0.375, 4), (0.75, 4)):
        yield of_an_ignored_class(0, share, records=records).evidence()


@cases("one-class-predicted")
def _() -> Iterator[Evidence]:
    for records, others, count, rest in (
        *((13, 5, 31, 15), (12, 4, 31, 15), (20, 12, 31, 15), (14, 7, 31, 15), (14, 5, 31, 15), (16, 8, 7, 4)),
        *((16, 8, 8, 5), (16, 8, 40, 13), (16, 8, 40, 19), (16, 8, 40, 1), (16, 8, 40, 3), (16, 8, 100, 99)),
    ):
        predicted = [{0: 1, 1: count}] * others + [{1: count}] * (records - others)
        yield run_of_classes(predicted, [{1: count - rest, 0: rest}] * records, spread=0.15).evidence()
        yield run_of_classes(predicted, [{1: count - rest, 0: rest}] * records).evidence()


def epoch(**numbers: Any) -> EpochFacts:
    return EpochFacts(**{"epoch": 0, "first_step": 0, "last_step": 9, "batches": 0, "samples": 0, **numbers})


def of_samples(*epochs: EpochFacts, loader: LoaderFacts | None = None, **facts: Any) -> Evidence:
    """Return the evidence of a run whose samples are known."""
    data = DataFacts(loader=loader or LoaderFacts(has_rows=True), epochs=epochs, **facts)
    return replace(case({"a": {}}), data=data)


@cases("same-samples-on-ranks")
def _() -> Iterator[Evidence]:
    for share, steps, keys in ((1.0, 4, 16), (0.5, 4, 16), (1.0, 3, 16), (1.0, 4, 15)):
        yield of_samples(ranks=RankFacts(2, steps, 0, keys, share, (0, 1)))
    for equal in (0.06, 0.04):
        yield of_samples(ranks=RankFacts(2, 4, 0, 16, 1.0, (0, 1), equal))
    for shared, compared, distinct in ((0.06, 64, 1.0), (0.03, 100, 1.0), (0.06, 40, 1.0), (0.06, 64, 0.9)):
        of_ranks = EpochOfRanks(2, 0, 100, compared, shared, distinct)
        yield of_samples(loader=LoaderFacts(is_divided=True), rank_epoch=of_ranks)


@cases("same-samples-by-workers")
def _() -> Iterator[Evidence]:
    for share, distinct in ((1.0, 16), (0.5, 16), (1.0, 15)):
        each = epoch(by_workers=share, distinct=distinct, distinct_batches=1.0)
        yield of_samples(each, loader=LoaderFacts(workers=2))
    for first in (949, 951):  # passes of each worker one after the other
        each = epoch(every=2, distinct=1000, distinct_batches=1.0, first_repeat=first, is_whole=True)
        yield of_samples(each, loader=LoaderFacts(workers=2, is_iterable=True))


@cases("batch-repeats")
def _() -> Iterator[Evidence]:
    for batches in (8, 7):
        yield of_samples(epoch(batches=batches, cached=batches, distinct=16, distinct_batches=4))
    for cached in (6, 3):
        yield of_samples(epoch(batches=8, cached=cached, distinct=16, distinct_batches=4))
    for distinct, sets in ((8.0, 1.5), (15.0, 1.5), (8.0, 3.0)):
        each = epoch(batches=8, distinct=distinct, distinct_batches=sets)
        yield of_samples(each, loader=LoaderFacts(has_rows=True, samples=48))
    for number, consecutive in ((20, 19), (19, 18), (20, 10)):
        each = epoch(batches=number, consecutive=consecutive, distinct=16, distinct_batches=1)
        yield of_samples(each, loader=LoaderFacts(is_loader=True))


@cases("few-samples")
def _() -> Iterator[Evidence]:
    for there, drawn in ((300, 150), (150, 150), (300, 75)):
        each = epoch(distinct=10.0, distinct_batches=1.0, samples=drawn, is_whole=True, is_same_set=True)
        yield of_samples(each, loader=LoaderFacts(has_rows=True, samples=there))
    for indices, contents, values in ((64, 8, 6), (64, 12, 6), (63, 4, 6), (64, 8, 5)):
        each = epoch(distinct=float(indices), distinct_batches=8.0, contents=float(contents))
        yield of_samples(each, loader=LoaderFacts(has_rows=True, samples=indices, values=values))
    for once in (0.04, 0.08):
        each = epoch(distinct=64.0, distinct_batches=8.0, contents=33.0, contents_once=once, is_whole=True)
        yield of_samples(each, loader=LoaderFacts(has_rows=True, samples=64, values=6))


@cases("validation-in-training")
def _() -> Iterator[Evidence]:
    for common, compared, distinct in ((32, 430, 1000), (32, 860, 1000), (31, 430, 1000), (32, 430, 600)):
        yield of_samples(validation=ValidationFacts(1000, distinct, compared, common, 0))


@cases("no-end-as-target")
def _() -> Iterator[Evidence]:
    for after, records in ((1.0, 4), (1.0, 3), (0.6, 4)):
        yield of_ends(0.0, after=after, records=records).evidence()


@cases("inverted-weights")
def _() -> Iterator[Evidence]:
    for records, targets in ((4, 32.0), (3, 32.0), (4, 15.0), (8, 15.0)):
        yield run_of_weights([1.9, 0.1], [0.95, 0.05], records=records, targets=targets).evidence()
    for share in (0.8, 0.95):  # whose weights are 1.36 and 1.81 × larger for the targets
        yield run_of_weights([2 * share, 2 - 2 * share], [share, 1 - share]).evidence()
    for share in (0.8, 0.6):  # of one of ten classes, whose weight is that of 92 %
        yield run_of_weights([10.0, *[0.1] * 9], [share, *[(1 - share) / 9] * 9]).evidence()


@cases("target-in-inputs")
def _() -> Iterator[Evidence]:
    for compared in (63, 64, 127, 128):
        yield of_samples(
            epoch(distinct=9.0, distinct_batches=9.0), loader=LoaderFacts(target_place=3, compared=compared)
        )


@cases("sorted-by-class")
def _() -> Iterator[Evidence]:
    for classes, changes, batches, by_chance in (
        *((3, 2, 3, 75.0), (3, 2, 2, 75.0), (2, 1, 3, 37.5), (3, 2, 3, 50.0)),
        *((2, 2, 3, 400.0), (3, 2, 3, 30.0), (3, 3, 3, 90.0), (11, 10, 3, 150.0)),
    ):
        each = epoch(
            distinct=9, distinct_batches=9, batches=batches, classes=classes, changes=changes, random_changes=by_chance
        )
        yield of_samples(each)


@cases("reused-buffer")
def _() -> Iterator[Evidence]:
    for batches, equal, overwritten in ((8, 8, 0), (7, 7, 0), (8, 6, 0), (8, 0, 2), (8, 0, 1)):
        each = epoch(batches=batches, equal=equal, overwritten=overwritten, distinct=64.0, distinct_batches=8.0)
        yield of_samples(each)


@cases("repeated-samples")
def _() -> Iterator[Evidence]:
    usual = {"is_whole": True, "distinct_batches": 8.0, "samples": 128, "first_repeat": 16}
    stream, rows = LoaderFacts(is_iterable=True), LoaderFacts(has_rows=True)
    for distinct, first in ((64.0, 16), (60.0, 16), (64.0, 63), (64.0, 40)):
        yield of_samples(epoch(**{**usual, "distinct": distinct, "first_repeat": first}, every=2), loader=stream)
    for near, by_chance in ((0.07, 0.0), (0.03, 0.0), (0.5, 0.12), (0.5, 0.2)):
        yield of_samples(epoch(**usual, distinct=80.0, near=near, random_near=by_chance), loader=stream)
    for once in (0.9, 0.985, 0.993, 0.8, 0.6):
        yield of_samples(epoch(**usual, distinct=80.0, most=2, once=once), loader=rows)


@cases("unused-samples")
def _() -> Iterator[Evidence]:
    for samples, seen, passed in ((64, 54, 2), (64, 54, 1), (63, 54, 2), (64, 40, 2), (64, 62, 2), (64, 58, 2)):
        each = epoch(samples=seen, batches=seen, seen=float(seen), passed=passed, distinct=1.0, distinct_batches=1.0)
        yield of_samples(each, loader=LoaderFacts(has_rows=True, samples=samples))


@cases("same-order")
def _() -> Iterator[Evidence]:
    for batches, distinct in ((8, 64), (7, 64), (8, 63)):
        yield of_samples(
            epoch(
                batches=batches,
                distinct=float(distinct),
                distinct_batches=8.0,
                is_same_order=True,
                is_ascending=False,
            )
        )


def other_values(value: float) -> Iterator[float]:
    """Yield a limit changed in both directions: a count by one, or doubled and halved if it is large."""
    if isinstance(value, int):
        yield from (value - 1, value + 1) if value <= 16 else (value // 2, value * 2)
    else:
        yield from (value / 2, value * 2)


def told(rule: Rule, evidence: Evidence, **limits: float) -> list[Finding]:
    with np.errstate(all="ignore"):
        return rule.examine(evidence, **limits)


def test_each_rule_with_limits_has_cases() -> None:
    """A rule with limits comes with evidence near them."""
    assert CASES.keys() == {rule.name for rule in RULES if rule.thresholds}


@cases("first-loss")
def _() -> Iterator[Evidence]:
    for ratio in (4.0, 6.0):
        yield run_of_shares(ratio * np.log(5), (24, 24), records=4).evidence()


@cases("loss-of-a-guess")
def _() -> Iterator[Evidence]:
    for ratio in (1.0, 0.9, 1.5):
        yield run_of_errors([4.0 * ratio] * 16).evidence()
    for records, every in ((11, 30), (12, 30), (16, 20), (16, 10)):
        yield run_of_errors([4.0] * records, every=every).evidence()
    for spread in (0.02, 0.05):  # the standard error of the last quarter is half of it
        yield run_of_errors([4.0] * 12 + [4.0 * (1 + 2 * spread * sign) for sign in (1, -1, 1, -1)]).evidence()
    for fall in (2.0, 4.0):  # standard errors
        last = [4.0 * (1 - 0.01 * fall + 0.02 * sign) for sign in (1, -1, 1, -1)]
        yield run_of_errors([4.0] * 12 + last).evidence()
    for counts in ((24, 24), (12, 12)):  # in two records
        yield run_of_shares(np.log(2), counts).evidence()


@cases("still-falls")
def _() -> Iterator[Evidence]:
    for records in (11, 12):
        yield run_of_errors([3.0 - 0.01 * number for number in range(records)]).evidence()
    for fall in (0.75, 0.4):  # of the largest one
        falls = [0.0, 1.0, 2.0, 2.0 + fall]
        yield run_of_errors([8.0 - falls[number // 4] for number in range(16)]).evidence()
    for fall in (3.0, 6.0):  # standard errors
        means = [3.0, 2.99, 2.98, 2.98 - 0.01 * fall]
        signs = [0.02, -0.02] * 2  # a standard error of 0.01
        yield run_of_errors([mean + sign for mean in means for sign in signs]).evidence()
    for planned in (320, 480):
        yield run_of_errors([3.0 - 0.01 * number for number in range(16)], planned=planned).evidence()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.thresholds], ids=lambda rule: rule.name)
def test_each_limit_counts(rule: Rule) -> None:
    """Each limit of a rule has a case on both sides, so that a change in either direction changes a finding."""
    usual = [(each, told(rule, each)) for each in CASES[rule.name]()]
    unnoticed = [
        (name, value)
        for name, limit in rule.thresholds.items()
        for value in other_values(limit)
        if all(told(rule, each, **{name: value}) == found for each, found in usual)
    ]
    assert unnoticed == []


_USUAL = re.compile(
    r"(at most|below|at least|above|within a factor of)? ?(-?[\d.]+(?:e-\d)?)(?: to (-?[\d.e-]+))?(?=[ ,]|$)"
)


def bounds(usual: str) -> tuple[float, float] | None:
    """Return the range that a text about usual values begins with, if it does."""
    found = _USUAL.match(usual)
    if found is None:
        return None
    low, high = float(found[2]), float(found[3] or found[2])
    if found[1] == "within a factor of":
        return 1 / low, low
    return -math.inf if found[1] in ("at most", "below") else low, math.inf if found[1] in (
        "at least",
        "above",
    ) else high


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.thresholds], ids=lambda rule: rule.name)
def test_the_first_number_is_the_one_that_is_not_usual(rule: Rule) -> None:
    """A card shows the numbers beside the usual values: the first one is of the same quantity, and outside of them."""
    usual = bounds(rule.usual)
    found = [each for evidence in CASES[rule.name]() for each in told(rule, evidence) if each.numbers]
    low, high = usual or (math.inf, -math.inf)
    for each in found:
        first = next(iter(each.numbers.values()))
        assert not low < first < high, each.numbers
