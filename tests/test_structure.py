"""Which tensors a nested value holds and how they are called."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from lightning_recorder.structure import iter_tensors

ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)


class Pair(NamedTuple):
    """A named tuple as a module may return it."""

    first: Any
    second: Any


@dataclass
class Output:
    """A dataclass as a module may return it."""

    logits: Any
    extra: Any = None
    later: Any = field(init=False)


@dataclass
class Defaulted:
    """A dataclass whose class holds a tensor."""

    kept: Tensor = ONE


class Colour(Enum):
    """Something that can be a key."""

    RED = 1


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (ONE, ["out"]),
        (nn.Parameter(ONE), ["out"]),
        ((ONE, TWO), ["out[0]", "out[1]"]),
        ([ONE, None, 3, "x", TWO], ["out[0]", "out[4]"]),
        (Pair(ONE, TWO), ["out.first", "out.second"]),
        ({"a": ONE, "b": TWO}, ["out.a", "out.b"]),
        (collections.OrderedDict(a=ONE), ["out.a"]),
        (MappingProxyType({"a": ONE}), ["out.a"]),
        ({0: ONE, "0": TWO}, ["out[0]", "out['0']"]),
        ({"no name": ONE, (1, 2): TWO, Colour.RED: THREE}, ["out['no name']", "out['(1, 2)']", "out['Colour.RED']"]),
        (Output(ONE, [TWO]), ["out.logits", "out.extra[0]"]),
        (BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO, THREE)), None),
        (pack_sequence([TWO, ONE]), ["out.data"]),
        ((ONE, (TWO, {"h": [THREE]})), ["out[0]", "out[1][0]", "out[1][1].h[0]"]),
        (torch.ones(2, 2).max(dim=0), ["out[0]", "out[1]"]),
        (torch.Size([1, 2]), []),
    ],
)
def test_each_tensor_has_the_path_by_which_python_reaches_it(value: object, paths: list[str] | None) -> None:
    """A tensor's path spells the attributes, keys and indices that lead to it from the output."""
    if paths is None:
        paths = ["out.last_hidden_state", "out.hidden_states[0]", "out.hidden_states[1]"]
    assert [path for path, _ in iter_tensors(value)] == paths


def test_the_tensors_themselves_are_handed_over() -> None:
    """What is yielded are the very tensors, in the order of the structure and each as often as it occurs."""
    found = [tensor for _, tensor in iter_tensors({"b": ONE, "a": (TWO, ONE)})]
    assert [id(tensor) for tensor in found] == [id(ONE), id(TWO), id(ONE)]


def test_a_path_can_start_elsewhere() -> None:
    """The paths of the parts grow from the path that is given for the whole."""
    assert [path for path, _ in iter_tensors([ONE, {"x": TWO}], "in")] == ["in[0]", "in[1].x"]


@pytest.mark.parametrize(
    "value", [None, 1, 2.5, "text", b"bytes", {"a"}, object(), Output, Defaulted, nn.ReLU(), range(3)]
)
def test_what_holds_no_tensors_yields_none(value: object) -> None:
    """None, numbers, strings, sets, classes, modules and objects of unknown types are passed over."""
    assert list(iter_tensors(value)) == []


def test_the_outputs_of_transformers_are_looked_into() -> None:
    """A ModelOutput yields the fields that are set, under their own names, and those that are None have no path."""
    output = CausalLMOutputWithPast(loss=ONE, logits=TWO, hidden_states=(THREE, ONE))
    assert [path for path, _ in iter_tensors(output)] == [
        "out.loss",
        "out.logits",
        "out.hidden_states[0]",
        "out.hidden_states[1]",
    ]


def test_a_packed_sequence_is_its_data() -> None:
    """Of a packed sequence the data are handed over, and the batch sizes and permutations are not."""
    packed = pack_sequence([ONE, THREE, TWO], enforce_sorted=False)
    ((path, tensor),) = iter_tensors((packed, None))
    assert (path, tensor.tolist()) == ("out[0].data", [1.0] * 6)


def test_a_part_that_is_absent_moves_no_other_path() -> None:
    """A path depends on the structure alone: a field that is None on one step leaves the others' paths as they are."""
    paths = [[path for path, _ in iter_tensors((first, Output(TWO, first)))] for first in (ONE, None)]
    assert paths == [["out[0]", "out[1].logits", "out[1].extra"], ["out[1].logits"]]


def test_a_dataclass_field_that_was_never_set_is_passed_over() -> None:
    """A field without a value, as one with init=False before it is assigned, is no error."""
    assert [path for path, _ in iter_tensors(Output(ONE))] == ["out.logits"]


trees = st.recursive(
    st.sampled_from([ONE, None, 3]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text("ab. 0", max_size=2), st.integers(0, 2)), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=12,
)


def count_tensors(value: Any) -> int:
    """The tensors in a value made of the containers above, counted the plain way."""
    if isinstance(value, Tensor):
        return 1
    if isinstance(value, dict):
        return sum(map(count_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(count_tensors, value))
    return count_tensors(value.logits) + count_tensors(value.extra) if isinstance(value, Output) else 0


@settings(max_examples=200)
@given(trees)
def test_every_tensor_is_found_under_a_path_of_its_own(value: object) -> None:
    """In any nesting each occurrence of a tensor is found once, and no two have the same path."""
    paths = [path for path, _ in iter_tensors(value)]
    assert len(paths) == count_tensors(value)
    assert len(set(paths)) == len(paths)


class Counted(list[Any]):
    """A list that ends the test when it is looked into too often, where a test without it would not end."""

    looked = 0

    def __iter__(self) -> Iterator[Any]:
        self.looked += 1
        assert self.looked < 10_000, "the walk through a cyclic value does not end in any sensible time"
        return super().__iter__()

    def __repr__(self) -> str:
        return "Counted"  # to write out one that contains others which contain it would not end either


def test_a_value_that_contains_itself_ends() -> None:
    """A list that contains itself ends, and the tensor in it is found where it is."""
    value = Counted([ONE])
    value.append(value)
    assert next(iter_tensors(value))[0] == "out[0]"
    assert all(tensor is ONE for _, tensor in iter_tensors(value))


def test_a_value_that_contains_itself_twice_ends() -> None:
    """A cycle that can be followed in two ways, as between parent and children, ends as soon as a plain one."""
    parent, child = Counted(), Counted()
    parent += [child, child, ONE]
    child += [parent, parent]
    assert next(path for path, _ in iter_tensors(parent) if path.count("[") == 1) == "out[2]"


def test_a_part_that_occurs_twice_is_found_twice() -> None:
    """A container that occurs twice without containing itself is looked into at both places."""
    part = [ONE]
    assert [path for path, _ in iter_tensors((part, part))] == ["out[0][0]", "out[1][0]"]


def test_parts_that_all_know_each_other_end() -> None:
    """Containers of which each holds all others, with more ways through them than there is time, end as well."""
    parts = [Counted([ONE]) for _ in range(12)]
    for part in parts:
        part += parts
    assert next(iter_tensors(parts[0]))[0] == "out[0]"
    assert all(tensor is ONE for _, tensor in iter_tensors(parts[0]))


def test_a_very_deep_value_ends() -> None:
    """A linked list of a hundred thousand cells ends without a RecursionError, and what lies near its top is found."""
    value: Any = None
    for _ in range(100_000):
        value = (ONE, value)
    paths = [path for path, _ in iter_tensors(value)]
    assert paths[:3] == ["out[0]", "out[1][0]", "out[1][1][0]"]
    assert len(paths) < 100
    while value is not None:  # unwound by hand: Python itself would free so deep a tuple recursively
        value = value[1]
