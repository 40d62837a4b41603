"""Tasks with one planted fault each, and the modules at fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tests.insight.corpus.sequences  # noqa: F401 - registers its tasks
from tests.insight.corpus.healthy import kaiming, stack
from tests.insight.corpus.task import HEALTHY, Task, adam, digits, images, sgd

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Args:
        make: A function that makes the task.
        culprits: Names of modules; the first line of the findings must name one of them. An empty name stands for the
            whole model.
        rules: Names of rules; the first finding must be one of them.
    """

    make: Callable[[], Task]
    culprits: tuple[str, ...]
    rules: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(base: str, culprits: str, rules: str) -> Callable[[Callable[[Any], object]], Callable[[Any], object]]:
    """Register a function that changes a healthy task."""

    def register(plant: Callable[[Any], object]) -> Callable[[Any], object]:
        def make() -> Task:
            task = HEALTHY[base]()
            changed = plant(task)
            return changed if isinstance(changed, Task) else task

        names = tuple("" if name == "*" else f"net.{name}" for name in culprits.split())
        FAULTS[plant.__name__] = Fault(make, names, tuple(rules.split()))
        return plant

    return register


def scale(layer: Any, factor: float) -> None:
    with torch.no_grad():
        layer.weight.mul_(factor)


def fill(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda _module, _inputs, output: change(output))


def with_slow_group(task: Task, part: nn.Module, **options: Any) -> None:
    """Give the parameters of one part their own group of the optimizer."""
    theirs = {id(each) for each in part.parameters()}
    task.groups = lambda: [
        {"params": [each for each in task.net.parameters() if id(each) not in theirs]},
        {"params": list(part.parameters()), **options},
    ]


# Dead outputs.


@fault("mlp_adam", "act2 fc2", "dead-output")
def dead_relu_from_bias(task: Any) -> None:
    fill(task.net.fc2.bias, -100.0)


@fault("cnn_cosine", "act2 bn2", "dead-output")
def dead_relu_after_batchnorm(task: Any) -> None:
    fill(task.net.bn2.bias, -30.0)


@fault("mlp_deep_sgd", "act4 fc4", "dead-output")
def dead_relu_from_step_60(task: Any) -> None:
    task.events[60] = lambda: fill(task.net.fc4.bias, -100.0)


@fault("mlp_dropout_onecycle", "drop2", "dead-output")
def dropout_of_everything(task: Any) -> None:
    task.net.drop2.p = 1.0


@fault("autoencoder", "fc2 act2", "dead-output constant-weight")
def zeroed_layer(task: Any) -> None:
    fill(task.net.fc2.weight, 0.0)
    fill(task.net.fc2.bias, 0.0)
    task.net.fc2.requires_grad_(False)


@fault(
    "transformer_causal", "blocks.2.mlp.2 blocks.2.mlp blocks.2.dropout", "dead-output gradient-stops unlike-siblings"
)
def branch_times_zero(task: Any) -> None:
    change_output(task.net.blocks[2].mlp[2], lambda output: output * 0.0)


# Gradients that do not arrive.


@fault("cnn_cosine", "pool act2", "gradient-stops")
def detached_pool(task: Any) -> None:
    change_output(task.net.pool, Tensor.detach)


@fault("unet", "middle", "gradient-stops")
def detached_skip(task: Any) -> None:
    change_output(task.net.middle, Tensor.detach)


@fault("vision_transformer", "patch", "gradient-stops")
def patch_without_grad(task: Any) -> None:
    change_output(task.net.patch, Tensor.detach)


@fault("gpt2", "transformer.h.1 transformer.h.1.mlp.dropout transformer.h.1.mlp.c_proj", "gradient-stops")
def detached_gpt2_block(task: Any) -> None:
    task.net.transformer.h[1].register_forward_hook(
        lambda _module, _inputs, output: (
            output.detach() if isinstance(output, Tensor) else (output[0].detach(), *output[1:])
        )
    )


@fault("adversarial", "generator.head generator.fc1 generator.act2", "gradient-stops")
def generator_without_gradient(task: Any) -> None:
    task.detached = True


@fault("siamese", "extra", "unused-parameter")
def layer_never_called(task: Any) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = task.net, nn.Linear(16, 16)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.body(inputs)
            return out

    return Task(Net(), task.batch, task.loss, optimizer=task.optimizer)


@fault("mixture_of_experts", "router experts.3", "scale-jump never-chosen")
def expert_never_chosen(task: Any) -> None:
    with torch.no_grad():
        task.net.router.bias[3] = -100.0


# Scales of gradients and weights.


@fault("mlp_gates", "fc1 act1", "vanishing-gradient")
def deep_sigmoids(task: Any) -> Task:
    return Task(stack(64, *[32] * 12, 10, act=nn.Sigmoid), optimizer=sgd(0.05))


@fault("mlp_tanh", "fc1", "vanishing-gradient")
def small_init_everywhere(task: Any) -> Task:
    net = stack(64, *[48] * 10, 10, act=nn.Tanh)
    for each in net.modules():
        if isinstance(each, nn.Linear):
            nn.init.normal_(each.weight, std=0.02)
    return Task(net, optimizer=sgd(0.01))


@fault("mlp_deep_sgd", "fc1 fc2 fc3 fc4 fc5 fc6 fc7 fc8 head", "exploding-gradient weights-too-large block-trend")
def large_init_everywhere(task: Any) -> Task:
    net = kaiming(stack(64, *[48] * 8, 10))
    for each in net.modules():
        if isinstance(each, nn.Linear):
            scale(each, 3.0)
    return Task(net, optimizer=adam(1e-4))


@fault("cnn_accumulated", "conv3", "weights-too-large scale-jump")
def one_large_layer(task: Any) -> None:
    scale(task.net.conv3, 40.0)


@fault("unet", "merge2", "weights-too-large scale-jump")
def one_large_merge(task: Any) -> None:
    scale(task.net.merge2, 30.0)


@fault(
    "transformer_encoder",
    "encoder.layers.1.linear1 encoder.layers.1.linear2",
    "weights-too-large scale-jump unlike-siblings",
)
def one_large_feedforward(task: Any) -> None:
    scale(task.net.encoder.layers[1].linear1, 30.0)


@fault("gpt2", "transformer.wte", "weights-too-large scale-jump")
def large_embedding(task: Any) -> None:
    scale(task.net.transformer.wte, 2_000.0)


@fault("transformer_bf16", "blocks.3.mlp.2 blocks.3.mlp.0", "unlike-siblings")
def small_sibling(task: Any) -> None:
    scale(task.net.blocks[3].mlp[2], 0.02)


@fault("transformer_causal", "blocks.0 blocks.1 blocks.2 blocks.3", "block-trend")
def residual_times_four(task: Any) -> None:
    for block in task.net.blocks:
        block.keep = 4.0


@fault("diffusion", "layers.1", "constant-weight")
def equal_weights(task: Any) -> None:
    fill(task.net.layers[1].weight, 0.01)
    task.net.layers[1].weight.register_hook(lambda gradient: gradient.mean() + 0 * gradient)


@fault("resnet_sgd", "stem", "input-scale")
def inputs_not_normalized(task: Any) -> None:
    clean = task.batch
    task.batch = lambda step: (127 + 80 * clean(step)[0], clean(step)[1])


@fault("mlp_batchnorm_sgd", "fc1", "input-scale")
def inputs_in_thousands(task: Any) -> None:
    task.batch = lambda step: (digits(step)[0] * 3_000, digits(step)[1])


@fault("cnn_accumulated", "conv1", "sudden-change input-scale")
def inputs_change_at_step_80(task: Any) -> None:
    task.batch = lambda step: (images(step)[0] * (50 if 80 <= step < 100_000 else 1), images(step)[1])


# Saturation.


@fault("mlp_tanh", "act3 fc3", "saturation weights-too-large")
def saturated_tanh(task: Any) -> None:
    scale(task.net.fc3, 30.0)


@fault("mlp_gates", "act2 fc2", "saturation weights-too-large")
def saturated_sigmoid(task: Any) -> None:
    scale(task.net.fc2, 100.0)


@fault("lstm", "rnn", "saturation weights-too-large")
def saturated_lstm(task: Any) -> None:
    with torch.no_grad():
        for each in task.net.rnn.parameters():
            each.mul_(30.0)


@fault(
    "transformer_causal",
    "blocks.1.attention.softmax blocks.1.attention.query blocks.1.attention.key",
    "attention-collapse weights-too-large",
)
def collapsed_attention(task: Any) -> None:
    scale(task.net.blocks[1].attention.query, 7.0)
    scale(task.net.blocks[1].attention.key, 7.0)


@fault("attention_pooling", "attention.softmax attention.query attention.key", "attention-collapse weights-too-large")
def collapsed_pooling(task: Any) -> None:
    scale(task.net.attention.query, 12.0)
    scale(task.net.attention.key, 12.0)


# Optimizers.


@fault("mlp_adam", "fc2", "learning-rate-outlier weight-drift")
def learning_rate_of_one_layer(task: Any) -> None:
    with_slow_group(task, task.net.fc2, lr=0.1)


@fault("cnn_cosine", "conv2", "learning-rate-outlier weight-drift")
def learning_rate_of_one_convolution(task: Any) -> None:
    with_slow_group(task, task.net.conv2, lr=3.0)
    task.schedule = None


@fault("mlp_adam", "fc1 fc2 fc3 head", "learning-rate-too-large")
def learning_rate_of_all_layers(task: Any) -> None:
    task.optimizer = adam(0.3)


@fault("vision_transformer", "head", "weight-decay-too-strong")
def weight_decay_of_the_head(task: Any) -> None:
    with_slow_group(task, task.net.head, weight_decay=80.0)


@fault("regression", "fc1 fc2 head", "weight-decay-too-strong")
def weight_decay_everywhere(task: Any) -> None:
    task.optimizer = sgd(0.1, weight_decay=0.3)


@fault("mlp_batchnorm_sgd", "fc2", "frozen")
def frozen_by_accident(task: Any) -> None:
    task.net.fc2.requires_grad_(False)


@fault("message_passing", "layers.1", "not-in-optimizer")
def layer_not_in_the_optimizer(task: Any) -> None:
    theirs = {id(each) for each in task.net.layers[1].parameters()}
    task.groups = lambda: [each for each in task.net.parameters() if id(each) not in theirs]


@fault("mixer", "head", "not-in-optimizer")
def head_not_in_the_optimizer(task: Any) -> None:
    theirs = {id(each) for each in task.net.head.parameters()}
    task.groups = lambda: [each for each in task.net.parameters() if id(each) not in theirs]


@fault("mlp_deep_sgd", "fc1 fc2 fc3 fc4 fc5 fc6 fc7 fc8 head", "updates-lost does-not-move")
def updates_lost_in_bf16(task: Any) -> None:
    task.options = {"precision": "bf16-true"}
    task.optimizer = sgd(2e-5, 0.0)


@fault("siamese", "fc1 fc2 head", "updates-lost does-not-move barely-moves")
def learning_rate_zero(task: Any) -> None:
    task.optimizer = adam(0.0)


@fault("autoencoder", "*", "always-clipped")
def clipped_to_nothing(task: Any) -> None:
    task.optimizer = sgd(0.01)
    task.options = {"gradient_clip_val": 1e-7}


# Normalization.


@fault("cnn_cosine", "bn2", "eval-mode norm-ineffective")
def batchnorm_in_eval(task: Any) -> None:
    scale(task.net.conv2, 6.0)
    task.net.bn2.train = lambda mode=True: task.net.bn2
    task.net.bn2.training = False


@fault("mlp_dropout_onecycle", "drop1 drop2 drop3", "eval-mode")
def everything_in_eval(task: Any) -> None:
    task.net.eval()
    task.net.train = lambda mode=True: task.net


@fault("resnet_sgd", "blocks.1.norm1", "running-statistics train-differs")
def running_statistics_frozen(task: Any) -> None:
    task.net.blocks[1].norm1.momentum = 0.0
    scale(task.net.blocks[1].conv1, 5.0)


@fault("mixer", "blocks.1.norm2", "norm-ineffective unlike-siblings")
def epsilon_too_large(task: Any) -> None:
    task.net.blocks[1].norm2.eps = 1e3


# Values that are not finite, and low precision.


@fault("mlp_adam", "act2", "non-finite")
def nan_at_a_recorded_step(task: Any) -> None:
    _nan(task, task.net.act2, 59)


def _nan(task: Any, module: nn.Module, step: int) -> None:
    def change(output: Tensor) -> Tensor:
        bad = len(task.losses) == step and task.training
        return torch.cat([output[:1] * math.nan, output[1:]]) if bad else output

    change_output(module, change)


@fault("vision_transformer", "blocks.1.mlp.0 blocks.1.mlp.1", "non-finite")
def nan_in_a_block(task: Any) -> None:
    _nan(task, task.net.blocks[1].mlp[0], 49)


@fault("resnet_groupnorm_bf16", "blocks.2.act blocks.2.norm2", "non-finite")
def nan_in_the_second_call(task: Any) -> None:
    _nan(task, task.net.blocks[2].norm2, 39)


@fault("message_passing", "act head layers.2", "non-finite")
def nan_in_the_backward_pass(task: Any) -> None:
    """The square root of a zero has an infinite derivative."""

    def change(output: Tensor) -> Tensor:
        return output + (output * 0).abs().sqrt() if len(task.losses) >= 59 and task.training else output

    change_output(task.net.head, change)


@fault("transformer_causal", "blocks.1.attention.softmax", "non-finite")
def row_without_attention(task: Any) -> None:
    """Every score of a row is minus infinity from step 69 on."""

    def change(_module: nn.Module, inputs: Any) -> Any:
        if len(task.losses) < 69 or not task.training:
            return None
        scores = inputs[0].clone()
        scores[:, :, 0] = -torch.inf
        return (scores,)

    task.net.blocks[1].attention.softmax.register_forward_pre_hook(change)


@fault("regression", "* fc1 fc2 head", "non-finite learning-rate-outlier weight-drift sudden-change")
def diverges(task: Any) -> None:
    task.optimizer = sgd(50.0)


@fault("mlp_deep_sgd", "fc1 fc2 fc3 fc4 act1 act2 act3 act4 head", "low-precision")
def gradients_below_fp16(task: Any) -> None:
    task.options = {"precision": "16-true"}
    plain = task.loss
    task.loss = lambda net, batch: plain(net, batch) * 3e-5
