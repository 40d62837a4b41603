"""The choices of routers: a softmax or sigmoid over experts, and the best experts for each token."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_recorder.reductions.base import without_autocast
from lightning_recorder.reductions.scores import EXPERT_SLOTS, slots_of_scores

__all__ = ["MOST_TOKENS", "Choice", "RouterReader"]

MOST_TOKENS = 4096
"""The maximum number of tokens per call whose entropy and margin are computed."""

_MOST_EXPERTS = 1024
_MOST_CHOSEN = 64
_NORMALIZERS = ("softmax", "sigmoid", "special_expit", "special_softmax")
_SOFTMAX = ("softmax", "special_softmax")
_NAMES_OF_ROUTERS = re.compile(r"rout|gat(e|ing)|expert|moe|switch", re.IGNORECASE)


class Choice(NamedTuple):
    """The choice of a router in one call.

    Args:
        name: The name of the site: the function that chose.
        best: The probability of the best expert of each token, ``[tokens]``; None if this choice adds experts to an
            earlier choice for the same tokens.
        block: The statistics of each expert, ``[7, experts]``; see ``EXPERT_SLOTS``.
    """

    name: str
    best: Tensor | None
    block: Tensor


class _Call(NamedTuple):
    """The probabilities and choices that a call of a module has computed so far.

    Args:
        probabilities: The expert probabilities computed so far, each with the function that computed it.
        choices: Choices from scores whose probabilities have not been computed yet, by the shape of the chosen scores.
        masked: The same choices, by the shape of all scores.
        used: The probabilities from which experts were chosen.
        margins: The sums of the margins of the latest choices, by the name of the site.
    """

    probabilities: list[tuple[weakref.ref[Tensor], str]]
    choices: dict[tuple[int, ...], Choice]
    masked: dict[tuple[int, ...], Choice]
    used: list[weakref.ref[Tensor]]
    margins: dict[str, Tensor]


class RouterReader:
    """Finds routers among the functions that a module calls.

    A router is a module call of one of two kinds. It computes probabilities with a softmax or a sigmoid and chooses the
    best of them. Or it chooses the best scores and computes their softmax, possibly with all other scores set to minus
    infinity. The probabilities must require a gradient. A load-balancing loss, which repeats the choices of routers, is
    not a router.

    A module with the name of a router may also choose by ``argmax``, or draw experts and read their probabilities with
    ``gather``. It may choose several experts one after the other, each time with the earlier experts masked. Such
    choices count as one choice, at the site of the first.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}

    def clear(self) -> None:
        """Clear all state, at the end of a step."""
        self._calls.clear()

    def read(
        self,
        name: str,
        site: str,
        module: nn.Module,
        frame: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> Choice | None:
        """Return the choice of a router that this function call completes, or None.

        Note:
            Does not synchronize the device. A choice without probabilities is kept until the module computes its
            softmax or the step ends. No other tensors are kept alive.
        """
        given = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if type(given) is not Tensor or not _has_experts(given):
            return None
        call = self._calls.get(frame)
        if call is None:
            call = self._calls[frame] = _Call([], {}, {}, [], {})
        if name in _NORMALIZERS:
            return _of_normalizer(call, name, args, kwargs, given, result)
        found = _chosen(name, module, site, args, kwargs, given, result)
        if found is None:
            return None
        scores, indices = found
        for reference, function in reversed(call.probabilities):
            made = reference()
            if made is not None and made.shape[-1] == scores.shape[-1] and made.numel() == scores.numel():
                is_of_groups = scores.dim() > made.dim() and scores.shape[-2] == 1  # a single group with all experts
                if is_of_groups or (name == "gather" and made is not given) or not _is_first(made.grad_fn, site):
                    return None
                return _in_turn(call, _choice(site, scores, indices, made, function), made, given)
        if name == "topk" and scores.requires_grad and scores.shape[-1] > 2:
            choice = _choice(site, scores, indices, scores, "")
            call.choices[tuple(indices.shape)] = call.masked[tuple(scores.shape)] = choice
        return None


def _has_experts(tensor: Tensor) -> bool:
    is_of_tokens = 2 <= tensor.dim() <= 3 and 2 <= tensor.shape[-1] <= _MOST_EXPERTS and tensor.numel() > 0
    return is_of_tokens and tensor.is_floating_point() and not tensor.is_meta


def _in_turn(call: _Call, choice: Choice, made: Tensor, given: Tensor) -> Choice | None:
    """Return the first choice of a call unchanged, and a later choice as the difference that it adds to the first."""
    origins: list[Any] = _origins(made.grad_fn)
    first = next((each.metadata[_SITE] for each in origins if each.metadata.get(_SITE) in call.margins), None)
    if first is None:
        for each in origins:
            each.metadata[_SITE] = choice.name
        first = choice.name
    elif not _is_masked(given.grad_fn) or (given is made and any(each() is made for each in call.used)):
        return None  # a repetition of the same choice
    call.used.append(weakref.ref(made))
    margin = choice.block[EXPERT_SLOTS.index("margin")]
    before, call.margins[first] = call.margins.get(first), margin
    if before is None:
        return choice
    names = ("chosen", "load", "margin")
    added = dict(zip(EXPERT_SLOTS, choice.block, strict=True)) | {"margin": margin - before}
    return Choice(first, None, slots_of_scores(EXPERT_SLOTS, {name: added[name] for name in names}, margin))


_MASKS = ("Scatter", "MaskedFill", "Where", "IndexPut")
_PASSED = frozenset(
    f"{name}Backward{number}"
    for number in range(3)
    for name in (
        *("Softmax", "Sigmoid", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Clone", "Cat", "Stack", "Slice"),
        *("Select", "Index", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Expand", "Alias"),
    )
)
_DEEPEST = 8
_MARK, _SITE = "lightning_recorder: router", "lightning_recorder: choice"


def _origins(node: Node | None) -> list[Node]:
    """Return the autograd nodes that compute the scores from which probabilities are computed."""
    found: list[Node] = []
    level = [] if node is None else [node]
    for _ in range(_DEEPEST):
        passed = {each: each.name() in _PASSED or each.name().startswith(_MASKS) for each in level}
        found += [each for each in level if not passed[each]]
        inner = (edge for each in level if passed[each] for edge, _ in each.next_functions)
        level = [each for each in dict.fromkeys(inner) if each is not None]
    return found


def _is_first(node: Node | None, site: str) -> bool:
    """Return True if no other module has chosen among these scores, and mark the scores as used by this module.

    The mark is kept in the autograd graph, because a reference to a node would keep the tensors of the graph alive.
    """
    module = site.rpartition(".")[0]
    origins: list[Any] = [*_origins(node)]  # torch annotates the property ``metadata`` as a method
    if any(each.metadata.get(_MARK, module) != module for each in origins):
        return False
    for each in origins:
        each.metadata[_MARK] = module
    return True


def _is_masked(node: Node | None) -> bool:
    """Return True if the scores were masked: some scores were kept, and all others were set to a constant."""
    for _ in range(_DEEPEST):
        if node is None:
            return False
        if node.name().startswith(_MASKS):
            return True
        inner = [each for each, _ in node.next_functions if each is not None]
        node = inner[0] if len(inner) == 1 and node.name() in _PASSED else None
    return False


def _of_normalizer(
    call: _Call, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Tensor, result: Any
) -> Choice | None:
    """Store computed probabilities, or return the earlier choice that these probabilities complete."""
    if name in _SOFTMAX:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        if dim not in (-1, given.dim() - 1):
            return None
    choice = call.choices.pop(tuple(given.shape), None)
    if choice is None and _is_masked(given.grad_fn):
        choice = call.masked.pop(tuple(given.shape), None)
    if choice is not None:
        return choice if _is_first(given.grad_fn, choice.name) else None
    if type(result) is Tensor and result.requires_grad:
        call.probabilities.append((weakref.ref(result), name))
    return None


def _chosen(
    name: str, module: nn.Module, site: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Tensor, result: Any
) -> tuple[Tensor, Tensor] | None:
    """Return the scores, and the indices of the chosen experts per token, ``[…, chosen]``; None without a choice."""
    if name in ("argmax", "gather"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        is_router = _NAMES_OF_ROUTERS.search(f"{site.rpartition('.')[0]} {type(module).__name__}") is not None
        if not is_router or dim not in (-1, given.dim() - 1) or not isinstance(result, Tensor):
            return None
        if name == "argmax":
            return given, result if result.dim() == given.dim() else result[..., None]
        indices = args[2] if len(args) > 2 else kwargs["index"]
        are_some = indices.shape[-1] < given.shape[-1] and indices.shape[:-1] == given.shape[:-1]
        return (given, indices) if are_some else None
    if name != "topk":
        return None
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    largest = args[3] if len(args) > 3 else kwargs.get("largest", True)
    indices = result[1]
    if dim not in (-1, given.dim() - 1) or not largest:
        return None
    return (given, indices) if 1 <= indices.shape[-1] <= min(_MOST_CHOSEN, given.shape[-1] - 1) else None


def _choice(site: str, scores: Tensor, indices: Tensor, probabilities: Tensor, function: str) -> Choice:
    experts, chosen = scores.shape[-1], indices.shape[-1]
    with without_autocast(scores.device):
        scores, probabilities = (each.detach().reshape(-1, experts).float() for each in (scores, probabilities))
        indices = indices.reshape(-1)
        load = torch.zeros(experts, dtype=torch.float64, device=scores.device)
        load.index_add_(0, indices, torch.ones_like(indices, dtype=torch.float64))
        tokens = len(scores)
        step = math.ceil(tokens / MOST_TOKENS)
        scores, shares = scores[::step], probabilities[::step]
        if not function:
            shares = shares.softmax(-1)
        elif function not in _SOFTMAX:
            shares = shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)
        best = scores.topk(chosen + 1, dim=-1).values
        margins = best[:, -2] - best[:, -1]
        # If the choice is limited to some groups of experts, the scores of all other experts are infinite.
        margins = torch.where(margins.isinf(), 0.0, margins)
        found: dict[str, Tensor | float] = {
            "tokens": float(tokens),
            "sampled": float(len(scores)),
            "chosen": float(tokens * chosen),
            "load": load,
            "probability": shares.sum(0, dtype=torch.float64),
            "entropy": (-torch.special.xlogy(shares, shares).sum()).expand(experts),
            "margin": margins.sum().expand(experts),
        }
        return Choice(site, shares.amax(-1), slots_of_scores(EXPERT_SLOTS, found, shares[0]))
