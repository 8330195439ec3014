"""Models to plant faults in: transformers with tiny random configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BATCH, LENGTH, WIDTH, VOCAB = 2, 8, 16, 48
Spec = tuple[Any, ...]  # a nested description of a random model: ("residual", ("linear",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A model with one batch, and what is needed to run the same step on it again and again."""

    name: str
    model: nn.Module
    batch: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    saved: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved", tuple(t.detach().clone() for t in self.state()))

    def state(self) -> Iterator[Tensor]:
        """Every parameter and buffer, each once."""
        yield from self.model.parameters()
        yield from self.model.buffers()

    def restore(self) -> None:
        """Put parameters and buffers back as they were built, and drop the gradients."""
        with torch.no_grad():
            for tensor, saved in zip(self.state(), self.saved, strict=True):
                tensor.data.copy_(saved)
        for parameter in self.model.parameters():
            parameter.grad = None

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Tensor]:
        """One training step with the same random numbers each time: forward, loss, backward, update."""
        torch.manual_seed(0)
        output = self.model(**self.batch)
        loss = self.loss(output)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return output, loss


def _tokens(seed: int = 1) -> dict[str, Tensor]:
    """Two sequences, the second one padded, so that the attention masks have something to mask."""
    ids = torch.randint(4, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _image(side: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, side, side, generator=generator), "labels": torch.tensor([0, 2])}


def _speech() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_features": torch.randn(BATCH, 8, 2 * LENGTH, generator=generator), "labels": _tokens(2)["labels"]}


def _unlabelled() -> dict[str, Tensor]:
    batch = _tokens()
    del batch["labels"]
    return batch


SMALL = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 16, **SMALL}
CAUSAL = {"num_key_value_heads": 1, **TEXT}
GPT2 = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
VIT = {"image_size": 8, "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.1, **SMALL}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3}
WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 8,
    "d_model": WIDTH,
    "dropout": 0.1,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "max_source_positions": LENGTH,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
MAMBA = {"vocab_size": VOCAB, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 2}
MIXTRAL = {"num_local_experts": 4, "output_router_logits": True, **CAUSAL}

# name: (model class, configuration class, its options, the batch)
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, _tokens),
    "bert-eager": ("BertForMaskedLM", "BertConfig", {"attn_implementation": "eager", **TEXT}, _tokens),
    "bert-plain": ("BertModel", "BertConfig", TEXT, _unlabelled),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"bos_token_id": 1, "eos_token_id": 2, **GPT2}, _tokens),
    "llama": ("LlamaForCausalLM", "LlamaConfig", CAUSAL, _tokens),
    "llama-checkpoint": ("LlamaForCausalLM", "LlamaConfig", CAUSAL, _tokens),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0, **T5}, _tokens),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT, lambda: _image(8)),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, _speech),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA, _tokens),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MIXTRAL, _tokens),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", RESNET, lambda: _image(32)),
}


def _model_loss(output: Any) -> Tensor:
    """The model's own loss, else the mean square of its first output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = output[0] if not isinstance(output, Mapping) else next(iter(output.values()))
    return first.float().pow(2).mean()  # type: ignore[no-any-return]


def tiny(name: str) -> Specimen:
    """A transformers model with a tiny random configuration, in training mode, without any download."""
    import transformers

    log: Any = transformers.logging
    log.set_verbosity_error()
    torch.manual_seed(0)
    model_class, config_class, options, batch = MODELS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    if "checkpoint" in name:
        model.gradient_checkpointing_enable()
    return Specimen(name=name, model=model.train(), batch=batch(), loss=_model_loss)
