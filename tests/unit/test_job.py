"""Jobs: what is kept survives kills, failures and full disks; another key is refused by name; publishing is durable."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm

from netweight.core.engines import in_process
from netweight.errors import CorruptBlob, OutputExists, OutputFailed, UsageError
from netweight.job import Job, check_destination
from netweight.store.checkpoint import write_checkpoint

KEY = {"settings": {"lr": 0.1, "layers": [1, 2], "frozen": None}, "data": "xxh3-128:0"}


def held(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("shared", [False, True])
def test_work_is_not_mixed_with_a_models_files(tmp_path, shared):
    for name in ("config.json", "model_index.json", "bank.json"):
        model = tmp_path / name.partition(".")[0]
        model.mkdir()
        (model / name).write_text("{}")
        with pytest.raises(OutputExists, match=f"contains a model .{name}."), Job.open(model, shared=shared):
            pass
        assert held(model) == {name: b"{}"}
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file is a file, and a folder is needed, so .*x cannot"):
        Job.open(tmp_path / "file" / "x", shared=shared).__enter__()


def test_work_continues_in_a_folder_to_which_a_model_was_added(tmp_path):
    with Job.open(tmp_path) as job:
        job.save({}, {})
    (tmp_path / "config.json").write_text("{}")
    with Job.open(tmp_path) as job:
        assert job.load() is not None


def test_a_second_call_continues_with_the_newest_state(tmp_path):
    tensors = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(3), "empty": torch.empty(0)}
    with Job.open(tmp_path / "new" / "job", key=KEY) as job:
        assert job.load() is None
        job.save({"step": 1}, tensors)
        job.save({"step": 2}, iter(tensors.items()))
    with Job.open(tmp_path / "new" / "job", key=KEY) as job:
        about, found = job.load()
        assert about == {"step": 2}
        assert list(found) == list(tensors)
        assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert os.listdir(job.folder) == ["state.safetensors"]  # and nothing else: it may be copied alone


def test_another_key_is_refused_and_each_difference_named(tmp_path):
    with Job.open(tmp_path, key=KEY, of="a training") as job:
        job.save({}, {})
    other = {"settings": {"lr": 0.2, "layers": [1, 3], "frozen": None, "epochs": 3}, "data": "xxh3-128:0"}
    with pytest.raises(UsageError) as caught, Job.open(tmp_path, key=other, of="a training"):
        pass
    assert str(caught.value) == (
        f"{tmp_path} contains a training with other settings: settings.epochs was absent and is 3 now; "
        "settings.layers.1 was 2 and is 3 now; settings.lr was 0.1 and is 0.2 now. "
        "Give the same settings to continue it, choose another folder, or delete the folder "
        "to start again from the beginning."
    )
    with pytest.raises(UsageError, match="and 2 more"), Job.open(tmp_path, key={str(n): n for n in range(5)}):
        pass
    with pytest.raises(UsageError, match="other settings"), Job.open(tmp_path, key=other, reading=True):
        pass
    with Job.open(tmp_path) as job, Job.open(job, key=KEY) as same:  # no key takes over; an open job takes one
        assert same is job
        with pytest.raises(UsageError, match=r"settings\.lr"), Job.open(job, key=other):
            pass


def test_a_key_without_work_is_replaced_and_a_failure_before_any_work_leaves_nothing(tmp_path):
    def fails(folder, key, work):
        with Job.open(folder, key=key) as job:
            work(job)
            raise KeyError

    def failing(*arguments):
        with pytest.raises(KeyError):
            fails(*arguments)

    failing(tmp_path / "a", {"n": 1}, lambda job: job.file("sub/half").touch())
    assert os.listdir(tmp_path) == []
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").touch()
    failing(tmp_path / "own", {"n": 1}, lambda job: None)
    failing(tmp_path / "own", {"n": 2}, lambda job: None)  # nothing was kept under the other key
    assert (tmp_path / "own" / "notes.txt").exists()
    failing(tmp_path / "kept", {"n": 1}, lambda job: job.record("log", {"loss": 1.0}))
    with pytest.raises(UsageError, match="n was 1 and is 2 now"), Job.open(tmp_path / "kept", key={"n": 2}):
        pass


def test_one_process_at_a_time_and_readers_besides(tmp_path):
    folder = tmp_path / "job"
    with Job.open(folder, key=KEY) as job:
        job.save({"step": 1}, {})
        with pytest.raises(UsageError, match="Another run"), Job.open(folder, key=KEY):
            pass
        job.record("log", {"n": 0})
        with Job.open(folder, key=KEY, reading=True) as reader:
            assert reader.load() == ({"step": 1}, {})
            assert reader.records("log") == [{"n": 0}]
            for write in (lambda: reader.save({}, {}), lambda: reader.record("log", {})):
                with pytest.raises(UsageError, match="opened with reading=True"):
                    write()
    with Job.open(tmp_path / "none", key=KEY, reading=True) as reader:
        assert reader.load() is None
    assert os.listdir(tmp_path) == ["job"]


def test_a_shared_job_leaves_the_folder_to_others_and_keeps_rows_alone(tmp_path):
    with Job.open(tmp_path) as whole, Job.open(tmp_path, shared=True) as rows, Job.open(tmp_path, shared=True) as other:
        rows.record("log", {"n": 1})
        with pytest.raises(UsageError, match="Another process"):
            other.record("log", {"n": 2})
        other.record("other", {"n": 2})
        with pytest.raises(UsageError, match="opened with shared=True"):
            rows.save({}, {})
        with Job.open(whole, shared=True) as same:
            assert same is whole
        assert [result.value for result in whole.map(double, [2], name="more", engine=in_process)] == [4]
    with Job.open(tmp_path, reading=True) as job:
        assert (job.records("log"), job.records("other")) == ([{"n": 1}], [{"n": 2}])


def test_records_by_key_and_by_order_drop_a_line_cut_short(tmp_path):
    with Job.open(tmp_path) as job:
        job.record("files", {"size": 1}, key={"path": "a"})
        job.record("files", {"size": 2}, key={"path": "a"})
        for loss in (3.0, 3.0):
            job.record("log", {"loss": loss})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"loss": 2')
    with Job.open(tmp_path) as job:
        assert job.recorded("files", {"path": "a"}) == {"size": 2}
        assert job.recorded("files", {"path": "b"}) is None
        assert job.records("log") == [{"loss": 3.0}, {"loss": 3.0}]
        job.record("log", {"loss": 1.0})
        assert len(job.records("log")) == 3
        assert job.records("other") == []


def double(number):
    if number == 3:
        raise ValueError("three")
    return 2 * number


def test_runs_are_remembered_in_the_job(tmp_path):
    with Job.open(tmp_path, key=KEY) as job:
        first = [(r.value, r.from_ledger) for r in job.map(double, [1, 2, 3], engine=in_process, ordered=True)]
        assert first == [(2, False), (4, False), (None, False)]
    with Job.open(tmp_path, key=KEY) as job:
        assert [r.from_ledger for r in job.map(double, [1, 2, 3], engine=in_process, ordered=True)] == [
            True,
            True,
            False,
        ]
    assert (tmp_path / "runs.jsonl").is_file()


def test_damage_is_named_with_a_cure(tmp_path):
    with Job.open(tmp_path, key=KEY) as job:
        job.save({}, {"w": torch.randn(64, 64)})
        for cut in (10, 500, -40):
            whole = (tmp_path / "state.safetensors").read_bytes()
            (tmp_path / "state.safetensors").write_bytes(whole[:cut])
            with pytest.raises(CorruptBlob, match=r"state\.safetensors.*Delete .*state\.safetensors to start again"):
                job.load()
            (tmp_path / "state.safetensors").write_bytes(whole)
        flipped = bytearray(whole)
        flipped[-100] ^= 255
        (tmp_path / "state.safetensors").write_bytes(flipped)
        with pytest.raises(CorruptBlob, match="to start again from the beginning"):
            job.load()
        job.record("log", {})
    (tmp_path / "state.safetensors").unlink()
    for text in ("{", '{"version": 99, "key": {}}'):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(
            CorruptBlob, match=r"job\.json.*Delete .* to start again from the beginning, or use the version"
        ):
            with Job.open(tmp_path, key=KEY):
                pass


def test_publishing_syncs_all_files_then_folders_then_renames_then_syncs_the_parent(tmp_path, monkeypatch):
    calls, opened = [], {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "rename")}

    def open_(path, *arguments, **options):
        descriptor = real["open"](path, *arguments, **options)
        opened[descriptor] = os.fspath(path)
        return descriptor

    def fsync(descriptor):
        calls.append(("sync", opened[descriptor]))
        real["fsync"](descriptor)

    def renaming(name):
        def rename(old, new, **options):
            calls.append(("rename", os.fspath(new)))
            real[name](old, new, **options)

        return rename

    destination = tmp_path / "made"
    with Job.beside(destination) as job:
        for name in ("a", "sub/b", "sub/deep/c"):
            job.file(name).write_text(name)
        (job.tree / "hollow").mkdir()
        tree = str(job.tree)
        for name, replaced in (("open", open_), ("fsync", fsync)):
            monkeypatch.setattr(os, name, replaced)
        for name in ("replace", "rename"):
            monkeypatch.setattr(os, name, renaming(name))
        job.publish(destination)
        monkeypatch.undo()
    moved = calls.index(("rename", str(destination)))
    before = [os.path.relpath(path, tree) for what, path in calls[:moved] if what == "sync" and path.startswith(tree)]
    assert sorted(before[:3]) == ["a", "sub/b", "sub/deep/c"]
    assert sorted(before[3:]) == [".", "hollow", "sub", "sub/deep"]
    assert before.index("sub/deep") < before.index("sub") < before.index(".")
    assert calls[moved + 1 :] == [("sync", str(tmp_path))]
    assert held(destination) == {"a": b"a", "sub/b": b"sub/b", "sub/deep/c": b"sub/deep/c"}
    assert os.listdir(tmp_path) == ["made"]


def test_an_existing_destination_is_refused_or_replaced_whole(tmp_path):
    destination = tmp_path / "made"

    def make(content, **options):
        with Job.beside(destination, **options) as job:
            job.file("f").write_text(content)
            job.publish(destination, **options)

    make("one")
    with pytest.raises(OutputExists, match="--overwrite"):
        make("two")
    with pytest.raises(OutputExists, match="move it away"):
        make("two", overwrite=None)
    make("three", overwrite=True)
    assert (destination / "f").read_text() == "three"
    assert os.listdir(tmp_path) == ["made"]
    with pytest.raises(UsageError, match="does not exist"), Job.beside(tmp_path / "no" / "made"):
        pass


def test_a_failure_keeps_finished_work_and_the_next_call_continues(tmp_path):
    destination = tmp_path / "made"

    def fail():
        with Job.beside(destination, key=KEY) as job:
            job.file("shard-1").write_text("done")
            job.record("files", {"file": "shard-1"}, key=1)
            job.save({"step": 7}, {"w": torch.ones(3)})
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputFailed, match="disk is full"):
        fail()
    assert os.listdir(tmp_path) == [".made.netweight-work"]
    check_destination(destination)  # looking does not touch it
    with Job.beside(destination, key=KEY) as job:
        assert job.recorded("files", 1) == {"file": "shard-1"}
        assert job.load()[0] == {"step": 7}
        assert (job.tree / "shard-1").read_text() == "done"
        job.publish(destination)
    assert held(destination) == {"shard-1": b"done"}


def test_a_state_of_an_earlier_release_names_no_key_and_is_taken(tmp_path):
    write_checkpoint(tmp_path / "work.safetensors", {"identity": "x"}, [("w", torch.ones(2))])
    with Job.open(tmp_path, key=KEY, state="work.safetensors") as job:
        about, tensors = job.load()
        assert about == {"identity": "x"}  # its owner compares that
        job.save(about, tensors)
    with (
        pytest.raises(UsageError, match="data was"),
        Job.open(tmp_path, key=KEY | {"data": 1}, state="work.safetensors"),
    ):
        pass
    write_checkpoint(tmp_path / "work.safetensors", {"job": {"version": 2, "key": KEY}}, [])
    with (
        pytest.raises(CorruptBlob, match=r"version 2, .* Delete"),
        Job.open(tmp_path, key=KEY, state="work.safetensors"),
    ):
        pass


FULL = """
import resource, sys
from pathlib import Path
from netweight.errors import NetweightError
from netweight.job import Job
import torch
with Job.open(sys.argv[1], key={}) as job:
    job.save({"step": 1}, {"w": torch.zeros(8)})
    job.record("log", {"n": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        job.save({"step": 2}, {"w": torch.randn(5000)})
    except NetweightError as error:
        print(type(error).__name__, error)
    try:
        job.record("log", {"text": "x" * 5000})
    except OSError as error:
        print(error.strerror)
    job.record("log", {"n": 2})
"""


def test_without_room_the_older_state_and_all_records_stay(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "job")], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.startswith("OutputFailed"), answer.stdout
    assert "File too large" in answer.stdout
    with Job.open(tmp_path / "job", key={}) as job:
        assert job.load()[0] == {"step": 1}
        assert job.records("log") == [{"n": 1}, {"n": 2}]


WITHOUT_FCNTL = """
import subprocess, sys, types  # subprocess looks for msvcrt itself
import fcntl
windows = types.ModuleType("msvcrt")  # its lock, by what this system has
windows.LK_NBLCK = 2
def locking(descriptor, mode, count):
    import os
    assert (mode, count, os.lseek(descriptor, 0, os.SEEK_CUR)) == (2, 1, 0x7FFFFFFF)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None
windows.locking = locking
sys.modules["fcntl"], sys.modules["msvcrt"] = None, windows
from netweight.errors import UsageError
from netweight.job import Job
with Job.open(sys.argv[1], key={"n": 1}) as job:
    job.save({"step": 1}, {})
    job.record("log", {"n": 1})
    try:
        with Job.open(sys.argv[1], key={"n": 1}):
            pass
    except UsageError as error:
        print(error)
with Job.open(sys.argv[1], key={"n": 1}) as job:
    print(job.load(), job.records("log"))
"""


def test_the_lock_of_a_system_without_fcntl(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path / "job")], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[0].startswith("Another run is writing")
    assert answer.stdout.splitlines()[1] == "({'step': 1}, {}) [{'n': 1}]"


WORKER = """
import sys
from pathlib import Path
import torch
from netweight.job import Job
destination, files, overwrite = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "over"
print("ready", flush=True)
with Job.beside(destination, key={"files": files}, overwrite=overwrite) as job:
    state = job.load()
    step = state[0]["step"] if state else 0
    assert state is None or float(state[1]["sum"]) == sum(range(step)), state
    for number in range(files):
        row = job.recorded("files", number)
        if row is None:
            job.file(f"part-{number % 3}/{number}").write_text(str(number) * 100)
            job.record("files", {"number": number}, key=number)
        else:
            assert (job.tree / f"part-{number % 3}" / str(number)).is_file()
    for step in range(step, files):
        job.save({"step": step + 1}, {"sum": torch.tensor(float(sum(range(step + 1))))})
    job.publish(destination, overwrite=overwrite)
print("published", flush=True)
"""


@pytest.mark.parametrize("over", ["new", "over"])
def test_killed_at_any_moment_it_ends_as_one_that_was_left_alone(tmp_path, over):
    destination, files, moments = tmp_path / "made", 12, random.Random(over)
    expected = {f"part-{n % 3}/{n}": str(n).encode() * 100 for n in range(files)}
    older = {"old": b"old"}
    if over == "over":
        destination.mkdir()
        (destination / "old").write_bytes(b"old")
    program, libraries = ("-c", WORKER, destination, files, over), ("torch", "netweight.job")
    ends = time.monotonic() + 13
    kills = 0
    while time.monotonic() < ends and kills < 6:
        process = warm.start(*program, libraries=libraries)
        assert next(process.lines()) == "ready\n"
        time.sleep(moments.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL or not said.strip() or "OutputExists" in said, said
        found = held(destination) if destination.exists() else None
        assert found in ((expected, older) if over == "over" else (expected, None))
        kills += 1
        if found == expected:
            break
    if not destination.exists() or held(destination) != expected:
        done = warm.run(*program, timeout=60, libraries=libraries)
        assert done.returncode == 0, done.stderr
    assert held(destination) == expected
    check_destination(destination, overwrite=True)
    assert os.listdir(tmp_path) == ["made"]


KILLED_PUBLISHING = """
import os, signal, sys
from pathlib import Path
from netweight.job import Job
from netweight.core import atomic_writes as atomic
if sys.argv[3] == "steps":
    atomic.exchange = lambda first, second: False
destination, stop, moments = Path(sys.argv[1]), int(sys.argv[2]), 0
def counting(function):
    def counted(*arguments, **options):
        global moments
        for late in (False, True):
            moments += 1
            if moments == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            if not late:
                result = function(*arguments, **options)
        return result
    return counted
with Job.beside(destination, key={"n": 1}, overwrite=True) as job:
    if job.recorded("files", "f") is None:
        job.file("f").write_text("new")
        job.record("files", {}, key="f")
    if atomic.exchange.__module__ == "netweight.core.atomic_writes":
        atomic.exchange = counting(atomic.exchange)
    for name in ("open", "replace", "rename", "fsync", "unlink", "rmdir"):
        setattr(os, name, counting(getattr(os, name)))
    job.publish(destination, overwrite=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["exchange", "steps"])
def test_an_older_folder_is_never_lost_when_publishing_is_killed_at_each_step(tmp_path, how):
    """One process forks for every step, since importing takes most of the time."""
    destination = tmp_path / "made"
    program = f"""
import os, sys, shutil
from pathlib import Path
import netweight.job
from netweight.job import check_destination
destination = Path(sys.argv[1])
source = {KILLED_PUBLISHING!r}
stop, killed = 0, True
def once(stop):
    child = os.fork()
    if child == 0:
        sys.argv[1:] = [str(destination), str(stop), {how!r}]
        exec(compile(source, "killed", "exec"), {{"__name__": "killed"}})
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
while killed:
    stop += 1
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir()
    (destination / "f").write_text("old")
    killed = once(stop)
    if {how!r} == "exchange":
        assert (destination / "f").read_text() in ("old", "new"), stop
    check_destination(destination, overwrite=True)
    assert (destination / "f").read_text() in ("old", "new"), stop
    once(0)
    assert (destination / "f").read_text() == "new", stop
    assert os.listdir(destination.parent) == [destination.name], (stop, os.listdir(destination.parent))
print(stop)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program, str(destination)], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) > 20


def test_a_job_s_key_is_written_for_people(tmp_path):
    with Job.open(tmp_path, key={"path": Path("a/b"), "pair": (1, 2)}) as job:
        job.record("log", {})
    assert json.loads((tmp_path / "job.json").read_text()) == {"version": 1, "key": {"path": "a/b", "pair": [1, 2]}}


def test_a_full_disk_is_named_whichever_library_meets_it(tmp_path):
    """A copy names its source; safetensors, written in Rust, has the system's number in its text alone."""
    source = tmp_path / "source"
    for failure in (
        OSError(errno.ENOSPC, "No space left on device", str(source)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ):
        with pytest.raises(OutputFailed, match=r"target could not be written \(No space left.*disk is full"):
            with Job.beside(tmp_path / "target"):
                raise failure
    with pytest.raises(RuntimeError, match="os error 9999"), Job.beside(tmp_path / "target"):
        raise RuntimeError("(os error 9999)")
