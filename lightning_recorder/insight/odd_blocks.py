"""Find the block that differs from many equal blocks."""

from __future__ import annotations

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache, partial
from itertools import chain, pairwise

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.forms import GEOMETRY, VARIED, forms, is_setting
from lightning_recorder.graph.views.wiring import MutableGraph

__all__ = ["LIMITS", "OddBlock", "OddLimits", "odd_blocks"]

_BLOCK = "another block"
_FEW = 3  # the least number of blocks with attention: with three, one is neither the first nor the last
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")
_RESIZES = ("pool", "interpolate", "upsample", "pixel_shuffle", "pixel_unshuffle")
# A single block that calls one of these functions is probably a mistake. Other functions may be its design.
_DOUBTFUL = frozenset(
    (
        *("mul", "div", "sub", "neg", "detach", "clamp", "round"),
        *("flatten", "unflatten", "reshape", "view", "transpose", "permute"),
    )
)
# Functions that make a mask. A single block may use another mask by design, such as for global attention.
_MASKS = frozenset(
    (
        *("ones", "zeros", "full", "arange", "tril", "triu", "or", "and", "xor", "not", "invert", "eq", "ne"),
        *("lt", "le", "gt", "ge", "logical_or", "logical_and", "logical_not", "ones_like", "zeros_like", "full_like"),
    )
)

_Item = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""A call in a block: the calling module relative to the block, the function or class, the path, and the settings."""


@dataclass(frozen=True)
class OddLimits:
    """The limits of the comparison of blocks."""

    fewest: int = 8  # the least number of blocks in a list
    # The largest number of kinds of calls that may differ. A block of another design differs in more.
    kinds: int = 3
    period: int = 8  # the longest period with which the kinds of blocks in a list repeat, in blocks
    periods: int = 3  # the least number of periods in a list
    alike: int = 6  # the least number of equal blocks in a network in stages
    others: float = 0.25  # the largest share of further blocks that differ from the equal ones


LIMITS = OddLimits()
"""The default limits."""

_known: tuple[weakref.ref[Graph], OddLimits, tuple[OddBlock, ...]] | None = None  # the last result


@dataclass(frozen=True)
class OddBlock:
    """A block that differs from all other blocks of its list."""

    module: str  # the module with the difference: the block, or a module inside of it
    block: str
    others: int  # the number of blocks in the comparison: all other blocks, or the others of its kind
    what: str  # the difference, in words
    source: str = ""  # the line of code of a call that only the block or only the others have
    # True if the block only has additional calls, another mask, layers of another class, or fewer layers. Such a block
    # may be intended, such as one with global attention.
    may_be_design: bool = False
    is_setting: bool = False  # True if the block has the same calls as all others, with other settings
    is_doubtful: bool = False  # True if there are so few blocks that two kinds may alternate
    # True if all other blocks are equal; False if they differ in size or alternate between kinds
    is_one_kind: bool = True


def odd_blocks(graph: Graph, limits: OddLimits = LIMITS) -> tuple[OddBlock, ...]:
    """Return the blocks that differ from all other blocks of their list.

    A list has at least eight blocks, or three if they compute attention.

    The blocks must be of the same class, and each must feed the next one. The first and the last block are never
    returned, because their neighbors often make them different. A difference that one of these two also has is left
    out. The other blocks may differ in size, as in the stages of a convolutional network, or alternate between several
    kinds. A block is then compared with the blocks of its kind. The last result is cached as long as its graph exists.
    """
    global _known  # noqa: PLW0603 - the result of the last call
    known = _known
    if known is None or known[0]() is not graph or known[1] != limits:
        _known = known = weakref.ref(graph), limits, _odd_blocks(graph, limits)
    return known[2]


def _odd_blocks(graph: Graph, limits: OddLimits) -> tuple[OddBlock, ...]:
    parts = MutableGraph(graph)
    numbers = cache(partial(forms, graph, parts, with_training=False))
    holders = {node.parent for node in graph.nodes if node.kind == "module"}
    found: dict[str, OddBlock] = {}  # by module, since blocks may be nested
    for calls in chain(_lists(graph, _list_of, _FEW), _lists(graph, _list_in_stages, limits.fewest)):
        blocks = [each[0] for each in calls]
        is_one_list = len({block.parent for block in blocks}) == 1
        if not (is_one_list or blocks[0].id in holders) or not _is_chain(parts, blocks):
            continue
        exact, rough = (_Blocks(graph, parts, blocks, limits, with_sizes=each) for each in (True, False))
        if len(calls) < limits.fewest:
            is_plain = is_one_list and all(len(each) == 1 for each in calls) and exact.attend()
            new = _odd_of_few(exact, [numbers(with_sizes=True)[block.id] for block in blocks]) if is_plain else iter(())
        elif any(len(each) != 1 for each in calls):
            new = _other_calls(calls)
        elif is_one_list and _are_of_one_kind(known := [numbers(with_sizes=True)[block.id] for block in blocks]):
            new = _odd_one(exact, known)
        else:
            new = _odd_of_kinds(rough, [numbers(with_sizes=False)[block.id] for block in blocks])
        for each in new:
            found.setdefault(each.module, each)
    return tuple(found.values())


def _lists(graph: Graph, list_of: Callable[[Node], Hashable], fewest: int) -> Iterator[list[list[Node]]]:
    """Yield the calls of the modules of each list with at least ``fewest`` modules, in the order of their numbers."""
    lists: dict[Hashable, dict[tuple[int, ...], list[Node]]] = defaultdict(dict)
    for node in graph.nodes:
        if node.kind in ("backward", "optimizer"):
            break
        if node.kind == "module" and (key := list_of(node)) is not None:
            numbers = tuple(int(each) for each in re.findall("[0-9]+", node.name))
            lists[key, node.type_name].setdefault(numbers, []).append(node)
    for calls in lists.values():
        if len(calls) >= fewest:
            yield [calls[numbers] for numbers in sorted(calls)]


def _list_of(node: Node) -> Hashable:
    """Return the key of a module's list: the calling node, and the name without its final number; None without one."""
    name = node.name.rstrip("0123456789")
    return None if name == node.name else (node.parent, name)


def _list_in_stages(node: Node) -> Hashable:
    """Return a name without its numbers if it has at least two, as ``layer1.0`` in a network with stages."""
    name, count = re.subn(r"[0-9]+", "#", node.name)
    return name if count > 1 and name.endswith("#") else None


def _is_chain(parts: MutableGraph, blocks: Sequence[Node]) -> bool:
    """Return True if each module feeds the next one. The result of one module may be unused."""
    lost = 0
    for block, after in pairwise(blocks):
        todo, goal = parts.subtree(block.id), set(parts.subtree(after.id))
        seen, last = set(todo), max(goal)
        while todo and lost < 2 and todo[-1] not in goal:
            for edge in parts.users.get(todo.pop(), {}).values():
                # Later nodes do not lead back, so the search stops there instead of visiting the rest of the graph.
                if edge.target not in seen and edge.target <= last:
                    seen.add(edge.target)
                    todo.append(edge.target)
        lost += not todo
    return lost < 2


def _other_calls(calls: Sequence[Sequence[Node]]) -> Iterator[OddBlock]:
    """Yield the block whose number of calls differs from that of all other blocks."""
    counts = [len(each) for each in calls]
    (usual, many), *rest = Counter(counts).most_common()
    if many == len(counts) - 1:
        place = counts.index(rest[0][0])
        if 0 < place < len(counts) - 1:
            name, times = calls[place][0].name, rest[0][0]
            yield OddBlock(name, name, many, f"it is called {times} time{'s' * (times != 1)}, and the others {usual}")


class _Blocks:
    """The blocks of a list, with their contents. With ``with_sizes``, settings of sizes are compared, too."""

    def __init__(
        self, graph: Graph, parts: MutableGraph, blocks: Sequence[Node], limits: OddLimits, *, with_sizes: bool
    ) -> None:
        self._graph, self._parts, self.blocks = graph, parts, blocks
        self.limits, self.with_sizes = limits, with_sizes

    def contents(self, block: Node) -> list[Node]:
        """Return the nodes of a block."""
        return [self._parts.nodes[each] for each in self._parts.subtree(block.id)]

    def item(self, node: Node, block: Node) -> _Item:
        """Return the properties of a call that are compared."""
        around = self._graph[node.parent if node.parent is not None else node.id].name[len(block.name) :]
        arguments = [pair for pair in node.arguments if self.with_sizes or pair[0] not in GEOMETRY]
        if node.kind == "module":
            kept = tuple(pair for pair in arguments if pair[0] not in VARIED)
            return around, node.type_name, node.name[len(block.name) :], kept
        return around, node.name, "", tuple(pair for pair in arguments if is_setting(node, pair[0]))

    def items(self, block: Node) -> Counter[_Item]:
        """Return the number of calls of each kind in a block."""
        return Counter(self.item(node, block) for node in self.calls(block))

    def calls(self, block: Node) -> list[Node]:
        """Return the calls of modules and functions in a block."""
        return [node for node in self.contents(block)[1:] if node.kind in ("op", "module")]

    def attend(self) -> bool:
        """Return True if all blocks, or all but one, compute attention."""
        return sum(any(map(_is_attention, self.calls(each))) for each in self.blocks) >= len(self.blocks) - 1

    def is_resized(self, place: int) -> bool:
        """Return True if the first outputs of a block and of the previous block differ in shape."""
        before, after = ([meta.shape for meta in self.blocks[each].outputs[:1]] for each in (place - 1, place))
        return before != after

    def learned(self, block: Node) -> set[_Item]:
        """Return the modules with parameters in a block."""
        return {self.item(node, block) for node in self.calls(block) if node.kind == "module" and node.total_parameters}

    def source(self, block: Node, usual: Node, items: Collection[_Item]) -> str:
        """Return the code line of the first call that only one of two blocks has and that is in ``items``."""
        nodes, others = self.calls(block), self.calls(usual)
        here, there = [self.item(each, block) for each in nodes], [self.item(each, usual) for each in others]
        for what, start, end, _, _ in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
            for node, item in zip(nodes[start:end], here[start:end], strict=True):
                if what != "equal" and item in items and node.source:
                    return node.source
        return ""

    def users(self, block: Node) -> set[str]:
        """Return the users of a block's results: functions and classes outside of it, or another block of the list."""
        inside = {node.id for node in self.contents(block)}
        targets = [edge.target for each in inside for edge in self._parts.users.get(each, {}).values()]
        found = set()
        for target in targets:
            node = self._graph[target]
            while node.depth > block.depth and node.parent is not None:
                node = self._graph[node.parent]
            if target not in inside and node.parent == block.parent:
                is_block = node.kind == "module" and _list_of(node) == _list_of(block)
                found.add(_BLOCK if is_block else node.type_name or node.name)
        return found


def _is_attention(node: Node) -> bool:
    shape = node.inputs[0].shape if node.name == "softmax" and node.inputs else ()
    return node.name in _ATTENTION or (len(shape) > 2 and shape[-1] == shape[-2] > 1)


def _are_of_one_kind(known: Sequence[int]) -> bool:
    """Return True if at most one block between the first and the last block has another form."""
    return Counter(known[1:-1]).most_common(1)[0][1] >= len(known) - 3


def _odd_one(blocks: _Blocks, known: Sequence[int]) -> Iterator[OddBlock]:
    """Yield the block whose form, arguments or users differ from those of all other blocks."""
    inner = range(1, len(known) - 1)
    counts = Counter(known[place] for place in inner)
    usual = counts.most_common(1)[0][0]
    others = [place for place in inner if known[place] != usual]
    if len(others) == 1 and known.count(known[others[0]]) == 1:
        alike = next(place for place in inner if known[place] == usual)
        yield from _other_form(blocks, blocks.blocks[others[0]], blocks.blocks[alike])
    elif not others:
        yield from _other_arguments(blocks)
        yield from _other_users(blocks)


def _odd_of_few(blocks: _Blocks, known: Sequence[int]) -> Iterator[OddBlock]:
    """Yield the inner block that differs from the form of all other blocks."""
    usual, count = Counter(known).most_common(1)[0]
    odd = [place for place, each in enumerate(known) if each != usual]
    if count == len(known) - 1 and 0 < odd[0] < count:
        for each in _other_form(blocks, blocks.blocks[odd[0]], blocks.blocks[0]):
            yield replace(each, is_doubtful=not each.is_setting)


def _odd_of_kinds(blocks: _Blocks, known: Sequence[int]) -> Iterator[OddBlock]:
    """Yield the block with a unique form, if the other blocks differ in size or alternate between kinds."""
    inner, limits = range(1, len(known) - 1), blocks.limits
    counts = Counter(known)
    alone = [place for place in inner if counts[known[place]] == 1]
    if len(alone) != 1:
        return
    odd = alone[0]
    others = [place for place in inner if place != odd]
    same = next(
        (
            [place for place in others if place % period == odd % period]
            for period in range(1, limits.period + 1)
            if period * limits.periods <= len(known)
            and all(len({known[each] for each in others if each % period == phase}) == 1 for phase in range(period))
        ),
        [],
    )
    if same:
        same = [place for place in others if known[place] == known[same[0]]]
    else:
        # Blocks that change the size of their input and blocks that keep it are of different kinds.
        others = [place for place in others if blocks.is_resized(place) == blocks.is_resized(odd)]
        kinds = Counter(known[place] for place in others).most_common(1)
        same = [place for place in others if known[place] == kinds[0][0]]
        is_beside = bool(same) and known[same[0]] in (known[odd - 1], known[odd + 1])
        if not is_beside or len(same) < max(limits.alike, (1 - limits.others) * len(others)):
            return
    usual = min(same, key=lambda place: abs(place - odd))
    for each in _other_form(blocks, blocks.blocks[odd], blocks.blocks[usual]):
        yield replace(each, others=len(same), is_one_kind=False)


def _other_form(blocks: _Blocks, block: Node, usual: Node) -> Iterator[OddBlock]:
    here, there = blocks.items(block), blocks.items(usual)
    ends = [blocks.items(blocks.blocks[place]) for place in (0, -1)]
    differing = {item for item in here.keys() | there.keys() if here[item] != there[item]}
    # If a module differs, the functions that it calls differ as a consequence, so they are left out.
    modules = {path for _, _, path, _ in differing if path}
    differing = {item for item in differing if item[0] not in modules}
    kinds = {item[:3] for item in differing}
    # In a loop over experts, the number of calls depends on the number of chosen experts, so it may differ.
    is_loop = len(kinds) > 1 and here.keys() == there.keys()
    if here == Counter({item: 2 * number for item, number in there.items()}):
        yield OddBlock(block.name, block.name, len(blocks.blocks) - 1, "it calls everything twice")
        return
    if not differing and blocks.with_sizes and block.total_parameters != usual.total_parameters:
        return
    at_the_ends = any(end[item] == here[item] for end in ends for item in differing)
    if is_loop or at_the_ends or len(kinds) > blocks.limits.kinds:
        return
    extra = {item for item in differing if here[item] > there[item]}
    missing = {item for item in differing if there[item] > here[item]}
    changed = _changed(extra, missing)
    is_resized = any(_settings_of(*pair) <= GEOMETRY for pair in changed) or any(
        word in item[1].lower() for item in differing for word in _RESIZES
    )
    if is_resized:
        return
    adds = not missing and any(item[2] or item[1] not in _DOUBTFUL for item in extra)
    # Layers that are absent or of another class were chosen when the model was built, so they may be intended.
    has_less = not extra and (
        not blocks.learned(usual).isdisjoint(missing)
        or (blocks.with_sizes and block.total_parameters < usual.total_parameters)
    )
    masks = bool(kinds) and all(item[1] in _MASKS for item in differing)
    may_be_design = not changed and (adds or masks or has_less or not blocks.learned(block).isdisjoint(extra))
    source = blocks.source(block, usual, extra) or blocks.source(usual, block, missing)
    around = [item[2] or item[0] for item in differing]
    module = block.name + (_common(around) if around else "")
    is_setting = len(changed) == len(extra) == len(missing)
    found = OddBlock(module, block.name, len(blocks.blocks) - 1, _words(extra, missing), source, may_be_design)
    yield replace(found, is_setting=is_setting and bool(changed))


def _changed(extra: Set[_Item], missing: Set[_Item]) -> list[tuple[_Item, _Item]]:
    """Return pairs of calls, in this block and in the usual block, that differ only in their settings."""
    alike = {item[:3]: item for item in missing}
    return sorted((item, alike[item[:3]]) for item in extra if item[:3] in alike)


def _settings_of(here: _Item, there: _Item) -> set[str]:
    """Return the names of the settings in which two calls differ."""
    one, other = dict(here[3]), dict(there[3])
    return {name for name in one | other if one.get(name) != other.get(name)}


def _words(extra: Set[_Item], missing: Set[_Item]) -> str:
    """Return the difference between two blocks in words."""
    if not extra and not missing:
        return "it connects the same operations in another way"
    changed = _changed(extra, missing)
    words = [_setting(here, dict(here[3]), dict(there[3])) for here, there in changed]
    settings = {item for pair in changed for item in pair}
    classes = {item[2]: item for item in missing - settings if item[2]}
    for item in sorted(extra - settings):
        if (other := classes.get(item[2])) is not None:
            settings |= {item, other}
            words.append(f"its {item[2].removeprefix('.')} is {item[1]} and not {other[1]}")
    for items, verb in ((extra, "calls"), (missing, "does not call")):
        names = [_title(item) for item in sorted(items - settings)]
        if names:
            words.append(f"it {verb} {' and '.join(names)}")
    return ", and ".join(words)


def _title(item: _Item) -> str:
    around, kind, path, _ = item
    if path:
        return f"{path.removeprefix('.')} ({kind})"
    return f"{kind} in {around.removeprefix('.')}" if around else kind


def _setting(item: _Item, here: dict[str, str], there: dict[str, str]) -> str:
    keys, default = [key for key in here | there if here.get(key) != there.get(key)], "the default"
    pairs = (f"{key} = {here.get(key, default)} and not {there.get(key, default)}".lstrip(" =") for key in keys)
    return f"its {_title(item)} has {', '.join(pairs)}"


def _common(paths: Sequence[str]) -> str:
    """Return the innermost module around some paths."""
    parts = [path.split(".") for path in paths]
    length = 0
    while all(len(each) > length for each in parts) and len({each[length] for each in parts}) == 1:
        length += 1
    return ".".join(parts[0][:length])


def _other_arguments(blocks: _Blocks) -> Iterator[OddBlock]:
    """Yield the block with another argument than all other blocks, such as another scale or drop rate."""
    contents = [blocks.contents(block) for block in blocks.blocks[1:-1]]
    odd: dict[int, list[tuple[Node, tuple[str, str], tuple[str, str]]]] = {}
    for nodes in zip(*contents, strict=True):
        if len({node.arguments for node in nodes}) == 1 or len({len(node.arguments) for node in nodes}) > 1:
            continue
        for pairs in zip(*(node.arguments for node in nodes), strict=True):
            usual, rare = (counts := Counter(pairs).most_common())[0][0], counts[-1][0]
            if len(counts) == 2 and counts[1][1] == 1 and rare[0] == usual[0] and _is_setting(nodes[0], *rare):
                place = pairs.index(rare)
                odd.setdefault(place, []).append((nodes[place], rare, usual))
    if len(odd) != 1:
        return
    (place, found), (first, last) = next(iter(odd.items())), (blocks.contents(blocks.blocks[each]) for each in (0, -1))
    block = blocks.blocks[place + 1]
    node, rare, usual = found[0]
    if any(rare in each.arguments for each in chain(first, last) if each.name == node.name):
        return
    item = blocks.item(node, block)
    what = _setting(item, dict([rare]), dict([usual]))
    yield OddBlock(block.name + (item[2] or item[0]), block.name, len(blocks.blocks) - 1, what, node.source)


def _is_setting(node: Node, name: str, value: str) -> bool:
    """Return False for an index or a size, which may depend on the block or on the data."""
    return (
        node.kind == "module"
        or is_setting(node, name)
        or bool(re.fullmatch(r"-?\d*\.\d+(e[-+]?\d+)?|\w*[a-z]\w*", value))
    )


def _other_users(blocks: _Blocks) -> Iterator[OddBlock]:
    """Yield the block whose result is unused, or used by other functions than the results of the other blocks."""
    users = [blocks.users(block) for block in blocks.blocks[1:-1]]
    counts = Counter(frozenset(each) for each in users)
    usual = counts.most_common(1)[0][0]
    # An additional user of one block's result, such as a second head, is part of the design.
    odd = [place for place, each in enumerate(users) if usual and (not each or _BLOCK in each - usual)]
    if len(odd) == 1 and counts[usual] >= len(users) - 2:
        block, here = blocks.blocks[odd[0] + 1], users[odd[0]]
        words = [f"not used by {each}" for each in sorted(usual - here)]
        words += [f"used by {_BLOCK}"] if _BLOCK in here - usual else []
        yield OddBlock(block.name, block.name, len(blocks.blocks) - 1, f"its result is {' but '.join(words)}")
