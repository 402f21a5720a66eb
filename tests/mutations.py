"""Break one rule at a time and see that the tests notice.

``python tests/mutations.py`` copies the package aside, makes one change, runs the tests
that should fail and puts it back, for every row below. The exit status is 0 if each was
caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """One change.

    Args:
        rule: what is broken.
        file: below the package.
        old, new: texts; the old one appears once.
        tests: what pytest is asked to run.
    """

    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a sign in a partial: ∂(a - b)/∂b = 1",
        "ir/primitives.py",
        "lambda g, a, y: (g, -g),",
        "lambda g, a, y: (g, g),",
        ("tests/test_differentiate.py",),
    ),
    Mutation(
        "a missing un-broadcast: a summed axis that nothing depends on is dropped",
        "ir/stage.py",
        "                outer.append(factor)\n",
        "                pass\n",
        ("tests/test_differentiate.py",),
    ),
    Mutation(
        "a wrong identity: max begins at 0",
        "ir/stage.py",
        'Monoid("max", "maximum", {"f32": -_INF,',
        'Monoid("max", "maximum", {"f32": 0.0,',
        ("tests/test_cases.py", "-k", "n28"),
    ),
    Mutation(
        "a dropped mask: guards that are hoisted out of a sum are forgotten",
        "ir/stage.py",
        "    return E.guard(outer_guards, value)\n",
        "    return value\n",
        ("tests/test_differentiate.py", "tests/test_cases.py"),
    ),
    Mutation(
        "off by one at a row's edge: the element after the last takes part",
        "codegen/row.py",
        "{v}, {inside})",
        "{v}, true)",
        ("tests/test_ops_properties.py", "-k", "test_rows or (test_op and softmax)"),
    ),
    Mutation(
        "ties of a maximum each get the whole cotangent",
        "ir/differentiate.py",
        '1.0 / count, 0.0)',
        "1.0, 0.0)",
        ("tests/test_cases.py", "-k", "test_value and (G01 or G17)"),
    ),
    Mutation(
        "a masked row of logsumexp makes NaN: 0 · ∞ is not 0",
        "ir/primitives.py",
        '"select({0} * {1}, {T}(0), {0} == {T}(0))"',
        '"{0} * {1}"',
        ("tests/test_breakers.py", "-k", "cotangent or minus_infinity"),
    ),
    Mutation(
        "variance in one pass: mean(x²) - mean(x)²",
        "namespace.py",
        "    d = x - centre\n    return narrow(mean(d * d, over,",
        "    d = x\n    return narrow(-mean(centre * centre, over, axis=axis, "
        "keepdims=keepdims) + mean(d * d, over,",
        ("tests/test_breakers.py", "-k", "variance"),
    ),
    Mutation(
        "NaN is told by x != x, which drivers fold",
        "ir/wgsl_math/special.py",
        "  return (bitcast<{U}>(x) & {U}(0x7fffffffu)) > {U}(0x7f800000u);",
        "  return x != x;",
        ("tests/test_wgsl_math.py", "-k", "bits or edges"),
    ),
    Mutation(
        "a donated array that somebody else sees is overwritten",
        "runtime/executable.py",
        "            or inputs[i].allocation.shared\n",
        "",
        ("tests/test_runtime.py", "tests/test_arena.py", "-k", "shared or twice"),
    ),
    Mutation(
        "x · 0 is left to the driver",
        "codegen/writer.py",
        "        if whole is not None:\n",
        "        if False:\n",
        ("tests/test_breakers.py", "-k", "vanishes"),
    ),
    Mutation(
        "a file is written in place",
        "checkpoint.py",
        '    aside = path.with_name(f".{path.name}.tmp")',
        "    aside = path",
        ("tests/test_checkpoint.py", "-k", "file"),
    ),
    Mutation(
        "loop iterations of products in registers are not counted",
        "codegen/contract.py",
        "    budget = c.target.loop_budget // 2\n",
        "    budget = 1 << 30\n",
        ("tests/test_loop_budget.py", "-k", "small_budget and software"),
    ),
    Mutation(
        "loop iterations of products in tiles are not counted",
        "codegen/contract.py",
        "min(_LONGEST, target.loop_budget // 2)",
        "_LONGEST",
        ("tests/test_loop_budget.py", "-k", "gpu"),
    ),
    Mutation(
        "loop iterations of rows are not counted",
        "codegen/budget.py",
        "    return min(most, _POSITIONS)\n",
        "    return 1 << 40\n",
        ("tests/test_loop_budget.py", "-k", "small_budget and software"),
    ),
    Mutation(
        "loop iterations of the phases of a row are not added up",
        "codegen/budget.py",
        "    return walks * steps <= target.loop_budget // 2\n",
        "    return True\n",
        ("tests/test_loop_budget.py", "-k", "small_budget and software"),
    ),
    Mutation(
        "loop iterations of running sums are not counted",
        "codegen/budget.py",
        "    return row_lanes(target) * max(1, target.loop_budget // 4)\n",
        "    return 1 << 40\n",
        ("tests/test_loop_budget.py", "-k", "long_loops and scan"),
    ),
    Mutation(
        "loop iterations of turns over rows are not counted",
        "codegen/row.py",
        "    return replace(s, groups=max(s.groups, -(-rows // (turns * s.rows))))\n",
        "    return s\n",
        ("tests/test_loop_budget.py", "-k", "small_budget and software"),
    ),
    Mutation(
        "loop iterations of pieces of lines are not counted",
        "codegen/online_split.py",
        "    needed = steps_of(steps * loops, target.loop_budget * 4 // 5)\n",
        "    needed = 1\n",
        ("tests/test_loop_budget.py", "tests/test_decoding.py",
         "-k", "small_budget or budget_of_loops"),
    ),
    Mutation(
        "the software driver's loop budget is taken to be endless",
        "codegen/target.py",
        "SOFTWARE_LOOP_BUDGET = 60_000",
        "SOFTWARE_LOOP_BUDGET = 1 << 30",
        ("tests/test_loop_budget.py", "-k", "long_loops"),
    ),
    Mutation(
        "loops over blocks make products again that are compared with their maximum",
        "codegen/blocks_find.py",
        "        exact = compared(order, outs, large)\n",
        "        exact = set()\n",
        ("tests/test_breakers.py", "-k", "whoever"),
    ),
    Mutation(
        "one pass makes products again that are compared with their maximum",
        "codegen/online_find.py",
        "    exact = compared(order, outs, products)\n",
        "    exact = set()\n",
        ("tests/test_breakers.py", "-k", "whoever"),
    ),
    Mutation(
        "backward makes products again that are compared with their maximum",
        "function.py",
        "    again -= compared(topo_stages([*outs, *real]), outs, again)\n",
        "",
        ("tests/test_breakers.py", "-k", "whoever"),
    ),
    Mutation(
        "a sum goes along with the running maximum of other elements of its row",
        "codegen/row_online.py",
        "set(conjuncts(most.args[0])) == guards",
        "True",
        ("tests/test_masked_maxima.py", "-k", "rows"),
    ),
    Mutation(
        "a sum goes along with the running maximum of other products",
        "codegen/online_chain.py",
        "return own is score and seen <= asked",
        "return True",
        ("tests/test_masked_maxima.py", "-k", "products"),
    ),
    Mutation(
        "what is to be stored is not stored where kernels are joined",
        "codegen/joint.py",
        '            or m.stage.keep == "store"\n',
        "",
        ("tests/test_joint.py", "-k", "stored"),
    ),
    Mutation(
        "a sum over blocks is looked for under its first name",
        "codegen/blocks.py",
        "program.places.get(made[block.body.stages[s]])",
        "program.places.get(block.body.stages[s])",
        ("tests/test_blocks.py", "-k", "cut_as_well"),
    ),
)  # fmt: skip


def caught(m: Mutation) -> tuple[bool, str, float]:
    """Whether the tests notice; the first that does, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("shaderdsl", "tests", "docs"):
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "shaderdsl" / m.file
        text = path.read_text("utf-8")
        if text.count(m.old) != 1:
            raise SystemExit(f"{m.file} has {text.count(m.old)} times: {m.old}")
        path.write_text(text.replace(m.old, m.new), "utf-8")
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             *m.tests],
            cwd=copy, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": folder,
                 "SHADERDSL_CACHE": str(copy / "cache")},
        )  # fmt: skip
        failed = [x for x in done.stdout.splitlines() if x.startswith("FAILED")]
        first = failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else ""
        spent = time.perf_counter() - start
        if done.returncode not in (0, 1) or (done.returncode and not failed):
            raise SystemExit(f"{m.rule}: pytest itself failed\n{done.stdout[-2000:]}")
        return bool(failed), first, spent


def main() -> int:
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or sys.argv[1] in m.rule]
    missed = 0
    for m in chosen:
        found, first, spent = caught(m)
        missed += not found
        verdict = f"caught by {first}" if found else "NOT CAUGHT"
        print(f"- {m.rule}: {verdict} ({spent:.0f} s)", flush=True)
    print(f"{len(chosen)} rules broken, {len(chosen) - missed} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
