"""Programs in processes of their own that begin with heavy libraries imported: forks of one process that did it once.

Importing torch, transformers and diffusers takes seconds, several times what most programs of tests work. `start` and
`run` take what follows `python` in a command. They are for tests in which it is not importing that is tested. What was
imported is shared by all programs of a session for which the variables that importing reads are the same. Not a test
itself.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path

ALL = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "scipy.stats", "sklearn.metrics",
    "transformers:CLIPTextModel,CLIPTokenizer,LlamaForCausalLM,PreTrainedTokenizerFast,Trainer",
    "diffusers:StableDiffusionPipeline",
)  # fmt: skip
COMPRESSION = ("torch", "netweight.cli", "netweight.methods.compress.compress_folder", "netweight.labels.measure")
_READ_BY_IMPORTS = re.compile("HOME|PATH|PYTHONPATH|(CUDA|HF|HUGGING|MPL|OMP|MKL|THP|TORCH|XDG|NETWEIGHT_AUTOLOAD).*")
# Set by a command that a test calls, for good.
_OF_QUIET_COMMANDS = {
    "HF_HUB_DISABLE_PROGRESS_BARS", "TORCH_LOGS", "TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "_NETWEIGHT_QUIET",
}  # fmt: skip


class _Server:
    """This side of a process that imports libraries once, and then forks for each program."""

    def __init__(self, libraries, environment):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *libraries], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment, text=True, bufsize=1,
        )  # fmt: skip
        self._ended, self._said = {}, b""
        atexit.register(self.close)

    def begin(self, **asked):
        """Fork; the child's pid."""
        self._process.stdin.write(json.dumps(asked) + "\n")
        while True:
            pid, status = self._read()
            if status is None:
                return pid
            self._ended[pid] = status

    def ended(self, pid, timeout=0.0):
        """The exit status of a child; None if it does not end in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while pid not in self._ended:
            left = None if end is None else max(0.0, end - time.monotonic())
            if b"\n" not in self._said and not select.select([self._process.stdout], [], [], left)[0]:
                return None
            other, status = self._read()
            self._ended[other] = status
        return self._ended[pid]

    def _read(self):
        while b"\n" not in self._said:
            said = os.read(self._process.stdout.fileno(), 4096)
            assert said, f"the process to fork from ended: {self._process.wait()}"
            self._said += said
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def close(self):
        """End it, and what it forked."""
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        self._process.wait()


_servers = {}


class Running:
    """A program that was started: as much of `subprocess.Popen` as tests need. Its output goes to files."""

    def __init__(self, words, environment, folder, libraries):
        environment = dict(os.environ if environment is None else environment)
        paths = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        read = {name for name in environment if _READ_BY_IMPORTS.fullmatch(name)} - _OF_QUIET_COMMANDS
        key = libraries, *sorted((name, environment[name]) for name in read)
        if key not in _servers:
            # What importing does not read comes with each program, and is not the first program's.
            others = {
                name: value
                for name, value in os.environ.items()
                if not _READ_BY_IMPORTS.fullmatch(name) and name not in _OF_QUIET_COMMANDS
            }
            _servers[key] = _Server(libraries, others | {name: environment[name] for name in read})
        self._server, self._words, place = _servers[key], [str(word) for word in words], tempfile.mkdtemp()
        self._read = 0
        weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
        self._written = [Path(place) / name for name in ("out", "err")]
        out, errors = map(str, self._written)
        self.pid = self._server.begin(
            words=self._words, environment=environment, folder=str(folder or Path.cwd()), out=out, err=errors
        )

    @property
    def returncode(self):
        """The exit status as subprocess says it; None while it runs."""
        return self.poll()

    def poll(self):
        """Return the exit status, None while it runs."""
        return self._server.ended(self.pid)

    def wait(self, timeout=None):
        """Wait for the end, and return the exit status."""
        status = self._server.ended(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return status

    def communicate(self, timeout=None):
        """Wait for the end, and return what was written."""
        self.wait(timeout)
        return tuple(path.read_text() if path.exists() else "" for path in self._written)

    def lines(self):
        """Yield lines of its output as they come, until it ends."""
        left = ""
        while True:
            ended = self.poll() is not None
            if self._written[0].exists():
                with open(self._written[0]) as file:
                    file.seek(self._read)
                    left += file.read()
                    self._read = file.tell()
            *whole, left = left.split("\n")
            yield from (f"{line}\n" for line in whole)
            if ended:
                return
            time.sleep(0.005)

    def send_signal(self, number):
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def start(*words, env=None, cwd=None, libraries=ALL):
    """Start `python WORDS...` with `libraries` imported: `module`, or `module:name,name`."""
    return Running(words, env, cwd, libraries)


def run(*words, env=None, cwd=None, timeout=300, libraries=ALL):
    """Run `python WORDS...` to its end, as `subprocess.run` with captured text does."""
    running = start(*words, env=env, cwd=cwd, libraries=libraries)
    try:
        out, errors = running.communicate(timeout)
    finally:
        running.kill()
    return subprocess.CompletedProcess(words, running.returncode, out, errors)


def run_ranks(*words, env=None, timeout=300, count=2):
    """Run `python WORDS...` as the processes of a group; output and errors of each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        start(*words, env={**(os.environ if env is None else env), **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    end = time.monotonic() + timeout
    try:  # as launchers do: the first that fails ends all
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < end, "it takes too long"
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(errors + out for out, errors in said)
    return said


def run_in_ranks(file, function, *arguments):
    """Call a function of a file with `(rank, *arguments)`, texts, in two processes."""
    program = (
        f"import os, runpy, sys; runpy.run_path({str(file)!r})[{function!r}](int(os.environ['RANK']), *sys.argv[1:])"
    )
    run_ranks("-c", program, *arguments)


def _import(library):
    module, _, names = library.partition(":")
    with contextlib.suppress(ImportError):
        found = importlib.import_module(module)
        for name in filter(None, names.split(",")):
            getattr(found, name)


def _program(asked):
    """What a fork does."""
    for stream, path in enumerate((os.devnull, asked["out"], asked["err"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if stream else os.O_RDONLY)
        os.dup2(file, stream)
        os.close(file)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    first, *rest = asked["words"]
    if first in ("-c", "-m"):
        sys.argv, first, code = [first, *rest[1:]], first, rest[0]
        sys.path.insert(0, "")
        if first == "-m":
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _fork(asked, wake):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in wake:
            os.close(end)
        try:
            _program(asked)
            code = 0
        except SystemExit as left:
            if left.code is not None and not isinstance(left.code, int):
                print(left.code, file=sys.stderr)
            code = 0 if left.code is None else left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _serve(libraries):
    """Import, then fork for each line that comes, and say who was forked and how each ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.dup(1)
    os.set_inheritable(out, False)
    for library in libraries:
        _import(library)
    gc.freeze()
    wake = os.pipe()
    for end in wake:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running, waiting = set(), b""

    def say(*words):
        os.write(out, (json.dumps(words) + "\n").encode())

    while True:
        ready = select.select([0, wake[0]], [], [])[0]
        if wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake[0], 4096)
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                running.remove(pid)
                say(pid, os.waitstatus_to_exitcode(status))
        if 0 in ready:
            got = os.read(0, 2**20)
            if not got:
                break
            waiting += got
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line), (*wake, out))
                running.add(pid)
                say(pid, None)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _serve(sys.argv[1:])
