"""Model folders: what is written, what is read, and every way of being bad."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn
from shaderdsl.errors import CheckpointError
from shaderdsl.nn.safetensors import SafetensorsFile

save_file = pytest.importorskip("safetensors.numpy").save_file
load_file = pytest.importorskip("safetensors.numpy").load_file

DATA = Path(__file__).parent / "data" / "hf"
SMALL = nn.TransformerConfig(
    vocab_size=11,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=20,
    max_positions=16,
)
IDS = np.arange(10, dtype=np.int32)


@pytest.fixture(autouse=True)
def _on_cpu(cpu):
    """What is computed is not the point here."""


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint, to be damaged."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "llama_gqa" / name, path)
    return path


def edit(folder, **changes):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            settings.pop(key, None)
        else:
            settings[key] = value
    path.write_text(json.dumps(settings))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        nn.load(folder)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------ writing


def test_a_saved_model_is_the_model(tmp_path):
    model = nn.Transformer.init(SMALL)
    nn.save(model, tmp_path / "deep" / "model")
    again = nn.load(tmp_path / "deep" / "model")
    assert again.config == SMALL
    np.testing.assert_array_equal(np.asarray(again(IDS)), np.asarray(model(IDS)))
    about = json.loads((tmp_path / "deep" / "model" / "config.json").read_text())
    assert about["architectures"] == ["LlamaForCausalLM"]
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "config.json",
        "deep",
        "model",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"family": "qwen2", "qkv_bias": True},
        {"family": "qwen3", "qk_norm": True, "windows": (None, 4)},
        {"family": "mistral", "windows": (4, 4)},
        {"tied_head": True, "rope_theta": 5e5},
        {"rope_scaling": nn.RopeScaling(kind="linear", factor=2.0)},
        {"rope_scaling": nn.RopeScaling(kind="llama3", factor=8.0)},
        {
            "family": "gpt2",
            "num_kv_heads": 4,
            "head_dim": 3,
            "rotary_dim": 3,
            "norm": "layer",
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "mlp": "plain",
            "activation": "gelu_tanh",
            "positions": "learned",
            "tied_head": True,
        },
    ],
    ids=str,
)
def test_every_family_reads_what_it_writes(change, tmp_path):
    model = nn.Transformer.init(nn.TransformerConfig(**{**vars(SMALL), **change}))
    nn.save(model, tmp_path / "m")
    again = nn.load(tmp_path / "m")
    assert again.config == model.config
    np.testing.assert_array_equal(np.asarray(again(IDS)), np.asarray(model(IDS)))


def test_what_a_family_cannot_store_is_refused(tmp_path):
    odd = nn.TransformerConfig(**{**vars(SMALL), "soft_cap": 5.0})
    with pytest.raises(CheckpointError, match="soft_cap"):
        nn.save(nn.Transformer.init(odd), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    first, second = (nn.Transformer.init(SMALL, seed=s) for s in (0, 1))
    nn.save(first, tmp_path / "m")

    def full(*_):
        raise OSError("disk full")

    with monkeypatch.context() as m:
        m.setattr(os, "replace", full)
        with pytest.raises(CheckpointError, match="disk full"):
            nn.save(second, tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    want = np.asarray(first(IDS))
    np.testing.assert_array_equal(np.asarray(nn.load(tmp_path / "m")(IDS)), want)
    nn.save(second, tmp_path / "m")
    want = np.asarray(second(IDS))
    np.testing.assert_array_equal(np.asarray(nn.load(tmp_path / "m")(IDS)), want)


def test_state_dict_of_gradients_has_the_same_names():
    model = nn.load(DATA / "gpt2")
    gradient = sd.grad(lambda m: nn.cross_entropy(m(IDS[:-1]), IDS[1:]))(model)
    one, two = nn.state_dict(model), nn.state_dict(gradient)
    assert list(one) == list(two)
    assert all(one[n].shape == two[n].shape for n in one)
    assert one["transformer.h.0.attn.c_attn.weight"].shape == (48, 144)


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_are_widened(folder, kind):
    want = {n: x.copy() for n, x in load_file(folder / "model.safetensors").items()}
    path = folder / "model.safetensors"
    if kind == "f16":
        save_file({n: x.astype(np.float16) for n, x in want.items()}, path)
        rounded = {n: x.astype(np.float16).astype(np.float32) for n, x in want.items()}
    else:
        bits = {n: (x.view(np.uint32) >> 16).astype("<u2") for n, x in want.items()}
        rounded = {
            n: (x.astype(np.uint32) << 16).view(np.float32) for n, x in bits.items()
        }
        header, data = {}, b""
        for n, x in bits.items():
            end = len(data) + x.nbytes
            header[n] = {
                "dtype": "BF16",
                "shape": list(x.shape),
                "data_offsets": [len(data), end],
            }
            data += x.tobytes()
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    have = nn.state_dict(nn.load(folder))
    for n, x in rounded.items():
        assert have[n].dtype == "f32"
        np.testing.assert_array_equal(np.asarray(have[n]), x)


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, own in parts.items():
        save_file({n: tensors[n] for n in own}, folder / file)
    table = {n: f for f, own in parts.items() for n in own}
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return tensors


def test_shards(folder):
    tensors = shard(folder)
    have = nn.state_dict(nn.load(folder))
    for n, x in tensors.items():
        np.testing.assert_array_equal(np.asarray(have[n]), x)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "1 of 2")


def test_an_index_that_promises_too_much(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.more"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    refused(folder, "lacks model.more")
    path.write_text("{}")
    refused(folder, "weight_map")


def test_names_without_their_first_part_and_buffers(tmp_path):
    path = tmp_path / "gpt2"
    path.mkdir()
    shutil.copy(DATA / "gpt2" / "config.json", path)
    tensors = load_file(DATA / "gpt2" / "model.safetensors")
    bare = {n.removeprefix("transformer."): x for n, x in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    save_file(bare, path / "model.safetensors")
    have = nn.state_dict(nn.load(path))
    for n, x in tensors.items():
        np.testing.assert_array_equal(np.asarray(have[n]), x)


def test_one_table_of_all_that_is_wrong(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = np.zeros((256, 63), np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(64, np.int32)

    rewrite(folder, change)
    message = refused(folder)
    rows = [line.split("  ")[0] for line in message.splitlines()[2:6]]
    assert rows == ["dtype", "missing", "shape", "unexpected"]
    for word in ("model.norm.weight", "[256, 64]", "[256, 63]", "model.extra.weight"):
        assert word in message


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"no json at all",
        b"[1, 2]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_is_none(folder, header):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refused(folder, "model.safetensors")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_settings_that_are_none(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_files_that_are_not_there(folder, tmp_path):
    refused(tmp_path / "nowhere", "config.json")
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Llama"]),
        ({"architectures": None, "model_type": "t5"}, ["t5"]),
        ({"num_local_experts": 8}, ["experts"]),
        (
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "model_type": "qwen3_next",
                "layer_types": ["full_attention"] * 2,
            },
            ["experts", "512"],
        ),
        (
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "model_type": "qwen3_next",
                "num_experts": 0,
            },
            ["linear attention"],
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "use_bidirectional_attention": True,
            },
            ["bidirectional"],
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, ["linear_attention"]),
        ({"hidden_act": "relu2"}, ["relu2"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads"]),
        ({"hidden_size": "many"}, ["config.json"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["yarn"]),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused_before_the_weights(folder, changes, words):
    (folder / "model.safetensors").write_bytes(b"never looked at")
    edit(folder, **changes)
    refused(folder, *words)


def test_the_model_type_alone_is_enough(folder):
    edit(folder, architectures=None)
    assert nn.load(folder).config.family == "llama"


def test_another_size_is_a_table_of_shapes(folder):
    edit(folder, intermediate_size=171)
    refused(folder, "down_proj", "[64, 171]", "[64, 172]")


def test_tensors_are_views_of_the_file():
    file = SafetensorsFile(DATA / "llama_gqa" / "model.safetensors")
    x = file.read("model.norm.weight")
    assert not x.flags.owndata and x.dtype == np.float32
