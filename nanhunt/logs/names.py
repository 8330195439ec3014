"""What a column or a key of a log means: the names that people and programs give to the same few quantities."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class Meaning(NamedTuple):
    """What a name stands for.

    Attributes:
        kind: the attribute of `entry.Entry` that it fills; "loss" fills `losses` where a better one stands beside it,
            "score" is a metric only in a record that has no loss, "ignored" is known and of no use.
        order: of several names of one kind in one record the least one is taken.
        name: for parts of a loss and for metrics, as it was printed.
    """

    kind: str
    order: int = 0
    name: str = ""


_STEPS = {
    name: order
    for order, names in enumerate(
        (
            "num updates|global step|globalstep|trainer global step|train global step|global steps|global iter"
            "|global iteration|optimizer step|opt step",
            "step|iteration|iter|it|itr|steps|iters|iterations|train step|train iter|train iteration|training step"
            "|training iteration|step num|iter num|step number|cur step|cur iter|current step|current iteration|n iter"
            "|train steps|step idx|iter idx|niter|trainstep",
            "update|updates|train updates|total steps done|update num",
        )
    )
    for name in names.split("|")
}
_BATCHES = set("batch|batch idx|batch id|minibatch|mini batch|batch num|batch number|batch index|batch i".split("|"))
_EPOCHS = set("epoch|ep|epochs|current epoch|cur epoch|epoch num|train epoch|epoch idx|train epochs".split("|"))
_RANKS = set("rank|global rank|local rank|process rank|world rank".split("|"))
_NO_LOSS_NAMES = {  # words that say nothing about which loss it is
    *"train training tr value values metrics metric reduced global current cur batch step iter raw this all".split(),
    *"total avg average averaged mean running smoothed smooth epoch ema sum meter the is per token final log".split(),
}
_AVERAGED = set("avg average averaged mean running smoothed smooth epoch ema meter final".split())
_PLAIN_LOSSES = {  # names without the word "loss", or with more of them, that are the loss that is trained
    *"loss|losses|lm loss|language model loss|nll|nll loss|ce|ce loss|cross entropy|cross entropy loss".split("|"),
    *"crossentropyloss|crossentropy|xent|xent loss|mse|mse loss|cost|bce|bce loss|loss ce|loss mse|loss nll|elbo".split(
        "|"
    ),
    *"lmloss|objective|masked lm loss|mlm loss|causal lm loss|sft loss|loss lm".split("|"),
}
_VALIDATION = set("val valid validation eval evaluation dev test testing holdout heldout validate evaluate".split())
_EVALUATED = set(  # metrics that are measured on a validation set, whatever the key says
    "map map50 map@ map75 ap50 ap75 miou bleu sacrebleu wer cer auc auroc rouge rouge1 rouge2 rougel rougelsum dice"
    " psnr ssim fid ndcg mrr meteor chrf exactmatch hellaswag mmlu".split()
)
_SCORES = set(
    "acc accuracy acc1 acc5 top1 top5 acc@1 acc@5 prec@1 prec@5 ap iou f1 em recall precision ppl perplexity score mcc"
    " pearson spearman r2 mae rmse bpc bpb error err top hella kappa specificity sensitivity fitness".split()
)
_NOISE = set(
    "time eta mem memory speed sec secs second seconds runtime throughput samples sample tokens tok flops tflops mfu"
    " size count best target weight weights coef coeff coefficient lambda py cpp cc cu java remaining elapsed warmup"
    " every interval patience freq frequency seed gpu gpus version workers world init initial window limit thresh"
    " threshold factor decay schedule scheduler type duration hours minutes started date bsz batchsize examples"
    " accumulation length len num nums start end rate ratio worst delta tolerance tol max min std var dir path file"
    " power hysteresis id prev previous ms s h fn func function name names class classes param params parameters"
    " smoothing steps epochs beta betas eps dtype dropout clip clipping clipped multiplier mult at last".split()
)
_LR_NAMES = set(
    "lr learning rate train training optim optimizer group groups pg current cur adam adamw sgd new param lion"
    " adafactor rmsprop actual step the opt log value main model trainer".split()
)
_NORM_NAMES = set(
    "grad gradient gradients grads norm norms total global train training all l2 avg average mean step optim optimizer"
    " model before unclipped pre clip clipping raw trainer the of l g opt norm2 value batch log".split()
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
_IN_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")
_SPLIT = re.compile(r"[^a-z0-9@]+")


@functools.lru_cache(maxsize=8192)
def meaning(key: str, sure: bool = True) -> Meaning | None:
    """What a key stands for; None when it is none of the quantities of a step.

    Args:
        key: as it was printed, such as "lm loss", "train/grad_norm" or "optim/learning_rate_group0".
        sure: it is a key beyond doubt (a column, something before "=" or ":"); else some words before a number.
    """
    key = key.strip().strip("\"'")
    if not key or len(key) > 120:
        return None
    text = _IN_BRACKETS.sub(" ", _CAMEL.sub(" ", key)).lower()
    words = [word for word in _SPLIT.split(text) if word]
    if not words or len(words) > 9:
        return None
    plain = " ".join(words)
    if plain in _STEPS or key == "Up.":  # as Marian shortens it; "up" alone is a word
        return Meaning("step", _STEPS.get(plain, 2))
    if plain in _EPOCHS:
        return Meaning("epoch")
    if plain in _BATCHES:
        return Meaning("batch")
    if plain in _RANKS:
        return Meaning("rank")
    bag = set(words)
    if "iterations" in bag and bag & {"skipped", "nan"}:
        return Meaning("skips" if "skipped" in bag else "nans")
    if plain in ("skipped", "skipped steps", "num skipped", "n skipped"):
        return Meaning("skips_so_far")
    if plain in ("overflow", "is overflow", "found inf", "step skipped", "skip"):
        return Meaning("skips", 1)
    if bag & _VALIDATION:
        return _validation(key, words, bag, sure)
    if (
        "norm" in bag
        or plain in ("gnorm", "grad", "gradnorm", "gradientnorm")
        or plain.endswith((" gnorm", " gradnorm"))
    ):
        return _norm(words, bag)
    if bag & {"scale", "scaler", "scaling"} or plain == "lossscale":
        named = bag & {"loss", "grad", "amp", "fp16", "scaler", "dynamic", "gradscaler"} or plain in (
            "scale",
            "lossscale",
        )
        return Meaning("loss_scale", len(words)) if named and not bag & (_NOISE - {"factor", "clip"}) else None
    if "lr" in bag or {"learning", "rate"} <= bag or plain == "l r" or words[-1] in ("learningrate", "learnrate"):
        strange = {word for word in bag - _LR_NAMES if not re.fullmatch(r"pg\d*|group\d+|\d+|lr\d+|[a-z]", word)}
        return None if bag & (_NOISE - {"rate", "param"}) or len(strange) > 1 else Meaning("lr")
    return _loss(key, words, bag, plain) or _score(key, words, bag, plain, sure)


def _validation(key: str, words: list[str], bag: set[str], sure: bool) -> Meaning | None:
    rest = bag - _VALIDATION
    if rest & (_NOISE - {"error", "rate", "ratio", "at", "best"}) or "best" in bag:
        return Meaning("ignored") if sure else None
    if rest & {"step", "epoch", "iter", "iteration", "batch", "lr", "it", "set", "split"} and not rest & {"loss"}:
        return Meaning("ignored") if sure else None
    telling = any("loss" in word or word in _EVALUATED or word in _SCORES for word in rest)
    if not telling and (not sure or not rest):
        return None
    return Meaning("metric", 0, key)


def _norm(words: list[str], bag: set[str]) -> Meaning | None:
    if bag <= {"grad", "param", "norm"} and "grad" in bag and "param" in bag:
        return Meaning("grad_norm", 2)  # char-rnn tells the ratio of the two, which follows the gradient
    clipped = bool(bag & {"clipped", "after", "post"})
    strange = {w for w in bag - _NORM_NAMES - {"clipped", "after", "post", "gnorm", "gradnorm"} if not w.isdigit()}
    if strange or bag & {"max", "min", "param", "weight"}:
        return None
    if not bag & {"grad", "gradient", "gradients", "grads", "gnorm", "gradnorm", "gradientnorm"} and words[0] != "g":
        return Meaning("grad_norm", 3) if bag <= {"norm", "total", "global", "train", "l2"} else None
    return Meaning("clipped_norm" if clipped else "grad_norm", 1 if bag & {"avg", "average", "mean"} else 0)


def _loss(key: str, words: list[str], bag: set[str], plain: str) -> Meaning | None:
    lossy = any(word.startswith("loss") or word.endswith(("loss", "losses")) for word in words)
    stripped = " ".join(word for word in words if word not in _NO_LOSS_NAMES)
    if plain not in _PLAIN_LOSSES and stripped not in _PLAIN_LOSSES and not lossy:
        return None
    if bag & (_NOISE - {"at", "function"}):
        return Meaning("ignored") if lossy else None
    if words[-2:] == ["value", "loss"]:  # of a critic
        return Meaning("losses", 20, key)
    if stripped in _PLAIN_LOSSES or plain in _PLAIN_LOSSES or not stripped:
        order = 1 if stripped in ("loss", "losses") else 4
        if "total" in bag and lossy:
            order = 0
        if bag & _AVERAGED:
            order += 10
        return Meaning("loss", order, key)
    return Meaning("losses", 20, key)


def _score(key: str, words: list[str], bag: set[str], plain: str, sure: bool) -> Meaning | None:
    if bag & (_NOISE - {"error", "rate"}) or (not sure and len(words) > 3):
        return None
    if (
        bag & _EVALUATED
        or (sure and bag & {"reward", "rewards", "return", "rew"})
        or ("metrics" in bag and bag & _SCORES)
    ):
        return Meaning("metric", 0, key)
    if bag & _SCORES:
        return Meaning("score", 0, key)
    return None
