"""Modules under the names that the documentation of 0.1.0 gave them: importing one warns and gives the module of today.

They go with release 0.3.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVED = {
    "attacks.embedding_search.comparison": "attacks.embedding_search.compare",
    "attacks.embedding_search.similarity": "attacks.embedding_search.search",
    "attacks.finetuning.changes": "attacks.finetuning.attack",
    "attacks.finetuning.examples": "data.tokens",
    "attacks.finetuning.stability": "attacks.finetuning.resistance",
    "attacks.gradient_inversion.features": "attacks.gradient_inversion.tailored",
    "attacks.gradient_inversion.labels": "attacks.gradient_inversion.analytic",
    "attacks.gradient_inversion.optimize": "attacks.gradient_inversion.matching",
    "attacks.gradient_inversion.registry": "attacks.gradient_inversion.matching",
    "attacks.gradient_inversion.text": "attacks.gradient_inversion.analytic",
    "attacks.refusal.edits": "attacks.refusal.folder",
    "data.corpora": "data.public",
    "data.examples": "data.tokens",
    "data.images.sources": "data.images.images",
    "evidence": "report",
    "evidence.copy_metrics": "metrics.copies",
    "evidence.descriptors": "metrics.copies",
    "evidence.finding": "report.finding",
    "evidence.report": "report.report",
    "generate": "nn",
    "generate.adapter": "nn.lora",
    "generate.adapter_fitting": "nn.train_lora",
    "generate.lowrank": "nn.apply_lora",
    "generate.stack": "nn.lora",
    "hf.delayed_injection": "hf.adapters",
    "hf.train_adapters": "hf.adapters",
    "integrations": "plugins",
    "integrations.adapter_training": "hf.adapters",
    "integrations.delayed_injection": "hf.adapters",
    "integrations.diffusers": "plugins.diffusers",
    "integrations.diffusion_pipeline": "hf.load_pipeline",
    "integrations.flower": "plugins.flower",
    "integrations.immunize_trainer": "plugins.immunize_trainer",
    "integrations.model_card": "plugins.model_card",
    "integrations.trainer": "plugins.trainer",
    "integrations.transformers": "plugins.transformers",
    "methods.federate.algorithms.personal": "methods.federate.algorithms.direct",
    "methods.federate.catalog": "methods.federate.folder",
    "methods.federate.direct": "methods.federate.algorithms.direct",
    "methods.federate.hardening": "methods.federate.defenses",
    "methods.federate.hyperfl": "methods.federate.algorithms.hyperfl",
    "methods.federate.method": "methods.federate.task",
    "methods.federate.pfedhn": "methods.federate.algorithms.pfedhn",
    "methods.federate.refusal": "methods.federate.defenses",
    "methods.federate.robust": "methods.federate.updates",
    "methods.forget.config": "methods.forget.settings",
    "methods.forget.deactivation": "methods.forget.edit",
    "methods.forget.detection": "methods.forget.detect",
    "methods.forget.edit_record": "methods.forget.edit",
    "methods.forget.images": "methods.forget.report",
    "methods.forget.method": "methods.forget.localize",
    "methods.forget.prompts": "data.prompts",
    "methods.forget.statistics": "methods.forget.layers",
    "methods.immunize.decoder": "nn.decoder",
    "methods.immunize.pairs": "methods.immunize.defense",
    "methods.immunize.structure": "nn.decoder",
    "methods.immunize.training": "methods.immunize.train",
    "methods.space.bank": "methods.space.gram",
    "methods.space.fitting": "methods.space",
    "methods.space.fitting.gram": "methods.space.gram",
    "methods.space.method": "methods.space.space",
    "methods.space.view_page": "methods.space.view.page",
    "methods.space.viewing": "methods.space.view.build",
    "probe": "nn",
    "probe.capture": "nn.hooks",
    "store.adapter_bank": "store.bank.bank",
    "store.bank.write": "store.bank.shards",
    "store.bank_writing": "store.bank.shards",
    "zoo": "toys",
    "zoo.adapted_resnet": "toys.networks",
    "zoo.adapted_vit": "toys.networks",
    "zoo.attack_subjects": "attacks.finetuning.folder",
    "zoo.ciphers": "toys.language",
    "zoo.data": "data.images",
    "zoo.drawn_faces": "toys.faces",
    "zoo.face_bank": "toys.faces_pipeline",
    "zoo.faces_diffusion": "toys.faces_pipeline",
    "zoo.federated": "methods.federate.partition",
    "zoo.language": "data.tokens",
    "zoo.small_cnn": "methods.federate.task",
    "zoo.small_diffusion": "toys.diffusion",
    "zoo.small_llama": "toys.language",
    "zoo.small_world_subjects": "toys.language_subjects",
}


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
        return importlib.util.spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its present name."""
        warnings.warn(f"{spec.name} is {current_name(spec.name)} now.", DeprecationWarning, stacklevel=2)
        found = importlib.import_module(current_name(spec.name))
        self._own[spec.name] = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back, which importing it under another name replaced."""
        if module.__spec__ is not None:
            module.__spec__ = self._own.pop(module.__spec__.name, module.__spec__)


FINDER = _Moved()  # asked by `netweight/__init__.py`
