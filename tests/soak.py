"""Training for a while, watched: memory stays flat and the loss finite.

``python tests/soak.py --minutes 20`` trains `shaderdsl train`'s default model on the
documentation that ships with Python, checkpoints included, and looks at the process's
memory, the device's live bytes and the driver's live objects every ten seconds. It
fails if any of them grows after the first minute.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shaderdsl as sd
from shaderdsl import data
from shaderdsl.runtime import current

GROWTH = 16 << 20  # bytes that the process may grow by


def resident() -> int:
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * 4096


def objects() -> int:
    if current().kind != "wgpu":
        return 0
    import wgpu

    gc.collect()
    return int(wgpu.diagnostics.wgpu_native_counts.get_dict()["total"]["count"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    device = sd.use_device(args.device)
    tokens = data.encode(data.default_text())
    config = sd.nn.TransformerConfig(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        ffn_size=172,
    )  # fmt: skip
    model = sd.nn.Transformer.init(config, seed=0)
    optimiser = sd.optim.AdamW(lr=1e-3)
    state = optimiser.init(model)

    @sd.compile(donate=("model", "state"))
    def step(model, state, ids):
        def loss(m):
            return sd.nn.cross_entropy(m(ids[:, :-1]), ids[:, 1:])

        value, gradients = sd.value_and_grad(loss)(model)
        return (value, *optimiser.update(model, gradients, state))

    r = np.random.default_rng(0)
    end = time.monotonic() + 60 * args.minutes
    settled = time.monotonic() + min(60.0, 20 * args.minutes)
    shown, steps, loss = 0.0, 0, math.nan
    base: tuple[int, int, int] | None = None
    worst = [0, 0, 0]
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            starts = r.integers(0, len(tokens) - 65, 4)
            ids = np.stack([tokens[s : s + 65] for s in starts]).astype(np.int32)
            value, model, state = step(model, state, ids)
            steps += 1
            if steps % 200 == 0:
                sd.nn.save(model, Path(folder) / "model")
            if time.monotonic() - shown < 10:
                continue
            shown, loss = time.monotonic(), float(value)
            del value
            now = (resident(), device.pool.live_bytes, objects())
            if not math.isfinite(loss):
                print(f"step {steps}: the loss is {loss}")
                return 1
            if base is None and time.monotonic() >= settled:
                base = now
            if base is not None:
                worst = [max(w, n - b) for w, n, b in zip(worst, now, base)]
            print(
                f"{steps} steps, loss {loss:.3f}, {now[0] >> 20} MiB resident, "
                f"{now[1]:,} B live, {now[2]} objects",
                flush=True,
            )
    print(
        f"{args.minutes:g} minutes, {steps} steps on {device.name}: the process grew "
        f"by {worst[0] / 2**20:.1f} MiB, live bytes by {worst[1]:,}, "
        f"objects by {worst[2]}"
    )
    # A step may be under way when objects are counted: a few come and go.
    flat = worst[0] < GROWTH and worst[1] < 1 << 20 and worst[2] < 50
    return 0 if base is not None and flat else 1


if __name__ == "__main__":
    sys.exit(main())
