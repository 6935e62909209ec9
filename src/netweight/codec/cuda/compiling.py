"""Kernels to machine code: NVRTC compiles the .cu files of `kernels/` for an architecture; a folder keeps the results.

Compiling needs the extra `cuda` (cuda-bindings and NVRTC) and no GPU. Only `launching` and tests call this.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from functools import cache
from pathlib import Path
from typing import Any

from netweight.core.environment import cache_folder
from netweight.core.files import whole_file
from netweight.errors import CudaFailed, CudaUnavailable, NetweightError, UsageError

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
    except (ImportError, RuntimeError) as error:  # a RuntimeError for a library that is not found
        raise CudaUnavailable(
            f"CUDA kernels cannot be compiled here: NVRTC or its bindings are missing ({error}).", cure=INSTALL
        ) from error
    return nvrtc


def compiler_version() -> tuple[int, int]:
    """NVRTC's version, such as (13, 0)."""
    major, minor = _call("nvrtcVersion")
    return int(major), int(minor)


def supported_architectures() -> list[int]:
    """Architectures that NVRTC compiles for, ascending, by number: 90 for "sm_90"."""
    (count,) = _call("nvrtcGetNumSupportedArchs")
    (numbers,) = _call("nvrtcGetSupportedArchs")
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
    (program,) = _call("nvrtcCreateProgram", source, file.encode(), len(headers), list(headers.values()), names)
    try:
        nvrtc = _nvrtc()
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _call("nvrtcGetProgramLogSize", program)
            log = bytearray(size)
            _call("nvrtcGetProgramLog", program, log)
            words = bytes(log).rstrip(b" \n\0").decode(errors="replace")
            raise CudaFailed(f"{file} does not compile for {architecture}: {result.name}. {words}")
        (size,) = _call("nvrtcGetCUBINSize", program)
        code = bytearray(size)
        _call("nvrtcGetCUBIN", program, code)
        return bytes(code)
    finally:
        _nvrtc().nvrtcDestroyProgram(program)


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
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
    with contextlib.suppress(OSError, NetweightError):  # a cache that cannot be written costs a compilation per process
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, overwrite=True) as file:
            file.write(hashlib.sha256(code).digest() + code)
