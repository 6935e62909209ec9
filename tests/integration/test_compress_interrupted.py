"""Runs that are killed anywhere, disks that fill up: the target is old, absent or complete; the next run goes on."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import warm
from folders_under_test import content, simple_weights, transformers_folder

from netweight.core.atomic_writes import part_of
from netweight.core.progress import Progress
from netweight.errors import OutputFailed, UsageError
from netweight.methods.compress import compress_folder as folder_module
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder

SUPPORT = Path(__file__).parents[1] / "support"


def killed_everywhere(*arguments, **environment):
    answer = warm.run(
        SUPPORT / "killed_runs.py", *arguments, timeout=120, env=os.environ | environment, libraries=warm.COMPRESSION
    )
    assert answer.returncode == 0, answer.stderr
    return int(answer.stdout)


def test_compression_killed_at_every_step(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    compress_folder(source, tmp_path / "expected")
    assert killed_everywhere(source, tmp_path / "net", "compress", tmp_path / "expected") > 40


# Where the target exists already, a run is another only from the moment on in which it takes the target's place.
PUBLICATION = {"LAST": "80"}


def test_an_old_folder_is_replaced_at_once_or_not_at_all(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    older = transformers_folder(tmp_path / "older", seed=9)
    compress_folder(source, tmp_path / "expected")
    arguments = source, tmp_path / "net", "compress", tmp_path / "expected", older
    assert killed_everywhere(*arguments, **PUBLICATION) == 80


@pytest.mark.parametrize("old", [False, True], ids=["new", "over an old one"])
def test_a_single_file_killed_at_every_step(tmp_path, old):
    source = simple_weights(tmp_path / "m.safetensors")
    compress_folder(source, tmp_path / "packed.safetensors")
    older = [simple_weights(tmp_path / "older.safetensors", seed=9)] if old else []
    ends = source, tmp_path / "net.safetensors", "compress", tmp_path / "packed.safetensors"
    assert killed_everywhere(*ends, *older) > 8
    ends = tmp_path / "packed.safetensors", tmp_path / "back.safetensors", "decompress", source
    assert killed_everywhere(*ends, *older) > 8


def test_an_old_folder_is_never_lost_where_folders_cannot_be_swapped(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    older = transformers_folder(tmp_path / "older", seed=9)
    compress_folder(source, tmp_path / "expected")
    arguments = source, tmp_path / "net", "compress", tmp_path / "expected", older
    assert killed_everywhere(*arguments, **PUBLICATION, NO_EXCHANGE="1") == 80


def test_decompression_killed_at_every_step(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    compress_folder(source, tmp_path / "packed")
    assert killed_everywhere(tmp_path / "packed", tmp_path / "back", "decompress", source) > 40


LED = """
import os, sys
def fsync(descriptor):
    os.write(1, b"sync\\n")
    os.read(0, 1)  # until it is let go on
os.fsync = fsync
from netweight.cli import main
main(["compress", *sys.argv[1:]])
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.study)])
def test_the_command_killed_at_random_moments(tmp_path, seed):
    source, target = transformers_folder(tmp_path / "m", shards=12), tmp_path / "net"
    compress_folder(source, tmp_path / "expected")
    expected, moments = content(tmp_path / "expected"), random.Random(seed)
    program = [sys.executable, "-c", LED, str(source), str(target)]
    for _ in range(3):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(program, bufsize=0, **pipes) as process:
            for _ in range(moments.randint(1, 12)):
                process.stdout.readline()
                process.stdin.write(b".")
            time.sleep(moments.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not target.exists() or content(target) == expected
    answer = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "Continued an earlier run: " in answer.stdout
    assert content(target) == expected


class Stopping(Progress):
    """Raises in the middle of a run, as Ctrl-C does, when a given file is begun."""

    def __init__(self, at):
        super().__init__("off")
        self.at = at

    def task(self, *arguments, **options):
        task = super().task(*arguments, **options)
        real = task.describe

        def describe(text):
            if text == self.at:
                raise KeyboardInterrupt
            real(text)

        task.describe = describe
        return task


SECOND = "model-00002-of-00002.safetensors"


def interrupted(source, target, **options):
    with pytest.raises(KeyboardInterrupt):
        compress_folder(source, target, progress=Stopping(SECOND), **options)


def test_finished_shards_are_not_done_again(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    interrupted(source, tmp_path / "net")
    assert not (tmp_path / "net").exists()
    assert compress_folder(source, tmp_path / "net").resumed == 1
    compress_folder(source, tmp_path / "expected")
    assert content(tmp_path / "net") == content(tmp_path / "expected")


def test_inputs_and_settings_that_changed_in_between_are_noticed(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    interrupted(source, tmp_path / "net")
    assert compress_folder(source, tmp_path / "net", level="max").resumed == 0
    interrupted(source, tmp_path / "again")
    transformers_folder(tmp_path / "other", shards=2, seed=77)
    first = "model-00001-of-00002.safetensors"
    (source / first).write_bytes((tmp_path / "other" / first).read_bytes())
    assert compress_folder(source, tmp_path / "again").resumed == 0
    compress_folder(source, tmp_path / "expected")
    assert content(tmp_path / "again") == content(tmp_path / "expected")


def test_files_that_are_gone_in_between_leave_no_trace(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    interrupted(source, tmp_path / "net")
    for path in source.iterdir():
        path.unlink()
    source.rmdir()
    source = transformers_folder(tmp_path / "m")
    compress_folder(source, tmp_path / "net")
    assert sorted(os.listdir(tmp_path / "net")) == [
        "config.json", "model.net.safetensors", "netweight.json", "tokenizer.json",
    ]  # fmt: skip


def test_a_journal_cut_short_is_read_as_far_as_it_goes(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    interrupted(source, tmp_path / "net")
    journal = part_of(tmp_path / "net") / "files.jsonl"
    assert journal.stat().st_size
    with open(journal, "a") as file:
        file.write('{"key": {"pa')
    assert compress_folder(source, tmp_path / "net").resumed == 1


def test_a_run_that_fails_keeps_what_it_finished(tmp_path, monkeypatch):
    source = transformers_folder(tmp_path / "m", shards=2)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.shutil, "copyfileobj", full)
        with pytest.raises(OutputFailed, match="disk is full"):
            compress_folder(source, tmp_path / "net")
    assert sorted(os.listdir(tmp_path)) == [part_of(tmp_path / "net").name, "m"]
    assert compress_folder(source, tmp_path / "net").resumed == 2
    compress_folder(source, tmp_path / "expected")
    assert content(tmp_path / "net") == content(tmp_path / "expected")
    assert sorted(os.listdir(tmp_path)) == ["expected", "m", "net"]


def test_two_runs_do_not_mix(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)

    class Second(Progress):
        def task(self, *arguments, **options):
            with pytest.raises(UsageError, match="Another run"):
                compress_folder(source, tmp_path / "net")
            return super().task(*arguments, **options)

    compress_folder(source, tmp_path / "net", progress=Second("off"))
    assert os.listdir(tmp_path / "net")


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path):
    source = transformers_folder(tmp_path / "m")
    file = source / "model.safetensors"

    class Touching(Progress):
        def task(self, *arguments, **options):
            task = super().task(*arguments, **options)
            task.update = lambda amount: os.utime(file, ns=(1, 1))
            return task

    with pytest.raises(UsageError, match="changed while"):
        compress_folder(source, tmp_path / "net", progress=Touching("off"))
    assert os.listdir(tmp_path) == ["m"]


@contextmanager
def files_of_at_most(size):
    """Let no file grow beyond a size, as `ulimit -f` does; Python ignores the signal, so that writing fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("verb", ["compress", "decompress"])
@pytest.mark.parametrize("limit", [100, 5000, 9000])
def test_a_size_limit_is_a_named_error(tmp_path, verb, limit):
    source = transformers_folder(tmp_path / "m", shards=2)
    if verb == "decompress":
        compress_folder(source, tmp_path / "packed")
        source = tmp_path / "packed"
    before = os.listdir(tmp_path)
    run = compress_folder if verb == "compress" else decompress_folder
    with files_of_at_most(limit), pytest.raises(OutputFailed) as caught:
        run(source, tmp_path / "out")
    assert "ulimit" in str(caught.value)
    work = part_of(tmp_path / "out")
    finished = (work / "files.jsonl").read_text().splitlines() if work.exists() else []
    assert sorted(os.listdir(tmp_path)) == sorted([*before, work.name] if finished else before)
    assert run(source, tmp_path / "out").resumed == len(finished)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_a_named_error(tmp_path, small_disk):
    source = transformers_folder(tmp_path / "m", shards=3)
    with pytest.raises(OutputFailed, match="disk is full"):
        compress_folder(source, small_disk / "net")
    assert set(os.listdir(small_disk)) <= {part_of(small_disk / "net").name}  # finished shards, if there are any
    shutil.rmtree(part_of(small_disk / "net"), ignore_errors=True)
    large = simple_weights(tmp_path / "large.safetensors", shape=(200, 100))
    with pytest.raises(OutputFailed, match="disk is full"):
        compress_folder(large, small_disk / "x.safetensors")
    assert os.listdir(small_disk) == []
    compress_folder(source, tmp_path / "net")
    with pytest.raises(OutputFailed, match="disk is full"):
        decompress_folder(tmp_path / "net", small_disk / "back")
    assert set(os.listdir(small_disk)) <= {part_of(small_disk / "back").name}


@pytest.fixture
def read_only(tmp_path):
    """A place that even root cannot write to."""
    place = transformers_folder(tmp_path / "real" / "m", shards=2).parent
    view = tmp_path / "view"
    view.mkdir()
    for arguments in (["--bind", str(place), str(view)], ["-o", "remount,bind,ro", str(view)]):
        if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
            pytest.skip("a read-only file system cannot be mounted here")
    yield view
    subprocess.run(["umount", str(view)], check=True)


def test_a_read_only_disk_is_enough_to_read_from(tmp_path, read_only):
    compress_folder(read_only / "m", tmp_path / "net")
    decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == content(read_only / "m")
    with pytest.raises(OutputFailed, match="read-only"):
        compress_folder(read_only / "m", read_only / "net")
    with pytest.raises(OutputFailed, match="read-only"):
        compress_folder(read_only / "m" / "model-00001-of-00002.safetensors", read_only / "x.safetensors")


ORDINARY_USER = """
import os, sys
from netweight.errors import NetweightError
from netweight.methods.compress.compress_folder import compress_folder
compress_folder(sys.argv[1], sys.argv[2])  # so that everything is imported
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for source, target in zip(sys.argv[3::2], sys.argv[4::2]):
    try:
        compress_folder(source, target)
    except NetweightError as error:
        print(type(error).__name__, error)
"""


def test_missing_permissions_name_the_file_that_lacks_them():
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        unreadable, readable = transformers_folder(place / "m"), transformers_folder(place / "n")
        (place / "locked").mkdir()
        (place / "open").mkdir()
        for path, mode in {
            place: 0o755, unreadable / "tokenizer.json": 0, place / "locked": 0o555, place / "open": 0o777
        }.items():  # fmt: skip
            path.chmod(mode)
        ends = [readable, place / "first", unreadable, place / "open" / "net", readable, place / "locked" / "net"]
        files = [readable / "model.safetensors", place / "locked" / "x.safetensors"]
        program = [sys.executable, "-c", ORDINARY_USER, *map(str, ends + files)]
        answer = subprocess.run(program, capture_output=True, text=True, check=False)
        said = answer.stdout.splitlines()
        assert len(said) == 3, answer.stderr
        assert said[0].startswith(f"UsageError {unreadable / 'tokenizer.json'} could not be read")
        assert said[1].startswith(f"OutputFailed {place / 'locked' / 'net'} could not be written (Permission denied)")
        assert said[2].startswith(f"OutputFailed {place / 'locked' / 'x.safetensors'} could not be written")
        assert os.listdir(place / "locked") == []
        assert os.listdir(place / "open") == [".net.netweight-part"]  # the weights were finished before
        (place / "locked").chmod(0o755)


def test_what_another_kind_of_run_left_is_named(tmp_path):
    source = transformers_folder(tmp_path / "m")
    part_of(tmp_path / "net").mkdir()
    (part_of(tmp_path / "net") / "tree").mkdir()
    (part_of(tmp_path / "net") / "files.jsonl").write_text('{"digest": "a finished shard"}\n')
    with pytest.raises(OutputFailed, match=r"Remove .*\.net\.netweight-part"):
        compress_folder(source / "model.safetensors", tmp_path / "net")
    part_of(tmp_path / "x").write_bytes(b"")
    with pytest.raises(OutputFailed, match=r"Remove .*\.x\.netweight-part"):
        compress_folder(source, tmp_path / "x")
