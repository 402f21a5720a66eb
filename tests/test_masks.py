"""Padding, packed documents, slopes: who sees whom, in values and in gradients."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn
from shaderdsl.errors import DTypeError, IndexRangeError, ShapeError

SMALL = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_size": 20,
    "max_positions": 32,
}
VARIANTS = {
    "plain": {},
    "gated": {"gated": True, "qk_norm": True, "norm_shift": True},
    "window": {"windows": (3, None), "soft_cap": 4.0},
    "learned": {"positions": "learned"},
    "alibi": {"positions": "alibi"},
}


@pytest.fixture(params=VARIANTS)
def model(request):
    options = VARIANTS[request.param]
    return nn.Transformer.init(nn.TransformerConfig(**SMALL, **options), seed=2)


def ids_of(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, 11, shape).astype(np.int32)


def near(have, want, limit=2e-5):
    np.testing.assert_allclose(np.asarray(have), want, rtol=limit, atol=limit)


def padded(a, b, left):
    """Two sequences as one batch of 9, padded with token 3 on one side."""
    batch = np.full((2, 9), 3, np.int32)
    mask = np.zeros((2, 9), np.int32)
    for row, x in enumerate((a, b)):
        where = slice(9 - len(x), 9) if left else slice(0, len(x))
        batch[row, where], mask[row, where] = x, 1
    return batch, mask


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_padded_batch_is_its_sequences(device, model, left):
    a, b = ids_of(5), ids_of(9, seed=2)
    batch, mask = padded(a, b, left)
    logits = np.asarray(model(batch, mask=mask))
    assert np.isfinite(logits).all()
    near(logits[0][mask[0] == 1], model(a))
    near(logits[1], model(b))
    # what stands in the padding changes nothing
    other = np.where(mask == 1, batch, 7)
    near(np.asarray(model(other, mask=mask == 1))[mask == 1], logits[mask == 1], 0)


def test_gradients_of_a_padded_batch(device, model):
    a, b = ids_of(5), ids_of(9, seed=2)
    batch, mask = padded(a, b, left=True)
    targets = np.where(mask == 1, ids_of(2, 9, seed=3), -100)

    def loss_of(model):
        return nn.cross_entropy(model(batch, mask=mask), targets, reduction="sum")

    def apart(model):
        one = nn.cross_entropy(model(a), targets[0, 4:], reduction="sum")
        return one + nn.cross_entropy(model(b), targets[1], reduction="sum")

    loss, gradient = sd.value_and_grad(loss_of)(model)
    want_loss, want = sd.value_and_grad(apart)(model)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-5)
    right = want.parameters()
    for path, g in gradient.parameters().items():
        w = np.asarray(right[path])
        assert np.abs(np.asarray(g) - w).max() <= 2e-5 * np.abs(w).max() + 1e-6, path


def test_packed_documents_do_not_see_each_other(device, model):
    a, b, c = ids_of(4), ids_of(6, seed=2), ids_of(2, seed=3)
    row = np.concatenate([a, b, c])
    documents = np.repeat([5, 0, 5], [4, 6, 2]).astype(np.int32)
    documents[-2:] = 2
    logits = np.asarray(model(row, documents=documents))
    for part, x in ((slice(0, 4), a), (slice(4, 10), b), (slice(10, 12), c)):
        near(logits[part], model(x))
    # with padding between them, in a batch, one row of ids for both
    mask = np.ones((2, 12), np.int32)
    mask[1, 4:10] = 0
    both = np.asarray(model(np.stack([row, row]), mask=mask, documents=documents))
    near(both[0], logits)
    near(both[1][10:], logits[10:])


def test_positions_of_ones_own(device):
    model = nn.Transformer.init(nn.TransformerConfig(**SMALL, positions="learned"))
    ids = ids_of(2, 4)
    plain = np.asarray(model(ids))
    near(model(ids, positions=np.arange(4)), plain)
    later = np.asarray(model(ids, positions=np.arange(4) + np.array([[0], [3]])))
    near(later[0], plain[0])
    assert np.abs(later[1] - plain[1]).max() > 1e-4
    rotary = nn.Transformer.init(nn.TransformerConfig(**SMALL))
    near(
        rotary(ids, positions=np.arange(4) + np.array([[0], [3]])), rotary(ids)
    )  # relative


def attention(**options):
    generator = np.random.default_rng(4)

    def linear(rows, columns):
        drawn = generator.standard_normal((rows, columns)).astype(np.float32)
        return nn.Linear(sd.array(drawn))

    parts = 2 if options.get("gated") else 1
    return nn.Attention(
        linear(16 * parts, 6),
        linear(8, 6),
        linear(8, 6),
        linear(6, 16),
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"alibi": True}], ids=str)
def test_rows_that_see_nothing(device, options):
    layer = attention(**options)
    x = np.random.default_rng(5).standard_normal((2, 5, 6)).astype(np.float32)
    documents = np.array([[-1, -1, 0, 0, -1], [0, 0, 1, 1, 1]], np.int32)
    y, pullback = sd.vjp(lambda layer, x: layer(x, documents=documents), layer, x)
    gone = documents < 0
    assert not np.asarray(y)[gone].any()
    assert (np.abs(np.asarray(y)[~gone]).max(-1) > 0).all()
    of_layer, of_x = pullback(np.ones_like(y))
    assert not np.asarray(of_x)[gone].any()
    assert all(np.isfinite(np.asarray(g)).all() for g in sd.tree.leaves(of_layer))
    nothing = np.full((2, 5), -1, np.int32)
    y, pullback = sd.vjp(lambda layer, x: layer(x, documents=nothing), layer, x)
    assert not np.asarray(y).any()
    assert not any(np.asarray(g).any() for g in sd.tree.leaves(pullback(y + 1.0)))


def test_slopes(device):
    layer = attention(alibi=True)
    x = np.random.default_rng(6).standard_normal((6, 6)).astype(np.float32) * 0.3
    w = {n: np.asarray(p, np.float64) for n, p in layer.parameters().items()}
    q, k, v = (x @ w[f"{p}_proj.weight"].T for p in "qkv")
    want = np.zeros((6, 4, 4))
    for h, slope in enumerate((0.25, 0.0625, 0.015625, 0.00390625)):
        one = slice(4 * (h // 2), 4 * (h // 2) + 4)
        s = q[:, 4 * h : 4 * h + 4] @ k[:, one].T / 2
        s = s + slope * (np.arange(6) - np.arange(6)[:, None])
        s[np.triu(np.ones((6, 6), bool), 1)] = -np.inf
        p = np.exp(s - s.max(-1, keepdims=True))
        want[:, h] = p / p.sum(-1, keepdims=True) @ v[:, one]
    near(layer(x), want.reshape(6, 16) @ w["o_proj.weight"].T)


def test_slopes_with_a_cache(device):
    model = nn.Transformer.init(nn.TransformerConfig(**SMALL, positions="alibi"))
    ids = ids_of(12)
    cache = model.new_cache(capacity=12)
    pieces = [model(ids[a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 12))]
    near(np.concatenate([np.asarray(p) for p in pieces]), model(ids))


@pytest.mark.parametrize("variant", [{}, {"positions": "learned"}])
def test_documents_and_masks_in_a_cache(device, variant):
    """In pieces of any size, what the whole gives; then tokens of the last document."""
    config = nn.TransformerConfig(**{**SMALL, **variant})
    model = nn.Transformer.init(config, seed=3)
    ids = ids_of(2, 24)
    documents = np.array([[4] * 9 + [0] * 15, [1] * 20 + [2] * 4], np.int32)
    mask = np.ones((2, 24), np.int32)
    mask[0, :3] = mask[1, 7:9] = 0
    want = np.asarray(model(ids, documents=documents, mask=mask))
    cache = model.new_cache(batch=2, capacity=30)
    found = []
    for a, b in ((0, 11), (11, 12), (12, 21)):
        options = {"documents": documents[:, a:b], "mask": mask[:, a:b]}
        found.append(np.asarray(model(ids[:, a:b], cache=cache, **options)))
    # the rest is of the last document
    found.append(np.asarray(cache.step(model, sd.array(ids[:, 21])))[:, None])
    found.append(np.asarray(model(ids[:, 22:], cache=cache)))
    seen = mask != 0
    near(np.concatenate(found, axis=1)[seen], want[seen])
    cache.clear()
    near(model(ids, cache=cache), model(ids))


def test_documents_after_tokens_of_one(device):
    model = nn.Transformer.init(nn.TransformerConfig(**SMALL), seed=3)
    ids = ids_of(10)
    cache = model.new_cache(capacity=12)
    model(ids[:4], cache=cache)
    y = model(ids[4:], cache=cache, documents=np.array([0, 0, 7, 7, 7, 7]))
    whole = model(ids, documents=np.array([0] * 6 + [7] * 4))
    near(y, np.asarray(whole)[4:])


def test_what_is_refused(cpu):
    model = nn.Transformer.init(nn.TransformerConfig(**SMALL))
    ids = ids_of(2, 4)
    for options in (
        {"mask": np.ones(3, np.int32)},
        {"documents": np.zeros((4, 2), np.int32)},
        {"positions": np.zeros((1, 4), np.int32)},
        {"cache": model.new_cache(batch=2), "positions": np.ones(4, np.int32)},
        {"cache": model.new_cache(batch=2), "mask": np.ones(3, np.int32)},
    ):
        with pytest.raises(ShapeError):
            model(ids, **options)
    for name in ("mask", "documents", "positions"):
        with pytest.raises(DTypeError):
            model(ids, **{name: np.ones(4, np.float32)})
    with pytest.raises(IndexRangeError):
        model(ids, positions=np.arange(4) + 29)
    with pytest.raises(ShapeError):
        model.layers[0](np.zeros((4, 12), np.float32), documents=np.zeros(3, np.int32))
