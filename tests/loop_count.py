"""What kernels spend on loops: their texts count for themselves."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from shaderdsl.codegen.program import Binding, Program
from shaderdsl.ir.stage import input_stage

#: Every loop of a kernel begins like this. Those over a workgroup's subgroups, which
#: only GPUs' kernels have, are as long as a workgroup is wide, whatever the sizes.
LOOP = re.compile(
    r"\bfor \((?![^{\n]*sg_count)[^{\n]*\) \{|\bloop \{|\bwhile [^{\n]*\{"
)


def counted(kernel, most):
    """The kernel with a count of each invocation's loop iterations, all loops
    together; the greatest count goes to ``most``, a binding after the others.
    """
    n = len(kernel.bindings)
    text = kernel.wgsl.replace(
        f"@binding({n}) var<uniform>", f"@binding({n + 1}) var<uniform>"
    )
    text, loops = LOOP.subn(lambda found: f"{found[0]} spend();", text)
    head, main, body = text.partition("@compute")
    assert main
    helper = (
        f"@group(0) @binding({n}) var<storage, read_write> most_spent: "
        "array<atomic<u32>>;\n"
        "var<private> spent: u32;\n"
        "fn spend() { spent = spent + 1u; atomicMax(&most_spent[0], spent); }\n"
        "fn bind_spent() { atomicMax(&most_spent[0], 0u); }\n"
    )
    # A binding that nothing uses is no binding.
    body = re.sub(r"(fn main\([^{]*\{)", r"\1 bind_spent();", body, count=1)
    # Every name is known in all of a module.
    enable = "".join(re.findall(r"^enable .*;\n", head, re.M))
    head = re.sub(r"^enable .*;\n", "", head, flags=re.M)
    kernel = dataclasses.replace(
        kernel,
        wgsl=enable + head + helper + main + body,
        bindings=(*kernel.bindings, Binding(most, "read_write")),
    )
    return kernel, loops


def run_counted(device, program, buffers, scalars=None):
    """Run a program; its results, and for each kernel its name, how many loops its
    text has and the most iterations that one of its invocations spent.
    """
    kernels, counts, loops = [], [], []
    for k, kernel in enumerate(program.kernels):
        counts.append(input_stage((4,), "u32", f"spent{k}"))
        kernel, found = counted(kernel, counts[-1])
        kernels.append(kernel)
        loops.append(found)
    n = len(program.inputs)
    whole = Program(
        tuple(kernels),
        (*program.inputs, *counts),
        (*program.outputs, *counts),
        program.donated | frozenset(range(n, n + len(counts))),
        program.scalars,
        (),
        program.places,
        program.inside,
    )
    zeros = [device.upload(np.zeros(4, np.uint32), "u32") for _ in counts]
    results = device.build(whole)([*buffers, *zeros], scalars or {})
    spent = [
        int(device.download(b, (4,), "u32")[0]) for b in results[len(program.outputs) :]
    ]
    names = [(k.name, k.archetype) for k in program.kernels]
    return results[: len(program.outputs)], list(zip(names, loops, spent, strict=True))
