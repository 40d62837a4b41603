"""Tests of all taps together on all modules of common architectures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_recorder.selection import Selection
from lightning_recorder.structure import iter_tensors
from lightning_recorder.taps import (
    InputGradientTap,
    InputTap,
    OutputGradientTap,
    OutputTap,
    ParameterGradientTap,
    ParameterTap,
    Receiver,
    Site,
    Tap,
)
from tests.taps.inspection import hooks_on
from tests.taps.references import Probe, Seen

Batch = dict[str, Tensor]

TAPS: list[type[Tap]] = [
    InputTap,
    OutputTap,
    InputGradientTap,
    OutputGradientTap,
    ParameterTap,
    ParameterGradientTap,
]


def tokens() -> Tensor:
    return torch.randint(3, 30, (2, 7))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def labels() -> Tensor:
    return torch.tensor([0, 1])


TEXT = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def text(kind: str, config: str, **settings: Any) -> tuple[nn.Module, Batch]:
    """Return a language model that predicts its input tokens."""
    ids = tokens()
    return build(kind, config, **TEXT, **settings), {"input_ids": ids, "labels": ids}


def vision(kind: str, config: str, **settings: Any) -> tuple[nn.Module, Batch]:
    """Return an image classifier."""
    return build(kind, config, num_labels=2, **settings), {"pixel_values": images(), "labels": labels()}


def build(kind: str, config: str, **settings: Any) -> nn.Module:
    """Return a transformers model with random weights."""
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))  # type: ignore[no-any-return]


def gpt2() -> tuple[nn.Module, Batch]:
    return text("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=16)


def bert() -> tuple[nn.Module, Batch]:
    return text("BertForMaskedLM", "BertConfig", max_position_embeddings=16, **LAYERS, **DROPOUT)


def t5() -> tuple[nn.Module, Batch]:
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return text("T5ForConditionalGeneration", "T5Config", **shape)


def bart() -> tuple[nn.Module, Batch]:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    settings = {**heads, **layers, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return text("BartForConditionalGeneration", "BartConfig", d_model=16, **settings)


def llama() -> tuple[nn.Module, Batch]:
    return text("LlamaForCausalLM", "LlamaConfig", attention_dropout=0.1, num_key_value_heads=1, **LAYERS)


def mixtral() -> tuple[nn.Module, Batch]:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True}
    return text("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, **experts, **LAYERS)


def mamba() -> tuple[nn.Module, Batch]:
    return text("MambaForCausalLM", "MambaConfig", hidden_size=16, num_hidden_layers=2, state_size=4)


def vit() -> tuple[nn.Module, Batch]:
    return vision("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=16, **LAYERS, **DROPOUT)


def resnet() -> tuple[nn.Module, Batch]:
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
    return vision("ResNetForImageClassification", "ResNetConfig", **shape)


def swin() -> tuple[nn.Module, Batch]:
    shape = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    return vision("SwinForImageClassification", "SwinConfig", drop_path_rate=0.2, **shape)


def convnext() -> tuple[nn.Module, Batch]:
    shape = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return vision("ConvNextForImageClassification", "ConvNextConfig", drop_path_rate=0.2, **shape)


def segformer() -> tuple[nn.Module, Batch]:
    shape = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    more = {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    model = build("SegformerForSemanticSegmentation", "SegformerConfig", decoder_hidden_size=8, **shape, **more)
    return model, {"pixel_values": images(), "labels": torch.randint(0, 2, (2, 32, 32))}


def whisper() -> tuple[nn.Module, Batch]:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "dropout": 0.1}
    more = {"max_source_positions": 10, "max_target_positions": 16, "decoder_start_token_id": 1}
    settings = {**TEXT, **layers, **heads, **more, "d_model": 16, "suppress_tokens": None}
    model = build("WhisperForConditionalGeneration", "WhisperConfig", **settings)
    return model, {"input_features": torch.randn(2, 8, 20), "labels": tokens()}


def wav2vec2() -> tuple[nn.Module, Batch]:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    more = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    settings = {**TEXT, **LAYERS, **convolutions, **more, "hidden_dropout": 0.1, "layerdrop": 0.0}
    model = build("Wav2Vec2ForCTC", "Wav2Vec2Config", **settings)
    return model, {"input_values": torch.randn(2, 400), "labels": tokens()}


def clip() -> tuple[nn.Module, Batch]:
    vision_config = {**LAYERS, "image_size": 32, "patch_size": 16}
    text_config = {**LAYERS, **TEXT, "max_position_embeddings": 16}
    model = build("CLIPModel", "CLIPConfig", text_config=text_config, vision_config=vision_config, projection_dim=8)
    return model, {"input_ids": tokens(), "pixel_values": images(), "return_loss": torch.tensor(True)}


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    function.__name__: function
    for function in (
        gpt2, bert, t5, bart, llama, mixtral, mamba, vit, resnet, swin, convnext, segformer, whisper, wav2vec2, clip
    )
}  # fmt: skip
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """Suppress the log messages of transformers about tiny settings."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers is untyped here
    yield
    transformers.logging.set_verbosity(before)


def make(name: str) -> tuple[nn.Module, Batch]:
    """Return the model in training mode and a batch, the same for every call."""
    torch.manual_seed(0)
    module, batch = ARCHITECTURES[name]()
    return module.train(), batch


def step(module: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of the model after a backward pass."""
    torch.manual_seed(1)
    loss: Tensor = module(**batch).loss
    loss.backward()
    return loss.detach()


def everything(module: nn.Module) -> dict[str, nn.Module]:
    """Return all modules, including the root."""
    return {"": module, **Selection("**").resolve(module)}


def copies_into(seen: dict[type[Tap], Seen], kind: type[Tap]) -> Receiver:
    return lambda site, tensor: seen.setdefault(kind, []).append((site, tensor.clone()))


@each_architecture
def test_all_taps_at_all_modules_leave_a_step_as_it_is(name: str) -> None:
    """With all taps nothing raises or warns, loss and gradients are bitwise unchanged, and no hook is left."""
    module, batch = make(name)
    twin = copy.deepcopy(module)
    tensors: list[Tensor] = []
    for each in module.modules():
        each.register_forward_hook(lambda _, args, output: tensors.extend(dict(iter_tensors(output)).values()))
    with ExitStack() as stack:
        for kind in TAPS:
            stack.enter_context(kind(everything(module), lambda site, tensor: None, strict=True))
        loss = step(module, batch)
    assert tensors
    assert [hook for hook in hooks_on(module, tensors) if hook.__module__.startswith("lightning_recorder")] == []
    assert torch.equal(loss, step(twin, batch))
    for (key, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), key
    assert all(map(torch.equal, module.buffers(), twin.buffers()))


def note_calls(name: str, calls: list[str], returned: set[Site]) -> Callable[..., None]:
    """Return a hook that notes calls of the module and the inputs that it returned unchanged."""

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(name)
        given = {id(tensor) for _, tensor in iter_tensors(output)}
        taken = [*iter_tensors(args, "in"), *iter_tensors(kwargs, "in")]
        returned.update(Site(name, path) for path, tensor in taken if id(tensor) in given)

    return note


@each_architecture
def test_taps_see_what_ran_and_the_gradients_through_it(name: str) -> None:
    """Each leaf that ran has outputs, and modules called once have the gradients of copies of their inputs."""
    module, batch = make(name)
    twin = copy.deepcopy(module)
    seen: dict[type[Tap], Seen] = {}
    calls: list[str] = []
    returned: set[Site] = set()  # these have the gradient of the whole tensor
    for each, submodule in everything(module).items():
        submodule.register_forward_hook(note_calls(each, calls, returned), with_kwargs=True)
    with ExitStack() as stack:
        for kind in TAPS:
            stack.enter_context(kind(everything(module), copies_into(seen, kind), strict=True))
        step(module, batch)
    leaves = {each for each in calls if next(module.get_submodule(each).children(), None) is None}
    assert leaves <= {site.name for site, _ in seen[OutputTap]}
    assert {site.name for site, _ in seen[OutputTap]} <= set(calls)

    probes: Seen = []
    once = {each: submodule for each, submodule in everything(twin).items() if calls.count(each) == 1}
    for each, submodule in once.items():
        submodule.register_forward_pre_hook(Probe(each, probes), with_kwargs=True)
    torch.manual_seed(1)
    loss = twin(**batch).loss
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, [probe for _, probe in probes], allow_unused=True)
    expected = {
        site: grad for (site, _), grad in zip(probes, grads, strict=True) if grad is not None and site not in returned
    }
    found = {site: grad for site, grad in seen[InputGradientTap] if site.name in once and site not in returned}
    assert found.keys() == expected.keys()
    assert found
    for site, grad in expected.items():
        torch.testing.assert_close(found[site], grad, rtol=1e-4, atol=1e-5, msg=str(site))
