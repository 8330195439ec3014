"""The programs that are timed: one model, its optimizer, one batch, and a step to repeat."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# So small that the numbers stay where they are: hundreds of steps on one batch must not end in subnormals.
LEARNING_RATE = 1e-7


class Program:
    """A training step, and a forward pass without gradients, over one batch that never changes.

    `part` is an `fnmatch` pattern for the paths of one block of the model, for tools that can look at a part.
    """

    def __init__(self, name: str, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, part: str) -> None:
        self.name, self.model, self.inputs, self.labels, self.part = name, model, inputs, labels, part
        self.optimizer: torch.optim.Optimizer | None = None
        if any(True for _ in model.parameters()):
            self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        self.last = labels.new_zeros((), dtype=torch.float32)  # the loss of the last step

    def loss(self) -> Tensor:
        logits = logits_of(self.model(**self.inputs))
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), self.labels.flatten())

    def train(self) -> None:
        loss = self.loss()
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.last = loss.detach()

    def infer(self) -> None:
        with torch.no_grad():
            self.model(**self.inputs)

    def step(self, mode: str) -> Callable[[], None]:
        """The step of a mode, with the model switched to it."""
        self.model.train(mode == "train")
        return self.train if mode == "train" else self.infer

    @property
    def modules(self) -> int:
        return sum(1 for _ in self.model.modules())


def logits_of(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


# --- plain torch ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(self.act(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int, *, heads: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(input_ids) + self.place)))
        return logits


class Residual(nn.Module):
    """Two convolutions and a way around them, with the ReLU and the sum in place; `wide` makes it a bottleneck."""

    def __init__(self, before: int, after: int, stride: int, *, wide: int = 1) -> None:
        super().__init__()
        sizes = [(before, after, 3, stride), (after, after, 3, 1)]
        if wide > 1:
            sizes = [(before, after, 1, 1), (after, after, 3, stride), (after, after * wide, 1, 1)]
        layers: list[nn.Module] = []
        for inner, outer, size, step in sizes:
            layers += [nn.Conv2d(inner, outer, size, step, size // 2, bias=False), nn.BatchNorm2d(outer)]
            layers.append(nn.ReLU(inplace=True))
        self.body = nn.Sequential(*layers[:-1])
        self.act = nn.ReLU(inplace=True)
        self.around: nn.Module | None = None
        if stride > 1 or before != after * wide:
            self.around = nn.Sequential(
                nn.Conv2d(before, after * wide, 1, stride, bias=False), nn.BatchNorm2d(after * wide)
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out += x if self.around is None else self.around(x)
        result: Tensor = self.act(out)
        return result


class ResNet(nn.Module):
    """ResNet-18 (`wide=1`) or, with `depths=(3, 4, 6, 3)` and `wide=4`, ResNet-50."""

    def __init__(
        self, depths: tuple[int, ...] = (2, 2, 2, 2), *, width: int = 64, wide: int = 1, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        before = width
        for stage, depth in enumerate(depths):
            after = width << stage
            for n in range(depth):
                blocks.append(Residual(before, after, 2 if stage and not n else 1, wide=wide))
                before = after * wide
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(before, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.blocks(self.stem(pixel_values))).flatten(1))
        return logits


class Chain(nn.Module):
    """`count` modules of one kind, one after the other: nothing else happens in a step."""

    def __init__(self, count: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
        return x


class Times(nn.Module):
    """A module that costs one small op and keeps nothing for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0001


# --- the table ------------------------------------------------------------------------------------


def _text(
    name: str, model: nn.Module, batch: int, length: int, part: str, *, vocabulary: int = 1000, one: bool = False
) -> Program:
    tokens = torch.randint(1, vocabulary, (batch, length))
    labels = torch.randint(2, (batch,)) if one else torch.randint(vocabulary, (batch, length))
    return Program(name, model, {"input_ids": tokens}, labels, part)


def _gpt(quick: bool) -> Program:
    layers, width, batch, length = (2, 32, 2, 16) if quick else (6, 256, 8, 128)
    return _text("gpt", GPT(layers, width, length), batch, length, "blocks.0.*")


def _tiny(quick: bool) -> Program:
    layers, width, batch, length = (2, 32, 2, 8) if quick else (12, 64, 2, 16)
    return _text("tiny gpt", GPT(layers, width, length), batch, length, "blocks.0.*")


def _resnet(quick: bool) -> Program:
    size, batch = (32, 2) if quick else (96, 8)
    model = ResNet((1, 1), width=8, classes=10) if quick else ResNet()
    return Program(
        "resnet",
        model,
        {"pixel_values": torch.randn(batch, 3, size, size)},
        torch.randint(10, (batch,)),
        "blocks.0.*",
    )


def _tiny_gpt2(quick: bool) -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, batch, length = (2, 32, 2, 8) if quick else (12, 64, 2, 16)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=1000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return _text("tiny gpt2", GPT2LMHeadModel(config), batch, length, "transformer.h.0.*")


def _llama(quick: bool) -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, batch, length = (2, 32, 2, 8) if quick else (6, 256, 4, 128)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1000,
        use_cache=False,
    )
    return _text("llama", LlamaForCausalLM(config), batch, length, "model.layers.0.*")


def _bert(quick: bool) -> Program:
    from transformers import BertConfig, BertForSequenceClassification

    layers, width, batch, length = (2, 32, 2, 8) if quick else (6, 256, 4, 128)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        vocab_size=1000,
    )
    config.num_labels = 2
    model = BertForSequenceClassification(config)
    return _text("bert", model, batch, length, "bert.encoder.layer.0", one=True)


def _vit(quick: bool) -> Program:
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, batch, size = (2, 32, 2, 32) if quick else (6, 192, 8, 96)
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        image_size=size,
        patch_size=8,
    )
    config.num_labels = 10
    pixels = torch.randn(batch, 3, size, size)
    return Program(
        "vit",
        ViTForImageClassification(config),
        {"pixel_values": pixels},
        torch.randint(10, (batch,)),
        "vit.*layer*.0",
    )


_PLAIN: dict[str, Callable[[bool], Program]] = {"gpt": _gpt, "resnet": _resnet, "tiny gpt": _tiny}
_TRANSFORMERS: dict[str, Callable[[bool], Program]] = {
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "tiny gpt2": _tiny_gpt2,
}
MODELS = _PLAIN | _TRANSFORMERS

CAPTIONS = {
    "gpt": "GPT 6x256, batch 8x128, plain torch",
    "resnet": "ResNet-18, in-place ReLU, 8x3x96x96, plain torch",
    "llama": "Llama 6x256, batch 4x128, transformers",
    "bert": "BERT 6x256, batch 4x128, transformers",
    "vit": "ViT 6x192, 8x3x96x96, transformers",
    "tiny gpt2": "GPT-2 12x64, batch 2x16, transformers: tiny ops",
    "tiny gpt": "GPT 12x64, batch 2x16, plain torch: tiny ops",
}


def missing(name: str) -> str | None:
    """Why a model cannot be built here, or None."""
    if name in _TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return None


def build(name: str, *, quick: bool = False) -> Program:
    """A program of the table, the same weights and batch each time."""
    torch.manual_seed(0)
    return MODELS[name](quick)
