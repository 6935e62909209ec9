"""Description of the environment: versions, machine and source revision, for reports, ledgers and `netweight doctor`.

Loads no package to learn its version and starts no accelerator. Facts of higher layers, such as the codec path that
runs, are handed in by the caller.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "safetensors", "pydantic", "transformers", "diffusers", "peft", "flwr", "opacus")
CPU_FLAGS = ("sse4_2", "avx2", "avx512f", "avx512bw", "avx512_vbmi", "avx512_vbmi2", "neon", "asimd", "sve")


def installed_version(distribution: str) -> str | None:
    """Look up an installed distribution's version without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def netweight_version() -> str:
    """Return netweight's version, or `"0+source"` if it runs from a source tree that was never installed."""
    return installed_version("netweight") or "0+source"


@cache
def _cpuinfo() -> dict[str, str]:
    """Read the first processor's entry of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    entry = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in entry.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_flags() -> list[str]:
    """List the instruction sets that matter to the codec and are present, as far as the system reports them."""
    present = set((_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split())
    return [flag for flag in CPU_FLAGS if flag in present]


def _memory_bytes() -> int | None:
    """Return the machine's memory in bytes; None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _accelerators() -> list[str]:
    """Name the CUDA devices if torch is loaded already and has started CUDA; asking must not start it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git(folder: Path, *arguments: str) -> str | None:
    """Run a git query in `folder`; None if there is no git, no repository, or no answer within 5 seconds."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


@cache
def source_revision() -> str | None:
    """Return the git commit of netweight's own source tree, with `"+changes"` if files differ from it."""
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "netweight" != package:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}+changes" if _git(package, "status", "--porcelain", "--untracked-files=no") else commit


def describe(facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe this process's environment as plain JSON values."""
    # The import is not at the top of the file, because it loads numpy.
    from netweight.core.threads import usable_cores

    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "netweight": netweight_version(),
        "revision": source_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpuinfo().get("model name") or platform.processor() or None,
        "cpu_flags": _cpu_flags(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "accelerators": _accelerators(),
        "packages": {name: version for name, version in versions.items() if version is not None},
        **(facts or {}),
    }


def cache_folder() -> Path:
    """`NETWEIGHT_CACHE`, else `netweight` in the user's cache folder; it need not exist."""
    named = os.environ.get("NETWEIGHT_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "netweight"
