"""Real checkpoints: logits, losses, gradients and greedy tokens of the original."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn
from shaderdsl.nn.safetensors import SafetensorsFile

DATA = Path(__file__).parent / "data" / "hf"
FAMILIES = (
    "llama_gqa",
    "llama3_rope",
    "mistral_window",
    "qwen2_bias",
    "qwen3",
    "qwen3_5_gated",
    "qwen3_next",
    "gemma2",
    "gemma3",
    "gpt2",
)


@functools.cache
def expected(family):
    file = SafetensorsFile(DATA / family / "expected.safetensors")
    return {name: np.array(file.read(name)) for name in file.tensors}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def shifted(labels):
    """targets[t] = labels[t + 1]; the last row predicts nothing."""
    targets = np.full_like(labels, -100)
    targets[..., :-1] = labels[..., 1:]
    return targets


def close(have, want, limit):
    assert np.abs(np.asarray(have) - want).max() <= limit


def test_values(device, family):
    model, want = nn.load(DATA / family), expected(family)
    for s in ("s7", "s33"):
        ids = want[f"{s}.input_ids"]
        logits = model(ids)
        close(logits, want[f"{s}.logits"], 5e-5)
        loss = float(nn.cross_entropy(logits, want[f"{s}.targets"]))
        assert loss == pytest.approx(float(want[f"{s}.loss"]), rel=2e-6)


def test_values_of_each_layer(device, family):
    model, want = nn.load(DATA / family), expected(family)
    for s in ("s7", "s33"):
        x = model.embed(want[f"{s}.input_ids"])
        size = np.abs(want[f"{s}.hidden.0"]).max()
        close(x, want[f"{s}.hidden.0"], 1e-6 * max(1.0, size))
        for i, block in enumerate(model.layers):
            attn = block.self_attn(block.norm1(x))
            close(attn, want[f"{s}.attn_out.{i}"], 5e-5)
            if block.post_norm1 is not None:
                attn = block.post_norm1(attn)
            mlp = block.mlp(block.norm2(x + attn))
            close(mlp, want[f"{s}.mlp_out.{i}"], 5e-5)
            x = block(x)
            close(x, want[f"{s}.hidden.{i + 1}"], 5e-5)
        close(model.norm(x), want[f"{s}.hidden.final"], 5e-5)


def test_loss_and_every_gradient_of_the_padded_batch(device, family):
    model, want = nn.load(DATA / family), expected(family)
    ids, targets = want["batch.input_ids"], shifted(want["batch.labels"])

    def loss_of(model):
        return nn.cross_entropy(model(ids), targets)

    loss, gradient = sd.value_and_grad(loss_of)(model)
    assert float(loss) == pytest.approx(float(want["loss"]), rel=2e-6)
    have = nn.state_dict(gradient)
    names = [n.removeprefix("grad.") for n in want if n.startswith("grad.")]
    assert sorted(have) == sorted(names)
    for name in names:
        right = want[f"grad.{name}"]
        close(have[name], right, 2e-5 * np.abs(right).max())


def test_the_batch_is_its_sequences(device, family):
    model, want = nn.load(DATA / family), expected(family)
    ids, mask = want["batch.input_ids"], want["batch.attention_mask"]
    left = [np.roll(x, -m.sum(), axis=0) for x, m in zip(ids, mask)]
    for batch, options in (
        (ids, {}),
        (ids, {"mask": mask}),
        (np.stack(left), {"mask": mask[:, ::-1]}),
    ):
        logits = np.asarray(model(batch, **options))
        for row, s in ((0, "s7"), (1, "s33")):
            right = want[f"{s}.logits"]
            n = len(right)
            have = logits[row, -n:] if batch is not ids else logits[row, :n]
            close(have, right, 5e-5)


def test_greedy_tokens(device, family):
    model, want = nn.load(DATA / family), expected(family)
    for s in ("s7", "s33"):
        prompt, made = want[f"{s}.input_ids"], want[f"{s}.generated"]
        have = model.generate(prompt, max_new_tokens=len(made))
        assert have.tolist() == [*prompt, *made]
        # without the cache: the same tokens from one pass over the whole
        logits = np.asarray(model(have[:-1]))[-len(made) :]
        assert logits.argmax(-1).tolist() == made.tolist()
        close(logits, want[f"{s}.generated_logits"], 5e-5)


def test_cached_logits(device, family):
    model, want = nn.load(DATA / family), expected(family)
    ids, right = want["s33.input_ids"], want["s33.logits"]
    cache = model.new_cache(capacity=40)
    pieces = [model(ids[a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 33))]
    close(np.concatenate([np.asarray(p) for p in pieces]), right, 5e-5)
    assert cache.length == 33
    c = model.config
    assert cache.keys(1).shape == (1, c.num_kv_heads, 33, c.head_dim)
    cache.clear()
    close(model(ids[:3], cache=cache), right[:3], 5e-5)


def test_rotary_frequencies(family):
    from shaderdsl.nn.rotary import inverse_frequencies

    names = [n for n in expected(family) if n.startswith("rope.inv_freq")]
    if not names:
        pytest.skip("no rotary positions")
    config = nn.load(DATA / family).config
    for layer in range(config.num_layers):
        sliding = config.window(layer) is not None
        kind = "sliding_attention" if sliding else "full_attention"
        name = names[0] if len(names) == 1 else f"rope.inv_freq.{kind}"
        have = inverse_frequencies(
            config.rotary_dim, config.theta(layer), config.scaling(layer)
        )
        np.testing.assert_allclose(have, expected(family)[name], rtol=1e-6)


def test_the_older_spelling_of_the_configuration(family, tmp_path):
    old = DATA / family / "config.legacy.json"
    if not old.exists():
        pytest.skip("this family's spelling never changed")
    shutil.copy(DATA / family / "model.safetensors", tmp_path)
    shutil.copy(old, tmp_path / "config.json")
    assert nn.load(tmp_path).config == nn.load(DATA / family).config


def test_what_is_saved_loads_as_the_same(cpu, family, tmp_path):
    model = nn.load(DATA / family)
    nn.save(model, tmp_path / "copy")
    again = nn.load(tmp_path / "copy")
    assert again.config == model.config
    before = SafetensorsFile(DATA / family / "model.safetensors")
    after = SafetensorsFile(tmp_path / "copy" / "model.safetensors")
    assert sorted(before.tensors) == sorted(after.tensors)
    for name in before.tensors:
        np.testing.assert_array_equal(before.read(name), after.read(name))
    first = json.loads((DATA / family / "config.json").read_text())
    second = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert first["architectures"] == second["architectures"]
    ours = {"transformers_version", "n_inner", "max_window_layers", "mlp_only_layers"}
    for key in set(first) & set(second) - ours:
        assert first[key] == second[key], key


def test_transformers_reads_what_is_saved(cpu, family, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    nn.save(nn.load(DATA / family), tmp_path / "copy")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    want = expected(family)
    with torch.no_grad():
        ids = torch.tensor(want["s7.input_ids"][None], dtype=torch.long)
        close(other(ids).logits[0].numpy(), want["s7.logits"], 5e-5)
