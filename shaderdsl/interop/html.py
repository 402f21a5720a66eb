"""What notebooks show of an op, of its kernels and of a profile.

Formulas are LaTeX between ``$$``, which notebooks typeset; everything else is plain
HTML with inline styles, so that it looks the same where it is exported to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ..codegen.program import Kernel
from ..errors import ShaderError
from .lines import source_lines
from .show import cost_of, show_op

if TYPE_CHECKING:
    from ..lowered import Lowered
    from ..op import Op
    from ..runtime.profiling import Profile

_CELL = 'style="text-align:left;padding:2px 10px 2px 0"'
_NUMBER = 'style="text-align:right;padding:2px 10px 2px 0"'


def op_html(op: Op, *, math: bool = True) -> str:
    """Signature, first line of the docstring, formula, gradients, cost.

    ``math=False`` gives formulas as text, for pages that nothing typesets.
    """
    doc = (op.__doc__ or "").strip().partition("\n")[0]
    parts = [f"<b>{escape(op.name)}</b> <code>{escape(op.signature.text)}</code>"]
    if doc:
        parts.append(f"<div>{escape(doc)}</div>")
    parts.append(_formulas(show_op(op, math=math), math))
    for name in op.operands:
        try:
            text = show_op(op, derivative=name, math=math)
        except ShaderError:  # ids, masks, what it does not depend on
            continue
        parts.append(_folded(f"gradient of {name}", _formulas(text, math)))
    cost = cost_of(op)
    words = f"{cost.flops} FLOPs, at least {cost.bytes} bytes"
    parts.append(f"<div>{escape(words.replace('**', '^').replace('*', '·'))}</div>")
    return _framed(parts)


def lowered_html(lowered: Lowered) -> str:
    """The drawing, a table of the kernels, and their source with the user's lines."""
    heading = (
        f"<b>{len(lowered.kernels)} kernel(s)</b>, {lowered.bytes:,} bytes, "
        f"{lowered.flops:,} FLOPs"
    )
    picture = f'<div style="overflow:auto">{lowered.graph()}</div>'
    rows = [
        (
            f"{k}. {x.name}",
            x.archetype,
            " × ".join(map(str, x.workgroups)),
            f"{x.bytes:,}",
            f"{x.flops:,}",
            x.reason,
        )
        for k, x in enumerate(lowered.kernels)
    ]
    titles = ("kernel", "archetype", "workgroups", "bytes", "FLOPs", "why")
    parts = [heading, _folded("drawing", picture, is_open=True)]
    parts.append(_table(titles, rows, numbers=(2, 3, 4)))
    parts += [
        _folded(f"{k}. {x.name}", kernel_html(x)) for k, x in enumerate(lowered.kernels)
    ]
    return _framed(parts)


def kernel_html(kernel: Kernel) -> str:
    """WGSL, after the user's lines that it comes from."""
    lines = "".join(f"// {line}\n" for line in source_lines(kernel))
    return highlighted(lines + kernel.wgsl)


def profile_html(profile: Profile) -> str:
    """The totals, and one line a kernel name."""
    totals = (
        f"<b>{profile.dispatches:,} dispatches</b>, {profile.compiled:,} compiled, "
        f"{profile.uploads:,} uploads of {profile.upload_bytes:,} bytes, "
        f"{profile.downloads:,} downloads of {profile.download_bytes:,} bytes, at most "
        f"{profile.peak_bytes:,} bytes of device memory"
    )
    titles, *rows = profile.rows()
    return _framed([totals, _table(titles, rows, numbers=(2, 3, 4, 5))])


def highlighted(wgsl: str) -> str:
    """WGSL in colours."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    text: str = highlight(
        wgsl,
        get_lexer_by_name("wgsl"),
        HtmlFormatter(noclasses=True, nobackground=True),
    )
    return text


def _formulas(text: str, math: bool) -> str:
    if not math:
        lines = text.splitlines()[1:]
        return "<pre>" + escape("\n".join(lines)) + "</pre>"
    return "".join(f"<div>$${escape(line)}$$</div>" for line in text.splitlines())


def _folded(title: str, inside: str, is_open: bool = False) -> str:
    state = ' open=""' if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>{inside}</details>"


def _table(
    titles: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int]
) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        styled = [
            f"<{tag} {_NUMBER if k in numbers else _CELL}>{escape(str(c))}</{tag}>"
            for k, c in enumerate(cells)
        ]
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return f"<table>{line(titles, 'th')}{body}</table>"


def _framed(parts: Sequence[str]) -> str:
    return f'<div class="shaderdsl">{"".join(f"<div>{p}</div>" for p in parts)}</div>'
