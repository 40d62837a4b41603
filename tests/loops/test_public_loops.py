"""Loops in the style of well-known training programs, with the lines that the documentation says."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import Monitor, open_recording
from tests.loops.test_monitor import watched

MOST_LINES = 6


class Nothing:
    """Takes the place of a monitor in the run to compare with."""

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *args: object) -> None:
        """Do nothing."""

    def step(self, batch: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, backward: Callable[[Tensor], None] | None = None) -> None:
        (torch.autograd.backward if backward is None else backward)(loss)

    def log(self, **values: Any) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Do nothing."""


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.block(self.embedding(tokens)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nano_gpt(new: Callable[..., Any]) -> nn.Module:
    """Accumulate micro-batches, clip, and set the rate by hand."""
    model, text = Transformer(), torch.randint(0, 20, (200,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_batch() -> tuple[Tensor, Tensor]:
        places = torch.randint(len(text) - 9, (4,))
        return torch.stack([text[i : i + 8] for i in places]), torch.stack([text[i + 1 : i + 9] for i in places])

    with new(model, optimizer, accumulate=2) as monitor:
        for iteration in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + math.cos(iteration))
            for micro_step in range(2):
                x, y = get_batch()
                with monitor.step((x, y)):
                    _, loss = model(x, y)
                    scaler.scale(loss / 2).backward()
                    if micro_step == 1:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad(set_to_none=True)
                    monitor.log(loss=loss)
    return model


def min_gpt(new: Callable[..., Any]) -> nn.Module:
    """Run until a number of iterations over an iterator that begins again."""
    model, rows = Transformer(), torch.randint(0, 20, (12, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), 4, shuffle=True)
    iterator, iteration = iter(loader), 0
    with new(model, optimizer) as monitor:
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                batch = next(iterator)
            with monitor.step(batch):
                _, loss = model(*batch)
                model.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
            iteration += 1
            if iteration >= 5:
                break
    return model


def mnist(new: Callable[..., Any]) -> nn.Module:
    """Train and test in functions, with a scheduler."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 10))
    data = TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,)))
    optimizer = torch.optim.Adadelta(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)

    def train(monitor: Any) -> None:
        model.train()
        for batch in DataLoader(data, 4, shuffle=True):
            with monitor.step(batch):
                optimizer.zero_grad()
                loss = F.nll_loss(F.log_softmax(model(batch[0]), dim=1), batch[1])
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)

    def test(monitor: Any) -> None:
        model.eval()
        with torch.no_grad(), monitor.evaluation():
            for batch in DataLoader(data, 8):
                with monitor.step(batch):
                    F.nll_loss(F.log_softmax(model(batch[0]), dim=1), batch[1], reduction="sum").item()

    with new(model, optimizer) as monitor:
        for _ in range(2):
            train(monitor)
            test(monitor)
            monitor.end_epoch()
            scheduler.step()
    return model


def dcgan(new: Callable[..., Any]) -> nn.Module:
    """Step two optimizers, with several backward passes for one of them."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 8), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1), nn.Sigmoid())
    optimizer_d = torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
    models = {"generator": generator, "discriminator": discriminator}
    with new(models, [optimizer_d, optimizer_g]) as monitor:
        for _ in range(4):
            real = torch.randn(8, 8)
            with monitor.step(real):
                discriminator.zero_grad()
                loss = F.binary_cross_entropy(discriminator(real).view(-1), torch.ones(8))
                loss.backward()
                fake = generator(torch.randn(8, 4))
                F.binary_cross_entropy(discriminator(fake.detach()).view(-1), torch.zeros(8)).backward()
                optimizer_d.step()
                generator.zero_grad()
                loss_g = F.binary_cross_entropy(discriminator(fake).view(-1), torch.ones(8))
                loss_g.backward()
                optimizer_g.step()
                monitor.log(loss=loss + loss_g)
    return nn.ModuleDict(models)


def ppo(new: Callable[..., Any]) -> nn.Module:
    """Collect a rollout without gradients, then run epochs of mini-batches over it."""
    agent = nn.ModuleDict({"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 1)})
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    with new(agent, optimizer) as monitor:
        for _ in range(2):
            seen = torch.randn(16, 4)
            with torch.no_grad():
                old = Categorical(logits=agent["actor"](seen))
                actions = old.sample()
                returns = torch.randn(16)
                advantages = returns - agent["critic"](seen).flatten()
            for rows in torch.randperm(16).split(8):
                with monitor.step(seen[rows]):
                    policy = Categorical(logits=agent["actor"](seen[rows]))
                    ratio = (policy.log_prob(actions[rows]) - old.log_prob(actions)[rows]).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    loss = -torch.min(advantages[rows] * ratio, advantages[rows] * clipped).mean()
                    loss = loss + 0.5 * (agent["critic"](seen[rows]).flatten() - returns[rows]).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                    monitor.log(loss=loss)
    return agent


def diffusion(new: Callable[..., Any]) -> nn.Module:
    """Predict noise, and keep an average of the weights."""
    model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.GroupNorm(4, 32), nn.Linear(32, 8))
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with new(model, optimizer) as monitor:
        for _ in range(4):
            x, time, noise = torch.randn(8, 8), torch.rand(8, 1), torch.randn(8, 8)
            with monitor.step(x):
                loss = F.mse_loss(model(torch.cat([x * (1 - time) + noise * time, time], dim=1)), noise)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss)
            with torch.no_grad():
                for kept, each in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(each, 0.1)
    return nn.ModuleList([model, average])


class Detector(nn.Module):
    """Takes lists of images and of targets, and returns a dictionary of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.boxes, self.classes = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        features = torch.stack([self.backbone(each[None]).mean((2, 3))[0] for each in images])
        boxes, labels = (torch.stack([each[name] for each in targets]) for name in ("boxes", "labels"))
        return {
            "loss_box_reg": F.smooth_l1_loss(self.boxes(features), boxes),
            "loss_classifier": F.cross_entropy(self.classes(features), labels),
        }


def detection(new: Callable[..., Any]) -> nn.Module:
    """Sum the losses that the model returns for images of different sizes."""
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    with new(model, optimizer) as monitor:
        for _ in range(4):
            images = [torch.randn(3, 6 + i, 7) for i in range(2)]
            targets = [{"boxes": torch.rand(4), "labels": torch.tensor(i)} for i in range(2)]
            with monitor.step((images, targets)):
                losses = sum(model(images, targets).values())
                optimizer.zero_grad()
                losses.backward()
                optimizer.step()
                warmup.step()
                monitor.log(loss=losses)
    return model


def accelerated(new: Callable[..., Any]) -> nn.Module:
    """Let accelerate prepare the model and run the backward pass."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,)))
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(data, 4))
    with new(model, optimizer, accumulate=2) as monitor:
        for batch in loader:
            with accelerator.accumulate(model), monitor.step(batch):
                loss = F.cross_entropy(model(batch[0]), batch[1])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss)
    return net


def adapted(new: Callable[..., Any]) -> nn.Module:
    """Train the adapters of a frozen model."""
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "2"], r=2))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)
    with new(model, optimizer) as monitor:
        for _ in range(4):
            batch = torch.randn(4, 8), torch.randint(0, 3, (4,))
            with monitor.step(batch):
                loss = F.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss)
    found: nn.Module = model
    return found


LOOPS = [nano_gpt, min_gpt, mnist, dcgan, ppo, diffusion, detection, accelerated, adapted]


def _states(module: nn.Module) -> Iterator[Tensor]:
    yield from module.state_dict().values()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_is_recorded_with_few_lines_and_the_same_bits(tmp_path: Path, loop: Callable[..., nn.Module]) -> None:
    """At most six lines name the monitor; all steps are recorded, and the model is equal to the bit."""
    lines = [line for line in inspect.getsource(loop).splitlines() if "monitor" in line and "def " not in line]
    calls = [line for line in lines if line.strip() not in ("train(monitor)", "test(monitor)")]
    assert len(calls) <= MOST_LINES
    torch.manual_seed(5)
    plain = loop(lambda *args, **kwargs: Nothing())
    state = torch.get_rng_state()
    torch.manual_seed(5)
    recorded = loop(lambda *args, **kwargs: Monitor(*args, **kwargs, log_dir=tmp_path, every_n_train_steps=1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, _states(plain), _states(recorded)))
    losses = watched(tmp_path, "loss")
    assert len(losses) >= 2
    assert all(map(math.isfinite, losses.values()))
    run = open_recording(tmp_path).run
    assert {"activations", "gradients", "parameters", "watch"} <= set(run)
