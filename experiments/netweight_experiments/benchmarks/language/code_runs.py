"""Run code that a language model wrote, in a process of its own that can neither write files nor reach a network.

The process has limits on processor time, memory and the size of files, an empty environment and an empty working
directory. A hook of the interpreter (`sys.addaudithook`) refuses connections, further processes, changes of files and
foreign functions. This stops what a small model writes by mistake; it is no protection against code that means harm.
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Literal

Outcome = Literal["passed", "wrong", "error", "out of time", "no code"]
"""All tests passed; a test was false; the code raised an error; it took too long; there was no such function."""

_MEMORY = 1 << 30
_FENCE = re.compile(r"```[ \t]*(?:python|py|Python)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
# Nonzero statuses of the runner below; an uncaught error of the interpreter has 1.
_WRONG, _ERROR = 3, 4
_RUNNER = """
import sys
code, tests, proof = __import__("json").loads(sys.stdin.read())
refused = ("socket.", "subprocess.", "ctypes.", "shutil.", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
           "os.fork", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "os.putenv", "pty.", "urllib.", "http.", "ftplib.", "smtplib.")
def hook(event, arguments):
    writes = event == "open" and (
        any(each in str(arguments[1] or "r") for each in "wax+") or (arguments[2] or 0) & 0o103 != 0
    )
    if writes or event.startswith(refused):
        raise PermissionError(f"{event} is not allowed here")
sys.addaudithook(hook)
names = {"__name__": "answer"}
write, leave = sys.stdout.write, __import__("os")._exit
def end(status):
    sys.stdout.flush()
    leave(status)
try:
    exec(compile(code, "answer.py", "exec"), names)
    results = [bool(eval(test, names)) for test in tests]
except BaseException as error:
    write(f"{type(error).__name__}: {error}")
    end(4)
write("\\n" + proof)
end(0 if all(results) else 3)
"""


def code_of(answer: str) -> str:
    """Return the code of an answer: its first fenced block, or all of it if there is none.

    Args:
        answer: The text that a model wrote.
    """
    block = _FENCE.search(answer)
    return (answer if block is None else block[1]).strip("\n")


def run_program(answer: str, name: str, tests: Sequence[str], *, seconds: int = 5) -> Outcome:
    """Run the code of an answer, then its tests.

    Args:
        answer: The text that a model wrote.
        name: Name of the function that it should define.
        tests: Expressions that are true for a right function.
        seconds: Processor time after which the process ends.

    Returns:
        What became of it. A program that ends the process before its tests counts as an error.
    """
    code = code_of(answer)
    if f"def {name}" not in code and not re.search(rf"\b{name}\s*=", code):
        return "no code"
    proof = secrets.token_hex(16)  # so that a program that ends early, with status 0, does not pass
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-c", _RUNNER],
                input=json.dumps([code, list(tests), proof]),
                capture_output=True, text=True, errors="replace", cwd=folder, env={}, timeout=4 * seconds,
                preexec_fn=partial(_limits, seconds), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "out of time"
    if done.returncode < 0:  # ended by a signal: of the limit on processor time, as a rule
        return "out of time"
    if not done.stdout.endswith(proof) or done.returncode not in (0, _WRONG):
        return "error"
    return "passed" if done.returncode == 0 else "wrong"


def _limits(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
