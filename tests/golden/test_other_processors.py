"""Kernels for 64-bit ARM, compiled for it and emulated, read and write what the others do."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from netweight.codec import lossy

ROOT = Path(__file__).parents[2]
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")


@pytest.mark.study
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_arm_reads_and_writes_the_same_bytes(tmp_path):
    blobs = sorted((ROOT / "tests" / "golden" / "accept").iterdir())
    for place, path in enumerate(blobs):
        if path.read_bytes()[:3] == b"NWL":  # of a lossy blob its words
            blobs[place] = tmp_path / path.name
            blobs[place].write_bytes(lossy.read_header(path.read_bytes()).words)
    command = ["sh", ROOT / "fuzz" / "arm.sh", *blobs]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "FUZZ_WORK": str(tmp_path)})
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert re.search(rf"^{len(blobs)} files, alike by neon portable$", answer.stdout, re.MULTILINE)
