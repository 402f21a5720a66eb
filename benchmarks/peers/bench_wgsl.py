"""Hand-written WGSL: what all other peers are compared with."""

from __future__ import annotations

import kernels as k
import kernels_model as km
import numpy as np
import reference as ref
from gpu import Gpu
from workloads import ADAMW, SHAPE, TOKENS, Case, SkipWorkload, work


def setup(name, x, args) -> Case:
    gpu = Gpu()
    if name == "W9":
        return _training(gpu, x, args.matmul)
    if name == "W10":
        return _decoding(gpu, x)
    held = {key: gpu.buffer(value) for key, value in x.items()}
    out = {}

    def new(key, n):
        out[key] = gpu.buffer(n)
        return out[key]

    def add(kernel, *buffers):
        text, groups = kernel
        gpu.add(text, list(buffers), *groups)

    n = 1 << 22
    match name:
        case "W1":
            add(k.silu_mul(n), *held.values(), new("y", n))
        case "W2":
            add(k.silu_mul_pullback(n), *held.values(), new("dg", n), new("du", n))
        case "W3" | "W4":
            y, scale = gpu.buffer(2048 * 1024), gpu.buffer(2048)
            add(k.rms_norm(2048, 1024), held["x"], held["gain"], y, scale)
            out["y"] = y
            if name == "W4":  # 1/rms may be kept from the forward pass
                gpu.run()
                gpu.tape.clear()
                inputs = (held["x"], held["gain"], held["dy"], scale)
                add(k.rms_norm_dx(2048, 1024), *inputs, new("dx", 2048 * 1024))
                inputs = (held["x"], held["dy"], scale)
                add(k.rms_norm_dgain(2048, 1024), *inputs, new("dgain", 1024))
        case "W5":
            add(k.softmax(2048, 2048), held["x"], new("y", 2048 * 2048))
        case "W7" | "W8":
            raise SkipWorkload("not written by hand")
        case "W6":
            matmul = k.matmul(args.matmul, 512, 512, 512)
            add(matmul, held["a"], held["b"], new("y", 512 * 512))

    def fetch():
        return {key: gpu.read(buffer) for key, buffer in out.items()}

    return Case(gpu.run, fetch, {"kernels": len(gpu.tape)})


def _training(gpu: Gpu, x, form: str) -> Case:
    c = SHAPE
    s, d, kv, f, v = c.length, c.width, c.kv_width, c.ffn, c.vocab
    w = {key: gpu.buffer(value) for key, value in x["weights"].items()}
    size = {key: value.size for key, value in x["weights"].items()}
    grad, m, u = ({key: gpu.buffer(n) for key, n in size.items()} for _ in range(3))
    tables = [gpu.buffer(t) for t in ref.rotary_tables(s, c.head, np.float32)]
    ids = gpu.buffer(x["ids"].astype(np.uint32))
    labels = gpu.buffer(x["labels"].astype(np.uint32))
    bias, loss = gpu.buffer(2), gpu.buffer(1)
    heads = (s, c.heads, c.kv_heads, c.head)

    def add(kernel, *buffers):
        text, groups = kernel
        gpu.add(text, list(buffers), *groups)

    def new(*sizes):
        made = [gpu.buffer(n) for n in sizes]
        return made if len(made) > 1 else made[0]

    def mul(rows, cols, inner, a, b, out, **how):
        add(k.matmul(form, rows, cols, inner, **how), a, b, out)

    def turn(buffer, count, sign):
        add(km.rotary(s, count, c.head, sign), buffer, *tables)

    flow, kept = new(s * d), []
    add(km.embed(s, d), w["embed"], ids, flow)
    for i in range(c.layers):
        h, q, o, mid, n = new(*[s * d] * 5)
        key, value = new(s * kv, s * kv)
        g, up, act = new(*[s * f] * 3)
        scale1, scale2, lse, after = new(s, s, s * c.heads, s * d)
        add(k.rms_norm(s, d), flow, w[f"{i}.norm1"], h, scale1)
        mul(s, d, d, h, w[f"{i}.q"], q)
        mul(s, kv, d, h, w[f"{i}.k"], key)
        mul(s, kv, d, h, w[f"{i}.v"], value)
        turn(q, c.heads, 1)
        turn(key, c.kv_heads, 1)
        add(km.attention(*heads), q, key, value, o, lse)
        mul(s, d, d, o, w[f"{i}.o"], mid)
        add(km.add(s * d), mid, flow)
        add(k.rms_norm(s, d), mid, w[f"{i}.norm2"], n, scale2)
        mul(s, f, d, n, w[f"{i}.gate"], g)
        mul(s, f, d, n, w[f"{i}.up"], up)
        add(k.silu_mul(s * f), g, up, act)
        mul(s, d, f, act, w[f"{i}.down"], after)
        add(km.add(s * d), after, mid)
        kept.append(
            (flow, h, q, key, value, o, lse, mid, n, g, up, act, scale1, scale2)
        )
        flow = after
    last, scale, logits, dlogits, each_loss = new(s * d, s, s * v, s * v, s)
    add(k.rms_norm(s, d), flow, w["norm"], last, scale)
    mul(s, v, d, last, w["head"], logits)
    add(km.cross_entropy(s, v), logits, labels, dlogits, each_loss)
    add(km.mean(s), each_loss, loss)

    dn, dflow = new(s * d, s * d)
    mul(d, v, s, last, dlogits, grad["head"], ta=True)
    mul(s, d, v, dlogits, w["head"], dn, tb=True)

    def norm_back(inner, name, scale, more=True):
        add(k.rms_norm_dx(s, d, more), inner, w[name], dn, scale, dflow)
        add(k.rms_norm_dgain(s, d), inner, dn, scale, grad[name])

    norm_back(flow, "norm", scale, more=False)
    for i in reversed(range(c.layers)):
        (before, h, q, key, value, o, lse, mid, n, g, up, act, scale1, scale2) = kept[i]
        dact, dg, dup = new(*[s * f] * 3)
        do, dq, dk, dv, delta = new(s * d, s * d, s * kv, s * kv, s * c.heads)
        mul(f, d, s, act, dflow, grad[f"{i}.down"], ta=True)
        mul(s, f, d, dflow, w[f"{i}.down"], dact, tb=True)
        add(k.silu_mul_pullback(s * f), g, up, dact, dg, dup)
        mul(d, f, s, n, dg, grad[f"{i}.gate"], ta=True)
        mul(d, f, s, n, dup, grad[f"{i}.up"], ta=True)
        mul(s, d, f, dg, w[f"{i}.gate"], dn, tb=True)
        mul(s, d, f, dup, w[f"{i}.up"], dn, tb=True, add=True)
        norm_back(mid, f"{i}.norm2", scale2)
        mul(d, d, s, o, dflow, grad[f"{i}.o"], ta=True)
        mul(s, d, d, dflow, w[f"{i}.o"], do, tb=True)
        add(km.attention_delta(s * c.heads, c.head), o, do, delta)
        inputs = (q, key, value, do, lse, delta)
        add(km.attention_dq(*heads), *inputs, dq)
        add(km.attention_dkv(*heads), *inputs, dk, dv)
        turn(dq, c.heads, -1)
        turn(dk, c.kv_heads, -1)
        more = False
        for name, dz, wide in (("q", dq, d), ("k", dk, kv), ("v", dv, kv)):
            mul(d, wide, s, h, dz, grad[f"{i}.{name}"], ta=True)
            mul(s, d, wide, dz, w[f"{i}.{name}"], dn, tb=True, add=more)
            more = True
        norm_back(before, f"{i}.norm1", scale1)
    add(km.embed_pullback(s, v, d), dflow, ids, grad["embed"])
    for key, n in size.items():
        add(km.adamw(n, ADAMW), w[key], grad[key], m[key], u[key], bias)

    losses = []

    def run():
        step = len(losses) + 1
        powers = [1 - ADAMW.beta1**step, 1 - ADAMW.beta2**step]
        gpu.device.queue.write_buffer(bias, 0, np.array(powers, np.float32))
        gpu.run()
        losses.append(gpu.read(loss)[0])

    return Case(run, lambda: {"losses": losses[:3]}, {"kernels": len(gpu.tape)})


def _decoding(gpu: Gpu, x) -> Case:
    """One token's kernels on the tape, played once a token in one submit."""
    c = SHAPE
    d, kv, f = c.width, c.kv_width, c.ffn
    w = {key: gpu.buffer(value) for key, value in x["weights"].items()}
    tables = [gpu.buffer(t) for t in ref.rotary_tables(TOKENS, c.head, np.float32)]
    state, tokens = gpu.buffer(2), gpu.buffer(TOKENS)  # token and position
    flow, h, q, o, scale = (gpu.buffer(n) for n in (d, d, d, d, 1))
    key, value, g, up, act = (gpu.buffer(n) for n in (kv, kv, f, f, f))
    logits = gpu.buffer(c.vocab)

    def add(kernel, *buffers):
        text, groups = kernel
        gpu.add(text, list(buffers), *groups)

    add(km.embed(1, d), w["embed"], state, flow)
    for i in range(c.layers):
        keys, values = gpu.buffer(TOKENS * kv), gpu.buffer(TOKENS * kv)
        add(k.rms_norm(1, d), flow, w[f"{i}.norm1"], h, scale)
        add(km.vector(d, d), h, w[f"{i}.q"], q)
        add(km.vector(kv, d), h, w[f"{i}.k"], key)
        add(km.vector(kv, d), h, w[f"{i}.v"], value)
        add(km.rotary_at(c.heads, c.head), q, *tables, state)
        add(km.rotary_at(c.kv_heads, c.head), key, *tables, state)
        add(km.keep(kv), key, value, keys, values, state)
        heads = (c.heads, c.kv_heads, c.head)
        add(km.attention_at(*heads), q, keys, values, state, o)
        add(km.vector(d, d, add=True), o, w[f"{i}.o"], flow)
        add(k.rms_norm(1, d), flow, w[f"{i}.norm2"], h, scale)
        add(km.vector(f, d), h, w[f"{i}.gate"], g)
        add(km.vector(f, d), h, w[f"{i}.up"], up)
        add(k.silu_mul(f), g, up, act)
        add(km.vector(d, f, add=True), act, w[f"{i}.down"], flow)
    add(k.rms_norm(1, d), flow, w["norm"], h, scale)
    add(km.vector(c.vocab, d), h, w["head"], logits)
    add(km.likeliest(c.vocab), logits, state, tokens)

    def run():
        start = np.array([x["first"], 0], np.uint32)
        gpu.device.queue.write_buffer(state, 0, start)
        gpu.run(TOKENS)

    info = {"kernels": len(gpu.tape) * TOKENS}
    return Case(run, lambda: {"tokens": gpu.read(tokens)}, info)


def arguments(parser):
    parser.add_argument("--matmul", choices=("tiles", "regs"), default="tiles")


if __name__ == "__main__":
    work("wgsl", setup, arguments)
