"""The rules, one file per subject. Each rule is a function with its limits as keyword arguments."""

from lightning_recorder.insight.rule import Rule
from lightning_recorder.insight.rules import (
    attention,
    blocks,
    classes,
    comparisons,
    experts,
    gradient_depth,
    gradient_steps,
    gradients,
    held_parts,
    latent,
    loss_terms,
    losses,
    noise_scale,
    non_finite,
    normalization,
    operations,
    optimization,
    outputs,
    own_targets,
    progress,
    ranks,
    samples,
    scales,
    sequences,
    small_updates,
    target_sources,
    targets,
    training_settings,
    training_step,
    uncalled,
    wiring,
)

__all__ = ["RULES"]

# Findings that do not explain each other are ranked by this order: rules with a more evident cause come first. So
# settings precede single layers, and single layers precede comparisons.
_FILES = (
    non_finite,
    ranks,
    samples,
    losses,
    loss_terms,
    own_targets,
    operations,
    sequences,
    wiring,
    targets,
    target_sources,
    attention,
    blocks,
    experts,
    training_settings,
    training_step,
    scales,
    held_parts,
    optimization,
    small_updates,
    uncalled,
    gradients,
    latent,
    normalization,
    outputs,
    comparisons,
    gradient_steps,
    gradient_depth,
    classes,
    noise_scale,
    progress,
)

RULES: tuple[Rule, ...] = tuple(each for file in _FILES for each in vars(file).values() if isinstance(each, Rule))
"""All rules, in the order of their files."""
