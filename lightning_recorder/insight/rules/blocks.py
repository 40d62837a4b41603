"""Rules about the blocks of a transformer in the recorded graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.parts import family_of
from lightning_recorder.insight.recorded_step import (
    ATTENTION,
    RecordedStep,
    factor_of,
    found_in,
    is_attention,
    keeps_values,
    setting,
    shape_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule

_ANY = ("any",)
_LINEAR = ("linear", "addmm")
_PRODUCTS = ("matmul", "bmm")
_FACTORS = ("other", "scale", "p", "dropout_p")
_CHANGES = (
    *("mul", "div", "truediv", "neg", "detach", "clamp", "round", "dropout", "sigmoid", "tanh", "relu"),
    *("zeros_like", "ones_like", "rand_like", "scaled_dot_product_attention"),
)
"""Functions that are probably a mistake if a single block calls them."""
_MOVES = ("pad", "roll", "flip", "getitem", "narrow", "select", "index_select", "gather", "dropout", "detach")
"""Functions that move values to other positions, drop values, or stop their gradient."""
_SUMS = ("add", "iadd", "radd", "addcmul")
_ARITHMETIC = (
    *(*_SUMS, "sub", "isub", "mul", "imul", "rmul", "div", "truediv", "itruediv", "pow", "square", "sqrt", "rsqrt"),
    *("reciprocal", "mean", "var", "std", "var_mean", "clamp", "norm", "normalize"),
)
"""Functions that occur in the formula of a normalization."""
_PARTS = ("getitem", "split", "chunk", "unbind", "expand", "repeat_interleave")
_FACTORS_OF = ("mul", "rmul", "imul")
_MOST_LISTED = 3
_FEWEST = 2  # the least number of blocks in a stack, and of other blocks that must agree
_PROJECTIONS = 3  # those of queries, keys and values
_MOST = 400  # the most operations between the projections and the attention, or in the activation of a block


@rule(
    "no-residual",
    statistic="operations that read the input of an attention or of a feed-forward layer",
    usual="the layer itself, and the sum of its input and its output",
    why="The residual connection around the layer is missing.",
    next="Add the input of the layer to its output.",
    false_alarms="Only attention of a sequence to itself in at least two layers of a stack, and feed-forward layers of "
    "the same stack, are examined.",
    needs=(GRAPH,),
    explains=dict.fromkeys(
        (
            "unlike-siblings",
            "scale-jump",
            "block-trend",
            "vanishing-gradient",
            "attention-collapse",
            "odd-block",
            "collapsed-embedding",
        ),
        _ANY,
    ),
    is_lasting=True,
)
def no_residual(evidence: Evidence) -> Iterator[Finding]:
    """Yield the layers of a transformer without a residual connection around them."""
    step = step_of(evidence)
    stacked = _stacked(step)
    if not stacked:
        return
    parts = [("attention", layer, projections) for layer, projections in stacked]
    first = min(projection.id for _, projections in stacked for projection in projections)
    layers = _feed_forward(step, _widths(stacked))
    parts += [("feed-forward layer", last, firsts) for last, firsts in layers if firsts[0].id > first]
    found: dict[str, list[Node]] = {}
    for kind, last, projections in parts:
        if not _has_bypass(step, last, projections):
            found.setdefault(kind, []).append(last)
    for kind, lasts in found.items():
        names = [step.owner(each) for each in lasts]
        verdict = f"there is no residual connection around the {kind} {names[0]}: nothing else reads its input"
        yield replace(found_in(evidence, names[0], verdict, layers=len(names)), others=tuple(dict.fromkeys(names[1:])))


@rule(
    "added-twice",
    statistic="operands of two sums, one directly behind the other, in a model with attention",
    usual="each tensor is added once",
    why="The residual connection is there twice: inside of a layer and around it, or the sum is written twice.",
    next="Add the input of the layer to its output in one place.",
    false_alarms="Only if nothing else reads the first sum.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("block-trend", "scale-jump", "odd-block", "unlike-siblings"), _ANY),
    is_lasting=True,
)
def added_twice(evidence: Evidence) -> Iterator[Finding]:
    """Yield the sums in a transformer stack that add a tensor twice, as with two residual connections."""
    step = step_of(evidence)
    found = []
    widths = {(each,) for each in _widths(_stacked(step))}
    for node in step.operations if widths else ():
        own = step.sources(node) if node.name.strip("_") in _SUMS and len(node.inputs) == 2 else []
        own = own * 2 if len(own) == 1 else own
        if len(own) != 2 or not node.outputs or node.outputs[0].shape[-1:] not in widths:
            continue
        made = [step.made_by(each) for each in own]
        inner = [
            source
            for sum_of, other in (made, made[::-1])
            if sum_of.name.strip("_") in _SUMS and [each.id for each in step.readers(sum_of)] == [node.id]
            for source in step.sources(sum_of)
            if step.made_by(source).id == other.id
        ]
        if (made[0].id == made[1].id or inner) and "parameter" in step.roots[made[0].id] & step.roots[made[1].id]:
            found.append(node)
    if found:
        names = [step.owner(each) for each in found]
        verdict = f"a sum in {step.place(found[0])} adds a tensor that has been added just before: it counts twice"
        yield replace(found_in(evidence, names[0], verdict, sums=len(names)), others=tuple(dict.fromkeys(names[1:])))


@rule(
    "one-sided-rotation",
    statistic="products with tensors that depend on the position alone, on the way to the scores of attention",
    usual="as many for the queries as for the keys",
    why="Rotary positions are applied to the queries or to the keys alone. The scores then do not depend on distances.",
    next="Rotate queries and keys.",
    false_alarms="Only attention of a sequence to itself is examined, and at least two layers must agree.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("odd-attention", "unlike-siblings", "odd-block"), _ANY),
    is_lasting=True,
)
def one_sided_rotation(evidence: Evidence) -> Iterator[Finding]:
    """Yield attention in which only the queries or only the keys are multiplied with position tables."""
    step = step_of(evidence)
    found = []
    for last, projections in _stacked(step):
        product = last if last.name == ATTENTION else _product_before(step, last)
        sides = step.sources(product)[:2] if product is not None else []
        if len(sides) == 2:
            rotations = [_rotations(step, each, projections) for each in sides]
            if bool(rotations[0]) != bool(rotations[1]):
                found.append((last, "queries" if rotations[0] else "keys"))
    if len(found) >= _FEWEST:
        names = [step.owner(last) for last, _ in found]
        what, other = found[0][1], "keys" if found[0][1] == "queries" else "queries"
        verdict = f"the {what} of {names[0]} are multiplied with tensors of the positions, and its {other} are not"
        yield replace(found_in(evidence, names[0], verdict, layers=len(names)), others=tuple(dict.fromkeys(names[1:])))


def _product_before(step: RecordedStep, last: Node) -> Node | None:
    """Return the product of queries and keys that comes before a product with the values."""
    node: Node | None = last
    for _ in range(_MOST):
        sources = [] if node is None else step.sources(node)
        node = next((each for each in sources if "parameter" in step.roots[each.id]), None)
        if node is None or node.kind != "op" or node.name in _PRODUCTS:
            return node if node is not None and node.kind == "op" else None
    return None


def _rotations(step: RecordedStep, side: Node, projections: list[Node]) -> int:
    """Count the products with a position table between the projections and one factor of the scores."""
    count = 0
    for node in _on_the_way(step, side, projections):
        tables = [each for each in step.sources(node) if "parameter" not in step.roots[each.id] and each.outputs]
        # A mask has only one value for each position, so it does not count as a position table.
        shapes = (each.outputs[0].shape for each in tables)
        count += node.name.strip("_") in _FACTORS_OF and any(len(each) > 1 and each[-1] > 1 for each in shapes)
    return count


def _on_the_way(step: RecordedStep, side: Node, projections: list[Node]) -> Iterator[Node]:
    """Yield the operations between the projections of an attention and ``side``, one of its inputs."""
    begins, todo, seen = {each.id for each in projections}, [side], {side.id}
    while todo and len(seen) < _MOST:
        node = todo.pop()
        if node.id in begins or node.kind != "op":
            continue
        yield node
        sources = step.sources(node)
        todo += [each for each in sources if each.id not in seen and "parameter" in step.roots[each.id]]
        seen |= {each.id for each in sources}


@rule(
    "one-sided-roll",
    statistic="rolls along the positions between the linear layers of an attention and its queries, keys and values",
    usual="none, or one for each",
    why="torch.roll has moved the queries, the keys or the values alone. A key then belongs to another position than "
    "its value or its query, and the last position comes before the first, also where a mask hides it.",
    next="Remove the roll, or roll the input of the whole attention.",
    false_alarms="Only attention of a sequence to itself is examined.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("odd-attention", "unlike-siblings", "odd-block", "one-hot-heads"), _ANY),
    is_lasting=True,
)
def one_sided_roll(evidence: Evidence) -> Iterator[Finding]:
    """Yield attention in which queries, keys or values, but not all three, are rolled along the positions."""
    step = step_of(evidence)
    found = []
    for last, projections in attention_layers(step):
        product = last if last.name == ATTENTION else _product_before(step, last)
        sides = step.sources(product)[:2] if product is not None else []
        sides += step.sources(last)[2:3] if last.name == ATTENTION else step.sources(last)[1:2]
        if len(sides) == 3 and last.outputs:
            length = last.outputs[0].shape[-2]
            are_rolled = [_is_rolled(step, each, projections, length) for each in sides]
            if any(are_rolled) and not all(are_rolled):
                found.append((last, [name for name, is_rolled in zip(_SIDES, are_rolled, strict=True) if is_rolled]))
    if found:
        names = [step.owner(last) for last, _ in found]
        what = " and ".join(found[0][1])
        others = " and ".join(each for each in _SIDES if each not in found[0][1])
        verdict = f"the {what} of {names[0]} are rolled along the positions, and its {others} are not"
        yield replace(found_in(evidence, names[0], verdict, layers=len(names)), others=tuple(dict.fromkeys(names[1:])))


_SIDES = ("queries", "keys", "values")


def _is_rolled(step: RecordedStep, side: Node, projections: list[Node], length: int) -> bool:
    """Return True if there is a roll along the positions between the projections and one input of an attention."""
    for node in _on_the_way(step, side, projections):
        shape, dim = shape_of(node), setting(node, "dims").strip("()[], ")
        if node.name == "roll" and shape and dim.lstrip("-").isdecimal() and shape.count(length) == 1:
            return shape[int(dim) % len(shape)] == length
    return False


@rule(
    "odd-activation",
    statistic="functions between the linear layers of the feed-forward layers of a stack",
    usual="the same in all blocks, and another activation than a sigmoid, which only gates",
    why="The activation of this block was replaced, or is a sigmoid, whose outputs are all positive and whose "
    "gradient is at most 1/4.",
    next="Use the activation of the other blocks, such as GELU.",
    false_alarms="Stacks that mix activations on purpose: all others must agree. A sigmoid that is multiplied with "
    "another tensor is a gate.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("unlike-siblings", "scale-jump", "odd-block", "narrow-range", "saturation"), _ANY),
    is_lasting=True,
)
def odd_activation(evidence: Evidence) -> Iterator[Finding]:
    """Yield a feed-forward layer with an odd activation, and stacks with only sigmoids or without activations."""
    step = step_of(evidence)
    stacked = _stacked(step)
    families: dict[str, list[tuple[Node, tuple[str, ...]]]] = {}
    for last, firsts in _feed_forward(step, _widths(stacked)) if stacked else ():
        families.setdefault(family_of(step.owner(last)), []).append((last, _between(step, last, firsts)))
    for members in families.values():
        usual, count = Counter(functions for _, functions in members).most_common(1)[0]
        odd = [each for each in members if each[1] != usual]
        sigmoid = [each for each in members if _is_sigmoid(each[1])]
        if len(odd) == 1 and count >= _FEWEST:
            last, functions = odd[0]
            name, others = step.owner(last), f"{_named(usual)} in the {count} other blocks"
            yield found_in(evidence, name, f"the activation before {name} is {_named(functions)}, and {others}")
        elif len(sigmoid) == len(members) or not any(functions for _, functions in members):
            names = [step.owner(last) for last, _ in members]
            what = "a sigmoid" if sigmoid else "missing"
            verdict = f"the activation before {names[0]} is {what}, as in all {len(names)} blocks"
            yield replace(found_in(evidence, names[0], verdict), others=tuple(names[1:]))


@rule(
    "odd-attention",
    statistic="functions and factors between the projections and the attention of the blocks of a stack",
    usual="the same in all blocks",
    why="The queries, keys, values or scores of this block are changed: a factor, a dropout or a detach.",
    next="Compare the attention of this block with that of the others.",
    false_alarms="A block that has or lacks other functions, such as one without rotary positions, may be a design, "
    "and is a note. All others must agree. In all blocks, only a constant factor of the values counts.",
    needs=(GRAPH,),
    explains=dict.fromkeys(
        ("unlike-siblings", "scale-jump", "odd-block", "attention-collapse", "one-hot-heads", "gradient-stops"), _ANY
    ),
    is_lasting=True,
)
def odd_attention(evidence: Evidence, *, factor: float = 3.0) -> Iterator[Finding]:
    """Yield an attention whose queries, keys, values or scores are computed differently from the rest of its stack.

    A stack in which all values are multiplied by a constant is found, too.
    """
    step = step_of(evidence)
    families: dict[str, list[tuple[Node, tuple[str, ...]]]] = {}
    for last, projections in _stacked(step):
        functions = _between(step, last, projections, with_factors=True)
        own = _factors_of(last)
        families.setdefault(family_of(step.owner(last)), []).append((last, (*functions, *own)))
    for members in families.values():
        counts = Counter(tuple(sorted(functions)) for _, functions in members)
        usual, count = counts.most_common(1)[0]
        factors = {_factor_of_values(step, last) for last, _ in members}
        if len(counts) == len(factors) == 1 and (times := factors.pop()) and abs(math.log(times)) >= math.log(factor):
            names = [step.owner(last) for last, _ in members]
            verdict = f"the values of the attention {names[0]} are multiplied by {times:.3g}, as in all {count} blocks"
            yield replace(found_in(evidence, names[0], verdict, factor=times), others=tuple(names[1:]))
        odd = [(last, Counter(functions)) for last, functions in members if tuple(sorted(functions)) != usual]
        if len(odd) != 1 or count < _FEWEST:
            continue
        last, functions_of_odd = odd[0]
        more, fewer = functions_of_odd - Counter(usual), Counter(usual) - functions_of_odd
        words = [f"{title} {_listed(sorted(each))}" for title, each in (("has", more), ("lacks", fewer)) if each]
        verdict = f"the attention of {step.owner(last)} {' and '.join(words)}, unlike that of the {count} other blocks"
        found = found_in(evidence, step.owner(last), verdict)
        is_change = all(each.partition(" ")[0] in _CHANGES for each in (*more, *fewer))
        yield found if is_change else replace(found, severity="note")


def _factor_of_values(step: RecordedStep, last: Node) -> float:
    """Return the positive constant factor of an attention's values after their projection."""
    found, place = 1.0, 2 if last.name == ATTENTION else 1
    for _ in range(_MOST):
        sources = step.sources(last)
        if len(sources) <= place or sources[place].kind != "op" or sources[place].name in _LINEAR:
            break
        last, place = sources[place], 0
        own = factor_of(last)
        if own is None and not keeps_values(last) and last.name not in _PARTS:
            break
        found *= own if own is not None and own > 0 else 1.0
    return found


def _listed(functions: list[str]) -> str:
    more = f" and {len(functions) - _MOST_LISTED} other functions" if len(functions) > _MOST_LISTED else ""
    return ", ".join(functions[:_MOST_LISTED]) + more


def _factors_of(node: Node) -> tuple[str, ...]:
    """Return the name of a function, followed by its factor and its probability if it has them."""
    given = dict(node.arguments)
    shown = [f"{name}={given[name]}" for name in _FACTORS if name in given]
    name = node.name.strip("_")
    return (" ".join([name, *shown]),) if name in _CHANGES or shown else (name,)


def _between(step: RecordedStep, last: Node, firsts: list[Node], *, with_factors: bool = False) -> tuple[str, ...]:
    """Return the functions between the first linear layers and the last one, without changes of shape.

    Functions that depend on no parameter compute masks or position tables. They may differ between blocks and are left
    out.
    """
    found: dict[int, str] = {}
    todo, begins = [last], {each.id for each in firsts}
    while todo and len(found) < _MOST:
        for source in step.sources(todo.pop()):
            is_inside = source.kind == "op" and source.id not in begins and source.id not in found
            if is_inside and "parameter" in step.roots[source.id]:
                is_dropout = with_factors and "dropout" in source.name
                own = _factors_of(source)[0] if with_factors else source.name.strip("_")
                is_left_out = not is_dropout and keeps_values(source)
                found[source.id] = "" if is_left_out or (with_factors and _adds_a_mask(step, source)) else own
                todo.append(source)
    return tuple(name for _, name in sorted(found.items()) if name)


def _adds_a_mask(step: RecordedStep, node: Node) -> bool:
    sources = step.sources(node)
    is_sum = node.name.strip("_") in _SUMS and len(sources) > 1
    return is_sum and any("parameter" not in step.roots[each.id] for each in sources)


def _is_sigmoid(functions: tuple[str, ...]) -> bool:
    return len(functions) == 1 and functions[0] in ("sigmoid", "special_expit", "expit")


def _named(functions: tuple[str, ...]) -> str:
    """Return the functions in words, without arithmetic if there are other functions."""
    shown = [each for each in functions if each not in ("mul", "add", "pow", "sub", "div")] or list(functions)
    return " and ".join(shown) if shown else "missing"


def _stacked(step: RecordedStep) -> list[tuple[Node, list[Node]]]:
    """Return the attention layers that belong to stacks, with their projections."""
    layers = list(attention_layers(step))
    counts = Counter(family_of(step.owner(layer)) for layer, _ in layers)
    return [each for each in layers if counts[family_of(step.owner(each[0]))] >= _FEWEST]


def _widths(stacked: list[tuple[Node, list[Node]]]) -> set[int]:
    """Return the input widths of the attention layers."""
    return {(shape_of(each[0], _place_of_input(each[0])) or (0,))[-1] for _, each in stacked}


def attention_layers(step: RecordedStep) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each self-attention as a node, with the linear layers that compute its queries, keys and values.

    The node is the fused attention function, or the product with the values.
    """
    for node in step.operations:
        if node.name == ATTENTION:
            shapes = [shape_of(node, place) for place in (0, 1)]
            if None in shapes or shapes[0][-2:] != shapes[1][-2:]:  # type: ignore[index]  # not None
                continue
            last = node
        elif node.name == "softmax" and is_attention(shape_of(node)):
            readers = [each for each in step.readers(node) if each.name in _PRODUCTS]
            if len(readers) != 1:
                continue
            last = readers[0]
        else:
            continue
        projections = _linears_before(step, last)
        # Beside queries, keys and values, a layer of position embeddings may add to the scores, as in DeBERTa.
        own = [each for each in projections if "input" in step.roots[each.id]]
        projections = own if len(own) >= _PROJECTIONS else projections
        inputs = {_stream(step, each).id for each in projections}
        if projections and len(inputs) == 1:
            yield last, projections


def _linears_before(step: RecordedStep, last: Node) -> list[Node]:
    """Return the nearest linear layers that an operation depends on, in the order of execution.

    No other linear layer lies between them and the operation.
    """
    found: dict[int, Node] = {}
    seen: set[int] = set()
    todo = [last]
    while todo and len(seen) < _MOST:
        for source in step.sources(todo.pop()):
            if source.kind != "op" or source.id in seen:
                continue
            seen.add(source.id)
            if source.name in _LINEAR:
                found[source.id] = source
            else:
                todo.append(source)
    return [found[each] for each in sorted(found)]


def _place_of_input(linear: Node) -> int:
    return 1 if linear.name == "addmm" else 0


def _stream(step: RecordedStep, linear: Node) -> Node:
    """Return the node that computes the input of a linear layer, skipping changes of shape."""
    sources = [each for each in step.sources(linear) if each.kind != "parameter"]
    return step.made_by(sources[0]) if sources else linear


def _feed_forward(step: RecordedStep, widths: Collection[int]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each feed-forward layer of a stack as its last linear layer and its first linear layers.

    The last layer has as many outputs as the first layers have inputs. The width in between is larger.
    """
    found: dict[str, list[tuple[Node, list[Node]]]] = {}
    for node in step.operations:
        if node.name not in _LINEAR or not node.outputs:
            continue
        outer, inner = node.outputs[0].shape[-1], (shape_of(node, _place_of_input(node)) or (0,))[-1]
        firsts = _linears_before(step, node) if outer in widths and inner > outer else []
        inputs = {_stream(step, each).id for each in firsts}
        takes = {(shape_of(each, _place_of_input(each)) or (0,))[-1] for each in firsts}
        if len(inputs) == 1 and takes == {outer}:
            found.setdefault(family_of(step.owner(node)), []).append((node, firsts))
    for pairs in found.values():
        if len(pairs) >= _FEWEST:
            yield from pairs


def _has_bypass(step: RecordedStep, last: Node, projections: list[Node]) -> bool:
    """Return True if the input of the projections, before a normalization, is also used after the layer."""
    todo = [_stream(step, projections[0])]
    seen = {todo[0].id}
    for node in todo:
        if node.kind != "op" or _goes_beyond(step, node, last) or len(seen) > _MOST:
            return True
        before = [each for each in step.sources(node) if each.kind not in ("parameter", "buffer")]
        # A tensor of the batch beside the output of a layer is a mask, so it is skipped.
        before = [each for each in before if "parameter" in step.roots[each.id]] or before
        # The shift and the scale of a conditional normalization have another shape, one row for all positions, so they
        # are skipped.
        shape = node.outputs[0].shape if node.outputs else ()
        before = [each for each in before if each.outputs and each.outputs[0].shape == shape] or before
        if _is_of_norm(step, node, before):
            todo += [each for each in before if each.id not in seen]
            seen |= {each.id for each in before}
    return False


def _goes_beyond(step: RecordedStep, node: Node, last: Node) -> bool:
    """Return True if an operation after ``last`` depends on ``node`` along a path that avoids ``last``."""
    seen = {node.id}
    todo = [node]
    while todo:
        for user in step.users(todo.pop()):
            if user.id > last.id:
                return True
            if user.id not in seen and user.id != last.id:
                seen.add(user.id)
                todo.append(user)
    return False


def _is_of_norm(step: RecordedStep, node: Node, before: list[Node]) -> bool:
    """Return True for a normalization, an operation in its formula, and a change of positions or shape."""
    owner = None if node.parent is None else step.graph[node.parent]
    if owner is not None and "norm" in owner.type_name.lower():
        return True
    # A sum of two tensors is a residual connection rather than the shift of a normalization.
    is_arithmetic = node.name.strip("_") in _ARITHMETIC and not (node.name.strip("_") in _SUMS and len(before) > 1)
    return is_arithmetic or node.name in ("layer_norm", "rms_norm", *_MOVES) or keeps_values(node)
