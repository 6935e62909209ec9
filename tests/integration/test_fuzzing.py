"""The fuzzing target is sound C++; `make study` compiles it with sanitizers and fuzzes."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(seconds, work, **variables):
    environment = {**os.environ, "FUZZ_WORK": str(work), "FUZZ_OPTIMIZE": "-O0", **variables}
    return subprocess.run(
        ["sh", ROOT / "fuzz" / "run.sh", str(seconds)], capture_output=True, text=True, env=environment, timeout=500
    )


def has_runtime(folder):
    """Whether clang++ is here and links fuzzing targets."""
    if shutil.which("clang++") is None:
        return False
    source = folder / "nothing.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
    flags = ["-fsanitize=fuzzer,address,undefined", "-o", str(folder / "nothing")]
    return subprocess.run(["clang++", str(source), *flags], capture_output=True).returncode == 0


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_the_target_goes_with_what_it_fuzzes():
    command = ["clang++", "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", "-Inative", "fuzz/decode_blob.cpp"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0


@pytest.mark.study
def test_some_seconds_of_fuzzing_find_nothing(tmp_path):
    if not has_runtime(tmp_path):
        pytest.skip("fuzzing needs clang++ and its runtime: apt-get install clang libclang-rt-dev")
    answer = run(5, tmp_path)
    assert answer.returncode == 0, answer.stderr[-3000:]
    runs = re.search(r"Done (\d+) runs", answer.stderr)
    assert runs
    assert int(runs[1]) > len(list((ROOT / "tests" / "golden" / "accept").iterdir()))


def test_without_clang_it_says_what_to_install(tmp_path):
    for tool in ("sh", "dirname", "uname", "mkdir"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    answer = run(1, tmp_path / "work", PATH=str(tmp_path))
    assert answer.returncode != 0
    assert "apt-get install clang libclang-rt-dev" in answer.stderr
