"""The commands compress, decompress, inspect and verify as people and machines call them."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from folders_under_test import adapter_folder, content, diffusers_folder, simple_weights, transformers_folder
from safetensors.torch import save_file

from netweight import cli


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A small model, named `m` in the current folder."""
    monkeypatch.chdir(tmp_path)
    return transformers_folder(tmp_path / "m", shards=2)


def run(*arguments):
    return CliRunner().invoke(cli.netweight, [str(argument) for argument in arguments], catch_exceptions=False)


def test_there_and_back_for_people(model, tmp_path):
    answer = run("compress", "m", "net")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.startswith("net: 4 tensors, 24.9 kB -> ")
    assert "(ratio 1." in answer.stdout
    assert "B/s\nWritten: net (20.4 kB in 6 files).\nNext: netweight verify net --against m\n" in answer.stdout
    assert run("verify", "net", "--against", "m").stdout.splitlines()[:4] == [
        "met    damaged tensors: 0 of 4", "met    damaged files: 0 of 5", "met    files that do not belong: 0",
        "met    tensors that differ: 0 of 4",
    ]  # fmt: skip
    assert run("decompress", "net", "back").exit_code == 0
    assert content(tmp_path / "back") == content(model)


def test_there_and_back_for_machines(model, tmp_path):
    compressed = json.loads(run("compress", "m", "net", "--level", "max", "--threads", "1", "--json").stdout)
    assert compressed["source"] == "m"
    assert compressed["target"] == "net"
    assert (compressed["tensors"], compressed["files"], compressed["resumed"]) == (4, 5, 0)
    assert compressed["ratio"] == compressed["nbytes"] / compressed["stored_nbytes"] > 1.2
    verified = json.loads(run("verify", "net", "--json").stdout)
    assert verified["passed"] is True
    assert {finding["name"]: finding["value"] for finding in verified["findings"]}["damaged tensors"] == 0
    restored = json.loads(run("decompress", "net", "back", "--json").stdout)
    assert restored["nbytes"] == compressed["nbytes"]
    assert content(tmp_path / "back") == content(model)


def test_a_variant_and_exclusions_are_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    diffusers_folder(tmp_path / "m")
    answer = run("compress", "m", "net", "--variant", "fp16", "--exclude", "scheduler/*")
    assert "Left out: scheduler/scheduler_config.json" in answer.stdout
    assert "Left out: unet/diffusion_pytorch_model.safetensors" in answer.stdout


def test_what_is_refused_and_with_which_code(model, tmp_path):
    run("compress", "m", "net")
    adapter_folder(tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.bin").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "letter.txt").write_text("Dear all, this is not a model.")
    shutil.copytree(tmp_path / "net", tmp_path / "cut")
    shard = tmp_path / "cut" / "model-00001-of-00002.net.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    shutil.copytree(tmp_path / "m", tmp_path / "partial")
    (tmp_path / "partial" / "model-00002-of-00002.safetensors").unlink()
    for arguments, code, says in [
        (["compress", "m", "net"], 2, "net exists already. Choose another name, or pass overwrite (--overwrite)."),
        (["compress", "m", "letter.txt/x"], 2, "letter.txt/x would be inside of letter.txt, which is a file."),
        (["compress", "none", "x"], 2, "There is no file or folder none."),
        (["compress", "net", "x"], 2, "net is compressed already. Decompress it first."),
        (["compress", "pickled", "x"], 3, "--exclude"),
        (["compress", "pickled/adapter_model.bin", "x"], 3, "is a pickle"),
        (["compress", "letter.txt", "x"], 3, "Name a .safetensors file or a model's folder."),
        (["decompress", "m", "x"], 2, "m has no netweight.json"),
        (["decompress", "cut", "x"], 3, "model-00001-of-00002.net.safetensors"),
        (["verify", "m"], 2, "--against"),
        (["verify", "cut"], 3, "fetch it again"),
        (["inspect", "letter.txt"], 3, "letter.txt is not a safetensors file."),
        (["inspect", "partial"], 3, "incomplete: it lacks model-00002-of-00002.safetensors"),
        (["compress", "partial", "x"], 3, "incomplete: it lacks model-00002-of-00002.safetensors"),
        (["inspect", "m", "--tensor", "layers.0.c"], 2, "layers.0.a"),
        (["inspect", "m", "--plot", "x.gif"], 2, ".svg, .png, .pdf"),
    ]:
        answer = run(*arguments)
        assert answer.exit_code == code, arguments
        assert answer.stderr.startswith("Error: "), arguments
        assert says in answer.stderr, arguments
        machine = run(*arguments, "--json")
        assert machine.exit_code == code
        assert json.loads(machine.stdout)["error"]["message"] in answer.stderr
        assert not (tmp_path / "x").exists()


def test_weights_that_become_larger_are_reported(tmp_path, monkeypatch):
    """Small tensors with their headers, and bytes that cannot be predicted."""
    monkeypatch.chdir(tmp_path)
    save_file({f"{number}": torch.randn(4) for number in range(50)}, "small.safetensors")
    save_file({"a": torch.randint(0, 256, (100_000,), dtype=torch.uint8)}, "random.safetensors")
    for name, reason in (("small", "the files have 73 bytes for each tensor"), ("random", "their bytes can hardly be")):
        answer = run("compress", f"{name}.safetensors", f"{name}-net.safetensors")
        assert answer.exit_code == 0, answer.output
        assert f"The weights did not become smaller: {reason}" in answer.output


def test_damage_is_a_failed_finding_with_a_name(model, tmp_path):
    run("compress", "m", "net")
    file = tmp_path / "net" / "model-00002-of-00002.net.safetensors"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    answer = run("verify", "net")
    assert answer.exit_code == 1
    assert "MISSED damaged tensors: 1 of 4\n         model-00002-of-00002.safetensors: layers.1.b: " in answer.stdout
    findings = json.loads(run("verify", "net", "--json").stdout)["findings"]
    assert findings[0]["detail"]["which"][0].startswith("model-00002-of-00002.safetensors: layers.1.b: ")
    answer = run("decompress", "net", "x")
    assert answer.exit_code == 3
    assert "layers.1.b" in answer.stderr
    assert "fetch or compress it again" in answer.stderr


def test_inspection_shows_where_the_bits_go(model, tmp_path):
    run("compress", "m", "net")
    lines = run("inspect", "net").stdout.splitlines()
    assert lines[0].split() == "tensor dtype shape stored bits entropy sign exponent mantissa file".split()
    assert lines[1].split()[:3] == ["layers.0.a", "BF16", "64x48"]
    assert lines[1].endswith("model-00001-of-00002.net.safetensors")
    assert lines[-1].startswith("4 tensors in 2 files, 12,288 weights: 24.6 kB of values in ")
    one = json.loads(run("inspect", "net", "--tensor", "*.0.a", "--json").stdout)["tensors"]
    assert [tensor["name"] for tensor in one] == ["layers.0.a"]
    assert one[0]["bits"]["share"].keys() == {"sign", "exponent", "mantissa"}
    assert sum(one[0]["bits"]["share"].values()) == pytest.approx(1)
    assert 10 < one[0]["stored_bits_per_weight"] < 12
    assert sum(one[0]["bits"]["entropy"].values()) == pytest.approx(one[0]["bits"]["bits_per_weight"])
    plain = json.loads(run("inspect", "m", "--tensor", "*.0.a", "--json").stdout)["tensors"]
    assert plain[0]["bits"] == one[0]["bits"]
    assert plain[0]["stored_bits_per_weight"] == 16


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_histograms_are_drawn_on_request(model, tmp_path, suffix, start):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    simple_weights(model / "more.safetensors", ("positions",), "I64", (64,))
    answer = run("inspect", "m", "--plot", f"plot{suffix}")
    assert f"Written: plot{suffix} (" in answer.stdout
    drawn = (tmp_path / f"plot{suffix}").read_bytes()
    assert drawn.startswith(start)
    if suffix == ".svg":
        text = drawn.decode()
        assert [text.count(f">{part}: ") for part in ("sign", "exponent", "mantissa")] == [1, 1, 1]
        assert "m, bfloat16" in text


COMMAND = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit that it is ignored
real, left = os.fsync, int(sys.argv[1])
def fsync(descriptor):
    global left
    left -= 1
    if left == 0:
        print("here", flush=True)
        time.sleep(5)  # the signal arrives meanwhile, however slow the machine
    real(descriptor)
os.fsync = fsync
from netweight.cli import main
main(sys.argv[2:])
"""


def interrupted(*arguments, at, by=signal.SIGINT):
    """Run a command in a process of its own, send it a signal at some sync, and return its code and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(at), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.send_signal(by)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_after_ctrl_c_the_same_command_continues(model, tmp_path):
    code, said = interrupted("compress", "m", "net", at=4)
    assert code == cli.INTERRUPTED == 130, said
    assert "The same command continues where this one stopped" in said
    assert "delete .net.netweight-part" in said
    answer = run("compress", "m", "net")
    assert "Continued an earlier run: " in answer.stdout
    run("compress", "m", "expected")
    assert content(tmp_path / "net") == content(tmp_path / "expected")
    code, said = interrupted("compress", "m/model-00001-of-00002.safetensors", "x", at=1)
    assert code == 130
    assert "Nothing was written" in said
    assert sorted(os.listdir(tmp_path)) == ["expected", "m", "net"]


def test_a_request_to_end_leaves_the_work_in_order(model, tmp_path):
    code, said = interrupted("compress", "m", "net", at=4, by=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, said
    assert "Terminated by SIGTERM." in said
    assert "delete .net.netweight-part" in said
    assert "Continued an earlier run: 1 file." in run("compress", "m", "net").stdout


def in_a_process(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "netweight", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def fake_hub(cache, model):
    """Put a model into a folder laid out as the hub's cache, under the id `some/model`."""
    repository, commit = cache / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for number, path in enumerate(sorted(model.iterdir())):
        (repository / "blobs" / f"{number:040}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040}")
    return snapshot


def test_models_of_the_hub_s_cache_go_by_their_id(model, tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    fake_hub(tmp_path / "cache", model)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    for source, target in [("some/model", "a"), ("some/model@main", "b")]:
        answer = in_a_process("compress", source, target, **offline)
        assert answer.returncode == 0, answer.stderr
        run("decompress", target, f"{target}-back")
        assert content(tmp_path / f"{target}-back") == content(model)
        assert not any(path.is_symlink() for path in (tmp_path / target).iterdir())


@pytest.mark.parametrize("name", ["some/other", "some/model@v9", "a..b/c--d"])
def test_models_that_cannot_be_had_are_named_with_the_cure(tmp_path, name):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    answer = in_a_process("compress", name, tmp_path / "out", **offline)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"Error: {name} is not an existing path")
    assert "Check the path" in answer.stderr
    assert not (tmp_path / "out").exists()


def test_compression_needs_no_torch(model):
    program = (
        "import sys, contextlib\n"
        "from netweight.cli import main\n"
        "for arguments in (['compress', 'm', 'net'], ['verify', 'net'], ['decompress', 'net', 'back']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"
    assert os.path.isdir("back")
