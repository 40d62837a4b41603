"""Tests of the taps for parameters and their gradients."""

from __future__ import annotations

import torch

from lightning_recorder.selection import Selection
from lightning_recorder.taps import ParameterGradientTap, ParameterTap
from tests.taps import references
from tests.taps.models import Precision, each_model, each_precision, make
from tests.taps.references import Seen, assert_seen, copies_into


@each_model
@each_precision
def test_parameters_are_those_of_the_call(name: str, precision: Precision) -> None:
    """Each call records the parameters that the module itself uses, in the order of the call ends."""
    module, x = make(name, precision.dtype)
    seen: Seen = []
    torch.manual_seed(1)
    with ParameterTap(Selection("**").resolve(module), copies_into(seen)):
        precision.forward(module, x).backward()
    expected = references.parameters(name, precision)
    assert [site for site, _ in seen] == [site for site, _ in expected]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(seen, expected, strict=True))


@each_model
@each_precision
def test_gradients_of_parameters_are_those_of_autograd_grad(name: str, precision: Precision) -> None:
    """The gradient of each parameter that contributes to the loss is recorded once, under each module that uses it."""
    module, x = make(name, precision.dtype)
    seen: Seen = []
    torch.manual_seed(1)
    with ParameterGradientTap(Selection("**").resolve(module), copies_into(seen)):
        precision.forward(module, x).backward()
    assert_seen(seen, references.parameter_gradients(name, precision), precision)
