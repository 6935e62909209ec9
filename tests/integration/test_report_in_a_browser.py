"""The report page in headless Chromium: no console error, no broken image, nothing wider than the window."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from report_under_test import report_of_everything

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so pages cannot be opened")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")

# Runs in a copy of the page whose content policy allows it, inside a frame of the width that is tested, since a window
# cannot be made narrower than 500 pixels; what it sees is written into the page around the frame.
PROBE = """<script>
addEventListener("load", () => {
  const seen = {
    window: innerWidth,
    page: document.documentElement.scrollWidth,
    broken: [...document.images].filter(image => !image.complete || !image.naturalWidth).length,
    images: document.images.length,
    drawings: [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect().height),
    outside: [...document.querySelectorAll("section *")].filter(part =>
      !part.closest(".scroll, thead") && part.getBoundingClientRect().right > innerWidth + 1).map(part => part.tagName),
    dark: getComputedStyle(document.body).backgroundColor,
  };
  parent.postMessage(JSON.stringify(seen), "*");
});
</script></body>"""
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><pre id="probe"></pre>
<script>addEventListener("message", event => { document.querySelector("#probe").textContent = event.data; });</script>
<iframe src="%s" style="width: %dpx; height: 900px; border: 0"></iframe>"""


def chromium(page, *options):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1600,1000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def look(page, width, *options):
    copy = page.with_name(f"probed-{width}.html")
    text = page.read_text()
    allowed = text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    assert allowed != text
    copy.write_text(allowed.replace("</body>", PROBE))
    frame = page.with_name("frame.html")
    frame.write_text(FRAME % (copy.name, width))
    dump = chromium(frame, "--dump-dom", *options)
    found = re.search(r'<pre id="probe">(.+?)</pre>', dump.stdout, re.DOTALL)
    assert found, dump.stderr
    seen = json.loads(unescape(found.group(1)))
    assert seen["window"] == width
    return seen


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report_of_everything().write(tmp_path_factory.mktemp("report"))


def test_the_console_stays_silent(page):
    log = chromium(page, "--dump-dom").stderr
    assert not re.findall(r".*CONSOLE.*", log)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_broken_and_nothing_overflows(page, width):
    seen = look(page, width)
    assert seen["page"] <= width
    assert seen["outside"] == []
    assert seen["broken"] == 0
    assert seen["images"] == 1
    assert len(seen["drawings"]) == 3
    assert min(seen["drawings"]) > 50


def test_the_probe_sees_an_overflow(page):
    wide = page.with_name("wide.html")
    wide.write_text(page.read_text().replace("<footer>", '<footer><div style="width: 2000px">wide</div>'))
    assert look(wide, 390)["page"] > 390


def test_the_page_follows_the_readers_light_or_dark_setting(page):
    light = look(page, 1280)["dark"]
    dark = look(page, 1280, "--blink-settings=preferredColorScheme=0")["dark"]
    assert light == "rgb(251, 250, 248)"
    assert dark == "rgb(20, 23, 26)"
