"""What the workloads compute, in NumPy, with pullbacks written by hand.

Every function keeps the dtype it is given: float64 is what all peers are checked with.
The model is Llama's: [in, out] weights, rotary halves, grouped queries, SwiGLU, an
untied head; one sequence, no batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    vocab: int = 512
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    ffn: int = 688
    length: int = 256
    head: int = 32

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head


@dataclass(frozen=True)
class AdamW:
    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.01


def silu_mul(g, u):
    return g / (1 + np.exp(-g)) * u


def silu_mul_pullback(g, u, dy):
    s = 1 / (1 + np.exp(-g))
    return dy * u * s * (1 + g * (1 - s)), dy * g * s


def rms_norm(x, gain):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(EPS)) * gain


def rms_norm_pullback(x, gain, dy):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(EPS))
    inner = (dy * gain * x).mean(-1, keepdims=True)
    return r * dy * gain - x * r**3 * inner, (dy * x * r).sum(0)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotary_tables(length, head, dtype):
    angle = np.arange(length)[:, None] * 1e4 ** (-np.arange(0, head, 2) / head)
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def rotate(x, cos, sin):
    """x [s, heads, head]; pairs are (i, i + head/2). The pullback takes -sin."""
    a, b = np.split(x, 2, -1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def _weights(q, k):
    group = q.shape[1] // k.shape[1]
    k = np.repeat(k, group, 1)
    scores = np.einsum("ihd,jhd->hij", q, k, optimize=True) * q.shape[-1] ** -0.5
    seen = np.tril(np.ones(scores.shape[1:], bool))
    return softmax(np.where(seen, scores, -np.inf)), k


def attention(q, k, v):
    """q [s, heads, head], k and v [s, kv_heads, head]; causal."""
    p, _ = _weights(q, k)
    v = np.repeat(v, q.shape[1] // v.shape[1], 1)
    return np.einsum("hij,jhd->ihd", p, v, optimize=True)


def attention_pullback(q, k, v, dy):
    (s, heads, head), kv = q.shape, k.shape[1]
    p, wide = _weights(q, k)
    dp = np.einsum("ihd,jhd->hij", dy, np.repeat(v, heads // kv, 1), optimize=True)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * head**-0.5
    dq = np.einsum("hij,jhd->ihd", ds, wide, optimize=True)
    dk = np.einsum("hij,ihd->jhd", ds, q, optimize=True)
    dv = np.einsum("hij,ihd->jhd", p, dy, optimize=True)
    per_group = (s, kv, heads // kv, head)
    return dq, dk.reshape(per_group).sum(2), dv.reshape(per_group).sum(2)


def initial_weights(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    rng, d, kv, f = np.random.default_rng(seed), shape.width, shape.kv_width, shape.ffn

    def matrix(*size):
        return (rng.standard_normal(size) / np.sqrt(size[0])).astype(np.float32)

    ones = np.ones(d, np.float32)
    weights = {"embed": rng.standard_normal((shape.vocab, d)).astype(np.float32)}
    for i in range(shape.layers):
        weights |= {
            f"{i}.norm1": ones,
            f"{i}.q": matrix(d, d),
            f"{i}.k": matrix(d, kv),
            f"{i}.v": matrix(d, kv),
            f"{i}.o": matrix(d, d),
            f"{i}.norm2": ones,
            f"{i}.gate": matrix(d, f),
            f"{i}.up": matrix(d, f),
            f"{i}.down": matrix(f, d),
        }
    return weights | {"norm": ones, "head": matrix(d, shape.vocab)}


def greedy(shape: Shape, weights, first: int, count: int) -> np.ndarray:
    """The tokens that follow one, each the likeliest, in float64 with a cache."""
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    tables = rotary_tables(count, shape.head, np.float64)
    caches: list[list] = [[] for _ in range(shape.layers)]
    tokens, token = [], first
    for at in range(count):
        cos, sin = (t[at : at + 1] for t in tables)
        x = w["embed"][[token]]
        for i, cache in enumerate(caches):
            h = rms_norm(x, w[f"{i}.norm1"])
            q, k, v = (
                (h @ w[f"{i}.{n}"]).reshape(1, -1, shape.head) for n in ("q", "k", "v")
            )
            cache.append((rotate(k, cos, sin), v))
            keys, values = (np.concatenate(list(a)) for a in zip(*cache))
            group = shape.heads // shape.kv_heads
            keys, values = (np.repeat(a, group, 1) for a in (keys, values))
            scores = np.einsum("hd,jhd->hj", rotate(q, cos, sin)[0], keys)
            p = softmax(scores * shape.head**-0.5)
            o = np.einsum("hj,jhd->hd", p, values).reshape(1, -1)
            x = x + o @ w[f"{i}.o"]
            n = rms_norm(x, w[f"{i}.norm2"])
            x = x + silu_mul(n @ w[f"{i}.gate"], n @ w[f"{i}.up"]) @ w[f"{i}.down"]
        token = int((rms_norm(x, w["norm"]) @ w["head"]).argmax())
        tokens.append(token)
    return np.array(tokens)


def loss_and_gradients(shape: Shape, w, ids, labels):
    s, d = len(ids), shape.width
    cos, sin = rotary_tables(s, shape.head, w["embed"].dtype)

    def heads(x):
        return x.reshape(s, -1, shape.head)

    x, kept = w["embed"][ids], []
    for i in range(shape.layers):
        h = rms_norm(x, w[f"{i}.norm1"])
        q = rotate(heads(h @ w[f"{i}.q"]), cos, sin)
        k = rotate(heads(h @ w[f"{i}.k"]), cos, sin)
        v = heads(h @ w[f"{i}.v"])
        o = attention(q, k, v).reshape(s, d)
        y = x + o @ w[f"{i}.o"]
        n = rms_norm(y, w[f"{i}.norm2"])
        g, u = n @ w[f"{i}.gate"], n @ w[f"{i}.up"]
        m = silu_mul(g, u)
        kept.append((x, h, q, k, v, o, y, n, g, u, m))
        x = y + m @ w[f"{i}.down"]
    last = rms_norm(x, w["norm"])
    p = softmax(last @ w["head"])
    rows = np.arange(s)
    loss = -np.log(p[rows, labels]).mean()
    p[rows, labels] -= 1
    p /= s
    grad = {"head": last.T @ p}
    dx, grad["norm"] = rms_norm_pullback(x, w["norm"], p @ w["head"].T)
    for i in reversed(range(shape.layers)):
        x, h, q, k, v, o, y, n, g, u, m = kept[i]
        grad[f"{i}.down"] = m.T @ dx
        dg, du = silu_mul_pullback(g, u, dx @ w[f"{i}.down"].T)
        grad[f"{i}.gate"], grad[f"{i}.up"] = n.T @ dg, n.T @ du
        dn = dg @ w[f"{i}.gate"].T + du @ w[f"{i}.up"].T
        dy, grad[f"{i}.norm2"] = rms_norm_pullback(y, w[f"{i}.norm2"], dn)
        dx = dx + dy
        grad[f"{i}.o"] = o.T @ dx
        dq, dk, dv = attention_pullback(q, k, v, heads(dx @ w[f"{i}.o"].T))
        dq = rotate(dq, cos, -sin).reshape(s, -1)
        dk = rotate(dk, cos, -sin).reshape(s, -1)
        dv = dv.reshape(s, -1)
        dh = 0
        for name, dz in (("q", dq), ("k", dk), ("v", dv)):
            grad[f"{i}.{name}"] = h.T @ dz
            dh = dh + dz @ w[f"{i}.{name}"].T
        dy, grad[f"{i}.norm1"] = rms_norm_pullback(x, w[f"{i}.norm1"], dh)
        dx = dx + dy
    grad["embed"] = np.zeros_like(w["embed"])
    np.add.at(grad["embed"], ids, dx)
    return float(loss), grad


def losses(shape: Shape, opt: AdamW, weights, ids, labels, steps: int) -> np.ndarray:
    """The loss of each of the first steps of training on one sequence, in float64."""
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    m, v = ({k: np.zeros_like(x) for k, x in w.items()} for _ in range(2))
    out = []
    for step in range(1, steps + 1):
        loss, grad = loss_and_gradients(shape, w, ids, labels)
        out.append(loss)
        for k, g in grad.items():
            m[k] = opt.beta1 * m[k] + (1 - opt.beta1) * g
            v[k] = opt.beta2 * v[k] + (1 - opt.beta2) * g * g
            mean = m[k] / (1 - opt.beta1**step)
            spread = np.sqrt(v[k] / (1 - opt.beta2**step)) + opt.eps
            w[k] = w[k] * (1 - opt.rate * opt.decay) - opt.rate * mean / spread
    return np.array(out)
