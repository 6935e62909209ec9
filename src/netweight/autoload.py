"""What importing brings: compressed models in programs that import only transformers or diffusers; former names.

torch calls `netweight._autoload`, an entry point of its group `torch.backends`, while it is imported. When one of those
libraries comes, `install` waits for a few modules of it, and once they are there tells them whom to call for compressed
models; only then is more of netweight imported. `NETWEIGHT_AUTOLOAD=0` switches it off, as torch's own
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` does for all such entry points; importing `netweight.plugins.transformers` or
`.diffusers` then does it by hand.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from glob import escape, glob
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

METHOD = "netweight"
autoload = sys.modules[METHOD]._autoload  # where entry points of earlier installations lead
# The method that compressed folders name: a sentence, which loaders show where netweight is not installed. It must stay
# as it is, so that folders stay readable.
HINT = (
    "netweight (these weights are compressed: `pip install netweight`, then restore them: "
    "`netweight decompress FOLDER NEW_FOLDER`)"
)


def install() -> None:
    """Tell the modules that are imported already, and wait for the others."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    finder.tell_finished()


class _Finder:
    """Finds what others find, and has modules told as soon as they have been executed."""

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
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
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
    """Whether a model holds compressed weights, and more than its adapters would be saved."""
    tensor = sys.modules.get("netweight.methods.compress.runtime.tensor")
    if tensor is None or getattr(model, "_hf_peft_config_loaded", False):
        return False
    return any(isinstance(parameter, tensor.CompressedTensor) for parameter in model.parameters())


def _saves_compressed(trainer: Any, *_: Any, **__: Any) -> bool:
    """Whether a trainer's model is compressed, and has no `save_pretrained` of its own."""
    return not hasattr(trainer.model, "save_pretrained") and _is_compressed(trainer.model)


def _resumes_compressed(trainer: Any, folder: str | None = None, *_: Any, **__: Any) -> bool:
    """Whether a trainer's checkpoint, or else its best one, holds compressed weights."""
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


# ---- modules under the names that the documentation of 0.1.0 gave them -----------------------------------------------

# Importing one warns and gives the module of today. `moved.txt` has a line for each: the former name, and that of
# today. They go with release 0.3.

_MOVED: dict[str, str] = dict(
    line.split() for line in Path(__file__).with_name("moved.txt").read_text("ascii").splitlines()
)


def current_name(module: str) -> str:
    """Return the name that a module has today; records and ledgers may hold the one that it had."""
    known = module.startswith("netweight.") and _MOVED.get(module.removeprefix("netweight."))
    return f"netweight.{known}" if known else module


class _Moved(MetaPathFinder, Loader):
    """Finds modules under their former names."""

    def __init__(self) -> None:
        self._own: dict[str, ModuleSpec | None] = {}  # specifications of modules that are being imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Take what is in the table, and leave the rest to others."""
        known = fullname.startswith("netweight.") and fullname.removeprefix("netweight.") in _MOVED
        return spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its present name."""
        warnings.warn(f"{spec.name} is {current_name(spec.name)} now.", DeprecationWarning, stacklevel=2)
        found = import_module(current_name(spec.name))
        self._own[spec.name] = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back, which importing it under another name replaced."""
        if module.__spec__ is not None:
            module.__spec__ = self._own.pop(module.__spec__.name, module.__spec__)


FORMER = _Moved()  # asked by `netweight/__init__.py`
