"""Run `netweight` and write into a file the lines of its output that netweight did not write. Not a test itself.

Usage: foreign_lines.py FILE ARGUMENT..., where the arguments are those of the command line.

Python's own output is judged by who asked for it: the nearest caller outside of the standard library, click and tqdm.
What reaches the file descriptors otherwise, from compiled code or from other processes, is nobody's line, and counts as
another library's. Lines of netweight are passed on.
"""

import io
import os
import runpy
import sys
import sysconfig
from pathlib import Path

CARRIERS = tuple(
    os.sep.join(("", *parts, "")) for parts in (("site-packages", "click"), ("site-packages", "tqdm"))
)  # they write what others ask for
STANDARD = sysconfig.get_path("stdlib") + os.sep


def writer_of(frame):
    """The file of the code that asked for a line."""
    while frame is not None:
        file = frame.f_code.co_filename
        standard = file.startswith((STANDARD, "<frozen")) and "site-packages" not in file
        if file != __file__ and not standard and not any(each in file for each in CARRIERS):
            return file
        frame = frame.f_back
    return "the interpreter"


class Listener(io.TextIOBase):
    """Passes on what netweight writes and notes the rest."""

    def __init__(self, target, notes):
        self.target, self.notes, self.package = target, notes, None

    def write(self, text):
        if self.package is None and "netweight" in sys.modules:
            self.package = str(Path(sys.modules["netweight"].__file__).parent) + os.sep
        file = writer_of(sys._getframe(1))
        if self.package is not None and file.startswith(self.package):
            self.target.write(text)
        elif text.strip():
            self.notes.append(f"{file}: {text.rstrip()}")
        return len(text)

    def flush(self):
        self.target.flush()

    def fileno(self):
        return self.target.fileno()

    def writable(self):
        return True

    @property
    def encoding(self):
        return "utf-8"


def main():
    file, *arguments = sys.argv[1:]
    notes = []
    raw = Path(f"{file}.raw")
    with raw.open("w") as nobody:
        for number in (1, 2):  # netweight's lines go to copies of the descriptors; these two are left to the others
            own = os.fdopen(os.dup(number), "w", encoding="utf-8")
            os.dup2(nobody.fileno(), number)
            setattr(sys, ("stdout", "stderr")[number - 1], Listener(own, notes))
    sys.argv = ["netweight", *arguments]
    try:
        runpy.run_module("netweight", run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        notes += [f"not from Python: {line}" for line in raw.read_text(errors="replace").splitlines() if line.strip()]
        raw.unlink()
        Path(file).write_text("".join(f"{each}\n" for each in notes))


if __name__ == "__main__":
    main()
