"""The audit says nothing of healthy models in the settings that are recommended for them: counted, one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nanhunt

os.environ.setdefault("HF_HUB_OFFLINE", "1")
tf = pytest.importorskip("transformers", reason="transformers builds the models")

HALF, BF16 = torch.float16, torch.bfloat16
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {key: _SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_IMAGES = {**_VISION, "image_size": 32, "patch_size": 8}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _tokens() -> dict[str, Any]:
    """Two sentences, the second padded."""
    ids = torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.randint(3, 64, (2, 12))}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}


def _speech() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 8000), "labels": torch.randint(1, 32, (2, 4))}


def _spectra() -> dict[str, Any]:
    labels = torch.randint(3, 64, (2, 12))
    return {"input_features": torch.randn(2, 8, 64), "labels": labels, "decoder_input_ids": labels}


def _pairs() -> dict[str, Any]:
    return {"input_ids": _tokens()["input_ids"], "pixel_values": _images()["pixel_values"], "return_loss": True}


def _clip() -> Any:
    text = {**_SIZES, "max_position_embeddings": 32, "projection_dim": 16}
    vision = {**_IMAGES, "projection_dim": 16}
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _whisper() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "decoder_start_token_id": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    sizes |= {"max_source_positions": 32, "max_target_positions": 32}
    config = tf.WhisperConfig(**_SMALL, **sizes, suppress_tokens=None, begin_suppress_tokens=None)
    return tf.WhisperForConditionalGeneration(config)


def _wav2vec2() -> Any:
    sizes = {**_VISION, "vocab_size": 32, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16}
    config = tf.Wav2Vec2Config(**sizes, num_conv_pos_embedding_groups=4, mask_time_length=2, ctc_zero_infinity=True)
    return tf.Wav2Vec2ForCTC(config)


def _opt() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    return tf.OPTForCausalLM(tf.OPTConfig(**_SMALL, **sizes, word_embed_proj_dim=32))


def _t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return tf.T5ForConditionalGeneration(tf.T5Config(**_SMALL, **sizes))


def _gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(**_SMALL, n_embd=32, n_layer=2, n_head=4))


def _bloom() -> Any:
    return tf.BloomForCausalLM(tf.BloomConfig(**_SMALL, hidden_size=32, n_layer=2, n_head=4))


def _distilbert() -> Any:
    return tf.DistilBertForMaskedLM(tf.DistilBertConfig(**_SMALL, dim=32, n_layers=2, n_heads=4, hidden_dim=64))


def _resnet() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 4}
    return tf.ResNetForImageClassification(tf.ResNetConfig(**sizes))


def _swin() -> Any:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]}
    return tf.SwinForImageClassification(tf.SwinConfig(**sizes, window_size=4, num_labels=4))


def _vit() -> Any:
    return tf.ViTForImageClassification(tf.ViTConfig(**_IMAGES, num_labels=4))


Made = tuple[Callable[[], Any], Callable[[], dict[str, Any]]]
ZOO: dict[str, Made] = {
    "bert": (lambda: tf.BertForMaskedLM(tf.BertConfig(**_SIZES)), _tokens),
    "roberta": (lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**_SIZES, max_position_embeddings=64)), _tokens),
    "distilbert": (_distilbert, _tokens),
    "electra": (lambda: tf.ElectraForMaskedLM(tf.ElectraConfig(**_SIZES, embedding_size=32)), _tokens),
    "albert": (lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(**_SIZES, embedding_size=16)), _tokens),
    "gpt2": (_gpt2, _tokens),
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)), _tokens),
    "mistral": (lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, sliding_window=8)), _tokens),
    "mixtral": (lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GROUPED, num_local_experts=4)), _tokens),
    "qwen2": (lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)), _tokens),
    "gemma2": (lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GROUPED, head_dim=8)), _tokens),
    "opt": (_opt, _tokens),
    "bloom": (_bloom, _tokens),
    "t5": (_t5, _tokens),
    "vit": (_vit, _images),
    "swin": (_swin, _images),
    "resnet": (_resnet, lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 2])}),
    "clip": (_clip, _pairs),
    "whisper": (_whisper, _spectra),
    "wav2vec2": (_wav2vec2, _speech),
}

# (dtype of autocast, GradScaler, options of AdamW)
SETTINGS: dict[str, tuple[torch.dtype | None, bool, dict[str, Any]]] = {
    "float32": (None, False, {}),
    "float32_fused": (None, False, {"fused": True}),
    "bfloat16_autocast": (BF16, False, {}),
    "float16_autocast_and_scaler": (HALF, True, {"foreach": True}),
}


def _build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    make, batch = ZOO[name]
    return make(), batch()


def test_there_are_enough_architectures() -> None:
    assert len(ZOO) >= 12


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ZOO)
def test_it_is_silent_on_a_healthy_example(name: str, setting: str) -> None:
    dtype, scaled, options = SETTINGS[setting]
    model, batch = _build(name)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5, weight_decay=0.01, **options)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    found = nanhunt.audit(model, optimizer, scaler, example=batch, autocast=dtype)
    assert found == [], str(found)
    assert found.unseen == () and found.looked[0].endswith("and its backward")


@pytest.mark.parametrize("setting", ["float32_fused", "float16_autocast_and_scaler"])
@pytest.mark.parametrize("name", ZOO)
def test_it_is_silent_on_a_healthy_step_with_warmup_clipping_and_unscaling(name: str, setting: str) -> None:
    dtype, scaled, options = SETTINGS[setting]
    model, batch = _build(name)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    found = nanhunt.audit(model, optimizer, scaler, step=step)
    assert found == [] and found.unseen == (), str(found)


@pytest.mark.parametrize("name", ZOO)
def test_it_is_silent_on_bfloat16_weights_for_inference(name: str) -> None:
    model, batch = _build(name)
    model.eval().bfloat16()
    given = {key: _to(value) for key, value in batch.items() if key not in ("labels", "return_loss")}
    if name == "t5":
        given["decoder_input_ids"] = batch["labels"]
    with torch.no_grad():
        found = nanhunt.audit(model, example=given)
    assert found == [] and found.unseen == (), str(found)


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "t5", "whisper", "clip"])
def test_it_is_silent_on_eager_attention_in_float32(name: str) -> None:
    model, batch = _build(name)
    model.set_attn_implementation("eager")
    found = nanhunt.audit(model, torch.optim.AdamW(model.parameters()), example=batch)
    assert found == [], str(found)


def test_it_is_silent_after_real_steps() -> None:
    """Moments and a scale that have lived, buffers that were written."""
    model, batch = _build("resnet")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=HALF):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = nanhunt.audit(model, optimizer, scaler, example=batch, autocast=HALF)
    assert found == [], str(found)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "resnet", "vit"])
def test_a_fault_in_a_healthy_model_is_all_that_is_said_whatever_the_module(name: str) -> None:
    """Every norm, every seventh weight: the place is named, and nothing else."""
    model, _ = _build(name)
    for path, p in list(model.named_parameters())[::7]:
        kept = p.detach().clone()
        p.data.view(-1)[0] = float("nan")
        assert [(remark.rule, remark.place) for remark in nanhunt.audit(model)] == [("nonfinite", path)]
        p.data.copy_(kept)
    norms = [(path, m) for path, m in model.named_modules() if type(m).__name__.endswith(("Norm", "Norm2d"))]
    assert len(norms) > 2
    for path, norm in norms:
        word = next(word for word in ("eps", "variance_epsilon") if hasattr(norm, word))
        eps = getattr(norm, word)
        setattr(norm, word, 0.0)
        assert [(remark.rule, remark.place) for remark in nanhunt.audit(model)] == [("eps_zero", path)]
        setattr(norm, word, eps)
    assert nanhunt.audit(model) == []


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "whisper"])
def test_one_layer_trained_in_bfloat16_is_named_whichever_it_is(name: str) -> None:
    model, _ = _build(name)
    layers = [(path, m) for path, m in model.named_modules() if type(m) is nn.Linear]
    for path, layer in layers[::4]:
        if any(layer.weight is p for other, p in model.named_parameters(remove_duplicate=False) if path not in other):
            continue  # tied to an embedding
        layer.bfloat16()
        found = nanhunt.audit(model, torch.optim.SGD(model.parameters(), 0.1))
        names = [f"{path}.weight", path] if layer.bias is None else [path]
        assert [remark.rule for remark in found] == ["half_weights"] and found[0].place in names
        layer.float()


def _to(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.bfloat16() if floats else value
