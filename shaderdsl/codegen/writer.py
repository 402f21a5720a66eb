"""The WGSL writer: expressions to straight-line text, each value in the outermost block
that knows its axes.

A schedule opens blocks (a workgroup's rows, a lane's elements), names the axes that
each block fixes and asks for values. Common subexpressions and loop-invariant code fall
out: a node is written once, where its last axis becomes known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CompilerError
from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import interval
from ..ir.primitives import PRIMITIVES
from ..ir.stage import Stage
from ..ir.wgsl_math import helper_source, used_helpers
from .address import Address, Key, Term, load_address
from .program import Binding, Param, Scratch, Tensor
from .target import Target

WIDTH = 4
_TYPES = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "bool", "f16": "f16"}
_MEMORY = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "u32", "f16": "f16"}


def wgsl_type(dtype: str, vector: bool = False) -> str:
    """The type of a value."""
    dtype = "f32" if dtype == "f16" else dtype
    return f"vec{WIDTH}<{_TYPES[dtype]}>" if vector else _TYPES[dtype]


def literal(value: bool | int | float, dtype: str) -> str | None:
    """A number as WGSL text, or None when no literal exists (infinities, NaN)."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "i32":
        return (
            "i32(-2147483648)"
            if value == -(2**31)
            else f"({value})"
            if value < 0
            else str(value)
        )
    if dtype == "u32":
        return f"{value}u"
    with np.errstate(over="ignore"):  # beyond the range it is infinite
        single = np.float32(value)
    if not math.isfinite(single):
        return None
    text = repr(float(str(single)))
    return f"({text})" if text.startswith("-") else text


class _Bound:
    """How one tensor is bound: its name in the text, whether as vec4, and how it is
    used.
    """

    def __init__(self, name: str, vector: bool):
        self.name, self.vector, self.write = name, vector, False


class Writer:
    """Collects the text of one kernel.

    Args:
        space: extents of the kernel's axes.
        vector: the axis that a vec4 runs along, if any; its variable counts vec4s.
        scalars: tensors that must not be bound as vec4, since some access cannot.
    """

    def __init__(self, space: Sequence[int], target: Target, vector: int | None = None):
        self.space, self.target, self.vector = list(space), target, vector
        self.names: dict[int, str] = {}
        self.depth: dict[int, int] = {}
        self.base = 0
        self.blocks: list[list[str]] = [[]]
        self.memo: list[dict[Any, str]] = [{}]
        self.local: dict[Expr, str] = {}
        self.bound: dict[Tensor, _Bound] = {}
        self.params: dict[Key, tuple[str, Param]] = {}
        self.shared: list[str] = []
        self.addresses: dict[Expr, Address] = {}
        self.plain: set[Tensor] = set()
        # Tensors bound as vec4 of which single elements are read too.
        self.parts: set[Stage] = set()
        self.uses_subgroups = False
        # Whether the last vec4 along the vector axis reaches beyond its end: elements
        # there repeat the last one.
        self.ragged = False
        # Stages that are computed where they are read: what writes such a read.
        self.virtual: dict[Stage, Callable[[Expr, int], str]] = {}
        # Primitives that a schedule spells otherwise than the table does.
        self.spellings: dict[str, str] = {}
        self._counter = 0

    # -------------------------------------------------------------- blocks

    def open(self) -> None:
        """Begin an inner block."""
        self.blocks.append([])
        self.memo.append({})

    def close(self) -> list[str]:
        """End the innermost block and give its lines."""
        self.memo.pop()
        return self.blocks.pop()

    def loop(self, header: str) -> None:
        """End the innermost block as the body of a loop in the block around it."""
        body = self.close()
        self.line(f"{header} {{")
        self.blocks[-1] += [*indent(body), "}"]

    def line(self, text: str, depth: int | None = None) -> None:
        """A line of the innermost (or of a given) block."""
        self.blocks[-1 if depth is None else depth].append(text)

    def fresh(self, stem: str = "t") -> str:
        """A new name."""
        self._counter += 1
        if stem in "iuf" and self._counter in (8, 16, 32, 64):  # the name of a type
            self._counter += 1
        return f"{stem}{self._counter}"

    def let(self, text: str, depth: int, stem: str = "t") -> str:
        """Name a value in a block."""
        name = self.fresh(stem)
        self.blocks[depth].append(f"let {name} = {text};")
        return name

    def axis(self, a: int, name: str, depth: int | None = None) -> None:
        """Say that the variable ``name`` (u32) is the position along an axis, known
        from a block on.
        """
        self.names[a] = name
        self.depth[a] = len(self.blocks) - 1 if depth is None else depth

    def level(self, mask: int) -> int:
        """The block in which all these axes are known."""
        return max([self.base, *(self.depth[a] for a in E.bits(mask))])

    # -------------------------------------------------------------- parameters and
    # bindings

    def param(
        self,
        key: Key,
        value: int | float | tuple[str, str],
        dtype: str = "u32",
        stem: str = "n",
    ) -> str:
        """A word of the parameter block."""
        if key not in self.params:
            name = f"{stem}{len(self.params)}"
            self.params[key] = (name, Param(value, dtype))
        return "P." + self.params[key][0]

    def extent(self, axes: Iterable[int], divide: int = 1) -> str:
        """The product of extents, as a parameter (divided by the vector width where
        asked).
        """
        group = tuple(sorted(axes))
        value = math.prod(self.space[a] for a in group)
        if not group:
            return "1u"
        return self.param(
            ("axes", group) if divide == 1 else ("axes", group, divide),
            -(-value // divide),
        )

    def binding(
        self, tensor: Tensor, vector: bool, write: bool, label: str | None = None
    ) -> str:
        """The name of a tensor's buffer."""
        b = self.bound.get(tensor)
        if b is None:
            stem = re.sub(r"\W", "_", label or tensor.name).strip("_") or "t"
            if not re.match("[A-Za-z]", stem):
                stem = "t" + stem
            b = self.bound[tensor] = _Bound(f"{stem}_{len(self.bound)}", vector)
        if b.vector != vector:
            raise CompilerError(f"{tensor.name} is bound both as vec4 and as scalars")
        b.write |= write
        return b.name

    # -------------------------------------------------------------- addresses

    def address(self, form: Address, divide: int = 1) -> str:
        """The text of an element offset, in vec4s when ``divide`` is their width."""
        terms = sorted(
            form.terms,
            key=lambda t: self.level(
                1 << t.what if isinstance(t.what, int) else t.what.free
            ),
        )
        current: str | None = None
        path: tuple[Any, ...] = (divide,)
        depth = self.base
        if form.const:
            current = self._offset(form.const // divide)
            path += (form.const,)
        for t in terms:
            if isinstance(t.what, int) and t.what not in self.names:
                continue  # merged into an inner axis
            text, level = self._term(t, divide)
            depth = max(depth, level)
            path += ((t.key, t.what),)
            memo = self.memo[depth]
            if path not in memo:
                if current is None and re.fullmatch(r"\w+", text):
                    memo[path] = text
                else:
                    memo[path] = self.let(
                        text if current is None else f"{current} + {text}", depth, "a"
                    )
            current = memo[path]
        return current or "0u"

    def _offset(self, value: int) -> str:
        if 0 <= value <= 2:
            return f"{value}u"
        return self.param(("offset", len(self.params)), value % 2**32, stem="offset")

    def _term(self, t: Term, divide: int) -> tuple[str, int]:
        if isinstance(t.what, int):
            name, level = self.names[t.what], self.depth[t.what]
            c = (
                t.coefficient
                if t.what == self.vector and divide > 1
                else t.coefficient // divide
            )
        else:
            name, level = self.value(t.what), self.level(t.what.free)
            name = name if t.what.dtype == "u32" else f"u32({name})"
            c = t.coefficient // divide
        if c == 1:
            return name, level
        key = t.key if divide == 1 else (*t.key, divide)
        return f"{name} * {self.param(key, c % 2**32, stem='s')}", level

    # -------------------------------------------------------------- values

    def is_vector(self, n: Expr) -> bool:
        """Whether a value is a vec4."""
        return self.vector is not None and bool(n.free >> self.vector & 1)

    def find(self, n: Expr) -> str | None:
        """The name of a value that is already written and still in scope."""
        for m in reversed(self.memo):
            name: str | None = m.get(n)
            if name is not None:
                return name
        return None

    def value(self, root: Expr) -> str:
        """The name (or literal) of a value; writes what is missing."""
        found = self.find(root)
        if found is not None:
            return found
        for n in E.topo(root, into=lambda n: n.kind != "load" and self.find(n) is None):
            if self.find(n) is None:
                level = self.level(n.free)
                self.memo[level][n] = self._write(n, level)
        found = self.find(root)
        assert found is not None
        return found

    def splat(self, n: Expr) -> str:
        """A value as a vec4, whatever it is."""
        v = self.value(n)
        return v if self.is_vector(n) else f"{wgsl_type(n.dtype, True)}({v})"

    def _write(self, n: Expr, level: int) -> str:
        if n.kind == "const":
            return self._const(n, level)
        if n.kind == "size":
            if n.dtype == "i32" and 0 <= n.data <= 1:
                return str(n.data)
            return self.param(
                ("size", n), n.data, n.dtype, "size" if n.dtype == "i32" else "c"
            )
        if n.kind == "scalar":
            key: Key = ("scalar", n.data)
            if key not in self.params:
                self.params[key] = (
                    re.sub(r"\W", "_", n.data) + "_",
                    Param(("scalar", n.data), n.dtype),
                )
            return "P." + self.params[key][0]
        if n.kind == "index":
            name = self.names[n.data]
            if self.is_vector(n):
                text = f"vec4<i32>(i32({name}) * 4) + vec4<i32>(0, 1, 2, 3)"
                if self.ragged:
                    text = f"min({text}, vec4<i32>({self.space[n.data] - 1}))"
                return self.let(text, level, "i")
            return self.let(f"i32({name})", level, "i")
        if n.kind == "load":
            return self._load(n, level)
        return self._apply(n, level)

    def _const(self, n: Expr, level: int) -> str:
        if n.dtype == "i32" and abs(n.data) > 2:
            # Sizes hide in integer constants; as parameters they keep the text the
            # same.
            return self.param(("const", n), n.data, "i32", "c")
        text = literal(n.data, n.dtype)
        if text is not None:
            return text
        if math.isnan(n.data):
            return self.let("bitcast<f32>(sd_bits(0x7fc00000u))", level, "nan")
        sign = "0xff800000u" if n.data < 0 else "0x7f800000u"
        return self.let(f"bitcast<f32>(sd_bits({sign}))", level, "inf")

    def _load(self, n: Expr, level: int) -> str:
        if n in self.local:
            return self.local[n]
        stage: Stage = n.data
        if stage in self.virtual:
            return self.virtual[stage](n, level)
        form = self.addresses.get(n)
        if form is None:
            form = self.addresses[n] = load_address(n, self.space)
        vector = self.is_vector(n)
        as_vector = vector and self._whole(stage, form)
        if not vector and stage in self.parts and stage not in self.plain:
            buffer = self.binding(stage, True, False, n.label)
            at = self.let(self.address(form), level, "a")
            text = self._widen(stage, f"{buffer}[{at} >> 2u]", True)
            return self.let(f"{text}[{at} & 3u]", level, "x")
        buffer = self.binding(stage, as_vector, False, n.label)
        if as_vector:
            text = self._widen(stage, f"{buffer}[{self.address(form, WIDTH)}]", True)
            return self.let(text, level, "x")
        if not vector:
            return self.let(
                self._element(stage, buffer, self.address(form)), level, "x"
            )
        parts = [self._element(stage, buffer, a) for a in self.lane_addresses(form)]
        return self.let(
            f"{wgsl_type(stage.dtype, True)}({', '.join(parts)})", level, "x"
        )

    def _whole(self, tensor: Tensor, form: Address) -> bool:
        """Whether an access along the vector axis moves a vec4 at once."""
        if self.ragged or tensor in self.plain:
            return False
        return contiguous(form, self.vector)

    def _lane(self, k: int) -> str:
        """The position of an element of a vec4 along the vector axis."""
        assert self.vector is not None
        at = f"{self.names[self.vector]} * 4u + {k}u"
        if self.ragged:
            return f"min({at}, {self.space[self.vector] - 1}u)"
        return f"({at})"

    def lane_addresses(self, form: Address) -> list[str]:
        """Offsets of the four elements of a vec4 that are not neighbours in memory."""
        assert self.vector is not None
        v = self.vector
        depth = self.depth[v]
        if not form.rest_free() >> v & 1:
            c = form.coefficient(v)
            base = Address(tuple(t for t in form.terms if t.what != v), form.const)
            start = self.address(base)
            if c == 0:  # the axis cancels: an index that reads it at one place only
                return [start] * WIDTH
            step = (
                self.param(
                    next(t.key for t in form.terms if t.what == v), c % 2**32, stem="s"
                )
                if c != 1
                else None
            )
            at = []
            for k in range(WIDTH):
                lane = self._lane(k)
                at.append(f"{start} + {lane}" + (f" * {step}" if step else ""))
            return at
        whole: list[str] = []
        parts: list[str] = [""] * WIDTH
        for t in form.terms:
            if isinstance(t.what, int) and t.what != v:
                if t.what in self.names:
                    text, level = self._term(t, 1)
                    whole.append(text)
                    depth = max(depth, level)
            else:
                name = "" if isinstance(t.what, int) else self.value(t.what)
                scale = (
                    ""
                    if t.coefficient == 1
                    else f" * {self.param(t.key, t.coefficient % 2**32, stem='s')}"
                )
                for k in range(WIDTH):
                    if isinstance(t.what, int):
                        parts[k] += f" + {self._lane(k)}{scale}"
                    else:
                        lane = f"{name}.{'xyzw'[k]}" if self.is_vector(t.what) else name
                        parts[k] += f" + u32({lane}){scale}"
        if form.const:
            whole.append(self._offset(form.const))
        start = self.let(" + ".join(whole), depth, "a") if whole else "0u"
        return [start + p for p in parts]

    def _element(self, tensor: Tensor, buffer: str, at: str) -> str:
        if tensor.dtype == "f16" and not self.target.features.f16:
            return f"sd_half({buffer}[({at}) >> 1u], {at})"
        return self._widen(tensor, f"{buffer}[{at}]", False)

    def _words(self, tensor: Tensor) -> bool:
        """Whether a vec4 of this tensor moves as two u64."""
        return self.target.features.wide_words and tensor.dtype != "f16"

    def _widen(self, tensor: Tensor, text: str, vector: bool) -> str:
        if vector and self._words(tensor):
            text = f"sd_unpack({text})"
            text = (
                text
                if tensor.dtype in ("u32", "bool")
                else f"bitcast<{wgsl_type(tensor.dtype, True)}>({text})"
            )
        if tensor.dtype == "bool":
            return f"({text} != {'vec4<u32>(0u)' if vector else '0u'})"
        if tensor.dtype == "f16":
            if self.target.features.f16:
                return f"{wgsl_type('f32', vector)}({text})"
            if vector:
                return f"sd_half4({text})"
        return text

    def _apply(self, n: Expr, level: int) -> str:
        vector = self.is_vector(n)
        squared = n.data == "mul" and n.args[0] is n.args[1]
        if squared and n.args[0].kind == "apply" and n.args[0].data == "sqrt":
            # Drivers fold it to |x|, also where the root is NaN.
            x = n.args[0].args[0]
            root = self.splat(x) if vector else self.value(x)
            name = f"sd_root_squared{'_v4' if vector else ''}"
            return self.let(f"{name}({root})", level)
        args = []
        for x in n.args:
            v = self.splat(x) if vector else self.value(x)
            args.append(v)
        if n.data in ("stop_gradient", "after"):
            return args[0]
        if n.data in ("floordiv", "mod") and n.dtype == "i32":
            lows = [interval(x, self.space)[0] for x in n.args]
            if lows[0] >= 0 and lows[1] > 0:
                return self.let(
                    f"{args[0]} {'/' if n.data == 'floordiv' else '%'} {args[1]}", level
                )
        if n.dtype in E.INTS and n.data in ("maximum", "minimum"):
            return self.let(f"{n.data[:3]}({', '.join(args)})", level)
        whole = _vanishing(n)
        if whole is not None:
            name = f"sd_vanish{'_v4' if vector else ''}"
            return self.let(f"{name}({args[whole]})", level)
        if n.data == "div" and self._divides_many(n, level):
            name = f"sd_over{'_v4' if vector else ''}"
            return self.let(f"{name}({args[0]}, {self._inverse(n.args[1])})", level)
        if all(x.kind == "const" for x in n.args):  # the front end must not evaluate it
            args = [
                self.let(a, level, "c") if re.match(r"[\d(tf]", a) else a for a in args
            ]
        return self.let(
            spell(n.data, args, n.args[0].dtype, vector, self.spellings.get(n.data)),
            level,
            "b" if n.dtype == "bool" else "t",
        )

    def _divides_many(self, n: Expr, level: int) -> bool:
        """Whether a divisor serves several divisions, so that it is inverted once.

        Software drivers divide as fast as they multiply.
        """
        if self.target.family == "software" or n.args[0].kind == "const":
            return False
        b = n.args[1]
        if self.is_vector(b):  # four divisors
            return False
        if self.is_vector(n):
            return True
        known = any(("inverse", b) in memo for memo in self.memo)
        return known or self.level(b.free) < level

    def invert_sizes(self, *roots: Expr) -> None:
        """Invert divisors that depend on sizes alone, before anything is read."""
        if self.target.family == "software":
            return
        for n in E.values(*roots):
            if n.kind == "apply" and n.data == "div" and n.dtype == "f32":
                b = n.args[1]
                if not b.free and n.args[0].kind != "const" and not E.loads(b):
                    self._inverse(b)

    def _inverse(self, b: Expr) -> str:
        """What `sd_over` takes for a divisor."""
        level = self.level(b.free)
        key = ("inverse", b)
        for memo in reversed(self.memo):
            if key in memo:
                return str(memo[key])
        name = self.let(f"sd_inverse({self.value(b)})", level, "over")
        self.memo[level][key] = name
        return name

    def read(self, tensor: Tensor, at: str, vector: bool) -> str:
        """The text that reads one place of a tensor (a vec4 of it)."""
        buffer = self.binding(tensor, vector, False)
        if vector:
            return self._widen(tensor, f"{buffer}[{at}]", True)
        return self._element(tensor, buffer, at)

    def write(self, tensor: Tensor, at: str, value: str, vector: bool) -> str:
        """The statement that writes one place of a tensor (a vec4 of it)."""
        buffer = self.binding(tensor, vector, True)
        return f"{buffer}[{at}] = {self._narrow(tensor, value, vector)};"

    # -------------------------------------------------------------- stores

    def store(
        self,
        tensor: Tensor,
        form: Address,
        value: str,
        dtype: str,
        vector: bool,
        label: str | None = None,
    ) -> None:
        """Write a value (a vec4 of it) to memory, in the innermost block."""
        depth = len(self.blocks) - 1
        as_vector = vector and self._whole(tensor, form)
        buffer = self.binding(tensor, as_vector, True, label)
        if as_vector:
            self.blocks[depth].append(
                f"{buffer}[{self.address(form, WIDTH)}] = "
                f"{self._narrow(tensor, value, True)};"
            )
        elif not vector:
            self._store_one(tensor, buffer, self.address(form), value)
        else:
            for k, at in enumerate(self.lane_addresses(form)):
                self._store_one(tensor, buffer, at, f"{value}.{'xyzw'[k]}")

    def _store_one(self, tensor: Tensor, buffer: str, at: str, value: str) -> None:
        if tensor.dtype == "f16" and not self.target.features.f16:
            at = self.let(at, len(self.blocks) - 1, "a")
            word = f"&{buffer}[{at} >> 1u]"
            self.line(
                f"atomicAnd({word}, select(0xffff0000u, 0x0000ffffu, ({at} & 1u) == "
                "1u));"
            )
            self.line(
                f"atomicOr({word}, pack2x16float(vec2<f32>({value}, 0.0)) << (16u * "
                f"({at} & 1u)));"
            )
        else:
            self.line(f"{buffer}[{at}] = {self._narrow(tensor, value, False)};")

    def _narrow(self, tensor: Tensor, value: str, vector: bool) -> str:
        if tensor.dtype == "bool":
            value = (
                f"select(vec4<u32>(0u), vec4<u32>(1u), {value})"
                if vector
                else f"select(0u, 1u, {value})"
            )
        if vector and self._words(tensor):
            words = tensor.dtype in ("u32", "bool")
            return f"sd_pack({value if words else f'bitcast<vec4<u32>>({value})'})"
        if tensor.dtype == "f16":
            if self.target.features.f16:
                return f"{'vec4<f16>' if vector else 'f16'}({value})"
            return f"vec2<u32>(pack2x16float({value}.xy), pack2x16float({value}.zw))"
        return value

    # -------------------------------------------------------------- the whole text

    def text(
        self,
        comment: Sequence[str],
        size: tuple[int, int, int],
        builtins: str,
        body: Sequence[str],
    ) -> str:
        """The kernel as WGSL."""
        head = [f"// {c}" for c in comment]
        if any(t.dtype == "f16" for t in self.bound) and self.target.features.f16:
            head.append("enable f16;")
        if self.uses_subgroups:
            if self.target.enable_subgroups_directive:
                head.append("enable subgroups;")
            builtins += (
                ", @builtin(subgroup_size) sg_size: u32, "
                "@builtin(subgroup_invocation_id) sg_lane: u32"
                ", @builtin(subgroup_id) sg: u32, @builtin(num_subgroups) sg_count: u32"
            )
        for k, (tensor, b) in enumerate(self.bound.items()):
            access = "read_write" if b.write else "read"
            head.append(
                f"@group(0) @binding({k}) var<storage, {access}> {b.name}: "
                f"array<{self._memory(tensor, b)}>;"
            )
        if self.params:
            fields = ", ".join(f"{name}: {p.dtype}" for name, p in self.params.values())
            head.append(f"struct Params {{ {fields} }}")
            head.append(
                f"@group(0) @binding({len(self.bound)}) var<uniform> P: Params;"
            )
        head += self.shared
        code = "\n".join(body)
        head += _own_helpers(code)
        head += helper_source(h for h in used_helpers(code) if h not in _OWN)
        shape = ", ".join(str(n) for n in size if n > 1) or "1"
        return "\n".join(
            [
                *head,
                f"@compute @workgroup_size({shape})",
                f"fn main({builtins}) {{",
                *indent(body),
                "}",
                "",
            ]
        )

    def _memory(self, tensor: Tensor, b: _Bound) -> str:
        if tensor.dtype == "f16" and not self.target.features.f16:
            return "vec2<u32>" if b.vector else "atomic<u32>" if b.write else "u32"
        if b.vector and self._words(tensor):
            return "vec2<u64>"
        element = _MEMORY[tensor.dtype]
        return f"vec4<{element}>" if b.vector else element

    def bindings(self) -> tuple[Binding, ...]:
        """What the kernel binds, in order."""
        return tuple(
            Binding(t, "read_write" if b.write else "read")
            for t, b in self.bound.items()
        )

    def param_block(self) -> tuple[Param, ...]:
        """The parameter block, in order."""
        return tuple(p for _, p in self.params.values())


_OWN = ("sd_bits", "sd_half", "sd_half4", "sd_pack", "sd_unpack")


def _own_helpers(code: str) -> list[str]:
    out = []
    if "sd_bits(" in code:
        # The parameter keeps front ends from evaluating a bitcast to infinity.
        out.append("fn sd_bits(b: u32) -> u32 { return b; }")
    if "sd_unpack(" in code:
        out.append(
            "fn sd_unpack(w: vec2<u64>) -> vec4<u32> {\n"
            "  return vec4<u32>(u32(w.x & 0xfffffffflu), u32(w.x >> 32u), u32(w.y & "
            "0xfffffffflu), u32(w.y >> 32u));\n}"
        )
    if "sd_pack(" in code:
        out.append(
            "fn sd_pack(v: vec4<u32>) -> vec2<u64> {\n"
            "  return vec2<u64>(u64(v.x) | (u64(v.y) << 32u), u64(v.z) | (u64(v.w) << "
            "32u));\n}"
        )
    if "sd_half(" in code:
        out.append(
            "fn sd_half(w: u32, i: u32) -> f32 "
            "{ let p = unpack2x16float(w); return select(p.x, p.y, (i & 1u) == 1u); }"
        )
    if "sd_half4(" in code:
        out.append(
            "fn sd_half4(w: vec2<u32>) -> vec4<f32> "
            "{ return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }"
        )
    return out


def spell(
    name: str,
    args: Sequence[str],
    dtype: str,
    vector: bool,
    text: str | None = None,
) -> str:
    """A primitive in WGSL: names of its operands, dtype of the first.

    ``text`` takes the place of the table's own spelling.
    """
    text = PRIMITIVES[name].wgsl if text is None else text
    own = wgsl_type(dtype, vector)
    tokens = {
        "{F}": wgsl_type("f32", vector),
        "{I}": wgsl_type("i32", vector),
        "{U}": wgsl_type("u32", vector),
        "{B}": wgsl_type("bool", vector),
        "{T}": own,
        "{V}": "_v4" if vector else "",
        "{t}": dtype,
    }
    for token, v in tokens.items():
        text = text.replace(token, v)
    for k, a in enumerate(args):
        text = text.replace(f"{{{k}}}", a)
    return text


def _vanishing(n: Expr) -> int | None:
    """The operand x of x · 0, x - x, x + -x in floats: 0 unless x is NaN or infinite.

    Drivers fold all three to 0 whatever x is, so that they need a text of their own.
    """
    if n.dtype != "f32" or len(n.args) != 2:
        return None
    a, b = n.args
    if n.data == "mul":
        zeros = [x.kind == "const" and x.data == 0 for x in n.args]
        return None if zeros[0] == zeros[1] else int(zeros[0])
    if n.data == "sub":
        return 0 if a is b else None
    if n.data == "add" and (_negation(b, a) or _negation(a, b)):
        return 0
    return None


def _negation(a: Expr, b: Expr) -> bool:
    return a.kind == "apply" and a.data == "neg" and a.args[0] is b


def contiguous(form: Address, axis: int | None) -> bool:
    """Whether an address walks neighbouring, aligned elements along the vector axis."""
    if (
        axis is None
        or form.coefficient(axis) != 1
        or form.rest_free() >> axis & 1
        or form.const % WIDTH
    ):
        return False
    return all(t.coefficient % WIDTH == 0 for t in form.terms if t.what != axis)


def indent(lines: Iterable[str], by: int = 1) -> list[str]:
    """Lines moved to the right."""
    return ["  " * by + line for line in lines]


def scratch(name: str, size: int, dtype: str = "f32") -> Scratch:
    """Memory that kernels of one program share."""
    return Scratch(name, dtype, size)


def needs_f16_feature(stages: Mapping[Any, Any]) -> bool:
    """Whether any tensor is stored as f16."""
    return any(getattr(s, "dtype", "") == "f16" for s in stages)
