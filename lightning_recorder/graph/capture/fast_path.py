"""A fast path that records the usual function call in one method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_recorder.graph.capture.builder import GraphBuilder, described, interned
from lightning_recorder.graph.capture.call_arguments import plain_arguments
from lightning_recorder.graph.capture.function_calls import find_caller
from lightning_recorder.graph.capture.origins import IGNORED, Call, TensorOrigins
from lightning_recorder.graph.model import TensorMeta
from lightning_recorder.internals.autograd import in_transform, sequence_number

__all__ = ["FastPath"]


class FastPath:
    """Records functions of the model that return one new tensor and whose input tensors have known nodes.

    The nodes and edges are the same as those of ``StepRecording.note_function``, which handles all other cases. The
    code makes few Python calls, because recording a tiny function takes several times as long as the function itself.
    """

    def __init__(self, builder: GraphBuilder, origins: TensorOrigins, calls: Sequence[Call], outermost: bool) -> None:
        self._builder = builder
        self._origins = origins
        self._known_tensors = origins.known_tensors
        self._owners = origins.owners
        self._calls = calls
        self._outermost = outermost
        self._with_gradients = torch.is_grad_enabled()

    def note(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        inputs: list[Tensor],
        start: int,
        result: Tensor,
    ) -> bool:
        """Record a call of a function that wrote to none of its inputs. Return False if the slow path must record it.

        ``start`` is the sequence number of the backward graph before the call.
        """
        origins, owners = self._origins, self._owners
        if origins.custom is not None or owners.complete_until != start or in_transform():
            return False
        calls = self._calls
        caller = find_caller(outermost=self._outermost and len(calls) == 1, skip=2)
        if caller.trainer or caller.custom is not None:
            return False
        find = self._known_tensors.find
        nodes = self._builder.nodes
        sources: list[int] = []
        metas: list[TensorMeta] = []
        passing: list[bool] = []
        later = 0
        for tensor in inputs:
            known = find(tensor)
            if known is None:
                if type(tensor) is Parameter and origins.first_use(tensor) is not None:
                    known = find(tensor)
                if known is None:
                    return False
            if known.node == IGNORED or tensor is result:
                return False
            if type(tensor) is Parameter and nodes[known.node].kind != "parameter":
                return False
            sources.append(known.node)
            metas.append(known.meta)
            passing.append(tensor.requires_grad)
            later = later or known.output
        builder = self._builder
        outputs = described(result.shape, result.dtype, result.device)
        draft = builder.add_op(name, calls[-1].node, outputs, caller.source, interned(metas))
        number = draft.id
        builder.connect_all(number, sources, metas, passing)
        if later:
            builder.note_outputs(number, sources, [*map(self._known_tensors.output, inputs)])
        if len(inputs) != len(args):
            given = plain_arguments(func, args, {})
            if given is not None:
                builder.given[number] = given
        end = sequence_number()
        if end != start:
            draft.autograd = owners.claim_usual(result, number, start, end)
        elif True in passing and self._with_gradients and not torch.is_grad_enabled():
            draft.note = "no_grad"
        self._known_tensors.bind_plain(result, number, outputs[0])
        return True
