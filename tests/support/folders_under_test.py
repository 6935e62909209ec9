"""Model folders as tests need them: written byte by byte, so that no library tidies them up first."""

import json
import shutil
import struct
from pathlib import Path

import numpy

WIDTHS = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F64": 8,
    "I64": 8,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I32": 4,
}


def weights(dtype, shape, seed=0):
    """Bytes of a tensor whose values look like trained weights; every bit pattern of the lower bits occurs."""
    count = int(numpy.prod(shape, dtype=int))
    values = numpy.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")
    raw = values.view(numpy.uint8).reshape(-1, 4)
    if dtype == "BF16":
        return raw[:, 2:].tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    width = WIDTHS[dtype]
    return raw.tobytes() if width == 4 else numpy.resize(raw[:, 3], count * width).tobytes()


def head(entries, *, padding=b""):
    """A safetensors header with its length: entries as name -> object, written as they are."""
    raw = json.dumps(entries, separators=(",", ":")).encode() + padding
    return struct.pack("<Q", len(raw)) + raw


def write_safetensors(path, tensors, *, metadata=None, padding=b""):
    """Write tensors given as (name, dtype, shape, bytes) in this order, names included."""
    entries, offset = {}, 0
    if metadata is not None:
        entries["__metadata__"] = metadata
    for name, dtype, shape, data in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head(entries, padding=padding) + b"".join(data for *_, data in tensors))
    return path


def simple_weights(path, names=("a.weight", "b.weight"), dtype="BF16", shape=(64, 48), seed=0):
    """Write a small weights file."""
    tensors = [(name, dtype, shape, weights(dtype, shape, seed + i)) for i, name in enumerate(names)]
    return write_safetensors(path, tensors, metadata={"format": "pt"})


def transformers_folder(folder, *, shards=1, seed=0):
    """A folder shaped like a transformers model: config, tokenizer, one file or an index and its shards."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type":  "bert",\n "hidden_size": 48}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    if shards == 1:
        simple_weights(folder / "model.safetensors", seed=seed)
        return folder
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = (f"layers.{shard}.a", f"layers.{shard}.b")
        simple_weights(folder / file, names, seed=seed + 10 * shard)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 6144 * 2 * shards}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def diffusers_folder(folder):
    """A folder shaped like a diffusers pipeline: two models, a text encoder, a scheduler, an index of components."""
    folder = Path(folder)
    transformers_folder(folder / "text_encoder")
    for part in ("unet", "vae"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(f'{{"_class_name": "{part}", "_diffusers_version": "0.42.1"}}')
        simple_weights(folder / part / "diffusion_pytorch_model.safetensors", dtype="F16")
        simple_weights(folder / part / "diffusion_pytorch_model.fp16.safetensors", dtype="F16", seed=5)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    return folder


def adapter_folder(folder):
    """A folder shaped like a peft adapter."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    simple_weights(folder / "adapter_model.safetensors", ("base.q.lora_A.weight", "base.q.lora_B.weight"), "F32")
    return folder


def content(folder):
    """Everything below a folder: file content by path, None for a folder."""
    folder = Path(folder)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def flip_a_bit(folder, target, within=""):
    """Copy a compressed folder and change a bit late in its largest tensor with this in its name; return the name."""
    shutil.copytree(folder, target)
    files = [file for file in target.glob("*.safetensors") if within.encode() in file.read_bytes()]
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    tensors = {name: about for name, about in json.loads(content[8:data]).items() if name != "__metadata__"}
    name = max(
        (name for name in tensors if within in name),
        key=lambda name: tensors[name]["data_offsets"][1] - tensors[name]["data_offsets"][0],
    )
    start, stop = tensors[name]["data_offsets"]
    content[data + start + (stop - start) * 9 // 10] ^= 1
    file.write_bytes(content)
    return name.removesuffix(".net")
