"""Tensors in nested values and their paths."""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from lightning_recorder.errors import ArgumentError
from lightning_recorder.structure import describe_unknown, iter_tensors, register_container

ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)


class Pair(NamedTuple):
    """A named tuple that a module may return."""

    first: Any
    second: Any


@dataclass
class Output:
    """A dataclass that a module may return."""

    logits: Any
    extra: Any = None
    later: Any = field(init=False)


@dataclass
class Defaulted:
    """A dataclass with a tensor as class attribute."""

    kept: Tensor = ONE


class Color(Enum):
    """An enum usable as a key."""

    RED = 1


class Name(str, Enum):
    """A string enum usable as a key."""

    A = "a"


@attrs.define
class Defined:
    """An attrs class with slots that a module may return."""

    kept: Any
    _more: Any


def paths_of(value: Any, warned: list[tuple[str, Any]] | None = None) -> list[str]:
    """Return the paths of the tensors in a value; ignored objects that hold tensors are reported in the list."""
    unknown = None if warned is None else lambda path, each, error: warned.append((path, each))
    return [path for path, _ in iter_tensors(value, unknown=unknown)]


class Plain:
    """An object of an unknown type."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """An object without ``__dict__`` and with one unset slot."""

    __slots__ = ("__hidden", "unset")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden


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
        ({"no name": ONE, (1, 2): TWO, "(1, 2)": THREE}, ["out['no name']", "out[(1, 2)]", "out['(1, 2)']"]),
        ({Color.RED: ONE, Name.A: TWO, None: THREE}, ["out[Color.RED]", "out.a", "out[None]"]),
        ({float("nan"): ONE, float("nan"): TWO, True: THREE}, ["out[nan]", "out[nan]#2", "out[True]"]),
        (collections.deque([ONE, None, TWO]), ["out[0]", "out[2]"]),
        (collections.UserList([ONE, [TWO]]), ["out[0]", "out[1][0]"]),
        (collections.UserDict({"a": ONE}), ["out.a"]),
        (Defined(ONE, [TWO]), ["out.kept", "out._more[0]"]),
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
    assert paths_of(value) == paths


def test_the_tensors_themselves_are_handed_over() -> None:
    """The tensors themselves are yielded, in the order of the structure and as often as they occur."""
    found = [tensor for _, tensor in iter_tensors({"b": ONE, "a": (TWO, ONE)})]
    assert [id(tensor) for tensor in found] == [id(ONE), id(TWO), id(ONE)]


def test_a_path_can_start_elsewhere() -> None:
    """The paths of the parts start with the path given for the whole value."""
    assert [path for path, _ in iter_tensors([ONE, {"x": TWO}], "in")] == ["in[0]", "in[1].x"]


@pytest.mark.parametrize(
    "value", [None, 1, 2.5, "text", b"bytes", {"a"}, object(), Output, Defaulted, nn.ReLU(), range(3)]
)
def test_what_holds_no_tensors_yields_none(value: object) -> None:
    """None, numbers, strings, sets, classes, modules and objects of unknown types are ignored."""
    assert list(iter_tensors(value)) == []


def test_the_outputs_of_transformers_are_looked_into() -> None:
    """A ModelOutput yields the fields that are set, under their own names; fields that are None have no path."""
    output = CausalLMOutputWithPast(loss=ONE, logits=TWO, hidden_states=(THREE, ONE))
    assert [path for path, _ in iter_tensors(output)] == [
        "out.loss",
        "out.logits",
        "out.hidden_states[0]",
        "out.hidden_states[1]",
    ]


def test_a_packed_sequence_is_its_data() -> None:
    """A packed sequence yields its data, but not its batch sizes and permutations."""
    packed = pack_sequence([ONE, THREE, TWO], enforce_sorted=False)
    ((path, tensor),) = iter_tensors((packed, None))
    assert (path, tensor.tolist()) == ("out[0].data", [1.0] * 6)


def test_a_part_that_is_absent_moves_no_other_path() -> None:
    """A path depends only on the structure: a field that is None at one step does not change the other paths."""
    paths = [[path for path, _ in iter_tensors((first, Output(TWO, first)))] for first in (ONE, None)]
    assert paths == [["out[0]", "out[1].logits", "out[1].extra"], ["out[1].logits"]]


def test_a_dataclass_field_that_was_never_set_is_skipped() -> None:
    """A field without a value, such as one with init=False before it is assigned, is not an error."""
    assert [path for path, _ in iter_tensors(Output(ONE))] == ["out.logits"]


def test_an_address_is_no_part_of_a_path() -> None:
    """Keys whose text has an address are numbered in order, so that the paths are the same in every run."""
    keys = [(object(), 1), (object(), 1)]
    assert paths_of(dict.fromkeys(keys, ONE)) == ["out[(<object object>, 1)]", "out[(<object object>, 1)]#2"]


# Caches of transformers.

IDS = torch.tensor([[1, 2, 3]])
LLAMA = hf.LlamaConfig(vocab_size=11, hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)


def cache_paths(*indices: int, before: str = "out") -> list[str]:
    """Return the paths of the keys and values in these layers of a cache."""
    return [f"{before}.layers[{index}].{name}" for index in indices for name in ("keys", "values")]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "sliding"])
def test_the_cache_of_a_language_model_yields_keys_and_values(kind: str) -> None:
    """The output of a model that fills a cache has the keys and values of each layer, like the cache itself."""
    gpt2 = hf.GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    mistral = hf.MistralConfig(
        vocab_size=11,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=3,
    )
    configs = {"gpt2": gpt2, "llama": LLAMA, "sliding": mistral}
    output = hf.AutoModelForCausalLM.from_config(configs[kind])(IDS)  # type: ignore[no-untyped-call]
    found = dict(iter_tensors(output))
    assert list(found) == ["out.logits", *cache_paths(0, 1, before="out.past_key_values")]
    assert found["out.past_key_values.layers[1].values"] is output.past_key_values.layers[1].values
    # A sliding window stores the tokens visible to the next token: one fewer than its width.
    assert found["out.past_key_values.layers[1].keys"].shape == (1, 2, 2 if kind == "sliding" else 3, 2)


def test_the_cache_of_an_encoder_and_decoder_is_two() -> None:
    """An encoder-decoder cache yields its self-attention cache and then its cross-attention cache."""
    config = hf.T5Config(vocab_size=11, d_model=4, d_kv=2, d_ff=8, num_layers=1, num_heads=2)
    output = hf.T5ForConditionalGeneration(config)(input_ids=IDS[:, :2], decoder_input_ids=IDS)
    found = {path: tensor for path, tensor in iter_tensors(output) if "cache" in path}
    both = [cache_paths(0, before=f"out.past_key_values.{name}_attention_cache") for name in ("self", "cross")]
    assert list(found) == both[0] + both[1]
    assert [tensor.shape[2] for tensor in found.values()] == [3, 3, 2, 2]  # the decoder's tokens, then the encoder's


def test_a_layer_of_a_cache_that_was_not_filled_has_nothing() -> None:
    """An unfilled cache yields nothing, and an unfilled layer does not change the paths of other layers."""
    dynamic, static = hf.DynamicCache(config=LLAMA), hf.StaticCache(config=LLAMA, max_cache_len=5)
    empty = [hf.DynamicCache(), dynamic, static, hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())]
    warned: list[tuple[str, Any]] = []
    assert paths_of(empty, warned) + warned == []
    key = torch.ones(1, 2, 3, 2)
    for cache, length in ((dynamic, 3), (static, 5)):
        cache.update(key, key, 1)
        assert paths_of(cache) == cache_paths(1)
        assert [tensor.shape[2] for _, tensor in iter_tensors(cache)] == [length, length]


def test_the_states_of_linear_attention_are_found() -> None:
    """A linear attention layer yields its convolution and recurrent states instead of keys and values."""
    layer = hf.cache_utils.LinearAttentionLayer()
    layer.update_conv_state(torch.ones(1, 4, 3))
    layer.update_recurrent_state(torch.ones(1, 2, 2))
    # Newer releases of transformers use dictionaries of tensors here.
    inner = "" if hasattr(layer.conv_states, "shape") else "[0]"
    assert paths_of(hf.cache_utils.Cache(layers=[layer])) == [
        f"out.layers[0].conv_states{inner}",
        f"out.layers[0].recurrent_states{inner}",
    ]


def test_a_cache_of_transformers_4_is_two_lists() -> None:
    """A cache of transformers 4, or a copy in a model's own code, yields its lists of keys and of values."""
    old: Any = type("DynamicCache", (Plain,), {})
    new = type("MyCache", (old,), {"key_cache": property(lambda _: pytest.fail("deprecated"))})
    key = ONE.clone()
    assert paths_of(old(key_cache=[key, []], value_cache=[key, []])) == ["out.key_cache[0]", "out.value_cache[0]"]
    assert paths_of(new(layers=[Plain()])) == []


# User-defined containers.


class Memory(Plain):
    """A user-defined class."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch Geometric uses torch.jit
def test_the_batches_of_pytorch_geometric_are_looked_into() -> None:
    from torch_geometric.data import Batch, Data, HeteroData  # takes two seconds

    graphs = [Data(x=torch.ones(3, 2), edge_index=torch.zeros(2, 4, dtype=torch.long)) for _ in range(2)]
    paths = [path for path, _ in iter_tensors(Batch.from_data_list(graphs), "batch")]
    assert paths == ["batch.x", "batch.edge_index", "batch.batch", "batch.ptr"]
    several = HeteroData({"user": {"x": ONE}, ("user", "likes", "item"): {"edge_index": TWO}})
    assert [path for path, _ in iter_tensors(several)] == ["out.user.x", "out[('user', 'likes', 'item')].edge_index"]


def test_a_registered_class_is_taken_apart() -> None:
    """The parts of a registered class have the given suffixes and are traversed; subclasses are included."""
    register_container(Memory, lambda memory: [(".read", memory.read), ("[written]", memory.written)])
    derived = type("Derived", (Memory,), {})
    for kind in (Memory, derived):
        value = kind(read=ONE, written={"a": [TWO]}, other=THREE)
        assert paths_of([value]) == ["out[0].read", "out[0][written].a[0]"]


@pytest.mark.parametrize(("kind", "name"), [("OwnBare", "OwnBare"), ("OwnDotted", f"{__name__}.OwnDotted")])
def test_a_class_can_be_registered_by_name(kind: str, name: str) -> None:
    """A name registers all classes with that name, with or without their module, and their subclasses."""
    base: Any = type(kind, (Plain,), {"__module__": __name__})
    derived: Any = type("Derived", (base,), {})
    register_container(name, lambda value: [(".kept", value.kept)])
    assert paths_of([base(kept=ONE), derived(kept=ONE), Plain(kept=ONE)]) == ["out[0].kept", "out[1].kept"]


def test_the_registration_of_a_user_comes_first() -> None:
    """A registration takes precedence over built-in support, even if it is for a base class."""

    class Base:
        pass

    class Own(Base, dict[str, Any]):
        pass

    class Cache(Base, hf.DynamicCache):
        pass

    register_container(Base, lambda value: [(".own", ONE)])
    assert paths_of([Own(a=ONE), Cache()]) == ["out[0].own", "out[1].own"]
    register_container(Base, lambda value: [(".new", ONE)])
    assert paths_of(Own(a=ONE)) == ["out.new"]


@pytest.mark.parametrize("kind", [3, "", None, Tensor, nn.Parameter, Plain()])
def test_what_is_no_class_cannot_be_registered(kind: Any) -> None:
    """A kind that is not a class or name, or is a tensor class, is rejected."""
    with pytest.raises(ArgumentError, match=r"^kind must be a class other than Tensor, or its name, got "):
        register_container(kind, lambda value: [])


def test_parts_must_be_a_function() -> None:
    """Parts that are not callable are rejected with the expected signature."""
    with pytest.raises(ArgumentError, match=r"^parts must be a function from a value to pairs .*, got \['keys'\]$"):
        register_container(Memory, ["keys"])  # type: ignore[arg-type]


def half(value: Any) -> Iterator[tuple[str, Any]]:
    """A parts function that raises."""
    yield ".first", ONE
    raise LookupError("it is closed")


@pytest.mark.parametrize("parts", [half, lambda value: None, lambda value: [ONE], lambda value: [(1, ONE)]])
def test_a_container_that_cannot_be_unpacked_is_named(parts: Any) -> None:
    """A container that raises half-way, or yields something other than pairs, has no parts; others are unaffected."""
    broken = type("Broken", (), {})()
    register_container(type(broken), parts)
    warned: list[tuple[str, Any]] = []
    assert paths_of([broken, ONE], warned) == ["out[1]"]
    assert warned == [("out[0]", broken)]
    with pytest.raises((LookupError, TypeError, ValueError)):
        list(iter_tensors([broken, ONE]))


def test_a_container_without_end_ends() -> None:
    """An infinite parts function is followed only up to the limit."""
    endless = type("Endless", (), {})
    register_container(endless, lambda value: ((f"[{number}]", 0) for number in itertools.count()))
    assert paths_of([endless(), ONE]) == []


# Ignored objects.


@pytest.mark.parametrize(
    "value",
    [
        Plain(kept=ONE),
        Plain(kept=nn.Parameter(ONE)),
        Plain(first=1, kept=[None, ONE]),
        Plain(kept=(ONE,)),
        Plain(kept={"a": 1, "b": ONE}),
        Plain(kept=collections.OrderedDict(a=ONE)),
        Slotted(ONE),
        Slotted([ONE]),
        torch.distributions.Normal(ONE, ONE),
    ],
)
def test_an_unknown_object_that_holds_tensors_is_named(value: object) -> None:
    """An unknown object with a tensor in an attribute or slot, or one level below, is reported with its path."""
    warned: list[tuple[str, Any]] = []
    assert paths_of({"a": [ONE, value]}, warned) == ["out.a[0]"]
    assert [(path, each is value) for path, each in warned] == [("out.a[1]", True)]


class Exotic:
    """An object whose special methods all raise, and which holds a tensor."""

    def __init__(self) -> None:
        object.__setattr__(self, "kept", ONE)

    def __getattribute__(self, name: str) -> Any:
        pytest.fail(f"{name} was read")

    __eq__ = __hash__ = __iter__ = __len__ = __bool__ = __repr__ = lambda *_: pytest.fail("called")  # type: ignore[assignment]


class Shadowing:
    """An object that overrides attribute access."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = ONE

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # an instance's own is writable
        pytest.fail("a property was called")

    @property  # type: ignore[misc]  # an instance's own is writable
    def __class__(self) -> Any:
        pytest.fail("a property was called")


def test_no_code_of_an_object_runs() -> None:
    """The search for tensors in an object calls neither its properties nor its attribute hooks."""
    warned: list[tuple[str, Any]] = []
    assert paths_of([Exotic(), Shadowing()], warned) == []
    assert [path for path, _ in warned] == ["out[0]", "out[1]"]


def test_an_iterator_is_not_consumed() -> None:
    """Generators and iterators over tensors are ignored and not consumed."""
    iterators = [iter([ONE]), (each for each in [ONE]), map(id, [ONE]), zip([ONE], strict=True)]
    warned: list[tuple[str, Any]] = []
    assert paths_of(iterators, warned) + warned == []
    assert [len(list(each)) for each in iterators] == [1, 1, 1, 1]


def with_tensor(function: Any) -> Any:
    """A function with a tensor attribute."""
    function.kept = ONE
    return function


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear(1, 1),
        Defaulted,
        type("Class", (), {"kept": ONE}),
        type("Class", (), {"kept": ONE})(),
        with_tensor(lambda: None),
        ONE.sum,
        ONE.register_hook,
        functools.partial(print, ONE),
        np.ones(2),
        LLAMA,
        torch.float32,
        torch.device("cpu"),
        Plain(kept=[[ONE]]),
        Plain(kept={ONE}),
        Plain(kept=nn.Linear(1, 1)),
    ],
)
def test_an_object_without_tensors_of_its_own_is_not_named(value: object) -> None:
    """Modules, classes, functions, arrays and settings are not reported, and neither are deeper tensors."""
    warned: list[tuple[str, Any]] = []
    assert paths_of([value], warned) == []
    assert warned == []


def test_looking_for_tensors_is_bounded() -> None:
    """Only the first hundred attributes of an object, and the first hundred entries of a list, are checked."""
    for count, expected in ((99, 1), (100, 0)):
        warned: list[tuple[str, Any]] = []
        others = [1] * count
        paths_of([Plain(**{f"a{number}": 1 for number in range(count)}, kept=ONE), Plain(kept=[*others, ONE])], warned)
        assert len(warned) == 2 * expected


# Laws.


class Layer:
    """A possible layer of a cache."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = keys, values


register_container(Layer, lambda layer: [(".keys", layer.keys), (".values", layer.values)])

trees = st.recursive(
    st.sampled_from([ONE, None, 3]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text("ab. 0", max_size=2), st.integers(0, 2)), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
        st.builds(Defined, inner, inner),
        st.builds(Layer, inner, inner),
        st.builds(Plain, kept=inner),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(st.tuples(st.integers(0, 2), st.text("a'(,", max_size=2)), inner, max_size=3),
    ),
    max_leaves=12,
)


def inside(value: Any) -> list[Any]:
    """Return the parts of one of the containers above: an independent implementation."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, collections.deque)):
        return list(value)
    names = {Output: ("logits", "extra"), Defined: ("kept", "_more"), Layer: ("keys", "values")}
    return [getattr(value, name) for name in names.get(type(value), ())]


def count_tensors(value: Any) -> int:
    """Count the tensors in a value with plain recursion."""
    return 1 if isinstance(value, Tensor) else sum(map(count_tensors, inside(value)))


def holders(value: Any) -> list[int]:
    """Return the objects of unknown type in a value that hold tensors."""
    if isinstance(value, Plain):
        (kept,) = vars(value).values()
        near = [kept, *(inside(kept) if isinstance(kept, (dict, list, tuple)) else [])]
        return [id(value)] if any(isinstance(each, Tensor) for each in near) else []
    return [holder for each in inside(value) for holder in holders(each)]


@settings(max_examples=300)
@given(trees)
def test_every_tensor_is_found_under_a_path_of_its_own(value: object) -> None:
    """In any nesting each occurrence of a tensor has one unique path, and unknown objects are reported."""
    warned: list[tuple[str, Any]] = []
    paths = paths_of(value, warned)
    assert paths == paths_of(value)
    assert len(paths) == count_tensors(value)
    assert [id(each) for _, each in warned] == holders(value)
    places = paths + [path for path, _ in warned]
    assert len(set(places)) == len(places)


class Counted(list[Any]):
    """A list that fails the test when it is traversed too often, instead of letting it run forever."""

    looked = 0

    def __iter__(self) -> Iterator[Any]:
        self.looked += 1
        assert self.looked < 10_000, "the walk through a cyclic value does not end in any sensible time"
        return super().__iter__()

    def __repr__(self) -> str:
        return "Counted"  # the default repr of nested cycles would not terminate either


def test_a_value_that_contains_itself_ends() -> None:
    """A list that contains itself terminates, and the tensor in it is found."""
    value = Counted([ONE])
    value.append(value)
    assert next(iter_tensors(value))[0] == "out[0]"
    assert all(tensor is ONE for _, tensor in iter_tensors(value))


def test_a_value_that_contains_itself_twice_ends() -> None:
    """A cycle with two routes, as between parent and children, terminates as fast as a simple one."""
    parent, child = Counted(), Counted()
    parent += [child, child, ONE]
    child += [parent, parent]
    assert next(path for path, _ in iter_tensors(parent) if path.count("[") == 1) == "out[2]"


def test_a_part_that_occurs_twice_is_found_twice() -> None:
    """A container that occurs twice without containing itself is traversed at both places."""
    part = [ONE]
    assert [path for path, _ in iter_tensors((part, part))] == ["out[0][0]", "out[1][0]"]


def test_parts_that_all_know_each_other_end() -> None:
    """Containers that all contain each other, with far too many routes to follow, terminate as well."""
    parts = [Counted([ONE]) for _ in range(12)]
    for part in parts:
        part += parts
    assert next(iter_tensors(parts[0]))[0] == "out[0]"
    assert all(tensor is ONE for _, tensor in iter_tensors(parts[0]))


def test_a_very_deep_value_ends() -> None:
    """A linked list of a hundred thousand cells causes no RecursionError, and tensors near its top are found."""
    value: Any = None
    for _ in range(100_000):
        value = (ONE, value)
    paths = [path for path, _ in iter_tensors(value)]
    assert paths[:3] == ["out[0]", "out[1][0]", "out[1][1][0]"]
    assert len(paths) < 100
    while value is not None:  # unwound by hand: Python itself would free such a deep tuple recursively
        value = value[1]


class Bare:
    """A class with an invalid registration."""

    def __init__(self) -> None:
        self.held = ONE


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            lambda value: [("held", value.held)],
            r"ArgumentError: a suffix must lead .* such as '\.keys' or '\[0\]'; got 'held'",
        ),
        (lambda value: value.other, "AttributeError: 'Bare' object has no attribute 'other'"),
        (lambda value: value.held, "TypeError: cannot unpack|TypeError: iteration|ValueError"),
        (lambda value: None, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_wrong_registration_is_named_with_its_error(parts: Any, message: str) -> None:
    """If parts raise or have invalid suffixes, the message has the error and not the advice to register them."""
    register_container(Bare, parts)
    warned: list[str] = []
    found = list(iter_tensors(Bare(), unknown=lambda *each: warned.append(describe_unknown("m", *each))))
    assert found == []
    assert re.search(rf"the Bare at 'out' of module 'm', which could not be searched: ({message})", warned[0])
