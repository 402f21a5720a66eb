"""shaderdsl itself: ops as a user writes them, compiled into one plan a workload."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import reference as ref
from workloads import ADAMW, SHAPE, TOKENS, Case, work

import shaderdsl as sd


@sd.op("n, n -> n")
def silu_mul(g, u):
    return sd.silu(g) * u


@sd.op("t d, d -> t d")
def rms_norm(x, gain):
    return x * sd.rsqrt(sd.mean(x * x, over="d") + ref.EPS) * gain


@sd.op("t d -> t d")
def softmax(x):
    return sd.softmax(x, over="d")


@sd.op("m k, k n -> m n")
def matmul(a, b):
    return sd.sum(a * b, over="k")


def attention(q, k, v):
    return sd.ops.attention(q, k, v)


def pullback(function):
    def run(*args):
        *args, dy = args
        return sd.vjp(function, *args)[1](dy)

    return run


def setup(name, x, args) -> Case:
    if name == "W9":
        return _training(x)
    if name == "W10":
        return _decoding(x)
    function, keys = {
        "W1": (silu_mul, ["y"]),
        "W2": (pullback(silu_mul), ["dg", "du"]),
        "W3": (rms_norm, ["y"]),
        "W4": (pullback(rms_norm), ["dx", "dgain"]),
        "W5": (softmax, ["y"]),
        "W6": (matmul, ["y"]),
        "W7": (attention, ["y"]),
        "W8": (pullback(attention), ["dq", "dk", "dv"]),
    }[name]
    compiled = sd.compile(function)
    arrays = [sd.asarray(value) for value in x.values()]
    last = []

    def run():
        out = compiled(*arrays)
        last[:] = out if isinstance(out, tuple) else [out]
        sd.synchronize()

    def fetch():
        return {key: value.numpy() for key, value in zip(keys, last)}

    kernels = len(sd.lower(function, *arrays).kernels)
    return Case(run, fetch, {"kernels": kernels})


#: the last part of a parameter's path → our name for it
NAMES = {
    "norm1": "norm1",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "norm2": "norm2",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "embed_tokens": "embed",
    "norm": "norm",
    "lm_head": "head",
}


def _model(x):
    """The model with the workload's weights."""
    from shaderdsl.nn.transformer import build

    c = SHAPE
    config = sd.nn.TransformerConfig(
        vocab_size=c.vocab,
        hidden_size=c.width,
        num_layers=c.layers,
        num_heads=c.heads,
        num_kv_heads=c.kv_heads,
        head_dim=c.head,
        ffn_size=c.ffn,
        max_positions=c.length,
        norm_eps=ref.EPS,
    )

    def make(path, shape, role):
        *before, name, _ = path.split(".")
        key = NAMES[name]
        if before:
            key = f"{before[1]}.{key}"
        value = x["weights"][key]
        # ours are [out, in], as Hugging Face's; the table is [vocab, width] everywhere
        transposed = value.ndim == 2 and key != "embed"
        return sd.asarray(value.T.copy() if transposed else value)

    return build(config, make)


def _decoding(x) -> Case:
    model, tokens = _model(x), []

    def run():
        out = model.generate([int(x["first"])], max_new_tokens=TOKENS)
        tokens[:] = np.asarray(out).ravel()[-TOKENS:].tolist()

    return Case(run, lambda: {"tokens": np.array(tokens)})


def _training(x) -> Case:
    model = _model(x)
    optimiser = sd.optim.AdamW(
        lr=ADAMW.rate,
        betas=(ADAMW.beta1, ADAMW.beta2),
        eps=ADAMW.eps,
        weight_decay=ADAMW.decay,
    )

    def train_step(model, state, ids, labels):
        def loss_of(model):
            return sd.nn.cross_entropy(model(ids), labels)

        loss, gradients = sd.value_and_grad(loss_of)(model)
        model, state = optimiser.update(model, gradients, state)
        return model, state, loss

    step = sd.compile(train_step, donate=("model", "state"))
    held = [model, optimiser.init(model)]
    ids, labels = sd.asarray(x["ids"]), sd.asarray(x["labels"])
    losses = []
    case = Case(lambda: None, lambda: {"losses": losses[:3]})

    def run():
        *held[:], loss = step(*held, ids, labels)
        losses.append(float(loss))

    case.run = run
    return case


if __name__ == "__main__":
    work("shaderdsl", setup)
