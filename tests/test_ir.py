"""Expressions, index maps, signatures, bounds, the printer and the verifier."""

from __future__ import annotations

import gc
import itertools
import math
import re

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.errors import (
    AxisError,
    CompilerError,
    IndexRangeError,
    ShapeError,
    SignatureError,
)
from shaderdsl.ir import expr as E
from shaderdsl.ir import indexmap as M
from shaderdsl.ir import interpret, printer, verify
from shaderdsl.ir import signature as S
from shaderdsl.ir.primitives import PRIMITIVES
from shaderdsl.ir.stage import (
    MONOIDS,
    Stage,
    factors,
    input_stage,
    make_reduce,
    map_stage,
    rebind,
    topo_stages,
    whole,
)

# ------------------------------------------------------------------ expressions


def test_equal_expressions_are_one_object():
    a, b = E.index(0), E.index(1)
    assert a * 2 + b is E.index(0) * 2 + E.index(1)
    assert a + b is not b + a
    assert E.apply("exp", E.cast(a, "f32")) is E.apply("exp", E.cast(a, "f32"))


def test_constants_that_compare_equal_stay_apart():
    values = [E.const(v) for v in (1, 1.0, True, 0.0, -0.0, 0, False)]
    assert len({id(v) for v in values}) == 7
    assert [v.dtype for v in values] == [
        "i32", "f32", "bool", "f32", "f32", "i32", "bool",
    ]  # fmt: skip
    assert E.const(math.nan) is E.const(math.nan)
    assert math.copysign(1, E.const(-0.0).data) == -1
    assert E.const(1, "u32") is not E.const(1, "i32")
    assert E.size(4) is not E.const(4)


def test_free_axes():
    x = input_stage((3, 4), "f32", "x")
    e = E.load(x, [E.index(2), E.index(5)]) + 1.0
    assert list(E.bits(e.free)) == [2, 5]
    assert E.const(1.0).free == 0
    moved = E.substitute(e, {2: E.index(0), 5: E.const(1)})
    assert list(E.bits(moved.free)) == [0]
    assert E.substitute(e, {7: E.index(0)}) is e


def test_a_deep_chain_needs_no_recursion():
    x = input_stage((2,), "f32", "x")
    e = whole(x)
    for k in range(30_000):
        e = E.apply("sin", e) if k % 2 else e + 1.5
    assert len(E.topo(e)) > 30_000
    assert E.substitute(e, {0: E.const(0)}).free == 0
    assert "sin" in printer.show(e, 100)


def walked(root, seen):
    """Operands first, from left to right, each once."""
    if root in seen:
        return []
    seen.add(root)
    return [n for x in root.args for n in walked(x, seen)] + [root]


@pytest.mark.parametrize("kept", [0, 3, E._KEEP])
def test_nodes_come_after_their_operands_in_one_order(kept, monkeypatch):
    monkeypatch.setattr(E, "_KEEP", kept)
    rng = np.random.default_rng(kept)
    x = input_stage((7, 5), "f32", f"x{kept}")
    nodes = [E.load(x, [E.index(0), E.index(1)]), E.const(0.1 + kept)]
    for k in range(60):
        a, b = (nodes[rng.integers(max(0, len(nodes) - 9), len(nodes))] for _ in "ab")
        nodes.append(E.apply(("add", "mul", "sub")[k % 3], a, b * (2.5 + k)))
        assert E.topo(nodes[-1]) == walked(nodes[-1], set())
    seen = set()
    both = [n for root in nodes[-3:] for n in walked(root, seen)]
    assert E.topo(*nodes[-3:]) == both
    assert E.topo(nodes[-1]) == walked(nodes[-1], set())  # asked again


def test_expressions_that_nobody_holds_are_gone():
    gc.collect()
    before = len(E._table)
    x = input_stage((2,), "f32", "x")
    e = whole(x)
    for k in range(200):
        e = E.apply("sin", e) * (1.25 + k)
    assert len(E.topo(e)) > 400 and E.loads(e) == [whole(x)]
    kept = E.substitute(e, {0: E.const(1)})
    assert len(E._table) > before + 700
    del e, kept, x
    assert len(E._table) <= before


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda i: i + 0, lambda i: i),
        (lambda i: i * 1, lambda i: i),
        (lambda i: i * 0, lambda i: E.const(0)),
        (lambda i: E.apply("neg", -i), lambda i: i),
        (lambda i: E.where(E.const(True), i, 0), lambda i: i),
        (lambda i: E.const(2) + 3, lambda i: E.const(5)),
        (lambda i: E.const(2**31 - 1) + 1, lambda i: E.const(-(2**31))),
        (lambda i: E.apply("mod", i, 1), lambda i: E.const(0)),
    ],
)
def test_simple_identities(build, expected):
    i = E.index(0)
    assert build(i) is expected(i)


def test_a_float_times_zero_is_kept():
    # 0 · NaN is NaN.
    x = whole(input_stage((2,), "f32", "x"))
    assert (x * 0.0).kind == "apply"


def test_promotion():
    x = whole(input_stage((), "f32", "x"))
    i, u = (whole(input_stage((), d, "i")) for d in ("i32", "u32"))
    b = whole(input_stage((), "bool", "b"))
    assert (x + i).dtype == "f32"
    assert (u + 1).dtype == "u32"
    assert (i + 1.0).dtype == "f32"
    assert E.apply("add", b, b).dtype == "i32"
    with pytest.raises(sd.errors.DTypeError, match="i32 and u32"):
        i + u
    with pytest.raises(sd.errors.DTypeError, match="not bool"):
        E.where(i, x, x)
    with pytest.raises(sd.errors.DTypeError, match="integers or bools"):
        E.apply("and", x, x)


def test_every_primitive_has_a_line_of_doc_and_a_spelling():
    for p in PRIMITIVES.values():
        assert p.doc and p.wgsl and p.takes in (
            "same", "float", "bits", "number", "any", "where",
        )  # fmt: skip


# ------------------------------------------------------------------ index maps


def evaluate(e, values):
    s = map_stage([max(n, 1) for n in values], e, "probe")
    out = interpret.evaluate([s], {})[0]
    return int(out[tuple(0 if n == 0 else n - 1 for n in values)])


def test_affine_forms():
    i, j = E.index(0), E.index(1)
    f = M.affine((i + 2) * 3 - (j - i))
    assert (f.axes, f.const, f.rest) == ({0: 4, 1: -1}, 6, ())
    assert M.affine(f.expr()) == f
    g = M.affine(i + E.apply("mod", j, 3))
    assert len(g.rest) == 1


@pytest.mark.parametrize("ext", [(4, 3, 5), (2, 1, 7), (6,), (1, 1)])
def test_split_undoes_merge(ext):
    e = M.merge(range(len(ext)), ext)
    for k, digit in enumerate(M.split(e, ext, ext)):
        at = [E.index(a) if n > 1 else E.const(0) for a, n in enumerate(ext)]
        assert digit is at[k]


def test_split_of_a_foreign_number():
    ext = (35,)
    hi, lo = M.split(E.index(0) + 2, [8, 5], ext)
    for i in range(35):
        got = [int(evaluate(E.substitute(d, {0: E.const(i)}), ())) for d in (hi, lo)]
        assert got == list(divmod(i + 2, 5))


def test_intervals():
    ext = {0: 4, 1: 3}
    i, j = E.index(0), E.index(1)
    assert M.interval(i * 2 - j, ext) == (-2, 6)
    assert M.interval(E.apply("mod", i * 2, 3), ext) == (0, 2)
    assert M.interval(E.apply("floordiv", i - 4, 3), ext) == (-2, -1)
    assert M.interval(E.apply("minimum", i, 2), ext) == (0, 2)
    assert M.interval(E.where(E.apply("lt", i, j), i, j - 1), ext) == (-1, 3)


def test_digits():
    ext = {0: 4, 1: 3, 2: 5}
    i, j = E.index(0), E.index(1)
    d = M.digits(i * 3 + j, ext)
    assert [(o.extent, o.axis, o.sign) for o in d] == [(4, 0, 1), (3, 1, 1)]
    assert M.digits(i * 2 + j, ext) is None
    back = M.digits(3 - i, ext)
    assert [(o.sign, o.const) for o in back] == [(-1, 3)]
    shifted = M.digits(i + 2, ext)
    assert [(o.sign, o.const) for o in shifted] == [(1, 2)]
    assert M.digits(E.apply("mod", i, 2), ext) is None


# ------------------------------------------------------------------ stages


def test_equal_stages_are_one_object():
    x = input_stage((3,), "f32", "x")
    a = map_stage([3], whole(x) * 2.0, "a")
    assert map_stage([3], whole(x) * 2.0, "other name") is a
    assert map_stage([3], whole(x), "copy") is x
    assert input_stage((3,), "f32", "x") is not x


def test_normal_form_of_sums():
    x, w = input_stage((3, 4), "f32", "x"), input_stage((3,), "f32", "w")
    i, j = E.index(0), E.index(1)
    body = E.load(x, [i, j]) * E.load(w, [i]) * 2.0
    e = make_reduce("sum", body, [0], [1], [3, 4])
    (s,) = {n.data for n in E.loads(e) if n.data.kind == "reduce"}
    assert s.body.kind == "load" and s.rext == (4,)
    # What nothing reduced depends on is a factor of the extent.
    assert not any(
        n.data.kind == "reduce"
        for n in E.loads(make_reduce("sum", E.load(w, [i]), [0], [1], [3, 4]))
    )


def test_a_sum_of_sums_is_one_sum():
    x = input_stage((3, 4, 5), "f32", "x")
    body = E.load(x, [E.index(0), E.index(1), E.index(2)])
    inner = make_reduce("sum", body, [0, 1], [2], [3, 4, 5])
    outer = make_reduce("sum", inner, [0], [1], [3, 4, 5])
    assert outer.data.rext == (4, 5)


def test_factors():
    x = whole(input_stage((), "f32", "x"))
    y = whole(input_stage((), "f32", "y"))
    c = E.apply("lt", x, 0.0)
    number, fs, guards = factors(E.where(c, -(x * 3.0) / y, 0.0))
    assert number == -3.0 and x in fs and guards == [c] and len(fs) == 2


def test_rebind():
    x, z = input_stage((3,), "f32", "x"), input_stage((3,), "f32", "z")
    a = map_stage([3], E.apply("exp", whole(x)), "a")
    b = map_stage([3], whole(a) + whole(x), "b")
    (c,) = rebind([b], {x: z})
    assert {s for s in topo_stages([c]) if s.kind == "input"} == {z}
    assert rebind([b], {})[0] is b


# ------------------------------------------------------------------ signatures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t d", "exactly one '->'"),
        ("t -> d -> e", "exactly one '->'"),
        ("t 3 -> t", "cannot read '3'"),
        ("(t -> t", "cannot read"),
        ("(a*b) -> a", "cannot read"),
        ("... ... -> ...", "two '...'"),
    ],
)
def test_signatures_that_cannot_be_read(text, message):
    with pytest.raises(SignatureError, match=re.escape(message)):
        S.parse(text)


def solve(text, *shapes, **sizes):
    sig = S.expand(S.parse(text), shapes, "here")
    return S.solve(sig, shapes, sizes, "xyz", "here")


def test_sizes_that_follow():
    assert solve("t (h r p), t p -> t", (3, 24), (3, 4), r=2)["h"] == 3
    assert solve("n (a+b) -> n", (2, 7), a=3)["b"] == 4
    assert solve("t, k -> t-k+1", (9,), (4,))["t-k+1"] == 6
    assert solve("... d, d -> ... d", (2, 3, 4), (4,))["...0"] == 2
    # Fewer leading axes align at the right.
    known = solve("... d, ... d -> ... d", (2, 3, 4), (3, 4))
    assert (known["...0"], known["...1"]) == (2, 3)
    assert solve("(h d) -> h", (0,), d=4)["h"] == 0


@pytest.mark.parametrize(
    ("text", "shapes", "sizes", "error", "message"),
    [
        ("t d, d -> t", ((2, 3), (4,)), {}, ShapeError, "'y': axis 'd' is 4"),
        ("t d -> t", ((2,),), {}, ShapeError, "'x' has 1 dimensions"),
        ("(h d) -> h", ((7,),), {"d": 2}, ShapeError, "does not divide by d=2"),
        ("(h d) -> h", ((8,),), {}, AxisError, "nothing gives the size of axis 'h'"),
        ("t -> t k", ((2,),), {}, AxisError, "k=…"),
        ("t, k -> t-k+1", ((2,), (9,)), {}, ShapeError, "axis 't-k+1' has size -6"),
        ("... a b -> a", ((2,),), {}, ShapeError, "at least 2 axes"),
        (
            "d, d -> d",
            ((1,), (4,)),
            {},
            ShapeError,
            "is 4, but argument 'x' makes it 1",
        ),
    ],
)
def test_sizes_that_disagree(text, shapes, sizes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        solve(text, *shapes, **sizes)


# ------------------------------------------------------------------ bounds


def op(signature, **sizes):
    return sd.op(signature, **sizes)


@op("n -> n")
def shifted(x):
    return x.at(n=sd.index("n") - 1)


@op("n -> n")
def shifted_and_guarded(x):
    i = sd.index("n")
    return sd.where(i > 0, x.at(n=i - 1), 0.0)


@op("n -> n")
def shifted_behind_an_or(x):
    i = sd.index("n")
    return sd.where((i < 2) | (i > 2), 0.0, x.at(n=i + 1))


@op("n -> n")
def clipped(x):
    return x.at(n=sd.clip(sd.index("n") + 5, 0, sd.extent("n") - 1))


def test_an_index_that_leaves_its_axis_is_refused_at_its_line(cpu):
    with pytest.raises(IndexRangeError, match=r"from -1 to 1, .* size 3") as caught:
        shifted(np.ones(3, np.float32))
    line = shifted.function.__code__.co_firstlineno + 2
    assert f"test_ir.py:{line}" in caught.value.where
    assert "where" in caught.value.cure


def test_guards_keep_an_index_in_range(cpu):
    x = np.arange(1.0, 5.0, dtype=np.float32)
    assert shifted_and_guarded(x).tolist() == [0, 1, 2, 3]
    assert shifted_behind_an_or(x).tolist() == [0, 0, 4, 0]
    assert clipped(x).tolist() == [4, 4, 4, 4]


# ------------------------------------------------------------------ printer, verifier


def graph():
    x = input_stage((3, 4), "f32", "x")
    row = make_reduce(
        "sum", E.load(x, [E.index(0), E.index(1)]), [0], [1], [3, 4], "row"
    )
    return map_stage([3], E.apply("exp", row) + 1.0, "y")


def test_printer():
    text = printer.show_graph([graph()])
    assert re.search(
        r"x#\d+: f32\[3, 4\] = input\n"
        r"row#\d+: f32\[3\] = \[i<3, j<4\] sum\[j\] x#\d+\[i, j\].*\n"
        r"y#\d+: f32\[3\] = \[i<3\] \(exp\(row#\d+\[i\]\) \+ 1\.0\)",
        text,
    )
    i = E.index(0)
    assert repr(E.apply("minimum", i, -i)) == "minimum(i, -i)"
    assert len(printer.show(E.apply("add", i, i + 1), 5)) <= 6


def raw(
    kind="map", ext=(3,), rext=(), monoid=None, body=None, groups=None, dtype="f32"
):
    return Stage(kind, ext, rext, monoid, body, groups, dtype, "bad")


def misfit(body):
    """A node that ``apply`` would never make."""
    node = object.__new__(E.Expr)
    node.kind, node.args, node.data, node.dtype, node.free, node.loc = body
    node.kept = node.below = None
    return node


X = input_stage((3,), "f32", "x")
I = E.index(0)
BAD = {
    "depends on axis 1": lambda: raw(body=E.load(X, [E.index(1)])),
    "stores i32, its body is f32": lambda: raw(body=whole(X), dtype="i32"),
    "sum has no identity for bool": lambda: raw(
        "reduce", (), (3,), "sum", E.apply("lt", whole(X), 0.0), dtype="bool"
    ),
    "a map with monoid sum": lambda: raw(monoid="sum", body=whole(X)),
    "do not cover": lambda: raw(body=whole(X), groups=((0,), (0,))),
    "no body": lambda: raw(),
    "a body in a stage of kind input": lambda: raw("input", body=whole(X)),
    "its kind is 'odd'": lambda: raw("odd", body=whole(X)),
    "extents are [-3]": lambda: raw(ext=(-3,), body=whole(X)),
    "mixes f32, i32": lambda: raw(
        body=misfit(("apply", (whole(X), I), "add", "f32", 1, None))
    ),
    "takes f32, not i32": lambda: raw(
        body=misfit(("apply", (I,), "exp", "f32", 1, None))
    ),
    "no primitive is called 'frobnicate'": lambda: raw(
        body=misfit(("apply", (whole(X),), "frobnicate", "f32", 1, None))
    ),
    "free axes are noted": lambda: raw(
        ext=(3, 3, 3), body=misfit(("apply", (whole(X),), "exp", "f32", 6, None))
    ),
    "an index is f32, not i32": lambda: raw(
        body=misfit(("load", (whole(X),), X, "f32", 1, None))
    ),
    "2 indices for the shape": lambda: raw(
        body=misfit(("load", (I, I), X, "f32", 1, None))
    ),
    "where of f32": lambda: raw(
        body=misfit(("apply", (whole(X),) * 3, "where", "f32", 1, None))
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_verifier_refuses(message):
    with pytest.raises(CompilerError, match=re.escape(message)) as caught:
        verify.verify([BAD[message]()], "in a test")
    lines = str(caught.value).split("\n")
    at = next(k for k, line in enumerate(lines) if line.startswith("  ^ "))
    assert lines[at - 1].startswith("bad#")
    assert "not valid in a test" in lines[0]


def test_verifier_refuses_a_cycle():
    s = raw(body=whole(X))
    s.loads = [E.load(s, [I])]
    with pytest.raises(CompilerError, match="depends on itself"):
        verify.verify([s])


def test_verifier_at_every_step(cpu, monkeypatch):
    monkeypatch.setenv("SHADERDSL_DEBUG", "verify")
    seen = []
    plain = verify.verify
    monkeypatch.setattr(
        verify, "verify", lambda outs, when="": (seen.append(when), plain(outs, when))
    )

    @sd.op("t d -> t d")
    def centred(x):
        return x - sd.mean(x, over="d")

    _, pullback = sd.vjp(centred, np.ones((2, 3), np.float32))
    pullback(np.ones((2, 3), np.float32))
    assert set(seen) == {
        "after tracing",
        "after the derivative",
        "before the partition",
        "after the partition",
    }


def test_monoids_have_identities():
    for (name, m), dtype in itertools.product(MONOIDS.items(), ("f32", "i32", "u32")):
        e = m.identity[dtype]
        for v in (0, 3) if dtype == "u32" else (-2, 0, 3):
            assert PRIMITIVES[m.primitive].numpy(v, e) == v, name


def test_a_window_index_is_solved(cpu):
    @sd.op("t, k -> t-k+1")
    def correlate(x, w):
        return sd.sum(x.at(t=sd.index("t-k+1") + sd.index("k")) * w, over="k")

    x, w = np.arange(6, dtype=np.float32), np.array([1.0, 2.0], np.float32)
    y, pullback = sd.vjp(correlate, x, w)
    np.testing.assert_array_equal(y.numpy(), np.correlate(x, w))
    dx, dw = pullback(np.ones(5, np.float32))
    assert dx.tolist() == [1, 3, 3, 3, 3, 2]
    assert dw.tolist() == [10, 15]
