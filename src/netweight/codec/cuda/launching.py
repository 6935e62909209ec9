"""Kernels on GPUs: compiled by NVRTC from the .cu files of `kernels/`, launched through the CUDA driver.

They run on torch's current stream, in the primary context, which is torch's, too. `launch` is the only way from Python
to a kernel; tests put the emulator in its place. Compiling needs the extra `cuda` (cuda-bindings and NVRTC) and no GPU;
machine code is kept in a folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from netweight.core.atomic_writes import whole_file
from netweight.core.environment import cache_folder
from netweight.errors import CudaFailed, CudaUnavailable, NetweightError, OutOfMemory, UsageError

INSTALL = 'Run: pip install "netweight[cuda]"'
KERNELS = Path(__file__).parent / "kernels"
_OPTIONS = ("--std=c++17", "--extra-device-vectorization", "--device-as-default-execution-space")
_DIGEST_BYTES = 32


def kernel_files() -> list[str]:
    """Names of the .cu files, sorted."""
    return sorted(path.name for path in KERNELS.glob("*.cu"))


@cache
def _nvrtc() -> Any:
    """NVRTC's bindings, with its library loaded."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        # A library that is not found raises a RuntimeError.
        raise CudaUnavailable(
            f"CUDA kernels cannot be compiled here: NVRTC or its bindings are missing ({error}).", cure=INSTALL
        ) from error
    return nvrtc


def compiler_version() -> tuple[int, int]:
    """NVRTC's version, such as (13, 0)."""
    major, minor = _nvrtc_call("nvrtcVersion")
    return int(major), int(minor)


def supported_architectures() -> list[int]:
    """Architectures that NVRTC compiles for, ascending, by number: 90 for "sm_90"."""
    (count,) = _nvrtc_call("nvrtcGetNumSupportedArchs")
    (numbers,) = _nvrtc_call("nvrtcGetSupportedArchs")
    return sorted(int(number) for number in list(numbers)[:count])


def compile_all(architecture: str) -> dict[str, bytes]:
    """Compile every .cu file for an `architecture` such as "sm_90", past the cache: a cubin by name of the file."""
    return {file: _compile(file, architecture) for file in kernel_files()}


@cache
def cubin(file: str, architecture: str) -> bytes:
    """One .cu file's machine code, from the cache if it is there and sound."""
    # A file of the cache, in `kernels` of netweight's cache folder, is named for everything that it was made from and
    # starts with a digest of the rest; one that is damaged is made again. An unwritable folder keeps nothing.
    path = _cached_path(file, architecture)
    code = _read(path) if path is not None else None
    if code is None:
        code = _compile(file, architecture)
        if path is not None:
            _write(path, code)
    return code


def _sources(file: str) -> tuple[bytes, dict[str, bytes]]:
    """A .cu file and all headers by name."""
    if file not in kernel_files():
        raise UsageError(f"There is no kernel file {file!r}.", cure=f"Name one of {', '.join(kernel_files())}.")
    return (KERNELS / file).read_bytes(), {path.name: path.read_bytes() for path in sorted(KERNELS.glob("*.cuh"))}


def _compile(file: str, architecture: str) -> bytes:
    source, headers = _sources(file)
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_OPTIONS)]
    names = [name.encode() for name in headers]
    (program,) = _nvrtc_call("nvrtcCreateProgram", source, file.encode(), len(headers), list(headers.values()), names)
    try:
        nvrtc = _nvrtc()
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _nvrtc_call("nvrtcGetProgramLogSize", program)
            log = bytearray(size)
            _nvrtc_call("nvrtcGetProgramLog", program, log)
            words = bytes(log).rstrip(b" \n\0").decode(errors="replace")
            raise CudaFailed(f"{file} does not compile for {architecture}: {result.name}. {words}")
        (size,) = _nvrtc_call("nvrtcGetCUBINSize", program)
        code = bytearray(size)
        _nvrtc_call("nvrtcGetCUBIN", program, code)
        return bytes(code)
    finally:
        _nvrtc().nvrtcDestroyProgram(program)


def _nvrtc_call(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of NVRTC and return what it gives besides its result code."""
    nvrtc = _nvrtc()
    result, *values = getattr(nvrtc, name)(*arguments)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaFailed(f"NVRTC refused {name}: {result.name}.", cure=f"Install the same version again. {INSTALL}")
    return tuple(values)


def _cached_path(file: str, architecture: str) -> Path | None:
    source, headers = _sources(file)
    digest = hashlib.sha256()
    for part in (repr((file, architecture, _OPTIONS, compiler_version())).encode(), source, *headers.values()):
        digest.update(len(part).to_bytes(8, "little") + part)
    try:
        folder = cache_folder()
    except RuntimeError:  # no home directory
        return None
    return folder / "kernels" / f"{Path(file).stem}-{architecture}-{digest.hexdigest()[:32]}.cubin"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Write a file whole or not at all: a reader never meets half of it, and a second writer leaves it to the first."""
    # If the cache cannot be written, each process compiles the kernels again.
    with contextlib.suppress(OSError, NetweightError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, overwrite=True) as file:
            file.write(hashlib.sha256(code).digest() + code)


_LEAST_CAPABILITY = (7, 5)
_CELL = (1 << 64) - 1
# The pointers are kept, because the driver reads them.
_pointers: dict[tuple[int, int], Any] = {}
# Its attribute `index` is the device whose context netweight made current.
_thread = threading.local()
Argument = torch.Tensor | int | float | np.generic


@cache
def unavailable_because() -> str | None:
    """Return why CUDA kernels cannot run in this process, with the cure; None where they can."""
    if torch.version.cuda is None:
        built = "for AMD's GPUs" if torch.version.hip else "without CUDA"
        return f"torch {torch.__version__} is built {built}. Install a build of torch for CUDA."
    if not torch.cuda.is_available():
        return "torch finds no GPU. Check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it."
    try:
        compiler = compiler_version()
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
        # This thread may not have called CUDA before.
        if getattr(_thread, "index", None) != index:
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
    # The driver copies the arguments during the launch.
    pack(cells, 0, *[a & _CELL if type(a) is int else _bits(a, index) for a in arguments])
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
        # The address would crash the kernel, and the context would be unusable for the whole process.
        if argument.get_device() != index:
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
        raise CudaUnavailable(f"CUDA's bindings are missing ({error}).", cure=INSTALL) from error
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
    # The context is never released, because torch uses it as long as the process runs.
    (context,) = _call("cuDevicePrimaryCtxRetain", device)
    return context


@cache
def _function(file: str, entry: str, index: int) -> tuple[Any, list[int]]:
    """A kernel on a device and the sizes of its parameters; its context is current."""
    (function,) = _call("cuModuleGetFunction", _module(file, index), entry.encode(), what=entry)
    driver = _driver()
    sizes: list[int] = []
    while True:
        result, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        # The kernel does not have a parameter of this number.
        if result != driver.CUresult.CUDA_SUCCESS:
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
    return _call("cuModuleLoadData", cubin(file, _architecture(index)), what=file)[0]


def _architecture(index: int) -> str:
    """The best architecture that a device runs and NVRTC compiles for: the same major version, and not newer."""
    major, minor = torch.cuda.get_device_capability(index)
    fitting = [n for n in supported_architectures() if n // 10 == major and n % 10 <= minor]
    if not fitting:
        raise CudaUnavailable(
            f"The installed NVRTC does not compile for compute capability {major}.{minor}.",
            cure="Install a version of nvidia-cuda-nvrtc that does.",
        )
    return f"sm_{fitting[-1]}"
