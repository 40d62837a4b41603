"""The statistics of the parts of a layer: attention heads, and experts of a router."""

from __future__ import annotations

__all__ = ["EXPERT_STATISTICS", "HEAD_STATISTICS"]

HEAD_STATISTICS = (
    "attention_max_logit",
    "attention_logit_std",
    "attention_entropy",
    "attention_entropy_ratio",
    "attention_least_ratio",
    "attention_most_ratio",
    "attention_first_key",
    "attention_top_key",
    "attention_distance",
    "attention_future",
    "attention_keys",
    "attention_visible",
    "attention_masked",
    "attention_blind",
    "attention_value_rms",
    "attention_alike",
    "attention_padding",
    "attention_own",
)
"""The statistics of each attention head."""

EXPERT_STATISTICS = (
    "router_load",
    "router_probability",
    "router_entropy",
    "router_margin",
    "router_chosen",
    "router_tokens",
)
"""The statistics of each expert. The last four belong to the router, so they are equal for all of its experts."""
