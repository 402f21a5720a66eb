"""How elements of each dtype lie in memory, and the text that reads and writes them.

Values are f32, i32, u32 or bool. In memory a bool is a u32. An f16 is one where the
device has them; else two of them share a word. A vec4 may move as two u64
(`Features.wide_words`).
"""

from __future__ import annotations

from .program import Tensor
from .spelling import WIDTH, wgsl_type
from .target import Features

_ELEMENTS = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "u32", "f16": "f16"}

#: Functions that texts call beside those of `wgsl_math`, in the order of their text.
FUNCTIONS = {
    # The parameter keeps front ends from evaluating a bitcast to infinity.
    "sd_bits": "fn sd_bits(b: u32) -> u32 { return b; }",
    "sd_unpack": (
        "fn sd_unpack(w: vec2<u64>) -> vec4<u32> {\n"
        "  return vec4<u32>(u32(w.x & 0xfffffffflu), u32(w.x >> 32u), u32(w.y & "
        "0xfffffffflu), u32(w.y >> 32u));\n}"
    ),
    "sd_pack": (
        "fn sd_pack(v: vec4<u32>) -> vec2<u64> {\n"
        "  return vec2<u64>(u64(v.x) | (u64(v.y) << 32u), u64(v.z) | (u64(v.w) << "
        "32u));\n}"
    ),
    "sd_half": (
        "fn sd_half(w: u32, i: u32) -> f32 "
        "{ let p = unpack2x16float(w); return select(p.x, p.y, (i & 1u) == 1u); }"
    ),
    "sd_half4": (
        "fn sd_half4(w: vec2<u32>) -> vec4<f32> "
        "{ return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }"
    ),
}


def array_type(tensor: Tensor, vector: bool, written: bool, features: Features) -> str:
    """The type of an element (a vec4) of a tensor's buffer."""
    if is_packed(tensor, features):
        return "vec2<u32>" if vector else "atomic<u32>" if written else "u32"
    if vector and _wide(tensor, features):
        return "vec2<u64>"
    element = _ELEMENTS[tensor.dtype]
    return f"vec{WIDTH}<{element}>" if vector else element


def element(tensor: Tensor, buffer: str, at: str, features: Features) -> str:
    """The value of one element."""
    if is_packed(tensor, features):
        return f"sd_half({buffer}[({at}) >> 1u], {at})"
    return widened(tensor, f"{buffer}[{at}]", False, features)


def widened(tensor: Tensor, text: str, vector: bool, features: Features) -> str:
    """The value of what lies in memory, an element or a vec4."""
    if vector and _wide(tensor, features):
        text = f"sd_unpack({text})"
        if tensor.dtype not in ("u32", "bool"):
            text = f"bitcast<{wgsl_type(tensor.dtype, True)}>({text})"
    if tensor.dtype == "bool":
        return f"({text} != {'vec4<u32>(0u)' if vector else '0u'})"
    if tensor.dtype == "f16":
        if features.f16:
            return f"{wgsl_type('f32', vector)}({text})"
        if vector:
            return f"sd_half4({text})"
    return text


def narrowed(tensor: Tensor, value: str, vector: bool, features: Features) -> str:
    """A value as it lies in memory, an element or a vec4."""
    if tensor.dtype == "bool":
        value = (
            f"select(vec4<u32>(0u), vec4<u32>(1u), {value})"
            if vector
            else f"select(0u, 1u, {value})"
        )
    if vector and _wide(tensor, features):
        words = tensor.dtype in ("u32", "bool")
        return f"sd_pack({value if words else f'bitcast<vec4<u32>>({value})'})"
    if tensor.dtype == "f16":
        if features.f16:
            return f"{'vec4<f16>' if vector else 'f16'}({value})"
        return f"vec2<u32>(pack2x16float({value}.xy), pack2x16float({value}.zw))"
    return value


def stored(
    tensor: Tensor, buffer: str, at: str, value: str, features: Features
) -> list[str]:
    """The statements that write one element; ``at`` is a name where words are shared
    (`is_packed`).
    """
    if not is_packed(tensor, features):
        return [f"{buffer}[{at}] = {narrowed(tensor, value, False, features)};"]
    word = f"&{buffer}[{at} >> 1u]"
    return [
        f"atomicAnd({word}, select(0xffff0000u, 0x0000ffffu, ({at} & 1u) == 1u));",
        f"atomicOr({word}, pack2x16float(vec2<f32>({value}, 0.0)) << (16u * "
        f"({at} & 1u)));",
    ]


def is_packed(tensor: Tensor, features: Features) -> bool:
    """Whether two elements share a word, which is written with atomics."""
    return tensor.dtype == "f16" and not features.f16


def _wide(tensor: Tensor, features: Features) -> bool:
    """Whether a vec4 moves as two u64."""
    return features.wide_words and tensor.dtype != "f16"
