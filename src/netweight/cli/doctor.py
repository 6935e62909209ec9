"""`netweight doctor`: reports what is installed, what works on this machine, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import click

from netweight.cli import FINDING_FAILED, GroupedCommand, Output, output_option
from netweight.core import environment


@click.command(cls=GroupedCommand, example="netweight doctor")
@output_option
@click.pass_context
def doctor(context: click.Context, output: Output) -> None:
    """Report what is installed, what works on this machine and what is missing.

    Exits with 1 if something is wrong: the codec runs in Python, which is slow; torchvision is installed and breaks
    other imports; or NETWEIGHT_DATA is not a folder. A missing extra is not an error.
    """
    from netweight import codec

    facts = environment.describe({"codec_path": codec.active_path(), "codec_paths": list(codec.available_paths())})
    facts["accelerators"] = _accelerators()
    facts["gpu_decoding"] = _gpu_decoding()
    facts["default_forms"] = _default_forms()
    facts["compressed_models"] = _compressed_models()
    extras = _extras()
    data = _data()
    problems = [*_codec_problems(facts["codec_path"]), *_torchvision_problems(), *data["problems"]]
    output.result({"environment": facts, "extras": extras, "data": data, "problems": problems})
    _show(output, facts, extras, data, problems)
    if problems:
        context.exit(FINDING_FAILED)


def _accelerators() -> list[str]:
    """Name the CUDA devices; unlike a report, the doctor may start CUDA to find out."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _gpu_decoding() -> str:
    """Return what decodes compressed weights on a CUDA device here, with the reason if netweight's kernels cannot."""
    from netweight.codec import cuda

    reason = cuda.unavailable_because()
    if reason is None:
        return "netweight's kernels"
    return f"no kernels: {reason} Weights on a CUDA device would be decoded on the CPU and copied, which is slow."


def _default_forms() -> dict[str, str]:
    """Describe the form in which compressed weights are kept on the CPU and on GPUs, with the reason."""
    from netweight.methods.compress.runtime.model import default_forms

    return default_forms()


def _compressed_models() -> str:
    """Return which programs open compressed models of transformers and diffusers."""
    by_hand = "programs that import netweight.plugins.transformers or .diffusers"
    if not importlib.metadata.entry_points(group="torch.backends", name="netweight"):
        return f"{by_hand}; others once netweight is installed again"
    for switch in ("NETWEIGHT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        if os.environ.get(switch) == "0":
            return f"{by_hand}, since {switch}=0"
    return "every program; NETWEIGHT_AUTOLOAD=0 disables it"


def _extras() -> dict[str, dict[str, Any]]:
    """List netweight's extras: installed packages with versions, missing ones, and the command that gets them."""
    try:
        requirements = importlib.metadata.requires("netweight") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, Any]] = {}
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        # The extra "all" consists of the others.
        if name is None or extra is None or name[0] == "netweight":
            continue
        entry = extras.setdefault(extra[1], {"installed": {}, "missing": [], "install": None})
        version = environment.installed_version(name[0])
        if version is not None:
            entry["installed"][name[0]] = version
        else:
            entry["missing"].append(name[0])
            entry["install"] = f'pip install "netweight[{extra[1]}]"'
    return extras


def _data() -> dict[str, Any]:
    """Describe NETWEIGHT_DATA, the folder of local data sets: its path, the folders in it, and what is wrong."""
    named = os.environ.get("NETWEIGHT_DATA")
    if not named:
        return {"folder": None, "holds": [], "problems": []}
    folder = Path(named)
    if not folder.is_dir():
        problem = f"NETWEIGHT_DATA names {named}, which is not a folder. Correct it, or unset it to use the hub."
        return {"folder": named, "holds": [], "problems": [problem]}
    return {"folder": named, "holds": sorted(path.name for path in folder.iterdir() if path.is_dir()), "problems": []}


def _codec_problems(path: str) -> list[str]:
    if path != "python":
        return []
    return [
        "The codec runs in pure Python, hundreds of times slower: the native module is missing. "
        "Install a C++20 compiler (g++ or clang) and install netweight again."
    ]


def _torchvision_problems() -> list[str]:
    """Find a torchvision built for another torch: importing transformers, diffusers or peft then fails."""
    vision, torch = environment.installed_version("torchvision"), environment.installed_version("torch")
    if vision is None or torch is None:
        return []
    wants = re.search(r"^torch\s*\(?==\s*([\w.]+)", "\n".join(importlib.metadata.requires("torchvision") or []), re.M)
    versions_fit = wants is None or wants[1] == torch.split("+")[0]
    if versions_fit and ("+cpu" in torch) == ("+cpu" in vision):
        return []
    return [
        f"torchvision {vision} was not built for torch {torch}: importing transformers, diffusers or peft will fail. "
        "netweight does not need it: pip uninstall torchvision"
    ]


def _show(
    output: Output,
    facts: dict[str, Any],
    extras: dict[str, dict[str, Any]],
    data: dict[str, Any],
    problems: list[str],
) -> None:
    """Write everything for people."""
    memory = f", {facts['memory_bytes'] / 1e9:.0f} GB" if facts["memory_bytes"] else ""
    output.table(
        (),
        [
            ("netweight", facts["netweight"] + (f" ({facts['revision'][:12]})" if facts["revision"] else "")),
            ("python", f"{facts['python']} on {facts['platform']}"),
            ("machine", f"{facts['cpu'] or facts['machine']}, {facts['cores']} cores{memory}"),
            ("instructions", " ".join(facts["cpu_flags"]) or "unknown"),
            ("accelerators", ", ".join(facts["accelerators"]) or "none"),
            ("on a GPU", facts["gpu_decoding"]),
            ("CPU form", facts["default_forms"]["cpu"]),
            ("GPU form", facts["default_forms"]["cuda"]),
            ("opened by", facts["compressed_models"]),
            ("codec", f"{facts['codec_path']} (available: {', '.join(facts['codec_paths'])})"),
            ("NETWEIGHT_DATA", f"{data['folder']}: {', '.join(data['holds'])}" if data["folder"] else "not set"),
        ],
    )
    output.line()
    output.table(("package", "version"), sorted(facts["packages"].items()))
    output.line()
    if not extras:
        output.line("The extras are not known, because netweight runs from its source tree and is not installed.")
    rows = [
        (extra, "installed" if not entry["missing"] else f"lacks {', '.join(entry['missing'])}", entry["install"] or "")
        for extra, entry in sorted(extras.items())
    ]
    output.table(("extra", "state", "to install"), rows)
    for problem in problems:
        output.line(f"\nProblem: {problem}", fg="red")
    if not problems:
        output.line("\nNo problems.", fg="green")
