"""Print what makes a shell complete commands, options and file names.

bash   shaderdsl completion bash > ~/.local/share/bash-completion/completions/shaderdsl
zsh    shaderdsl completion zsh > ~/.zfunc/_shaderdsl      (a folder of $fpath)
tcsh   shaderdsl completion tcsh >> ~/.tcshrc

For this shell alone: eval "$(shaderdsl completion bash)"
"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    import shtab

    from . import parser

    print(shtab.complete(parser(), shell=args.shell))
    return 0
