"""The code on the pages of the documentation runs."""

import re
from pathlib import Path

import pytest

import shaderdsl as sd

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Sketches of the inside, not to be typed.
SKETCHES = {"design"}
PAGES = [
    p
    for p in sorted(DOCS.rglob("*.md"))
    if p.stem not in SKETCHES and BLOCK.search(p.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_code_of_a_page_runs(page, device, tmp_path, monkeypatch):
    if device.kind == "wgpu" and page.stem != "gallery":
        pytest.skip("shown on one device")
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        # Lines of errors are those of the page.
        code = compile("\n" * line + block.group(1), str(page), "exec")
        exec(code, names)


def test_the_gallery_is_seen():
    assert DOCS / "gallery.md" in PAGES
    assert sd.__version__
