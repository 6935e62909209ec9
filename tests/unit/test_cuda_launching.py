"""Launching through the real bindings of the driver, with a stand-in for the driver that notes what it is asked."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import emulated_kernels
import pytest

SOURCE = Path(emulated_kernels.EMULATOR) / "stand_in_driver.c"

# In a process of its own: the bindings look for a driver once. torch is told that it was built for CUDA.
PROGRAM = """
import ctypes, threading
import numpy as np
import torch
from netweight.codec.cuda import launching, launching
from netweight.errors import NetweightError

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda index=0: (9, 0)
torch._C._cuda_getDevice = lambda: 1
torch._C._cuda_getCurrentRawStream = lambda index: 0x70 + index
launching.cubin = lambda file, architecture: f"{dict(a='8 8 1 4 8', b='')[file[0]]} ".encode() + b"\\0"

class OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)
    get_device = lambda self: self.device.index

device = torch.device("cuda", 0)
tensor = torch.zeros(4).as_subclass(OnGpu)
arguments = (tensor, -2, np.uint8(7), np.float32(1.0), 0.5)
print("address", tensor.data_ptr().to_bytes(8, "little").hex())
print("unavailable because", launching.unavailable_because())
launching.launch("a.cu", "first", 5, 64, arguments, device=device)
launching.launch("a.cu", "first", 6, 96, arguments, device=device)
OnGpu.device = torch.device("cuda", 1)
launching.launch("a.cu", "second", 7, 32, arguments, device=torch.device("cuda"))
launching.launch("a.cu", "second", 7, 64, arguments, device=torch.device("cuda"))
OnGpu.device = device
thread = threading.Thread(target=lambda: launching.launch("b.cu", "third", 8, 32, (), device=device))
thread.start()
thread.join()
for file, entry, grid, given in [
    ("a.cu", "first", 1, arguments[:-1]), ("a.cu", "missing", 1, arguments),
    ("b.cu", "third", 13, ()), ("b.cu", "third", 14, ()),
    ("a.cu", "first", 1, (torch.zeros(4), *arguments[1:])),
]:
    try:
        launching.launch(file, entry, grid, 32, given, device=device)
    except NetweightError as error:
        print(type(error).__name__, error)
library = ctypes.CDLL("libcuda.so.1")
library.stand_in_notes.restype = ctypes.c_char_p
print(library.stand_in_notes().decode())
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the program prints, and the stand-in's notes, in lines."""
    emulated_kernels.require_compiler()
    if not os.environ.get("CI"):
        pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", str(SOURCE), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, timeout=60)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_kernels_are_launched_with_their_arguments_on_the_stream_of_the_device(said):
    assert "unavailable because None" in said
    (address,) = [line.split()[1] for line in said if line.startswith("address")]
    scalars = f"{(-2 % 2**64).to_bytes(8, 'little').hex()} 07 0000803f {bytes(ctypes.c_double(0.5)).hex()}"
    launches = [line for line in said if line.startswith("launch")]
    assert launches == [
        f"launch 5 1 1, 64 1 1, 0, 0x70, 0: {address} {scalars}",
        f"launch 6 1 1, 96 1 1, 0, 0x70, 0: {address} {scalars}",
        f"launch 7 1 1, 32 1 1, 0, 0x71, 0: {address} {scalars}",
        f"launch 7 1 1, 64 1 1, 0, 0x71, 0: {address} {scalars}",
        "launch 8 1 1, 32 1 1, 0, 0x70, 0:",
    ]


def test_everything_is_loaded_once_for_each_device(said):
    assert [line for line in said if line.startswith(("init", "retain", "load", "function"))] == [
        "init 0", "retain 0", "load 8 8 1 4 8 ", "function first", "retain 1", "load 8 8 1 4 8 ", "function second",
        "load  ", "function third",
    ]  # fmt: skip


def test_the_context_of_torch_s_device_is_made_current_once_and_another_for_each_call(said):
    contexts = [line for line in said if line.startswith(("current", "push", "pop"))]
    other = ["push 0x1000", "pop"]
    assert contexts == [*other * 2, "current 0x1001", *other * 6]


def test_what_the_driver_refuses_is_told(said):
    failures = [line for line in said if line.startswith(("UsageError", "CudaFailed", "OutOfMemory"))]
    assert [line.split()[0] for line in failures] == [
        "UsageError",
        "CudaFailed",
        "CudaFailed",
        "OutOfMemory",
        "UsageError",
    ]
    assert "first takes parameters of [8, 8, 1, 4, 8] bytes and was given [8, 8, 1, 4]" in failures[0]
    assert "refused cuModuleGetFunction for missing: CUDA_ERROR_NOT_FOUND" in failures[1]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered" in failures[2]
    assert "CUDA_LAUNCH_BLOCKING" in failures[2]
    assert "no memory left for third" in failures[3]
    assert "A kernel on cuda:0 was given a tensor on cpu" in failures[4]
