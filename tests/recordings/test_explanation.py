"""Tests of the sentence that says why two runs differ, on real trainings with one planted difference each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recorder import open_recording
from lightning_recorder.recordings import Comparison, RecordWriter, Tolerance, compare, records_path
from lightning_recorder.recordings.explanation import explain
from tests.recordings.runs import record_run, site_of, write_simple
from tests.recordings.twins import Twin, train

Trained = Callable[..., Path]

REFERENCE = Twin()
BATCH_NORM = partial(nn.BatchNorm1d, 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that trains with given changes of the reference, once for each set of changes."""
    folder, known = tmp_path_factory.mktemp("twins"), dict[tuple[Any, ...], Path]()

    def path_of(**changes: Any) -> Path:
        key = tuple(changes.items())
        if key not in known:
            known[key] = train(folder / f"version_{len(known)}", REFERENCE.but(**changes))
        return known[key]

    return path_of


def compared(one: Path, other: Path, **options: Any) -> Comparison:
    return compare(open_recording(one).run, open_recording(other).run, **options)


def halve_the_head(net: nn.Module) -> None:
    with torch.no_grad():
        net.get_parameter("head.weight").mul_(0.5)


def change_one_weight(net: nn.Module) -> None:
    with torch.no_grad():
        net.get_parameter("blocks.1.up.weight")[3, 4] += 0.05


def initialize_otherwise(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)


def shift_a_norm(net: nn.Module) -> None:
    nn.init.constant_(net.get_parameter("blocks.0.act.bias"), -20.0)


def forget_the_statistics(net: nn.Module) -> None:
    net.get_buffer("blocks.0.act.running_var").zero_()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lr": 2e-3}, "lr 0.001 → 0.002: all 31 update ratios are 2.000 ×"),
        ({"weight_decay": 0.1}, "weight_decay 0.01 → 0.1: stem weight is the first update that differs"),
        (
            {"betas": (0.9, 0.99)},
            "betas (0.9, 0.999) → (0.9, 0.99): stem weight.exp_avg_sq is the first update that differs",
        ),
        (
            {"no_decay": True},
            (
                "weight_decay 0.01 → 0 and 0.01, parameter groups 1 → 2, parameters 38 → 14 and 24: "
                "blocks.0.norm2 weight is the first update that differs"
            ),
        ),
        ({"optimizer": "SGD"}, "optimizer AdamW → SGD: stem weight is the first update that differs"),
        ({"optimizer": "Adam"}, "optimizer AdamW → Adam: blocks.0.norm2 weight is the first update that differs"),
        ({"clip": 0.1}, "gradient_clip_val none → 0.1: all 36 moments exp_avg are 0.052 ×"),
        ({"loss_factor": 2.0}, "`mul`: other 1.0 → 2.0: all 23 gradients are 2.000 ×"),
        ({"seed": 1}, "seed 0 → 1: 28 of 38 parameters start from other values"),
        (
            {"initialize": halve_the_head},
            (
                "another initialization of head weight, rms 0.145 → 0.0725 (0.500 ×): "
                "1 of 38 parameters start from other values"
            ),
        ),
        ({"initialize": change_one_weight}, "blocks.1.up weight starts from other values, of the same size"),
        (
            {"initialize": initialize_otherwise},
            (
                "another initialization of stem weight and 13 more, rms 0.103 → 0.204 (1.975 ×): "
                "14 of 38 parameters start from other values"
            ),
        ),
        (
            {"activation": nn.ReLU},
            "`blocks.0.act` and 1 more: GELU → ReLU: blocks.0.act is the first output that differs",
        ),
        ({"dropout": 0.2}, "`blocks.0.drop` and 1 more: p 0.1 → 0.2: blocks.0.drop is the first output that differs"),
        (
            {"eps": 1e-3},
            "`blocks.0.norm1` and 4 more: eps 1e-05 → 0.001: blocks.0.norm1 is the first output that differs",
        ),
        ({"depth": 1}, "`blocks.1` only in A: 2 of 22 parameters start from other values"),
        (
            {"skips": False},
            "`blocks.0/add#2` and 1 more only in A: blocks.1.norm1 is the first output that differs",
        ),
        (
            {"precision": "bf16-mixed"},
            "precision 32-true → bf16-mixed: the dtype of stem is float32 in A and bfloat16 in B",
        ),
        ({"batch_size": 4}, "batch size 8 → 4: the batch differs"),
        ({"accumulate": 2}, "accumulate_grad_batches 1 → 2: the batch differs"),
        ({"shuffle": True}, "sampler SequentialSampler → RandomSampler: the batch differs"),
        ({"order": (1, 0)}, "the samples of the batch are in another order: blocks.0.drop"),
        (
            {"order": (*range(8, 16), *range(8))},
            "the batches come in another order, B has in step 0 the batch of step 1 of A: stem",
        ),
        ({"scale": 2.0}, "the batch differs: stem"),
        ({"noise_from": 24}, "same until step 2, then the batch differs: stem"),
        (
            {"dropout_seed": 6},
            "torch seed 5 → 6: blocks.0.drop is the first output that differs",
        ),
        (
            {"frozen": "head"},
            "same until step 0, then `head`: trained → not trained: head is the first output that differs",
        ),
    ],
    # Only the sentence: the text of a function has its address, which differs between processes.
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_cause_is_named(changes: dict[str, Any], sentence: str, trained: Trained) -> None:
    """A training that differs from another in one thing is told apart by that thing."""
    found = compared(trained(), trained(**changes))
    assert (explain(found), found.same) == (sentence, False)


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        (
            {"initialize": shift_a_norm},
            {},
            "another initialization of blocks.0.act bias, rms 0 → 20: 1 of 42 parameters start from other values",
        ),
        ({"scale": 2.0}, {"recorder": "parameters"}, "the batch differs: blocks.0.act running_mean"),
        (
            {"initialize": forget_the_statistics},
            {},
            "blocks.0.act running_var differs: its initial value, the input of its layer, or the momentum",
        ),
    ],
)
def test_running_statistics_are_no_parameters(
    changes: dict[str, Any], options: dict[str, Any], sentence: str, trained: Trained
) -> None:
    """The first forward pass changes the running statistics of all layers behind a difference, and those of its own."""
    found = compared(trained(activation=BATCH_NORM), trained(activation=BATCH_NORM, **changes), **options)
    assert explain(found) == sentence


def test_a_schedule_changes_the_learning_rate_later(trained: Trained) -> None:
    """A learning rate that is halved from step 2 on is named with its factor and its step."""
    text = explain(compared(trained(), trained(schedule=True)))
    assert text.startswith("same until step 1, then ")
    assert text.endswith(": all 36 update ratios are 0.500 ×")


@pytest.mark.parametrize(
    ("recorder", "effect"),
    [
        ("activations", "stem is the first output that differs"),
        ("gradients", "the gradient of head is the first that differs"),
    ],
)
def test_a_setting_of_the_optimizer_explains_what_follows_the_first_update(
    recorder: str, effect: str, trained: Trained
) -> None:
    """Without records of the parameters, the learning rate is the cause of what differs from step 1 on."""
    found = compared(trained(), trained(lr=2e-3), recorder=recorder)
    assert explain(found) == f"same until step 0, then lr 0.001 → 0.002: {effect}"


def test_two_trainings_with_the_same_settings_are_equal(trained: Trained) -> None:
    """Without any difference, the runs are bitwise equal."""
    found = compared(trained(), trained(seed=0))
    assert (explain(found), found.same) == ("bitwise equal in all 5 steps", True)


def test_a_wider_dtype_is_the_same_within_the_tolerance(trained: Trained) -> None:
    """In double precision the values are those of single precision, and the dtypes are differences."""
    found = compared(trained(), trained(precision="64-true"))
    assert explain(found).startswith("the same in all 5 steps that both have, but not bitwise from step 0, stem (")
    assert explain(found).endswith("; precision 32-true → 64-true")
    assert {each.kind for each in found.differences} == {"dtype"}


def test_modules_with_other_names_are_found_by_structure(trained: Trained) -> None:
    """A model with renamed modules is compared by rules found from the graphs, and the new names are a difference."""
    one, other = trained(), trained(blocks="layers", stem="embed")
    found = compared(one, other)
    rules = "blocks.*=layers.*, stem=embed"
    assert (
        explain(found) == f"modules are renamed, {rules}; apart from that bitwise equal in all 5 steps that both have"
    )
    assert not found.same
    assert compared(one, other, names=rules.split(", ")).same
    faster = compared(one, trained(blocks="layers", stem="embed", lr=2e-3))
    assert explain(faster) == f"modules are renamed, {rules}; lr 0.001 → 0.002: all 31 update ratios are 2.000 ×"


def test_without_recorded_settings_a_learning_rate_is_recognized_by_its_factor(trained: Trained) -> None:
    """If the files have no settings, the factor of all updates is still named."""
    found = compared(trained(), trained(lr=2e-3))
    bare = Comparison(**{**vars(found), "changes": []})
    assert explain(bare) == "a learning rate 2 times as high: all 31 update ratios are 2.000 ×"


def test_rounding_noise_is_left_out(trained: Trained) -> None:
    """The bias of the keys, whose gradient is zero but for rounding, ranks nowhere unless bits are compared."""
    other = trained(order=(1, 0))
    found = compared(trained(), other)
    assert {site.path.partition(".")[0] for site in found.rounding} == {"bias"}
    assert {site.name for site in found.rounding} == {"blocks.0.attention.k", "blocks.1.attention.k"}
    assert not set(found.rounding) & {each.first.site for each in found.sites}
    exact = compared(trained(), other, tolerance=Tolerance(exact=True))
    assert ("blocks.0.attention.k", "bias.update") in {each.first.site for each in exact.sites}


def test_a_module_that_is_called_twice_is_not_blamed_for_its_second_call(trained: Trained) -> None:
    """If the blocks share an activation, a difference in the second block is found before the shared module."""
    one = trained(shared_act=True)
    text = explain(compared(one, trained(shared_act=True, initialize=change_one_weight)))
    assert text == "blocks.1.up weight starts from other values, of the same size"
    found = compared(
        one, trained(shared_act=True, initialize=change_one_weight), tolerance=Tolerance(), recorder="activations"
    )
    assert found.first is not None
    assert found.first.site.name == "blocks.1.up"
    changed = compared(one, trained(shared_act=True, activation=nn.ReLU), recorder="activations")
    assert changed.first is not None
    assert (str(changed.changes[0]), changed.first.site.name) == ("`blocks.0.act`: GELU → ReLU", "blocks.0.act")


def test_repeated_runs_give_the_noise(trained: Trained) -> None:
    """Another seed is within the spread of other seeds, and ten times the learning rate is not."""
    runs = [open_recording(trained(seed=seed)).run for seed in range(1, 5)]
    one = open_recording(trained()).run
    assert compare(one, runs[0]).first is not None
    assert compare(one, runs[0], noise=runs[1:]).first is None
    faster = compare(one, open_recording(trained(seed=5, lr=1e-2)).run, noise=runs)
    assert faster.first is not None
    assert "lr 0.001 → 0.01" in explain(faster)


def test_runs_with_nothing_in_common_are_not_the_same(tmp_path: Path) -> None:
    """Without a common site or step there is nothing to compare."""
    write_simple(tmp_path / "a", {0: 1.0}, site="one")
    write_simple(tmp_path / "b", {0: 1.0}, site="other")
    write_simple(tmp_path / "c", {1: 1.0}, site="one")
    write_simple(tmp_path / "d", {0: 1.0}, "gradients", site="one")
    for other, reason in (("b", "no site has the same name"), ("c", "no common step"), ("d", "no recorder and stage")):
        found = compared(tmp_path / "a", tmp_path / other)
        assert (found.same, found.compared) == (False, 0)
        assert explain(found).startswith("nothing to compare: ")
        assert reason in explain(found)


def write_settings(log_dir: Path, groups: dict[int, list[dict[str, Any]]], *, in_eval: bool = False) -> None:
    """Write records of an update with the settings of the parameter groups of each step, and of a module's mode."""
    for label, site in (("activations", "drop"), ("parameters", "fc")):
        writer = RecordWriter(records_path(log_dir / "recorder", label))
        writer.begin(label=label, group=label)
        for step, each in groups.items():
            update = each[0]["lr"] * (1.0 + 0.5 * (len(each) - 1))
            scalars = {"rms": 1.0} if label == "activations" else {"rms": 1.0, "update_ratio": update}
            mode = {"eval_mode": 1.0} if in_eval and label == "activations" else {}
            about = {"groups": each} if label == "parameters" else {}
            paths = ["out"] if label == "activations" else ["weight"]
            sites = [site_of(site, path, {**scalars, **mode}) for path in paths]
            update_site = [site_of(site, "weight.update", {"rms": update})] if label == "parameters" else []
            writer.write({"step": step, **about}, [*sites, *update_site])


def test_settings_of_the_records_name_the_step_at_which_they_differ(tmp_path: Path) -> None:
    """If records have the settings of the parameter groups, the first step with another one is named."""
    write_settings(tmp_path / "a", {step: [{"optimizer": "SGD", "lr": 0.1}] for step in range(4)})
    write_settings(tmp_path / "b", {step: [{"optimizer": "SGD", "lr": 0.1 if step < 2 else 0.01}] for step in range(4)})
    text = explain(compared(tmp_path / "a", tmp_path / "b"))
    assert text == "same until step 1, then lr 0.1 → 0.01 from step 2: fc weight is the first update that differs"
    write_settings(tmp_path / "c", {step: [{"optimizer": "Adam", "lr": 0.2}] for step in range(4)})
    assert explain(compared(tmp_path / "a", tmp_path / "c")).startswith("optimizer SGD → Adam: ")


def test_a_module_in_eval_mode_is_named(tmp_path: Path) -> None:
    """A module that only one run has in eval mode is a difference of the models."""
    groups = {0: [{"optimizer": "SGD", "lr": 0.1}]}
    write_settings(tmp_path / "a", groups)
    write_settings(tmp_path / "b", groups, in_eval=True)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert [str(each) for each in found.changes] == ["`drop`: training mode → eval mode"]
    assert found.differences == []


def spoil(net: nn.Module) -> None:
    net.get_submodule("encoder.act").register_forward_hook(lambda module, args, output: output / 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_value_that_is_not_finite_is_the_cause(swapped: bool, tmp_path: Path) -> None:
    """If one of the runs has a NaN, the sentence says where its findings have found the first one."""
    record_run(tmp_path / "healthy", steps=range(6))
    record_run(tmp_path / "spoiled", steps=range(6), change=spoil, at=3)
    names = ("spoiled", "healthy") if swapped else ("healthy", "spoiled")
    found = compared(*(tmp_path / name for name in names))
    verdict = open_recording(tmp_path / "spoiled").findings[0].verdict
    assert verdict.startswith("the output of encoder.act has ")
    assert explain(found) == f"same until step 2, then in {'AB'[not swapped]}, {verdict}"
    assert compared(tmp_path / "healthy", tmp_path / "healthy").bad == (None, None)
