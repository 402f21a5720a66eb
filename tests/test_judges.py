"""Tint accepts what is printed, for every family of devices, at guaranteed limits."""

from __future__ import annotations

import dataclasses

import judges
import numpy as np
import pytest
from program_checks import Drawn, Job
from random_programs import draw

import shaderdsl as sd
from shaderdsl import engine
from shaderdsl.codegen.lower import lower
from shaderdsl.codegen.target import PORTABLE
from shaderdsl.ops.registry import REGISTRY
from shaderdsl.testing import check_op

pytestmark = pytest.mark.skipif(not judges.available(), reason="no wgpudawn")

TARGETS = {
    "gpu": PORTABLE,
    "software": dataclasses.replace(PORTABLE, family="software"),
    "two-pass": dataclasses.replace(PORTABLE, online=False),
    "drawn": dataclasses.replace(PORTABLE, choice=Drawn(1)),
}


def printed(outs, inputs, target):
    return {k.wgsl for k in lower(outs, target, inputs=inputs).kernels}


def accepted(texts):
    assert texts
    wrong = judges.refused(sorted(texts))
    assert not wrong, wrong[0]


@pytest.mark.parametrize("target", TARGETS)
def test_random_programs(cpu, target):
    texts = set()
    for seed in range(1000, 1012):
        job = Job(draw(seed), expected=False)
        captured = engine.captured_inputs(job.outs, job.inputs)
        texts |= printed(job.outs, [*job.inputs, *captured], TARGETS[target])
    accepted(texts)


@pytest.fixture
def met(monkeypatch):
    """Texts of all graphs that are planned meanwhile, for every target."""
    texts: set[str] = set()
    plan = engine.Plan.__init__

    def noted(self, outs, inputs, donated, scores):
        plan(self, outs, inputs, donated, scores)
        for target in TARGETS.values():
            more = engine.captured_inputs(outs, inputs)
            texts.update(printed(outs, [*inputs, *more], target))

    monkeypatch.setattr(engine.Plan, "__init__", noted)
    return texts


def test_every_op_and_its_derivative(cpu, met):
    for e in REGISTRY.values():
        check_op(
            e.op, e.reference, examples=2, gradients=e.smooth, kinds=("ordinary",),
            options=e.options, ids=e.ids, bools=e.bools, positive=e.positive,
            nonempty=e.nonempty, elements=2000,
        )  # fmt: skip
    accepted(met)


def test_a_training_step_and_a_generation(cpu, met):
    config = sd.nn.TransformerConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=4, ffn_size=24,
    )  # fmt: skip
    model = sd.nn.Transformer.init(config, seed=0)
    ids = np.arange(24, dtype=np.int32).reshape(2, 12) % 64
    optimiser = sd.optim.AdamW(lr=1e-3)
    state = optimiser.init(model)

    @sd.compile
    def step(model, state, ids):
        def loss(m):
            return sd.nn.cross_entropy(m(ids[:, :-1]), ids[:, 1:])

        value, gradients = sd.value_and_grad(loss)(model)
        return (value, *optimiser.update(model, gradients, state))

    step(model, state, ids)
    model.generate(ids[:1, :4], max_new_tokens=3)
    accepted(met)


# What a text must survive: names that are keywords, odd constants, depth.


def test_keywords_constants_and_depth(cpu, met):
    x = np.linspace(-2, 2, 6, dtype=np.float32)
    for name in ("fn", "var", "let", "loop", "override", "enable", "f32", "main",
                 "_", "__x", "storage", "größe", "select", "sd_exp"):  # fmt: skip
        scope: dict = {}
        exec(f"def {name}_({name}0, {name}_1): return {name}0 * {name}_1 + 1.0", scope)
        sd.op("n, n -> n")(scope[f"{name}_"])(x, x)
    for number in (
        1e39,
        -1e39,
        float("inf"),
        float("nan"),
        -0.0,
        1e-45,
        3.4e38,
        2**-126,
    ):
        sd.compile(lambda a, c=number: sd.where(a > 0, c, a))(x)
        sd.op("n -> n")(lambda a, c=number: a * c)  # as an option
        y = sd.op("n -> n")(lambda a: sd.minimum(a, number))(x)  # noqa: B023
        with np.errstate(over="ignore"):
            want = np.minimum(x.astype(np.float64), number).astype(np.float32)
        np.testing.assert_array_equal(y, want)
    for number in (-(2**31), 2**31 - 1):
        sd.op("n -> n")(lambda a: sd.cast(sd.index("n") + number, "f32"))(x)  # noqa: B023

    def deep(a):
        for k in range(3000):
            a = a * 1.001 + 0.1 * (k % 3) - 0.1
        return a

    sd.compile(deep)(x)
    accepted(met)
