"""Which modules are chosen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_recorder.errors import ArgumentError, SelectionError
from lightning_recorder.selection import Selection, leaf_modules, named_submodules


def grow(*names: str) -> nn.Module:
    """A module with submodules of these dotted names and of all names on the way to them."""
    root = nn.Module()
    for name in names:
        module = root
        for segment in name.split("."):
            if segment not in dict(module.named_children()):
                module.add_module(segment, nn.Module())
            module = module.get_submodule(segment)
    return root


class Block(nn.Module):
    """A block of a transformer, as far as names and types go."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Net(nn.Module):
    """A model with lists, dictionaries and an opaque module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})


NET = Net()


def chosen(*args: Any, module: nn.Module = NET, **kwargs: Any) -> list[str]:
    """The names of the selected modules."""
    return list(Selection(*args, **kwargs).resolve(module))


# Names and globs


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("embed", ["embed"]),
        ("blocks.0.mlp.2", ["blocks.0.mlp.2"]),
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("blocks.*.norm", ["blocks.0.norm", "blocks.1.norm"]),
        ("blocks.?.mlp.?", [f"blocks.{block}.mlp.{layer}" for block in (0, 1) for layer in (0, 1, 2)]),
        ("blocks.1.mlp.**", ["blocks.1.mlp", "blocks.1.mlp.0", "blocks.1.mlp.1", "blocks.1.mlp.2"]),
        ("**.norm", ["blocks.0.norm", "blocks.1.norm"]),
        ("**.embed", ["embed"]),
        ("blocks.**.norm", ["blocks.0.norm", "blocks.1.norm"]),
        ("blocks.**.0.norm", ["blocks.0.norm"]),
        ("**.mlp.*", [f"blocks.{block}.mlp.{layer}" for block in (0, 1) for layer in (0, 1, 2)]),
        ("e*", ["embed"]),
        ("em*d", ["embed"]),
        ("?mbed", ["embed"]),
        ("**.?", ["blocks.0", *(f"blocks.0.mlp.{n}" for n in range(3)), "blocks.1"]),
        (["heads.b", "embed"], ["embed", "heads.b"]),
        (("embed", "emb*"), ["embed"]),
        ({"embed"}, ["embed"]),
    ],
)
def test_a_name_or_glob_chooses(names: object, expected: list[str]) -> None:
    """An asterisk stands within one segment, a double one for any number of them, a question mark for one character."""
    if names == "**.?":
        expected = [*expected, *(f"blocks.1.mlp.{n}" for n in range(3)), "heads.a", "heads.b"]
    assert chosen(names) == expected


@pytest.mark.parametrize("pattern", ["*", "**", "**.**", "?*", "**.*"])
def test_a_glob_never_chooses_the_root(pattern: str) -> None:
    """The root is left out of what a glob chooses, since who calls it depends on the trainer's strategy."""
    assert "" not in chosen(pattern)


def test_an_asterisk_alone_is_the_children_of_the_root() -> None:
    """The glob * chooses the direct children of the root and nothing else."""
    assert chosen("*", module=grow("a.b", "c")) == ["a", "c"]


@pytest.mark.parametrize("pattern", ["a.**.**", "**.**.b", "**.**", "a.**.**.c"])
def test_two_double_asterisks_are_one(pattern: str) -> None:
    """Any number of segments followed by any number of segments is any number of segments."""
    net = grow("a.b.c", "b")
    assert chosen(pattern, module=net) == chosen(re.sub(r"(\*\*\.)+\*\*", "**", pattern), module=net)


@pytest.mark.parametrize("name", ["a+b", "a(b", "[0]", "a|b", "^a$", "\\d", "ä ö"])
def test_a_name_stands_for_itself(name: str) -> None:
    """Characters that mean something in a regular expression mean nothing in a name or glob."""
    net = grow(name, "other", "0", "b", "a")
    assert chosen(name, module=net) == [name]
    assert chosen(f"{name[:-1]}?", module=net) == [name]


def test_a_module_whose_name_looks_like_a_glob_is_found_by_it() -> None:
    """A module that is called * is among those that the glob * chooses."""
    assert chosen("*", module=grow("*", "a")) == ["*", "a"]


def fits(name: str, pattern: str) -> bool:
    """The glob language written down a second time: one segment, character by character."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(fits(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and fits(name[1:], pattern[1:])


def path_fits(name: list[str], pattern: list[str]) -> bool:
    """The glob language written down a second time: segment by segment."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(path_fits(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and fits(name[0], pattern[0]) and path_fits(name[1:], pattern[1:])


segments = st.text("ab", min_size=1, max_size=2)
globs = st.one_of(st.just("**"), st.text("ab*?", min_size=1, max_size=3))


@settings(max_examples=400)
@given(st.lists(st.lists(segments, min_size=1, max_size=4), min_size=1, max_size=6), st.lists(globs, min_size=1))
def test_globs_agree_with_a_matcher_by_hand(names: list[list[str]], glob: list[str]) -> None:
    """On any tree and for any pattern the choice is that of a matcher which goes character by character."""
    net = grow(*map(".".join, names))
    expected = [name for name, _ in net.named_modules() if name and path_fits(name.split("."), glob)]
    if expected:
        assert chosen(".".join(glob), module=net) == expected
    else:
        with pytest.raises(SelectionError):
            chosen(".".join(glob), module=net)


# Without names


def test_without_arguments_the_leaves_are_chosen() -> None:
    """An empty selection is every module that calls no other, with an attention block as one of them."""
    block = ["attn", "norm", "mlp.0", "mlp.1", "mlp.2"]
    inner = [f"blocks.{position}.{name}" for position in (0, 1) for name in block]
    assert chosen() == ["embed", *inner, "heads.a", "heads.b"]
    assert leaf_modules(NET) == chosen()


@pytest.mark.parametrize("field", ["names", "types"])
def test_an_empty_list_is_no_choice(field: str) -> None:
    """An empty list, which reads as nothing and would mean everything, is refused; excluding nothing is not."""
    empty: Any = {field: []}
    with pytest.raises(ArgumentError, match=f"{field} is empty; leave it out"):
        Selection(**empty)
    assert Selection(exclude=[]) == Selection()


def test_attention_is_a_leaf() -> None:
    """MultiheadAttention is a leaf because its projection is never called, also as a subclass."""

    class Attention(nn.MultiheadAttention):
        pass

    net = nn.Sequential(Attention(4, 2), nn.TransformerEncoderLayer(4, 2, 8))
    called: list[str] = []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    net[1](torch.ones(1, 1, 4))
    net[0](*[torch.ones(1, 1, 4)] * 3)
    assert "1.self_attn" in called
    assert "1.self_attn.out_proj" not in called
    assert [name for name in leaf_modules(net) if "attn" in name or name.startswith("0")] == ["0", "1.self_attn"]
    assert set(leaf_modules(net)) <= set(called)


def test_a_parametrized_layer_is_a_leaf() -> None:
    """A layer whose only submodules make its weight, as weight_norm's do, is called and is a leaf; so are they."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    called: list[str] = []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    net(torch.ones(1, 2))
    assert leaf_modules(net) == ["0", "0.parametrizations.weight.0", "1"]
    assert set(leaf_modules(net)) <= set(called)


def test_a_module_whose_name_begins_like_attention_is_its_own() -> None:
    """Only what lies inside an attention block is left out, not what is called similarly."""
    net = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "attn2": nn.Linear(1, 1)})
    assert leaf_modules(net) == ["attn", "attn2"]


def test_a_model_of_one_module_has_no_leaves() -> None:
    """The root is left out also where it is the only module."""
    assert chosen(module=nn.Linear(1, 1)) == []


# Containers that are never called


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("blocks", ["blocks.0", "blocks.1"]),
        ("heads", ["heads.a", "heads.b"]),
        (["heads", "heads.a"], ["heads.a", "heads.b"]),
        ("*", ["embed", "blocks.0", "blocks.1", "heads.a", "heads.b"]),
    ],
)
def test_a_list_or_dictionary_of_modules_stands_for_its_entries(names: object, expected: list[str]) -> None:
    """A selected ModuleList or ModuleDict stands for its entries, each once."""
    assert chosen(names) == expected


def test_a_list_of_lists_stands_for_the_entries_of_its_entries() -> None:
    """Lists inside lists are opened until something is reached that is called."""
    net = nn.Module()
    net.grid = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.Tanh()]), nn.ModuleDict({"x": nn.ELU()})])
    assert chosen("grid", module=net) == ["grid.0.0", "grid.0.1", "grid.1.x"]


@pytest.mark.parametrize("types", [nn.Module, "Module", nn.ModuleList, [nn.ModuleList, nn.Linear]])
def test_what_is_never_called_is_never_chosen(types: Any) -> None:
    """Types choose no ModuleList or ModuleDict, whose record would stay empty without a word."""
    try:
        resolved = Selection(types=types).resolve(NET)
    except SelectionError:
        resolved = {}
    assert [name for name, module in resolved.items() if isinstance(module, (nn.ModuleList, nn.ModuleDict))] == []


def test_a_list_that_is_called_is_a_module_like_any_other() -> None:
    """A subclass of ModuleList with a forward of its own can be chosen by its name."""

    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x)
            return x

    net = nn.Module()
    net.chain = Chain([nn.ReLU(), nn.Tanh()])
    assert chosen("chain", module=net) == ["chain"]
    assert chosen("chain.**", module=net) == ["chain", "chain.0", "chain.1"]
    assert chosen(module=net) == ["chain.0", "chain.1"]


# Types


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (nn.Embedding, ["embed"]),
        ("Embedding", ["embed"]),
        ("torch.nn.Embedding", ["embed"]),
        ("torch.nn.modules.sparse.Embedding", ["embed"]),
        (Block, ["blocks.0", "blocks.1"]),
        ("Block", ["blocks.0", "blocks.1"]),
        (f"{__name__}.Block", ["blocks.0", "blocks.1"]),
        ([nn.Embedding, "LayerNorm"], ["embed", "blocks.0.norm", "blocks.1.norm"]),
    ],
)
def test_a_type_chooses_by_class_or_name(types: Any, expected: list[str]) -> None:
    """A type is given as class, as bare name, as torch documents it or by its full path, and is no matter of leaves."""
    assert chosen(types=types) == expected


@pytest.mark.parametrize("types", [nn.Linear, "Linear", "torch.nn.Linear", nn.Module, "Module"])
def test_base_classes_count(types: Any) -> None:
    """A module is also of the types that its class derives from, whether told by class or by name."""

    class Sharded(nn.Linear):
        pass

    assert chosen(types=types, module=nn.Sequential(Sharded(1, 1))) == ["0"]


def test_a_part_of_a_type_name_is_no_type() -> None:
    """A type's name is taken whole, so that Norm chooses no LayerNorm and nn.LayerNorm is not guessed at."""
    for name in ("Norm", "nn.LayerNorm", "layernorm"):
        with pytest.raises(SelectionError, match=rf"^no selected module is a {name}; the model has "):
            chosen(types=name)


def test_a_type_that_is_missing_is_told_with_those_that_are_there() -> None:
    """A type that chooses nothing is an error which lists the classes of the model."""
    with pytest.raises(SelectionError) as raised:
        chosen(types=[nn.Conv2d, "LSTM"], module=nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    assert str(raised.value) == "no selected module is a Conv2d, LSTM; the model has Linear, ReLU, Sequential"


# Exclusion and combination


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"names": "blocks.**", "types": nn.LayerNorm}, ["blocks.0.norm", "blocks.1.norm"]),
        ({"names": "blocks.**", "types": "Linear", "exclude": "**.attn.**"}, None),
        ({"types": "LayerNorm", "exclude": "blocks.0.**"}, ["blocks.1.norm"]),
        ({"names": "heads", "exclude": "heads.a"}, ["heads.b"]),
        ({"exclude": ["blocks.**", "heads.?"]}, ["embed"]),
        ({"names": "embed", "exclude": "nothing.like.this"}, ["embed"]),
    ],
)
def test_what_is_given_must_hold_together(arguments: dict[str, Any], expected: list[str] | None) -> None:
    """A module is chosen when a name and a type match it and no exclusion does; an exclusion may match nothing."""
    if expected is None:
        expected = [f"blocks.{block}.mlp.{layer}" for block in (0, 1) for layer in (0, 2)]
    assert chosen(**arguments) == expected


def test_excluding_everything_is_an_error() -> None:
    """An exclusion that leaves nothing is an error which says how much was chosen before it."""
    with pytest.raises(SelectionError) as raised:
        chosen("heads.*", exclude="heads.**")
    assert str(raised.value) == "exclude=['heads.**'] leaves none of the 2 selected modules"


# Shared modules


@pytest.fixture
def shared() -> nn.Module:
    """A model in which one layer is registered under two names."""
    net = nn.Module()
    net.a = nn.Linear(1, 1)
    net.b = net.a
    net.c = nn.ReLU()
    return net


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, ["a", "c"]), ("**", ["a", "c"]), ("b", ["b"]), (["b", "c"], ["b", "c"]), (["b", "a"], ["a"])],
)
def test_a_shared_module_is_chosen_once(shared: nn.Module, names: Any, expected: list[str]) -> None:
    """A module with two names is chosen once, under the first of the names that are selected."""
    assert chosen(names, module=shared) == expected


# What is returned


def test_the_order_is_that_of_the_model() -> None:
    """Modules come in the order of named_modules(), whatever the order of the patterns, with the modules themselves."""
    resolved = Selection(["heads.b", "blocks.1.norm", "embed"]).resolve(NET)
    assert list(resolved) == ["embed", "blocks.1.norm", "heads.b"]
    assert all(module is NET.get_submodule(name) for name, module in resolved.items())


# Names of wrapped modules


@pytest.mark.parametrize("wrap", ["torch.compile", "checkpoint_wrapper", "both"])
def test_a_wrapper_changes_no_name(wrap: str) -> None:
    """A part that is compiled or checkpointed has the names that it has in the user's code, and is the part itself."""
    block = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    wrapped: Any = block
    if wrap != "torch.compile":
        wrapped = checkpoint_wrapper(wrapped)
    if wrap != "checkpoint_wrapper":
        wrapped = torch.compile(wrapped, backend="eager")
    net = nn.ModuleDict({"stem": nn.Linear(1, 1), "blocks": nn.ModuleList([wrapped])})
    assert list(named_submodules(net)) == ["", "stem", "blocks", "blocks.0", "blocks.0.0", "blocks.0.1"]
    for names, expected in (
        (None, ["stem", "blocks.0.0", "blocks.0.1"]),
        ("blocks", ["blocks.0"]),
        ("**", ["stem", "blocks.0", "blocks.0.0", "blocks.0.1"]),
        ("blocks.0", ["blocks.0"]),
    ):
        assert chosen(names, module=net) == expected
    assert Selection("blocks.*").resolve(net) == {"blocks.0": block}
    assert chosen(types="Linear", module=net) == ["stem", "blocks.0.0"]
    assert chosen(types=nn.Sequential, module=net) == ["blocks.0"]


# Errors


@pytest.mark.parametrize("names", ["embd", ["embed", "embd"], ["**", "embd"]])
def test_every_single_pattern_must_match(names: object) -> None:
    """One pattern that matches nothing is an error also beside others that do, and the message names the closest."""
    with pytest.raises(SelectionError, match=r"^no module matches 'embd'; the closest names are 'embed', ") as raised:
        chosen(names)
    assert isinstance(raised.value, ValueError)


def test_the_closest_names_share_a_segment() -> None:
    """For a mistaken parent the names with the same last segment are offered, at most three."""
    with pytest.raises(SelectionError) as raised:
        chosen("encoder.stages.0.norm")
    assert re.findall(r"'([^']*)'", str(raised.value))[1:] == ["blocks.0.norm", "blocks.1.norm", "embed"]


def test_a_model_without_submodules_says_so() -> None:
    """Where there is no name to offer the message says so."""
    with pytest.raises(SelectionError, match=r"^no module matches 'x'; the model has no submodules$"):
        chosen("x", module=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Selection(3), "names takes module names or globs, got 3"),  # type: ignore[arg-type]
        (lambda: Selection(["a", 3]), "names takes module names or globs, got 3"),  # type: ignore[list-item]
        (lambda: Selection(b"a"), "names takes module names or globs, got 97"),  # type: ignore[arg-type]
        (lambda: Selection(nn.Linear), "names takes module names or globs, got <class"),  # type: ignore[arg-type]
        (lambda: Selection(exclude=[None]), "exclude takes module names or globs, got None"),  # type: ignore[list-item]
        (lambda: Selection(types=int), "types takes subclasses of torch.nn.Module or their names, got <class 'int'>"),  # type: ignore[arg-type]
        (lambda: Selection(types=[nn.ReLU()]), "types takes subclasses of torch.nn.Module or their names, got ReLU()"),  # type: ignore[list-item]
    ],
)
def test_a_wrong_type_of_argument_is_refused_at_construction(make: Callable[[], Selection], message: str) -> None:
    """An entry that is no string, or no module class where classes are taken, is refused with what is expected."""
    with pytest.raises(ArgumentError) as raised:
        make()
    assert str(raised.value).startswith(message)


# Selections as values


def test_equal_selections_are_equal() -> None:
    """A string, a list of it and a generator of it say the same, compare equal and hash equal."""
    once = Selection("a", nn.Linear, "b")
    same = [once, Selection(["a"], (nn.Linear,), ["b"]), Selection((name for name in "a"), [nn.Linear], "b")]
    assert [each == once for each in same] == [True, True, True]
    assert len(set(same)) == 1
    assert Selection("a") != Selection("b")


def test_a_generator_can_be_resolved_again() -> None:
    """Patterns that came from a generator are kept, so that a second model can be resolved."""
    selection = Selection(name for name in ("a", "b"))
    assert [list(selection.resolve(grow("a", "b"))) for _ in range(2)] == [["a", "b"], ["a", "b"]]
