"""Where a product of a product can run in one pass: attention, found by structure.

Runs of the same products over the same rows form a *chain*, which is one kernel. Sums
of exp(y - m), m being the chain's own running maximum, are rescaled when m grows.

Everything is decided from the graph alone: softmax(q kᵀ) v of any spelling is
found, and so are the sums of its derivative, which read the maximum as an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage
from .compared import compared
from .member import Inliner, Member, make_member
from .online_chain import Chain, Stored, bindings, complete
from .online_readers import CROWDED, NO_SUM, Points, as_points, group_points
from .online_runs import (
    Run,
    as_run,
    find_products,
    soft_maps,
    split_run,
)
from .online_scores import Scores, reach_of, scores_budget, store_scores
from .target import Target


@dataclass
class Layout:
    """The axes of a chain's kernel, and each member's own axes among them."""

    rows: tuple[int, ...]
    lanes: tuple[int, ...]
    products: list[tuple[Member, list[int]]]
    runs: list[tuple[Member, list[int]]]
    why: str


@dataclass
class Found:
    """Chains of a graph.

    Args:
        virtual: products that exist only inside of kernels.
        anchors: stages that are stored or reduced, as all others see them.
        inner: the same as the chains' bodies see them.
        points: sums that compute products at places of their own.
        crowded: how many would bind too many arrays.
        scores: maps of products that a chain stores.
        log: what was not taken, and why.
    """

    anchors: set[Stage]
    inner: set[Stage]
    chains: list[Chain] = field(default_factory=list)
    products: dict[Stage, Member] = field(default_factory=dict)
    virtual: set[Stage] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)
    crowded: int = 0
    scores: dict[Stage, Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kernels: list[Chain | Points] = [*self.chains, *self.points]
        self.runs = {r.stage: r for c in kernels for r in c.runs}
        self.chain_of = {r.stage: c for c in kernels for r in c.runs}

    def product_loads(self, m: Member) -> list[Expr]:
        """What the products load that a run computes again."""
        run = self.runs.get(m.stage)
        if run is None or run.member is not m:
            return []
        return [n for x in run.places for n in self.products[x].loads]

    def together(self, members: Sequence[Member]) -> list[Member]:
        """Members so ordered that all that a chain needs comes before its first run."""
        if not self.chains:
            return list(members)
        made = {m.stage: m for m in members}
        done: set[Stage] = set()
        out: list[Member] = []
        for start in members:
            stack = [(start.stage, False)]
            while stack:
                s, ready = stack.pop()
                chain = self.chain_of.get(s)
                unit = [s] if chain is None else [r.stage for r in chain.runs]
                if s in done:
                    continue
                if ready:
                    out += [made[t] for t in unit]
                    done |= set(unit)
                    continue
                stack.append((s, True))
                needs = [n for t in unit for n in made[t].loads]
                needs += [n for t in unit for n in self.product_loads(made[t])]
                for n in reversed(needs):
                    if n.data in made and n.data not in done and n.data not in unit:
                        stack.append((n.data, False))
        return out

    def layout(self, c: Chain | Points) -> Layout:
        """Axes of the kernel: batch, row; line, other reduced axes; inner, columns.

        Products are members that each kernel has for itself.
        """
        if isinstance(c, Points):
            return self._layout_points(c)
        batch = sorted(a for a in c.extents if a != c.row and a not in c.reduced)
        rows = [*batch, c.row]
        lanes = [c.line, *sorted(c.reduced - {c.line})]
        place = {a: i for i, a in enumerate([*rows, *lanes])}
        extents = [c.extents[a] for a in lanes]
        products, runs = [], []
        for x, p in c.places.items():
            m = self.products[x]
            own = Member(m.stage, m.body, "online", m.out, m.red, m.loads)
            inner = len(rows) + len(extents)
            products.append((own, [*(place[p[a]] for a in m.out), inner]))
            extents.append(m.space[m.red[0]])
        for r in c.runs:
            m = r.member
            m.role = "online"
            symbols = c.symbols(r)
            assert symbols is not None
            where = {a: place[q] for a, q in symbols.items()}
            if r.column is not None:
                where[r.column] = len(rows) + len(extents)
                extents.append(m.space[r.column])
            runs.append((m, [where[a] for a in m.axes]))
        names = ", ".join(dict.fromkeys(x.name for x in c.places))
        return Layout(
            tuple(c.extents[a] for a in rows),
            tuple(extents),
            products,
            runs,
            f"one pass: {names} computed again here and never stored",
        )

    def _layout_points(self, p: Points) -> Layout:
        """Axes of the kernel: those of the sums; then each product's own."""
        first = p.runs[0].member
        rows = [first.space[a] for a in first.out]
        lanes = [first.space[a] for a in first.red]
        products = []
        for x in p.products:
            m = self.products[x]
            own = Member(m.stage, m.body, "online", m.out, m.red, m.loads)
            start = len(rows) + len(lanes)
            products.append((own, list(range(start, start + len(m.axes)))))
            lanes += [m.space[a] for a in m.axes]
        runs = []
        for r in p.runs:
            r.member.role = "points"
            runs.append((r.member, list(range(len(r.member.axes)))))
        names = ", ".join(dict.fromkeys(x.name for x in p.products))
        why = f"{names} computed again at each place and never stored"
        return Layout(tuple(rows), tuple(lanes), products, runs, why)


def find_chains(
    order: Sequence[Stage], anchors: set[Stage], outs: set[Stage], target: Target
) -> Found:
    """All chains of a graph.

    Where kernels would bind too many arrays, factors that are computed from several
    are stored first.
    """
    found = _find(order, anchors, outs, target)
    if found.crowded:
        maps = _computed_factors(order, anchors, outs)
        again = _find(order, anchors | maps, outs, target) if maps else found
        if again.crowded < found.crowded:
            for s in maps:
                again.log.append(
                    f"{s.name} {list(s.shape)} is stored: else kernels would bind more "
                    f"than {target.limits.max_storage_buffers} arrays"
                )
            return again
    return found


def _computed_factors(
    order: Sequence[Stage], anchors: set[Stage], outs: set[Stage]
) -> set[Stage]:
    """Maps of more than one array that are factors of products."""
    inliner = Inliner(anchors)
    maps = set()
    for x in find_products(order, anchors, outs):
        for n in x.loads:
            s: Stage = n.data
            while s.kind == "map" and s.body is not None and s.body.kind == "load":
                s = s.body.data
            if s.kind == "map" and s.body is not None and s not in anchors:
                loads = E.loads(inliner.body(s.body, s.space))
                if len({n.data for n in loads}) > 1:
                    maps.add(s)
    return maps


def _find(
    order: Sequence[Stage],
    anchors: set[Stage],
    outs: set[Stage],
    target: Target,
    small: frozenset[Stage] = frozenset(),
) -> Found:
    none = Found(anchors, anchors)
    products = find_products(order, anchors, outs) if target.online else {}
    exact = compared(order, outs, products)
    products = {x: m for x, m in products.items() if x not in small | exact}
    for x in exact:
        none.log.append(
            f"{x.name} {list(x.shape)} is stored: it is compared with its own maximum"
        )
    if not products:
        return none
    soft = soft_maps(order, products)
    inner = anchors - (soft - outs)
    inliner = Inliner(inner)
    runs: list[Run] = []
    others: dict[Stage, Run] = {}
    refused: dict[Stage, str] = {}
    readers: dict[Stage, list[Stage]] = {x: [] for x in products}
    stored: Stored = {s: {None} for s in outs}
    for s in order:
        if s.body is not None and (s.kind == "reduce" or s in inner):
            for n in E.loads(inliner.body(s.body, s.space)):
                stored.setdefault(n.data, set()).add(s)
        if s not in inner or s.body is None:
            continue
        if not any(n.data in products or n.data in soft for n in s.loads):
            continue
        member = make_member(s, inliner.body(s.body, s.space))
        mine = {n.data for n in member.loads if n.data in products}
        if not mine:  # what it reads of a product is stored
            continue
        for x in mine:
            readers[x].append(s)
        run = as_run(member, products)
        if not isinstance(run, str):
            runs.append(run)
            continue
        apart = as_points(member, products, target)
        if isinstance(apart, str):
            refused[s] = run if apart == NO_SUM else f"{run}; {apart}"
        else:
            others[s] = apart
    reach = reach_of(order, [*(r.stage for r in runs), *others])
    chains: list[Chain] = []
    for run in runs:
        if not any(_join(c, run, products, reach, stored, target) for c in chains):
            chains.append(_open(run))
    bare = [c for c in chains if complete(c, products, stored, target, [], bare=True)]
    chains = [c for c in chains if complete(c, products, stored, target, none.log)]
    needed = {x for c in chains for x in c.places}
    more = {x for x in products if x.nbytes < target.online_from and x not in needed}
    if more:
        return _find(order, anchors, outs, target, small | more)
    none.crowded = sum(CROWDED in x for x in (*none.log, *refused.values()))
    for s, reason in refused.items():
        none.log.append(f"{s.name} {list(s.shape)} is not part of one pass: {reason}")
    if not chains:
        for x in products:
            wrong = ", ".join(s.name for s in readers[x] if s in refused)
            if wrong:
                none.log.append(f"{x.name} {list(x.shape)} is stored: {wrong} need it")
        return none
    budget = scores_budget(order, target)
    scores, freed = store_scores(
        chains, order, soft, inner, products, outs, reach, target, budget
    )
    runs = [r for r in runs if r.stage not in freed]
    readers = {x: [s for s in all_ if s not in freed] for x, all_ in readers.items()}
    hosted = {r.stage for c in chains for r in c.runs}
    for run in runs:
        apart = as_points(run.member, products, target)
        if run.stage not in hosted and not isinstance(apart, str):
            others[run.stage] = apart
    used = {x for c in chains for x in c.places}
    others |= {r.stage: r for c in bare for r in c.runs}
    virtual = _never_stored(used, hosted, others, readers)
    # Sums without a column go along where that keeps a product from being stored.
    bare = [c for c in bare if all(others.get(r.stage) is r for r in c.runs)]
    chains += bare
    hosted |= {r.stage for c in bare for r in c.runs}
    others = {s: r for s, r in others.items() if s not in hosted}
    log = none.log
    points = group_points(list(others.values()), products, reach, target)
    hosted |= set(others)
    for x in used - virtual:
        names = ", ".join(s.name for s in readers[x] if s not in hosted)
        log.append(f"{x.name} {list(x.shape)} is stored: {names} need it")
    gone: set[Stage] = set()
    for s in order:
        if s in soft and any(n.data in virtual or n.data in gone for n in s.loads):
            gone.add(s)
    final = anchors - (gone - outs) | set(scores)
    for s in scores:
        log.append(f"{s.name} {list(s.shape)} is stored: two kernels need it")
    kept = {x: products[x] for x in used}
    return Found(final, inner, chains, kept, virtual, log, points, none.crowded, scores)


def _never_stored(
    used: set[Stage],
    hosted: set[Stage],
    others: dict[Stage, Run],
    readers: dict[Stage, list[Stage]],
) -> set[Stage]:
    """Products that nobody needs stored; ``others`` keeps what reads none but these."""
    while True:
        virtual = {
            x for x in used if all(s in hosted or s in others for s in readers[x])
        }
        wrong = [s for s, r in others.items() if not set(r.places) <= virtual]
        if not wrong:
            return virtual
        for s in wrong:
            del others[s]


# ------------------------------------------------------------------ chains


def _open(run: Run) -> Chain:
    member = run.member
    maximum = run.stage if run.stage.monoid == "max" else None
    return Chain(
        [run],
        {x: dict(p) for x, p in run.places.items()},
        set(member.red),
        maximum,
        extents={a: member.space[a] for p in run.places.values() for a in p.values()},
    )


def _join(
    c: Chain,
    run: Run,
    products: dict[Stage, Member],
    reach: dict[Stage, int],
    stored: Stored,
    target: Target,
) -> bool:
    """Add a run to a chain if it fits."""
    if not set(run.places) & set(c.places):
        return False
    symbols = c.symbols(run)
    if symbols is None or set(symbols) != set(next(iter(run.places.values())).values()):
        return False
    if {symbols[a] for a in run.member.red} != c.reduced:
        return False
    if c.maximum is not None:
        # Only what can be rescaled goes along with a running maximum.
        if run.shift is None or run.shift[1] is not c.maximum:
            return False
        if not c.bounds(run):
            return False
    elif run.stage.monoid == "max":
        return False
    trial = [*c.runs, run]
    if not _independent(trial, c.maximum, reach, products):
        return False
    if bindings(trial, products, stored) > target.limits.max_storage_buffers:
        return False
    c.runs.append(run)
    for x, place in run.places.items():
        c.places.setdefault(x, {own: symbols[a] for own, a in place.items()})
    return True


def _independent(
    runs: Sequence[Run],
    maximum: Stage | None,
    reach: dict[Stage, int],
    products: dict[Stage, Member],
) -> bool:
    """Whether nothing that is read along the way needs what only the end gives."""
    inside = {r.stage for r in runs}
    own = 0
    for s in inside:
        below = 0
        for n in s.loads:
            below |= reach.get(n.data, 0)
        own |= reach[s] & ~below
    for r in runs:
        terms = split_run(r) if r.stage.monoid == "sum" else None
        late: set[Expr] = set()
        if terms is None:
            loads = set(r.member.loads)
        else:
            early = [*terms.values, *terms.weight, *terms.guards]
            if r.shift is not None and r.shift[1] is maximum:
                early = [f for f in early if f is not r.shift[0]]
                early.append(r.shift[0].args[0].args[0])
            loads = set(E.loads(*early))
            late = set(E.loads(*terms.outer)) - loads
        for x in r.places:
            loads |= set(products[x].loads)
        if any(reach.get(n.data, 0) & own for n in loads):
            return False
        if any(n.data not in inside and reach.get(n.data, 0) & own for n in late):
            return False
    return True
