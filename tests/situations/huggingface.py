"""Transformers with tiny models of many kinds, as its users run them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .harness import Spans
from .installed import framework, needs
from .models import batch, squared

SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def ids(*shape: int) -> Tensor:
    """Token numbers of the small vocabulary."""
    return torch.randint(3, 31, shape or (2, 7))


def _step(watch: Spans, model: nn.Module, **batch_: Any) -> dict[str, object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    outs = []
    with watch(model):
        for _ in range(2):
            out = model(**batch_)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out)
    return {"outs": outs, "state": dict(model.state_dict()), "optimizer": optimizer}


@framework()
def hf_bert(watch: Spans) -> object:
    """BERT for masked language modelling, with a padding mask and labels that are ignored."""
    hf = needs("transformers")
    model = hf.BertForMaskedLM(hf.BertConfig(**SMALL, max_position_embeddings=16)).train()
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    labels = ids().masked_fill(mask == 0, -100)
    return _step(watch, model, input_ids=ids(), attention_mask=mask, labels=labels)


@framework()
def hf_gpt2(watch: Spans) -> object:
    """GPT-2 with tied embeddings and dropout."""
    hf = needs("transformers")
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16)).train()
    tokens = ids()
    return _step(watch, model, input_ids=tokens, labels=tokens)


def _llama(**options: Any) -> Any:
    hf = needs("transformers")
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, **options)
    return hf.LlamaForCausalLM(config).train()


def _padded() -> dict[str, Tensor]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])}


@framework()
def hf_llama(watch: Spans) -> object:
    """Llama with scaled dot product attention and left padding."""
    return _step(watch, _llama(attn_implementation="sdpa"), **_padded())


@framework()
def hf_llama_eager_attn(watch: Spans) -> object:
    """Llama with the attention written out, where masks are the smallest number of the format."""
    return _step(watch, _llama(attn_implementation="eager"), **_padded())


@framework()
def hf_llama_bf16(watch: Spans) -> object:
    """Llama wholly in bfloat16."""
    return _step(watch, _llama().bfloat16(), **_padded())


@framework()
def hf_llama_gradckpt(watch: Spans) -> object:
    """Llama with gradient checkpointing, the non-reentrant form."""
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return _step(watch, model, **_padded())


@framework()
def hf_llama_gradckpt_reentrant(watch: Spans) -> object:
    """Llama with gradient checkpointing, the reentrant form, whose inputs are made to want gradients."""
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return _step(watch, model, **_padded())


@framework()
def hf_llama_hidden_states(watch: Spans) -> object:
    """All hidden states and attentions are returned and used in the loss."""
    model = _llama(attn_implementation="eager")
    with watch(model):
        out = model(**_padded(), output_hidden_states=True, output_attentions=True)
        loss = out.loss + sum(map(squared, out.hidden_states)) + sum(map(squared, out.attentions))
        loss.backward()
    return [out, loss, [p.grad for p in model.parameters()]]


@framework()
def hf_llama_generate(watch: Spans) -> object:
    """Greedy, sampled with top-k and top-p, and beam search: filters write -inf into the scores."""
    model = _llama().eval()
    outs, prompt = [], ids(2, 4)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5, "top_p": 0.9}, {"num_beams": 3}):
        with watch(model):
            made = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=6,
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
        outs.append([made.sequences, list(made.scores)])
    return outs


@framework()
def hf_t5(watch: Spans) -> object:
    """T5: encoder, decoder, relative positions."""
    hf = needs("transformers")
    config = hf.T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return _step(watch, hf.T5ForConditionalGeneration(config).train(), input_ids=ids(), labels=ids(2, 5))


@framework()
def hf_vit(watch: Spans) -> object:
    """A vision transformer."""
    hf = needs("transformers")
    small = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    model = hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=8, patch_size=4, num_labels=3)).train()
    return _step(watch, model, pixel_values=batch(2, 3, 8, 8), labels=torch.tensor([0, 2]))


@framework()
def hf_whisper(watch: Spans) -> object:
    """Whisper: convolutions over spectra, an encoder and a decoder."""
    hf = needs("transformers")
    config = hf.WhisperConfig(
        vocab_size=31,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = hf.WhisperForConditionalGeneration(config).train()
    return _step(watch, model, input_features=batch(2, 8, 20), labels=ids(2, 5))


@framework()
def hf_mamba(watch: Spans) -> object:
    """Mamba: the selective scan in plain PyTorch."""
    hf = needs("transformers")
    config = hf.MambaConfig(vocab_size=31, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=4)
    tokens = ids()
    return _step(watch, hf.MambaForCausalLM(config).train(), input_ids=tokens, labels=tokens)


@framework()
def hf_mixtral(watch: Spans) -> object:
    """Mixtral: routed experts and a router loss."""
    hf = needs("transformers")
    config = hf.MixtralConfig(
        **SMALL,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=32,
    )
    return _step(watch, hf.MixtralForCausalLM(config).train(), **_padded())


@framework()
def hf_resnet(watch: Spans) -> object:
    """A residual convolution network with batch norm and in-place ReLU."""
    hf = needs("transformers")
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
    model = hf.ResNetForImageClassification(config).train()
    return _step(watch, model, pixel_values=batch(2, 3, 16, 16), labels=torch.tensor([0, 2]))


@framework()
def hf_save(watch: Spans) -> object:
    """save_pretrained, from_pretrained and torch.save while watched."""
    needs("transformers")
    model = _llama()
    with tempfile.TemporaryDirectory() as folder, watch(model):
        model(**_padded()).loss.backward()
        model.save_pretrained(folder)
        torch.save(model, Path(folder) / "whole.pt")
        names = sorted(os.listdir(folder))
        again = type(model).from_pretrained(folder)
        whole = torch.load(Path(folder) / "whole.pt", weights_only=False)
    return [names, dict(again.state_dict()), dict(whole.state_dict())]


class _Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = ids(12, 6)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


@framework()
def hf_trainer(watch: Spans) -> object:
    """The Trainer: bfloat16, accumulation, clipping, evaluation and a checkpoint from which it resumes."""
    hf = needs("transformers")
    needs("accelerate")
    model, history = _llama(), []
    with tempfile.TemporaryDirectory() as folder:
        for resume in (False, True):
            arguments = hf.TrainingArguments(
                output_dir=folder,
                max_steps=4 if resume else 2,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                bf16=True,
                use_cpu=True,
                save_steps=2,
                eval_steps=2,
                eval_strategy="steps",
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
                seed=0,
            )
            trainer = hf.Trainer(model=model, args=arguments, train_dataset=_Tokens(), eval_dataset=_Tokens())
            trainer.remove_callback(hf.PrinterCallback)
            with watch(model):
                trainer.train(resume_from_checkpoint=resume or None)
            history.append(
                [{k: v for k, v in row.items() if "loss" in k or k == "grad_norm"} for row in trainer.state.log_history]
            )
    return [history, dict(model.state_dict())]
