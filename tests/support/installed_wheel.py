"""netweight as people install it: wheels in an environment of their own, third-party packages from that of the tests.

The native codec is compiled once: later builds find it in `build/`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

SCRIPT = """#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


def run(*command, timeout=300, **options):
    """Run a command that must succeed, and return its output."""
    command = [*map(str, command)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, **options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def built(source, folder):
    """Build the wheel of a source tree."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, source, timeout=900)  # a busy machine compiles for long
    (file,) = folder.glob("*.whl")
    return file


@dataclass
class Installed:
    """An environment and its variables: none of this process's but those that a process cannot do without."""

    folder: Path
    python: Path
    variables: dict[str, str]

    @classmethod
    def of(cls, folder, *wheels, programs=(), kept=("TMPDIR", "LANG")):
        """Make one that holds these wheels, and the commands of these further distributions."""
        run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
        python = folder / "env" / "bin" / "python"
        made = cls(folder, python, {name: value for name, value in os.environ.items() if name in kept})
        for wheel in wheels:
            made.install(wheel)
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        packages = [path for path in sys.path if Path(path).name == "site-packages"]
        (site / "dependencies.pth").write_text("\n".join(packages) + "\n")
        for program in programs:
            for entry in distribution(program).entry_points.select(group="console_scripts"):
                script = python.parent / entry.name
                script.write_text(SCRIPT.format(python=python, module=entry.module, function=entry.attr))
                script.chmod(0o755)
        (folder / "home").mkdir()
        made.variables |= {"HOME": str(folder / "home"), "PATH": f"{python.parent}:/usr/bin:/bin"}
        return made

    def install(self, file):
        """Install a wheel; the environment of the tests may hold the same package."""
        how = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
        run(sys.executable, "-m", "pip", "--python", self.python, "install", *how, file)

    @staticmethod
    def copy(source, folder):
        """Copy a folder without its content: files are links to those of the source."""
        return Path(shutil.copytree(source, folder, copy_function=os.link))

    def bash(self, line, folder, timeout=1800):
        """Run a line as it is typed, and return how it ended."""
        return subprocess.run(
            ["bash", "-c", line], cwd=folder, env=self.variables, capture_output=True, text=True, check=False,
            timeout=timeout,
        )  # fmt: skip

    def end(self):
        """End what commands left running, such as Flower's server for simulations: all that has this HOME."""
        mark = f"HOME={self.variables['HOME']}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # of another user, or ended meanwhile
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    os.kill(int(place.name), signal.SIGTERM)
