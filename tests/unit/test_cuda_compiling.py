"""Kernels compile for the architectures that are promised, without a GPU; the cache keeps them and survives damage."""

import importlib
import os
import stat
import sys

import pytest
import torch

from netweight.codec.cuda import launching, unavailable_because
from netweight.errors import CudaFailed, CudaUnavailable, UsageError


@pytest.fixture(scope="module")
def nvrtc():
    """NVRTC, which CI must have."""
    try:
        return launching.compiler_version()
    except CudaUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path / "cache"))
    launching.cubin.cache_clear()
    yield tmp_path / "cache" / "kernels"
    launching.cubin.cache_clear()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with one small kernel and a header, in the place of netweight's."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "small.cu").write_text('#include "one.cuh"\nextern "C" __global__ void f(int* p) { *p = ONE; }\n')
    (folder / "one.cuh").write_text("#define ONE 1\n")
    monkeypatch.setattr(launching, "KERNELS", folder)
    return folder


@pytest.mark.parametrize(
    "architecture", ["sm_90", *(pytest.param(other, marks=pytest.mark.study) for other in ("sm_80", "sm_120"))]
)
def test_every_kernel_compiles(nvrtc, architecture):
    codes = launching.compile_all(architecture)
    assert list(codes) == launching.kernel_files()
    assert all(code.startswith(b"\x7fELF") for code in codes.values())


def test_what_was_compiled_is_kept(nvrtc, cache, small, monkeypatch):
    code = launching.cubin("small.cu", "sm_90")
    (file,) = cache.iterdir()
    launching.cubin.cache_clear()
    monkeypatch.setattr(launching, "_compile", lambda *_: pytest.fail("it was compiled again"))
    assert launching.cubin("small.cu", "sm_90") == code
    assert file.read_bytes()[32:] == code


@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: code[:50] + b"x" + code[51:], lambda _: b""])
def test_what_is_damaged_is_made_again(nvrtc, cache, small, damage):
    code = launching.cubin("small.cu", "sm_90")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    launching.cubin.cache_clear()
    assert launching.cubin("small.cu", "sm_90") == code
    assert file.read_bytes() == whole


def test_sources_headers_and_architectures_have_files_of_their_own(nvrtc, cache, small):
    launching.cubin("small.cu", "sm_90")
    launching.cubin("small.cu", "sm_80")
    launching.cubin.cache_clear()
    (small / "one.cuh").write_text("#define ONE 11\n")
    launching.cubin("small.cu", "sm_90")
    assert len(list(cache.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_done_without(nvrtc, cache, small):
    cache.parent.write_text("a file where the folder should be")
    assert launching.cubin("small.cu", "sm_90").startswith(b"\x7fELF")
    cache.parent.unlink()
    cache.mkdir(parents=True)
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    launching.cubin.cache_clear()
    try:
        assert launching.cubin("small.cu", "sm_90").startswith(b"\x7fELF")
    finally:
        cache.chmod(stat.S_IRWXU)


def test_no_home_is_no_hindrance(nvrtc, cache, small, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(launching, "cache_folder", nowhere)
    assert launching.cubin("small.cu", "sm_90").startswith(b"\x7fELF")


def test_what_does_not_compile_is_told(nvrtc, small):
    (small / "small.cu").write_text("__global__ void f() { oops }")
    with pytest.raises(CudaFailed, match=r"small\.cu does not compile for sm_90.*\n?.*oops"):
        launching.compile_all("sm_90")
    with pytest.raises(UsageError, match=r"no kernel file 'large\.cu'"):
        launching.cubin("large.cu", "sm_90")


def test_a_missing_compiler_is_named_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    launching._nvrtc.cache_clear()
    try:
        with pytest.raises(CudaUnavailable, match=r"NVRTC or its bindings are missing.*netweight\[cuda\]"):
            launching.compile_all("sm_90")
    finally:
        launching._nvrtc.cache_clear()


@pytest.fixture
def asked_again():
    unavailable_because.cache_clear()
    yield
    unavailable_because.cache_clear()


def test_a_machine_without_cuda_is_told_why(asked_again, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without CUDA. Install a build" in unavailable_because()
    unavailable_because.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "built for AMD's GPUs" in unavailable_because()
    with pytest.raises(CudaUnavailable, match=r"CUDA kernels cannot run here: torch .* is built for AMD"):
        launching.launch("decode.cu", "decode_blob", 1, 32, [], device=torch.device("cuda", 0))


def test_a_machine_without_a_gpu_or_with_old_parts_is_told_why(asked_again, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU" in unavailable_because()
    unavailable_because.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 0))
    monkeypatch.setattr(launching, "compiler_version", lambda: (13, 5))
    monkeypatch.setattr(launching, "_call", lambda name: (12_040,))
    assert "the driver supports CUDA 12.4, and NVRTC is of CUDA 13.5. Update" in unavailable_because()
    unavailable_because.cache_clear()
    monkeypatch.setattr(launching, "_call", lambda name: (13_000,))
    assert "compute capability is 7.0; 7.5 is needed" in unavailable_because()
    unavailable_because.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    assert unavailable_because() is None


def test_a_machine_without_a_driver_is_told_why(asked_again, nvrtc, monkeypatch):
    driver = importlib.import_module("cuda.bindings.driver")

    def missing(_):
        raise RuntimeError("no libcuda")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "cuInit", missing)
    launching._driver.cache_clear()
    try:
        assert "driver is missing" in unavailable_because()
    finally:
        launching._driver.cache_clear()


def test_the_best_architecture_of_the_same_kind_is_taken(monkeypatch):
    monkeypatch.setattr(launching, "supported_architectures", lambda: [75, 80, 86, 90, 100, 120])
    for capability, wanted in (((8, 9), "sm_86"), ((9, 0), "sm_90"), ((12, 1), "sm_120")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0, found=capability: found)
        assert launching._architecture(0) == wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (13, 0))
    with pytest.raises(CudaUnavailable, match=r"does not compile for compute capability 13\.0"):
        launching._architecture(0)
