"""Plain formulas in NumPy float64, forward and backward, written apart from the ops.

Each ``*_grad`` takes the operands and the cotangent of the result, and gives the
gradients of the operands that vary by row, then sums over the rows for those that all
rows share.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

A = Any  # a float64 array


def _sigmoid(x: A) -> A:
    return 1.0 / (1.0 + np.exp(-x))


def silu_mul(g: A, u: A) -> A:
    return g * _sigmoid(g) * u


def silu_mul_grad(g: A, u: A, dy: A) -> tuple[A, A]:
    s = _sigmoid(g)
    return dy * u * s * (1 + g * (1 - s)), dy * g * s


def gelu(x: A) -> A:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_grad(x: A, dy: A) -> tuple[A]:
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return (dy * ((1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)),)


def rms_norm(x: A, w: A) -> A:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def rms_norm_grad(x: A, w: A, dy: A) -> tuple[A, A]:
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    h = x * r
    g = dy * w
    return r * (g - h * (g * h).mean(-1, keepdims=True)), (dy * h).sum(0)


def layer_norm(x: A, w: A, b: A) -> A:
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * w + b


def layer_norm_grad(x: A, w: A, b: A, dy: A) -> tuple[A, A, A]:
    d = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)
    h, g = d * r, dy * w
    mean = g.mean(-1, keepdims=True)
    dx = r * (g - mean - h * (g * h).mean(-1, keepdims=True))
    return dx, (dy * h).sum(0), dy.sum(0)


def softmax(x: A) -> A:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_grad(x: A, dy: A) -> tuple[A]:
    y = softmax(x)
    return (y * (dy - (y * dy).sum(-1, keepdims=True)),)


def cross_entropy(x: A, labels: A) -> A:
    """Of each row."""
    m = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - m).sum(-1)) + m[..., 0]
    return lse - x[np.arange(len(x)), labels]


def attention(q: A, k: A, v: A) -> A:
    """Causal, of one head: [t, c]."""
    return _weights(q, k) @ v


def _weights(q: A, k: A) -> A:
    t = len(q)
    s = q @ k.T / np.sqrt(q.shape[-1])
    s[np.triu_indices(t, 1)] = -np.inf
    return softmax(s)


def attention_grad(q: A, k: A, v: A, do: A) -> tuple[A, A, A]:
    p = _weights(q, k)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return ds @ k, ds.T @ q, p.T @ do


def llama_loss(weights: dict[str, A], ids: A, config: Any) -> float:
    """Mean cross entropy of each next token under a Llama-style model.

    ``weights`` have Hugging Face's names.
    """
    x = weights["model.embed_tokens.weight"][ids[:-1]]
    t, c = len(x), config.head_dim or config.hidden_size // config.num_heads
    angle = np.arange(t)[:, None] * config.rope_theta ** (-np.arange(0, c, 2) / c)
    cos, sin = np.cos(angle), np.sin(angle)

    def turn(y: A) -> A:  # [t, heads, c]
        a, b = y[..., : c // 2], y[..., c // 2 :]
        co, si = cos[:, None], sin[:, None]
        return np.concatenate([a * co - b * si, b * co + a * si], -1)

    for n in range(config.num_layers):
        p = f"model.layers.{n}."

        def by(name: str, y: A, p: str = p) -> A:
            return y @ weights[f"{p}{name}.weight"].T

        y = rms_norm(x, weights[f"{p}input_layernorm.weight"])
        q = turn(by("self_attn.q_proj", y).reshape(t, -1, c))
        k = turn(by("self_attn.k_proj", y).reshape(t, -1, c))
        v = by("self_attn.v_proj", y).reshape(t, -1, c)
        group = q.shape[1] // k.shape[1]

        def head(h: int, q: A = q, k: A = k, v: A = v, group: int = group) -> A:
            return attention(q[:, h], k[:, h // group], v[:, h // group])

        with ThreadPoolExecutor() as pool:  # NumPy takes one thread for most of it
            heads = list(pool.map(head, range(q.shape[1])))
        x = x + by("self_attn.o_proj", np.stack(heads, 1).reshape(t, -1))
        y = rms_norm(x, weights[f"{p}post_attention_layernorm.weight"])
        x = x + by(
            "mlp.down_proj", silu_mul(by("mlp.gate_proj", y), by("mlp.up_proj", y))
        )
    x = rms_norm(x, weights["model.norm.weight"])
    return float(cross_entropy(x @ weights["lm_head.weight"].T, ids[1:]).mean())
