"""What an online kernel is made of: products computed again, and runs along them.

A *product* is a contraction X[r, l] = Σ_d near[r, d] · far[l, d] that a kernel can
compute again, so that X is never stored. A *run* reads X and is accumulated along l:
a maximum, a sum, or a weighted sum A[r, c] = Σ_l f(X)[r, l] · w[l, c].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, factors, product
from .member import ContractParts, Inliner, Member, anchor_axes, contract_parts

#: Longest inner and output axis that a thread keeps a share of in registers.
LONGEST = 256
#: Operations of one run's body, beyond which drivers compile too long.
_NODES = 400


@dataclass(eq=False)
class Run:
    """A reader of products. ``places``: each product's own axes → the reader's axes."""

    member: Member
    places: dict[Stage, dict[int, int]]
    column: int | None
    shift: tuple[Expr, Stage] | None = None  # exp(y - m): the factor, and m

    @property
    def stage(self) -> Stage:
        """What is accumulated."""
        return self.member.stage


def soft_maps(order: Sequence[Stage], products: dict[Stage, Member]) -> set[Stage]:
    """Maps of products."""
    soft: set[Stage] = set()
    for s in order:
        if s.kind == "map" and any(
            n.data in products or n.data in soft for n in s.loads
        ):
            soft.add(s)
    return soft


# ------------------------------------------------------------------ products


def find_products(
    order: Sequence[Stage], anchors: set[Stage], outs: set[Stage]
) -> dict[Stage, Member]:
    """Contractions over one short axis whose results go through an exponential.

    A product of what a product gives is none: it could not be computed again. Sums of
    short lines are such, and what follows from them may be products again.
    """
    likely = {s for s in order if may_be_product(s) and s not in outs}
    if not likely:
        return {}
    hot = _exponentials(order)
    inliner = Inliner(anchors)
    out: dict[Stage, Member] = {}
    soft: set[Stage] = set()  # products and their maps
    for s in order:
        if s.kind == "map" and any(n.data in soft for n in s.loads):
            soft.add(s)
        if s not in likely or s not in hot or s.body is None:
            continue
        body = inliner.body(s.body, s.space)
        loads = tuple(E.loads(body))
        parts = contract_parts(s, body) or _one_row(s, body)
        if parts is None or len(parts.k) != 1 or any(n.data in soft for n in loads):
            continue
        out[s] = Member(s, body, "online", *_own_axes(s), loads)
        soft.add(s)
    return out


def _one_row(s: Stage, body: Expr) -> ContractParts | None:
    """A product of a single row: X[l] = Σ_d near[d] · far[l, d], with batches or not.

    No contraction, since its near factor has no output axis of its own.
    """
    no = len(s.ext)
    own = sum(1 << a for a in range(no) if s.ext[a] != 1)
    red = tuple(a for a in range(no, len(s.space)) if s.space[a] != 1)
    summed = sum(1 << a for a in red)
    number, fs, guards = factors(body)
    batch = own
    for f in fs:
        if f.free & summed:
            batch &= f.free
    lines = own & ~batch
    near = [f for f in fs if not f.free & lines]
    far = [f for f in fs if f.free & lines]
    if not lines or not any(f.free & summed for f in near):
        return None
    return ContractParts(
        number,
        product(near),
        E.guard(guards, product(far)),
        tuple(E.bits(batch)),
        (),
        tuple(E.bits(lines)),
        red,
    )


def may_be_product(s: Stage) -> bool:
    """Whether a stage is a sum over one short axis."""
    live = [n for n in s.rext if n != 1]
    return (
        s.kind == "reduce"
        and s.monoid == "sum"
        and s.dtype == "f32"
        and len(live) == 1
        and live[0] <= LONGEST
        and any(n != 1 for n in s.ext)
    )


def _own_axes(s: Stage) -> tuple[tuple[int, ...], tuple[int, ...]]:
    n = len(s.ext)
    return (
        tuple(a for a in range(n) if s.space[a] != 1),
        tuple(a for a in range(n, len(s.space)) if s.space[a] != 1),
    )


def _exponentials(order: Sequence[Stage]) -> set[Stage]:
    """Reductions that a body with an exponential reads, at once or through maps that
    are not stored by request.
    """
    hot: set[Stage] = set()
    for s in reversed(order):
        if s.body is None:
            continue
        own = E.known(s.body, "exp", partial(_has_exponential, s.body))
        if own or (s.kind == "map" and s in hot and s.keep != "store"):
            hot |= {n.data for n in s.loads}
    return hot


def _has_exponential(body: Expr) -> bool:
    return any(n.kind == "apply" and n.data == "exp" for n in E.values(body))


def parts_of(member: Member) -> ContractParts:
    """A product taken apart."""
    parts = contract_parts(member.stage, member.body)
    parts = parts or _one_row(member.stage, member.body)
    assert parts is not None
    return parts


# ------------------------------------------------------------------ runs


def as_run(member: Member, products: dict[Stage, Member]) -> Run | str:
    """A reader as a run, or why it is none."""
    s = member.stage
    if s.kind != "reduce" or s.monoid not in ("sum", "max") or s.dtype != "f32":
        return "it is no sum or maximum"
    places: dict[Stage, dict[int, int]] = {}
    for n in member.loads:
        if n.data not in products:
            continue
        axes = anchor_axes(n, member.space)
        if axes is None:
            return f"it reads {n.data.name} at indices that are no plain axes"
        place = dict(zip(products[n.data].out, axes, strict=True))
        if places.setdefault(n.data, place) != place:
            return f"it reads {n.data.name} in two ways"
    walks = [set(p.values()) for p in places.values()]
    if any(w != walks[0] for w in walks):
        return "its products have different axes"
    if not set(member.red) <= walks[0]:
        return "it reduces an axis that its product has not"
    columns = [a for a in member.out if a not in walks[0]]
    if len(columns) > 1:
        return "it has two axes more than its product"
    if columns and (s.monoid == "max" or s.space[columns[0]] > LONGEST):
        return f"its other axis has {s.space[columns[0]]} elements"
    if sum(1 for n in E.values(member.body)) > _NODES:
        return "its body is too long"
    run = Run(member, places, columns[0] if columns else None)
    if s.monoid == "sum" and split_run(run) is None:
        return "it is no sum of products of rows and columns"
    run.shift = _shift(run, products)
    return run


@dataclass
class Terms:
    """``number · outer · Σ where(guards, ∏ values · weight, 0)``."""

    number: float
    values: list[Expr]
    weight: list[Expr]
    guards: list[Expr]
    outer: list[Expr]


def split_run(run: Run) -> Terms | None:
    """A sum's factors: with its column, of the products' axes, without reduced axes."""
    m = run.member
    red = sum(1 << a for a in m.red)
    column = 0 if run.column is None else 1 << run.column
    number, fs, guards = factors(m.body)
    terms = Terms(number, [], [], guards, [])
    for f in fs:
        reads = any(n.data in run.places for n in E.loads(f))
        if f.free & column:
            if reads:
                return None
            terms.weight.append(f)
        elif f.free & red or reads:
            terms.values.append(f)
        else:
            terms.outer.append(f)
    if any(g.free & column for g in guards):
        return None
    return terms


def _shift(run: Run, products: dict[Stage, Member]) -> tuple[Expr, Stage] | None:
    """The factor exp(y - m) of a sum, where m is a maximum over the same axes."""
    terms = split_run(run) if run.stage.monoid == "sum" else None
    for f in terms.values if terms else ():
        if not (f.kind == "apply" and f.data == "exp" and f.args[0].kind == "apply"):
            continue
        if f.args[0].data != "sub":
            continue
        m = maximum_of(f.args[0].args[1])
        if m is not None and m.data.monoid == "max":
            rest = [n for n in E.loads(f.args[0].args[0]) if n.data is m.data]
            if not rest and any(n.data in products for n in E.loads(f)):
                return f, m.data
    return None


def maximum_of(e: Expr) -> Expr | None:
    """The load of m in ``m``, ``stop_gradient(m)`` and ``where(isinf(m), 0, m)``."""
    while e.kind == "apply":
        if e.data == "stop_gradient":
            e = e.args[0]
        elif e.data == "where":
            c, zero, m = e.args
            if not (zero.kind == "const" and zero.data == 0.0):
                return None
            if not (c.kind == "apply" and c.data == "isinf" and c.args[0] is m):
                return None
            e = m
        else:
            return None
    return e if e.kind == "load" and e.data.kind == "reduce" else None


def unwrapped(e: Expr) -> Expr:
    """The same value without what only its derivative sees."""
    while e.kind == "apply" and e.data == "stop_gradient":
        e = e.args[0]
    return e


# ------------------------------------------------------------------ conditions


def zero_guards(e: Expr) -> list[Expr]:
    """Conditions of which each one's failure makes a value 0."""
    if e.kind != "apply":
        return []
    if e.data == "where" and e.args[2].kind == "const" and e.args[2].data == 0:
        return [*conjuncts(e.args[0]), *zero_guards(e.args[1])]
    if e.data in ("add", "sub"):
        right = zero_guards(e.args[1])
        return [c for c in zero_guards(e.args[0]) if c in right]
    if e.data in ("mul", "mulz"):
        return [*zero_guards(e.args[0]), *zero_guards(e.args[1])]
    if e.data in ("neg", "div"):
        return zero_guards(e.args[0])
    return []


def conjuncts(c: Expr) -> list[Expr]:
    """Conditions that hold together where one holds."""
    if c.kind == "apply" and c.data == "and":
        return [*conjuncts(c.args[0]), *conjuncts(c.args[1])]
    return [c]
