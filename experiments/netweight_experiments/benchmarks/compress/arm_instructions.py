"""Instructions that the codec executes per weight on 64-bit ARM, counted by an emulator: NEON, and beside it portable.

    python -m netweight_experiments.benchmarks compress.arm_instructions

From the root of the source tree, with g++-aarch64-linux-gnu, qemu-user and a C compiler. A million weights are drawn
from N(0, 0.02²). What starting and reading cost is left out: it is the same for one and for three repetitions.
Instructions say how much work there is, not how long a processor takes for it.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from netweight import codec
from netweight_experiments.benchmarks.compress import codec_data as data

DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")
WEIGHTS = 1 << 20


def main():
    """Count."""
    with tempfile.TemporaryDirectory() as folder:
        plugin, file = Path(folder, "count.so"), Path(folder, "weights.nwt")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "fuzz/count_instructions.c", "-o", plugin], check=True)
        environment = os.environ | {"FUZZ_WORK": folder, "FUZZ_OPTIMIZE": "-O3", "QEMU_OPTIONS": f"-plugin {plugin}"}

        def executed(*arguments):
            command = ["sh", "fuzz/arm.sh", *arguments, file]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            return int(answer.stderr.split()[-1])

        counts = {}
        for dtype in DTYPES:
            tensor = data.gaussian(seed=0, count=WEIGHTS, dtype=dtype).tensors[0]
            file.write_bytes(codec.encode(tensor))
            for work in ("decode", "encode"):
                for path in ("neon", "portable"):
                    more, less = (executed(work, path, repeats) for repeats in ("3", "1"))
                    counts.setdefault(dtype, {})[f"{work}, {path}"] = round((more - less) / 2 / tensor.numel(), 2)
    tools = ("qemu-aarch64", "aarch64-linux-gnu-g++")
    versions = [subprocess.run([tool, "--version"], capture_output=True, text=True).stdout for tool in tools]
    return {"weights": WEIGHTS, "tools": [text.splitlines()[0] for text in versions], "instructions per weight": counts}
