"""The text that renderers show for nodes, edges and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_recorder.graph.model import IN_PLACE, RECOMPUTED, VMAPPED, Edge, Graph, Node
from lightning_recorder.graph.views.constants import UPDATE, UPDATED
from lightning_recorder.graph.views.dilations import dilations_in
from lightning_recorder.graph.views.forms import parameter_counts

__all__ = [
    "caption",
    "class_and_size",
    "full_name",
    "in_bracket",
    "is_needless",
    "own_name",
    "repetition",
    "same_weights",
    "short_count",
    "short_name",
    "shown_across",
    "shown_class",
    "shown_dilations",
    "shown_part",
    "shown_shapes",
    "shown_times",
    "size",
    "tied_to",
    "times",
    "title",
    "unused",
    "with_all_times",
]

_MOST_MODULES = 4  # the maximum number of modules that the node of an update lists
_LONGEST_NAME = 60  # maximum number of characters
_MOST_SHAPES = 2
_MOST_DILATIONS, _MOST_UNSORTED = 4, 12


def title(graph: Graph) -> str:
    """Return the model's class, the recorded method, and the numbers of all and of used parameters."""
    size = f" · {_counts(graph.parameters, graph.root.used_parameters)}" if graph.parameters else ""
    failed = " · it raised" if graph.root.failed else ""
    return f"{graph.title}.{graph.scope}{size}{failed}".removeprefix(".")


def caption(graph: Graph) -> str:
    """Return a caption that counts hidden nodes, such as ``not shown: 12 shape functions``; empty if there are none."""
    return f"not shown: {', '.join(graph.left_out)}" if graph.left_out else ""


def short_name(node: Node, graph: Graph) -> str:
    """Return a node's name relative to the call around it, with the call number; empty for a frame of repeated nodes.

    A name of more than 60 characters is shortened in the middle, since names usually differ at the beginning or the
    end. The call number is left out if it follows from the call around the node: that call has the same number and
    calls the module only once.
    """
    name = own_name(node, graph)
    return _shortened(name) if _follows_around(node, graph) else _with_call(name, node)


def _follows_around(node: Node, graph: Graph) -> bool:
    """Return True if a second or later call has the number of the call around it, which calls the module only once."""
    around = next((each for each in graph.ancestors(node) if each.name), graph.root)
    if node.call == 1 or node.call != around.call:
        return False
    return sum(each.name == node.name for each in graph.children(graph[node.parent or graph.root.id])) == 1


def full_name(node: Node) -> str:
    """Return the dotted name with the call number. A long name is shortened as in :func:`short_name`."""
    return _with_call(node.name, node)


def _with_call(name: str, node: Node) -> str:
    return _shortened(name) + (f" (call {node.call})" if node.call > 1 else "")


def _shortened(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME // 2]}…{name[-_LONGEST_NAME // 2 :]}"


def own_name(node: Node, graph: Graph) -> str:
    """Return a node's name relative to the call around it; empty for a frame of repeated nodes, which has no name.

    If the surrounding call's module does not contain the module or tensor, the full dotted name is returned. A direct
    child of the model is then prefixed with the model's class. Otherwise it would look like a child of the surrounding
    module.
    """
    name = node.name or ("" if node.kind == "module" else node.kind)
    if node.kind in ("module", "parameter", "buffer"):
        around = next((call.name for call in graph.ancestors(node) if call.name), "")
        is_own = not around or name.startswith(f"{around}.")
        is_registered = name.partition("#")[0] != node.type_name  # unregistered modules are named by their class
        if not is_own and name and "." not in name and graph.root.type_name and is_registered:
            return f"{graph.root.type_name}.{name}"
        return name.removeprefix(f"{around}.") if around else name
    return name


def class_and_size(node: Node) -> str:
    """Return a module's class with the number of its parameters; see :func:`size`.

    For a function, only the number of parameters is returned, if it has any. The class is left out if it equals the
    name of the module. A call that only writes to one of its inputs is marked with ``in place``.
    """
    mark = node.note if node.kind == "module" and node.note == IN_PLACE else ""
    return " · ".join(part for part in (shown_class(node), size(node), mark) if part)


def shown_class(node: Node) -> str:
    """Return the class of a module, or "" if the class equals the name of the module."""
    return "" if node.type_name == node.name.partition("#")[0].rpartition(".")[2] else node.type_name


def size(node: Node) -> str:
    """Return the number of parameters of a module and its submodules, with the number of used ones if some are unused.

    For a folded call of modules with different numbers, the smallest and the largest number are returned.
    ``the same each time`` is added if all repetitions of an enclosing folded node have the same parameters. The text is
    empty if there are no parameters.
    """
    least, *most = parameter_counts(node)
    if most:
        return f"{short_count(least)}…{short_count(most[0])} parameters"
    again = ", the same each time" if node.shared and node.repeats == 1 else ""
    return _counts(least, node.used_parameters) + again if least else ""


def _counts(total: int, used: int | None) -> str:
    known = f"{short_count(total)} parameter{'s' * (total != 1)}"
    if used is None or used == total:
        return known
    # If the total and the used number look equal after rounding, show the number of unused parameters instead.
    few = short_count(used) == short_count(total)
    return f"{known}, {short_count(total - used)} unused" if few else f"{known}, {short_count(used)} used"


def repetition(node: Node, graph: Graph) -> str:
    """Return ``recomputed`` or ``vmapped ×3`` for a call, unless the call around it has the same note."""
    around = "" if node.parent is None else graph[node.parent].note
    return node.note if node.note.startswith((RECOMPUTED, VMAPPED)) and node.note != around else ""


def in_bracket(node: Node, graph: Graph) -> bool:
    """Return True if a recomputed or vmapped node has a neighbor with the same note, so that one frame marks both."""
    beside = graph.children(graph[node.parent]) if node.parent is not None else []
    at = beside.index(node) if node in beside else 0
    return bool(repetition(node, graph)) and any(
        each.note == node.note for each in (*beside[max(0, at - 1) : at], *beside[at + 1 : at + 2])
    )


def same_weights(node: Node, graph: Graph) -> str:
    """Return ``same weights as call 1`` for a later call of a module, unless the call around it implies that."""
    known = node.kind == "module" and node.call > 1 and not _follows_around(node, graph)
    return "same weights as call 1" if known and (node.total_parameters or node.parameters) else ""


def unused(node: Node, graph: Graph) -> str:
    """Return ``not used for the loss`` or ``not used for the output`` for a call with an unused result, else "".

    For a call that represents several modules, some of which got no gradient, the text names the first of these.
    """
    if node.kind != "module" or graph.children(node):
        return ""
    kinds = {each.kind for each in graph.nodes} & {"backward", "output"}
    text = f"not used for the {'loss' if 'backward' in kinds else 'output'}"
    if kinds and node.outputs and not graph.out_of(node):
        return text
    idle = _without_gradient(node, graph) if kinds and node.members else []
    if not idle or len(idle) == len(node.members):
        return ""
    around = next((call.name for call in graph.ancestors(node) if idle[0].startswith(f"{call.name}.")), "")
    more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
    return f"{_shortened(idle[0].removeprefix(f'{around}.'))}{more}: {text}"


def _without_gradient(node: Node, graph: Graph) -> list[str]:
    """Return the names of the modules of a folded call whose parameters got no gradient."""
    names = {each for name in graph.unused.parameters for each in (name, name.rpartition(".")[0])}
    return [name for name in node.members if name in names]


def tied_to(node: Node) -> str:
    """Return the names of the tensors that a node shares with other modules; empty if there are none."""
    if not node.tied:
        return ""
    names, most = (_outermost(node.tied), _MOST_MODULES) if node.note.endswith((UPDATE, UPDATED)) else (node.tied, 1)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (
        f"{'uses' if node.kind in ('op', 'backward') else 'tied to'} {', '.join(map(_shortened, names[:most]))}{more}"
    )


def _outermost(names: Sequence[str]) -> list[str]:
    """Return the outermost modules, or tensors, that differ in the names of tensors."""
    parts = [name.split(".") for name in names]
    same = next(
        (at for at, each in enumerate(zip(*parts, strict=False)) if len(set(each)) > 1), len(min(parts, key=len))
    )
    return [*dict.fromkeys(".".join(each[: same + 1]) for each in parts)]


def shown_shapes(node: Node) -> str:
    """Return the shapes of the first two output tensors of a node."""
    more = ", …" if len(node.outputs) > _MOST_SHAPES else ""
    return ", ".join(map(str, node.outputs[:_MOST_SHAPES])) + more


def shown_times(node: Node) -> str:
    """Return the number of occurrences of a folded node, such as ``×12, same weights``; empty if it occurs once."""
    if node.repeats == 1:
        return ""
    return f"×{node.repeats}" + " side by side" * node.parallel + ", same weights" * node.shared


def is_needless(call: Node, graph: Graph) -> bool:
    """Return True for an unnamed frame that holds a single function and represents several parallel repetitions."""
    inside = graph.children(call)
    alone = inside[0] if len(inside) == 1 and inside[0].kind == "op" else None
    return alone is not None and call.parallel and not call.name and (alone.parallel or alone.repeats == 1)


def with_all_times(node: Node, graph: Graph) -> Node:
    """Return a function with the repetitions of the needless frame around it, or the node itself."""
    around = graph[node.parent] if node.parent is not None else graph.root
    if not is_needless(around, graph):
        return node
    return replace(node, repeats=node.repeats * around.repeats, parallel=True)


def shown_dilations(node: Node, graph: Graph) -> str:
    """Return the dilations of folded blocks, such as ``dilation 1, 2, …, 32``; empty if a call around lists them."""
    values = dilations_in(node.arguments)
    if not values or any(dilations_in(around.arguments) for around in graph.ancestors(node)):
        return ""
    # The dilations often repeat, as in a WaveNet.
    again = next(each for each in range(len(values), 0, -1) if values == values[: len(values) // each] * each)
    values = values[: len(values) // again]
    most = _MOST_DILATIONS if values == sorted(values, key=_number) else _MOST_UNSORTED
    shown = [*values[:3], "…", values[-1]] if len(values) > most else values
    return f"dilation {', '.join(shown)}" + (f", {again} times" if again > 1 else "")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def shown_across(edge: Edge, graph: Graph) -> str:
    """Return the relation of an edge to the repetitions of folded nodes, such as ``next``; empty if there is none.

    If several folded nodes are nested, the text names the folded node of the relation, as in ``next of ×5``.
    """
    words: dict[int, list[str]] = {}
    for group, word in edge.across:
        words.setdefault(group, []).append(word)
    shown: dict[str, None] = {}
    for group, each in words.items():
        if each != ["same"]:
            shown[_relation(each) + _which(group, each, edge, graph)] = None
    onward = [each for each in shown if each.startswith("next")]
    return onward[0] if onward else ", ".join(shown)


def _relation(words: list[str]) -> str:
    """Return the relation to the repetitions of one node: ``second`` for the words ``first`` and ``next``."""
    later = words.count("next")
    if "first" in words:
        return ("first", "second", "third", "fourth")[later] if later < 4 else f"number {later + 1}"
    return f"next, {later} on" if later > 1 else words[0]


def _which(group: int, words: list[str], edge: Edge, graph: Graph) -> str:
    """Return the folded node that the words refer to, as in `` of ×5``, or "" if only one node is possible."""
    goals, sources = (
        {node.id: node.repeats for node in (graph[end], *graph.ancestors(graph[end])) if node.repeats > 1}
        for end in (edge.target, edge.source)
    )
    # The possible nodes depend on the word. For "next": the folded nodes around both ends. For "all": the folded nodes
    # around the source only. For other words: the folded nodes around the target only.
    one, other = (sources, goals) if "all" in words else (goals, sources)
    onward = words[0] == "next"
    possible = [node for node in one if (node in other) == onward]
    alone = not onward and all((node, words[0]) in edge.across for node in possible)
    if alone or "each" in words or group not in possible or len(possible) == 1:
        return ""
    alike = [one[node] for node in possible].count(one[group]) > 1
    outer = " outer" if group == possible[-1] else " inner"
    return f" of{outer if alike else ''} ×{one[group]}"


def shown_part(edge: Edge, graph: Graph) -> str:
    """Return the part of a tensor that an edge takes, such as ``2`` of a ``chunk``; empty if all edges are equal."""
    return edge.part if any(each.part != edge.part for each in graph.out_of(graph[edge.source])) else ""


def times(edge: Edge, graph: Graph) -> int:
    """Return the number of tensors that an edge represents in one repetition of the folded calls around it.

    If a call occurs twelve times but is shown once, twelve recorded edges count as one.
    """
    return max(edge.multiplicity // graph.occurrences(edge), 1)


def short_count(number: int) -> str:
    """Format a number with at most four digits, such as ``1.23 M``."""
    for unit, size, least in (("G", 10**9, 0), ("M", 10**6, 0), ("k", 10**3, 10**4)):
        shown = f"{number / size:.3g}"
        # Compare the rounded number, since a number slightly below the unit rounds up to it.
        if float(shown) >= 1 and number >= least:
            return f"{shown} {unit}"
    return str(number)
