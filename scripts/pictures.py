"""Writes the README's pictures to docs/pictures/: `python scripts/pictures.py [out/tour]` from the tour's report.

`python scripts/pictures.py search forget` takes the picture `forget` alone, from the report of the search that the
README runs on the result of the default edit; the tour shows another edit.

`python scripts/pictures.py faces.html` takes that of a page that `netweight space view` wrote, with sliders at random:
in Chromium, whose picture waits for an image that comes late. `python scripts/pictures.py report.html NAME` takes the
first screen of a report. `python scripts/pictures.py guarded-domain.json` draws the curves of that result.
"""

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from PIL import Image

from netweight.report.report import read_report

ROOT = Path(__file__).parents[1]
STYLE = ROOT / "src" / "netweight" / "report" / "page_style.css"
# Name of the picture: the chapter whose report it is from, and a word of its text alternative.
PICTURES = {
    "federate": ("federate", "reconstructs"),
    "immunize": ("immunize", "median recovery"),
    "space": ("space: hundreds", "points"),
    "compress": ("compress: the same", "histograms"),
}


def colors() -> str:
    """The page's colors, light and dark, which a picture alone has to bring along."""
    light, dark = re.findall(r":root \{[^}]*\}", STYLE.read_text())[:2]
    return f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"


def main(run: Path, only: str = "") -> None:
    """Write the pictures of a tour, or the picture `only` of another report, which has no chapters."""
    figures = [(section.chapter or "", figure) for section in read_report(run).sections for figure in section.figures]
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    wanted = {only: ("", "found")} if only else PICTURES
    for name, (chapter, word) in wanted.items():
        found = [each for title, each in figures if title.startswith(chapter) and word in each.alt.lower()]
        if not found:
            sys.exit(f"{run} has no figure for {name}: run `netweight tour` to its end.")
        drawing = found[0].data.replace("</title>", f"</title>{colors()}", 1)
        if "<image" in drawing:  # hosts of a README may refuse images in an image
            card(drawing).save(folder / f"{name}.png", optimize=True)
        else:
            (folder / f"{name}.svg").write_text(drawing)


def curves(result: Path) -> None:
    """Draw the recovery of a guarded domain of a real chat model, from the result of language.guarded_domain."""
    from netweight_experiments.benchmarks.language.guarded_domain import picture

    drawing = picture(json.loads(result.read_text())).replace("</title>", f"</title>{colors()}", 1)
    (ROOT / "docs" / "pictures" / f"{result.stem}.svg").write_text(drawing)


def card(drawing: str) -> Image.Image:
    """A drawing on a light card with round corners, which suits light and dark pages."""
    width, height = (round(float(each) * 4 / 3) + 32 for each in re.findall(r'viewBox="0 0 (\S+) (\S+)"', drawing)[0])
    look = f"padding: 16px; width: {width - 32}px; height: {height - 32}px; border-radius: 12px; background: #fff"
    around = f'<!doctype html><body style="margin: 0"><div style="{look}">{drawing}</div>'
    return seen(None, around, 0, "--default-background-color=00000000", "--force-device-scale-factor=1.5").crop(
        (0, 0, round(1.5 * width), round(1.5 * height))
    )


AROUND = """<!doctype html><body style="margin: 0"><img src="/late" width="1"><iframe src="/page"
style="position: absolute; top: -350px; width: 1080px; height: 2400px; border: 0"></iframe><script>setTimeout(() => {
  const found = document.querySelector("iframe").contentDocument.querySelectorAll("button");
  [...found].find(each => each.textContent.trim() === "Random").click(); }, 14000)</script>"""


def seen(page: Path | None, around: str, wait: float, *options: str) -> Image.Image:
    """What Chromium shows of `around`, in which /page is a page, and /late an image that comes only after the wait."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(wait if self.path == "/late" else 0)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.read_bytes() if page and self.path == "/page" else around.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--window-size=1080,900", f"--user-data-dir={folder}", f"--screenshot={folder}/seen.png", *options]
        subprocess.run([*command, f"http://127.0.0.1:{server.server_port}/"], check=True, timeout=150)
        return Image.open(io.BytesIO(Path(folder, "seen.png").read_bytes()))


def screen(page: Path, name: str = "") -> None:
    """Take the picture of a report's first screen, or of a page with sliders once it has generated its face."""
    if name:
        picture = seen(page, AROUND.partition("<script>")[0].replace("-350px", "0"), 2).crop((30, 20, 1050, 900))
    else:
        picture = seen(page, AROUND, 32).crop((66, 32, 1014, 640))
    picture.convert("RGB").quantize(200).save(ROOT / "docs" / "pictures" / f"{name or 'space-page'}.png", optimize=True)


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]] or [Path("out/tour")]
    if given[0].suffix == ".html":
        screen(given[0], *map(str, given[1:]))
    elif given[0].suffix == ".json":
        curves(given[0])
    else:
        main(given[0], *map(str, given[1:]))
