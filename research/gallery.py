"""The pictures of docs/gallery.md: ``python -m research.gallery`` runs the code on the page where its pictures are."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def draw(folder: Path) -> list[Path]:
    """Run the page, one block after the other; they write into the working folder."""
    names: dict[str, object] = {}
    with contextlib.chdir(folder):
        for block in BLOCK.findall((DOCS / "gallery.md").read_text(encoding="utf-8")):
            exec(compile(block, "gallery.md", "exec"), names)
    return sorted(folder.glob("*.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS / "images" / "gallery", help="where to")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in draw(args.folder):
        print(f"{file}: {file.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
