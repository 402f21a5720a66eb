"""Adapters: peft's own numbers, training beside frozen weights, files, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn
from shaderdsl.errors import CheckpointError, ShaderError
from shaderdsl.nn import lora
from shaderdsl.nn.safetensors import SafetensorsFile

DATA = Path(__file__).parent / "data" / "hf"
ADAPTER = DATA / "llama_gqa_lora"
RNG = np.random.default_rng(3)
SMALL = nn.TransformerConfig(
    vocab_size=11,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=20,
    max_positions=64,
)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def array(x):
    return sd.array(np.asarray(x, np.float32))


def close(have, want, limit):
    assert np.abs(np.asarray(have) - np.asarray(want)).max() <= limit


@pytest.fixture(scope="module")
def expected():
    file = SafetensorsFile(ADAPTER / "expected.safetensors")
    return {name: np.array(file.read(name)) for name in file.tensors}


def adapted():
    return lora.load(nn.load(DATA / "llama_gqa"), ADAPTER)


def with_b(model, scale=0.1):
    """The model with adapters that are not zero."""
    adapters, base = lora.split(model)
    generator = np.random.default_rng(9)

    def moved(x):
        return x + array(scale * generator.standard_normal(x.shape))

    return lora.join(sd.tree.map(moved, adapters), base)


def shifted(labels):
    targets = np.full_like(labels, -100)
    targets[..., :-1] = labels[..., 1:]
    return targets


# ------------------------------------------------------------------ peft's numbers


def test_values_of_peft(device, expected):
    model = adapted()
    for s in ("s7", "s33"):
        logits = model(expected[f"{s}.input_ids"])
        close(logits, expected[f"{s}.logits"], 5e-5)
        loss = float(nn.cross_entropy(logits, expected[f"{s}.targets"]))
        assert loss == pytest.approx(float(expected[f"{s}.loss"]), rel=2e-6)
    x = model.embed(expected["s7.input_ids"])
    for i, block in enumerate(model.layers):
        close(block.self_attn(block.norm1(x)), expected[f"s7.attn_out.{i}"], 5e-5)
        x = block(x)
        close(x, expected[f"s7.hidden.{i + 1}"], 5e-5)


def test_gradients_of_peft(device, expected):
    ids, targets = expected["batch.input_ids"], shifted(expected["batch.labels"])
    adapters, base = lora.split(adapted())

    def loss_of(adapters):
        return nn.cross_entropy(lora.join(adapters, base)(ids), targets)

    loss, gradient = sd.value_and_grad(loss_of)(adapters)
    assert float(loss) == pytest.approx(float(expected["loss"]), rel=2e-6)
    have = lora.state_dict(gradient)
    names = [n.removeprefix("grad.") for n in expected if n.startswith("grad.")]
    assert sorted(have) == sorted(names)
    assert len(sd.tree.leaves(gradient)) == len(names)  # the base has none
    for name in names:
        want = expected[f"grad.{name}"]
        close(have[name], want, 2e-5 * np.abs(want).max())


def test_greedy_tokens_of_peft(device, expected):
    for model in (adapted(), lora.merge(adapted())):
        for s in ("s7", "s33"):
            prompt, made = expected[f"{s}.input_ids"], expected[f"{s}.generated"]
            have = model.generate(prompt, max_new_tokens=len(made))
            assert have.tolist() == [*prompt, *made]


def test_merged_is_unmerged(device, expected):
    model, ids = adapted(), expected["s33.input_ids"]
    merged = lora.merge(model)
    close(merged(ids), expected["s33.logits"], 5e-5)
    assert merged.layers[0].self_attn.q_proj.merged
    assert lora.merge(merged).layers[0].self_attn.q_proj.weight is (
        merged.layers[0].self_attn.q_proj.weight
    )
    again = lora.unmerge(merged)
    close(again(ids), expected["s33.logits"], 5e-5)
    close(
        again.layers[0].self_attn.q_proj.weight,
        model.layers[0].self_attn.q_proj.weight,
        1e-6,
    )
    plain = lora.remove(merged)
    assert type(plain.layers[0].self_attn.q_proj) is nn.Linear
    close(plain(ids), expected["s33.logits"], 5e-5)


# ------------------------------------------------------------------ training


def test_a_new_adapter_changes_nothing(device):
    model = nn.Transformer.init(SMALL)
    ids = RNG.integers(0, 11, (2, 5))
    targets = ("q_proj", "mlp.up_proj", "layers.1.self_attn.o_proj", "lm_head")
    new = lora.attach(model, rank=2, targets=targets, alpha=4)
    close(new(ids), model(ids), 1e-6)
    paths = [p for p in new.parameters() if p.endswith("lora_A")]
    assert len(paths) == 2 + 2 + 1 + 1
    assert new.layers[0].mlp.up_proj.scale == 2.0
    assert new.layers[0].mlp.up_proj.weight is model.layers[0].mlp.up_proj.weight
    same = lora.attach(model, rank=2, targets=targets)
    for path in paths:
        a = np.asarray(new.parameters()[path])
        assert np.array_equal(a, same.parameters()[path])
        assert 0 < np.abs(a).max() <= a.shape[1] ** -0.5
    wide = lora.attach(model, rank=4, alpha=8, rank_stabilised=True)
    assert wide.layers[0].self_attn.v_proj.scale == 4.0


def test_training_leaves_the_base_alone(device):
    model = lora.attach(nn.Transformer.init(SMALL), rank=2, alpha=8)
    adapters, base = lora.split(model)
    ids = np.tile(np.array([1, 5, 2, 9, 7], np.int32), (2, 3))
    opt = sd.optim.AdamW(lr=3e-2, weight_decay=0.0)

    @sd.compile(donate=("adapters", "state"))
    def step(adapters, base, state, x, y):
        def loss_of(adapters):
            return nn.cross_entropy(lora.join(adapters, base)(x), y)

        loss, g = sd.value_and_grad(loss_of)(adapters)
        return *opt.update(adapters, g, state), loss

    before = {p: np.array(x) for p, x in base.parameters().items()}
    state, losses = opt.init(adapters), []
    assert len(sd.tree.leaves(state)) == 1 + 2 * 8
    for _ in range(30):
        adapters, state, loss = step(adapters, base, state, ids[:, :-1], ids[:, 1:])
        losses.append(float(loss))
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.3
    for path, x in base.parameters().items():
        np.testing.assert_array_equal(x, before[path])
    assert all(np.isfinite(np.asarray(x)).all() for x in sd.tree.leaves(adapters))


def test_frozen_weights_cost_no_kernel(cpu):
    """The last layer's adapter: nothing below it is differentiated."""
    model = nn.Transformer.init(SMALL)
    ids = RNG.integers(0, 11, (2, 5))

    def kernels(chosen):
        part, rest = nn.partition(model, chosen)

        def f(part, rest):
            def loss(part):
                return nn.cross_entropy(nn.combine(part, rest)(ids), ids)

            return sd.value_and_grad(loss)(part)

        lowered = sd.lower(f, part, rest)
        gradient = sd.grad(lambda p: nn.cross_entropy(nn.combine(p, rest)(ids), ids))(
            part
        )
        leaves = sd.tree.leaves(gradient)
        assert all(np.isfinite(np.asarray(g)).all() for g in leaves)
        assert set(gradient.parameters()) == set(part.parameters())
        return len(lowered.kernels)

    whole = kernels(lambda path, _: True)
    last = kernels(lambda path, _: path.startswith("layers.1.mlp.down_proj"))
    none = len(sd.lower(lambda m: nn.cross_entropy(m(ids), ids), model).kernels)
    assert none < last <= none + 8 < whole


def test_dropout_is_a_function_of_the_key(device):
    model = with_b(lora.attach(nn.Transformer.init(SMALL), rank=2, dropout=0.5))
    ids = RNG.integers(0, 11, (2, 5))
    plain = np.asarray(model(ids))
    one, two = (lora.with_dropout(model, sd.random.key(7)) for _ in range(2))
    other = lora.with_dropout(model, sd.random.key(8))
    assert np.array_equal(one(ids), two(ids))
    assert not np.array_equal(one(ids), other(ids))
    assert not np.array_equal(one(ids), plain)
    assert np.array_equal(lora.with_dropout(one, None)(ids), plain)
    keys = [np.asarray(x.self_attn.q_proj.key) for x in one.layers]
    assert not np.array_equal(*keys)
    # the mean over many keys is what is computed without dropout
    layer, x = one.layers[0].self_attn.q_proj, array(normal(12))
    drawn = [np.asarray(layer.replace(key=sd.random.key(s))(x)) for s in range(300)]
    want = np.asarray(layer.replace(key=None)(x))
    spread = np.std(drawn, axis=0) / np.sqrt(len(drawn))
    assert (np.abs(np.mean(drawn, axis=0) - want) < 5 * spread + 1e-6).all()

    # a key that is an argument of a compiled step; the gradient sees the same mask
    adapters, base = lora.split(model)

    def loss_of(adapters, base, key):
        return sd.sum(lora.with_dropout(lora.join(adapters, base), key)(ids) ** 2)

    step = sd.compile(sd.value_and_grad(loss_of))
    loss, gradient = step(adapters, base, sd.random.key(7))
    assert float(loss) == pytest.approx(float((np.asarray(one(ids)) ** 2).sum()), 1e-5)
    leaves, structure = sd.tree.flatten(adapters)
    grads = sd.tree.leaves(gradient)
    values = []
    slope = np.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in grads))
    for h in (1e-2, -1e-2):
        new = [x + (h / slope) * g for x, g in zip(leaves, grads)]
        moved = sd.tree.unflatten(structure, new)
        values.append(float(loss_of(moved, base, sd.random.key(7))))
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(slope, rel=2e-2)


def test_gradients_beside_gated_attention(device):
    """All of A and B, with B not zero, against central differences."""
    parts = {"q": 2 * 2 * 4, "k": 4, "v": 4}
    projections = {
        f"{p}_proj": nn.Linear(array(normal(n, 6) * 0.5)) for p, n in parts.items()
    }
    layer = nn.Attention(
        **projections,
        o_proj=nn.Linear(array(normal(6, 8) * 0.5)),
        rotary=nn.RotaryEmbedding(head_dim=4, dim=2),
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        gated=True,
    )
    layer = with_b(lora.attach(layer, rank=2, alpha=4), 0.5)
    assert layer.q_proj.lora_B.shape == (16, 2)
    x, weight = normal(5, 6), normal(5, 6)
    adapters, base = lora.split(layer)

    def loss_of(adapters):
        return sd.sum(lora.join(adapters, base)(x) * weight)

    gradient = sd.grad(loss_of)(adapters)
    leaves, structure = sd.tree.flatten(adapters)
    grads = sd.tree.leaves(gradient)
    assert len(grads) == len(leaves) == 4
    for k, g in enumerate(grads):
        for _ in range(3):
            direction = normal(*g.shape)
            values = []
            for h in (1e-2, -1e-2):
                new = list(leaves)
                new[k] = leaves[k] + array(h * direction)
                values.append(float(loss_of(sd.tree.unflatten(structure, new))))
            want = (values[0] - values[1]) / 2e-2
            have = float((np.asarray(g) * direction).sum())
            assert have == pytest.approx(want, rel=1e-2, abs=2e-2)


# ------------------------------------------------------------------ files


def test_what_is_saved_loads_as_the_same(cpu, tmp_path):
    model = adapted()
    lora.save(model, tmp_path / "copy", base="llama_gqa")
    again = lora.load(nn.load(DATA / "llama_gqa"), tmp_path / "copy")
    assert sd.tree.flatten(again)[1] == sd.tree.flatten(model)[1]
    for name, x in lora.state_dict(model).items():
        np.testing.assert_array_equal(lora.state_dict(again)[name], x)
    first = json.loads((ADAPTER / "adapter_config.json").read_text())
    second = json.loads((tmp_path / "copy" / "adapter_config.json").read_text())
    for key in second:
        assert first[key] == second[key], key
    mixed = lora.attach(nn.Transformer.init(SMALL), rank=2, alpha=3)
    targets = ("layers.1.mlp.up_proj", "lm_head")
    mixed = with_b(lora.attach(mixed, rank=3, alpha=1.5, targets=targets))
    lora.save(mixed, tmp_path / "mixed")
    again = lora.load(nn.Transformer.init(SMALL), tmp_path / "mixed")
    ids = RNG.integers(0, 11, 5)
    np.testing.assert_array_equal(again(ids), mixed(ids))
    assert again.lm_head.alpha == 1.5 and again.lm_head.rank == 3


def test_adapters_of_fused_projections(cpu, tmp_path):
    """GPT-2 stores q, k and v as one; A is shared, or ranks stand side by side."""
    base = nn.load(DATA / "gpt2")
    ids = RNG.integers(0, 256, 6)
    for targets in (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "up_proj")):
        model = with_b(lora.attach(base, rank=2, alpha=4, targets=targets))
        lora.save(model, tmp_path / "fused")
        again = lora.load(base, tmp_path / "fused")
        close(again(ids), model(ids), 1e-5)
        lora.save(again, tmp_path / "shared")
        shared = SafetensorsFile(tmp_path / "shared" / "adapter_model.safetensors")
        name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
        assert shared.shape(name) == (2 * sum(t[0] in "qkv" for t in targets), 48)
        close(lora.load(base, tmp_path / "shared")(ids), model(ids), 1e-5)


def test_saving_the_whole_model(cpu, tmp_path):
    model = adapted()
    with pytest.raises(CheckpointError, match="not merged"):
        nn.save(model, tmp_path / "whole")
    merged = lora.merge(model)
    nn.save(merged, tmp_path / "whole")
    ids = np.arange(9)
    close(nn.load(tmp_path / "whole")(ids), merged(ids), 1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of libraries among themselves
def test_peft_reads_what_is_saved(cpu, tmp_path, expected):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    lora.save(adapted(), tmp_path / "copy")
    base = transformers.AutoModelForCausalLM.from_pretrained(DATA / "llama_gqa")
    other = peft.PeftModel.from_pretrained(base, tmp_path / "copy")
    with torch.no_grad():
        ids = torch.tensor(expected["s7.input_ids"][None], dtype=torch.long)
        close(other(ids).logits[0].numpy(), expected["s7.logits"], 5e-5)


@pytest.mark.filterwarnings("ignore")  # of libraries among themselves
@pytest.mark.parametrize("family", ["llama_gqa", "gpt2"])
def test_peft_reads_ranks_and_scales(cpu, tmp_path, family):
    """Of several ranks, root-scaled, and beside fused projections."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = nn.load(DATA / family)
    options = {"rank_stabilised": True, "alpha": 3}
    model = lora.attach(model, rank=2, targets=("q_proj", "v_proj"), **options)
    model = lora.attach(model, rank=4, targets=("layers.1.mlp.up_proj",), **options)
    model = with_b(model)
    lora.save(model, tmp_path / "copy")
    base = transformers.AutoModelForCausalLM.from_pretrained(DATA / family)
    other = peft.PeftModel.from_pretrained(base, tmp_path / "copy")
    ids = np.arange(3, 12)
    with torch.no_grad():
        close(other(torch.tensor(ids[None])).logits[0].numpy(), model(ids), 5e-5)


# ------------------------------------------------------------------ refusals


def test_an_adapter_for_another_model(cpu, tmp_path):
    with pytest.raises(CheckpointError, match="another model"):
        lora.load(nn.load(DATA / "gpt2"), ADAPTER)
    with pytest.raises(CheckpointError, match=r"another model(.|\n)*A \[4, 64\]"):
        lora.load(nn.Transformer.init(SMALL), ADAPTER)
    with pytest.raises(CheckpointError, match="has an adapter"):
        lora.load(adapted(), ADAPTER)
    with pytest.raises(CheckpointError, match="cannot read"):
        lora.load(nn.Transformer.init(SMALL), tmp_path)
    for change, message in (
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ):
        about = json.loads((ADAPTER / "adapter_config.json").read_text())
        shutil.copy(ADAPTER / "adapter_model.safetensors", tmp_path)
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | change))
        with pytest.raises(CheckpointError, match=message):
            lora.load(nn.load(DATA / "llama_gqa"), tmp_path)


def test_attach_refuses(cpu):
    model = nn.Transformer.init(SMALL)
    with pytest.raises(ShaderError, match="z_proj"):
        lora.attach(model, targets=("q_proj", "z_proj"))
    for options in ({"rank": 0}, {"dropout": 1.0}, {"targets": ()}):
        with pytest.raises(ShaderError):
            lora.attach(model, **options)
    with pytest.raises(ShaderError, match="already"):
        lora.attach(lora.attach(model))
    with pytest.raises(CheckpointError, match="no adapters"):
        lora.save(model, "nowhere")
