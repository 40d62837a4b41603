"""Tests of the rule about random variables that do not depend on the sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import capture_graph
from lightning_recorder.graph import GraphCapture
from lightning_recorder.graph.model import Graph
from tests.insight.records import Examination, Values, network, run


def noise_times_scale(mean: Tensor, scale: Tensor) -> Tensor:
    return mean + torch.randn_like(mean) * (0.5 * scale).exp()


def noise_of_a_shape(mean: Tensor, scale: Tensor) -> Tensor:
    return torch.exp(scale / 2).mul(torch.randn(mean.shape)).add(mean)


def with_a_distribution(mean: Tensor, scale: Tensor) -> Tensor:
    found: Tensor = torch.distributions.Normal(mean, scale.mul(0.5).exp()).rsample()
    return found


def without_a_gradient(mean: Tensor, scale: Tensor) -> Tensor:
    found: Tensor = torch.distributions.Normal(mean, scale.mul(0.5).exp()).sample()
    return found


def with_another_scale(mean: Tensor, scale: Tensor) -> Tensor:
    return mean + torch.randn_like(mean) * nn.functional.softplus(scale)


class Autoencoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self, sample: Callable[[Tensor, Tensor], Tensor], *, is_joined: bool = False) -> None:
        super().__init__()
        self.sample, self.is_joined = sample, is_joined
        self.encoder, self.mean, self.scale = (
            nn.Linear(16, 16),
            nn.Linear(16, 32 if is_joined else 16),
            nn.Linear(16, 16),
        )
        self.decoder = nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.encoder(inputs))
        mean, scale = self.mean(hidden).chunk(2, 1) if self.is_joined else (self.mean(hidden), self.scale(hidden))
        found: Tensor = self.decoder(self.sample(mean, scale))
        return found


COLLAPSED = [0.1, 0.05, *10 * [0.003]]


def findings(model: Autoencoder, mean: list[float], scale: list[float]) -> list[tuple[str, str, tuple[str, ...], int]]:
    """Return rule, module, others and first step of each finding, given the rms of mean and scale in each record."""
    rms = {"encoder": [1.0] * 12, "mean": mean, "scale": scale, "decoder": [1.0] * 12}
    names = [name for name in rms if name != "scale" or not model.is_joined]
    layers: dict[str, Values] = {name: {"rms": rms[name], "std": rms[name]} for name in names}
    graph = capture_graph(model, torch.ones(2, 16))
    found = run(layers, None, network(*names), graph=graph, records=12)
    return [(each.rule, each.module, each.others, each.first_step) for each in found]


@pytest.mark.parametrize("sample", [noise_times_scale, noise_of_a_shape, with_a_distribution, without_a_gradient])
def test_a_random_variable_that_is_the_same_for_all_samples(sample: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Both outputs must become constant, and the finding begins at the step from which on they are."""
    model = Autoencoder(sample)
    assert findings(model, COLLAPSED, COLLAPSED) == [("posterior-collapse", "mean", ("scale",), 20)]
    assert findings(model, [0.1] * 12, COLLAPSED) == []
    assert findings(model, COLLAPSED, [0.1] * 12) == []


def test_mean_and_scale_of_one_layer() -> None:
    """The halves of the output of one layer may be mean and scale."""
    found = findings(Autoencoder(noise_times_scale, is_joined=True), COLLAPSED, COLLAPSED)
    assert found == [("posterior-collapse", "mean", (), 20)]


@pytest.mark.parametrize(
    "values",
    [
        [0.1, *6 * [0.003], *np.geomspace(0.003, 0.5, 5)],  # it recovers
        [0.003] * 12,  # a policy that begins with equal actions
        [0.1] * 12,
    ],
)
def test_a_random_variable_that_varies_or_began_as_constant(values: list[float]) -> None:
    """In a healthy model, the outputs may be constant for a while, or at the beginning."""
    assert findings(Autoencoder(noise_times_scale), list(values), list(values)) == []


def test_a_scale_that_is_no_exponential() -> None:
    """Without the exponential, the size of the noise is unknown."""
    assert findings(Autoencoder(with_another_scale), COLLAPSED, COLLAPSED) == []


Function = Callable[[Tensor, Tensor], Tensor]


class Training(nn.Module):
    """A step of training of a variational autoencoder.

    Args:
        prior: A function from mean and scale to a term of the loss.
        sample: A function from mean and scale to a sample.
        decoder: The decoder; by default a layer.
        split: A function from the output of one layer to mean and scale; by default, each has a layer.
    """

    def __init__(
        self,
        prior: Callable[[Tensor, Tensor], Tensor],
        sample: Callable[[Tensor, Tensor], Tensor] = noise_times_scale,
        decoder: nn.Module | None = None,
        split: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.prior, self.sample, self.split = prior, sample, split
        self.mean, self.scale = nn.Linear(16, 16 if split is None else 32), nn.Linear(16, 16)
        self.decoder = nn.Linear(16, 16) if decoder is None else decoder

    def forward(self, inputs: Tensor) -> Tensor:
        mean, scale = self.split(self.mean(inputs)) if self.split else (self.mean(inputs), self.scale(inputs))
        found = self.decoder(self.sample(mean, scale))
        return nn.functional.mse_loss(found, inputs) + self.prior(mean, scale)


def divergence(mean: Tensor, scale: Tensor) -> Tensor:
    return -0.5 * torch.sum(1 + scale - mean.pow(2) - scale.exp(), 1).mean()


def subtracted(mean: Tensor, scale: Tensor) -> Tensor:
    return -divergence(mean, scale)


def not_added(mean: Tensor, scale: Tensor) -> Tensor:
    divergence(mean, scale)
    return torch.zeros(())


def step_of(model: Training) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return rule, module and others of each finding about one step of training."""
    names = ("mean", "scale", "decoder")
    found = run({name: {} for name in names}, None, network(*names), graph=graph_of(model))
    return [(each.rule, each.module, each.others) for each in found]


def graph_of(model: nn.Module) -> Graph:
    """Return the graph of a step with its backward pass."""
    inputs = torch.randn(4, 16)
    with GraphCapture(model, inputs) as capture:
        model(inputs).backward()
    return capture.graph()


def test_a_random_variable_without_a_prior() -> None:
    """A KL divergence that is missing, or computed and not added, is a finding; one that is added is not."""
    assert step_of(Training(not_added)) == [("latent-without-prior", "mean", ("scale",))]
    assert step_of(Training(not_added, with_a_distribution)) == [("latent-without-prior", "mean", ("scale",))]
    assert step_of(Training(divergence)) == []
    assert step_of(Training(divergence, with_a_distribution)) == []


def test_samples_without_a_prior_for_a_reason() -> None:
    """A term of the mean alone, and samples that a loss gets without a layer between them, are fine."""
    assert step_of(Training(lambda mean, scale: 0.1 * mean.pow(2).mean() + 0 * scale.mean())) == []
    assert step_of(Training(not_added, decoder=nn.Tanh())) == []


def test_a_divergence_with_the_wrong_sign() -> None:
    """A KL divergence that is subtracted is a finding."""
    assert step_of(Training(subtracted)) == [("prior-pushed-away", "mean", ("scale",))]
    assert step_of(Training(lambda mean, scale: divergence(mean, scale) * -0.1)) == [
        ("prior-pushed-away", "mean", ("scale",))
    ]
    assert step_of(Training(lambda mean, scale: scale.exp().mean() - mean.pow(2).mean())) == []


def raw(mean: Tensor, scale: Tensor) -> Tensor:
    return mean + torch.randn_like(mean) * scale


def of_the_variance(mean: Tensor, scale: Tensor) -> Tensor:
    return mean + torch.randn_like(mean) * scale.exp()


def of_the_deviation(mean: Tensor, scale: Tensor) -> Tensor:
    return 0.5 * (mean.pow(2) + (2 * scale).exp() - 2 * scale).mean()


@pytest.mark.parametrize(
    ("sample", "prior", "is_wrong"),
    [
        (raw, divergence, True),
        (of_the_variance, divergence, True),
        (noise_times_scale, of_the_deviation, True),
        (noise_times_scale, divergence, False),
        (of_the_variance, of_the_deviation, False),
        (with_another_scale, divergence, False),
    ],
)
def test_a_scale_that_means_two_things(
    sample: Callable[[Tensor, Tensor], Tensor], prior: Callable[[Tensor, Tensor], Tensor], is_wrong: bool
) -> None:
    """The exponent in the loss must be twice that in the samples; another function than exp is not examined."""
    found = [each for each in step_of(Training(prior, sample)) if each[0] == "latent-scale"]
    assert found == [("latent-scale", "mean", ("scale",))] * is_wrong


@pytest.mark.parametrize("kind", [nn.Softplus, nn.ReLU, nn.Identity])
def test_a_logarithm_of_the_variance_with_one_sign(kind: type[nn.Module]) -> None:
    """An activation without negative outputs makes each standard deviation at least 1."""
    act = kind()
    model = Training(
        lambda mean, scale: divergence(mean, act(scale)), lambda mean, scale: noise_times_scale(mean, act(scale))
    )
    found = [each for each in step_of(model) if each[0] == "latent-scale"]
    assert found == [("latent-scale", "mean", ("scale",))] * (kind is not nn.Identity)


def test_a_deviation_that_is_at_most_one() -> None:
    """A softplus with a negative factor makes each standard deviation at most 1."""

    def limit(scale: Tensor) -> Tensor:
        return -1.0 * nn.functional.softplus(scale)

    model = Training(
        lambda mean, scale: divergence(mean, limit(scale)), lambda mean, scale: noise_times_scale(mean, limit(scale))
    )
    assert step_of(model) == []


def test_a_softplus_that_is_the_scale() -> None:
    """A softplus may give the standard deviation itself, whose logarithm the loss has."""

    def prior(mean: Tensor, scale: Tensor) -> Tensor:
        deviation = nn.functional.softplus(scale)
        return 0.5 * (mean.pow(2) + deviation.pow(2) - 2 * deviation.log()).mean()

    assert step_of(Training(prior, lambda mean, scale: raw(mean, nn.functional.softplus(scale)))) == []


def halves(output: Tensor) -> tuple[Tensor, Tensor]:
    return output[:, :16], output[:, 16:]


def chunks(output: Tensor) -> tuple[Tensor, Tensor]:
    mean, scale = output.chunk(2, 1)
    return mean, scale


def equal_halves(output: Tensor) -> tuple[Tensor, Tensor]:
    return output[:, :16], output[:, :16]


def equal_chunks(output: Tensor) -> tuple[Tensor, Tensor]:
    return output.chunk(2, 1)[0], output.chunk(2, 1)[0]


@pytest.mark.parametrize(
    ("split", "sample", "prior", "words"),
    [
        (halves, noise_times_scale, divergence, ""),
        (chunks, noise_times_scale, divergence, ""),
        (chunks, with_a_distribution, divergence, ""),
        (chunks, of_the_variance, of_the_deviation, ""),
        (halves, raw, divergence, "the output of mean itself"),
        (chunks, raw, divergence, "the output of mean itself"),
        (chunks, of_the_variance, divergence, "exp(1 × mean)"),
        (equal_halves, noise_times_scale, divergence, "the same part of the output of mean"),
        (equal_chunks, with_a_distribution, divergence, "the same part of the output of mean"),
        (lambda output: (output, output), noise_times_scale, divergence, "the same part of the output of mean"),
    ],
)
def test_mean_and_scale_that_are_parts_of_one_output(
    split: Callable[[Tensor], tuple[Tensor, Tensor]],
    sample: Callable[[Tensor, Tensor], Tensor],
    prior: Callable[[Tensor, Tensor], Tensor],
    words: str,
) -> None:
    """The parts must differ, and that of the scale must mean the same in the samples and in the loss."""
    size = 32 if split not in (halves, chunks, equal_halves, equal_chunks) else 16
    model = Training(prior, sample, nn.Linear(size, 16), split)
    found = run({name: {} for name in ("mean", "decoder")}, None, network("mean", "decoder"), graph=graph_of(model))
    assert [(each.rule, each.module, words in each.verdict) for each in found] == [
        ("latent-scale", "mean", True)
    ] * bool(words)


def test_noise_that_is_as_large_as_the_value() -> None:
    """A dropout with Gaussian noise takes one output for both factors; without an exponential, it is no logarithm."""

    def noisy(mean: Tensor, scale: Tensor) -> Tensor:
        return mean + torch.randn_like(mean) * mean

    assert [
        each for each in step_of(Training(lambda mean, scale: mean.exp().mean(), noisy)) if "scale" in each[0]
    ] == []


class Likelihood(nn.Module):
    """A step of a model that gives a mean and the logarithm of a deviation for each target."""

    def __init__(self, limit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mean, self.scale, self.limit = nn.Linear(16, 4), nn.Linear(16, 4), limit

    def forward(self, inputs: Tensor) -> Tensor:
        deviation = self.limit(self.scale(inputs)).exp()
        loss: Tensor = -torch.distributions.Normal(self.mean(inputs), deviation).log_prob(inputs[:, :4]).mean()
        return loss


@pytest.mark.parametrize(
    ("limit", "is_wrong"),
    [
        (torch.relu, True),
        (nn.functional.softplus, True),
        (lambda x: x, False),
        (lambda x: x.clamp(-5, 2), False),
        (lambda x: -torch.relu(x), False),
    ],
)
def test_a_deviation_that_cannot_be_small(limit: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    """A logarithm of the deviation that is never negative is a finding in a likelihood, too."""
    found = run(
        {name: {} for name in ("mean", "scale")}, None, network("mean", "scale"), graph=graph_of(Likelihood(limit))
    )
    found = [each for each in found if each.rule == "latent-scale"]
    assert [(each.module, "at least 1" in each.verdict) for each in found] == [("scale", True)] * is_wrong


def uniform(mean: Tensor, scale: Tensor) -> Tensor:
    return mean + torch.rand_like(scale) * (scale / 2).exp()


@pytest.mark.parametrize(
    ("prior", "sample", "is_wrong"),
    [
        (divergence, uniform, True),
        (lambda mean, scale: scale.exp().mean() - scale.mean() + (mean * mean).mean(), uniform, True),
        (lambda mean, scale: -scale.mean() + mean.abs().mean(), uniform, False),  # a uniform random variable
        (divergence, noise_times_scale, False),
        (divergence, lambda mean, scale: mean + torch.rand_like(scale) * (scale - mean), False),  # between two ends
        (
            divergence,
            lambda mean, scale: mean - (-torch.rand_like(scale).log()).log() * scale.exp(),
            False,
        ),  # of Gumbel
    ],
)
def test_noise_that_is_uniform(prior: Function, sample: Function, is_wrong: bool) -> None:
    """Uniform numbers in place of normal ones are a finding, if a scale multiplies them and a squared mean is added."""
    found = Examination(graph_of(Training(prior, sample))).findings()
    found = [each for each in found if each.rule == "uniform-noise"]
    assert len(found) == is_wrong
    assert all("is multiplied by rand_like" in each.verdict for each in found)


class Denoiser(nn.Module):
    """A step of diffusion, whose target is the noise, or the level of the noise."""

    def __init__(self, noise: Callable[[Tensor], Tensor], seen: Function, out: int = 16) -> None:
        super().__init__()
        self.net, self.noise, self.seen = nn.Linear(16, out), noise, seen

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise(x)
        return nn.functional.mse_loss(self.net(self.seen(x, noise)), noise)


def mixed(x: Tensor, noise: Tensor) -> Tensor:
    return 0.6 * x + 0.8 * noise


def level(x: Tensor) -> Tensor:
    return torch.rand(len(x), 1)


@pytest.mark.parametrize(
    ("model", "is_wrong"),
    [
        (Denoiser(torch.rand_like, mixed), True),
        (Denoiser(torch.rand_like, lambda x, noise: x + noise), True),
        (Denoiser(torch.randn_like, mixed), False),
        (Denoiser(torch.rand_like, lambda x, noise: x), False),
        (Denoiser(torch.rand_like, lambda x, noise: noise), False),  # an autoencoder of random numbers
        (Denoiser(level, lambda x, level: x + level * torch.randn_like(x), 1), False),
        (Denoiser(level, lambda x, level: x + level, 1), False),  # a brightness
    ],
)
def test_noise_of_diffusion_that_is_uniform(model: nn.Module, is_wrong: bool) -> None:
    """Uniform noise that the model gets and has to predict is a finding; other random targets are not."""
    found = [each for each in Examination(graph_of(model)).findings() if each.rule == "uniform-noise"]
    assert len(found) == is_wrong
