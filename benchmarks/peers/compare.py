"""Times peers side by side: one process each, runs taken in turn, medians and ratios.

    python compare.py --workloads W1,W6 --peers wgsl,wgsl-regs,tinygrad,shaderdsl

Idle workers are stopped, so that the threads of one cannot slow another down. Read the
ratios, not the times; on a shared machine, those of the CPU time.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OTHER = os.environ.get("PEERS_PYTHON", "/tmp/peers/main/bin/python")
PEERS = {
    "wgsl": (OTHER, "bench_wgsl.py"),
    "wgsl-regs": (OTHER, "bench_wgsl.py", "--matmul", "regs"),
    "tinygrad": (OTHER, "bench_tinygrad.py"),
    "shaderdsl": (sys.executable, "bench_shaderdsl.py"),
}


class Worker:
    """A peer's process, stopped while it is not its turn."""

    def __init__(self, peer: str, workload: str, verbose: bool):
        python, script, *options = PEERS[peer]
        self.peer = peer
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.process = subprocess.Popen(
            [python, HERE / script, *options, workload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)
        self.record = self._read()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"skip": "the process died"}

    def turn(self, repeats: int) -> None:
        """Runs a few times; the last one counts, so that caches are this worker's."""
        self._signal(signal.SIGCONT)
        for _ in range(repeats):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            last = self._read()
        self._signal(signal.SIGSTOP)
        if "skip" in last:
            raise RuntimeError(f"{self.peer}: {last['skip']}")
        self.wall.append(last["wall"])
        self.cpu.append(last["cpu"])

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def compare(
    workload: str, peers: list[str], runs: int, verbose: bool
) -> list[dict[str, Any]]:
    records, live = [], []
    for peer in peers:  # started one after another: nobody's first call is disturbed
        worker = Worker(peer, workload, verbose)
        worker.record |= {"peer": peer, "workload": workload}
        records.append(worker.record)
        if "skip" in worker.record:
            worker.end()
        else:
            worker.stop()
            live.append(worker)
    for _ in range(runs):
        for worker in live:
            worker.turn(repeats=2 if min(worker.record["first"]) < 0.05 else 1)
    for worker in live:
        wall = statistics.median(worker.wall)
        worker.record |= {
            "wall": wall,
            "best": min(worker.wall),
            "cpu": statistics.median(worker.cpu),
            "cold": sum(worker.record["first"]) - 3 * wall + worker.record["setup"],
        }
        worker.end()
    return records


def table(records: list[dict[str, Any]], base: str) -> str:
    lines = []
    of_base = next((r for r in records if r["peer"] == base and "wall" in r), None)
    for r in records:
        if "skip" in r:
            lines.append(f"| {r['workload']} | {r['peer']} | {r['skip']} |")
            continue
        wall = f"{r['wall'] / of_base['wall']:.2f}" if of_base else ""
        cpu = f"{r['cpu'] / of_base['cpu']:.2f}" if of_base else ""
        lines.append(
            f"| {r['workload']} | {r['peer']} | {r['wall'] * 1e3:.1f} | "
            f"{r['best'] * 1e3:.1f} | {wall} | {cpu} | {r['cold']:.2f} | "
            f"{r['error']:.0e}{'' if r['right'] else ' WRONG'} | "
            f"{r.get('kernels', '')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5,W6,W9,W10")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--base", default="wgsl", help="what ratios are relative to")
    parser.add_argument("--json", type=Path, help="also write every record here")
    parser.add_argument("--verbose", action="store_true", help="show workers' errors")
    args = parser.parse_args()
    head = "workload|peer|median ms|best ms|× base|CPU × base|cold s|error|kernels"
    print("| " + head.replace("|", " | ") + " |\n|" + "---|" * 9, flush=True)
    records = []
    for workload in args.workloads.split(","):
        found = compare(workload, args.peers.split(","), args.runs, args.verbose)
        print(table(found, args.base), flush=True)
        records += found
        if args.json:
            args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
