"""Tests that every picture that cannot show all layers shows and labels the sick one, wherever it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recorder.insight import Finding
from lightning_recorder.insight.unusual import are_of_losses, unusualness
from lightning_recorder.plots import PlotHistory, gradient_flow, heat_map, overview, ridge
from lightning_recorder.plots.canvas import Canvas, fitted
from lightning_recorder.reductions import SCALAR_STATISTICS, Statistics, to_histogram
from lightning_recorder.taps import Site

DEPTH = 48
PARTS = ("norm1", "attn.qkv", "attn.out_proj", "mlp.fc1", "mlp.act", "mlp.fc2")
NAMES = [f"transformer.blocks.{block}.{part}" for block in range(DEPTH) for part in PARTS]
LABELS = [name.removeprefix("transformer.blocks.") for name in NAMES]
SICK = {"exploded": 50.0, "tiny": 1 / 50, "zero": 0.0}


@contextmanager
def drawn_texts() -> Iterator[tuple[list[str], list[str]]]:
    """Collect the texts that are really drawn: all of them, and the bold ones."""
    texts: list[str] = []
    bold: list[str] = []
    draw = Canvas.text

    def text(self: Canvas, x: float, y: float, text: str, **options: object) -> None:
        texts.append(text)
        if options.get("bold"):
            bold.append(text)
        draw(self, x, y, text, **options)  # type: ignore[arg-type]  # passed on

    with patch.object(Canvas, "text", text):
        yield texts, bold


def measured(values: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
    statistics = Statistics()
    statistics.update(values)
    found = statistics.compute()
    return {name: float(found[name]) for name in SCALAR_STATISTICS}, found["histogram"]


USUAL = torch.randn(200, generator=torch.Generator().manual_seed(0))
FOUND = {kind: measured(USUAL * factor) for kind, factor in SICK.items()}
HEALTHY = [measured(USUAL * factor) for factor in (1.0, 1.1, 0.9, 1.05)]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, len(NAMES) - 1), st.sampled_from(sorted(SICK)), st.integers(0, 4))
def test_an_outlier_is_in_every_picture(place: int, kind: str, since: int) -> None:
    """A sick layer among 288 has its bold label in each heat map, ridge and flow, and its histogram over time."""
    history = PlotHistory()
    for step in range(5):
        found = {(name, "out"): HEALTHY[(row + step) % 4] for row, name in enumerate(NAMES)}
        if step >= since:
            found[NAMES[place], "out"] = FOUND[kind]
        history.add_sites(step, found)
    with drawn_texts() as (_, bold):
        images = overview(history, group="gradients", statistics=("rms", "max"), max_images=2)
    heat_maps = ["gradients_plots/heat_map/rms", "gradients_plots/heat_map/max", "Unusual/gradients"]
    assert {*heat_maps, "gradients_plots/ridge", "gradients_plots/flow"} <= images.keys()
    assert f"gradients_plots/over_time/{NAMES[place]}" in images
    assert bold.count(LABELS[place]) == 5


def test_no_picture_of_unusual_layers_without_any() -> None:
    """If no layer stands out and no finding names one, there is no heading for unusual layers; a finding adds it."""
    history = PlotHistory()
    for step in range(5):
        history.add_sites(step, {(name, "out"): HEALTHY[0] for name in NAMES})
    tags = overview(history, group="activations", max_images=0).keys()
    assert tags
    assert not [tag for tag in tags if tag.startswith("Unusual")]
    finding = Finding("dead-output", "warning", NAMES[3], "out", 0, 4, 5, "", "", "", "")
    assert "Unusual/activations" in overview(history, group="activations", max_images=0, findings=[finding])


def test_an_undefined_ratio_is_no_nan() -> None:
    """The ratio of an update to a weight of zero has a pattern of its own; a weight that is NaN keeps that of NaN."""
    history = PlotHistory(statistics=("rms", "update_ratio"))
    for step, (rms, ratio) in enumerate([(0.0, math.inf), (0.1, 0.01), (0.1, 0.01), (0.1, 0.02)]):
        history.add_sites(step, {("zero", "weight"): ({"rms": rms, "update_ratio": ratio}, None)})
    with drawn_texts() as (texts, _):
        overview(history, group="parameters", statistics=("update_ratio",), max_images=0)
    assert ("undefined" in texts, "NaN" in texts, "infinite" in texts) == (True, False, False)
    history.add_sites(4, {("zero", "weight"): ({"rms": math.nan, "update_ratio": math.nan}, None)})
    with drawn_texts() as (texts, _):
        overview(history, group="parameters", statistics=("update_ratio",), max_images=0)
    assert ("undefined" in texts, "NaN" in texts) == (True, True)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, len(NAMES) - 1), st.sampled_from(sorted(SICK)))
def test_an_outlier_is_in_every_plot_of_arrays(place: int, kind: str) -> None:
    """The public functions find the sick layer by the values that they draw."""
    values = np.array([HEALTHY[row % 4][0]["rms"] for row in range(len(NAMES))])
    values[place] = FOUND[kind][0]["rms"]
    histograms = [to_histogram(*HEALTHY[row % 4]) for row in range(len(NAMES))]
    histograms[place] = to_histogram(*FOUND[kind])
    with drawn_texts() as (_, bold):
        heat_map([0], NAMES, values[:, None], statistic="rms", title="", max_layers=30)
        ridge(NAMES, histograms, title="")
        gradient_flow(NAMES, values, 3 * values, title="")
    assert bold.count(LABELS[place]) == 3


def test_a_picture_says_what_it_leaves_out() -> None:
    """A note has the numbers of layers that are drawn, that stand out, and that are not shown."""
    values = np.ones((len(NAMES), 1))
    values[100] = 99.0
    with drawn_texts() as (texts, _):
        heat_map([0], NAMES, values, statistic="rms", title="", max_layers=20)
    said = " ".join(texts)
    assert "20 of 288 layers: the most unusual one with neighbors, others evenly spread; 268 not shown" in said
    assert "bold: 1 layer unlike its neighbors or past" in said


def test_rows_that_stand_out_side_by_side_have_all_their_labels() -> None:
    """Three adjacent rows of five pixels have three labels that do not touch."""
    values = np.ones((260, 1))
    values[100:103] = 99.0
    names = [f"blocks.{row}.fc" for row in range(260)]
    with drawn_texts() as (_, bold):
        image = heat_map([0], names, values, statistic="rms", title="")
    assert bold[1:] == ["blocks.100.fc", "blocks.101.fc", "blocks.102.fc"]
    assert image.shape[0] <= 1600


def test_labels_keep_the_number_of_the_block_and_the_last_part() -> None:
    """Labels are shortened by what their neighbors share, not in the middle."""
    shown = fitted([*NAMES, "transformer.head"], 110)
    assert shown[:3] == ["0.norm1", "0.attn.qkv", "0.attn.out_proj"]
    assert shown[-1] == "head"
    both = [f"{part}.layers.{block}.mlp.fc1" for part in ("encoder", "decoder") for block in range(24)]
    shown = fitted(both, 100)
    assert len(set(shown)) == 48
    assert shown[17] == "enco.17.mlp.fc1"


BOTH = [f"net.t.{part}.layers.{block}.linear1" for part in ("encoder", "decoder") for block in range(12)]


@pytest.mark.parametrize(
    ("names", "among", "room", "expected"),
    [
        (BOTH[15:17], BOTH, 114, ["decoder.3.linear1", "decoder.4.linear1"]),
        ([f"{BOTH[15]} weight", "net.emb"], [*BOTH, "net.emb"], 114, ["de.3.linear1 weight", "emb"]),
        (
            ["net.right_tower.blocks.7.up", "net.head"],
            ["net.left_tower.blocks.7.up"],
            114,
            ["right_tower.7.up", "head"],
        ),
        (["net.norms.9 weight", "net.gru.8 bias_hh_l0"], [], 95, ["norms.9 weight", "gru.8 bias_hh_l0"]),
        ([f"model.net.{layer}" for layer in (8, 9)], [], 40, ["8", "9"]),
        (
            [f"bert.encoder.layer.10.intermediate.dense{path}" for path in ("", " weight", " bias")] + ["bert.pooler"],
            [],
            114,
            ["10.in.dense", "10.in.dense weight", "10.in.dense bias", "pooler"],
        ),
    ],
)
def test_a_label_stands_for_one_layer_only(names: list[str], among: list[str], room: int, expected: list[str]) -> None:
    """A label tells its layer from all others, drawn or not, and abbreviates the module alike for its tensors."""
    assert fitted(names, room, among=[*among, *names] if among else ()) == expected


def test_the_number_of_the_block_stays_in_a_label_that_does_not_fit() -> None:
    """An ellipsis replaces some of what follows the number."""
    name = "net.t.decoder.layers.16.self_attention_output_projection.parametrizations.weight.original0 grad"
    (label, _) = fitted([name, "net.t.decoder.layers.3.norm"], 114)
    assert label.startswith("16.")
    assert "…" in label


def test_the_neighbors_of_an_unusual_layer_are_drawn_with_it() -> None:
    """The same layer of the blocks before and after is in the picture, so one sees what is unusual."""
    values = np.ones((len(NAMES), 1))
    values[NAMES.index("transformer.blocks.16.mlp.act")] = 99.0
    with drawn_texts() as (texts, _):
        heat_map([0], NAMES, values, statistic="rms", title="", max_layers=8)
    assert {"15.mlp.act", "16.mlp.act", "17.mlp.act"} <= set(texts)


@pytest.mark.parametrize("most", [1, 4])
def test_degrees_are_checked(most: int) -> None:
    """The number of degrees must be that of the layers."""
    with pytest.raises(ValueError, match=r"degrees must have the shape \[2\]"):
        ridge(["a", "b"], [to_histogram(*HEALTHY[0])] * 2, title="", degrees=[0.0], max_layers=most)


def test_sites_that_cannot_have_a_statistic_are_not_in_its_picture() -> None:
    """Running statistics have no ratio of an update, which is no NaN. A weight of NaN stays in all pictures."""
    history = PlotHistory(statistics=("rms", "update_ratio"), max_histograms=0)
    nan = float("nan")
    for step in range(3):
        bad = nan if step else 1.0
        history.add_sites(
            step,
            {
                ("bn", "weight"): ({"rms": 1.0, "update_ratio": 0.1}, None),
                ("bn", "running_var"): ({"rms": 1.0}, None),
                ("fc", "weight"): ({"rms": bad, "update_ratio": bad}, None),
                ("out", "weight"): ({"rms": nan, "update_ratio": nan}, None),
            },
        )
    for statistics, names in ((["rms"], 4), (["update_ratio"], 3)):
        with drawn_texts() as (texts, bold):
            overview(history, group="parameters", statistics=statistics)
        shown = {"bn weight", "bn running_var", "fc weight", "out weight"} & {*texts, *bold}
        assert len(shown) == names
        assert ("bn running_var" in shown) == (statistics == ["rms"])


def test_a_loss_is_like_no_layer() -> None:
    """A loss and what enters it are compared with nothing, unless there is nothing else."""
    layers = [Site(f"layers.{place}", "out") for place in range(6)]
    losses = (Site("cross_entropy", "out"), Site("criterion", "in.target"))
    assert are_of_losses((*layers, *losses)).tolist() == [False] * 6 + [True] * 2
    assert not are_of_losses(losses).any()
    sizes = np.array([1.0] * 6 + [1e9, 1e-9])[:, None]
    assert not unusualness([*layers, *losses], {"rms": sizes}).any()
    assert unusualness([*layers, Site("head", "out")], {"rms": sizes[:7]})[-1] > 1
