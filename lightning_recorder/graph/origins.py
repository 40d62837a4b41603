"""Which node gave each tensor that is met while a graph is recorded."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from lightning_recorder.autograd import function_behind, sequence_number
from lightning_recorder.graph.builder import GraphBuilder, meta_of, metas_of
from lightning_recorder.graph.caller import CustomCall
from lightning_recorder.graph.functions import tensors_in
from lightning_recorder.graph.model import Kind, TensorMeta
from lightning_recorder.graph.modules import ModelNames
from lightning_recorder.graph.ownership import AutogradOwners
from lightning_recorder.graph.provenance import Provenance
from lightning_recorder.storage import is_uninitialized

__all__ = ["IGNORED", "Call", "CustomNode", "TensorOrigins"]

IGNORED = -1
"""In place of a node's id: a tensor that is followed no further, such as a gradient on its way to the optimiser."""


@dataclass
class Call:
    """A module call that is going on."""

    node: int
    module: nn.Module
    start_s: float = 0.0


@dataclass
class CustomNode:
    """A call of an ``autograd.Function`` that is going on, or was a moment ago: nobody tells when it ends."""

    node: int
    call: CustomCall
    results: list[weakref.ref[Tensor]] = field(default_factory=list)


class TensorOrigins:
    """Finds the node that gave a tensor, and adds one for a tensor that nobody has seen before.

    A tensor is known as itself or by its memory; by the part of torch's backward graph behind it; as a parameter or
    buffer of the model. The results of an ``autograd.Function`` of the user's, of whose calls only what happens inside
    is seen, are known here, too.

    Args:
        builder: The graph so far, which gets the edges and what is added.
        calls: The module calls that are going on, the root first.
    """

    def __init__(self, builder: GraphBuilder, calls: list[Call]) -> None:
        self._builder = builder
        self._calls = calls
        self._provenance = Provenance()
        self._owners = AutogradOwners()
        self._custom: CustomNode | None = None
        self._customs: dict[int, int] = {}
        self.names: ModelNames | None = None

    def forget(self) -> None:
        """Know nothing any more of the tensors and modules that were met."""
        self._custom = None
        self._provenance.clear()
        if self.names is not None:
            self.names.clear()

    def bind(self, tensor: Tensor, node: int, *, wrote: bool = False) -> None:
        """Remember which node gave a tensor, or wrote into it."""
        self._provenance.bind(tensor, node, wrote=wrote)

    def behind(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The leaves of torch's backward graph from which tensors were computed where nobody looked."""
        return self._owners.sources(tensors)[0]

    def enter_custom(self, call: CustomCall, source: str) -> CustomNode:
        """The node of the call in which a function was called, which may be a new one."""
        last = self._custom
        if last is not None and last.call.frame == call.frame and not call.new:
            return last
        self.leave_custom()
        given = tensors_in([call.arguments])
        origins = [(self.of(tensor), meta_of(tensor)) for tensor in given]
        node = self._builder.add("op", call.function.__name__, self._calls[-1].node, source=source)
        for origin, meta in origins:
            self.connect(origin, node, meta)
        self._custom = CustomNode(node, replace(call, arguments=None))
        # Each of the nested calls has made a node of the backward graph before anything else.
        self._customs[sequence_number() - call.depth + 1] = node
        return self._custom

    def leave_custom(self) -> None:
        """Say of the last such call what it gave, now that something outside of it happens."""
        left, self._custom = self._custom, None
        if left is None:
            return
        alive = _distinct(tensor for reference in left.results if (tensor := reference()) is not None)
        given = [tensor for tensor in alive if function_behind(tensor) is left.call.function] or alive[-1:]
        if given:
            self._builder.nodes[left.node].outputs = metas_of(given)
        self.claim(given, left.node)

    def connect(self, source: int, target: int, meta: TensorMeta | None) -> None:
        """Add a tensor that goes from one node into another, unless it is followed no further."""
        if source == IGNORED:
            return
        draft = self._builder.nodes[source]
        if meta is not None and not draft.outputs:
            # A call of the user's own whose results were not seen inside it, or not as what comes out of a transform.
            draft.outputs = (meta,)
        self._builder.connect(source, target, meta)

    def of(self, tensor: Tensor, *, settled: bool = True) -> int:
        """The node that gave the tensor its values.

        Args:
            tensor: What is taken.
            settled: Whether all of torch's backward graph behind the tensor is there because of this node.
        """
        known = self.known(tensor)
        if known is None:
            known = self._owners.of(tensor)
            if known is not None:
                self._add_result(tensor, known)
            else:
                known = self._add_unseen(tensor) if self._owners.is_new(tensor) else self._add_from_outside(tensor)
        elif settled and self._owners.is_new(tensor):
            # Made after the function was seen: around a call of the user's own, by a checkpoint, by a look at a view.
            self.claim([tensor], known)
        return known

    def known(self, tensor: Tensor) -> int | None:
        """The node that gave the tensor its present values, as far as was seen."""
        if is_uninitialized(tensor):
            # It has neither a shape nor values yet; what is done to it is its making.
            return IGNORED
        return self._provenance.of(tensor, own=self.model_tensor(tensor) is not None)

    def _add_unseen(self, tensor: Tensor) -> int:
        """A node for what computed a tensor where nobody looks, as its part of the backward graph tells it."""
        function = function_behind(tensor)
        if function is not None and (known := self._customs.get(self._owners.number(tensor) + 1)) is not None:
            # Of this one something was seen inside, which is not what it gave.
            self.claim([tensor], known)
            self._add_result(tensor, known)
            return known
        name = function.__name__ if function is not None else "unseen"
        sources = self._sources([tensor])
        node = self._builder.add("op", name, self._calls[-1].node, (meta_of(tensor),))
        for source, meta in sources:
            self.connect(source, node, meta)
        self.claim([tensor], node)
        self._provenance.bind(tensor, node)
        return node

    def _add_result(self, tensor: Tensor, node: int) -> None:
        """Say that a node gave a tensor, too, which was not seen when it did."""
        if self._custom is not None and self._custom.node == node:
            self._custom.results.append(weakref.ref(tensor))
        elif node != IGNORED:
            self._builder.nodes[node].outputs += (meta_of(tensor),)
        self._provenance.bind(tensor, node)

    def _add_from_outside(self, tensor: Tensor) -> int:
        kind, name, owner = self.model_tensor(tensor) or ("tensor", "", None)
        around = (call.node for call in reversed(self._calls) if id(call.module) == owner)
        parent = next(around, self._calls[-1].node)
        node = self._builder.add(kind, name, parent, (meta_of(tensor),))
        self._provenance.bind(tensor, node)
        return node

    def model_tensor(self, tensor: Tensor) -> tuple[Kind, str, int] | None:
        """Whether a tensor is a parameter or a buffer, its name, and the id of the module that owns it."""
        return None if self.names is None else self.names.tensor(tensor)

    def claim(self, tensors: Iterable[Tensor], node: int) -> None:
        """Give a node what torch's backward graph has got behind some tensors."""
        names = self._owners.claim(tensors, node)
        if node >= 0:
            self._builder.nodes[node].autograd += names

    def _sources(self, tensors: Iterable[Tensor]) -> list[tuple[int, TensorMeta | None]]:
        """What went into tensors whose computing nobody saw, as torch's backward graph tells it."""
        leaves, owners = self._owners.sources(tensors)
        found = [(self.of(leaf), meta_of(leaf)) for leaf in leaves]
        # Which of its results went there is not known.
        return [*((owner, next(iter(self._builder.nodes[owner].outputs), None)) for owner in owners), *found]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
