"""Tests of the statistics of tapped tensors over batches, without a trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_recorder.errors import ArgumentError, RecorderWarning, RecordingError
from lightning_recorder.reductions import (
    SCALAR_STATISTICS,
    BatchMean,
    ChannelMoments,
    FeatureRank,
    Norms,
    Reduction,
    Statistics,
    Values,
)
from lightning_recorder.selection import Selection
from lightning_recorder.statistics import SiteStatistics, StatisticsRecorder
from lightning_recorder.taps import OutputGradientTap, Site
from lightning_recorder.tensors import ForwardOutput
from tests.reductions.reference import Moments, assert_bins, extrema_of, tallies_of, values_of
from tests.taps.inspection import hooks_on


class Scale(nn.Module):
    """A module that multiplies by a weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def record(*batches: Tensor) -> Mapping[Site, SiteStatistics]:
    """Return the statistics of a module that returns its input."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    with recorder:
        for batch in batches:
            module(batch)
    return recorder.collect()


def test_values_by_hand() -> None:
    """Over three batches of different sizes, each statistic is that of all values together."""
    batches = [torch.tensor([[1.0, 2.0]]), torch.tensor([0.0, 3.0, math.nan, -math.inf]), torch.tensor(4.0)]
    ((site, found),) = record(*batches).items()
    assert site == Site("m", "out")
    assert dict(found.scalars) == {
        "count": 5.0,
        "mean": 2.0,
        "std": pytest.approx(math.sqrt(2), rel=1e-15),
        "rms": pytest.approx(math.sqrt(6), rel=1e-15),
        "min": 0.0,
        "max": 4.0,
        "zero_fraction": pytest.approx(1 / 7, rel=1e-15),
        "nan_count": 1.0,
        "inf_count": 1.0,
    }
    assert list(found.scalars) == list(SCALAR_STATISTICS)
    assert (found.bins.dtype, found.bins.sum().item()) == (torch.int64, 7)
    # 0 | 1 | 2 | 3 | 4, one bin for each value and one for each gap between them
    assert found.histogram.edges.tolist()[2:] == [1.0, 1.25, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0]
    assert found.histogram.counts.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert (found.histogram.min, found.histogram.max, found.histogram.sum) == (0.0, 4.0, 10.0)


def test_a_training_run_agrees_with_the_reference() -> None:
    """Over several training steps, the statistics equal those of all tensors, kept and reduced in one shot."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LSTM(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    modules = Selection().resolve(net)
    kept: dict[str, dict[Site, list[Tensor]]] = {"outputs": {}, "gradients": {}}

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        name = next(name for name, each in net.named_children() if each is module)
        parts = {"out": output} if isinstance(output, Tensor) else {"out[0]": output[0]}
        if name == "2":
            parts |= {"out[1][0]": output[1][0], "out[1][1]": output[1][1]}
        for path, tensor in parts.items():
            site = Site(name, path)
            kept["outputs"].setdefault(site, []).append(tensor.detach().clone())
            tensor.register_hook(lambda grad, site=site: kept["gradients"].setdefault(site, []).append(grad.clone()))

    for module in net:
        module.register_forward_hook(note)
    recorders = {"outputs": StatisticsRecorder(modules), "gradients": StatisticsRecorder(modules, OutputGradientTap)}
    for _ in range(4):
        with recorders["outputs"], recorders["gradients"]:
            optimizer.zero_grad()
            out, (_, c) = net(torch.randn(5, 3))
            (out.square().sum() + c.sum()).backward()
        optimizer.step()
    for kind, recorder in recorders.items():
        found = recorder.collect()
        assert set(found) == set(kept[kind])
        for site, statistics in found.items():
            values = values_of(kept[kind][site])
            Moments.of(values).assert_near(statistics.scalars)
            np.testing.assert_array_equal([statistics.scalars[name] for name in ("min", "max")], extrema_of(values))
            tallies = [statistics.scalars[name] for name in ("zero_fraction", "nan_count", "inf_count")]
            np.testing.assert_array_equal(tallies, tallies_of(values))
            assert_bins(statistics.bins, values)


def test_calls_of_a_module_merge_into_its_site() -> None:
    """Three calls of a module in a step are merged into one site."""
    module = Scale(2.0)
    recorder = StatisticsRecorder({"m": module})
    with recorder:
        module(module(module(torch.ones(2))))
    assert recorder.collect()[Site("m", "out")].scalars["mean"] == pytest.approx((2 + 4 + 8) / 3, rel=1e-15)


def test_the_order_is_that_of_the_modules() -> None:
    """Sites are returned in module order, regardless of the order of the calls."""
    a, b = nn.Identity(), nn.LSTM(2, 2)
    recorder = StatisticsRecorder({"b": b, "a": a})
    with recorder:
        a(torch.ones(1))
        b(torch.ones(1, 2))
    assert list(recorder.collect()) == [("b", "out[0]"), ("b", "out[1][0]"), ("b", "out[1][1]"), ("a", "out")]


def test_gradients_come_in_the_order_of_the_modules() -> None:
    """Gradients are returned in module order, although the backward pass is reversed."""
    net = nn.Sequential(Scale(2.0), Scale(3.0), Scale(5.0))
    recorder = StatisticsRecorder(dict(net.named_children()), OutputGradientTap)
    with recorder:
        net(torch.ones(4)).sum().backward()
    found = recorder.collect()
    assert [(site.name, statistics.scalars["mean"]) for site, statistics in found.items()] == [
        ("0", 15.0),
        ("1", 5.0),
        ("2", 1.0),
    ]
    assert {statistics.scalars["count"] for statistics in found.values()} == {4.0}


def test_a_factor_divides_a_loss_scale_out() -> None:
    """The factor multiplies the tensors from the moment at which it is set."""
    module = Scale(1.0)
    recorder = StatisticsRecorder({"m": module}, OutputGradientTap)
    with recorder:
        module(torch.ones(2)).sum().backward()
        recorder.factor = 1 / 1024
        (module(torch.ones(2)).sum() * 1024 * 3).backward()
    found = recorder.collect()[Site("m", "out")].scalars
    assert [found[name] for name in ("count", "mean", "min", "max")] == [4.0, 2.0, 1.0, 3.0]


def test_a_site_that_was_not_seen_is_absent() -> None:
    """A module that was not called, or that returned only empty tensors, has no statistics."""
    modules = {"called": nn.Identity(), "uncalled": nn.Identity(), "empty": nn.Identity()}
    recorder = StatisticsRecorder(modules)
    assert recorder.collect() == {}
    with recorder:
        modules["called"](torch.ones(1))
        modules["empty"](torch.ones(0))
    assert list(recorder.collect()) == [("called", "out")]


def test_a_site_with_nothing_but_nan_is_seen() -> None:
    """A site whose values are all NaN is recorded."""
    (found,) = record(torch.full((3,), math.nan)).values()
    assert (found.scalars["count"], found.scalars["nan_count"]) == (0.0, 3.0)
    assert math.isnan(found.scalars["mean"])
    assert found.histogram.count == 0


def test_reset_begins_anew() -> None:
    """After a reset, only new values count, and a site that is not seen again is absent."""
    modules = {"a": nn.Identity(), "b": nn.Identity()}
    recorder = StatisticsRecorder(modules)
    with recorder:
        for module in modules.values():
            module(torch.full((5,), 7.0))
        recorder.reset()
        modules["b"](torch.ones(2))
    ((site, found),) = recorder.collect().items()
    assert (site.name, found.scalars["count"], found.scalars["max"]) == ("b", 2.0, 1.0)


def test_entering_again_continues() -> None:
    """Nothing is recorded between two contexts, and the second one continues the first."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    for value in (1.0, 2.0):
        with recorder:
            module(torch.tensor([value]))
        module(torch.tensor([100.0]))
    assert recorder.collect()[Site("m", "out")].scalars["mean"] == 1.5


def test_collecting_changes_nothing() -> None:
    """Collecting is repeatable and works while the hooks are registered, and its results do not change later."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    results: list[SiteStatistics] = []
    with recorder:
        for _ in range(2):
            module(torch.ones(3))
            results += [recorder.collect()[Site("m", "out")] for _ in range(2)]
    assert [result.scalars["count"] for result in results] == [3.0, 3.0, 6.0, 6.0]
    assert [result.bins.sum().item() for result in results] == [3, 3, 6, 6]
    assert [result.histogram.count for result in results] == [3, 3, 6, 6]


def test_the_size_is_known_in_bytes() -> None:
    """State is allocated in blocks of 64 sites of 2057 slots, regardless of tensor sizes and step count."""
    modules = {str(position): nn.Identity() for position in range(65)}
    recorder = StatisticsRecorder(modules)
    sizes = [recorder.nbytes]
    with recorder:
        for name in ("0", "0", "63"):
            modules[name](torch.ones(10_000))
            sizes.append(recorder.nbytes)
        for module in modules.values():
            module(torch.ones(1))
    block = 64 * Statistics().width * 8
    assert [*sizes, recorder.nbytes] == [0, block, block, block, 2 * block]


def test_attaching_by_hand_is_entering() -> None:
    """Attaching and removing do the same as the context, and the modules are the given ones."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    states = [recorder.attached]
    recorder.attach()
    states.append(recorder.attached)
    module(torch.ones(1))
    recorder.remove()
    assert [*states, recorder.attached] == [False, True, False]
    assert hooks_on(module) == []
    assert recorder.modules == {"m": module}
    assert list(recorder.collect()) == [("m", "out")]


def run_out_of_batches(module: nn.Module) -> None:
    """Call a module once and raise."""
    module(torch.ones(1))
    raise KeyError("third")


def test_an_exception_takes_the_hooks_off() -> None:
    """An exception in the loop passes through, the hooks are removed, and the earlier statistics are kept."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module})
    with pytest.raises(KeyError, match="third"), recorder:
        run_out_of_batches(module)
    assert hooks_on(module) == []
    assert list(recorder.collect()) == [("m", "out")]


def test_a_site_begun_in_inference_mode_continues_in_training() -> None:
    """A site first seen in inference mode can be updated in training, and collected and reset in both modes."""
    module = Scale(1.0)
    recorder = StatisticsRecorder({"m": module})
    with recorder:
        with torch.inference_mode():
            module(torch.ones(2))
            assert recorder.collect()[Site("m", "out")].scalars["count"] == 2.0
        module(torch.ones(3))
        assert recorder.collect()[Site("m", "out")].scalars["count"] == 5.0
        with torch.inference_mode():
            recorder.reset()
        module(torch.ones(1))
    assert recorder.collect()[Site("m", "out")].scalars["count"] == 1.0


def test_a_model_without_data_is_skipped() -> None:
    """A forward pass on the meta device is ignored without a failure."""
    with torch.device("meta"):
        net = nn.Linear(2, 2)
        x = torch.ones(1, 2)
    recorder = StatisticsRecorder({"m": net})
    with recorder:
        net(x)
    assert (dict(recorder.collect()), recorder.nbytes) == ({}, 0)


@pytest.mark.parametrize("is_first", [True, False])
def test_fake_tensors_are_skipped(is_first: bool) -> None:
    """A call for a tool that estimates memory is ignored, also if it is the first one."""
    net, x = nn.Linear(2, 2), torch.ones(3, 2)
    recorder = StatisticsRecorder({"m": net})
    with recorder:
        if not is_first:
            net(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            net(mode.from_tensor(x))
        net(x)
    assert recorder.collect()[Site("m", "out")].scalars["count"] == 6.0 * (2 - is_first)


def test_the_default_device_of_a_call_does_not_matter() -> None:
    """A call of a model on the CPU where tensors are created on the meta device by default is recorded."""
    net, x = nn.Linear(2, 2), torch.ones(3, 2)
    recorder = StatisticsRecorder({"m": net})
    with recorder, torch.device("meta"):
        net(x)
    assert recorder.collect()[Site("m", "out")].scalars["count"] == 6.0


class Careless(Reduction):
    """A reduction that writes to its values and draws random numbers."""

    width = 1
    statistics = ("sum_of_sizes",)

    def update_state(self, state: Tensor, values: Values) -> None:
        torch.rand(3)
        state[0] += values.flat.abs_().sum()

    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"sum_of_sizes": state[..., 0]}


def test_a_reduction_may_write_to_its_values() -> None:
    """Neither the model nor the other statistics see what a reduction of the user does to its values."""
    torch.manual_seed(0)
    expected, x = torch.rand(2), torch.tensor([-1.0, 2.0])
    net = nn.Identity()
    recorder = StatisticsRecorder({"m": net}, extra=[Careless()])
    torch.manual_seed(0)
    with recorder, ForwardOutput(reduction=Careless()).select(net, ""):
        assert net(x).tolist() == [-1.0, 2.0]
    assert torch.equal(torch.rand(2), expected)
    found = recorder.collect()[Site("m", "out")].scalars
    assert (found["min"], found["sum_of_sizes"]) == (-1.0, 3.0)


class Sealed(Tensor):
    """A tensor that raises on any computation."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the default, which is disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError("sealed")


class Strange(nn.Module):
    """A module that returns a tensor that cannot be reduced."""

    def forward(self, x: Tensor) -> Tensor:
        return x.as_subclass(Sealed)


@pytest.mark.parametrize("strict", [False, True])
def test_a_fault_costs_the_site_only(strict: bool) -> None:
    """A tensor that cannot be reduced causes one warning, or raises with strict; the other sites continue."""
    net = nn.Sequential(nn.Identity(), Strange())
    recorder = StatisticsRecorder(dict(net.named_children()), strict=strict)
    context: Any = pytest.raises(RecordingError) if strict else pytest.warns(RecorderWarning)
    with context as warned, recorder:
        net(torch.ones(2))
        net(torch.ones(2))
    assert "could not record module '1'" in str(warned.value if strict else warned[0].message)
    assert list(recorder.collect()) == [("0", "out")]


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "compressed": Tensor.to_sparse_csr,
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "nested, strided": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "eight bits": lambda x: x.to(torch.float8_e4m3fn),
    "mkldnn": Tensor.to_mkldnn,
}


class Made(nn.Module):
    """A module that converts its input to some kind of tensor."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # raised by torch once per process
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")  # likewise
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*deprecated:UserWarning")  # likewise
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_tensors_of_every_kind_are_computed(make: Callable[[Tensor], Tensor]) -> None:
    """Sparse, quantized, nested and low-precision tensors have the statistics of their values, including zeros."""
    module = Made(make)
    x = torch.tensor([[0.0, 2.0], [0.0, -1.0], [0.5, 0.0]])
    recorder = StatisticsRecorder({"m": module}, strict=True)
    with recorder, ForwardOutput(strict=True).select(module, "") as kept:
        module(x)
        module(x)
    scalars = recorder.collect()[Site("m", "out")].scalars
    assert (scalars["count"], scalars["mean"], scalars["min"], scalars["max"]) == (12.0, 0.25, -1.0, 2.0)
    assert scalars["zero_fraction"] == 0.5
    assert len(kept[0]) == 2


def test_further_reductions_and_quantiles() -> None:
    """Extra reductions add scalars under their names, or tensors if there is more than one number."""
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module}, extra=[Norms(), BatchMean()], quantiles=[0.5], sample=2)
    with recorder:
        module(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    found = recorder.collect()[Site("m", "out")]
    further = {name: value for name, value in found.scalars.items() if name not in SCALAR_STATISTICS}
    assert further == {
        "l1_norm": 8.0,
        "l2_norm": pytest.approx(math.sqrt(26), rel=1e-15),
        "abs_max": 4.0,
        "histogram_fraction": 0.5,
        "quantile_0.5": found.histogram.quantile(0.5),
        "batch_spread": pytest.approx(math.sqrt(10 / 26)),
    }
    assert {name: value.tolist() for name, value in found.tensors.items()} == {"batch_mean": [2.0, 2.0]}
    assert found.histogram.fraction == 0.5


def test_an_extra_that_a_tensor_does_not_suit_costs_itself_alone() -> None:
    """An extra reduction that fails for a tensor is skipped at that site, with one warning for all sites."""
    modules = {"a": nn.Identity(), "b": nn.Identity()}
    net = nn.Sequential(*modules.values())
    recorder = StatisticsRecorder(modules, extra=[BatchMean(), Norms()])
    with recorder:
        net(torch.ones(2, 3))
        with pytest.warns(RecorderWarning, match=r"BatchMean\(.*\) does not support 'out' of module 'a'") as warned:
            net(torch.ones(2, 4))
        net(torch.ones(2, 4))
    assert len(warned) == 1
    for site, seen in recorder.collect().items():
        assert seen.scalars["count"] == 22.0, site
        assert seen.scalars["l1_norm"] == 22.0
        assert seen.tensors == {}
    assert recorder.failed == frozenset()
    recorder.reset()
    recorder.revive()
    with recorder:
        modules["a"](torch.ones(2, 3))
    assert recorder.collect()[Site("a", "out")].tensors["batch_mean"].tolist() == [1.0] * 3


def test_an_extra_that_fails_raises_when_strict() -> None:
    """With strict, the error of an extra reduction is raised with the module name."""
    module = nn.Identity()
    with StatisticsRecorder({"m": module}, extra=[BatchMean()], strict=True):
        module(torch.ones(2, 3))
        with pytest.raises(
            RecordingError, match="could not record module 'm' at 'out': ArgumentError: BatchMean has numbers"
        ):
            module(torch.ones(2, 4))


class Own(Reduction):
    """A user-defined reduction with a selectable fault."""

    width = 2
    statistics: tuple[str, ...] = ("own",)

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.additive = fault != "merge"

    def initial(self) -> Tensor:
        return {"float32": torch.zeros(2), "width": torch.zeros(3).double(), "ones": torch.ones(2).double()}.get(
            self.fault, torch.zeros(2).double()
        )

    def update_state(self, state: Tensor, values: Values) -> None:
        state += 1

    def summarize(self, state: Tensor) -> dict[str, Any]:
        if self.fault == "later" and bool(state.any()):
            raise ZeroDivisionError("of theirs")
        own: dict[str, Any] = {
            "first": state[0] / state[1],
            "sum": state.sum(),
            "number": 1.0,
            "array": state[..., 0].numpy(),
        }
        return {"another" if self.fault == "name" else "own": own.get(self.fault, state[..., 0])}


@pytest.mark.parametrize(
    ("fault", "warned"),
    [
        ("first", r"summarize must return a number for each site, .*write state\[..., 0\].*; wrong is \['own'\]"),
        ("sum", r"summarize must return a number for each site, .*wrong is \['own'\]"),
        ("number", r"summarize must accept several states at once"),
        ("name", r"Own.summarize gives \['another'\], its statistics are \['own'\]"),
        ("float32", r"Own.initial must return float64 of shape \(2,\), got torch.float32"),
        ("width", r"Own.initial must return float64 of shape \(2,\), got torch.float64 of shape \(3,\)"),
        ("ones", "is merged by addition, so its initial state must be zero, or it must override merge_states"),
        ("merge", "is merged by addition, so its initial state must be zero, or it must override merge_states"),
    ],
)
def test_a_reduction_that_breaks_the_contract_is_refused(fault: str, warned: str) -> None:
    """A user-defined reduction that breaks the interface is rejected at construction."""
    with pytest.raises(ArgumentError, match=warned):
        StatisticsRecorder({}, extra=[Own(fault)])


def test_a_reduction_that_cannot_be_summarised_costs_itself_alone() -> None:
    """If summarizing an extra reduction fails, the other statistics are returned, and strict raises."""
    module = nn.Identity()
    for strict in (False, True):
        recorder = StatisticsRecorder({"m": module}, extra=[Own("later"), Norms()], strict=strict)
        with recorder:
            module(torch.ones(2))
        if strict:
            with pytest.raises(ZeroDivisionError, match="of theirs"):
                recorder.collect()
        else:
            with pytest.warns(
                RecorderWarning, match=r"Own\(.*\) is left out, because its summarize failed: ZeroDivisionError"
            ):
                found = recorder.collect()[Site("m", "out")].scalars
            assert ("own" in found, found["l1_norm"]) == (False, 2.0)
            recorder.collect()  # a second warning would be an error


@pytest.mark.parametrize("modules", [3, 300])  # the sites of many modules share rows of memory
def test_another_default_device_changes_nothing(modules: int) -> None:
    """The statistics are the same if the program creates its tensors elsewhere, on a device without values."""
    names = [f"m{number}" for number in range(modules)]
    module, batch = nn.Identity(), torch.tensor([1.0, -2.0, 0.5, 3.0])
    extra = [] if modules == 300 else [ChannelMoments(), FeatureRank(), BatchMean(0)]
    found = []
    for device in ("cpu", "meta"):
        recorder = StatisticsRecorder(dict.fromkeys(names, module), extra=extra)
        with torch.device(device):
            for _ in range(2):
                with recorder:
                    module(batch)
            found.append(recorder.collect())
    assert len(found[0]) == modules
    assert {site: repr(each.scalars) for site, each in found[0].items()} == {
        site: repr(each.scalars) for site, each in found[1].items()
    }
