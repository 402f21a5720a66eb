"""A compiled function as a folder that a browser runs: plan, WGSL, weights, a page."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import tree
from ..array import Array
from ..codegen.program import Program
from ..codegen.target import PORTABLE, Limits
from ..engine import captured_inputs, lock
from ..errors import LimitError, ShaderError, TraceError
from ..function import Compiled, compile
from ..ir import verify
from ..ir.bounds import HostCheck
from ..ir.expr import user_location
from ..ir.stage import Stage
from ..nn.module import named_arrays
from ..runtime.device import STORAGE
from ..runtime.plan import check_limits
from ..tracing import Traced, host_copies, run_checks, spec
from .files import FORMAT, initial, shards, write
from .layout import Layout, fixed_layout

__all__ = ["Exported", "export_web"]

VERSION = 1

#: A browser, as far as one can know it. Scores below this size are stored: the kernels
#: are shorter, and browsers compile each of them while the page waits.
BROWSER = replace(PORTABLE, name="browser", online_from=32 << 20)

#: Names that the portable limits have in the browser's API.
_LIMIT_NAMES = {
    "max_storage_buffers": "maxStorageBuffersPerShaderStage",
    "max_workgroup_storage": "maxComputeWorkgroupStorageSize",
    "max_invocations": "maxComputeInvocationsPerWorkgroup",
    "max_workgroup_size_x": "maxComputeWorkgroupSizeX",
    "max_workgroups": "maxComputeWorkgroupsPerDimension",
    "max_binding_bytes": "maxStorageBufferBindingSize",
    "max_buffer_bytes": "maxBufferSize",
}


@dataclass(frozen=True)
class Exported:
    """What `export_web` wrote.

    Attributes:
        folder: where.
        inputs: names of the inputs; those in ``given`` need no value from the page.
        given: names of the inputs that have a value already.
        outputs: names of the results.
        feeds: result → the donated input that it becomes for the next call.
        kernels: number of dispatches of one call.
        texts: number of WGSL files.
        weight_bytes: size of the weights on disk.
        memory_bytes: GPU memory that the page will take.
    """

    folder: Path
    inputs: tuple[str, ...]
    given: frozenset[str]
    outputs: tuple[str, ...]
    feeds: Mapping[str, str]
    kernels: int
    texts: int
    weight_bytes: int
    memory_bytes: int


def export_web(
    compiled: Callable[..., Any],
    folder: str | os.PathLike[str],
    *args: Any,
    page: bool = True,
    **keywords: Any,
) -> Exported:
    """Write a compiled function as files that run in a browser with WebGPU.

    The folder gets ``plan.json``, ``kernels/*.wgsl``, ``weights*.safetensors``,
    ``shaderdsl.js`` (an ES module without dependencies) and, with ``page``, an
    ``index.html`` that runs it. Any static file server will do; browsers refuse modules
    from ``file:``. The kernels keep to the limits that every WebGPU implementation
    guarantees, and need no feature. Which device is in use here does not matter.

    Arrays among the arguments become values that the page has from the beginning
    (arrays that the function closes over, too); ``sd.spec(dtype, *shape)`` stands for
    what the page gives before the first call. Parameters named in ``donate`` are state:
    each result of the same structure, in order, becomes that argument of the next call.

    Args:
        compiled: what `sd.compile` gave, an op or any function of arrays.
        args: arguments of one call; without any, those of the call that the function
            was last traced for (arrays that were donated since have no value).
        page: whether to write ``index.html``.

    Raises:
        LimitError: an array is larger than browsers allow; nothing was written.
        TraceError: there are no arguments, and it was never called.

    Example:
        >>> step = sd.compile(train_step, donate=("model", "state"))
        >>> sd.export_web(step, "site", model, state, sd.spec("i32", 4, 64), labels)
    """
    if not callable(compiled):
        raise TraceError(
            f"export_web takes a function, not a {type(compiled).__name__}",
            where=user_location(),
            cure="pass what sd.compile gave",
        )
    function = compiled if isinstance(compiled, Compiled) else compile(compiled)
    given = function.arguments(args, keywords) if args or keywords else None
    traced, donated = function.trace(given if given else _last_call(function))
    with lock:
        captured = captured_inputs(traced.outs, traced.inputs)
        names = _input_names(traced, len(captured))
        verify.check(traced.outs, "before the partition")
        _check_sizes(zip(names, (*traced.inputs, *captured)), traced.outs)
        values = _values(traced, captured)
        # The compiler is loaded when it is first needed: importing stays quick.
        from ..codegen.lower import lower

        program = lower(
            traced.outs,
            replace(BROWSER, scores=function.scores),
            inputs=(*traced.inputs, *captured),
            donated=donated,
        )
    check_limits(program, Limits())
    feeds = _feeds(traced, function, donated)
    layout = fixed_layout(program, feeds)
    _check_slots(layout)
    run_checks(traced.checks, host_copies(traced.inputs, traced.arrays))
    outputs = _output_names(traced, feeds, names)
    title = getattr(function, "__name__", "function")
    plan, texts = _plan(title, program, layout, names, outputs, feeds, values)
    for entry, limit in zip(plan["inputs"], _ranges(traced.checks, program.inputs)):
        if limit is not None:
            entry["below"] = limit
    target = Path(folder)
    parts = shards(program.inputs, names, values)
    plan["weights"] = list(parts)
    write(target, plan, texts, parts, page)
    return Exported(
        folder=target,
        inputs=tuple(names),
        given=frozenset(n for n, v in zip(names, values) if v is not None),
        outputs=tuple(outputs),
        feeds={outputs[j]: names[i] for j, i in feeds.items()},
        kernels=len(plan["kernels"]),
        texts=len(texts),
        weight_bytes=sum(t.value.nbytes for part in parts.values() for t in part),
        memory_bytes=sum(layout.slots),
    )


# ------------------------------------------------------------------ inputs, results


def _last_call(function: Compiled) -> dict[str, Any]:
    """The arguments that the function was last traced for."""
    found = function.last_traced
    if found is None:
        raise TraceError(
            "the function was never called, so its arguments are not known",
            where=user_location(),
            cure="give export_web the arguments of a call; sd.spec(dtype, *shape) "
            "stands for an array",
        )
    leaves = [
        spec(str(leaf.dtype), *leaf.shape)
        if isinstance(leaf, Array) and leaf.donated
        else leaf
        for leaf in found.leaves
    ]
    (arguments,) = tree.unflatten(found.structure, leaves)
    return dict(arguments)


def _values(traced: Traced, captured: Sequence[Stage]) -> list[np.ndarray | None]:
    """What each input holds from the beginning, as a device stores it."""
    arrays = [*traced.arrays, *(s.source for s in captured)]
    if any(a is None for a in arrays):
        raise TraceError(
            "a symbolic array of another trace is used here",
            where=user_location(),
            cure="pass it as an argument",
        )
    return [
        None if a.symbolic else np.ascontiguousarray(a.numpy(), STORAGE[a.dtype])
        for a in arrays
    ]


def _input_names(traced: Traced, captured: int) -> list[str]:
    arguments = tree.unflatten(traced.structure, traced.leaves)[0]
    paths = [path for path, _ in named_arrays(arguments)]
    names = [paths[position] for position in traced.positions]
    return [*names, *(f"captured.{k}" for k in range(captured))]


def _output_names(
    traced: Traced, feeds: Mapping[int, int], inputs: Sequence[str]
) -> list[str]:
    paths = [path for path, _ in named_arrays(_indexed(traced))]
    return [
        inputs[feeds[j]] if j in feeds else paths[position] or "result"
        for j, position in enumerate(traced.out_positions)
    ]


def _indexed(traced: Traced) -> Any:
    """The result with every leaf an object, so that it can be walked by name."""
    return tree.unflatten(traced.result, range(len(traced.result_leaves)))


def _feeds(
    traced: Traced, function: Compiled, donated: frozenset[int]
) -> dict[int, int]:
    """Result → donated input of the next call, by structure, in order."""
    arguments = tree.unflatten(traced.structure, range(len(traced.leaves)))[0]
    position = {leaf: k for k, leaf in enumerate(traced.positions)}
    number = {leaf: j for j, leaf in enumerate(traced.out_positions)}
    result = _indexed(traced)
    several = type(result) in (tuple, list)
    free = list(result) if several else [result]
    feeds: dict[int, int] = {}
    for name in function.donate:
        wanted, structure = tree.flatten(arguments[name])
        inputs = [position[leaf] for leaf in wanted if leaf in position]
        for candidate in free:
            leaves, shape = tree.flatten(candidate)
            outs = [number[leaf] for leaf in leaves if leaf in number]
            if shape == structure and _alike(traced, inputs, outs):
                feeds.update(zip(outs, inputs))
                free = [other for other in free if other is not candidate]
                break
    return {j: i for j, i in feeds.items() if i in donated}


def _alike(traced: Traced, inputs: Sequence[int], outs: Sequence[int]) -> bool:
    ours = [(traced.inputs[i].shape, traced.inputs[i].dtype) for i in inputs]
    return ours == [(traced.outs[j].shape, traced.outs[j].dtype) for j in outs]


def _ranges(checks: Sequence[HostCheck], inputs: Sequence[Stage]) -> list[int | None]:
    """For inputs that are used as ids, without a guard, what ids must be below."""
    found: dict[Stage, int] = {}
    for c in checks:
        if c.index.kind == "load" and not c.guards:
            stage = c.index.data
            found[stage] = min(found.get(stage, c.extent), c.extent)
    return [found.get(stage) for stage in inputs]


# ------------------------------------------------------------------ limits


def _check_sizes(named: Any, outs: Sequence[Stage]) -> None:
    """Refuse arrays that no kernel can bind, all of them in one message."""
    limit = Limits().max_binding_bytes
    arrays = [*named, *((s.name, s) for s in outs)]
    large = {name: s for name, s in arrays if s.nbytes > limit}
    if not large:
        return
    largest = max(large, key=lambda name: large[name].nbytes)
    one = large[largest]
    raise LimitError(
        f"{len(large)} of {len(arrays)} arrays exceed the {limit:,} B that a kernel "
        f"may bind in every browser; the largest is {largest!r}, {one.dtype} "
        f"{list(one.shape)}, with {one.nbytes:,} B; nothing was written",
        where=user_location(),
        cure="store it as f16, or split it",
    )


def _check_slots(layout: Layout) -> None:
    limit = Limits().max_buffer_bytes
    if (largest := max(layout.slots, default=0)) > limit:
        raise LimitError(
            f"the plan needs a buffer of {largest:,} B, browsers allow {limit:,} B; "
            f"nothing was written",
            where=user_location(),
            cure="smaller batches, or a smaller model",
        )


# ------------------------------------------------------------------ the plan


def _plan(
    title: str,
    program: Program,
    layout: Layout,
    names: Sequence[str],
    outputs: Sequence[str],
    feeds: Mapping[int, int],
    values: Sequence[np.ndarray | None],
) -> tuple[dict[str, Any], dict[str, str]]:
    """``plan.json``, and the text of each file of WGSL."""
    texts: dict[str, str] = {}  # text → file
    kernels = []
    for kernel, bound in zip(program.kernels, layout.bindings, strict=True):
        if 0 in kernel.workgroups:
            continue
        if kernel.wgsl not in texts:
            stem = re.sub(r"\W+", "_", kernel.name)[:60]
            texts[kernel.wgsl] = f"kernels/{len(texts):03}_{stem}.wgsl"
        kernels.append(
            {
                "name": kernel.name,
                "file": texts[kernel.wgsl],
                "access": [b.access for b in kernel.bindings],
                "bind": [list(b) for b in bound],
                "params": [_word(p.value, p.dtype) for p in kernel.params],
                "workgroups": list(kernel.workgroups),
                "flops": kernel.flops,
                "bytes": kernel.bytes,
            }
        )
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "name": title,
        "limits": {
            theirs: getattr(Limits(), ours) for ours, theirs in _LIMIT_NAMES.items()
        },
        "slots": list(layout.slots),
        "inputs": [
            _about(name, stage, place)
            | {"initial": initial(value), "donated": i in program.donated}
            for i, (name, stage, place, value) in enumerate(
                zip(names, program.inputs, layout.inputs, values, strict=True)
            )
        ],
        "outputs": [
            _about(name, stage, place)
            | {"feeds": names[feeds[j]] if j in feeds else None}
            for j, (name, stage, place) in enumerate(
                zip(outputs, program.outputs, layout.outputs, strict=True)
            )
        ],
        "before": [[*m.source, *m.target, m.nbytes] for m in layout.before],
        "kernels": kernels,
        "after": [[*m.source, *m.target, m.nbytes] for m in layout.after],
    }
    return plan, {file: text for text, file in texts.items()}


def _about(name: str, stage: Stage, place: tuple[int, int]) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": stage.dtype,
        "shape": list(stage.shape),
        "slot": place[0],
        "offset": place[1],
    }


def _word(value: Any, dtype: str) -> int:
    """One word of the parameter block, as u32."""
    if isinstance(value, tuple):
        raise ShaderError(
            f"the number {value[1]!r} is an option of each call, which a page cannot "
            "give",
            where=user_location(),
            cure="export sd.compile(function), whose numbers are inputs",
        )
    if dtype == "f32":
        with np.errstate(over="ignore"):
            return int(np.float32(value).view(np.uint32))
    return int(value) & 0xFFFFFFFF
