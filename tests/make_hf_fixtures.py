"""Makes the tiny checkpoints in ``data/hf`` that came later than its first ones.

    python tests/make_hf_fixtures.py [FAMILY …]

needs torch 2.13.0 and transformers 5.24.0. Weights are random f32, written by
``save_pretrained``; expected values come from the library's own classes with all
arithmetic in float64 from those weights: a mode redirects every cast to f32, and the
rotary tables are made again under it. Names are as in ``data/hf/README.md``.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from torch.overrides import TorchFunctionMode

VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}
DATA = Path(__file__).parent / "data" / "hf"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12}
MADE = {
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3}, {}),
    "mistral_window": (
        "Mistral",
        {"sliding_window": 6, "rope_parameters": {"rope_theta": 1e6}},
        {},
    ),
    "gemma2": (
        "Gemma2",
        GEMMA
        | {
            "sliding_window": 6,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {"rope_theta": 1e4},
        },
        {},
    ),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"sliding_window_pattern": 2},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "num_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        {},
    ),
}


class Float64(TorchFunctionMode):
    """Every f32 that the library asks for becomes float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(x):
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(wide(x) for x in args)
        return func(*args, **{k: wide(v) for k, v in (kwargs or {}).items()})


def new_model(name, seed):
    family, options, _ = MADE[name]
    config_class = {"Gemma3": "Gemma3Text"}.get(family, family) + "Config"
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, family + "ForCausalLM")(config)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.ndim == 1:  # norms: away from one, or from zero where one is added
                base = p.mean().round()
                p.copy_(base + 0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (1.0 if "embed" in path else 0.35))
    return model.eval()


def in_float64(model):
    model = model.double()
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config)
    if hasattr(inner.embed_tokens, "embed_scale"):
        scale = model.config.hidden_size**0.5
        inner.embed_tokens.embed_scale = torch.tensor(scale, dtype=torch.float64)
    return model


def shifted(labels):
    targets = np.full_like(labels, -100)
    targets[..., :-1] = labels[..., 1:]
    return targets


def forward(model, ids, labels, kept):
    """Logits and loss of one sequence; what each layer gives goes into ``kept``."""
    hooks = []

    def keep(name):
        def hook(module, args, output):
            kept[name] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    inner = model.model
    first = inner.layers[0].register_forward_pre_hook(
        lambda m, args, kwargs: kept.__setitem__(
            "hidden.0", (args[0] if args else kwargs["hidden_states"])[0]
        ),
        with_kwargs=True,
    )
    hooks.append(first)
    for i, layer in enumerate(inner.layers):
        hooks.append(layer.register_forward_hook(keep(f"hidden.{i + 1}")))
        hooks.append(layer.self_attn.register_forward_hook(keep(f"attn_out.{i}")))
        hooks.append(layer.mlp.register_forward_hook(keep(f"mlp_out.{i}")))
    hooks.append(inner.norm.register_forward_hook(keep("hidden.final")))
    out = model(ids[None], labels=labels[None], use_cache=False)
    for h in hooks:
        h.remove()
    return out.logits[0], out.loss


def values(model, seed):
    """All of ``expected.safetensors``."""
    generator = np.random.default_rng(seed)
    found, rows = {}, {}
    for name, length, ignored in (("s7", 7, []), ("s33", 33, [0, 1, 2, 3, 11, 20])):
        ids = generator.integers(1, SIZES["vocab_size"], length).astype(np.int32)
        labels = ids.copy()
        labels[ignored] = -100
        rows[name] = (ids, labels)
        kept = {}
        t = torch.tensor(ids, dtype=torch.long)
        with torch.no_grad():
            logits, loss = forward(
                model, t, torch.tensor(labels, dtype=torch.long), kept
            )
            made, steps = t, []
            for _ in range(12):
                last = model(made[None], use_cache=False).logits[0, -1]
                steps.append(last)
                made = torch.cat([made, last.argmax()[None]])
            cached = model.generate(
                t[None],
                max_new_tokens=12,
                do_sample=False,
                attention_mask=torch.ones_like(t[None]),
            )[0]
        assert cached.tolist() == made.tolist()
        margins = [float(x.topk(2).values.diff().abs()) for x in steps]
        assert min(margins) > 1e-3, margins
        found |= {f"{name}.{k}": v for k, v in kept.items()}
        found |= {
            f"{name}.input_ids": ids,
            f"{name}.labels": labels,
            f"{name}.targets": shifted(labels),
            f"{name}.logits": logits,
            f"{name}.loss": loss,
            f"{name}.generated": made[length:].to(torch.int32),
            f"{name}.generated_logits": torch.stack(steps),
        }
    batch = np.zeros((2, 33), np.int32)
    labels = np.full((2, 33), -100, np.int32)
    mask = np.zeros((2, 33), np.int32)
    for row, (ids, own) in enumerate(rows.values()):
        batch[row, : len(ids)], labels[row, : len(ids)] = ids, own
        mask[row, : len(ids)] = 1
    whole = model(
        torch.tensor(batch, dtype=torch.long),
        attention_mask=torch.tensor(mask),
        labels=torch.tensor(labels, dtype=torch.long),
        use_cache=False,
    )
    whole.loss.backward()
    for row, name in enumerate(rows):
        apart, n = found[f"{name}.logits"], len(rows[name][0])
        assert (whole.logits[row, :n] - apart).abs().max() < 1e-9
    found |= {f"grad.{n}": p.grad for n, p in model.named_parameters()}
    found |= {
        "batch.input_ids": batch,
        "batch.labels": labels,
        "batch.attention_mask": mask,
        "loss": whole.loss,
    }
    for n, x in model.model.rotary_emb.named_buffers():
        if n.endswith("inv_freq") and "original" not in n:
            kind = n.removesuffix("inv_freq").strip("_")
            found[f"rope.inv_freq.{kind}" if kind else "rope.inv_freq"] = x
    return {n: stored(x) for n, x in found.items()}


def stored(x):
    a = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    kind = np.float32 if a.dtype.kind == "f" else np.int32
    return np.array(a, kind, order="C")  # ascontiguousarray would add an axis to none


def older(raw, more):
    """The settings as transformers 4.x wrote them."""
    raw = dict(raw)
    rope = raw.pop("rope_parameters")
    raw["torch_dtype"] = raw.pop("dtype")
    if "full_attention" in rope:
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        raw.pop("layer_types")
    rope = dict(rope)
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    raw["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    return raw | more


def make(name, seed):
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    model = new_model(name, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    old = folder / "config.legacy.json"
    old.write_text(json.dumps(older(raw, MADE[name][2]), indent=2) + "\n")
    again = type(model.config).from_pretrained(str(old))
    for key in ("rope_parameters", "layer_types"):
        if hasattr(model.config, key):
            assert getattr(again, key) == getattr(model.config, key), (name, key)
    with torch.no_grad():
        ids = torch.arange(1, 8)[None]
        narrow = model(ids, use_cache=False).logits
    with Float64():
        model = in_float64(model)
        with torch.no_grad():
            exact = model(ids, use_cache=False).logits
        found = values(model, seed)
    assert exact.dtype == torch.float64
    error = float((exact - narrow).abs().max())
    assert error < 1e-4
    info = {"seed": seed, "f32_logits_maxabs": error, **VERSIONS}
    save_file(found, folder / "expected.safetensors", {"info": json.dumps(info)})
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{name}: {size // 1024} KiB, f32 logits off by {error:.1e}")


if __name__ == "__main__":
    for package, wanted in VERSIONS.items():
        have = sys.modules[package].__version__.partition("+")[0]
        if have != wanted:
            sys.exit(f"{package} is {have}; these fixtures are made with {wanted}")
    for seed, name in enumerate(MADE, start=40):
        if len(sys.argv) < 2 or name in sys.argv[1:]:
            make(name, seed)
