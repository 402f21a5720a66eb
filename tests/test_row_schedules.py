"""Rows on GPUs: what is asked of memory first, what is kept, values and gradients."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.testing.gradients import Graph


@pytest.fixture
def gpu(wgpu, retarget):
    """A GPU's schedules on whatever adapter there is."""
    features = dataclasses.replace(wgpu.target.features, wide_words=False)
    retarget(family="gpu", features=features)
    return wgpu


def spec(*shape):
    return sd.spec("f32", *shape)


def layer_norm(x, w, b):
    return ops.layer_norm(x, w, b)


def rms_norm(x, w):
    return ops.rms_norm(x, w)


def loss(x):
    labels = (np.arange(x.shape[0]) * 17 % x.shape[1]).astype(np.int32)
    labels[1::5] = -100
    return ops.cross_entropy(x, labels, reduction="none")


@pytest.mark.parametrize("n", [64, 1000, 1023, 4096])
def test_statistics_are_asked_for_before_the_row(gpu, n):
    low = sd.lower(layer_norm, spec(64, n), spec(n), spec(n), backward=True)
    text = low.kernels[0].wgsl
    first = text.index("workgroupBarrier")
    assert text.count("layer_norm_mean") == text[:first].count("layer_norm_mean") >= 4


def test_rows_in_turn_do_not_begin_by_waiting_for_a_statistic(gpu):
    low = sd.lower(ops.rms_norm, spec(64, 4096), spec(4096), backward=True)
    text = low.kernels[0].wgsl.partition("fn main")[2]
    at = text.index("rms_norm_mean")
    assert "workgroupBarrier" in text[:at] and "rms_norm_mean" not in text[at + 20 :]


def test_a_label_is_read_before_the_row(gpu):
    (kernel,) = sd.lower(loss, spec(800, 40_000)).kernels
    (labels,) = re.findall(r"(\w+): array<i32>", kernel.wgsl)
    before, _, after = kernel.wgsl.partition("fn main")[2].partition("for (")
    assert f"{labels}[first]" in before and labels not in after


def test_a_row_that_is_walked_once_is_not_kept(gpu):
    """Nothing of it is read again, so that no position has to stay in registers: there
    is the loop and its rest, and the label's element.
    """
    (once,) = sd.lower(loss, spec(800, 40_000)).kernels
    (twice,) = sd.lower(ops.softmax, spec(800, 40_000)).kernels
    for kernel, least, most in ((once, 2, 6), (twice, 10, 99)):
        (x,) = re.findall(r"read> (\w+): array<vec4<f32>>", kernel.code)
        assert least <= kernel.code.count(f"{x}[") <= most


def test_one_number_is_no_kernel_on_gpus(gpu, retarget):
    def mean_loss(x, labels):
        return ops.cross_entropy(x, labels)

    args = (spec(64, 3000), sd.spec("i32", 64))
    assert len(sd.lower(mean_loss, *args, backward=True).kernels) == 1
    retarget(family="software")
    assert len(sd.lower(mean_loss, *args, backward=True).kernels) == 2


@pytest.mark.parametrize(
    "shape", [(5, 64), (67, 1000), (33, 1023), (300, 260), (2, 4100)]
)
@pytest.mark.parametrize("f", [layer_norm, rms_norm, ops.softmax, loss])
def test_values_and_gradients(gpu, f, shape):
    r = np.random.default_rng(3)
    x = r.standard_normal(shape).astype(np.float32) * 2 + 0.5
    more = f.__code__.co_argcount if f in (layer_norm, rms_norm) else 1
    args = [x, *(r.standard_normal((more - 1, shape[1])).astype(np.float32) + 1)]
    wide = [a.astype(np.float64) for a in args]
    graph = Graph(f, args)
    (want,) = graph.value(wide)
    y, pullback = sd.vjp(f, *args)
    np.testing.assert_allclose(y.numpy(), want, rtol=2e-5, atol=1e-5)
    dy = r.standard_normal(np.shape(want)).astype(np.float32)
    slopes = graph.gradient(wide, [dy.astype(np.float64)])
    got = pullback(dy)
    for a, b in zip(got if isinstance(got, tuple) else (got,), slopes, strict=True):
        close = 5e-6 * np.abs(b).max()
        np.testing.assert_allclose(a.numpy(), b, rtol=0, atol=close)


def test_maps_alone_take_exp_without_floor(gpu, retarget):
    def text(f):
        return sd.lower(f, spec(64, 1024)).kernels[0].wgsl

    assert "sd_exp_masked_v4(" in text(sd.exp) and "floor" not in text(sd.exp)
    assert "sd_exp_masked" not in text(ops.softmax)
    x = np.linspace(-87, 88, 64 * 1024, dtype=np.float32).reshape(64, 1024)
    want = np.exp(x.astype(np.float64)).astype(np.float32)
    got = np.asarray(sd.exp(sd.asarray(x)))
    np.testing.assert_allclose(got, want, rtol=5e-7)
    retarget(family="software")
    assert "sd_exp_masked" not in text(sd.exp)
