"""Selection of modules."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_recorder.errors import ArgumentError, SelectionError
from lightning_recorder.module_names import default_modules, named_submodules, own_parameters
from lightning_recorder.selection import SelectedModules, Selection
from tests.effort import profiled


def grow(*names: str) -> nn.Module:
    """Build a module with submodules of these dotted names and all their parents."""
    root = nn.Module()
    for name in names:
        module = root
        for segment in name.split("."):
            if segment not in dict(module.named_children()):
                module.add_module(segment, nn.Module())
            module = module.get_submodule(segment)
    return root


class Block(nn.Module):
    """Build a transformer block that has realistic names and types."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Net(nn.Module):
    """Build a model with lists, dictionaries and an opaque module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})


class Inner(nn.Module):
    """A layer that has another one in a list."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        layer.register_module("act", nn.ReLU())
        self.layers, self.weights = [layer], nn.ParameterList(layer.parameters())


class Lender(nn.Module):
    """A model that has its layers in lists and registers their parameters, as Keras models do.

    Args:
        trains: Register the parameters.
        teacher: A further module in the same list.
    """

    def __init__(self, *, trains: bool = True, teacher: nn.Module | None = None) -> None:
        super().__init__()
        first, inner = nn.Linear(4, 8), Inner()
        self.layers = [first, nn.ReLU(), inner, *([teacher] if teacher is not None else [])]
        parameters = [*first.parameters(), *inner.weights]
        self.weights = nn.ParameterList(parameters if trains else ())


NET = Net()


def chosen(*args: Any, module: nn.Module = NET, **kwargs: Any) -> list[str]:
    """Return the names of the selected modules."""
    return list(Selection(*args, **kwargs).resolve(module))


# Names and globs.


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
    """``*`` matches within one segment, ``**`` any number of segments, ``?`` one character."""
    if names == "**.?":
        expected = [*expected, *(f"blocks.1.mlp.{n}" for n in range(3)), "heads.a", "heads.b"]
    assert chosen(names) == expected


@pytest.mark.parametrize("pattern", ["*", "**", "**.**", "?*", "**.*"])
def test_a_glob_never_chooses_the_root(pattern: str) -> None:
    """A glob never selects the root, since the trainer's strategy decides how the root is called."""
    assert "" not in chosen(pattern)


def test_an_asterisk_alone_is_the_children_of_the_root() -> None:
    """The glob ``*`` selects only the direct children of the root."""
    assert chosen("*", module=grow("a.b", "c")) == ["a", "c"]


@pytest.mark.parametrize("pattern", ["a.**.**", "**.**.b", "**.**", "a.**.**.c"])
def test_two_double_asterisks_are_one(pattern: str) -> None:
    """Two adjacent ``**`` segments are equivalent to one."""
    net = grow("a.b.c", "b")
    assert chosen(pattern, module=net) == chosen(re.sub(r"(\*\*\.)+\*\*", "**", pattern), module=net)


@pytest.mark.parametrize("name", ["a+b", "a(b", "[0]", "a|b", "^a$", "\\d", "ä ö"])
def test_a_name_stands_for_itself(name: str) -> None:
    """Regular expression characters have no special meaning in a name or glob."""
    net = grow(name, "other", "0", "b", "a")
    assert chosen(name, module=net) == [name]
    assert chosen(f"{name[:-1]}?", module=net) == [name]


def test_a_module_whose_name_looks_like_a_glob_is_found_by_it() -> None:
    """A module called ``*`` is among those that the glob ``*`` selects."""
    assert chosen("*", module=grow("*", "a")) == ["*", "a"]


def fits(name: str, pattern: str) -> bool:
    """Match one segment, character by character: an independent implementation of the glob language."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(fits(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and fits(name[1:], pattern[1:])


def path_fits(name: list[str], pattern: list[str]) -> bool:
    """Match segment by segment: an independent implementation of the glob language."""
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
    """For any tree and pattern the selection equals that of a character-by-character matcher."""
    net = grow(*map(".".join, names))
    expected = [name for name, _ in net.named_modules() if name and path_fits(name.split("."), glob)]
    if expected:
        assert chosen(".".join(glob), module=net) == expected
    else:
        with pytest.raises(SelectionError):
            chosen(".".join(glob), module=net)


# Without names.


def test_without_arguments_the_leaves_are_chosen() -> None:
    """An empty selection of a model whose parameters are all in leaves selects the leaves, including attention."""
    block = ["attn", "norm", "mlp.0", "mlp.1", "mlp.2"]
    inner = [f"blocks.{position}.{name}" for position in (0, 1) for name in block]
    assert chosen() == ["embed", *inner, "heads.a", "heads.b"]
    assert default_modules(NET) == chosen()


@pytest.mark.parametrize("field", ["names", "types", "indices", "labels", "depth"])
def test_an_empty_list_is_no_choice(field: str) -> None:
    """An empty list is rejected, since it looks like nothing but means everything; an empty ``exclude`` is valid."""
    empty: Any = {field: []}
    with pytest.raises(ArgumentError, match=f"{field} is empty; omit it"):
        Selection(**empty)
    assert Selection(exclude=[]) == Selection()


def test_attention_is_a_leaf() -> None:
    """MultiheadAttention and its subclasses are leaves, because the projection is never called."""

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
    assert [name for name in default_modules(net) if "attn" in name or name.startswith("0")] == ["0", "1.self_attn"]
    assert set(default_modules(net)) <= set(called)


def test_a_parametrized_layer_is_a_leaf() -> None:
    """A layer whose only submodules compute its weight, such as weight_norm's, is a leaf, and so are they."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    called: list[str] = []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    net(torch.ones(1, 2))
    assert default_modules(net) == ["0", "0.parametrizations.weight.0", "1"]
    assert set(default_modules(net)) <= set(called)


def test_a_module_whose_name_begins_like_attention_is_its_own() -> None:
    """Only modules inside an attention block are excluded, not those with a similar name."""
    net = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "attn2": nn.Linear(1, 1)})
    assert default_modules(net) == ["attn", "attn2"]


class Experts(nn.Module):
    """A module that owns weights and calls an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.act = nn.ReLU()


class Scaled(nn.Module):
    """A module with its parameters in torch containers, which calls a layer."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.held = container
        self.act = nn.ReLU()


CONTAINERS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: nn.ParameterList([torch.ones(2)]), ["held.0"]),
    "dictionary": (lambda: nn.ParameterDict({"a": torch.ones(2)}), ["held.a"]),
    "list of lists": (lambda: nn.ModuleList([nn.ParameterList([torch.ones(2)])]), ["held.0.0"]),
}


def test_a_module_with_parameters_and_children_is_chosen() -> None:
    """A module that owns a parameter is selected in addition to the leaves; the root is not."""
    net = nn.Sequential(nn.Sequential(Experts(), nn.Linear(2, 2)), nn.ReLU())
    net.register_parameter("gain", nn.Parameter(torch.ones(1)))
    assert chosen(module=net) == ["0.0", "0.0.act", "0.1", "1"]
    assert chosen(exclude="**.act", module=net) == ["0.0", "0.1", "1"]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_lists_and_dictionaries_of_parameters_belong_to_their_module(kind: str) -> None:
    """A parameter container is never called, so the module that holds it owns the parameters and is selected."""
    make, paths = CONTAINERS[kind]
    net = nn.Sequential(Scaled(make()), nn.ReLU())
    assert chosen(module=net) == ["0", "0.act", "1"]
    assert [path for path, _ in own_parameters(net[0])] == paths


def test_containers_without_parameters_make_no_owner() -> None:
    """A module with an empty parameter container, as adapters have, or with a list of layers is not selected."""
    assert chosen(module=nn.Sequential(Scaled(nn.ParameterDict()))) == ["0.act"]
    assert chosen(module=nn.Sequential(Scaled(nn.ModuleList([nn.Linear(1, 1)])))) == ["0.held.0", "0.act"]


def test_a_parametrized_block_is_chosen_and_its_parametrization_is_no_owner() -> None:
    """The original tensor of a parametrization counts as a parameter of the block that it is registered on."""
    block = Experts()
    nn.utils.parametrize.register_parametrization(block, "weight", nn.Identity())
    assert chosen(module=nn.Sequential(block)) == ["0", "0.act", "0.parametrizations.weight.0"]


def test_mixture_of_experts_and_state_space_mixers_are_chosen() -> None:
    """In Mixtral and Mamba the selected modules own every parameter of the model."""
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **heads, intermediate_size=16, num_local_experts=4)
    )
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    assert "backbone.layers.0.mixer" in chosen(module=mamba)
    for model in mixtral, mamba:
        names = chosen(module=model)
        owned = {id(each) for name in names for _, each in own_parameters(model.get_submodule(name))}
        assert owned == set(map(id, model.parameters()))


def test_metrics_are_left_out_by_default() -> None:
    """Torchmetrics metrics and everything below them are excluded, unless a name, a type or an index selects them."""
    accuracy = torchmetrics.classification.MulticlassAccuracy(3)
    net = nn.ModuleDict({"head": nn.Linear(2, 3), "accuracy": accuracy})
    net["all"] = torchmetrics.MetricCollection([torchmetrics.classification.MulticlassF1Score(3)])
    net["wrapped"] = torchmetrics.MinMaxMetric(torchmetrics.classification.MulticlassRecall(3))
    assert chosen(module=net) == ["head"]
    assert chosen("accuracy", module=net) == ["accuracy"]
    assert chosen(types="MulticlassRecall", module=net) == ["wrapped._base_metric"]


def test_a_layer_that_a_metric_holds_as_well_is_chosen_under_its_own_name() -> None:
    """A layer of the model that a metric also refers to is still selected."""
    metric, layer = torchmetrics.classification.MulticlassAccuracy(3), nn.Linear(2, 3)
    metric.add_module("features", layer)
    assert chosen(module=nn.ModuleDict({"metric": metric, "layer": layer})) == ["layer"]


def test_a_model_of_one_module_has_no_leaves() -> None:
    """The root is excluded even if it is the only module, and excluding from no leaves is not an error."""
    assert chosen(module=nn.Linear(1, 1)) == chosen(exclude="head.**", module=nn.Linear(1, 1)) == []


# Containers that are never called.


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
    """A selected ModuleList or ModuleDict is replaced by its entries, each once."""
    assert chosen(names) == expected


def test_a_list_of_lists_stands_for_the_entries_of_its_entries() -> None:
    """Nested lists are replaced recursively until a called module is reached."""
    net = nn.Module()
    net.grid = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.Tanh()]), nn.ModuleDict({"x": nn.ELU()})])
    assert chosen("grid", module=net) == ["grid.0.0", "grid.0.1", "grid.1.x"]


@pytest.mark.parametrize("types", [nn.Module, "Module", nn.ModuleList, [nn.ModuleList, nn.Linear]])
def test_what_is_never_called_is_never_chosen(types: Any) -> None:
    """Types never select a ModuleList or ModuleDict, whose record would silently stay empty."""
    try:
        resolved: dict[str, nn.Module] = Selection(types=types).resolve(NET)
    except SelectionError:
        resolved = {}
    assert [name for name, module in resolved.items() if isinstance(module, (nn.ModuleList, nn.ModuleDict))] == []


def test_a_list_that_is_called_is_a_module_like_any_other() -> None:
    """A subclass of ModuleList with its own forward can be selected by name."""

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


# Types.


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
    """A type is a class, a bare name, torch's documented name or the full path, and is not limited to leaves."""
    assert chosen(types=types) == expected


@pytest.mark.parametrize("types", [nn.Linear, "Linear", "torch.nn.Linear", nn.Module, "Module"])
def test_base_classes_count(types: Any) -> None:
    """Types match subclasses, by class or by name."""

    class Sharded(nn.Linear):
        pass

    assert chosen(types=types, module=nn.Sequential(Sharded(1, 1))) == ["0"]


def test_a_part_of_a_type_name_is_no_type() -> None:
    """Type names are matched whole: Norm does not match LayerNorm, and nn.LayerNorm is not guessed."""
    for name in ("Norm", "nn.LayerNorm", "layernorm"):
        with pytest.raises(SelectionError, match=rf"^no selected module is a {name}; the model has "):
            chosen(types=name)


def test_a_missing_type_is_named_with_the_existing_ones() -> None:
    """A type that matches no module is an error that lists the classes of the model."""
    with pytest.raises(SelectionError) as raised:
        chosen(types=[nn.Conv2d, "LSTM"], module=nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    assert str(raised.value) == "no selected module is a Conv2d, LSTM; the model has Linear, ReLU, Sequential"


# Positions.

BLOCK_NAMES = [name for name, _ in NET.blocks[0].named_modules(prefix="blocks.0")]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (0, [""]),
        (1, ["embed"]),
        ([21, 3, 3], ["blocks.0", "heads.b"]),
        (range(3, 11), BLOCK_NAMES),
        (2, ["blocks.0", "blocks.1"]),
        ([19, 20], ["heads.a", "heads.b"]),
    ],
)
def test_an_index_chooses_by_the_order_of_the_model(indices: Any, expected: list[str]) -> None:
    """An index is the position in modules(), with the root at 0; the index of a module list selects its entries."""
    assert chosen(indices=indices) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((0, 1), [""]),
        ([1, 1], ["embed"]),
        ([[2, 4], [2, 1]], ["blocks.0", "heads.b"]),
        ([(3, 5), [4, 2]], ["blocks.0.mlp.0", "blocks.1.norm"]),
        ([(1, 3)], ["heads.a", "heads.b"]),
        ((label for label in [(1, 1)]), ["embed"]),
    ],
)
def test_a_label_chooses_by_depth_and_position(labels: Any, expected: list[str]) -> None:
    """A label is a depth and the position, from 1, among the modules at that depth; list entries are one deeper."""
    assert chosen(labels=labels) == expected


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, [""]),
        (1, ["embed"]),
        ([0, 2], ["", "blocks.0", "blocks.1", "heads.a", "heads.b"]),
        (3, [f"blocks.{block}.{name}" for block in (0, 1) for name in ("attn", "norm", "mlp")]),
    ],
)
def test_a_depth_chooses_what_lies_just_so_deep(depth: Any, expected: list[str]) -> None:
    """Depths select all modules at those depths, leaves or not, and ignore lists, which are never called."""
    assert chosen(depth=depth) == expected


def test_the_place_of_a_shared_module_is_that_of_its_first_name() -> None:
    """A module with two names has one index, one label and one depth: those of its first name."""
    net = grow("a.b", "c")
    net.d = net.get_submodule("a.b")
    assert [name for name, _ in net.named_modules()] == ["", "a", "a.b", "c"]
    assert chosen(indices=3, module=net) == chosen(labels=(1, 2), module=net) == ["c"]
    assert chosen(depth=1, module=net) == ["a", "c"]
    assert chosen("d", depth=2, indices=2, labels=(2, 1), module=net) == ["d"]


def test_a_model_that_is_a_list_stands_for_its_entries() -> None:
    """If the root itself is never called, its index, label and name select its entries."""
    net = nn.ModuleList([nn.ReLU(), nn.ModuleList([nn.Tanh()])])
    for arguments in ({"indices": 0}, {"labels": (0, 1)}, {"names": ""}):
        assert chosen(**arguments, module=net) == ["0", "1.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices": [1, 22]}, "no module has the index 22; the model has 22 modules"),
        ({"labels": [[2, 4], [2, 5]]}, "no module has the label (2, 5); depth 2 has 4 modules"),
        ({"labels": (0, 2)}, "no module has the label (0, 2); depth 0 has 1 module"),
        ({"labels": (9, 1)}, "no module has the label (9, 1); depth 9 has 0 modules"),
    ],
)
def test_a_missing_place_is_named(arguments: dict[str, Any], message: str) -> None:
    """An index or label beyond the model is an error that has the number of modules."""
    with pytest.raises(SelectionError) as raised:
        chosen(**arguments)
    assert str(raised.value) == message


# Predicates.


def has_weight(name: str, module: nn.Module) -> bool:
    """A predicate that can be imported."""
    return hasattr(module, "weight")


NO_PREDICATE = 3


@pytest.mark.parametrize("predicate", [has_weight, f"{__name__}.has_weight"])
def test_a_predicate_chooses(predicate: Any) -> None:
    """A predicate, passed directly or by its import path, selects from all modules."""
    expected = [name for name, module in NET.named_modules() if hasattr(module, "weight")]
    assert chosen(predicate=predicate) == expected
    assert len(expected) == 11


def test_a_predicate_is_called_only_if_all_else_matches() -> None:
    """A predicate is called once per module, including the root but no lists, and only if all other arguments match."""
    asked: list[tuple[str, nn.Module]] = []

    def note(name: str, module: nn.Module) -> bool:
        asked.append((name, module))
        return True

    Selection(predicate=note).resolve(NET)
    assert [name for name, _ in asked] == [name for name, _ in NET.named_modules() if name not in ("blocks", "heads")]
    assert all(module is NET.get_submodule(name) for name, module in asked)
    asked.clear()
    Selection("**", "Linear", depth=2, predicate=note).resolve(NET)
    assert [name for name, _ in asked] == ["heads.a", "heads.b"]


def test_a_predicate_that_fails_is_named() -> None:
    """An error of a predicate, or of the truth value of its result, is reported with the name of the module."""
    for wrong, cause in ((lambda name, _: 1 / len(name), ZeroDivisionError), (lambda *_: torch.ones(2), RuntimeError)):
        with pytest.raises(
            SelectionError, match=f"^the predicate failed for module '': .*{cause.__name__}: "
        ) as raised:
            chosen(predicate=wrong)
        assert isinstance(raised.value.__cause__, cause)


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        ("no.such.module", r"predicate='no\.such\.module' cannot be imported: ModuleNotFoundError: "),
        (f"{__name__}.absent", r"predicate='.*absent' cannot be imported: AttributeError: "),
        ("not a path", "predicate='not a path' cannot be imported: ValueError: "),
        ("", "predicate='' cannot be imported: ValueError: "),
        (f"{__name__}.NO_PREDICATE", r"predicate takes a function \(name, module\) or its import path, got 3$"),
        (["a"], r"predicate takes a function \(name, module\) or its import path, got \['a'\]$"),
        (lambda name: True, r"predicate takes a .*; the lambda at .*test_selection.py:\d+ takes \(name\)$"),
    ],
)
def test_a_predicate_that_can_never_be_called_is_refused(predicate: Any, message: str) -> None:
    """A predicate whose path cannot be imported or is not callable is rejected at construction."""
    with pytest.raises(ArgumentError, match=f"^{message}"):
        Selection(predicate=predicate)


# Exclusion and combination.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"names": "blocks.**", "types": nn.LayerNorm}, ["blocks.0.norm", "blocks.1.norm"]),
        ({"names": "blocks.**", "types": "Linear", "exclude": "**.attn.**"}, None),
        ({"types": "LayerNorm", "exclude": "blocks.0.**"}, ["blocks.1.norm"]),
        ({"names": "heads", "exclude": "heads.a"}, ["heads.b"]),
        ({"exclude": ["blocks.**", "heads.?"]}, ["embed"]),
        ({"names": "embed", "exclude": "nothing.like.this"}, ["embed"]),
        ({"names": "blocks", "indices": [0, 3]}, ["blocks.0"]),
        ({"indices": 2, "labels": (2, 2)}, ["blocks.1"]),
        ({"names": "**", "depth": 2, "predicate": lambda name, _: name.endswith("b")}, ["heads.b"]),
        ({"types": nn.Module, "depth": [0, 1]}, ["", "embed"]),
        ({"depth": [0, 1], "exclude": ""}, ["embed"]),
    ],
)
def test_what_is_given_must_hold_together(arguments: dict[str, Any], expected: list[str] | None) -> None:
    """A module is selected if a name and a type match and no exclusion does; an exclusion may match nothing."""
    if expected is None:
        expected = [f"blocks.{block}.mlp.{layer}" for block in (0, 1) for layer in (0, 2)]
    assert chosen(**arguments) == expected


def test_excluding_everything_is_an_error() -> None:
    """An exclusion that leaves nothing is an error that has the number of modules selected before it."""
    with pytest.raises(SelectionError) as raised:
        chosen("heads.*", exclude="heads.**")
    assert str(raised.value) == "exclude=['heads.**'] excludes all of the 2 selected modules"


DEPTHS = "'' has 0, 'embed' has 1, 'blocks.0' has 2, 'blocks.0.attn' has 3, 'blocks.0.attn.out_proj' has 4"
FIVE = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("arguments", "start", "end"),
    [
        (
            {"names": "heads", "indices": [1, 3]},
            "indices=[1, 3] excludes all of the 2",
            "'heads.a' has 20, 'heads.b' has 21",
        ),
        (
            {"names": "heads", "labels": (1, 1)},
            "labels=[(1, 1)] excludes all of the 2",
            "'heads.a' has (2, 3), 'heads.b' has (2, 4)",
        ),
        ({"indices": range(16), "depth": 7}, "depth=[7] excludes all of the 15", DEPTHS),
        ({"depth": 9, "types": "Linear"}, "depth=[9] excludes all of the 20", DEPTHS),
        ({"names": "blocks.?.*", "depth": [1, 4]}, "depth=[1, 4] excludes all of the 6", "'blocks.0.attn' has 3"),
        (
            {"names": "blocks.?.mlp.*", "indices": 3},
            "indices=[3] excludes all of the 6",
            ", ".join([*(f"'blocks.{block}.mlp.{layer}' has {8 * block + layer + 8}" for block, layer in FIVE), "..."]),
        ),
        (
            {"names": "heads", "predicate": lambda *_: False},
            "predicate=<lambda> excludes all of the 2",
            "it was called with 'heads.a', 'heads.b'",
        ),
    ],
)
def test_the_argument_that_excludes_everything_is_named(arguments: dict[str, Any], start: str, end: str) -> None:
    """If no module meets all criteria, the error names the argument that left none and the modules before it."""
    with pytest.raises(SelectionError) as raised:
        chosen(**arguments)
    assert str(raised.value) == f"{start} selected modules; {end}"


def test_a_list_without_entries_is_no_choice() -> None:
    """An empty module list has no entries, which is an error like any other."""
    net = nn.Module()
    net.empty, net.full = nn.ModuleList(), nn.ReLU()
    with pytest.raises(SelectionError, match=r"^names=\['empty'\] matches only empty lists and dictionaries$"):
        chosen("empty", module=net)
    with pytest.raises(
        SelectionError, match=r"^indices=\[1\] excludes all of the 2 selected modules; '' has 0, 'full' has 2$"
    ):
        chosen(indices=1, module=net)


# Shared modules.


@pytest.fixture
def shared() -> nn.Module:
    """Build a model in which one layer is registered under two names."""
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
    """A module with two names is selected once, under the first of the selected names."""
    assert chosen(names, module=shared) == expected


@pytest.mark.parametrize("exclude", ["a", "b", ["x", "b"], "?"])
def test_a_shared_module_is_excluded_by_any_of_its_names(shared: nn.Module, exclude: Any) -> None:
    """An exclusion that matches one name of a module excludes it under all names."""
    shared.other = nn.ReLU()
    left = ["other"] if exclude == "?" else ["c", "other"]
    assert chosen(exclude=exclude, module=shared) == left
    assert chosen(["b", "c", "other"], exclude=exclude, module=shared) == left


# Laws.

KINDS = (nn.Module, nn.ModuleList, nn.ReLU, nn.Tanh)


@st.composite
def nets(draw: st.DrawFn) -> nn.Module:
    """Generate a tree of a few modules, some of them lists that are never called, some with several names."""
    modules = [draw(st.sampled_from(KINDS))()]
    for number, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))):
        modules.append(kind())
        modules[draw(st.integers(0, number))].add_module("ab"[number % 2] + str(number), modules[-1])
    for number, pair in enumerate(
        draw(st.lists(st.lists(st.sampled_from(range(len(modules))), min_size=2), max_size=3))
    ):
        above, below = min(pair), max(pair)  # so that no module contains itself
        if above != below:
            modules[above].add_module(f"s{number}", modules[below])
    return modules[0]


def few(entries: Any) -> Any:
    """Generate a few of these, or None."""
    return st.none() | st.lists(st.sampled_from(entries), min_size=1, max_size=3)


def is_list(module: nn.Module) -> bool:
    return type(module) is nn.ModuleList


def ways(net: nn.Module, name: str) -> list[str]:
    """Yield the name and, as long as the parent is a list, the name of the parent."""
    above = name.rpartition(".")[0]
    return [name, *(ways(net, above) if name and is_list(net.get_submodule(above)) else [])]


def is_chosen(net: nn.Module, module: nn.Module, given: dict[str, Any]) -> bool:
    """Return True if a module meets all criteria: a slow independent implementation."""
    every = list(net.modules())
    names = [name for name, each in net.named_modules(remove_duplicate=False) if each is module]
    depths = [0 if each is net else name.count(".") + 1 for name, each in net.named_modules()]
    labels = [(depth, depths[: index + 1].count(depth)) for index, depth in enumerate(depths)]
    meant = [way for name in names for way in ways(net, name)]
    meant_indices = {every.index(net.get_submodule(way)) for way in meant}
    holds = {
        "names": lambda entry: any(way and path_fits(way.split("."), entry.split(".")) for way in meant),
        "indices": lambda entry: entry in meant_indices,
        "labels": lambda entry: any(labels[index] == entry for index in meant_indices),
        "depth": lambda entry: depths[every.index(module)] == entry,
        "types": lambda entry: entry in ("Module", type(module).__name__),
        "exclude": lambda entry: any(name and path_fits(name.split("."), entry.split(".")) for name in names),
        "predicate": lambda entry: entry is module,
    }
    answers = {field: any(map(holds[field], entries)) for field, entries in given.items()}
    excluded = answers.pop("exclude", False)
    if not answers and any(True for _ in module.children()):
        return False
    is_asked_for = module is not net or set(answers) - {"types"}
    return bool(not is_list(module) and not excluded and is_asked_for and all(answers.values()))


@pytest.mark.slow
@settings(max_examples=500)
@given(st.data())
def test_what_is_selected_is_what_everything_holds_for(data: st.DataObject) -> None:
    """For any tree and arguments the selected modules are those that meet every criterion, each once."""
    net = data.draw(nets())
    depths = [name.count(".") + 1 if name else 0 for name, _ in net.named_modules()]
    labels = [(depth, depths[: index + 1].count(depth)) for index, depth in enumerate(depths)]
    globs = st.lists(st.sampled_from(["**", "*", "a*", "b?", "s0", "*0", "?1"]), min_size=1, max_size=3).map(".".join)
    patterns = st.none() | st.lists(globs, min_size=1, max_size=2)
    drawn = {
        "names": data.draw(patterns),
        "types": data.draw(few(["ReLU", "Tanh", "Module"])),
        "exclude": data.draw(patterns),
        "indices": data.draw(few(range(len(depths)))),
        "labels": data.draw(few(labels)),
        "depth": data.draw(few([0, 1, 2, 3])),
        "predicate": data.draw(few(list(net.modules()))),
    }
    given = {field: entries for field, entries in drawn.items() if entries is not None}
    arguments = {
        **given,
        "predicate": (lambda _, module: module in given["predicate"]) if "predicate" in given else None,
    }
    expected = {each for each in net.modules() if is_chosen(net, each, given)}
    names = [name.split(".") for name, _ in net.named_modules(remove_duplicate=False) if name]
    is_wrong = not all(any(path_fits(name, glob.split(".")) for name in names) for glob in given.get("names", []))
    try:
        resolved = Selection(**arguments).resolve(net)
    except SelectionError:
        assert is_wrong or not expected
        return
    assert not is_wrong
    assert set(resolved.values()) == expected
    assert len(resolved) == len(expected)
    assert all(net.get_submodule(name) is each for name, each in resolved.items())
    assert expected or not set(given) - {"exclude"}


# Results.


def test_the_order_is_that_of_the_model() -> None:
    """Modules are returned in the order of named_modules(), regardless of the order of the patterns."""
    resolved = Selection(["heads.b", "blocks.1.norm", "embed"]).resolve(NET)
    assert list(resolved) == ["embed", "blocks.1.norm", "heads.b"]
    assert all(module is NET.get_submodule(name) for name, module in resolved.items())


def test_what_is_selected_can_be_printed() -> None:
    """The text has the number of modules and lists the selected ones with class, arguments and other names."""

    class Verbose(nn.Module):
        def extra_repr(self) -> str:
            return "first=1,\nsecond=2"

    up = nn.Linear(2, 3)
    net = nn.Sequential(OrderedDict(up=up, block=nn.Sequential(OrderedDict(up=up)), odd=Verbose(), down=up))
    lines = {
        "up": "Linear(in_features=2, out_features=3, bias=True), also block.up, down",
        "down": "Linear(in_features=2, out_features=3, bias=True), also up, block.up",
        "block": "Sequential",
        "odd": "Verbose(first=1, second=2)",
    }
    for names in (["up", "block", "odd"], ["block", "odd", "down"]):
        text = "".join(f"\n  {name:5}  {lines[name]}" for name in names)
        assert str(Selection(names).resolve(net)) == f"3 of 4 modules:{text}"
    assert str(Selection(depth=0).resolve(net)) == "1 of 4 modules:\n  (root)  Sequential"


def test_what_is_selected_is_a_dictionary() -> None:
    """A result equals and prints like a plain dictionary; a copy and a reduced one can be printed too."""
    resolved = Selection("heads").resolve(NET)
    assert resolved == {"heads.a": NET.heads["a"], "heads.b": NET.heads["b"]}
    assert repr(resolved) == repr(dict(resolved))
    for other in (copy.deepcopy(resolved), pickle.loads(pickle.dumps(resolved))):
        assert type(other) is SelectedModules
        assert str(other) == str(resolved)
    del resolved["heads.a"]
    assert str(resolved) == "1 of 22 modules:\n  heads.b  Linear(in_features=4, out_features=3, bias=True)"


def test_the_work_grows_with_the_number_of_modules() -> None:
    """The number of function calls grows linearly with the number of modules and names, not quadratically."""
    net = nn.Sequential(*(nn.Sequential(*(nn.ReLU() for _ in range(99))) for _ in range(50)))
    names = [name for name, _ in net.named_modules() if name]
    selection = Selection(names, "ReLU", "0.*", range(5001), predicate=lambda *_: True)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    resolved = profiled(lambda: selection.resolve(net), count)
    assert len(resolved) == 49 * 99
    assert calls < 200 * len(names)


# Names of wrapped modules.


@pytest.mark.parametrize("wrap", ["torch.compile", "checkpoint_wrapper", "both"])
def test_a_wrapper_changes_no_name(wrap: str) -> None:
    """A compiled or checkpointed part keeps its names in the user's code, and the part itself is selected."""
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
    assert Selection(indices=3, labels=(2, 1), depth=2).resolve(net) == {"blocks.0": block}
    assert chosen(types="Linear", module=net) == ["stem", "blocks.0.0"]
    assert chosen(types=nn.Sequential, module=net) == ["blocks.0"]


# Errors.

LABELS = "labels takes pairs (depth, idx) of a depth of at least 0 and a position of at least 1"


@pytest.mark.parametrize("names", ["embd", ["embed", "embd"], ["**", "embd"]])
def test_every_single_pattern_must_match(names: object) -> None:
    """A pattern that matches nothing is an error even if others match; the message has the closest names."""
    with pytest.raises(SelectionError, match=r"^no module matches 'embd'; the closest name is 'embed'$") as raised:
        chosen(names)
    assert isinstance(raised.value, ValueError)


def test_the_closest_names_share_a_segment() -> None:
    """For a wrong parent, at most three names with the same last segment are suggested."""
    with pytest.raises(SelectionError) as raised:
        chosen("encoder.stages.0.norm")
    assert re.findall(r"'([^']*)'", str(raised.value))[1:] == ["blocks.0.norm", "blocks.1.norm"]


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("block.**", "blocks.**"),
        ("block.*.norm", "blocks.*.norm"),
        ("blocks.*.nrom", "blocks.*.norm"),
        ("Blocks.?.Norm", "blocks.?.norm"),
        ("**.nrom", "**.norm"),
        ("*.blocks.*", "blocks.*"),
        ("model.blocks.**", "blocks.**"),
        ("model.block.**", "blocks.**"),
        ("blocks[*].norm", "blocks.*.norm"),
        ("blocks/*/norm", "blocks.*.norm"),
    ],
)
def test_a_suggestion_keeps_the_glob(pattern: str, meant: str) -> None:
    """A misspelled segment of a glob is corrected in place, and the suggestion matches a module."""
    with pytest.raises(SelectionError, match=re.escape(f"no module matches {pattern!r}; did you mean {meant!r}?")):
        chosen(pattern)
    assert chosen(meant)


def test_a_glob_without_its_beginning_gets_one() -> None:
    """A glob that would match below a module is suggested with a prefix for that module."""
    net = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})})
    with pytest.raises(SelectionError, match=r"did you mean '\*\*\.layers\.\*'\?"):
        chosen("layers.*", module=net)


def test_a_glob_that_resembles_nothing_gets_no_suggestion() -> None:
    """Without a similar segment no glob and no name is suggested; the first names say how they look."""
    message = r"^no module matches 'qqq\.\*'; no name is similar; the names are 'embed', 'blocks', 'blocks.0', …$"
    with pytest.raises(SelectionError, match=message):
        chosen("qqq.*")


def test_a_mistyped_type_beside_a_right_one_is_refused() -> None:
    """A misspelled class name of the model is an error; the name of another model's class is not."""
    with pytest.raises(SelectionError, match=r"is a Linar; the model has .*: did you mean 'Linear'\?$"):
        chosen(types=["LayerNorm", "Linar"])
    assert chosen(types=["LayerNorm", "Conv2d", "MyLayer"]) == chosen(types="LayerNorm")


def test_a_model_without_submodules_says_so() -> None:
    """If there is no name to suggest, the message says so."""
    with pytest.raises(SelectionError, match=r"^no module matches 'x'; the model has no submodules$"):
        chosen("x", module=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Selection(3), "names takes module names or globs, got 3"),  # type: ignore[arg-type]
        (lambda: Selection(["a", 3]), "names takes module names or globs, got 3"),  # type: ignore[list-item]
        (lambda: Selection(b"a"), "names takes module names or globs, got 97"),  # type: ignore[arg-type]
        (lambda: Selection(nn.Linear), "names takes module names or globs, got the class Linear: write types='Linear'"),  # type: ignore[arg-type]
        (lambda: Selection(nn.Sequential()), "names takes module names or globs, got the module Sequential itself: wr"),  # type: ignore[arg-type]
        (lambda: Selection([nn.ReLU()]), "names takes module names or globs, got the module ReLU itself: write its na"),  # type: ignore[list-item]
        (lambda: Selection(exclude=[None]), "exclude takes module names or globs, got None"),  # type: ignore[list-item]
        (lambda: Selection(indices=-1), "indices takes integers of at least 0, got -1"),
        (lambda: Selection(indices=[0, True]), "indices takes integers of at least 0, got True"),
        (lambda: Selection(indices="3"), "indices takes integers of at least 0, got '3'"),  # type: ignore[arg-type]
        (lambda: Selection(depth=1.0), "depth takes integers of at least 0, got 1.0"),  # type: ignore[arg-type]
        (lambda: Selection(labels=3), f"{LABELS}, got 3"),  # type: ignore[arg-type]
        (lambda: Selection(labels=[1, 2, 3]), f"{LABELS}, got (1, 2, 3)"),
        (lambda: Selection(labels=[1, 0]), f"{LABELS}, got (1, 0)"),
        (lambda: Selection(labels=[[1, 1], [-1, 1]]), f"{LABELS}, got (-1, 1)"),
        (lambda: Selection(labels=[[1, 1], 2]), f"{LABELS}, got 2"),  # type: ignore[arg-type]
        (lambda: Selection(labels=(True, 1)), f"{LABELS}, got (True, 1)"),
        (lambda: Selection(labels=["ab"]), f"{LABELS}, got ('ab',)"),  # type: ignore[arg-type]
        (lambda: Selection(types=int), "types takes subclasses of torch.nn.Module or their names, got <class 'int'>"),  # type: ignore[arg-type]
        (
            lambda: Selection(types=[nn.ReLU()]),  # type: ignore[list-item]
            "types takes subclasses of torch.nn.Module or their names, got a module: write types='ReLU'",
        ),
    ],
)
def test_a_wrong_type_of_argument_is_refused_at_construction(make: Callable[[], Selection], message: str) -> None:
    """An entry that is not a string, or not a module class where classes are expected, is rejected."""
    with pytest.raises(ArgumentError) as raised:
        make()
    assert str(raised.value).startswith(message)


# Selections as values.


def test_equal_selections_are_equal() -> None:
    """A string, a list of it and a generator of it give selections that compare and hash equal."""
    once = Selection("a", nn.Linear, "b")
    same = [once, Selection(["a"], (nn.Linear,), ["b"]), Selection((name for name in "a"), [nn.Linear], "b")]
    assert [each == once for each in same] == [True, True, True]
    assert len(set(same)) == 1
    assert Selection("a") != Selection("b")
    places = [Selection(indices=3, labels=(1, 2), depth=1), Selection(indices=[3], labels=[[1, 2]], depth=range(1, 2))]
    assert len({*places}) == 1
    assert Selection(predicate=has_weight) == Selection(predicate=f"{__name__}.has_weight")


def test_a_file_can_say_everything() -> None:
    """Strings, integers and lists of them, as in YAML or JSON, are sufficient for every argument."""
    logged = '{"names": ["**"], "types": ["Linear"], "exclude": ["heads.a"], "indices": [10, 20, 21]}'
    assert chosen(**json.loads(logged)) == ["blocks.0.mlp.2", "heads.b"]
    logged = '{"labels": [[1, 1], [2, 3], [2, 4]], "depth": [2, 3], "predicate": "tests.test_selection.has_weight"}'
    assert chosen(**json.loads(logged)) == ["heads.a", "heads.b"]


def test_a_generator_can_be_resolved_again() -> None:
    """Patterns from a generator are stored, so that a second model can be resolved."""
    selection = Selection(name for name in ("a", "b"))
    assert [list(selection.resolve(grow("a", "b"))) for _ in range(2)] == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Lender(), ["layers[0]", "layers[1]", "layers[2].layers[0]", "layers[2].layers[0].act"]),
        (Lender(trains=False), []),
        (Lender(teacher=nn.Linear(1, 1)), []),
    ],
)
def test_modules_whose_parameters_are_registered_elsewhere(model: nn.Module, names: list[str]) -> None:
    """Layers in a list are modules of the model if it trains their parameters; a teacher in the list hides them."""
    assert [name for name in default_modules(model) if "[" in name and not name.endswith("layers[2]")] == names
    assert not any("[" in name for name in named_submodules(model))
