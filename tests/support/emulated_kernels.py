"""Runs netweight's CUDA kernels on the CPU: compiled by g++ from their own source, threads as fibers (cuda_emulator/).

`launch` has the arguments of `netweight.codec.cuda.launch` and takes numpy arrays and CPU tensors, which it changes in
place. `guarded` copies an array to memory with forbidden pages around, so that a kernel that reads or writes one byte
too far is caught. A launch that goes wrong raises `KernelFault` and says where.
"""

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import netweight.codec

KERNELS = Path(netweight.codec.__file__).parent / "cuda" / "kernels"
EMULATOR = Path(__file__).parent / "cuda_emulator"
# Compiler checks that trap; shifts by the width of a type, for instance, differ between the CPU and the GPU.
CHECKS = "alignment,bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow"
OPTIONS = (
    "-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror",
    "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unknown-pragmas", f"-fsanitize={CHECKS}",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
PAGE = mmap.PAGESIZE


class KernelFault(AssertionError):
    """A kernel touched memory that is not its own, its threads parted ways, or its arguments do not fit."""


def require_compiler():
    """Skip the test if there is no g++; fail where CI runs, which must have one."""
    if shutil.which("g++") is None:
        if os.environ.get("CI"):
            pytest.fail("g++ is missing, and CI must run the emulated kernels")
        pytest.skip("g++ is missing: kernels cannot be emulated")


@cache
def _folder():
    folder = tempfile.TemporaryDirectory(prefix="netweight-kernels-")
    _folder.keep = folder  # removed when the process ends
    return Path(folder.name)


def whole(path):
    """A .cu file and the headers that it includes, as text."""
    source = path.read_text()
    headers = re.findall(r'^#include "(\w+\.cuh)"$', source, re.MULTILINE)
    beside = [path.parent / header for header in headers]
    return source + "".join(whole(header) for header in beside if header.is_file())


def entries(source):
    """Names of the kernels in a .cu file, each once."""
    plain = re.sub(r"__launch_bounds__\([^)]*\)", "", source)
    return list(dict.fromkeys(re.findall(r"__global__\s+void\s+(\w+)\s*\(", plain)))


@cache
def library(file):
    """A .cu file of netweight's kernels, or of any other path, as a loaded library."""
    require_compiler()
    path = KERNELS / file
    wrapper = f'#include "cuda_emulator.h"\n#include "{path}"\n'
    wrapper += "".join(f"EMULATED_ENTRY({entry})\n" for entry in entries(whole(path)))
    name = hashlib.sha256(wrapper.encode()).hexdigest()[:16]
    cpp, so = _folder() / f"{name}.cpp", _folder() / f"{name}.so"
    cpp.write_text(wrapper)
    command = ["g++", *OPTIONS, f"-I{EMULATOR}", f"-I{KERNELS}", str(cpp), "-o", str(so)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise AssertionError(f"g++ does not compile {file}:\n{done.stderr}")
    return ctypes.CDLL(str(so))


def launch(file, entry, grid, block, arguments, *, device=None, backwards=False):
    """Run a kernel over a grid.

    Args:
        file: Name of the .cu file among netweight's kernels, or a path of another.
        entry: Name of the kernel in it.
        grid: Number of blocks; they run one after the other.
        block: Threads of a block, whole warps.
        arguments: Contiguous numpy arrays or CPU tensors, whose memory the kernel gets; integers, as 64 bits; floats,
            as double; numpy scalars, as they are.
        device: Ignored.
        backwards: Run blocks, warps and lanes in the opposite order. A result that differs betrays a race.
    """
    values = [_value(argument) for argument in arguments]
    function = library(file)[f"launch_{entry}"]
    function.restype = ctypes.c_char_p
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    sizes = (ctypes.c_int * len(values))(*(ctypes.sizeof(value) for value in values))
    fault = function(grid, block, int(backwards), len(values), pointers, sizes)
    if fault is not None:
        raise KernelFault(f"{entry}: {fault.decode()}")


def _value(argument):
    if hasattr(argument, "data_ptr"):
        assert argument.is_contiguous(), "a kernel's tensor must be contiguous"
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous, "a kernel's array must be contiguous"
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, np.generic):
        return (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_int64(argument)


def guarded(array, *, alignment=1, at="end"):
    """A copy of an array between forbidden pages.

    Args:
        array: A numpy array.
        alignment: What divides the copy's address, at most a page. Up to alignment - 1 bytes behind the array's end can
            be touched unnoticed.
        at: "end": the page behind the array's end is forbidden; "start": the one before its start.
    """
    array = np.ascontiguousarray(array)
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    whole = np.frombuffer(memory, np.uint8)
    for page in (0, size + PAGE):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(whole.ctypes.data + page), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    start = PAGE if at == "start" else PAGE + (size - array.nbytes) // alignment * alignment
    copy = whole[start : start + array.nbytes]
    copy[:] = array.reshape(-1).view(np.uint8)
    return copy.view(array.dtype).reshape(array.shape)
