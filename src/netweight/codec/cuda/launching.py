"""Launches kernels on torch's current stream through the CUDA driver, in the primary context, which is torch's, too.

`launch` is the only way from Python to a kernel; tests put the emulator in its place.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from netweight.codec.cuda import compiling
from netweight.errors import CudaFailed, CudaUnavailable, OutOfMemory, UsageError

_LEAST_CAPABILITY = (7, 5)
_CELL = (1 << 64) - 1
_pointers: dict[tuple[int, int], Any] = {}  # kept, because the driver reads them
_thread = threading.local()  # its `index`: the device whose context netweight made current
Argument = torch.Tensor | int | float | np.generic


@cache
def unavailable_because() -> str | None:
    """Why CUDA kernels cannot run in this process, with the cure; None where they can."""
    if torch.version.cuda is None:
        built = "for AMD's GPUs" if torch.version.hip else "without CUDA"
        return f"torch {torch.__version__} is built {built}. Install a build of torch for CUDA."
    if not torch.cuda.is_available():
        return "torch finds no GPU. Check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it."
    try:
        compiler = compiling.compiler_version()
        supported = int(_call("cuDriverGetVersion")[0])
    except CudaUnavailable as error:
        return str(error)
    if supported // 1000 < compiler[0]:
        return (
            f"the driver supports CUDA {supported // 1000}.{supported % 1000 // 10}, and NVRTC is of CUDA "
            f"{compiler[0]}.{compiler[1]}. Update NVIDIA's driver, or install cuda-bindings and NVRTC of its version."
        )
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}; 7.5 is needed. Use a newer GPU."
    return None


def require() -> None:
    """Raise `CudaUnavailable` unless CUDA kernels can run here."""
    reason = unavailable_because()
    if reason is not None:
        raise CudaUnavailable(f"CUDA kernels cannot run here: {reason}")


def launch(
    file: str, entry: str, grid: int, block: int, arguments: Sequence[Argument], *, device: torch.device
) -> None:
    """Start the kernel `entry` of a .cu `file` on torch's current stream of `device`, and return at once.

    `grid` blocks of `block` threads. Of the `arguments` a tensor passes its address and must lie on the device, an int
    passes 64 bits, a float a double, a numpy scalar itself. The first use of a file in a process loads it, from the
    cache or the compiler, which cannot happen while a CUDA graph is captured.
    """
    require()
    here = torch._C._cuda_getDevice()
    index = here if device.index is None else device.index
    if index == here:
        if getattr(_thread, "index", None) != index:  # this thread may never have called CUDA before
            _call("cuCtxSetCurrent", _primary_context(index))
            _thread.index = index
        _start(file, entry, grid, block, arguments, index)
        return
    _call("cuCtxPushCurrent", _primary_context(index))
    try:
        _start(file, entry, grid, block, arguments, index)
    finally:
        _call("cuCtxPopCurrent")


def _start(file: str, entry: str, grid: int, block: int, arguments: Sequence[Argument], index: int) -> None:
    """`launch` in the context that is current."""
    function, sizes = _function(file, entry, index)
    given = [8 if type(a) is int or isinstance(a, torch.Tensor) else np.asarray(a).nbytes for a in arguments]
    if given != sizes:
        raise UsageError(f"{entry} takes parameters of {sizes} bytes and was given {given}.")
    cells, pack, address = _cells(len(sizes), threading.get_ident())
    pack(cells, 0, *[a & _CELL if type(a) is int else _bits(a, index) for a in arguments])  # the driver copies them
    stream = torch._C._cuda_getCurrentRawStream(index)
    (result,) = _driver().cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, address, 0)
    if result:
        raise _refusal(result, "cuLaunchKernel", entry)


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of a device, by which grids are sized."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _bits(argument: torch.Tensor | float | np.generic, index: int) -> int:
    """An argument in a cell of eight bytes."""
    if isinstance(argument, torch.Tensor):
        if argument.get_device() != index:  # its address would crash the kernel and spoil the context for everybody
            raise UsageError(f"A kernel on cuda:{index} was given a tensor on {argument.device}.")
        return argument.data_ptr()
    value = argument if isinstance(argument, np.generic) else np.float64(argument)
    return int.from_bytes(value.tobytes(), "little")


@cache
def _driver() -> Any:
    """The driver's bindings, initialized."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaUnavailable(f"CUDA's bindings are missing ({error}).", cure=compiling.INSTALL) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:
        raise CudaUnavailable("NVIDIA's driver is missing.", cure="Install it.") from error
    if result != driver.CUresult.CUDA_SUCCESS:
        raise CudaUnavailable(f"NVIDIA's driver does not start: {result.name}.", cure="Check that nvidia-smi works.")
    return driver


def _call(name: str, *arguments: Any, what: str = "") -> tuple[Any, ...]:
    """Call a function of the driver and return what it gives besides its result code."""
    result, *values = getattr(_driver(), name)(*arguments)
    if result:
        raise _refusal(result, name, what)
    return tuple(values)


def _refusal(result: Any, name: str, what: str) -> CudaFailed | OutOfMemory:
    """The error for a result of the driver that is not 0."""
    driver = _driver()
    words = driver.cuGetErrorString(result)[1]
    reason = f"{result.name}, {words.decode() if isinstance(words, bytes) else 'unknown'}"
    for_what = f" for {what}" if what else ""
    if result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return OutOfMemory(f"The GPU has no memory left{for_what}: {reason}.", cure="Free memory on it and try again.")
    return CudaFailed(
        f"The CUDA driver refused {name}{for_what}: {reason}.",
        cure="If an earlier kernel failed, start the process again; CUDA_LAUNCH_BLOCKING=1 shows which one did.",
    )


@cache
def _primary_context(index: int) -> Any:
    (device,) = _call("cuDeviceGet", index)
    (context,) = _call("cuDevicePrimaryCtxRetain", device)  # never released: it lives as long as torch's
    return context


@cache
def _function(file: str, entry: str, index: int) -> tuple[Any, list[int]]:
    """A kernel on a device and the sizes of its parameters; its context is current."""
    (function,) = _call("cuModuleGetFunction", _module(file, index), entry.encode(), what=entry)
    driver = _driver()
    sizes: list[int] = []
    while True:
        result, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if result != driver.CUresult.CUDA_SUCCESS:  # no parameter of this number
            return function, sizes
        sizes.append(int(size))


@cache
def _cells(count: int, thread: int) -> tuple[bytearray, Any, int]:
    """A thread's memory for parameters, what fills it, and the address of the addresses of each."""
    cells = bytearray(8 * count)
    first = ctypes.addressof((ctypes.c_uint64 * count).from_buffer(cells)) if count else 0
    pointers = _pointers.setdefault((count, thread), (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8)))
    return cells, struct.Struct(f"{count}Q").pack_into, ctypes.addressof(pointers)


@cache
def _module(file: str, index: int) -> Any:
    return _call("cuModuleLoadData", compiling.cubin(file, _architecture(index)), what=file)[0]


def _architecture(index: int) -> str:
    """The best architecture that a device runs and NVRTC compiles for: the same major version, and not newer."""
    major, minor = torch.cuda.get_device_capability(index)
    fitting = [n for n in compiling.supported_architectures() if n // 10 == major and n % 10 <= minor]
    if not fitting:
        raise CudaUnavailable(
            f"The installed NVRTC does not compile for compute capability {major}.{minor}.",
            cure="Install a version of nvidia-cuda-nvrtc that does.",
        )
    return f"sm_{fitting[-1]}"
