"""Import hooks that register netweight with transformers and diffusers, in programs that import only those.

torch calls `netweight._autoload`, an entry point of its group `torch.backends`, while it is imported. When one of those
libraries comes, `install` waits for a few modules of it, and once they are there tells them whom to call for compressed
models; only then is more of netweight imported. `NETWEIGHT_AUTOLOAD=0` switches it off, as torch's own
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` does for all such entry points; importing `netweight.plugins.transformers` or
`.diffusers` then does it by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from glob import escape, glob
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

METHOD = "netweight"
# The project's address, as pyproject.toml's [project.urls] gives it; empty until there is one. Files that are published
# name it in place of a package to install, since nobody owns a name on an index before the first upload (SECURITY.md).
HOME = ""
# The method that compressed folders name: a sentence, which loaders show where netweight is not installed. It must stay
# as it is, so that folders stay readable.
HINT = (
    "netweight (these weights are compressed; where netweight is installed they open, and "
    "`netweight decompress FOLDER NEW_FOLDER` restores them)"
)


def install() -> None:
    """Patch modules that are imported already, and hook the others on import."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    finder.tell_finished()


class _Finder:
    """Import finder that delegates to the other finders, and runs hooks as soon as a module was executed."""

    def __init__(self) -> None:
        # Where one of them imports torch, and that us, it is told at the next import after its own has ended.
        self.begun = {name for name in _TELL if name in sys.modules}

    def tell_finished(self) -> None:
        """Tell the modules whose import began before this finder was there."""
        for name in [*self.begun]:
            module = sys.modules.get(name)
            if not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self.begun.discard(name)
                if module is not None:
                    _TELL[name](module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of the modules that are waited for."""
        if self.begun:
            self.tell_finished()
        tell = _TELL.get(fullname)
        if tell is None:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                tell(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ---- what modules are told -------------------------------------------------------------------------------------------


def _quantizer(library: str, name: str) -> Callable[[ModuleType], None]:
    """Enter the plug-in for a library in its tables; it is imported when a model or a program asks for it."""

    def plugin() -> Any:
        return import_module(f"netweight.plugins.{library}")

    class Config:
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return plugin().NetweightConfig(*args, **options)

        @staticmethod
        def from_dict(*args: Any, **options: Any) -> Any:
            return plugin().NetweightConfig.from_dict(*args, **options)

    def tell(auto: Any) -> None:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING |= {METHOD: Config, HINT: Config}
        auto.AUTO_QUANTIZER_MAPPING[METHOD] = lambda *args, **options: getattr(plugin(), name)(*args, **options)

    return tell


def _method(
    owner: str, name: str, applies: Callable[..., bool], library: str, ours: str
) -> Callable[[ModuleType], None]:
    """Let a method of a class of theirs be ours where that applies."""

    def tell(module: Any) -> None:
        theirs = getattr(getattr(module, owner), name)

        @wraps(theirs)
        def method(self: Any, *args: Any, **options: Any) -> Any:
            if not applies(self, *args, **options):
                return theirs(self, *args, **options)
            return getattr(import_module(f"netweight.plugins.{library}"), ours)(self, *args, **options)

        setattr(getattr(module, owner), name, method)

    return tell


def _is_compressed(model: Any, *_: Any, **__: Any) -> bool:
    """Return whether a model holds compressed weights, and more than its adapters would be saved."""
    tensor = sys.modules.get("netweight.methods.compress.runtime.tensor")
    if tensor is None or getattr(model, "_hf_peft_config_loaded", False):
        return False
    return any(isinstance(parameter, tensor.CompressedTensor) for parameter in model.parameters())


def _saves_compressed(trainer: Any, *_: Any, **__: Any) -> bool:
    """Return whether a trainer's model is compressed, and has no `save_pretrained` of its own."""
    return not hasattr(trainer.model, "save_pretrained") and _is_compressed(trainer.model)


def _resumes_compressed(trainer: Any, folder: str | None = None, *_: Any, **__: Any) -> bool:
    """Return whether a trainer's checkpoint, or else its best one, holds compressed weights."""
    folder = folder or trainer.state.best_model_checkpoint
    return not trainer.is_fsdp_enabled and folder is not None and any(glob(f"{escape(folder)}/model*.net.safetensors"))


def _trainer(module: ModuleType) -> None:
    for name, applies, ours in (
        ("_save", _saves_compressed, "save"),
        ("_load_from_checkpoint", _resumes_compressed, "load_from_checkpoint"),
        ("_load_best_model", _resumes_compressed, "load_best_model"),
    ):
        _method("Trainer", name, applies, "trainer", ours)(module)


_TELL: dict[str, Callable[[Any], None]] = {
    "transformers.quantizers.auto": _quantizer("transformers", "NetweightQuantizer"),
    "diffusers.quantizers.auto": _quantizer("diffusers", "NetweightDiffusersQuantizer"),
    "transformers.modeling_utils": _method(
        "PreTrainedModel", "save_pretrained", _is_compressed, "transformers", "save_pretrained"
    ),
    "diffusers.models.modeling_utils": _method(
        "ModelMixin", "save_pretrained", _is_compressed, "diffusers", "save_pretrained"
    ),
    "transformers.trainer": _trainer,
}
