"""Tests of the recording of parameters at optimizer steps in a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder import ArgumentError, OptimizerRecorder, RecorderWarning, RecordingError, Selection
from lightning_recorder.reductions import Reduction, Values
from lightning_recorder.statistics import with_update_ratios
from lightning_recorder.taps import Site

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


class Net(nn.Sequential):
    """Two linear layers with an activation between them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        first, last = nn.Linear(4, 3), nn.Linear(3, 2)
        super().__init__(first, nn.ReLU(), last)
        self.first, self.last = [first], [last]  # in lists, so that each module has one name


def small_net() -> Net:
    return Net()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    F.cross_entropy(net(x), torch.arange(8) % 2).backward()
    optimizer.step()


def moments(tensors: list[Tensor]) -> dict[str, float]:
    """Return the count, mean and root mean square of tensors, computed in float64 in one shot."""
    values = torch.cat([tensor.double().flatten() for tensor in tensors])
    return {"count": len(values), "mean": float(values.mean()), "rms": float(values.square().mean().sqrt())}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_part_is_that_of_the_step(kind: str) -> None:
    """Values are those before the step, updates the differences, and moments the optimizer states after it."""
    net = small_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    seen: dict[str, list[Tensor]] = {}
    with OptimizerRecorder({"0": net[0]}, [optimizer]) as recorder:
        for seed in range(3):
            weight = net.first[0].weight
            before = weight.detach().clone()
            step(net, optimizer, seed)
            assert weight.grad is not None
            now = {"weight": before, "weight.grad": weight.grad, "weight.update": weight.detach() - before}
            kept = optimizer.state[weight]
            now |= {f"weight.{key}": value for key, value in kept.items() if value.shape == before.shape}
            for path, tensor in now.items():
                seen.setdefault(path, []).append(tensor.clone())
    found = recorder.collect()
    assert {site.path for site in found if "bias" not in site.path} == set(seen)
    for path, tensors in seen.items():
        scalars = found[Site("0", path)].scalars
        expected = moments(tensors)
        assert {name: scalars[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    ratio = moments(seen["weight.update"])["rms"] / moments(seen["weight"])["rms"]
    assert with_update_ratios(found)[Site("0", "weight")].scalars["update_ratio"] == pytest.approx(ratio, rel=1e-12)


def test_a_complex_parameter_has_moments() -> None:
    """The optimizer states of a complex parameter are recorded like those of others."""
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    with OptimizerRecorder({"m": layer}, [optimizer]) as recorder:
        layer(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    found = recorder.collect()
    for name in ("exp_avg", "exp_avg_sq"):
        expected = moments([torch.view_as_real(optimizer.state[layer.weight][name])])
        scalars = found[Site("m", f"weight.{name}")].scalars
        assert {each: scalars[each] for each in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Adam", {"exp_avg", "exp_avg_sq"}),
        ("NAdam", {"exp_avg", "exp_avg_sq"}),
        ("ASGD", {"ax"}),
        ("Rprop", {"prev", "step_size"}),
    ],
)
def test_a_counter_is_no_moment_of_a_number(kind: str, names: set[str]) -> None:
    """A parameter without dimensions has the optimizer states of other parameters, not the number of steps."""
    module = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0)), "shift": nn.Parameter(torch.ones(3))})
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1)
    with OptimizerRecorder({"m": module}, [optimizer], parts=["moments"]) as recorder:
        (module["scale"] * module["shift"]).sum().backward()
        optimizer.step()
    assert {site.path for site in recorder.collect()} == {f"{each}.{name}" for each in module for name in names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_has_more_digits_than_its_parameter(dtype: torch.dtype) -> None:
    """The update of a parameter in half precision is the exact difference of the values."""
    weight = nn.Parameter(torch.tensor([1.0, 256.0], dtype=dtype))
    module = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD([weight], lr=1.0)
    after = torch.tensor([1.0 - 2.0**-7, 2.0**-4], dtype=dtype)
    with OptimizerRecorder({"m": module}, [optimizer], parts=["updates"]) as recorder:
        recorder.before_step(optimizer)
        weight.data.copy_(after)
        recorder.after_step(optimizer)
    scalars = recorder.collect()[Site("m", "weight.update")].scalars
    assert (scalars["min"], scalars["max"]) == (2.0**-4 - 256, -(2.0**-7))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_bitwise_the_same(kind: str) -> None:
    """Parameters and optimizer states equal those of a run without the recorder, which leaves no hook."""
    runs = []
    for recorded in (False, True):
        net = small_net()
        optimizer = OPTIMIZERS[kind](net.parameters())
        recorder = OptimizerRecorder(dict(net.named_modules()), [optimizer])
        for seed in range(4):
            if recorded and seed % 2:
                with recorder:
                    step(net, optimizer, seed)
            else:
                step(net, optimizer, seed)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        runs.append((net.state_dict(), optimizer.state_dict()))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


def test_a_step_with_a_closure_is_one_step() -> None:
    """A step of LBFGS records the gradients at its start and the total update."""
    net = nn.Linear(4, 2)
    before = net.weight.detach().clone()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    x = torch.eye(4)
    gradients = []
    recorder = OptimizerRecorder({"": net})
    recorder.attach()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().sum()
        loss.backward()
        assert net.weight.grad is not None
        gradients.append(net.weight.grad.clone())
        recorder.before_step(optimizer)
        return loss

    optimizer.step(closure)
    recorder.remove()
    assert len(gradients) > 1
    found = recorder.collect()
    assert found[Site("", "weight.grad")].scalars["mean"] == pytest.approx(moments(gradients[:1])["mean"], rel=1e-6)
    change = moments([net.weight.detach() - before])
    assert found[Site("", "weight.update")].scalars["rms"] == pytest.approx(change["rms"], rel=1e-12)


def test_each_optimizer_has_its_parameters() -> None:
    """A step records only the parameters of its optimizer."""
    net = small_net()
    first, second = (torch.optim.SGD(net[place].parameters(), lr=0.1) for place in (0, 2))
    with OptimizerRecorder(Selection(types="Linear").resolve(net), [first], parts="values") as recorder:
        step(net, first, 0)
        second.step()
    assert {site.name for site in recorder.collect()} == {"0"}


def test_tied_and_frozen_parameters() -> None:
    """A shared parameter is recorded for its first module; a frozen one or one without gradient is not."""
    net = small_net()
    net.first[0].weight.requires_grad_(False)
    tied = nn.Linear(3, 2)
    tied.bias = net.last[0].bias
    unused = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*net.parameters(), tied.weight, *unused.parameters()], lr=0.1)
    modules = {"first": net[0], "second": net[2], "tied": tied, "unused": unused}
    with OptimizerRecorder(modules, [optimizer], parts=["gradients"]) as recorder:
        step(net, optimizer, 0)
    sites = [(site.name, site.path) for site in recorder.collect()]
    assert sites == [("first", "bias.grad"), ("second", "weight.grad"), ("second", "bias.grad")]


def test_a_step_skipped_by_a_scaler_has_no_update() -> None:
    """If a GradScaler skips the last step, an update of zero is recorded when the recorder is removed."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder = OptimizerRecorder({"": net}, parts=["updates"])
    recorder.attach()
    scaler.scale(net(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.unscale_(optimizer)
    recorder.before_step(optimizer)
    scaler.step(optimizer)
    recorder.remove()
    assert recorder.collect()[Site("", "weight.update")].scalars["zero_fraction"] == 1.0
    assert not optimizer._optimizer_step_post_hooks


class Refusing(Reduction):
    width = 1
    statistics = ("nothing",)

    def update_state(self, state: Tensor, values: Values) -> None:
        raise ValueError("refused")

    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"nothing": state[..., 0]}


def test_a_fault_costs_its_statistic_and_strict_raises() -> None:
    """A failed recording causes one warning, and the step continues; strict raises an error with the module name."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        OptimizerRecorder({"0": net[0]}, [optimizer], extra=[Refusing()]) as recorder,
        pytest.warns(
            RecorderWarning, match=r"Refusing\(\) does not support 'weight' of module '0': ValueError: refused"
        ),
    ):
        step(net, optimizer, 0)
    assert recorder.collect()[Site("0", "weight")].scalars["count"] == 12
    strict = OptimizerRecorder({"0": net[0]}, [optimizer], extra=[Refusing()], strict=True)
    with strict, pytest.raises(RecordingError, match="recording 'weight' of module '0' failed"):
        step(net, optimizer, 0)


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (
            {"parts": ["weights"]},
            (
                "parts must be one or more of 'values', 'gradients', 'updates', 'moments', 'buffers', "
                "'batch_gradients'; got 'weights'"
            ),
        ),
        ({"parts": []}, "got none"),
        ({"optimizers": ["adam"]}, "optimizers takes torch.optim.Optimizer instances, got 'adam'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], warned: str) -> None:
    """An invalid argument raises at once, and the message names the valid ones."""
    with pytest.raises(ArgumentError, match=warned):
        OptimizerRecorder({}, **arguments)


def test_an_optimizer_can_be_copied_in_a_step() -> None:
    """An optimizer that is copied while its step hook is registered works on its own."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    copies = []

    def copy_it(*passed: Any) -> None:
        copies.append(copy.deepcopy(optimizer))

    with OptimizerRecorder({"0": net[0]}, [optimizer]):
        optimizer.register_step_pre_hook(copy_it)
        step(net, optimizer, 0)
    copies[0].step()


def test_settings_are_those_of_the_step() -> None:
    """The settings of a step are known after a scheduler has changed them, for each group and each parameter."""
    net = small_net()
    groups: list[dict[str, Any]] = [
        {"params": net.first[0].parameters(), "lr": 0.5},
        {"params": net.last[0].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.8, 0.9), weight_decay=0.125)
    with OptimizerRecorder({"0": net[0], "2": net[2]}, [optimizer]) as recorder:
        step(net, optimizer, 0)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    settings = recorder.settings()
    assert settings[Site("0", "weight")] == {"learning_rate": 0.5, "weight_decay": 0.125}
    assert settings[Site("2", "bias")] == {"learning_rate": 0.25, "weight_decay": 0.125}
    first, last = recorder.about()["groups"]
    assert (first["optimizer"], first["parameters"], first["lr"], first["betas"]) == ("AdamW", 2, 0.5, [0.8, 0.9])
    assert (last["lr"], last["eps"], "amsgrad" in last) == (0.25, 1e-8, False)


def test_running_statistics_are_those_before_the_step() -> None:
    """The running statistics of a BatchNorm are recorded with its parameters."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with OptimizerRecorder({"1": net[1], "2": net[2]}, [optimizer], parts=["buffers"]) as recorder:
        step(net, optimizer, 0)
    found = recorder.collect()
    assert set(found) == {Site("1", "running_mean"), Site("1", "running_var")}
    for path in ("running_mean", "running_var"):
        expected = moments([getattr(net[1], path)])
        scalars = found[Site("1", path)].scalars
        assert {name: scalars[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_the_eval_mode_of_modules_is_known() -> None:
    """Only the sites of modules in eval mode have the setting."""
    from lightning_recorder import StatisticsRecorder

    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    net[1].eval()
    with StatisticsRecorder({"0": net[0], "1": net[1]}) as recorder:
        net(torch.ones(2, 4))
    assert recorder.settings() == {Site("1", "out"): {"eval_mode": 1.0}}


class Bare(torch.optim.Optimizer):
    """An optimizer around another one that does not call ``Optimizer.__init__``, as Lookahead of torch_optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_without_a_table_of_hooks() -> None:
    """Its updates are recorded until the recorder is paused."""
    net = nn.Linear(2, 1)
    optimizer = Bare(torch.optim.SGD(net.parameters(), 0.5))
    recorder = OptimizerRecorder({"": net})
    for _ in range(2):
        recorder.attach()
        net(torch.ones(1, 2)).sum().backward()
        recorder.before_step(optimizer)
        optimizer.step()
        recorder.pause()
        optimizer.inner.zero_grad()
        assert recorder.collect()[Site("", "weight.update")].scalars["rms"] == 0.5
