"""Softmax sums of long rows: a maximum and sums of exp(y - maximum) from one reading.

A lane keeps the greatest y that it has met and sums of exponentials below it, which
shrink when a greater one comes. At the end of the row the lanes' sums are brought on
the row's maximum and added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import factors
from .kernel_text import indent
from .member import Member
from .online_runs import conjuncts, maximum_of, unwrapped
from .reduction import Tree, combine, horizontal, identity, subgroup
from .row_walk import Walks, inside
from .spelling import spell, wgsl_type
from .writer import Writer

#: Positions (elements or vec4s) of a row from which GPUs read it once for both, in a
#: loop, and do not hold it in registers for a second reduction.
ONLINE = 1 << 12
#: Elements of a row from which they do so where the row is wanted again.
WRITTEN = 1 << 13

_LOG2E = "1.44269504"


def find_pairs(
    reductions: Sequence[Member],
    bodies: Mapping[Member, Expr],
    levels: Mapping[Member, int],
) -> dict[Member, list[Member]]:
    """Maximum → the sums that can go along with it."""
    by_stage = {m.stage: m for m in reductions}
    found: dict[Member, list[Member]] = {}
    for s in reductions:
        if s.stage.monoid != "sum" or s.body.dtype != "f32":
            continue
        term = _term(bodies[s])
        if term is None:
            continue
        f, n = term
        m = by_stage.get(n.data)
        if m is None or m.stage.monoid != "max" or not _alike(bodies[m], bodies[s], f):
            continue
        f_only = [x for x in E.loads(bodies[s]) if x.data is m.stage]
        others = [x for x in factors(bodies[s])[1] if x is not f]
        more = [*others, *factors(bodies[s])[2], f.args[0].args[0]]
        if len(f_only) != 1 or any(x.data is m.stage for x in E.loads(*more)):
            continue
        read = [by_stage[x.data] for x in E.loads(bodies[s]) if x.data in by_stage]
        if all(r is m or levels[r] < levels[m] for r in read):
            found.setdefault(m, []).append(s)
    return found


def told_by_sum(
    m: Member, sums: Sequence[Member], bodies: Mapping[Member, Expr]
) -> Member | None:
    """A sum of the exponentials of all that a maximum is of: NaN where one of it is."""
    for s in sums:
        term = _term(bodies[s])
        if term is not None and bodies[s] is term[0]:
            return s if bodies[m] is term[0].args[0].args[0] else None
    return None


def lowered_plainly(body: Expr) -> bool:
    """Whether a sum's exponentials are of y - m as it is: NaN where m is infinite."""
    term = _term(body)
    return term is not None and unwrapped(term[0].args[0].args[1]).kind == "load"


def follows(body: Expr, load: Expr) -> bool:
    """Whether a value is NaN if this load is, whatever else it reads."""
    if body is load:
        return True
    if body.kind != "apply":
        return False
    if body.data == "where":
        test, a, b = body.args
        other = test.kind == "apply" and test.data == "eq" and load in test.args
        return follows(b, load) and (other or follows(a, load))
    strict = ("add", "sub", "mul", "div", "neg", "exp", "log")
    return body.data in strict and any(follows(x, load) for x in body.args)


def _term(body: Expr) -> tuple[Expr, Expr] | None:
    """The one factor exp(y - m) of a sum's body, and the load of m."""
    fs = [
        f
        for f in factors(body)[1]
        if f.kind == "apply"
        and f.data == "exp"
        and f.args[0].kind == "apply"
        and f.args[0].data == "sub"
    ]
    if len(fs) != 1:
        return None
    n = maximum_of(fs[0].args[0].args[1])
    return None if n is None else (fs[0], n)


def _alike(most: Expr, body: Expr, f: Expr) -> bool:
    """Whether a maximum and a sum are of the same elements.

    What only the sum sees may lie far above the running maximum that it is lowered by;
    what only the maximum sees may be infinite.
    """
    y, shift = f.args[0].args
    guards = set(factors(body)[2])
    if most is y:
        return not guards
    if not (most.kind == "apply" and most.data == "where" and most.args[1] is y):
        return False
    nothing = most.args[2]
    lowest = nothing.kind == "const" and nothing.data == float("-inf")
    # Below a plain maximum a row without elements is NaN, where its sum is 0.
    plain = unwrapped(shift).kind == "load"
    return lowest and not plain and set(conjuncts(most.args[0])) == guards


class Online:
    """The walk of one row.

    Args:
        pairs: maximum → its sums.
        vector: the axis that vec4s run along, if any.
    """

    def __init__(
        self,
        w: Writer,
        bodies: Mapping[Member, Expr],
        pairs: Mapping[Member, list[Member]],
        vector: int | None,
    ):
        self.w, self.bodies, self.pairs = w, bodies, pairs
        self.wide = vector is not None
        self.vector = vector
        self.state: dict[Member, str] = {}

    def row(self, walks: Walks, beside: Callable[[], None]) -> None:
        """Walk a row.

        Args:
            beside: what else is done at each position.
        """
        w = self.w
        none = identity(w, "max", "f32")
        for k, (m, sums) in enumerate(self.pairs.items()):
            self.state[m] = f"most{k}_"
            w.line(f"var most{k}_ = {none};", 1)
            w.line(f"var base{k}_ = 0.0;", 1)
            for j, s in enumerate(sums):
                kind = wgsl_type("f32", self._is_wide(s))
                self.state[s] = f"sum{k}_{j}_"
                w.line(f"var sum{k}_{j}_: {kind} = {kind}(0.0);", 1)
        values: dict[Member, list[str]] = {}
        exponents: dict[Member, str] = {}

        def read() -> None:
            for m in self.pairs:
                v, guard = w.value(self.bodies[m]), inside(w)
                if guard:
                    least = identity(w, "max", "f32", self._is_wide(m))
                    v = w.let(f"select({least}, {v}, {guard})", 2)
                values.setdefault(m, []).append(v)
            beside()

        def between() -> None:
            for m, of in values.items():
                exponents[m] = self._grow(m, of)
            values.clear()

        def add() -> None:
            for m, sums in self.pairs.items():
                for s in sums:
                    self._add(s, exponents[m])

        walks.walk(read, between, add)

    def _is_wide(self, m: Member) -> bool:
        if self.vector is None:
            return False
        counts = m.stage.monoid == "sum"  # each of four elements, equal or not
        return counts or bool(self.bodies[m].free >> self.vector & 1)

    def _grow(self, m: Member, values: Sequence[str]) -> str:
        """Raise the maximum, shrink its sums; gives what y is lowered by."""
        w, most = self.w, self.state[m]
        base = most.replace("most", "base")
        wide = self._is_wide(m)
        plain = self._told_by_sum(m) is not None
        step = values[0]
        for v in values[1:]:
            step = self._max(step, v, wide, plain)
        if wide:
            step = w.let(step, 2)
            step = self._max(
                self._max(f"{step}.x", f"{step}.y", False, plain),
                self._max(f"{step}.z", f"{step}.w", False, plain),
                False,
                plain,
            )
        new = w.let(self._max(most, step, False, plain), 2, "new")
        low = w.let(f"select({new}, 0.0, sd_isinf({new}))", 2, "low")
        # Sums below no maximum are 0, and those with an infinite one are not lowered.
        kept = f"sd_isinf({most}) || sd_isinf({new})"
        shrink = w.let(f"select({self._exp(f'{base} - {low}', False)}, 1.0, {kept})", 2)
        for s in self.pairs[m]:
            w.line(f"{self.state[s]} = {self.state[s]} * {shrink};")
        w.line(f"{most} = {new};")
        w.line(f"{base} = {low};")
        return low

    def _max(self, a: str, b: str, wide: bool, plain: bool) -> str:
        return f"max({a}, {b})" if plain else combine("max", a, b, "f32", wide)

    def _told_by_sum(self, m: Member) -> Member | None:
        """A sum of the exponentials alone: it is NaN where some y is, so that the
        maximum need not ask each.
        """
        return told_by_sum(m, self.pairs[m], self.bodies)

    def _add(self, s: Member, low: str) -> None:
        w = self.w
        term = _term(self.bodies[s])
        assert term is not None
        f = term[0]
        if f not in w.memo[-1]:
            y = f.args[0].args[0]
            wide = w.is_vector(y)
            lowered = f"{w.value(y)} - {f'vec4<f32>({low})' if wide else low}"
            w.memo[-1][f] = w.let(self._exp(lowered, wide), 2)
        body = self.bodies[s]
        v = w.splat(body) if self._is_wide(s) else w.value(body)
        guard = inside(w)
        if guard:
            zero = identity(w, "sum", "f32", self._is_wide(s))
            v = f"select({zero}, {v}, {guard})"
        w.line(f"{self.state[s]} = {self.state[s]} + {v};")

    def _exp(self, x: str, wide: bool) -> str:
        """exp(x) for x ≤ 0: an error that grows with |x| counts for nothing in a sum
        that has a 1.
        """
        if self.w.target.family == "software":
            return spell("exp", [f"({x})"], "f32", wide)
        return f"exp2(({x}) * {_LOG2E})"

    def results(self, tree: Tree) -> list[tuple[Member, str]]:
        """Reductions with their results, each known to all lanes."""
        w = self.w
        found: list[tuple[Member, str]] = []
        for m, sums in self.pairs.items():
            most = self.state[m]
            own = {s: self._total(s) for s in sums}
            told = self._told_by_sum(m)
            greatest = most
            if told is not None:
                nan = f"sd_isnan({own[told]})"
                greatest = w.let(f"select({most}, sd_nan(), {nan})", 1)
            base = most.replace("most", "base")
            if tree.subgroups:
                whole, totals = self._by_subgroups(tree, greatest, base, own)
            else:
                (whole,) = tree.reduce([("max", "f32", greatest)], 1)
                whole = w.let(whole, 1, "r")
                factor = self._lowered(most, base, whole)
                each = [w.let(f"{own[s]} * {factor}", 1) for s in sums]
                totals = tree.reduce([("sum", "f32", v) for v in each], 1)
            found.append((m, whole))
            for s, r in zip(sums, totals, strict=True):
                if lowered_plainly(self.bodies[s]):
                    r = f"select({r}, sd_nan(), sd_isinf({whole}))"
                found.append((s, w.let(r, 1, "r")))
        return found

    def _by_subgroups(
        self, tree: Tree, greatest: str, base: str, own: Mapping[Member, str]
    ) -> tuple[str, list[str]]:
        """The row's maximum and sums: each subgroup brings its lanes' sums on its own
        maximum, so that all go through workgroup memory at once.
        """
        w = self.w
        part = w.let(subgroup("max", greatest, "f32"), 1, "s")
        factor = self._lowered(greatest, base, part)
        parts = [w.let(f"subgroupAdd({v} * {factor})", 1, "s") for v in own.values()]
        most, *sums = tree.laid_down([("f32", v) for v in (part, *parts)], 1)
        w.line(f"var {(top := w.fresh('s'))} = {identity(w, 'max', 'f32')};", 1)
        loop = "for (var q = sg_lane; q < sg_count; q += sg_size)"
        w.line(f"{loop} {{ {top} = {combine('max', top, f'{most}[q]', 'f32')}; }}", 1)
        whole = w.let(subgroup("max", top, "f32"), 1, "r")
        totals = [w.fresh("s") for _ in sums]
        for total in totals:
            w.line(f"var {total} = 0.0;", 1)
        w.open()
        shift = w.let(f"select({most}[q], 0.0, sd_isinf({most}[q]))", -1, "low")
        factor = self._lowered(f"{most}[q]", shift, whole, -1)
        for total, name in zip(totals, sums, strict=True):
            w.line(f"{total} = {total} + {name}[q] * {factor};")
        w.blocks[1] += [f"{loop} {{", *indent(w.close()), "}"]
        return whole, [f"subgroupAdd({total})" for total in totals]

    def _lowered(self, most: str, base: str, whole: str, depth: int = 1) -> str:
        """What a sum below one maximum is multiplied by to be below a greater one."""
        w = self.w
        low = w.let(f"select({whole}, 0.0, sd_isinf({whole}))", depth, "low")
        # Sums below no maximum are 0, and those with an infinite one are not lowered.
        kept = f"sd_isinf({most}) || sd_isinf({whole})"
        shrunk = self._exp(f"{base} - {low}", False)
        return w.let(f"select({shrunk}, 1.0, {kept})", depth)

    def _total(self, s: Member) -> str:
        name = self.state[s]
        if not self._is_wide(s):
            return name
        return self.w.let(horizontal("sum", name, "f32"), 1)
