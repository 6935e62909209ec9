"""How a compressed folder refuses to be loaded without netweight. Used by folder compression; integrations undo it.

Loaders in the wild warn about keys that they miss and go on with random weights. So that none of them does so with a
compressed folder, three things are changed, each of which alone stops a loader that heeds it (all tried, see
`tests/integration/test_without_netweight.py`):

1. **The weights go by another name**, `model.net.safetensors` for `model.safetensors`: a loader that looks for the
   usual name finds no weights and says so. Only inside a diffusers model's folder the names stay, since diffusers has
   no way to be told another one, and stops at 2.
2. **The configuration says what to install.**
   transformers (`config.json`): an unknown `quant_method` makes it warn only; but it refuses a `transformers_weights`
   that is no file name, and shows it. So that entry holds the sentence to be read. `quantization_config.weights` holds
   the real name, which a registered quantizer puts back in `update_attn_implementation`, before files are looked for.
   diffusers (`config.json` with `_class_name`): refuses an unknown `quant_method` and shows it. The sentence in it is
   what a quantizer is registered under; it must stay as it is, so that folders stay readable.
   peft (`adapter_config.json`): refuses an unknown `peft_type` and shows it.
3. **The weights' own metadata** hold what transformers up to 4.57 and diffusers' LoRA loader refuse and show (see
   `store/description.py`).
"""

# The original configurations are kept byte for byte in the manifest.

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_CURE = "`pip install netweight`, then restore them: `netweight decompress FOLDER NEW_FOLDER`"
TRANSFORMERS_SENTENCE = f"these weights are compressed by netweight: {_CURE}"
DIFFUSERS_METHOD = f"netweight (these weights are compressed: {_CURE})"
PEFT_TYPE = f"netweight (these weights are compressed: {_CURE})"

_INDEX = re.compile(r"^(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>\w+))?\.json$")
_SHARD = r"-\d{5}-of-\d{5}"
_WEIGHTS = re.compile(rf"^.+?(?:\.(?P<before>\w+))?(?:{_SHARD})?(?:\.(?P<after>\w+))?\.safetensors$")


def is_index(name: str) -> bool:
    """Whether a file name is that of an index of weights, e.g. `model.safetensors.index.json`."""
    return _INDEX.match(name) is not None


def variant_of(name: str) -> str | None:
    """The variant in the name of a weights file or index, `"fp16"` for `model.fp16.safetensors`, or None."""
    if (index := _INDEX.match(name)) is not None:
        return index["variant"]
    weights = _WEIGHTS.match(name)
    return None if weights is None else weights["before"] or weights["after"]


def stored_name(name: str, *, diffusers: bool) -> str:
    """The name under which a weights file or an index is stored."""
    if diffusers:
        return name
    if (index := _INDEX.match(name)) is not None:
        variant = f".{index['variant']}" if index["variant"] else ""
        return f"{index['stem']}{variant}.net.safetensors.index.json"
    return f"{name.removesuffix('.safetensors')}.net.safetensors"


def is_diffusers_config(content: bytes) -> bool:
    """Whether the bytes are the `config.json` of a diffusers model."""
    config = _json_object(content)
    return config is not None and "_class_name" in config


def mark_config(name: str, content: bytes, weights: Iterable[str]) -> bytes | None:
    """Make a configuration refuse loaders that lack netweight."""
    config = _json_object(content)
    if config is None:
        return None
    if name == ADAPTER_CONFIG:
        config["peft_type"] = PEFT_TYPE
    elif "_class_name" in config:
        main = _main_weights(config, list(weights))
        config["quantization_config"] = {"quant_method": DIFFUSERS_METHOD, "version": 1, "weights": main}
    else:
        main = stored_name(_main_weights(config, list(weights)), diffusers=False)
        config["quantization_config"] = {"quant_method": "netweight", "version": 1, "weights": main}
        config["transformers_weights"] = TRANSFORMERS_SENTENCE
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def rewrite_index(content: bytes, *, diffusers: bool, total_size: int) -> bytes:
    """Write the index of the compressed shards."""
    index = json.loads(content)
    index["metadata"] = {**(index.get("metadata") or {}), "total_size": total_size}
    index["weight_map"] = {
        f"{name}.net": stored_name(file, diffusers=diffusers) for name, file in index["weight_map"].items()
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _main_weights(config: dict[str, Any], weights: list[str]) -> str:
    """The file or index that transformers would load: the one it is told, else the usual ones, else the first."""
    usual = [config.get("transformers_weights"), "model.safetensors", "model.safetensors.index.json"]
    first = sorted(weights, key=lambda name: (not is_index(name), name))
    return next(name for name in [*usual, *first] if name in weights)


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        config = json.loads(content)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None
