"""How long the miniature's page takes from a moved slider to the pixels of one face, in headless Chromium.

    python -m netweight_experiments.benchmarks space.page --moves 20

A script in a copy of the page moves one slider after another and reads the clock when the first face is painted, in
real time; other noises are painted before the next move. The page reports to a server on this machine.
"""

import json
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from netweight.methods.space.view.page import write_view
from netweight.toys.faces_pipeline import FACES_SETTINGS, faces_view

MOVES = """
  const html = document.documentElement, face = document.querySelector(".whole"), context = face.getContext("2d");
  const until = async test => { while (!test()) await new Promise(next => setTimeout(next)); };
  const sliders = [...document.querySelectorAll("input[type=range]")], times = [], put = context.putImageData;
  let done = 0;
  context.putImageData = function (...given) { put.apply(this, given); done = performance.now(); };
  await until(() => html.dataset.ready && html.dataset.painted);
  for (let move = 0; move < %d; move++) {
    done = 0;
    html.dataset.painted = "";
    const slider = sliders[move %% sliders.length], begun = performance.now();
    slider.value = move %% 2 ? -2.5 : 2;
    slider.dispatchEvent(new Event("input"));
    await until(() => html.dataset.painted);
    times.push(done - begun);
  }
  fetch("http://127.0.0.1:%d", { method: "POST", mode: "no-cors", body: JSON.stringify(times) });
"""


def moved(page, moves):
    """Milliseconds from each move to the pixels of the first face."""
    heard = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *told):
            """Nothing on the terminal."""

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        policy = "connect-src *; script-src 'unsafe-inline'"
        probe = (
            f"<script>addEventListener('load', async () => {{{MOVES % (moves, server.server_port)}}});</script></body>"
        )
        text = re.sub(r"script-src [^;\"]*", policy, page.read_text(), count=1).replace("</body>", probe)
        copy = page.with_name("probed.html")
        copy.write_text(text)
        threading.Thread(target=server.handle_request, daemon=True).start()
        command = [shutil.which("chromium") or "google-chrome", "--headless", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={page.parent / 'profile'}", "--remote-debugging-port=0", copy.as_uri()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            while not heard and browser.poll() is None:
                threading.Event().wait(0.5)
            browser.terminate()
    return heard


def main(*, moves: int = 20):
    with tempfile.TemporaryDirectory() as folder:
        view = faces_view(settings=FACES_SETTINGS.replace(adapters=8, samples=0))
        page = write_view(view, Path(folder) / "faces.html")
        times = moved(page, moves)
        nbytes = page.stat().st_size
    assert view.live is not None
    low, middle, high = statistics.quantiles(times, n=4)
    browser = subprocess.run(["chromium", "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "browser": browser, "weights": view.live.nbytes, "page_of_8_adapters": nbytes, "median": middle,
        "quartiles": [low, high], "all": times,
    }  # fmt: skip
