"""Ops against values and gradients that torch computed in float64."""

from __future__ import annotations

import numpy as np
import pytest
from ops_ref import load

import shaderdsl as sd
from shaderdsl import ops

RTOL, ATOL = 1e-4, 1e-5


CASES = load()
ACT = {
    "silu": {},
    "gelu_exact": {"approximate": "none"},
    "gelu_tanh": {"approximate": "tanh"},
}


def mlp(product, options):
    def function(x, w_gate, w_up, w_down):
        gate, up = ops.linear(x, w_gate), ops.linear(x, w_up)
        return ops.linear(product(gate, up, **options), w_down)

    return function


def rope(layout, c, t):
    cos, sin = ops.rope_tables(t["positions"], c["rotary_dim"], base=c["theta"])
    return lambda x: ops.rope(x, cos, sin, layout=layout)


def function_of(file, c, t):
    """The function of a case's float inputs, and their names."""
    if file in ("silu", "softplus", "softmax", "log_softmax"):
        return getattr(ops, file), ["x"]
    if file.startswith("gelu"):
        return lambda x: ops.gelu(x, **ACT[file]), ["x"]
    if file == "layernorm":
        return lambda x, w, b: ops.layer_norm(x, w, b, eps=c["eps"]), ["x", "w", "b"]
    if file.startswith("rmsnorm"):
        op = ops.rms_norm if file == "rmsnorm" else ops.rms_norm_shifted
        return lambda x, w: op(x, w, eps=c["eps"]), ["x", "w"]
    if file in ("swiglu", "geglu"):
        product, options = getattr(ops, file), ACT[c["act"]]
        if "x" in t:
            return mlp(product, options), ["x", "w_gate", "w_up", "w_down"]
        return lambda gate, up: product(gate, up, **options), ["gate", "up"]
    if file == "cross_entropy":
        return lambda x: ops.cross_entropy(x, t["targets"], **c), ["logits"]
    if file == "embedding":
        return lambda table: ops.embedding(table, t["ids"]), ["table"]
    if file.startswith("rope"):
        return rope(file.removeprefix("rope_"), c, t), ["x"]
    options = {"scale": c["scale"], "causal": c["causal"]}
    if "window" in c:
        options["window"] = c["window"]
    if "cap" in c:
        options["softcap"] = c["cap"]
    kind = {"attention_alibi": "slopes", "attention_gated": "gate"}.get(file)
    op = getattr(ops, file) if kind else ops.attention
    names = ["q", "k", "v"] + ([kind] if kind else [])
    return lambda *xs: op(*xs, **options), names


@pytest.mark.parametrize(("file", "case"), CASES, ids=map("-".join, CASES))
def test_value_and_gradients(device, file, case):
    c, t = CASES[file, case]
    f, names = function_of(file, c, t)
    args = [t[n] for n in names]
    y, pullback = sd.vjp(f, *args)
    np.testing.assert_allclose(y.numpy(), t["y"], RTOL, ATOL)
    np.testing.assert_allclose(f(*args).numpy(), t["y"], RTOL, ATOL)
    gradients = pullback(t.get("dy", np.float32(1.0)))
    gradients = (gradients,) if len(names) == 1 else gradients
    for name, g in zip(names, gradients, strict=True):
        assert g.shape == t[name].shape
        np.testing.assert_allclose(g.numpy(), t["d" + name], RTOL, ATOL, err_msg=name)


LSE = [k for k, (_, t) in CASES.items() if "lse" in t and "gate" not in t]
LSE = [k for k in LSE if "slopes" not in CASES[k][1]]


@pytest.mark.parametrize(("file", "case"), LSE, ids=map("-".join, LSE))
def test_log_sum_exp_of_attention(device, file, case):
    c, t = CASES[file, case]
    options = {"scale": c["scale"], "causal": c["causal"]}
    options |= {"window": c.get("window"), "softcap": c.get("cap")}
    y, lse = ops.attention_lse(t["q"], t["k"], t["v"], **options)
    np.testing.assert_allclose(y.numpy(), t["y"], RTOL, ATOL)
    np.testing.assert_allclose(lse.numpy(), t["lse"], RTOL, ATOL)


@pytest.mark.parametrize("case", [c for f, c in CASES if f == "cross_entropy"])
def test_losses_of_rows(device, case):
    _, t = CASES["cross_entropy", case]
    rows = ops.cross_entropy_rows(t["logits"], t["targets"])
    np.testing.assert_allclose(rows.numpy(), t.get("row_loss", t["y"]), RTOL, ATOL)


def test_every_file_is_read():
    assert len({f for f, _ in CASES}) == 21
