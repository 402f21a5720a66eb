"""Ops as functions of JAX arrays. Needs jax."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import shaderdsl as sd  # noqa: E402
from shaderdsl.interop.jax import wrap  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


@sd.op("... d, d -> ... d")
def rms_norm(x, gain, *, eps=1e-6):
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain


@sd.op("v d, t -> t d, t")
def looked_up(table, ids):
    rows = table.at(v=ids)
    return rows, sd.sum(rows * rows, over="d")


def test_jit_and_grad():
    r = np.random.default_rng(0)
    x, gain = r.normal(size=(4, 9)), r.normal(size=9)
    dy = r.normal(size=(4, 9))

    def mine(x, gain):
        return jnp.sum(wrap(rms_norm)(x, gain, eps=1e-3) * dy)

    def plain(x, gain):
        return jnp.sum(
            x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * gain * dy
        )

    got, found = jax.jit(jax.value_and_grad(mine, (0, 1)))(x, gain)
    value, expected = jax.value_and_grad(plain, (0, 1))(x, gain)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_integers_and_several_results():
    table = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    ids = np.array([0, 4, 4], np.int32)

    def mine(table):
        rows, squares = wrap(looked_up)(table, ids)
        return jnp.sum(rows) + jnp.sum(squares)

    expected = np.zeros((5, 3))
    np.add.at(expected, ids, 1 + 2 * table[ids])
    np.testing.assert_allclose(jax.grad(mine)(table), expected, rtol=1e-5)
