"""netweight: take out of model weights what should not be there, and prove what is left.

This file holds lazy public names only (PEP 562): `import netweight` loads neither torch nor anything heavy; each name
is imported from its own module the first time it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Adapter": "netweight.nn.lora:Adapter",
    "AdapterBank": "netweight.store.bank.bank:AdapterBank",
    "CompressedTensor": "netweight.methods.compress.runtime.tensor:CompressedTensor",
    "Finding": "netweight.report.finding:Finding",
    "LayerwiseOptimizer": "netweight.methods.compress.runtime.layerwise:LayerwiseOptimizer",
    "NetweightError": "netweight.errors:NetweightError",
    "Report": "netweight.report.report:Report",
    "Select": "netweight.core.names:Select",
    "StoreWriter": "netweight.store:StoreWriter",
    "Units": "netweight.core.units:Units",
    "WeightSpace": "netweight.methods.space.space:WeightSpace",
    "average_gradient": "netweight.methods.compress.runtime.model:average_gradient",
    "capture": "netweight.nn.hooks:capture",
    "check_device": "netweight.methods.compress.runtime.cuda:check_device",
    "compress_": "netweight.methods.compress.runtime.model:compress_",
    "compress_activations": "netweight.methods.compress.runtime.activations:compress_activations",
    "compress_folder": "netweight.methods.compress.folder:compress_folder",
    "compress_recomputed": "netweight.methods.compress.runtime.activations:compress_recomputed",
    "deactivate": "netweight.methods.forget.edit:apply_edit_",
    "decode_ahead": "netweight.methods.compress.runtime.prefetch:decode_ahead",
    "decompress_": "netweight.methods.compress.runtime.model:decompress_",
    "decompress_folder": "netweight.methods.compress.folder:decompress_folder",
    "dense_state_dict": "netweight.methods.compress.runtime.model:dense_state_dict",
    "detect": "netweight.methods.forget.detect:detect",
    "harden": "netweight.methods.forget.harden:harden_",
    "immunize": "netweight.methods.immunize.train:immunize",
    "load_checkpoint": "netweight.methods.compress.runtime.checkpoint:load_checkpoint",
    "localize": "netweight.methods.forget.localize:localize",
    "memory_footprint": "netweight.methods.compress.runtime.model:memory_footprint",
    "prefer_": "netweight.methods.compress.runtime.model:prefer_",
    "open_store": "netweight.store:open_store",
    "read_adapter": "netweight.store.lora_formats.files:read_adapter",
    "save_checkpoint": "netweight.methods.compress.runtime.checkpoint:save_checkpoint",
    "verify": "netweight.methods.compress.verify:verify",
    "write_adapter": "netweight.store.lora_formats.files:write_adapter",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use and keep it.

    Raises:
        AttributeError: `name` is not a public name of netweight.
    """
    if name == "__version__":
        from netweight.core.environment import netweight_version

        value: Any = netweight_version()
    elif name in _HOMES:
        module, attribute = _HOMES[name].split(":")
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module 'netweight' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return list(__all__)
