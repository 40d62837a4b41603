"""Views with a limited number of nodes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Set
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from lightning_recorder.errors import check_integer
from lightning_recorder.graph.model import Graph, Kind, Node
from lightning_recorder.graph.views.collapse import collapse
from lightning_recorder.graph.views.constants import drop_numbers, join_constants, join_updates
from lightning_recorder.graph.views.dense import close_dense
from lightning_recorder.graph.views.dilations import with_dilations
from lightning_recorder.graph.views.drop import (
    drop_caches,
    drop_dead_ends,
    drop_empty_calls,
    drop_isolated,
    drop_zeros,
    hide,
    join_sums,
    with_differences,
    without,
)
from lightning_recorder.graph.views.fold import contents_of, fold_by_forms
from lightning_recorder.graph.views.gather import gather
from lightning_recorder.graph.views.own_tensors import own_tensors, with_copies
from lightning_recorder.graph.views.rebuild import rebuilt
from lightning_recorder.graph.views.sides import longest, sides

__all__ = ["drawn_nodes", "fit_view", "truncate", "view_at_depth"]

# The maximum number of closed calls to try to open as examples, and the maximum size of a graph for these trials.
_MOST_TRIALS, _MOST_OPENED = 8, 4000
_MOST_LETTERS = 50  # the maximum length of the names of unused inputs in the caption
_FEW_BRANCHES = 12  # branches that a view of any size may have
_BRANCHES = 0.25  # the largest number of branches of a clear view, as a share of ``max_nodes``
_LONGEST_SIDE = 22  # maximum number of nodes on a path inside one side of a U-Net
_MODEL_TENSORS: tuple[Kind, ...] = ("parameter", "buffer")


def fit_view(
    graph: Graph,
    max_nodes: int = 150,
    depth: int | None = None,
    *,
    fold: bool = True,
    leaves: bool = True,
    parameters: bool | None = None,
    shapes: bool = False,
    all: bool = False,  # noqa: A002 - the word that users expect
) -> Graph:
    """Return the most detailed view with a limited number of nodes.

    Isolated tensors, the parameters and buffers of closed calls, functions that compute nothing (:data:`PLUMBING`), and
    functions whose results reach neither an output nor the loss are removed. So are functions that compute one number
    only from numbers, and the keys and values that are returned for a later call. Four or more functions that compute a
    constant or update tensors become one node, so do the additions of a sum of five or more tensors, and repeated
    blocks are folded. Then the greatest depth at which the view fits is used.

    Four rules apply without ``depth``. The view has at most a quarter of ``max_nodes`` more edges than nodes, or twelve
    more, if such a view exists, so that a reader can follow its branches. A block of five or more parts is closed if
    nearly each part takes the results of all parts before it. A module with more than 80 functions and less than half
    of the parameters is closed. A module with more than half of the parameters is opened further as long as the view
    fits.

    If the view has less than half of ``max_nodes``, the first closed block of each kind is opened as an example,
    together with equal blocks. With its examples, the view has at most two thirds of ``max_nodes``. If not even the
    smallest view fits, a parameter or buffer that two loops use is drawn in both loops. :attr:`Graph.left_out` counts
    the functions that were removed, and names the inputs that nothing uses.

    Args:
        graph: A recorded graph.
        max_nodes: The maximum number of nodes in the view.
        depth: The depth to start from; ``None`` uses the greatest depth that fits.
        fold: Draw equal siblings once, with their number.
        leaves: Draw a module that calls no other module as one node; otherwise its functions are shown.
        parameters: Show the parameters and buffers of open calls: all (True) or none (False). By default, only modules
            that call other modules show theirs. True also shows unused results, since they may update a buffer.
        shapes: Show the functions that only change shapes.
        all: Show the functions that only change shapes, the functions whose results reach neither an output nor the
            loss, and each function that computes a constant, a number or a part of a sum.

    Raises:
        ArgumentError: If ``max_nodes`` or ``depth`` is below 1.
    """
    check_integer("max_nodes", max_nodes, 1)
    if depth is not None:
        check_integer("depth", depth, 1)
    # Without ``leaves``, start one level deeper, since the deepest calls show their functions only there.
    deepest = max((node.depth for node in graph.module_calls()), default=1) + (not leaves)
    whole = with_dilations(gather(graph))
    contents: _Contents = {}

    def folded(view: Graph) -> Graph:
        return _folded(view, whole, contents) if fold else drop_empty_calls(drop_isolated(view))

    def fitting(level: int, opened: Set[int] = frozenset()) -> tuple[Graph, bool]:
        closed = _closed(whole, level, leaves, parameters, opened)
        closed = closed if all or depth is not None else close_dense(closed)
        view = _essential(closed, folded, shapes=shapes or all, dead=all or parameters is True, constants=all)
        return view, len(drawn_nodes(view)) <= max_nodes and (depth is not None or _is_clear(view, max_nodes))

    tangled: tuple[Graph, int] | None = None  # the deepest view with enough room for its nodes, but too many branches
    deeper: tuple[Node, ...] = ()  # the nodes of the view at the next depth, which did not fit
    for level in range(depth or deepest, 0, -1):
        view, fits = fitting(level)
        if fits:
            break
        if tangled is None and len(drawn_nodes(view)) <= max_nodes:
            tangled = view, level
        deeper = view.nodes
    if not fits and tangled is not None:
        view, level = tangled
    elif not fits:
        copied = with_copies(graph) if fold else graph
        if copied is not graph:
            more: dict[str, Any] = {"leaves": leaves, "parameters": parameters, "shapes": shapes, "all": all}
            return fit_view(copied, max_nodes, depth, fold=fold, **more)
        return truncate(view, max_nodes)
    opened = frozenset[int]()
    while depth is None and fits and (largest := _largest(whole, level, opened)):
        if sum(node.parent in largest for node in deeper) > max_nodes:
            break
        opened |= largest
        further, fits = fitting(level, opened)
        view = further if fits else view
    if depth is None and not all and fits and (found := sides(view)):
        # Close blocks of a U-Net until its two sides are short enough to be drawn beside each other.
        for shallower in range(level, 0, -1):
            closed, _ = fitting(shallower)
            both = sides(closed)
            if both is None or len(both[1]) < len(found[1]):
                break
            view, level, opened = closed, shallower, frozenset()
            if longest(view, both[0]) <= _LONGEST_SIDE:
                break
    if depth is None and fits and len(graph.nodes) <= _MOST_OPENED:
        view = _with_examples(view, whole, max_nodes, lambda more: fitting(level, opened | more))
    return view


def _is_clear(view: Graph, max_nodes: int) -> bool:
    """Return True if a reader can follow the branches of a view: the edges that a chain of its nodes would not have."""
    return len(view.edges) - len(drawn_nodes(view)) <= max(_FEW_BRANCHES, _BRANCHES * max_nodes)


def _with_examples(
    view: Graph, whole: Graph, max_nodes: int, fitting: Callable[[Set[int]], tuple[Graph, bool]]
) -> Graph:
    """Open one closed call of each kind as an example, if the view has less than half of ``max_nodes``.

    An example is opened only if the view then has at most two thirds of ``max_nodes``.

    Args:
        view: The view.
        whole: The graph that the view was made from.
        max_nodes: The largest number of nodes.
        fitting: A function that returns the view with further open calls, and True if this view fits.
    """
    opened, refused = frozenset[int](), set[str]()
    held: dict[int, int] = {}
    for _ in range(_MOST_TRIALS if 2 * len(drawn_nodes(view)) < max_nodes else 0):
        call = _closed_kind(view, whole, refused)
        if call is None:
            break
        refused.add(_kind(call))
        held = held or contents_of(whole)
        example = frozenset(each.id for each in whole.module_calls() if held[each.id] == held[call.id])
        further, fits = fitting(opened | example)
        both = sides(view)
        beside = sides(further) if both else None
        fits = fits and (not both or (beside is not None and longest(further, beside[0]) <= _LONGEST_SIDE))
        if fits and 3 * len(drawn_nodes(further)) <= 2 * max_nodes:
            view, opened = further, opened | example
    return view


def _closed_kind(view: Graph, whole: Graph, refused: Set[str]) -> Node | None:
    """Return the first closed call whose kind has no open call in the view and was not refused."""
    parents = {node.parent for node in view.nodes}
    known = refused | {_kind(call) for call in view.module_calls() if call.id in parents}
    outer = {call.parent for call in whole.module_calls()}
    closed = (call for call in view.module_calls() if call.id not in parents and call.id in outer)
    return next((call for call in closed if _kind(call) not in known), None)


def _kind(call: Node) -> str:
    """Return the kind of a call: its class and its name without numbers, which are equal for the blocks of a list."""
    return f"{call.type_name} {re.sub('[0-9]+', '#', call.name)}"


def _largest(graph: Graph, level: int, opened: Set[int]) -> set[int]:
    """Return the closed calls of the module with more than half of the parameters; empty if there is none.

    If several such modules are nested, only the outermost one is returned, because the inner ones are not shown.
    """
    outer = {call.parent for call in graph.module_calls()}
    return {
        call.id
        for call in graph.module_calls()
        if call.id not in opened
        and call.id in outer
        and (call.depth == level or call.parent in opened)
        and 2 * call.total_parameters > graph.parameters
    }


def view_at_depth(
    graph: Graph,
    depth: int | None,
    *,
    fold: bool = True,
    leaves: bool = True,
    parameters: bool | None = None,
    shapes: bool = False,
    all: bool = False,  # noqa: A002 - as for fit_view
) -> Graph:
    """Return the view of :func:`fit_view` with calls closed at a depth, without a limit on the number of nodes."""
    whole = with_dilations(gather(graph) if fold else graph)

    def folded(view: Graph) -> Graph:
        return _folded(view, whole, {}) if fold else drop_isolated(view)

    closed = _closed(whole, depth, leaves, parameters)
    return _essential(closed, folded, shapes=shapes or all, dead=all or parameters is True, constants=all)


def _essential(graph: Graph, folded: Callable[[Graph], Graph], *, shapes: bool, dead: bool, constants: bool) -> Graph:
    """Return a folded view without shape functions and unused results. :attr:`Graph.left_out` counts what was removed.

    Args:
        graph: A view that is not folded.
        folded: A function that folds a view.
        shapes: Show the functions that only change shapes.
        dead: Show the functions whose results reach neither an output nor the loss, and the keys and values for a
            later call.
        constants: Show each function that computes a constant, instead of joining several of them.
    """
    whole, graph = graph, graph if dead else drop_caches(graph)
    shown = graph if shapes else hide(graph)
    used = shown if dead else drop_dead_ends(shown)

    def joined(view: Graph) -> Graph:
        if constants:
            return folded(view)
        view = folded(join_constants(join_updates(with_differences(view if dead else drop_numbers(view)))))
        summed = join_sums(view)
        return view if summed is view else folded(summed)

    view = joined(used)
    # Functions without edges are not counted as unused: they only update a hidden buffer, such as a batch count.
    removed = len({edge.target for edge in shown.edges} - {node.id for node in used.nodes})
    if removed:
        # A function may be unused only in the last repetition, which then would not fold with the others. So also try
        # to fold before removing unused functions, and keep the smaller view.
        complete = joined(shown)
        other = drop_empty_calls(drop_dead_ends(complete))
        if len(drawn_nodes(other)) < len(drawn_nodes(view)):
            kept = {node.id for node in other.nodes}
            gone = (node for node in complete.nodes if node.id not in kept and node.kind == "op")
            removed = min(removed, sum(_number(node, complete) for node in gone))
            view = other
    numbers = 0 if dead else len(used.nodes) - len(drop_numbers(used).nodes)
    with_zeros, view = view, view if dead else drop_zeros(view)
    counts = {"shape function": len(graph.nodes) - len(shown.nodes), "unused result": removed}
    cached = sum(len(node.outputs) for node in whole.nodes) - sum(len(node.outputs) for node in graph.nodes)
    counts |= {
        "cached tensor": cached,
        "constant number": numbers,
        "zero addition": len(with_zeros.nodes) - len(view.nodes),
    }
    left_out = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items() if n]
    idle = [node.name for node in graph.nodes if node.kind == "input" and not used.out_of(node)]
    names = ", ".join(idle)
    named = f" ({names})" if len(names) <= _MOST_LETTERS else ""
    left_out += [f"{len(idle)} unused input{'s' * (len(idle) > 1)}{named}"] if idle else []
    return replace(view, left_out=tuple(left_out))


def _number(node: Node, graph: Graph) -> int:
    """Return the number of nodes that a node of a folded view represents."""
    return math.prod(each.repeats for each in (node, *graph.ancestors(node)))


def _closed(
    graph: Graph, depth: int | None, leaves: bool, parameters: bool | None, opened: Set[int] = frozenset()
) -> Graph:
    """Return the graph with closed calls and the requested parameters and buffers."""
    if parameters is None:
        graph = own_tensors(graph, depth, opened)
    graph = graph if parameters is not False else without(graph, _MODEL_TENSORS)
    return collapse(graph, depth, leaves=leaves, opened=opened)


_Contents = dict[frozenset[int], dict[int, int]]
"""Maps the set of shown parameters and buffers to the forms of the contents of calls."""


def _folded(view: Graph, whole: Graph, contents: _Contents) -> Graph:
    shown = frozenset(node.id for node in view.nodes if node.kind in _MODEL_TENSORS)
    if shown not in contents:
        kept = [node for node in whole.nodes if node.kind not in _MODEL_TENSORS or node.id in shown]
        contents[shown] = contents_of(rebuilt(whole, kept, {node.id: node.id for node in kept}))
    return drop_empty_calls(drop_isolated(fold_by_forms(view, contents[shown])))


def truncate(graph: Graph, max_nodes: int) -> Graph:
    """Draw at most ``max_nodes`` nodes. One node with their number replaces each run of removed nodes.

    Functions and tensors are removed first, then module calls. Removal begins in the middle of the computation.
    """
    check_integer("max_nodes", max_nodes, 1)
    drawn = drawn_nodes(graph)
    if len(drawn) <= max_nodes:
        return graph
    nodes: list[Node] = []
    target = {node.id: node.id for node in graph.nodes}
    runs = {run[0].id: run for run in _surplus(drawn, max_nodes)}
    for run in runs.values():
        target |= dict.fromkeys((node.id for node in run), run[0].id)
    for node in graph.nodes:
        if node.id in runs:
            nodes.append(_more(runs[node.id], graph))
        elif target[node.id] == node.id:
            nodes.append(node)
    return drop_empty_calls(rebuilt(graph, nodes, target))


def _surplus(drawn: list[Node], max_nodes: int) -> list[list[Node]]:
    """Return the runs of nodes to remove. Each run will be replaced by one node."""
    # Keep two thirds at the start and one third at the end, so that both ends of the computation are visible.
    head = (max_nodes - 1) * 2 // 3
    middle = range(head, len(drawn) - (max_nodes - 1 - head))
    outside = [*range(head - 1, -1, -1), *range(middle.stop, len(drawn))]
    first = [place for place in (*middle, *outside) if drawn[place].kind in _CUT_FIRST]
    gone: set[int] = set()
    number = len(drawn)
    for place in dict.fromkeys((*first, *middle, *outside)):
        if number <= max_nodes:
            break
        gone.add(place)
        # The removed node gets a replacement of its own, or shares the replacement of removed nodes beside it.
        number -= (place - 1 in gone) + (place + 1 in gone)
    # A run of one node stays, since replacing it would save nothing.
    places = [place for place in sorted(gone) if {place - 1, place + 1} & gone]
    starts = [place for place in places if place - 1 not in gone]
    return [[drawn[place] for place in takewhile(gone.__contains__, count(start))] for start in starts]


_CUT_FIRST: tuple[Kind, ...] = ("op", "tensor", *_MODEL_TENSORS)


def _more(run: list[Node], graph: Graph) -> Node:
    """Return the node that replaces a run of nodes. Its scope is ``loss`` only if all of the run have this scope."""
    scopes = sorted({node.scope for node in run}, key=lambda scope: scope.startswith("loss"))
    name, parent = f"… {len(run)} more", graph.root.id
    return Node(run[0].id, "op", name, parent, 1, scope=scopes[0], source=run[0].source)


def drawn_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of a view that are drawn as nodes, not as frames around other nodes."""
    parents = {node.parent for node in graph.nodes}
    return [
        node for node in graph.nodes if node.parent is not None and (node.kind != "module" or node.id not in parents)
    ]
