"""The torch functions that can be recorded, the equivalent modules, and the sites of functions in a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph, Node

__all__ = [
    "DEFAULT_KINDS",
    "FUNCTIONS",
    "KINDS",
    "SCORED",
    "SCORES",
    "SCORE_KINDS",
    "TYPES",
    "FunctionKind",
    "base_name",
    "function_of",
    "function_sites",
    "is_of_loss",
    "site_name",
]


class FunctionKind(NamedTuple):
    """The kind of a function.

    Args:
        kind: One of :data:`KINDS`.
        type_name: The class of the equivalent module. Rules examine a function like such a module.
    """

    kind: str
    type_name: str


_ACTIVATIONS = {
    "celu": "CELU",
    "clamp": "Clamp",
    "clamp_max": "Clamp",
    "clamp_min": "Clamp",
    "clip": "Clamp",
    "elu": "ELU",
    "gelu": "GELU",
    "glu": "GLU",
    "hardshrink": "Hardshrink",
    "hardsigmoid": "Hardsigmoid",
    "hardswish": "Hardswish",
    "hardtanh": "Hardtanh",
    "leaky_relu": "LeakyReLU",
    "log_sigmoid": "LogSigmoid",
    "log_softmax": "LogSoftmax",
    "mish": "Mish",
    "prelu": "PReLU",
    "relu": "ReLU",
    "relu6": "ReLU6",
    "rrelu": "RReLU",
    "selu": "SELU",
    "sigmoid": "Sigmoid",
    "silu": "SiLU",
    "softmax": "Softmax",
    "softmin": "Softmin",
    "softplus": "Softplus",
    "softshrink": "Softshrink",
    "softsign": "Softsign",
    "special_expit": "Sigmoid",
    "special_log_softmax": "LogSoftmax",
    "special_softmax": "Softmax",
    "tanh": "Tanh",
    "tanhshrink": "Tanhshrink",
    "threshold": "Threshold",
}
_LOSSES = {
    "binary_cross_entropy": "BCELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "cosine_embedding_loss": "CosineEmbeddingLoss",
    "cross_entropy": "CrossEntropyLoss",
    "ctc_loss": "CTCLoss",
    "gaussian_nll_loss": "GaussianNLLLoss",
    "hinge_embedding_loss": "HingeEmbeddingLoss",
    "huber_loss": "HuberLoss",
    "kl_div": "KLDivLoss",
    "l1_loss": "L1Loss",
    "margin_ranking_loss": "MarginRankingLoss",
    "mse_loss": "MSELoss",
    "multi_margin_loss": "MultiMarginLoss",
    "multilabel_margin_loss": "MultiLabelMarginLoss",
    "multilabel_soft_margin_loss": "MultiLabelSoftMarginLoss",
    "nll_loss": "NLLLoss",
    "poisson_nll_loss": "PoissonNLLLoss",
    "smooth_l1_loss": "SmoothL1Loss",
    "soft_margin_loss": "SoftMarginLoss",
    "triplet_margin_loss": "TripletMarginLoss",
    "triplet_margin_with_distance_loss": "TripletMarginWithDistanceLoss",
}
_DROPOUTS = {
    "alpha_dropout": "AlphaDropout",
    "dropout": "Dropout",
    "dropout1d": "Dropout1d",
    "dropout2d": "Dropout2d",
    "dropout3d": "Dropout3d",
    "feature_alpha_dropout": "FeatureAlphaDropout",
}
_NORMALIZATIONS = {
    "batch_norm": "BatchNorm",
    "group_norm": "GroupNorm",
    "instance_norm": "InstanceNorm",
    "layer_norm": "LayerNorm",
    "local_response_norm": "LocalResponseNorm",
    "normalize": "Normalize",
    "rms_norm": "RMSNorm",
}

KINDS = ("activations", "losses", "dropout", "normalizations", "attention", "embedding", "routing")
"""The kinds of functions."""

DEFAULT_KINDS = ("activations", "losses")
"""The kinds that are recorded by default."""

SCORE_KINDS = ("heads", "experts")
"""The kinds of scores inside functions, recorded by default: scores of attention heads and of experts."""

FUNCTIONS: Mapping[str, FunctionKind] = MappingProxyType(
    {
        name: FunctionKind(kind, type_name)
        for kind, types in zip(
            KINDS,
            (
                _ACTIVATIONS,
                _LOSSES,
                _DROPOUTS,
                _NORMALIZATIONS,
                {
                    "multi_head_attention_forward": "MultiheadAttention",
                    "scaled_dot_product_attention": "ScaledDotProductAttention",
                },
                {"embedding": "Embedding", "embedding_bag": "EmbeddingBag"},
                {"argmax": "Argmax", "gather": "Gather", "topk": "TopK"},
            ),
            strict=True,
        )
        for name, type_name in types.items()
    }
)
"""The kind of each function, by its name in a recorded graph."""

TYPES = frozenset(each.type_name for each in FUNCTIONS.values())
"""The classes of the equivalent modules."""

SCORED = frozenset(
    (
        *("argmax", "embedding", "gather", "multi_head_attention_forward", "scaled_dot_product_attention", "sigmoid"),
        *("softmax", "special_expit", "special_softmax", "topk"),
    )
)
"""The functions to observe for the scores in attention and routers, and the embedding, which receives the tokens."""

SCORES = "in.scores"
"""The path of the scores inside attention and routers."""


def base_name(site: str) -> str:
    """Return the name of the function in the name of a function's site.

    Example:
        >>> base_name("encoder.relu#2"), base_name("softmax()"), base_name("head")
        ('relu', 'softmax', 'head')
    """
    return site.rpartition(".")[2].partition("#")[0].removesuffix("()")


def function_of(site: str) -> FunctionKind | None:
    """Return the kind of the function at a site, or None if the name of the site does not end with a function."""
    return FUNCTIONS.get(base_name(site))


_MOST_CALLS = 64


def site_name(around: str, function: str, number: int, taken: Container[str]) -> str:
    """Return the name of the site of a function.

    A module may call a function many times, for example in a loop over time steps. All calls from the 64th on share one
    site.

    Args:
        around: The name of the module that calls the function; empty for the model.
        function: The name of the function.
        number: The number of the function call within the module call, starting at 1.
        taken: The names of modules.

    Example:
        >>> site_name("encoder", "relu", 1, ()), site_name("", "relu", 2, ["relu"])
        ('encoder.relu', 'relu()#2')
    """
    bare = f"{around}.{function}" if around else function
    if bare in taken:
        bare += "()"
    return bare if number == 1 else f"{bare}#{min(number, _MOST_CALLS)}"


def function_sites(graph: Graph) -> dict[int, str]:
    """Return the site names of all recordable functions in a graph, by the id of their node."""
    taken = {node.name for node in graph.nodes if node.kind == "module"}
    counts: Counter[tuple[int, str]] = Counter()
    found = {}
    for node in graph.nodes:
        if node.kind == "op" and node.name in FUNCTIONS and node.parent is not None:
            around = graph[node.parent]
            # A torch module that is created where it is called is named after its class, and the second one ReLU#2.
            name = around.name.partition("#")[0]
            if around.parent is not None and name == around.type_name and name in TYPES:
                around = graph[around.parent]
            counts[around.id, node.name] += 1
            found[node.id] = site_name(around.name, node.name, counts[around.id, node.name], taken)
    return found


def is_of_loss(node: Node) -> bool:
    """Return True for a function that is part of the loss computation, and not of a layer."""
    return FUNCTIONS[node.name].kind == "losses" or node.scope.startswith("loss")
