"""Pages opened in headless Chromium, at any width. Not a test itself."""

import json
import re
import shutil
import subprocess
from html import unescape
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so pages cannot be opened")
DARK = "--blink-settings=preferredColorScheme=0"

# What a test sees of any page: `seen` may be filled further before it is posted.
PROBE = """
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(part => { const c = part / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = part => { for (; part; part = part.parentElement) {
    const color = getComputedStyle(part).backgroundColor;
    if (!/, 0\\)$/.test(color)) return color; } return "rgb(255, 255, 255)"; };
  const contrast = part => {
    const [a, b] = [light(getComputedStyle(part).color), light(behind(part))].sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05); };
  const height = document.documentElement.scrollHeight, words = document.body.innerText.split(/\\s+/).length;
  document.querySelectorAll("details").forEach(part => part.open = true);
  const seen = {
    height, words,
    pale: [...document.querySelectorAll("body *:not(svg *, noscript *)")].filter(part => part.checkVisibility() &&
      [...part.childNodes].some(node => node.nodeType === 3 && node.data.trim()) && contrast(part) < 4.5)
      .map(part => `${part.tagName} ${part.textContent.trim().slice(0, 40)}: ${contrast(part).toFixed(2)}`),
    window: innerWidth,
    page: document.documentElement.scrollWidth,
    broken: [...document.images].filter(image => !image.complete || !image.naturalWidth).length,
    images: document.querySelectorAll("img, svg image").length,
    drawings: [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect().height),
    outside: [...document.querySelectorAll("section *, details *")].filter(part =>
      !part.closest(".scroll, thead") && part.getBoundingClientRect().right > innerWidth + 1).map(part => part.tagName),
    dark: getComputedStyle(document.body).backgroundColor,
  };
"""
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><pre id="probe"></pre>
<script>addEventListener("message", event => { document.querySelector("#probe").textContent = event.data; });</script>
<iframe src="%s" style="width: %dpx; height: 900px; border: 0"></iframe>"""


def chromium(page, *options):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1600,1000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(page, *options):
    """What the page said on the console, and the document as it then was."""
    ran = chromium(page, "--dump-dom", *options)
    return re.findall(r".*CONSOLE.*", ran.stderr), ran.stdout


def framed(page, width, actions, told="parent.postMessage(JSON.stringify(seen), '*');"):
    """A file with a copy of the page in a frame of some width; it acts and tells what it has seen."""
    copy = page.with_name(f"probed-{width}.html")
    text = page.read_text()
    allowed = re.sub(r"; script-src [^;\"]*", "", text, count=1)
    allowed = allowed.replace("default-src 'none'", "default-src 'none'; connect-src *; script-src 'unsafe-inline'")
    assert allowed != text
    probe = f'<script>addEventListener("load", async () => {{{PROBE}{actions}{told} }});</script></body>'
    copy.write_text(allowed.replace("</body>", probe))
    frame = page.with_name("frame.html")
    frame.write_text(FRAME % (copy.name, width))
    return frame


def watch(page, width, *options, actions=""):
    """As `look`, but in real time, which workers need: the page is over when it has told what it saw."""
    heard = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *told):
            """Nothing on the terminal."""

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        listening = Thread(target=server.handle_request, daemon=True)
        listening.start()
        post = "{method: 'POST', mode: 'no-cors', body: JSON.stringify(seen)}"
        post = f"fetch('http://127.0.0.1:{server.server_port}', {post});"
        frame = framed(page, width, actions, post)
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={page.parent / 'profile'}", "--remote-debugging-port=0", *options, frame.as_uri()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            listening.join(120)
            browser.terminate()
    assert heard, "the page told nothing within two minutes"
    assert heard[0]["window"] == width
    return heard[0]


def look(page, width, *options, actions=""):
    """What a probe sees in a page of some width, and what it notes in `seen` while it acts.

    It runs in a copy of the page whose content policy allows it, inside a frame, since a window cannot be made narrower
    than 500 pixels; what it sees is written into the page around the frame.
    """
    dump = chromium(framed(page, width, actions), "--dump-dom", *options)
    found = re.search(r'<pre id="probe">(.+?)</pre>', dump.stdout, re.DOTALL)
    assert found, dump.stderr
    seen = json.loads(unescape(found.group(1)))
    assert seen["window"] == width
    return seen
