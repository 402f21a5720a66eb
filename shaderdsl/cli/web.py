"""Write a site that trains a small transformer and generates text, in the browser.

shaderdsl web site --serve                  # then open the address that it prints
shaderdsl web site --from runs/001          # a model that `shaderdsl train` made
shaderdsl web site --text a.txt --steps 300

The site is static files: WGSL, a plan, weights and one JavaScript module. Any web
server will do; browsers do not run it from file:// addresses. For a function of your
own see sd.export_web.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import http.server
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="DIR", type=Path, help="where to write it")
    parser.add_argument(
        "--from", dest="base", metavar="RUN", type=Path, help="a run of shaderdsl train"
    )
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", help="UTF-8 text files to train on"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps until training ends"
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=8000,
        metavar="PORT",
        help="serve it on this machine until Ctrl-C (default port: 8000)",
    )


def run(args: argparse.Namespace) -> int:
    from ..web import export_demo

    site = export_demo(args.out, trainer=_trainer(args))
    for name, part in (("train", site.train), ("decode", site.decode)):
        print(
            f"{part.folder}: {name}, {part.kernels} kernels of {part.texts} texts, "
            f"{part.weight_bytes / 1e6:.1f} MB of weights, "
            f"{part.memory_bytes / 1e6:.1f} MB of GPU memory"
        )
    print(f"site: {site.folder}")
    if args.serve is not None:
        serve(site.folder, args.serve)
    return 0


def _trainer(args: argparse.Namespace) -> Trainer:
    from .. import data
    from ..trainer import Trainer, saved_run
    from ..web.demo import CONFIG

    changes = {} if args.steps is None else {"steps": args.steps}
    if args.base is None:
        text = data.read_text(args.text) if args.text else data.default_text()
        return Trainer(dataclasses.replace(CONFIG, **changes), data.encode(text))
    saved, files = saved_run(args.base)
    names = args.text or files
    text = data.read_text(names) if names else data.default_text()
    config = dataclasses.replace(saved, **changes)
    return Trainer.resume(args.base, data.encode(text), config)


class _Handler(http.server.SimpleHTTPRequestHandler):
    # Some systems call .js plain text, which browsers do not run.
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript"
    }

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(folder: Path, port: int) -> None:
    """Serves a folder to this machine alone, until Ctrl-C."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"open http://localhost:{server.server_port}/ (Ctrl-C ends)", flush=True)
        server.serve_forever()
