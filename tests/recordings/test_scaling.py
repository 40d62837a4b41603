"""Tests of the coordinate check, by hand and on real trainings of several widths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_recorder import ArgumentError, open_recording
from lightning_recorder.bins import BINS
from lightning_recorder.names import Site
from lightning_recorder.recordings import RecordWriter, Run, records_path
from lightning_recorder.recordings.scaling import Scaling, SiteScaling, check_scaling
from tests.commands.console import run as command
from tests.recordings.runs import site_of
from tests.recordings.widths import Mlp, Transformer, train_width

Sizes = Mapping[str, Callable[[int], float]]


def write_width(log_dir: Path, width: int, sizes: Sizes, steps: int = 1) -> Run:
    """Write a run whose sites have the given rms at the given width."""
    writer = RecordWriter(records_path(log_dir / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    shapes = {name: (4, 10 if name == "head" else width) for name in sizes}
    for step in range(steps):
        writer.write(
            {"step": step},
            [site_of(name, "out", {"rms": of(width)}, shape=shapes[name]) for name, of in sizes.items()],
        )
    return open_recording(log_dir).run


def scaled(folder: Path, sizes: Sizes, widths: tuple[int, ...] = (64, 128, 512)) -> Scaling:
    return check_scaling([write_width(folder / str(width), width, sizes) for width in widths])


def test_exponents_of_power_laws(tmp_path: Path) -> None:
    """The exponents of exact power laws are found, with the widths from the shapes and no standard error."""
    found = scaled(
        tmp_path, {"stem": lambda n: 2.0, "fc": lambda n: 0.1 * n, "out": lambda n: n**-1.0, "head": lambda n: n**-0.5}
    )
    assert (found.widths, found.statistic) == ((64.0, 128.0, 512.0), "rms")
    assert [round(each.exponent, 9) for each in found.sites] == [0.0, 1.0, -1.0, -0.5]
    assert all(abs(error) < 1e-7 for each in found.sites for error in each.errors)
    assert [each.site.name for each in found.off] == ["fc", "out"]
    assert [each.is_readout for each in found.sites] == [False, False, False, True]
    assert found.sentence == (
        "2 of 4 sites depend on the width: fc grows as width^1.00 at step 0, for widths 64 to 512"
    )


@pytest.mark.parametrize(("last", "words"), [(2.3, "too large"), (-0.1, "too small")])
def test_the_advice_is_about_the_largest_exponent(last: float, words: str) -> None:
    """An output that explodes decides, also if the first layer shrinks a little afterwards."""
    sites = tuple(
        SiteScaling(Site(str(place), "out"), (0.0, exponent), (0.1, 0.01), 1, exponent, (1.0, 1.0), False, True)
        for place, exponent in enumerate((-0.2, last))
    )
    assert f"The updates are {words} for wide models." in Scaling((64.0, 128.0), (0, 1), sites, "rms", 0.15).advice


def test_the_mean_absolute_value_is_that_of_the_histogram(tmp_path: Path) -> None:
    """With histograms, the mean absolute value counts, and zeros count as zero."""
    runs = []
    for width in (2, 4):
        values = torch.tensor([0.0, 0.0, 1.125 * width, -1.125 * width])
        places = ((values.view(torch.int32).long() & 0xFFFFFFFF) >> 21).tolist()
        bins = torch.zeros(BINS, dtype=torch.int64)
        for place in places:
            bins[place] += 1
        writer = RecordWriter(records_path(tmp_path / str(width) / "recorder", "activations"))
        writer.begin(label="activations", group="activations")
        writer.write({"step": 0}, [site_of("fc", "out", {"rms": 1.0}, bins, shape=(width,))])
        runs.append(open_recording(tmp_path / str(width)).run)
    (site,) = check_scaling(runs).sites
    assert check_scaling(runs).statistic == "mean absolute value"
    assert site.values == (1.125, 2.25)  # 1.125 is the middle of its bin
    assert site.exponent == pytest.approx(1.0)


def _root(factor: float, width: int) -> float:
    return factor * math.sqrt(width)


def test_noise_is_not_off(tmp_path: Path) -> None:
    """An exponent within three standard errors is not off, and more runs of the same widths make it so."""
    noisy = scaled(tmp_path / "few", {"fc": lambda n: {64: 1.0, 128: 3.0, 512: 2.2}[n]})
    assert (noisy.sites[0].exponent > 0.15, noisy.off) == (True, [])
    factors = [1.0, 1.1, 1.2] * 3
    runs = [
        write_width(tmp_path / f"{seed}-{width}", width, {"fc": partial(_root, factor)})
        for width in (64, 128)
        for seed, factor in enumerate(factors)
    ]
    assert len(check_scaling(runs).off) == 1


def test_errors(tmp_path: Path) -> None:
    """Runs of one width, without a common site, or with too few widths are an error."""
    one, same = (write_width(tmp_path / name, 8, {"fc": lambda n: 1.0}) for name in ("a", "b"))
    with pytest.raises(ArgumentError, match="all runs have the same width"):
        check_scaling([one, same])
    with pytest.raises(ArgumentError, match="there are 2 runs and 1 widths"):
        check_scaling([one, same], [8])
    assert check_scaling([one, same], [8, 16]).off == []
    with pytest.raises(ArgumentError, match="no site and step in common"):
        check_scaling([one, write_width(tmp_path / "c", 16, {"other": lambda n: 1.0})])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Path]]:
    """Return a function that trains a model at three widths."""

    def paths(kind: Any, *, mup: bool) -> list[Path]:
        folder = tmp_path_factory.mktemp("widths")
        return [
            train_width(folder / f"width_{width}", kind, width, mup=mup, lr=1e-2, steps=3) for width in (64, 128, 256)
        ]

    return paths


@pytest.mark.parametrize("kind", [Mlp, Transformer])
def test_only_the_standard_parametrization_depends_on_the_width(kind: Any, trained: Callable[..., list[Path]]) -> None:
    """Trained with Adam, activations grow with the width, except in maximal-update parametrization."""
    standard, maximal = (trained(kind, mup=mup) for mup in (False, True))
    wrong = command("scale", *standard)
    assert (wrong.status, "sites depend on the width: " in wrong.out.splitlines()[0]) == (1, True)
    assert "Adam's learning rate of hidden and output weights is divided by the width" in wrong.out
    assert len(wrong.out.splitlines()) <= 20
    found = json.loads(command("scale", *standard, "--json").out)
    off = {each["site"][0] for each in found["sites"] if each["is_off"]}
    assert (found["widths"], "head.linear" in off, "stem" in off) == ([64.0, 128.0, 256.0], True, False)
    assert all(each["step"] > 0 for each in found["sites"] if each["is_off"])  # the initialization is right
    right = command("scale", *maximal)
    assert (right.status, right.out.splitlines()[0]) == (
        0,
        f"the sizes of all {len(found['sites'])} sites are independent of the width, for widths 64 to 256",
    )
