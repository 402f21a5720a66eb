"""Every op with its reference and what may be drawn for it.

Tests, documentation and golden files walk this table, so a new row is tested and shown
without another line of code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..op import Op
from . import (
    adamw_update,
    attention,
    attention_alibi,
    attention_gated,
    attention_lse,
    attention_masked,
    cross_entropy_rows,
    embedding,
    geglu,
    gelu,
    layer_norm,
    linear,
    linear_bias,
    linear_cross_entropy_rows,
    log_softmax,
    rms_norm,
    rms_norm_shifted,
    rope_halved,
    rope_interleaved,
    sgd_update,
    silu,
    softmax,
    softplus,
    swiglu,
)
from . import references as R

#: Kinds of values (see ``shaderdsl.testing``) that an op takes without overflow.
SMOOTH = ("ordinary", "tiny", "huge", "zeros", "ties")


@dataclass(frozen=True)
class Entry:
    """One op of the registry.

    Attributes:
        op: the op.
        reference: the same in NumPy, given arrays and the options by keyword.
        sizes: sizes of axes for documentation and golden files.
        options: choices for each keyword option that tests draw.
        ids: integer operands → the axis that they index, and a value out of range
            that is allowed as well, or None.
        bools: operands that are masks.
        positive: operands that are drawn greater than 0.
        nonempty: axes that cannot have size 0.
        kinds: the values that it takes.
        smooth: whether gradients exist everywhere that tests draw.
    """

    op: Op
    reference: Callable[..., Any]
    sizes: Mapping[str, int]
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ids: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    bools: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    nonempty: tuple[str, ...] = ()
    kinds: tuple[str, ...] = SMOOTH
    smooth: bool = True

    @property
    def name(self) -> str:
        """The op's name."""
        return self.op.name


_HEADS = {"...": 2, "h": 2, "g": 2, "t": 5, "s": 7, "d": 8, "c": 8}
_SEEN: dict[str, tuple[Any, ...]] = {
    "causal": (True, False),
    "window": (None, 1, 3),
    "scale": (None, 0.3),
}
_ATTENTION: dict[str, Any] = {
    "sizes": _HEADS,
    "nonempty": ("s", "d"),
    "kinds": ("ordinary", "tiny", "zeros"),
}

_ENTRIES = (
    Entry(silu, R.silu, {"...": 64}, kinds=(*SMOOTH, "infinite", "nan")),
    Entry(gelu, R.gelu, {"...": 64}, {"approximate": ("none", "tanh")}),
    Entry(softplus, R.softplus, {"...": 64}, kinds=(*SMOOTH, "infinite", "nan")),
    Entry(swiglu, R.swiglu, {"...": 64}),
    Entry(geglu, R.geglu, {"...": 64}, {"approximate": ("none", "tanh")}),
    Entry(
        rms_norm,
        R.rms_norm,
        {"...": 4, "d": 16},
        {"eps": (1e-6, 1e-3)},
        nonempty=("d",),
    ),
    Entry(
        rms_norm_shifted,
        R.rms_norm_shifted,
        {"...": 4, "d": 16},
        {"eps": (1e-6, 1e-3)},
        nonempty=("d",),
    ),
    Entry(
        layer_norm,
        R.layer_norm,
        {"...": 4, "d": 16},
        {"eps": (1e-5, 1e-3)},
        nonempty=("d",),
    ),
    Entry(softmax, R.softmax, {"...": 4, "d": 16}, nonempty=("d",)),
    Entry(log_softmax, R.log_softmax, {"...": 4, "d": 16}, nonempty=("d",)),
    Entry(linear, R.linear, {"...": 4, "k": 8, "n": 16}),
    Entry(linear_bias, R.linear, {"...": 4, "k": 8, "n": 16}),
    Entry(rope_halved, R.rope_halved, {"...": 2, "t": 5, "h": 2, "p": 4}),
    Entry(rope_interleaved, R.rope_interleaved, {"...": 2, "t": 5, "h": 2, "p": 4}),
    Entry(
        embedding,
        R.embedding,
        {"v": 11, "d": 8, "...": 6},
        ids={"ids": ("v", None)},
        nonempty=("v",),
    ),
    Entry(
        cross_entropy_rows,
        R.cross_entropy_rows,
        {"...": 6, "v": 11},
        {"ignore_index": (-100,)},
        ids={"labels": ("v", -100)},
        nonempty=("v",),
    ),
    Entry(
        linear_cross_entropy_rows,
        R.linear_cross_entropy_rows,
        {"...": 6, "k": 8, "v": 11},
        {"ignore_index": (-100,), "softcap": (None, 2.0)},
        ids={"labels": ("v", -100)},
        nonempty=("v",),
        kinds=("ordinary", "tiny", "zeros"),
    ),
    Entry(
        attention,
        R.attention,
        options={**_SEEN, "softcap": (None, 2.0)},
        **_ATTENTION,
    ),
    Entry(
        attention_lse,
        R.attention_lse,
        options={"causal": (True, False)},
        smooth=False,
        **_ATTENTION,
    ),
    Entry(attention_alibi, R.attention_alibi, options=_SEEN, **_ATTENTION),
    Entry(attention_gated, R.attention_gated, options=_SEEN, **_ATTENTION),
    Entry(
        attention_masked,
        R.attention_masked,
        options=_SEEN,
        bools=("mask",),
        **_ATTENTION,
    ),
    Entry(
        adamw_update,
        R.adamw_update,
        {"...": 64},
        {"weight_decay": (0.0, 0.1), "beta1": (0.9,)},
        positive=("v", "correction1", "correction2"),
        kinds=("ordinary",),
    ),
    Entry(
        sgd_update,
        R.sgd_update,
        {"...": 64},
        {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)},
        kinds=("ordinary", "zeros"),
    ),
)

REGISTRY: dict[str, Entry] = {e.name: e for e in _ENTRIES}
