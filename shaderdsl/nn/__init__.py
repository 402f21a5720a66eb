"""Layers and models made of ops; none has a derivative of its own."""

from __future__ import annotations

from ..ops.loss import cross_entropy
from . import lora
from .attention import Attention
from .cache import KVCache
from .config import TransformerConfig
from .decoding import generate, stream
from .layers import MLP, Embedding, GatedMLP, GeGLU, LayerNorm, Linear, RMSNorm, SwiGLU
from .module import Module, combine, named_arrays, partition, static
from .rotary import RopeScaling, RotaryEmbedding
from .storage import load, save, state_dict
from .transformer import Block, Transformer

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "GatedMLP",
    "GeGLU",
    "KVCache",
    "LayerNorm",
    "Linear",
    "Module",
    "RMSNorm",
    "RopeScaling",
    "RotaryEmbedding",
    "SwiGLU",
    "Transformer",
    "TransformerConfig",
    "combine",
    "cross_entropy",
    "generate",
    "load",
    "lora",
    "named_arrays",
    "partition",
    "save",
    "state_dict",
    "static",
    "stream",
]
