"""The WGSL writer: expressions to straight-line text, each value in the outermost block
that knows its axes.

A schedule opens blocks (a workgroup's rows, a lane's elements), names the axes that
each block fixes and asks for values. Common subexpressions and loop-invariant code fall
out: a node is written once, where its last axis becomes known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import interval
from ..ir.stage import Stage
from .address import Address, Key, Term, contiguous, load_address
from .kernel_text import KernelText
from .program import Param, Tensor
from .spelling import WIDTH, literal, spell, vanishing, wgsl_type
from .storage import element, is_packed, narrowed, stored, widened
from .target import Target


class Writer(KernelText):
    """Writes values into the text of one kernel.

    Args:
        space: extents of the kernel's axes.
        vector: the axis that a vec4 runs along, if any; its variable counts vec4s.
    """

    def __init__(self, space: Sequence[int], target: Target, vector: int | None = None):
        super().__init__(space, target)
        self.vector = vector
        # Loads that have a name already: what is not read from memory.
        self.local: dict[Expr, str] = {}
        self.addresses: dict[Expr, Address] = {}
        # Tensors that are not bound as vec4, because some access moves one element.
        self.plain: set[Tensor] = set()
        # Tensors bound as vec4 of which single elements are read too.
        self.parts: set[Stage] = set()
        # Whether the last vec4 along the vector axis reaches beyond its end: elements
        # there repeat the last one.
        self.ragged = False
        # Stages that are computed where they are read: what writes such a read.
        self.virtual: dict[Stage, Callable[[Expr, int], str]] = {}
        # Primitives that a schedule spells otherwise than the table does.
        self.spellings: dict[str, str] = {}

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
            text = widened(stage, f"{buffer}[{at} >> 2u]", True, self.features)
            return self.let(f"{text}[{at} & 3u]", level, "x")
        buffer = self.binding(stage, as_vector, False, n.label)
        if as_vector:
            text = f"{buffer}[{self.address(form, WIDTH)}]"
            text = widened(stage, text, True, self.features)
            return self.let(text, level, "x")
        if not vector:
            text = element(stage, buffer, self.address(form), self.features)
            return self.let(text, level, "x")
        parts = [
            element(stage, buffer, a, self.features) for a in self.lane_addresses(form)
        ]
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
        whole = vanishing(n)
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
            return widened(tensor, f"{buffer}[{at}]", True, self.features)
        return element(tensor, buffer, at, self.features)

    def write(self, tensor: Tensor, at: str, value: str, vector: bool) -> str:
        """The statement that writes one place of a tensor (a vec4 of it)."""
        buffer = self.binding(tensor, vector, True)
        value = narrowed(tensor, value, vector, self.features)
        return f"{buffer}[{at}] = {value};"

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
        as_vector = vector and self._whole(tensor, form)
        buffer = self.binding(tensor, as_vector, True, label)
        if as_vector:
            at = self.address(form, WIDTH)
            value = narrowed(tensor, value, True, self.features)
            self.line(f"{buffer}[{at}] = {value};")
        elif not vector:
            self._store_one(tensor, buffer, self.address(form), value)
        else:
            for k, at in enumerate(self.lane_addresses(form)):
                self._store_one(tensor, buffer, at, f"{value}.{'xyzw'[k]}")

    def _store_one(self, tensor: Tensor, buffer: str, at: str, value: str) -> None:
        if is_packed(tensor, self.features):
            at = self.let(at, len(self.blocks) - 1, "a")
        self.blocks[-1] += stored(tensor, buffer, at, value, self.features)
