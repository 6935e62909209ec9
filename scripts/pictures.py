"""Writes the README's pictures from the tour's report: `python scripts/pictures.py [out/tour]` to docs/pictures/."""

import base64
import re
import sys
from pathlib import Path

from netweight.report.report import read_report

ROOT = Path(__file__).parents[1]
STYLE = ROOT / "src" / "netweight" / "report" / "page_style.css"
# Name of the picture: the chapter whose report it is from, and a word of its text alternative.
PICTURES = {
    "federate": ("federate", "reconstructs"),
    "forget": ("forget: pictures", "found"),
    "immunize": ("immunize", "median recovery"),
    "space": ("space: hundreds", "points"),
    "compress": ("compress: the same", "histograms"),
}


def colors() -> str:
    """The page's colors, light and dark, which a picture alone has to bring along."""
    light, dark = re.findall(r":root \{[^}]*\}", STYLE.read_text())[:2]
    return f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"


def main(run: Path) -> None:
    figures = [(section.chapter or "", figure) for section in read_report(run).sections for figure in section.figures]
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for name, (chapter, word) in PICTURES.items():
        found = [each for title, each in figures if title.startswith(chapter) and word in each.alt.lower()]
        if not found:
            sys.exit(f"{run} has no figure for {name}: run `netweight tour` to its end.")
        if found[0].kind == "png":
            (folder / f"{name}.png").write_bytes(base64.b64decode(found[0].data))
        else:
            (folder / f"{name}.svg").write_text(found[0].data.replace("</title>", f"</title>{colors()}", 1))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/tour"))
