"""By what programs a log was written, told from the look of its lines."""

from __future__ import annotations

import re

# The first that fits a line gives its name. Every word must stand in the line, in any order.
_LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fairseq simple", ("num_updates", "| epoch")),
    ("fairseq simple", ("gnorm", "ups", "wps")),
    ("fairseq json", ("num_updates", '{"epoch"')),
    ("Megatron", ("iteration", "consumed samples")),
    ("Megatron", ("elapsed time per iteration",)),
    ("Megatron", ("loss at iteration", "lm loss")),
    ("detectron2", ("d2.utils.events",)),
    ("detectron2", ("eta:", "iter:", "total_loss:", "data_time:")),
    ("mmdet", ("- mmdet - ",)),
    ("mmdet", ("- mmengine - ",)),
    ("mmdet", ("Epoch [", "][", "eta:")),
    ("mmdet", ("Iter [", "eta:")),
    ("char-rnn", ("grad/param norm",)),
    ("nanoGPT", ("iter ", ": loss ", ", time ")),
    ("nanoGPT", ("step ", ": train loss ", ", val loss ")),
    ("DeepSpeed messages", ("skipped=", "lr=[", "mom=[")),
    ("transformers dicts", ("{'loss'",)),
    ("transformers dicts", ("{'eval_loss'",)),
    ("transformers dicts", ("'epoch':", "'learning_rate'")),
    ("transformers dicts", ("{'", "'epoch':")),
    ("PyTorch ImageNet example", ("Epoch: [", "][", "Loss ")),
    ("Keras", ("/step", " - ", "loss:")),
    ("Keras", ("ETA:", " - loss:")),
    ("progress bars", ("%|", "it/s")),
    ("progress bars", ("%|", "s/it")),
    ("torchtitan", ("step:", "grad_norm:", "tps:")),
    ("torchtitan", ("step:", "memory:", "tps")),
)
_MESSAGES = (
    ("DeepSpeed messages", re.compile(r"\[deep(?:speed|scale)\]|deepspeed", re.I)),
    ("apex messages", re.compile(r"loss scaler \d|Gradient overflow\.")),
    ("fairseq messages", re.compile(r"overflow detected.*setting loss scale|Minimum loss scale reached")),
)


def of_line(text: str) -> str:
    """The format of a line that a record was read from."""
    for name, needed in _LINES:
        if all(word in text for word in needed):
            return name
    if re.search(r"\w[\"']?\s*:\s*[\"']?[-+\d]", text) and not re.search(r"\w=[-+\d]", text):
        return "key: value lines"
    return "key=value lines" if re.search(r"\w\s*=\s*[-+\d]", text) else "lines of names and numbers"


def of_message(text: str) -> str:
    """The format of a message line."""
    for name, pattern in _MESSAGES:
        if pattern.search(text):
            return name
    return "scaler messages" if re.search(r"scale|overflow", text, re.I) else "trainer messages"
