"""The options of outputs are validated when they are made."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from lightning_recorder import ArgumentError, Outputs, Schedule
from lightning_recorder.statistics import SiteStatistics


def is_large(seen: SiteStatistics) -> bool:
    return seen.abs_max > 1e4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dumps": "steps"}, "dumps must be one or more of 'checkpoints', 'records', 'epochs'; got 'steps'"),
        ({"dumps": "checkpoint"}, r"dumps must be one or more of .*: did you mean 'checkpoints'\?$"),
        ({"dumps": []}, "dumps must be one or more of .*got none"),
        ({"dumps": 1}, "dumps must be one or more of .*; True stands for 'checkpoints', False for none"),
        ({"dumps": None}, "dumps must be one or more of"),
        ({"dump_when": 3}, r"dump_when takes a function \(seen\) of the statistics of a site, got 3"),
        ({"dump_when": lambda: True}, r"dump_when takes a function .*takes \(\)"),
        ({"dump_when": "no.such.thing"}, "dump_when='no.such.thing' cannot be imported"),
        ({"max_total_bytes": -1}, "max_total_bytes must be an integer of at least 0"),
        ({"max_total_bytes": 1e9}, "max_total_bytes must be an integer"),
        ({"max_upload_bytes": -1}, "max_upload_bytes must be an integer of at least 0"),
        ({"max_upload_bytes": None}, "max_upload_bytes must be an integer of at least 0"),
        ({"max_bytes": 0}, "max_bytes must be an integer of at least 1"),
        ({"max_bytes": True}, "max_bytes must be an integer"),
        ({"curves": "some"}, "curves must be 'main' or 'all', got 'some'"),
        ({"max_tags": 0}, "max_tags must be an integer of at least 1"),
        ({"max_images": -1}, "max_images must be an integer of at least 0"),
        ({"plot_every_n_records": 0}, "plot_every_n_records must be an integer of at least 1"),
        ({"ignored_rules": ["dead-outputs"]}, r"ignored_rules must be .*did you mean 'dead-output'\?"),
        ({"upload": "yes"}, "upload must be True or False"),
        ({"records": "no"}, "records must be True or False"),
        ({"plots": 1}, "plots must be True or False"),
    ],
    ids=lambda each: "" if isinstance(each, str) else next(iter(each)),
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    """The error names the class, the option and the allowed values."""
    with pytest.raises(ArgumentError, match=f"^Outputs: {message}"):
        Outputs(**options)


def test_an_unknown_option_is_refused() -> None:
    """The error is a TypeError that suggests the closest option."""
    with pytest.raises(TypeError, match=r"^Outputs has no argument dump: did you mean dumps\?$"):
        Outputs(dump=True)  # type: ignore[call-arg]  # the point of the test


@pytest.mark.parametrize(
    "options", [Outputs(dump_when=is_large, dumps=["epochs"]), Schedule(when=bool)], ids=["outputs", "schedule"]
)
def test_options_are_values(options: Any) -> None:
    """Copies and pickles are equal to the original, and options cannot be changed."""
    for each in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert each == options
        assert hash(each) == hash(options)
    with pytest.raises(AttributeError, match="cannot assign"):
        options.upload = True


def test_the_repr_shows_only_changed_fields() -> None:
    """The repr of the options contains the fields that differ from their defaults, so signatures stay short."""
    assert repr(Outputs()) == "Outputs()"
    assert repr(Outputs(plots=False, max_tags=7)) == "Outputs(plots=False, max_tags=7)"
    assert repr(Schedule(first_n_steps=3)) == "Schedule(first_n_steps=3)"
