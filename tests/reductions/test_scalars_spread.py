"""Tests of the spread along the batch: the C function and torch agree, and equal samples have none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions import BatchSpread, prepare
from lightning_recorder.reductions.kernels import fused
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.taps import Site
from tests.reductions.laws import reduced


def spread(*tensors: Tensor) -> float:
    """Return the spread of a stream."""
    states, site = SiteStates(spread=True), Site("a", "out")
    for tensor in tensors:
        states.add(site, tensor)
    return float(states.snapshot(["a"]).statistics()[site].scalars.get("batch_spread", math.nan))


def exact(tensor: Tensor) -> float:
    """Return the definition: rms(x - mean over the first dimension) / rms(x)."""
    wide = tensor.double()
    return float(((wide - wide.mean(0)).square().sum() / wide.square().sum()).sqrt())


@pytest.fixture(params=["c", "torch"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the C function, or torch alone."""
    if request.param == "c" and not prepare(wait=True):
        pytest.skip("there is no C compiler")
    if request.param == "torch":
        monkeypatch.setattr(fused._Loaded, "spread", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0])
def test_the_definition(dtype: torch.dtype, offset: float) -> None:
    """A small matrix has the spread of the definition, also with a large mean."""
    tensor = (torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) + offset).to(dtype)
    assert spread(tensor) == pytest.approx(exact(tensor), rel=1e-9)
    assert spread(tensor.T) == pytest.approx(exact(tensor.T), rel=1e-9)


def test_equal_rows_have_no_spread() -> None:
    """Equal rows have a spread of exactly zero; a column of mean zero has 1; zeros have none."""
    assert spread(torch.full((9, 5), 0.1)) == 0
    assert spread(torch.tensor([[1.0, -2.0], [-1.0, 2.0]])) == 1
    assert math.isnan(spread(torch.zeros(4, 4)))


@pytest.mark.parametrize(
    "tensor", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(1, 4), torch.ones(4, 0), torch.ones(4, 4).long()]
)
def test_other_tensors_have_none(tensor: Tensor) -> None:
    """Only matrices of floats with several rows have a spread."""
    assert math.isnan(float(reduced(BatchSpread, tensor).compute()["batch_spread"]))


def test_values_that_are_not_finite_do_not_count() -> None:
    """A tensor with a NaN or an infinity leaves the spread of the others as it is."""
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    bad = tensor.clone()
    bad[2, 1] = math.inf
    assert spread(tensor, bad, tensor * math.nan) == spread(tensor)


def test_few_values_of_a_large_matrix_are_read() -> None:
    """At most 64 rows and 256 columns at regular distances are read; each batch has means of its own."""
    tensor = torch.randn(130, 600, generator=torch.Generator().manual_seed(0)) + 1
    assert spread(tensor) == pytest.approx(exact(tensor[::3, ::3]), rel=1e-9)
    shifted = spread(torch.ones(4, 3), torch.ones(4, 3) * 5)
    assert shifted == 0


def test_states_merge_by_addition() -> None:
    """The spread of two batches is that of their merged states."""
    one, other = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    merged = reduced(BatchSpread, one)
    merged.merge(reduced(BatchSpread, other))
    assert merged.compute() == reduced(BatchSpread, one, other).compute()


def test_sites_have_a_spread_if_it_is_wanted() -> None:
    """Matrices have the statistic, other sites lack it; states of older versions can be loaded."""
    states, site = SiteStates(spread=True), Site("a", "out")
    tensor = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the second one takes the fast path
        if not states.try_fast_path(site, tensor):
            states.add(site, tensor)
    states.add(Site("b", "out"), torch.ones(3))
    found = states.snapshot(["a", "b"]).statistics()
    assert found[site].scalars["batch_spread"] == pytest.approx(exact(tensor))
    assert "batch_spread" not in found[Site("b", "out")].scalars
    old = SiteStates()
    old.add(site, tensor)
    saved = old.state_dict()
    saved |= {name: saved[name][:1] for name in ("banks", "left_out")}
    states.load_state_dict(saved, torch.device("cpu"))
    assert states.snapshot(["a"]).statistics()[site].scalars["count"] == 40
