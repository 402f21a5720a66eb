"""The decoder-only transformer that a configuration describes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from .. import ops
from ..array import Array, asarray
from ..errors import ShapeError
from ..function import remat as again
from ..ids import trusted
from ..ir import expr as E
from ..namespace import tanh
from .attention import Attention
from .cache import KVCache
from .config import TransformerConfig
from .inputs import check_ids, row_documents, row_positions
from .layers import MLP, Embedding, GatedMLP, LayerNorm, Linear, RMSNorm
from .module import Module, static
from .rotary import RotaryEmbedding, check_positions, positions

__all__ = ["Block", "Transformer", "build"]

#: gives the array of a parameter: (attribute path, shape, role) → array
Make = Callable[[str, tuple[int, ...], str], Any]


class Block(Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)).

    Gemma's post-norms, where there are such, act on what is added.
    """

    norm1: RMSNorm | LayerNorm
    self_attn: Attention
    norm2: RMSNorm | LayerNorm
    mlp: GatedMLP | MLP
    post_norm1: RMSNorm | LayerNorm | None = None
    post_norm2: RMSNorm | LayerNorm | None = None

    def __call__(
        self,
        x: Any,
        *,
        start: Any = 0,
        cached: tuple[Array, Array] | None = None,
        documents: Any = None,
        others: Any = None,
        positions: Any = None,
        first: Any = None,
    ) -> Any:
        """x ``[dim]``, ``[t, dim]`` or ``[b, t, dim]``; options as of Attention."""
        x = asarray(x)
        kept: tuple[Array, ...] = ()
        y = self.self_attn(
            self.norm1(x),
            start=start,
            cached=cached,
            documents=documents,
            others=others,
            positions=positions,
            first=first,
        )
        if cached is not None:
            y, *kept = y
        x = x + (y if self.post_norm1 is None else self.post_norm1(y))
        y = self.mlp(self.norm2(x))
        x = x + (y if self.post_norm2 is None else self.post_norm2(y))
        return x if cached is None else (x, *kept)


class Transformer(Module):
    """Embedding, blocks, final norm, head; the head is the embedding where it is tied.

    Example:
        >>> model = sd.nn.Transformer.init(config, seed=0)
        >>> logits = model(ids)  # ids [t] or [b, t] → [..., t, vocab]
    """

    embed_tokens: Embedding
    layers: tuple[Block, ...]
    norm: RMSNorm | LayerNorm
    lm_head: Linear | None = None
    embed_positions: Embedding | None = None
    _: KW_ONLY
    config: TransformerConfig = static()

    @classmethod
    def init(cls, config: TransformerConfig, *, seed: int = 0) -> Transformer:
        """Random weights from the host; each depends on the seed and its name alone.

        Matrices are normal with variance 1 / inputs, those that write to the residual
        stream smaller by √(2 · layers); embeddings have deviation 0.02.
        """

        def make(path: str, shape: tuple[int, ...], role: str) -> Array:
            if role in ("bias", "shift"):
                return asarray(np.zeros(shape, np.float32))
            if role == "norm":
                return asarray(np.ones(shape, np.float32))
            generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
            deviation = 0.02 if role == "embedding" else shape[-1] ** -0.5
            if role == "residual":
                deviation /= (2 * config.num_layers) ** 0.5
            drawn = generator.standard_normal(shape, np.float32)
            return asarray(drawn * np.float32(deviation))

        return build(config, make)

    def __call__(
        self,
        ids: Any,
        *,
        cache: KVCache | None = None,
        mask: Any = None,
        documents: Any = None,
        positions: Any = None,
        remat: bool = False,
    ) -> Array:
        """Logits ``[…, t, vocab]`` of ids ``[t]`` or ``[b, t]``, i32 or u32.

        Args:
            cache: keys and values of the tokens before these, which take these in.
            mask: 1 (or true) for tokens, 0 for padding on either side: nothing sees
                padding, and positions count tokens only. Of the ids' shape or ``[t]``.
            documents: which document each token is of, where several are packed into a
                row, i32 ≥ 0 of the ids' shape or ``[t]``: a token sees its own, and
                positions start anew in each. What a cache is given later without
                documents goes on with the last one of its row.
            positions: i32 of the ids' shape or ``[t]``, in place of those.
            remat: the backward pass computes each block again and keeps its input only.

        Raises:
            IndexRangeError: ids or positions out of range, a cache without room.
            ShapeError: ids of another rank, or of another batch than the cache.
        """
        ids = check_ids(ids)
        if cache is not None:
            if positions is not None:
                raise ShapeError("a cache takes no positions", where=E.user_location())
            segments = row_documents(ids, mask, documents)
            return cache.run(self, ids, documents=segments)
        return self.head(
            self.hidden(
                ids, mask=mask, documents=documents, positions=positions, remat=remat
            )
        )

    def embed(self, ids: Any, start: Any = 0, at: Any = None) -> Array:
        """What the first block reads, ``[…, t, hidden]``; ``at`` are positions."""
        ids = asarray(ids)
        x = self.embed_tokens(ids)
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        if self.embed_positions is not None:
            limit, length = self.config.max_positions, ids.shape[-1]
            if at is None:
                check_positions(start, length, limit)
                at = positions(length, start, limit)
            with trusted():  # whoever gives positions has them looked at
                x = x + self.embed_positions(at)
        return x

    def hidden(
        self,
        ids: Any,
        *,
        mask: Any = None,
        documents: Any = None,
        positions: Any = None,
        remat: bool = False,
    ) -> Array:
        """What the head multiplies, ``[…, t, hidden]``: after the final norm."""
        ids = check_ids(ids)
        segments = row_documents(ids, mask, documents)
        at = row_positions(self.config, ids, segments, positions)
        x = self.embed(ids, at=at)
        with trusted():  # no layer reads at other ids than these positions
            for block in self.layers:
                run = again(block) if remat else block
                x = run(x, documents=segments, positions=at)
        return self.norm(x)

    def head(self, x: Array) -> Array:
        """Logits of rows after the final norm."""
        y: Array
        if self.lm_head is not None:
            y = self.lm_head(x)
        else:
            y = ops.linear(x, self.embed_tokens.weight)
        cap = self.config.final_soft_cap
        return y if cap is None else cap * tanh(y / cap)

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``capacity`` positions."""
        c = self.config
        return KVCache(
            layers=c.num_layers,
            batch=batch,
            heads=c.num_kv_heads or c.num_heads,
            capacity=c.max_positions if capacity is None else capacity,
            head_dim=c.head_dim or 0,
        )

    def generate(self, ids: Any, **options: Any) -> np.ndarray:
        """The prompt and what follows it; see :func:`shaderdsl.nn.generate`."""
        from .decoding import generate

        return generate(self, ids, **options)


def build(config: TransformerConfig, make: Make) -> Transformer:
    """The model with arrays from ``make(path, shape, role)``.

    Roles: ``linear``, ``residual`` (a matrix that writes to the residual stream),
    ``embedding``, ``norm``, ``shift`` (a norm's weight that 1 is added to), ``bias``.
    """
    c = config
    width, head_dim = c.hidden_size, c.head_dim or 0
    kv_heads = c.num_kv_heads or c.num_heads

    def linear(
        path: str, rows: int, columns: int, bias: bool, role: str = "linear"
    ) -> Linear:
        weight = make(f"{path}.weight", (rows, columns), role)
        return Linear(weight, make(f"{path}.bias", (rows,), "bias") if bias else None)

    def norm(path: str, size: int = width) -> RMSNorm | LayerNorm:
        role = "shift" if c.norm_shift else "norm"
        weight = make(f"{path}.weight", (size,), role)
        if c.norm == "layer":
            bias = make(f"{path}.bias", (size,), "bias")
            return LayerNorm(weight, bias, eps=c.norm_eps)
        return RMSNorm(weight, eps=c.norm_eps, shift=c.norm_shift)

    def attention(path: str, layer: int) -> Attention:
        rotary = None
        if c.positions == "rotary":
            rotary = RotaryEmbedding(
                dim=c.rotary_dim or head_dim,
                head_dim=head_dim,
                theta=c.theta(layer),
                max_positions=c.max_positions,
                layout=c.rope_layout,
                scaling=c.scaling(layer),
            )
        size, kv_size = c.num_heads * head_dim, kv_heads * head_dim
        parts = 2 if c.gated else 1
        return Attention(
            linear(f"{path}.q_proj", size * parts, width, c.qkv_bias),
            linear(f"{path}.k_proj", kv_size, width, c.qkv_bias),
            linear(f"{path}.v_proj", kv_size, width, c.qkv_bias),
            linear(f"{path}.o_proj", width, size, c.o_bias, "residual"),
            norm(f"{path}.q_norm", head_dim) if c.qk_norm else None,  # type: ignore[arg-type]
            norm(f"{path}.k_norm", head_dim) if c.qk_norm else None,  # type: ignore[arg-type]
            num_heads=c.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary=rotary,
            gated=c.gated,
            scale=c.attention_scale,
            window=c.window(layer),
            soft_cap=c.soft_cap,
            alibi=c.positions == "alibi",
        )

    def mlp(path: str) -> GatedMLP | MLP:
        up = linear(f"{path}.up_proj", c.ffn_size, width, c.mlp_bias)
        down = linear(f"{path}.down_proj", width, c.ffn_size, c.mlp_bias, "residual")
        if c.mlp == "plain":
            return MLP(up, down, activation=c.activation)
        gate = linear(f"{path}.gate_proj", c.ffn_size, width, c.mlp_bias)
        return GatedMLP(gate, up, down, activation=c.activation)

    def block(layer: int) -> Block:
        path = f"layers.{layer}"
        return Block(
            norm(f"{path}.norm1"),
            attention(f"{path}.self_attn", layer),
            norm(f"{path}.norm2"),
            mlp(f"{path}.mlp"),
            norm(f"{path}.post_norm1") if c.post_norms else None,
            norm(f"{path}.post_norm2") if c.post_norms else None,
        )

    table = (c.vocab_size, width)
    learned = c.positions == "learned"
    places = (c.max_positions, width)
    blocks: Sequence[Block] = [block(i) for i in range(c.num_layers)]
    return Transformer(
        Embedding(make("embed_tokens.weight", table, "embedding")),
        tuple(blocks),
        norm("norm"),
        None if c.tied_head else Linear(make("lm_head.weight", table, "linear")),
        Embedding(make("embed_positions.weight", places, "embedding"))
        if learned
        else None,
        config=c,
    )
