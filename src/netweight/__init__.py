"""netweight compresses, trains, protects and edits PyTorch model weights, and attacks the results.

`import netweight` loads neither torch nor anything heavy: public names are lazy (PEP 562), each imported from its own
module the first time it is used, and so is what torch's entry point calls. `docs/reference.md` is made from the table.
"""

import os
import sys
from typing import Any


class _ImportWatcher:
    """Finder in `sys.meta_path` until transformers or diffusers is imported; `netweight.autoload` does the rest."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any, target: Any = None) -> None:
        if fullname in ("transformers", "diffusers"):
            sys.meta_path.remove(cls)
            from netweight.autoload import install

            install()


def _autoload() -> None:
    """Register netweight with transformers and diffusers: what torch calls while it is imported.

    It is an entry point of torch's group `torch.backends`. Nothing is added to `sys.meta_path` without torch.
    """
    if os.environ.get("NETWEIGHT_AUTOLOAD") == "0":
        return
    if "transformers" in sys.modules or "diffusers" in sys.modules:
        from netweight.autoload import install

        install()
    elif _ImportWatcher not in sys.meta_path:
        sys.meta_path.insert(0, _ImportWatcher)


def _names() -> Any:
    """Return the lookup of public names, the list of them, and `__all__`."""
    # The import is not at the top of the file, because every program that imports torch would pay for it.
    from netweight.core.lazy import lazy_names

    return lazy_names(
        __name__,
        {
            # a label for any model
            "Label": "netweight.labels.label",
            "label": "netweight.labels.measure",
            # compress
            "CompressedTensor": "netweight.methods.compress.runtime.tensor",
            "LayerwiseOptimizer": "netweight.methods.compress.runtime.layerwise",
            "average_gradient": "netweight.methods.compress.runtime.layerwise",
            "check_device": "netweight.methods.compress.runtime.cuda",
            "chunk_loss": "netweight.methods.compress.runtime.chunked_loss",
            "compress_": "netweight.methods.compress.runtime.model",
            "compress_activations": "netweight.methods.compress.runtime.activations",
            "compress_folder": "netweight.methods.compress.compress_folder",
            "compress_recomputed": "netweight.methods.compress.runtime.activations",
            "decode_ahead": "netweight.methods.compress.runtime.prefetch",
            "decompress_": "netweight.methods.compress.runtime.model",
            "decompress_folder": "netweight.methods.compress.compress_folder",
            "dense_state_dict": "netweight.methods.compress.runtime.model",
            "load_checkpoint": "netweight.methods.compress.runtime.checkpoint",
            "memory_footprint": "netweight.methods.compress.runtime.model",
            "save_checkpoint": "netweight.methods.compress.runtime.checkpoint",
            "set_layout_": "netweight.methods.compress.runtime.model",
            "verify": "netweight.methods.compress.verify",
            # federate: everything is in the package
            "federate": "netweight.methods.federate",
            # forget
            "deactivate": "netweight.methods.forget.forgetting",
            "detect": "netweight.methods.forget.detect",
            "forget": "netweight.methods.forget.forgetting",
            "localize": "netweight.methods.forget.localize",
            # immunize
            "RepNoise": "netweight.methods.immunize.defenses.repnoise",
            "immunize": "netweight.methods.immunize.train",
            # space
            "Adapter": "netweight.nn.lora",
            "AdapterBank": "netweight.store.bank.bank",
            "WeightSpace": "netweight.methods.space.space",
            "read_adapter": "netweight.store.lora_formats.reading",
            "write_adapter": "netweight.store.lora_formats.writing",
            # watch and edit a live model
            "Select": "netweight.core.names",
            "Units": "netweight.core.names",
            "capture": "netweight.nn.hooks",
            "intervene": "netweight.nn.hooks",
            "scale": "netweight.nn.hooks",
            # evidence, and what a method of one's own is made of
            "Attack": "netweight.registry",
            "Command": "netweight.registry",
            "Finding": "netweight.report.finding",
            "Job": "netweight.job",
            "Method": "netweight.registry",
            "Report": "netweight.report.report",
            "Section": "netweight.report.finding",
            "Settings": "netweight.settings",
            "Result": "netweight.registry",
            "command": "netweight.registry",
            "register": "netweight.registry",
            # files and errors
            "NetweightError": "netweight.errors",
            "StoreWriter": "netweight.store.writer",
            "open_store": "netweight.store.reader",
        },
    )


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use and keep it."""
    if name == "__version__":
        from netweight.core.environment import netweight_version

        return netweight_version()
    find, _, public = _names()
    return [*public, "__version__"] if name == "__all__" else find(name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return [*_names()[1](), "__version__"]
