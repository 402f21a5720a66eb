"""What a kernel is planned for: the limits and features of a device.

A `Target` is text-side knowledge only, so kernels can be printed for a device that is
not there.  `PORTABLE` holds the defaults that every WebGPU implementation guarantees.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .choice import Decider, Tuned

#: Loop iterations that one invocation may spend.  Mesa's software driver ends every
#: loop of an invocation silently after 65,535 in total; the margin is for loops that
#: a driver adds.
SOFTWARE_LOOP_BUDGET = 60_000

#: No driver that was met counts iterations on a GPU; planning needs a number anyhow.
UNBOUNDED_LOOP_BUDGET = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes and counts that a kernel must stay within.

    The defaults are WebGPU's own, which no implementation may undercut.
    """

    max_storage_buffers: int = 8
    max_workgroup_storage: int = 16_384
    max_invocations: int = 256
    max_workgroup_size_x: int = 256
    max_workgroups: int = 65_535
    max_binding_bytes: int = 128 << 20
    max_buffer_bytes: int = 256 << 20
    uniform_alignment: int = 256
    storage_alignment: int = 256


@dataclass(frozen=True)
class Features:
    """Optional abilities.  ``timestamps`` only serves profiling.

    Args:
        wide_words: move a vec4 as two u64. Mesa's software driver spends a loop over
            the lanes on each word, whatever its size, so this nearly halves its cost.
        matrix: rows, columns and depth of products of f16 matrices with sums in f32
            that subgroups compute, and the lanes of such a subgroup; empty without.
    """

    wide_words: bool = False
    f16: bool = False
    subgroups: bool = False
    timestamps: bool = False
    matrix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """A device as the code generator sees it.

    Args:
        name: for people, e.g. ``"NVIDIA H200"``.
        family: ``"gpu"``, ``"software"`` (a driver that runs on the CPU) or ``"cpu"``
            (no driver: NumPy).
        loop_budget: loop iterations that one invocation may spend over all its loops.
        enable_subgroups_directive: whether the WGSL must say ``enable subgroups;``.
            Browsers want it, wgpu's own front end refuses it.
        online: whether products of products run in one pass (attention); without, each
            stage is a kernel of its own, which is what tests compare with.
        online_from: bytes of scores from which they are computed again and not stored.
        scores: bytes that the gradient of scores may take where it saves products; a
            quarter of what a graph takes and gives if None.
        tuned: choices that were measured here to be the fastest, by kernel.
        choice: what decides for the schedules of one kernel; the cost model if absent.
        block_from: bytes of a product from which it is worked through in blocks of rows
            if it is of no use by itself (logits); 0 for never.
    """

    name: str
    family: str
    limits: Limits = field(default_factory=Limits)
    features: Features = field(default_factory=Features)
    loop_budget: int = UNBOUNDED_LOOP_BUDGET
    enable_subgroups_directive: bool = False
    online: bool = True
    online_from: int = 0
    scores: int | None = None
    tuned: Tuned = field(default_factory=Tuned, compare=False, repr=False)
    choice: Decider | None = None
    block_from: int = 32 << 20

    def portable(self) -> Target:
        """The same device held to what every WebGPU implementation guarantees."""
        features = Features(timestamps=self.features.timestamps)
        return replace(self, limits=Limits(), features=features)


#: WebGPU's guaranteed limits, with the loop budget of the strictest driver.
PORTABLE = Target(name="portable", family="gpu", loop_budget=SOFTWARE_LOOP_BUDGET)
