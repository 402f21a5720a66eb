"""Layers alone: small known values, shapes, gradients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn
from shaderdsl.errors import (
    CheckpointError,
    DTypeError,
    IndexRangeError,
    ShaderError,
    ShapeError,
)

RNG = np.random.default_rng(0)
SMALL = nn.TransformerConfig(
    vocab_size=11,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=20,
    max_positions=128,
)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def array(x):
    return sd.array(np.asarray(x, np.float32))


def near(have, want, limit=1e-5):
    np.testing.assert_allclose(np.asarray(have), want, rtol=limit, atol=limit)


def attention(heads, kv_heads, head_dim, dim, **options):
    return nn.Attention(
        nn.Linear(array(normal(heads * head_dim * options.pop("parts", 1), dim))),
        nn.Linear(array(normal(kv_heads * head_dim, dim))),
        nn.Linear(array(normal(kv_heads * head_dim, dim))),
        nn.Linear(array(normal(dim, heads * head_dim))),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **options,
    )


def rotary(head_dim, dim=None, **options):
    return nn.RotaryEmbedding(head_dim=head_dim, dim=dim or head_dim, **options)


def check_gradients(model, *inputs, seed=1, limit=2e-2):
    """Every leaf along a random direction, against central differences."""
    generator = np.random.default_rng(seed)
    y = np.asarray(model(*inputs))
    weight = generator.standard_normal(y.shape).astype(np.float32)

    def loss(model):
        return sd.sum(model(*inputs) * weight)

    gradient = sd.grad(loss)(model)
    leaves, structure = sd.tree.flatten(model)
    for k, g in enumerate(sd.tree.leaves(gradient)):
        direction = generator.standard_normal(g.shape).astype(np.float32)
        values = []
        for step in (1e-2, -1e-2):
            moved = list(leaves)
            moved[k] = array(np.asarray(leaves[k]) + np.float32(step) * direction)
            values.append(float(loss(sd.tree.unflatten(structure, moved))))
        wanted = (values[0] - values[1]) / 2e-2
        have = float((np.asarray(g) * direction).sum())
        assert have == pytest.approx(wanted, rel=limit, abs=limit)


# ------------------------------------------------------------------ modules


def test_a_module_is_a_pytree_with_paths(cpu):
    model = nn.Transformer.init(SMALL)
    leaves, structure = sd.tree.flatten(model)
    assert len(leaves) == len(model.parameters()) == 2 + 2 * 9 + 1
    assert "layers.1.self_attn.k_proj.weight" in model.parameters()
    again = sd.tree.unflatten(structure, leaves)
    assert again.config is model.config
    assert again.layers[0].mlp.up_proj.weight is model.layers[0].mlp.up_proj.weight
    other = sd.tree.flatten(nn.Transformer.init(SMALL, seed=1))[1]
    assert other == structure and hash(other) == hash(structure)
    assert "num_heads: 4" in repr(model)


def test_own_modules(cpu):
    class Scaled(nn.Module):
        inner: nn.Linear
        scale: sd.Array
        power: int = nn.static(default=2)

        def __call__(self, x):
            return self.inner(x) ** self.power * self.scale

    layer = Scaled(nn.Linear(array(normal(3, 2))), array(2.0))
    gradient = sd.grad(lambda m: m(normal(5, 2)).sum())(layer)
    assert isinstance(gradient, Scaled) and gradient.power == 2
    assert set(nn.state_dict(gradient)) == {"inner.weight", "scale"}
    with pytest.raises(AttributeError):
        layer.power = 3


def test_parameters_go_out_and_in_again(cpu, tmp_path):
    layer = nn.Linear(array(normal(3, 2)), array(normal(3)).astype("f16"))
    np.savez(tmp_path / "layer.npz", **layer.parameters())
    with np.load(tmp_path / "layer.npz") as stored:
        values = {k: v.astype(np.float32) for k, v in stored.items()}
    again = nn.Linear(sd.zeros((3, 2)), sd.zeros(3).astype("f16"))
    again = again.with_parameters(values)
    for name, x in layer.parameters().items():
        got = again.parameters()[name]
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.numpy(), x.numpy())
    wrong = {"weight": normal(2, 2), "scale": normal(3)}
    with pytest.raises(CheckpointError) as caught:
        layer.with_parameters(wrong)
    for text in ("weight: shape (2, 2)", "bias: missing", "scale: not in", "test_nn"):
        assert text in str(caught.value)
    model = nn.Transformer.init(SMALL)
    other = nn.Transformer.init(SMALL, seed=1).with_parameters(model.parameters())
    for name, x in model.parameters().items():
        assert other.parameters()[name] is x


def test_only_a_whole_model_is_saved_as_one(cpu, tmp_path):
    with pytest.raises(CheckpointError, match="not a Linear") as caught:
        nn.save(nn.Linear(sd.ones((2, 2))), tmp_path / "layer")
    assert "with_parameters" in caught.value.cure
    assert not (tmp_path / "layer").exists()


def test_the_same_seed_gives_the_same_weights(cpu):
    one, two = (nn.Transformer.init(SMALL, seed=3).parameters() for _ in range(2))
    other = nn.Transformer.init(SMALL, seed=4).parameters()
    assert all(np.array_equal(one[n], two[n]) for n in one)
    assert not np.array_equal(one["lm_head.weight"], other["lm_head.weight"])
    first = np.asarray(one["layers.0.mlp.up_proj.weight"])
    assert not np.array_equal(first, one["layers.1.mlp.up_proj.weight"])


# ------------------------------------------------------------------ layers


@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
def test_layers_take_any_leading_axes(device, lead):
    x = normal(*lead, 6)
    weight, bias = normal(4, 6), normal(4)
    near(nn.Linear(array(weight))(x), x @ weight.T)
    near(nn.Linear(array(weight), array(bias))(x), x @ weight.T + bias)
    mean, deviation = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    norm = nn.LayerNorm(array(np.ones(6)), array(np.zeros(6)), eps=0.0)
    near(norm(x), (x - mean) / deviation, 1e-4)
    mlp = nn.SwiGLU(
        nn.Linear(array(normal(8, 6))),
        nn.Linear(array(normal(8, 6))),
        nn.Linear(array(normal(6, 8))),
    )
    assert mlp(x).shape == x.shape
    block = nn.Block(
        nn.RMSNorm(array(np.ones(6))),
        attention(4, 2, 4, 6, rotary=rotary(4)),
        nn.RMSNorm(array(np.ones(6))),
        mlp,
    )
    assert block(x).shape == x.shape


def test_embedding_and_its_gradient(device):
    table = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], np.float32)
    layer = nn.Embedding(array(table))
    near(layer(np.array([2, 0, 1])), table[[2, 0, 1]])
    dy = np.arange(16, dtype=np.float32).reshape(4, 4)
    _, pullback = sd.vjp(lambda m: m(np.array([1, 0, 2, 0])), layer)
    near(pullback(dy).weight, np.stack([dy[1] + dy[3], dy[0], dy[2]]))
    with pytest.raises(IndexRangeError):
        layer(np.array([0, 3]))
    with pytest.raises(ShaderError):
        layer(np.array([0.0, 1.0], np.float32))


def test_rms_norm(device):
    x = np.array([1, 2, 3, 4], np.float32)
    near(nn.RMSNorm(array(np.ones(4)), eps=0.0)(x), x / np.sqrt(7.5))
    rows = np.array([[3, 4, 0], [1, 1, 1]], np.float32)
    want = rows / np.sqrt((rows**2).mean(-1, keepdims=True))
    near(nn.RMSNorm(array(np.ones(3)), eps=0.0)(rows), want)
    near(nn.RMSNorm(array(np.zeros(3)), eps=0.0, shift=True)(rows), want)
    w, g = np.array([1.5, 0.5, 2, 1], np.float32), normal(4)
    r = np.sqrt(7.5)
    _, pullback = sd.vjp(lambda x: nn.RMSNorm(array(w), eps=0.0)(x), x)
    near(pullback(g), (w * g - x * (w * g * x).sum() / (4 * r * r)) / r)


def test_gated_activations(device):
    one = nn.Linear(array([[1.0]]))
    mlp = nn.SwiGLU(one, one, one)
    for g in (0.0, 1.0, -1.0, 2.0):
        near(mlp(np.array([g], np.float32)), [g / (1 + np.exp(-g)) * g])
    zero = nn.Linear(array([[0.0]]))
    assert float(nn.SwiGLU(zero, zero, zero)(array([3.0]))[0]) == 0.0
    near(nn.GeGLU(one, one, one)(array([1.0])), [0.84119199], 1e-5)
    near(nn.MLP(one, one, activation="gelu")(array([1.0])), [0.84134475], 1e-5)


@pytest.mark.parametrize("layout", ["halved", "interleaved"])
@pytest.mark.parametrize("dim", [8, 4, 2])
def test_rotary_embedding(device, layout, dim):
    x = normal(2, 6, 3 * 8)
    layer = rotary(8, dim, theta=5e5, layout=layout)
    near(layer(x[:, :1]), x[:, :1])  # position 0 turns nothing
    angles = (3 + np.arange(6))[:, None] * 5e5 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    heads = x.reshape(2, 6, 3, 8).astype(np.float64)
    want = heads.copy()
    if layout == "halved":
        a, b = slice(0, dim // 2), slice(dim // 2, dim)
    else:
        a, b = slice(0, dim, 2), slice(1, dim, 2)
    want[..., a] = heads[..., a] * cos - heads[..., b] * sin
    want[..., b] = heads[..., b] * cos + heads[..., a] * sin
    near(layer(x, 3), want.reshape(x.shape))
    near(layer(x, sd.array(np.int32(3))), want.reshape(x.shape))
    # A rotation's gradient is the rotation back.
    y, pullback = sd.vjp(lambda x: layer(x, 3), x)
    near(pullback(y), x)


def test_rotary_embedding_of_one_row(device):
    layer = rotary(4, theta=1e4)
    turned = np.asarray(layer(array([1.0, 0, 0, 0]), 5))
    near(turned, [np.cos(5), 0, np.sin(5), 0])
    with pytest.raises(IndexRangeError):
        rotary(4, max_positions=5)(normal(3, 4), 3)
    with pytest.raises(ShapeError):
        layer(normal(3, 6))


def test_rotary_scaling():
    from shaderdsl.nn.rotary import inverse_frequencies

    plain = inverse_frequencies(64, 5e5)
    linear = nn.RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(inverse_frequencies(64, 5e5, linear), plain / 4)
    llama = nn.RopeScaling(kind="llama3", factor=8.0, original_positions=8192)
    scaled = inverse_frequencies(64, 5e5, llama)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()
    with pytest.raises(ShaderError):
        nn.RopeScaling(kind="yarn", factor=2.0)


# ------------------------------------------------------------------ attention


def reference_attention(layer, x, window=None, cap=None):
    """In float64, a head at a time."""
    w = {n: np.asarray(p, np.float64) for n, p in layer.parameters().items()}
    q, k, v = (x @ w[f"{p}_proj.weight"].T for p in "qkv")
    t, d = len(x), layer.head_dim
    parts = 2 if layer.gated else 1
    q = q.reshape(t, layer.num_heads, parts, d)
    k, v = (a.reshape(t, layer.num_kv_heads, d) for a in (k, v))
    out = np.zeros((t, layer.num_heads, d))
    for h in range(layer.num_heads):
        j = h // (layer.num_heads // layer.num_kv_heads)
        s = q[:, h, 0] @ k[:, j].T * d**-0.5
        if cap is not None:
            s = cap * np.tanh(s / cap)
        seen = np.tril(np.ones((t, t), bool))
        if window is not None:
            seen &= ~np.tril(np.ones((t, t), bool), -window)
        s = np.where(seen, s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, j]
        if layer.gated:
            out[:, h] /= 1 + np.exp(-q[:, h, 1])
    return out.reshape(t, -1) @ w["o_proj.weight"].T


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"soft_cap": 2.0}, {"gated": True, "parts": 2}],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (3, 1)], ids=str)
def test_attention(device, heads, options):
    layer = attention(*heads, 4, 6, **options)
    x = normal(7, 6) * 0.5
    want = reference_attention(layer, x, options.get("window"), options.get("soft_cap"))
    near(layer(x), want, 1e-4)
    near(layer(np.stack([x, x[::-1]]))[0], want, 1e-4)


def test_attention_of_one_token_is_its_value(device):
    eye = nn.Linear(array(np.eye(8)))
    layer = nn.Attention(
        eye, eye, eye, eye, num_heads=2, num_kv_heads=2, head_dim=4, rotary=rotary(4)
    )
    x = normal(8)
    near(layer(x), x)
    zero = nn.Linear(array(np.zeros((8, 8))))
    nothing = layer.replace(v_proj=zero)
    assert not np.asarray(nothing(normal(3, 8))).any()


def test_attention_does_not_see_what_follows(device):
    layer = attention(4, 2, 4, 6, rotary=rotary(4))
    x = normal(2, 6)
    changed = np.stack([x[0], normal(6)])
    near(np.asarray(layer(x))[0], np.asarray(layer(changed))[0])


def test_gradients_of_attention(device):
    check_gradients(attention(2, 1, 4, 6, rotary=rotary(4)), normal(5, 6) * 0.5)
    gated = attention(2, 1, 4, 6, rotary=rotary(4, 2), gated=True, parts=2)
    check_gradients(gated, normal(5, 6) * 0.5)


def test_every_parameter_of_a_block_has_a_gradient(device):
    model = nn.Transformer.init(SMALL)
    block = model.layers[0]
    check_gradients(block, normal(2, 5, 12))
    gradient = sd.grad(lambda b: (b(normal(2, 5, 12)) ** 2).sum())(block)
    for name, g in gradient.parameters().items():
        assert np.abs(np.asarray(g)).max() > 0, name


def test_attention_refuses(cpu):
    with pytest.raises(ShapeError, match="evenly"):
        attention(4, 3, 4, 6)
    with pytest.raises(ShapeError, match="q_proj"):
        attention(4, 2, 4, 6, gated=True)
    with pytest.raises(ShapeError, match="Attention"):
        attention(4, 2, 4, 6)(normal(3, 5))


# ------------------------------------------------------------------ cache


def test_cache_append_read_clear_overflow(device):
    cache = nn.KVCache(heads=2, capacity=3, head_dim=4)
    k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    cache.append(k[:, :, :2], v[:, :, :2])
    assert cache.length == 2
    cache.append(k[:, :, 2:], v[:, :, 2:])
    assert cache.length == 3
    np.testing.assert_array_equal(cache.keys(0), k)
    np.testing.assert_array_equal(cache.values(0), v)
    with pytest.raises(IndexRangeError, match="3 of 3"):
        cache.append(k[:, :, :1], v[:, :, :1])
    cache.clear()
    assert cache.length == 0 and cache.keys(0).shape == (1, 2, 0, 4)
    with pytest.raises(ShapeError):
        cache.append(k[:, :1], v[:, :1])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_pieces_of_any_length_give_the_whole(device, positions):
    config = nn.TransformerConfig(**{**vars(SMALL), "positions": positions})
    model = nn.Transformer.init(config, seed=5)
    ids = RNG.integers(0, 11, (2, 70))
    want = np.asarray(model(ids))
    cache = model.new_cache(batch=2, capacity=70)
    pieces = []
    for a, b in ((0, 33), (33, 34), (34, 36), (36, 70)):
        pieces.append(np.asarray(model(ids[:, a:b], cache=cache)))
    near(np.concatenate(pieces, axis=1), want, 1e-4)
    assert cache.length == 70
    with pytest.raises(IndexRangeError):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ShapeError):
        model(ids[0], cache=cache)


# ------------------------------------------------------------------ the whole


def test_a_small_model_learns(device):
    model = nn.Transformer.init(SMALL)
    ids = np.tile(np.array([1, 5, 2, 9, 7], np.int32), (2, 4))
    opt = sd.optim.AdamW(lr=1e-2)

    @sd.compile(donate=("model", "state"))
    def step(model, state, x, y):
        loss, g = sd.value_and_grad(lambda m: nn.cross_entropy(m(x), y))(model)
        return *opt.update(model, g, state), loss

    state, losses = opt.init(model), []
    for _ in range(25):
        model, state, loss = step(model, state, ids[:, :-1], ids[:, 1:])
        losses.append(float(loss))
    assert losses[0] > 2 and losses[-1] < 0.5
    prompt = ids[0, :6]
    made = model.generate(prompt, max_new_tokens=5)
    assert made.tolist() == ids[0, :11].tolist()


def test_a_step_of_training_is_few_kernels(device):
    """Two layers, forward, backward, clipping and AdamW: so many, and none is new."""
    config = nn.TransformerConfig(
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=172,
        max_positions=64,
    )
    model, opt = nn.Transformer.init(config), sd.optim.AdamW(max_grad_norm=1.0)

    @sd.compile(donate=("model", "state"))
    def step(model, state, x, y):
        loss, g = sd.value_and_grad(lambda m: nn.cross_entropy(m(x), y))(model)
        return *opt.update(model, g, state), loss

    state, ids = opt.init(model), np.zeros((4, 64), np.int32)
    model, state, _ = step(model, state, ids, ids)
    model, state, _ = step(model, state, ids, ids)
    with sd.profile() as p:
        step(model, state, ids, ids)
    assert p.compiled == 0
    assert p.dispatches <= 92


def test_generate_options(cpu):
    model = nn.Transformer.init(SMALL)
    prompt = np.array([[1, 2, 3], [4, 5, 6]])
    greedy = model.generate(prompt, max_new_tokens=4)
    assert greedy.shape == (2, 7) and greedy.dtype == np.int32
    same = model.generate(prompt, max_new_tokens=4, temperature=1.0, top_k=1)
    assert np.array_equal(same, greedy)
    same = model.generate(prompt, max_new_tokens=4, temperature=1.0, top_p=1e-9)
    assert np.array_equal(same, greedy)
    one, two = (
        model.generate(prompt, max_new_tokens=9, temperature=1.0, seed=8)
        for _ in range(2)
    )
    other = model.generate(prompt, max_new_tokens=9, temperature=1.0, seed=9)
    assert np.array_equal(one, two) and not np.array_equal(one, other)
    ended = model.generate(prompt[0], max_new_tokens=9, stop=int(greedy[0, 3]))
    assert ended.tolist() == [1, 2, 3, int(greedy[0, 3])]
    assert model.generate(prompt[0], max_new_tokens=0).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: m.generate(np.zeros(0, np.int32)), ShapeError),
        (lambda m: m.generate([1], max_new_tokens=128), IndexRangeError),
        (lambda m: m.generate([1], temperature=-1.0), ShaderError),
        (lambda m: m.generate([1], top_k=0), ShaderError),
        (lambda m: m.generate([1], top_p=0.0), ShaderError),
        (lambda m: m([1.0, 2.0]), DTypeError),
        (lambda m: m([11]), IndexRangeError),
        (lambda m: m([-1]), IndexRangeError),
        (lambda m: m(np.zeros(129, np.int32)), IndexRangeError),
        (lambda m: m(np.zeros((1, 1, 1), np.int32)), ShapeError),
    ],
)
def test_a_model_refuses(cpu, call, error):
    with pytest.raises(error):
        call(nn.Transformer.init(SMALL))


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 3},
        {"hidden_size": 13, "head_dim": None},
        {"head_dim": 5},
        {"rotary_dim": 6},
        {"num_layers": 0},
        {"norm": "batch"},
        {"activation": "relu"},
        {"windows": (4,)},
    ],
    ids=str,
)
def test_a_configuration_refuses(change):
    fields = {**vars(SMALL), "rotary_dim": None, **change}
    with pytest.raises(ShaderError):
        nn.TransformerConfig(**fields)


def test_variants_without_a_fixture(device):
    """Windows, caps, post-norms, scales: causal, finite, and with gradients."""
    config = nn.TransformerConfig(
        **{
            **vars(SMALL),
            "windows": (2, None),
            "rope_thetas": (1e3, 1e4),
            "soft_cap": 5.0,
            "final_soft_cap": 3.0,
            "post_norms": True,
            "norm_shift": True,
            "embedding_scale": 12**0.5,
            "attention_scale": 0.3,
            "tied_head": True,
            "activation": "gelu_tanh",
            "rope_layout": "interleaved",
            "qk_norm": True,
        }
    )
    model = nn.Transformer.init(config)
    ids = RNG.integers(0, 11, (2, 8))
    logits = np.asarray(model(ids))
    changed = ids.copy()
    changed[:, 5] = (ids[:, 5] + 1) % 11
    other = np.asarray(model(changed))
    near(logits[:, :5], other[:, :5])
    assert np.abs(logits[:, 5:] - other[:, 5:]).max() > 1e-4
    assert np.abs(logits).max() < 3.0
    gradient = sd.grad(lambda m: nn.cross_entropy(m(ids), changed))(model)
    for name, g in gradient.parameters().items():
        g = np.asarray(g)
        assert np.isfinite(g).all() and np.abs(g).max() > 0, name
    cache = model.new_cache(batch=2, capacity=8)
    near(model(ids, cache=cache), logits, 1e-4)
