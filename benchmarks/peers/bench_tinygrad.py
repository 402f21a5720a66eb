"""tinygrad on its WEBGPU backend (Dawn from the package dawn-python).

Every workload is one TinyJit: called twice to capture, replayed afterwards. Pullbacks
are jitted together with the forward pass that they need.
"""

from __future__ import annotations

import os
import tempfile

import pydawn

# tinygrad reads these when it is imported
os.environ["DEV"] = "WEBGPU"
os.environ["WEBGPU_BACKEND"] = "WGPUBackendType_Vulkan"
os.environ["CACHEDB"] = os.path.join(tempfile.mkdtemp(prefix="peers_tiny_"), "cache.db")
os.environ.setdefault(
    "WEBGPU_PATH",
    os.path.join(os.path.dirname(pydawn.__file__), "lib", "libwebgpu_dawn_x86_64.so"),
)

import reference as ref
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit
from tinygrad.nn.optim import AdamW
from workloads import ADAMW, SHAPE, Case, SkipWorkload, work


def silu_mul(g, u):
    return g.silu() * u


def rms_norm(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + ref.EPS).rsqrt() * gain


def softmax(x):
    return x.softmax(-1)


def attention(q, k, v):
    return q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)


def pullback(function):
    def run(*args):
        *args, dy = args
        args = [a.detach() for a in args]
        for a in args:
            a.requires_grad = True
        return function(*args).gradient(*args, gradient=dy)

    return run


def setup(name, x, args) -> Case:
    device = Device[Device.DEFAULT]
    if name == "W10":
        raise SkipWorkload("not written")
    if name == "W9":
        return _training(x, device)
    function, keys = {
        "W1": (silu_mul, ["y"]),
        "W2": (pullback(silu_mul), ["dg", "du"]),
        "W3": (rms_norm, ["y"]),
        "W4": (pullback(rms_norm), ["dx", "dgain"]),
        "W5": (softmax, ["y"]),
        "W6": (Tensor.matmul, ["y"]),
        "W7": (attention, ["y"]),
        "W8": (pullback(attention), ["dq", "dk", "dv"]),
    }[name]
    tensors = [Tensor(value).realize() for value in x.values()]
    case = Case(lambda: None, dict)

    def all_of(*inputs):
        out = function(*inputs)
        out = [out] if isinstance(out, Tensor) else list(out)
        return out[0].realize(*out[1:]), *out[1:]

    jitted, last = TinyJit(all_of), []

    def run():
        GlobalCounters.reset()
        last[:] = jitted(*tensors)
        device.synchronize()
        case.info["kernels"] = GlobalCounters.kernel_count

    case.run = run
    case.fetch = lambda: {key: t.numpy() for key, t in zip(keys, last)}
    return case


def _training(x, device) -> Case:
    c = SHAPE
    w = {key: Tensor(value).realize() for key, value in x["weights"].items()}
    for one in w.values():
        one.requires_grad = True
    ids, labels = Tensor(x["ids"]).realize(), Tensor(x["labels"]).realize()
    cos, sin = (
        Tensor(t).reshape(c.length, 1, c.head // 2).realize()
        for t in ref.rotary_tables(c.length, c.head, "float32")
    )
    optimiser = AdamW(
        list(w.values()),
        lr=ADAMW.rate,
        b1=ADAMW.beta1,
        b2=ADAMW.beta2,
        eps=ADAMW.eps,
        weight_decay=ADAMW.decay,
    )

    def heads(t):
        return t.reshape(c.length, -1, c.head)

    def rotate(t):
        a, b = heads(t).chunk(2, -1)
        return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)

    def attention(q, k, v):
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(c.length, c.width)

    def loss_of():
        t = w["embed"][ids]
        for i in range(c.layers):
            h = rms_norm(t, w[f"{i}.norm1"])
            q, k = rotate(h @ w[f"{i}.q"]), rotate(h @ w[f"{i}.k"])
            t = t + attention(q, k, heads(h @ w[f"{i}.v"])) @ w[f"{i}.o"]
            h = rms_norm(t, w[f"{i}.norm2"])
            act = silu_mul(h @ w[f"{i}.gate"], h @ w[f"{i}.up"])
            t = t + act @ w[f"{i}.down"]
        logits = rms_norm(t, w["norm"]) @ w["head"]
        return logits.sparse_categorical_crossentropy(labels)

    @TinyJit
    @Context(TRAINING=1)
    def step():
        optimiser.zero_grad()
        loss = loss_of().backward()
        return loss.realize(*optimiser.schedule_step())

    losses, case = [], Case(lambda: None, lambda: {"losses": losses[:3]})

    def run():
        GlobalCounters.reset()
        losses.append(step().item())
        device.synchronize()
        case.info["kernels"] = GlobalCounters.kernel_count

    case.run = run
    return case


if __name__ == "__main__":
    work("tinygrad", setup)
