"""Healthy programs: own ones of all kinds, and models of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.check.programs import (
    COUNT,
    Function,
    Lit,
    Program,
    cnn,
    contrastive,
    detection,
    diffusion,
    gan,
    graph,
    info_nce,
    integers,
    language,
    loader,
    mlp,
    normal,
    nt_xent,
    policy_gradient,
    regression,
    reinforcement,
    seq2seq,
    sequences,
    sgd,
    tabular,
    vae,
)


def named(loss: Callable[[Any, Any], Tensor], net: nn.Module, optimizer: Any = None, **tensors: Tensor) -> Program:
    """Return a program whose batches are dictionaries."""
    rows = [{name: each[index] for name, each in tensors.items()} for index in range(COUNT)]
    return Program(Lit(net, loss, optimizer), DataLoader(rows, batch_size=6))  # type: ignore[arg-type]  # a list is a data set


def own_loss(net: Any, batch: Any) -> Any:
    loss: Tensor = net(**batch).loss
    return loss


def gpt2() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    ids = integers(50, COUNT, 12)
    return named(own_loss, net, input_ids=ids, labels=ids)


def gpt2_padded() -> Program:
    ids, lengths = integers(50, COUNT, 12), integers(8, COUNT) + 4
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    mask = (torch.arange(12) < lengths[:, None]).long()
    return named(own_loss, net, input_ids=ids * mask, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask)


def llama() -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    ids = integers(50, COUNT, 12)
    return named(own_loss, LlamaForCausalLM(config), sgd(0.1), input_ids=ids, labels=ids)


def bert() -> Program:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(  # type: ignore[call-arg]  # of the base class
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    ids = integers(50, COUNT, 12)
    mask = torch.ones_like(ids)
    return named(
        own_loss, BertForSequenceClassification(config), input_ids=ids, attention_mask=mask, labels=integers(3, COUNT)
    )


def masked_bert() -> Program:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ids = integers(50, COUNT, 12)
    masked = normal(COUNT, 12) > 0.8
    return named(
        own_loss, BertForMaskedLM(config), input_ids=ids.masked_fill(masked, 4), labels=ids.masked_fill(~masked, -100)
    )


def t5() -> Program:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)  # type: ignore[call-arg]  # of the base class
    return named(
        own_loss,
        T5ForConditionalGeneration(config),
        input_ids=integers(50, COUNT, 12),
        labels=integers(50, COUNT, 9, seed=3),
    )


def vit() -> Program:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]  # of the base class
        image_size=16,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
    )
    return named(
        own_loss, ViTForImageClassification(config), pixel_values=normal(COUNT, 3, 16, 16), labels=integers(5, COUNT)
    )


def clip() -> Program:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    text |= {"eos_token_id": 49, "projection_dim": 8, "max_position_embeddings": 16}
    image = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    image |= {"intermediate_size": 32, "projection_dim": 8}
    net = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=8))

    def loss(net: Any, batch: Any) -> Any:
        found: Tensor = net(**batch, return_loss=True).loss
        return found

    ids = integers(49, COUNT, 9)
    ids[:, -1] = 49
    return named(loss, net, input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=normal(COUNT, 3, 16, 16))


def wav2vec() -> Program:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(  # type: ignore[call-arg]  # of the base class
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_labels=3,
        mask_time_prob=0.0,
        classifier_proj_size=8,
    )
    net = Wav2Vec2ForSequenceClassification(config)
    return named(own_loss, net, input_values=normal(COUNT, 400) * 0.1, labels=integers(3, COUNT))


def lora() -> Program:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    ids = integers(50, COUNT, 12)
    wrapped: Any = get_peft_model(net, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    return named(own_loss, wrapped, input_ids=ids, labels=ids)


def timm_model(name: str, **options: Any) -> Program:
    import timm

    net = timm.create_model(name, num_classes=5, **options)
    return Program(
        Lit(net, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])),
        loader(normal(COUNT, 3, 32, 32), integers(5, COUNT), rows=6),
    )


def flow() -> Program:
    import zuko  # type: ignore[import-untyped]  # has no types

    net = zuko.flows.NSF(4, context=2, transforms=2, hidden_features=[16])
    return Program(
        Lit(net, lambda net, batch: -net(batch[1]).log_prob(batch[0]).mean()),
        loader(normal(COUNT, 4), normal(COUNT, 2)),
    )


def unet() -> Program:
    from diffusers import DDPMScheduler, UNet2DModel

    net: Any = UNet2DModel(  # type: ignore[no-untyped-call]  # has no types
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    schedule: Any = DDPMScheduler(num_train_timesteps=100)  # type: ignore[no-untyped-call]  # has no types

    def loss(net: Any, batch: Any) -> Any:
        x = batch[0]
        noise, time = torch.randn_like(x), torch.randint(100, (len(x),), device=x.device)
        return F.mse_loss(net(schedule.add_noise(x, noise, time), time).sample, noise)

    return Program(Lit(net, loss), loader(normal(COUNT, 3, 8, 8), rows=6))


def metric_learning(kind: str) -> Program:
    from pytorch_metric_learning import losses, miners  # type: ignore[import-untyped]  # has no types

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    if kind == "arcface":
        criterion: Any = losses.ArcFaceLoss(4, 8)
        whole = Function(lambda self, x: self.body(x), body=net, criterion=criterion)
        return Program(
            Lit(whole, lambda net, batch: net.criterion(net(batch[0]), batch[1])),
            loader(normal(COUNT, 8), integers(4, COUNT)),
        )
    triplet, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()

    def loss(net: Any, batch: Any) -> Any:
        embedded = net(batch[0])
        found: Tensor = triplet(embedded, batch[1], miner(embedded, batch[1]))
        return found

    return Program(Lit(net, loss), loader(normal(COUNT, 8), integers(4, COUNT)))


def geometric() -> Program:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    graphs = [
        Data(x=normal(5, 4, seed=i), edge_index=integers(5, 2, 8, seed=i), y=torch.tensor(i % 3)) for i in range(COUNT)
    ]
    net = Function(
        lambda self, data: self.head(
            global_mean_pool(self.two(self.one(data.x, data.edge_index).relu(), data.edge_index), data.batch)
        ),
        one=GCNConv(4, 8),
        two=GCNConv(8, 8),
        head=nn.Linear(8, 3),
    )
    return Program(Lit(net, lambda net, batch: F.cross_entropy(net(batch), batch.y)), GraphLoader(graphs, batch_size=6))


def time_major() -> Program:
    """Batches ``[time, samples]`` of a recurrent language model."""
    net = Function(
        lambda self, ids: self.head(self.rnn(self.embed(ids))[0]),
        embed=nn.Embedding(20, 8),
        rnn=nn.LSTM(8, 16),
        head=nn.Linear(16, 20),
    )

    def loss(net: Any, batch: Any) -> Any:
        ids, target = batch
        return F.cross_entropy(net(ids).flatten(0, 1), target.flatten())

    batches = [(each[:-1], each[1:]) for each in (integers(20, 11, 6, seed=i) for i in range(3))]
    return Program(Lit(net, loss), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a data set


def mixup() -> Program:
    def loss(net: Any, batch: Any) -> Any:
        x, y = batch
        order = torch.randperm(len(x))
        out = net(0.7 * x + 0.3 * x[order])
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])

    return mlp(loss)


def segmentation() -> Program:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x = normal(COUNT, 3, 8, 8)
    return Program(Lit(net, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])), loader(x, x.argmax(1)))


def autoencoder() -> Program:
    net = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 10))
    return Program(
        Lit(net, lambda net, batch: F.mse_loss(net(batch[0]), batch[0])), loader(normal(COUNT, 10), integers(3, COUNT))
    )


def forecast() -> Program:
    net = Function(lambda self, x: self.head(self.rnn(x)[0]), rnn=nn.GRU(2, 8, batch_first=True), head=nn.Linear(8, 2))
    x = normal(COUNT, 12, 2).cumsum(1)
    return Program(Lit(net, lambda net, batch: F.mse_loss(net(batch[0][:, :-1]), batch[0][:, 1:])), loader(x))


def gradient_penalty() -> Program:
    def loss(net: Any, batch: Any) -> Any:
        x = batch[0].requires_grad_()
        scores = net(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()

    return Program(Lit(nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1)), loss), loader(normal(COUNT, 6)))


def padded() -> Program:
    def loss(net: Any, batch: Any) -> Any:
        x, lengths, target = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(net.head(net.rnn(packed)[1][0]), target)

    net = Function(lambda self, x: x, rnn=nn.GRU(6, 12, batch_first=True), head=nn.Linear(12, 3))
    return Program(Lit(net, loss), loader(normal(COUNT, 12, 6), integers(4, COUNT) + 2, integers(3, COUNT)))


def clipped_policy() -> Program:
    """A policy and a value function with advantages that are normalized along the batch."""
    heads = {
        name: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size)) for name, size in (("pi", 3), ("v", 1))
    }

    def loss(net: Any, batch: Any) -> Any:
        state, action, old, advantage, value = batch
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        chosen = torch.distributions.Categorical(logits=net.pi(state), validate_args=False)
        ratio = (chosen.log_prob(action) - old).exp()
        policy = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return 0.5 * F.mse_loss(net.v(state).squeeze(-1), value) - policy - 0.01 * chosen.entropy().mean()

    old = torch.full((COUNT,), -1.1)
    data = loader(normal(COUNT, 4), integers(3, COUNT), old, normal(COUNT, seed=2), normal(COUNT, seed=3))
    return Program(Lit(Function(lambda self, x: x, **heads), loss), data)


def warmup() -> Program:
    def optimizer(net: nn.Module) -> Any:
        made = torch.optim.AdamW(net.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 100))
        return [made], [{"scheduler": schedule, "interval": "step"}]

    return mlp(optimizer=optimizer)


HEALTHY: dict[str, Callable[[], Program]] = {
    "mlp": mlp,
    "mlp with momentum": lambda: mlp(optimizer=sgd(0.05, momentum=0.9)),
    "cnn": cnn,
    "regression": regression,
    "language": language,
    "sequences": sequences,
    "seq2seq": seq2seq,
    "detection": detection,
    "vae": vae,
    "gan": gan,
    "contrastive": lambda: contrastive(info_nce),
    "contrastive of pairs": lambda: contrastive(nt_xent),
    "graph": graph,
    "diffusion": diffusion,
    "tabular": tabular,
    "q learning": reinforcement,
    "policy gradient": lambda: reinforcement(policy_gradient),
    "mixup": mixup,
    "time major": time_major,
    "segmentation": segmentation,
    "autoencoder": autoencoder,
    "forecast": forecast,
    "warmup": warmup,
    "gradient penalty": gradient_penalty,
    "padded": padded,
    "clipped policy": clipped_policy,
    "gpt2": gpt2,
    "gpt2 with padding": gpt2_padded,
    "llama": llama,
    "bert": bert,
    "masked bert": masked_bert,
    "t5": t5,
    "vit": vit,
    "clip": clip,
    "wav2vec": wav2vec,
    "lora": lora,
    "resnet": lambda: timm_model("resnet10t"),
    "convnext": lambda: timm_model("convnext_atto", drop_path_rate=0.1),
    "vit of timm": lambda: timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2),
    "flow": flow,
    "unet": unet,
    "triplets": lambda: metric_learning("triplet"),
    "arcface": lambda: metric_learning("arcface"),
    "geometric": geometric,
}
