"""Under which names Hugging Face's files store our parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import CheckpointError

__all__ = ["GEMMA", "GPT2", "LLAMA", "Entry", "Names", "entries"]

#: (pattern of our path, stored name, whether its matrices are stored [in, out])
Row = tuple[str, str, bool]


@dataclass(frozen=True)
class Entry:
    """A stored tensor: our parameters end to end along their first axis.

    ``transposed``: it is stored ``[in, out]``.
    """

    name: str
    paths: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """How one kind of model calls its tensors.

    ``fused`` are stored tensors that hold several of ours: patterns of each, then as in
    ``rows``. ``prefix`` is the first part of names, which base models are saved
    without. ``ignored`` matches stored tensors that mean nothing to us.
    """

    rows: tuple[Row, ...]
    fused: tuple[tuple[tuple[str, ...], str, bool], ...] = ()
    prefix: str = "model."
    ignored: str = r".*\.rotary_emb\.inv_freq"


_LLAMA: tuple[Row, ...] = (
    (r"embed_tokens\.(.*)", r"model.embed_tokens.\1", False),
    (r"norm\.(.*)", r"model.norm.\1", False),
    (r"lm_head\.(.*)", r"lm_head.\1", False),
    (r"layers\.(\d+)\.norm1\.(.*)", r"model.layers.\1.input_layernorm.\2", False),
    (
        r"layers\.(\d+)\.norm2\.(.*)",
        r"model.layers.\1.post_attention_layernorm.\2",
        False,
    ),
    (r"layers\.(\d+)\.(self_attn|mlp)\.(.*)", r"model.layers.\1.\2.\3", False),
)
_GEMMA: tuple[Row, ...] = (
    *(
        (rf"layers\.(\d+)\.{ours}\.(.*)", rf"model.layers.\1.{theirs}.\2", False)
        for ours, theirs in (
            ("post_norm1", "post_attention_layernorm"),
            ("norm2", "pre_feedforward_layernorm"),
            ("post_norm2", "post_feedforward_layernorm"),
        )
    ),
    *(row for row in _LLAMA if "norm2" not in row[0]),
)
_GPT2: tuple[Row, ...] = (
    (r"embed_tokens\.(.*)", r"transformer.wte.\1", False),
    (r"embed_positions\.(.*)", r"transformer.wpe.\1", False),
    (r"norm\.(.*)", r"transformer.ln_f.\1", False),
    (r"lm_head\.(.*)", r"lm_head.\1", False),
    (r"layers\.(\d+)\.norm([12])\.(.*)", r"transformer.h.\1.ln_\2.\3", False),
    (
        r"layers\.(\d+)\.self_attn\.o_proj\.(.*)",
        r"transformer.h.\1.attn.c_proj.\2",
        True,
    ),
    (r"layers\.(\d+)\.mlp\.up_proj\.(.*)", r"transformer.h.\1.mlp.c_fc.\2", True),
    (r"layers\.(\d+)\.mlp\.down_proj\.(.*)", r"transformer.h.\1.mlp.c_proj.\2", True),
)
_GPT2_FUSED = (
    (
        tuple(rf"layers\.(\d+)\.self_attn\.{p}_proj\.(.*)" for p in "qkv"),
        r"transformer.h.\1.attn.c_attn.\2",
        True,
    ),
)
LLAMA = Names(_LLAMA)
GEMMA = Names(_GEMMA)
GPT2 = Names(_GPT2, _GPT2_FUSED, "transformer.", r".*\.attn\.(masked_)?bias")


def entries(names: Names, paths: Iterable[str]) -> list[Entry]:
    """The stored tensors that hold these parameters.

    Raises:
        CheckpointError: a parameter that this kind of model has no place for.
    """
    found: dict[str, Entry] = {}
    for path in paths:
        name, transposed = _stored(names, path)
        before = found[name].paths if name in found else ()
        found[name] = Entry(name, (*before, path), transposed)
    return list(found.values())


def _stored(names: Names, path: str) -> tuple[str, bool]:
    rows = [(p, n, t) for ps, n, t in names.fused for p in ps] + list(names.rows)
    for pattern, name, transposed in rows:
        if match := re.fullmatch(pattern, path):
            return match.expand(name), transposed and path.endswith(".weight")
    raise CheckpointError(
        f"a model of this family has no place for {path}",
        cure="choose a family that stores it, for instance family='qwen3'",
    )
