"""Checks of a model against the files that it was opened from: does it compute with all that they contain?

transformers reports tensors that a model does not use and opens the model without them. Whole parts beside the decoder,
such as a layer that predicts further tokens, may be left out. A tensor that belongs to a layer that the model does have
may not: without the bias, the scales or the adapter of that layer, the model computes something else than its author's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from netweight.errors import UsageError
from netweight.store.reader import StoredFile


def refuse_lost_weights(folder: str | Path, model: nn.Module, unused: Iterable[str]) -> None:
    """Refuse a model that leaves out a tensor of one of its layers, unless the tensor is a bias of zeros.

    Args:
        folder: The model's folder.
        model: The model as it was opened.
        unused: Names of the tensors that it does not use.

    Raises:
        UsageError: A layer of the model has another tensor in the files, with which it would compute something else.
    """
    modules = dict(model.named_modules())
    for name in sorted(unused):
        layer = _layer_of(name, modules)
        if layer is not None and not (name.endswith(".bias") and _is_zero(Path(folder), name)):
            raise UsageError(
                f"The files of {folder} contain {name!r}, a part of the layer {layer!r} that the configuration "
                "does not name. Without it, the outputs would differ from those of the author's model.",
                cure="State the part in config.json (such as attention_bias or a quantization_config), merge adapters "
                "once, or fetch the model again.",
            )


def refuse_two_heads(folder: str | Path, model: Any) -> None:
    """Refuse a model whose output layer is to be that of its embedding, and is stored with other values beside it.

    Some programs compute with the stored output layer and others with the embedding.

    Args:
        folder: The model's folder.
        model: A model of transformers as it was opened.

    Raises:
        UsageError: The configuration ties both, and their values differ.
    """
    of_text = getattr(model.config, "get_text_config", None)
    config = of_text() if callable(of_text) else model.config
    if not getattr(config, "tie_word_embeddings", False) or not getattr(model, "_tied_weights_keys", None):
        return
    sides = [getattr(side, "weight", None) for side in (model.get_input_embeddings(), model.get_output_embeddings())]
    first, second = sides
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first is second:
        return
    if first.shape != second.shape or not bool((first == second).all()):
        raise UsageError(
            f"The configuration of {folder} ties the output layer to the embedding (tie_word_embeddings), but the "
            "files contain another output layer. Programs differ in which of the two they use.",
            cure='If the output layer was trained by itself, write "tie_word_embeddings": false into config.json; '
            "otherwise remove it from the weights.",
        )


def warn_of_own_code(folder: str | Path, config: Mapping[str, Any], model: nn.Module) -> None:
    """Warn that a folder has program code for its model, which is not run: the family's own is.

    Args:
        folder: The model's folder.
        config: Its configuration.
        model: The model as it was opened.
    """
    own = config.get("auto_map")
    if isinstance(own, Mapping) and any(str(name).startswith("AutoModel") for name in own):
        warnings.warn(
            f"{folder} has program code of its own for its model (auto_map), which is not run: it was opened as "
            f"{type(model).__name__} of transformers. If the code computes something else, the results are not those "
            "of its author's model.",
            stacklevel=3,
        )


def _layer_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the layer of a model that a tensor of another model belongs to; None if it belongs to none."""
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if (module := modules.get(parent)) is not None:
            own = any(True for _ in module.parameters(recurse=False))
            return parent if own and not any(True for _ in module.children()) else None
    return None


def _is_zero(folder: Path, name: str) -> bool:
    """Return whether a tensor holds zeros alone; False where it is not found."""
    for file in sorted(folder.glob("*.safetensors")):
        stored = StoredFile(file)
        try:
            if name in stored.names():
                return not bool(stored.get(name).any())
        finally:
            stored.close()
    return False
