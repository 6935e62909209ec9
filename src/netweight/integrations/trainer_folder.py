"""A compressed model's weights in a folder that `from_pretrained` loads, written and read as they are in memory.

No weight but one is ever dense, so that a model which trains compressed can be saved while it trains. Used by
`trainer.py`; `integrations/transformers.py` loads such folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netweight.codec.dtypes import torch_dtype
from netweight.errors import UsageError
from netweight.methods.compress.loaders import MODEL_CONFIG, mark_config, stored_name
from netweight.methods.compress.memory.tensor import CompressedTensor
from netweight.store import StoreWriter, TensorInfo, open_store
from netweight.store.atomic import whole_file

__all__ = ["WEIGHTS", "holds_compressed", "read_folder", "write_folder"]

_PLAIN = "model.safetensors"
WEIGHTS = stored_name(_PLAIN, diffusers=False)
"""Name of the weights file."""


def holds_compressed(model: nn.Module) -> bool:
    """Whether any parameter of the model is compressed.

    Args:
        model: Any module.
    """
    return any(isinstance(parameter, CompressedTensor) for parameter in model.parameters())


def write_folder(folder: str | Path, model: Any) -> None:
    """Write a model's weights, compressed ones without decoding them, and a configuration that names them.

    Each file appears whole or not at all.

    Args:
        folder: Where to; it is made if it is not there.
        model: A transformers model, or any module; a module gets no configuration.

    Raises:
        OutputFailed: A file could not be written; an older one is untouched.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: set[Any] = set()
    with StoreWriter(folder / WEIGHTS, overwrite=True) as writer:
        for name, value in model.state_dict().items():
            if _identity(value) in written:
                continue  # a tied weight
            written.add(_identity(value))
            if isinstance(value, CompressedTensor):
                writer.add_blob(name, value.box.blob)
            else:
                writer.add(name, value)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        return
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    content = config.to_json_string(use_diff=True)
    described: Any = {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    marked = mark_config(MODEL_CONFIG, _with(content, described), [_PLAIN])
    assert marked is not None
    with whole_file(folder / MODEL_CONFIG, overwrite=True) as file:
        file.write(marked)


def read_folder(folder: str | Path, model: nn.Module) -> None:
    """Read weights that `write_folder` wrote into a model of the same make, one after another.

    Args:
        folder: The folder.
        model: Module with the same parameters and buffers; whether they are compressed need not be the same.

    Raises:
        UsageError: The folder holds no such weights, or those of another model; then nothing was changed.
        CorruptBlob: A tensor does not match its digest; those before it were read.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise UsageError(f"{folder} holds no {WEIGHTS}.", cure="Name a checkpoint of a compressed model.")
    own = model.state_dict()
    with open_store(path) as store:
        stored = set(store.names())
        there = {_identity(own[name]) for name in stored & own.keys()}
        missing = sorted(name for name, value in own.items() if _identity(value) not in there)
        others = sorted(stored - own.keys())
        misfits = sorted(name for name in stored & own.keys() if not _fits(store.info(name), own[name]))
        if missing or others or misfits:
            raise UsageError(
                f"{path} is of another model: it lacks {missing[:5]}, has {others[:5]} besides, and other shapes or "
                f"dtypes in {misfits[:5]}.",
                cure="Make the model as it was made when it was saved.",
            )
        with torch.no_grad():
            for name in store.names():
                own[name].copy_(store.get(name, check=True))


def _identity(value: torch.Tensor) -> Any:
    """The same for tied weights, and only for them."""
    if isinstance(value, CompressedTensor):
        return id(value.box)
    return value.data_ptr(), value.shape, value.stride()


def _fits(info: TensorInfo, tensor: torch.Tensor) -> bool:
    return tuple(info.shape) == tuple(tensor.shape) and torch_dtype(info.dtype) == tensor.dtype


def _with(content: str, entries: dict[str, Any]) -> bytes:
    config = {**json.loads(content), **entries}
    config.pop("quantization_config", None)
    return json.dumps(config).encode()
