"""The attention scores of a sample of the queries."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F

from lightning_recorder.reductions.base import without_autocast
from lightning_recorder.reductions.scores import HEAD_SLOTS, slots_of_scores

__all__ = ["HIDDEN", "MOST_QUERIES", "MOST_SAMPLES", "Scores", "scores_of_call"]

MOST_SAMPLES, MOST_QUERIES = 4, 8
"""The maximum numbers of samples per batch and of queries per sequence whose scores are computed."""

HIDDEN = -5000.0
"""A key is masked if its score or mask is at most this value. Masks use -10000, the dtype's lowest number, or -inf."""

_MOST_SCORES = 1 << 22  # 16 MiB; a few copies exist at a time
_MOST_VALUES = 64  # keys per sample whose value vectors are read


class Scores(NamedTuple):
    """The scores of one call.

    Args:
        largest: The largest score of each query and head; zero for a query that may not attend to any key.
        block: The statistics of each head, ``[24, heads]``; see ``HEAD_SLOTS``.
    """

    largest: Tensor
    block: Tensor


class _Sample(NamedTuple):
    """A sample of the queries of a call.

    Args:
        scores: The scores with the mask, ``[samples, heads, queries, keys]`` float32.
        hidden: True for masked keys, broadcastable to the shape of the scores; None if no key is masked.
        rows: The positions of the queries, ``[queries]``.
        is_own: True if queries and keys have the same positions.
        is_masked: True if the call has a mask.
        values: The value vectors of some keys, ``[samples, key heads, keys, features]``; None if unknown.
        alike: The cosine of each query and the key of the same position, ``[samples, heads, queries]``; None if
            unknown.
        each_sample: The step between two samples of the batch: every n-th sample is read.
    """

    scores: Tensor
    hidden: Tensor | None
    rows: Tensor
    is_own: bool
    is_masked: bool
    values: Tensor | None = None
    alike: Tensor | None = None
    each_sample: int = 1


def scores_of_call(
    name: str, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any], paddings: Sequence[Tensor] = ()
) -> Scores | None:
    """Return the attention scores of a function call; None if the call is not attention or cannot be read.

    At most four samples of a batch and eight queries of a sequence are read, evenly spaced. The scores are recomputed
    in float32 from queries and keys, or read from the arguments if the function is a softmax.

    Args:
        name: The name of the function.
        module: The module that calls the function.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        paddings: Masks of the padding in the token inputs of the model, ``[samples, positions]`` each.

    Note:
        Does not synchronize the device, and keeps no tensors alive. The caller must disable autograd.
    """
    read = _READERS.get(name)
    if read is None:
        return None
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    # Tensor subclasses may represent their values differently, and meta tensors have no values.
    if not tensors or any(type(each) not in (Tensor, nn.Parameter) for each in tensors):
        return None
    if any(each.is_nested or each.is_meta or each.is_sparse for each in tensors):
        return None
    if name == "softmax" and not _is_attention(args, kwargs):
        return None
    sample = read(module, *args, **kwargs)
    if sample is None:
        return None
    with without_autocast(tensors[0].device):
        return _scores(sample, _padding_of(sample, paddings))


def _padding_of(sample: _Sample, paddings: Sequence[Tensor]) -> Tensor | None:
    """Return a mask of the keys of a sample that are padding, ``[samples, keys]``; None if unknown."""
    found = (each[:: sample.each_sample] for each in reversed(paddings) if each.device == sample.scores.device)
    shape = len(sample.scores), sample.scores.shape[-1]
    return next((each for each in found if sample.is_own and each.shape == shape), None)


def _scores(sample: _Sample, padding: Tensor | None = None) -> Scores:
    scores, hidden = sample.scores, sample.hidden
    keys = scores.shape[-1]
    if hidden is None:
        shown, seen, some = scores, torch.full_like(scores[..., 0], keys), scores
    else:
        hidden = hidden.expand_as(scores)
        shown = scores.masked_fill(hidden, -torch.inf)
        seen = (keys - hidden.sum(-1)).float()
        some = scores.masked_fill(hidden, 0.0)
    sees, counts = seen >= 1, seen >= 2
    weights = shown.softmax(-1)
    if hidden is not None:
        weights = torch.where(sees[..., None], weights, 0.0)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    ratio = entropy / seen.clamp(min=2).log()
    mean = some.sum(-1, keepdim=True) / seen.clamp(min=1)[..., None]
    deviations = (some - mean).square_()
    if hidden is not None:
        deviations.masked_fill_(hidden, 0.0)
    largest = shown.amax(-1)
    # Values of each query that may attend to two or more keys, [samples, heads, queries]. All are summed in one
    # operation, because the overhead of an operation exceeds its arithmetic.
    each_query = {
        "queries": torch.ones_like(entropy),
        "entropy": entropy,
        "entropy_ratio": ratio,
        "first_key": weights[..., 0],
        "top_key": weights.amax(-1),
        "variance": deviations.sum(-1) / seen.clamp(min=1),
    }
    if sample.is_own:
        offsets = torch.arange(keys, device=scores.device) - sample.rows[:, None]
        each_query["placed"] = each_query["queries"]
        each_query["distance"] = (weights * offsets.abs()).sum(-1)
        each_query["future"] = (weights * (offsets > 0)).sum(-1)
        each_query["own"] = each_query["queries"]
        if hidden is not None:
            each_query["own"] = (
                ~hidden[..., torch.arange(len(sample.rows), device=scores.device), sample.rows]
            ).float()
    no_counts = ~counts
    sums = torch.stack([*each_query.values()]).masked_fill_(no_counts, 0.0).sum((1, 3), dtype=torch.float64)
    ends = torch.stack([ratio, -ratio]).masked_fill_(no_counts, -torch.inf).amax((1, 3))
    total_seen = _total(seen)
    queries = float(scores[:, 0, :, 0].numel())
    found: dict[str, Tensor | float] = {
        **dict(zip(each_query, sums.unbind(), strict=True)),
        "rows": queries,
        "masked": queries * sample.is_masked,
        "keys": total_seen,
        "visible": total_seen / keys,
        "samples": float(len(scores)),
        "blind": (~sees).all(-1).sum(0),
        "max_logit": largest.amax((0, 2)),
        "most_ratio": ends[0],
        "minus_least_ratio": ends[1],
        "minus_least_alike": -torch.inf,
    }
    if padding is not None:
        # [samples, 1, queries]
        is_token = ~padding[:, sample.rows] & padding.any(1, keepdim=True)
        asks = counts & is_token[:, None]
        found["padded"] = _total(asks)
        found["padding"] = _total((weights * padding[:, None, None]).sum(-1), asks)
    if sample.values is not None:
        squares = sample.values.float().square().mean((0, 2, 3))
        found["values"] = squares.repeat_interleave(scores.shape[1] // len(squares))
        found["valued"] = 1.0
    if sample.alike is not None:
        found["minus_least_alike"] = -sample.alike.amin((0, 2))
    # Use zero for queries without visible keys, so that the statistics of the largest scores are finite.
    return Scores(torch.where(sees, largest, 0.0), slots_of_scores(HEAD_SLOTS, found, scores[0, :, 0, 0]))


def _total(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the sum of the selected values over samples and queries, ``[heads]``."""
    return (values if counts is None else torch.where(counts, values, 0.0)).sum((0, 2), dtype=torch.float64)


class _Places(NamedTuple):
    """The samples and the queries to read: every n-th of each."""

    each_sample: int
    first: int
    each_query: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the chosen part of a tensor, ``[samples, heads, queries, …]``. Dimensions of size 1 are kept."""
        found = tensor[:: self.each_sample] if tensor.shape[0] > 1 else tensor
        return found[..., self.first :: self.each_query, :] if tensor.shape[-2] > 1 else found

    def rows(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.first, size, self.each_query, device=device)


def _places(samples: int, heads: int, queries: int, keys: int) -> _Places:
    """Choose samples and queries, including the last query. Slices, unlike indices, need no copy to the device."""
    for most_samples, most_queries in ((MOST_SAMPLES, MOST_QUERIES), (1, MOST_QUERIES), (1, 1)):
        if most_samples * most_queries * heads * keys <= _MOST_SCORES:
            break
    each_query = math.ceil(queries / most_queries)
    return _Places(math.ceil(samples / most_samples), (queries - 1) % each_query, each_query)


def _of_fused(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Sample | None:
    """Read ``scaled_dot_product_attention``."""
    query, key, value = (_with_heads(each, module) for each in (query, key, value))
    if 0 in (*query.shape, *key.shape) or key.shape[0] != query.shape[0] or query.shape[1] % key.shape[1]:
        return None
    samples, heads, queries, keys = (*query.shape[:3], key.shape[2])
    places = _places(samples, heads, queries, keys)
    some, theirs = places.of(query).float(), key[:: places.each_sample].float()
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    groups = heads // key.shape[1]
    # [samples, key heads, queries of all heads of the group, keys]
    together = some.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    with without_autocast(query.device):
        products = together @ theirs.mT
    scores = products.unflatten(2, (groups, some.shape[2])).flatten(1, 2) * factor
    rows = places.rows(queries, query.device)
    hidden = None
    if is_causal:
        hidden = torch.arange(keys, device=query.device) > rows[:, None]
    if attn_mask is not None:
        mask = _mask_with_heads(attn_mask, query, module)
        if mask is None:
            return None
        mask = places.of(mask)
        if mask.dtype != torch.bool:
            scores = scores + mask
        hides = ~mask if mask.dtype == torch.bool else mask <= HIDDEN
        hidden = hides if hidden is None else hidden | hides
    alike = None
    if queries == keys:
        mates = places.of(key).float().repeat_interleave(groups, 1)
        alike = F.cosine_similarity(some, mates, dim=-1) if mates.shape == some.shape else None
    values = value[:: places.each_sample, :, :: math.ceil(keys / _MOST_VALUES)]
    return _Sample(scores, hidden, rows, queries == keys, hidden is not None, values, alike, places.each_sample)


def _with_heads(tensor: Tensor, module: nn.Module | None) -> Tensor:
    """Return a tensor as ``[samples, heads, positions, features]``. A 3-d tensor may combine samples and heads."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    if tensor.dim() == 2:
        return tensor[None, None]
    heads = _number_of_heads(module)
    return tensor.unflatten(0, (-1, heads)) if len(tensor) % heads == 0 else tensor[:, None]


_NAMES_OF_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


def _number_of_heads(module: nn.Module | None) -> int:
    """Return the number of heads of a module whose tensors combine samples and heads in one dimension; 1 if unknown."""
    own = {} if module is None else module.__dict__
    return next((own[each] for each in _NAMES_OF_HEADS if type(own.get(each)) is int and own[each] > 0), 1)


def _mask_with_heads(mask: Tensor, query: Tensor, module: nn.Module | None) -> Tensor | None:
    """Return a mask in four dimensions, broadcastable to the scores; None if its shape does not fit."""
    if mask.dim() == 3 and mask.shape[0] not in (1, query.shape[1]):
        mask = mask.unflatten(0, (query.shape[0], -1)) if mask.shape[0] % query.shape[0] == 0 else mask
    elif mask.dim() > 4:
        mask = mask.expand(*mask.shape[:-4], mask.shape[-4], *mask.shape[-3:]).flatten(0, -4)
    while mask.dim() < 4:
        mask = mask[None]
    fits = all(mine in (1, size) for mine, size in zip(mask.shape[:3], query.shape[:3], strict=True))
    return mask if fits else None


def _of_softmax(module: nn.Module | None, scores: Tensor, *args: Any, **kwargs: Any) -> _Sample | None:
    """Read the argument of a softmax."""
    whole = _with_heads(scores, module)
    if 0 in whole.shape:
        return None
    samples, heads, queries, keys = whole.shape
    places = _places(samples, heads, queries, keys)
    some = places.of(whole).float()
    hidden = some <= HIDDEN
    # Attention often has no mask, but checking whether ``hidden`` has a true value would synchronize the device.
    rows = places.rows(queries, scores.device)
    return _Sample(some, hidden, rows, queries == keys, is_masked=False, each_sample=places.each_sample)


def _is_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a softmax over the last dimension of a product of queries and keys, possibly masked.

    A batched product of two tensors is recognized by its node in the autograd graph, which differs from that of a
    product with a weight. Without gradients there is no graph, so no softmax counts as attention.
    """
    scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if not isinstance(scores, Tensor) or scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
        return False
    if scores.shape[-1] < 2 or not scores.is_floating_point():
        return False
    return _is_product(scores.grad_fn)


_PRODUCTS = ("BmmBackward0", "BaddbmmBackward0")
_BETWEEN = frozenset(
    f"{name}Backward{number}"
    for number in range(3)
    for name in (
        *("Add", "Sub", "Mul", "Div", "MaskedFill", "Where", "ToCopy", "View", "UnsafeView", "Reshape", "ReshapeAlias"),
        *("Clone", "Transpose", "Permute", "Expand", "Unsqueeze", "Squeeze", "Tanh", "Clamp", "ClampMin", "ClampMax"),
        *("Slice", "Alias", "T", "Maximum", "Copy", "Copyslices", "Cat"),
    )
)
_DEEPEST = 12


def _is_product(node: Node | None) -> bool:
    """Return True for a batched product of two tensors, possibly followed by a scale, a mask or a soft cap."""
    level = [] if node is None else [node]
    seen: set[Node] = set()
    for _ in range(_DEEPEST):
        if any(each.name() in _PRODUCTS for each in level):
            return True
        seen.update(level)
        inner = (edge for each in level if each.name() in _BETWEEN for edge, _ in each.next_functions)
        level = [each for each in dict.fromkeys(inner) if each is not None and each not in seen]
    return False


@lru_cache(1)
def _signature() -> inspect.Signature:
    return inspect.signature(F.multi_head_attention_forward)


def _of_module(module: nn.Module | None, *args: Any, **kwargs: Any) -> _Sample | None:
    """Read ``multi_head_attention_forward``, the function of ``nn.MultiheadAttention``, by projecting a sample again.

    No function mode is active inside ``multi_head_attention_forward``, so its own projections cannot be observed.
    """
    given = _signature().bind(*args, **kwargs)
    given.apply_defaults()
    call = given.arguments
    query, key, value, heads = (call[name] for name in ("query", "key", "value", "num_heads"))
    if call["static_k"] is not None or call["static_v"] is not None:
        return None
    query, key, value = (each[:, None] if each.dim() == 2 else each for each in (query, key, value))
    samples, features = query.shape[1:]
    if call["use_separate_proj_weight"]:
        weights = [call[f"{each}_proj_weight"] for each in "qkv"]
    else:
        weights = call["in_proj_weight"].chunk(3)
    biases = [None] * 3 if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    each_sample = math.ceil(samples / MOST_SAMPLES)
    query, key, value = (each[:, ::each_sample] for each in (query, key, value))
    made = [F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]
    # Additional keys that all queries may attend to follow the keys of the sequence: a learned key, and a key of zeros.
    learned = [call["bias_k"], call["bias_v"]]
    if learned[0] is not None:
        made[1:] = [
            torch.cat([each, bias.expand(1, *each.shape[1:])]) for each, bias in zip(made[1:], learned, strict=True)
        ]
    if call["add_zero_attn"]:
        made[1:] = [F.pad(each, (0, 0, 0, 0, 0, 1)) for each in made[1:]]
    more = (0, (learned[0] is not None) + bool(call["add_zero_attn"]))
    # [samples, heads, positions, features]
    query, key, value = (each.unflatten(-1, (heads, features // heads)).permute(1, 2, 0, 3) for each in made)
    mask, is_causal = call["attn_mask"], False
    if mask is None and call["is_causal"]:
        is_causal = True
    if mask is not None:
        mask = F.pad(_negated(mask), more, value=mask.dtype == torch.bool)
        mask = mask.unflatten(0, (samples, heads)) if mask.dim() == 3 else mask[None, None]
        mask = mask[::each_sample] if mask.shape[0] > 1 else mask
    padding = call["key_padding_mask"]
    if padding is not None:
        padding = _negated(padding if padding.dim() == 2 else padding[None])[::each_sample, None, None]
        padding = F.pad(padding, more, value=padding.dtype == torch.bool)
        mask = padding if mask is None else _both(mask, padding)
    found = _of_fused(None, query, key, value, mask, is_causal=is_causal)
    return None if found is None else found._replace(each_sample=each_sample * found.each_sample)


def _negated(mask: Tensor) -> Tensor:
    """Invert a boolean mask of nn.MultiheadAttention for scaled_dot_product_attention, where True allows a key."""
    return ~mask if mask.dtype == torch.bool else mask


def _both(one: Tensor, other: Tensor) -> Tensor:
    """Combine two masks."""
    if one.dtype == other.dtype == torch.bool:
        return one & other
    zero = torch.zeros((), device=one.device)
    added = [torch.where(each, zero, -torch.inf) if each.dtype == torch.bool else each for each in (one, other)]
    return added[0] + added[1]


_READERS: Mapping[str, Callable[..., _Sample | None]] = {
    "scaled_dot_product_attention": _of_fused,
    "multi_head_attention_forward": _of_module,
    "softmax": _of_softmax,
}
