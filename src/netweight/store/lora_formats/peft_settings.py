"""The settings of peft that scale a LoRA: `adapter_config.json`, or the same fields in a file's metadata."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, final

from netweight.core.bounded_json import parse_json, read_object
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.lora_formats.other_kinds import BAKE, CONVERT, CONVERT_DORA, EXTRACT, Conversion
from netweight.store.lora_formats.scales import alpha_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# `netweight compress` names the file so.
COMPRESSED_WEIGHTS = "adapter_model.net.safetensors"
PREFIX = "base_model.model."
DIFFUSERS_METADATA = "lora_adapter_metadata"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"

_PEFT_ALONE = "Keep the file, and load it with peft: it changes more than weights."
# Settings with which an adapter is more than ΔW = scale · up @ down, each with a cure.
_OTHERS = {
    "use_dora": CONVERT_DORA,
    "modules_to_save": f"{BAKE} Or: {EXTRACT}",
    "trainable_token_indices": EXTRACT,
    "layer_replication": _PEFT_ALONE,
    "alora_invocation_tokens": _PEFT_ALONE,
    "use_qalora": EXTRACT,
    "use_bdlora": EXTRACT,
    "arrow_config": _PEFT_ALONE,
    "kasa_config": EXTRACT,
    "monteclora_config": _PEFT_ALONE,
}
# Layers of language models, by which those that know the class of a model by its task find it.
_LANGUAGE = re.compile(r"(model\.)?(layers|decoder\.layers|gpt_neox\.layers|transformer\.h)\.\d+\.")
_PATTERN, _REPEATED = 1000, re.compile(r"[*+}][^()]*\)+[*+{]|\([^()]*\|[^()]*\)+[*+{]")
_CONVERTIBLE = ("LOHA", "LOKR")
# These change the base's weights before the training.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@final
@dataclass(frozen=True)
class LoraSettings:
    """The settings that scale a LoRA."""

    rank: int
    """Rank of modules that no pattern names."""
    alpha: float
    """Alpha of modules that no pattern names."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Pattern of module names → rank."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Pattern of module names → alpha."""
    root: bool = False
    """True if the scale is alpha / √rank instead of alpha / rank."""
    base: str | None = None
    """The model's name, if it is known."""
    transposed: bool = False
    """True if the model stores these weights as (inputs, outputs), as GPT-2's `Conv1D` does (`fan_in_fan_out`)."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters, or their ends, that are changed without a module (`target_parameters`)."""
    unsloth: bool = False
    """True if Unsloth trained the adapter. Some releases of Unsloth arrange the factors of experts otherwise than
    peft.
    """

    @classmethod
    def of(cls, values: Mapping[str, Any], where: Path, *, conversion: Conversion | None = None) -> Self:
        """Take peft's settings; LoHa's, LoKr's and DoRA's only to be converted."""
        converts, replaces = conversion is not None, conversion is not None and conversion.replacements
        kind = values.get("peft_type", "LORA")
        if kind != "LORA" and not (converts and kind in _CONVERTIBLE):
            cure = CONVERT if kind in _CONVERTIBLE else EXTRACT
            raise Unsupported(f"{where} describes an adapter of kind {kind}.", cure=cure)
        for name, cure in _OTHERS.items():
            taken = (converts and name == "use_dora") or (replaces and name == "modules_to_save")
            if values.get(name) and not taken:
                raise Unsupported(f"{where} asks for {name}: {values[name]!r}.", cure=cure)
        if values.get("bias", "none") not in ("none", None) and not replaces:
            raise Unsupported(f"{where} trains biases: {values['bias']!r}.", cure=BAKE)
        if str(values.get("init_lora_weights", True)).lower().startswith(_OTHER_BASE):
            raise Unsupported(
                f"{where} was initialized with {values['init_lora_weights']!r}, which changes the base model.",
                cure="Save it with path_initial_model_for_weight_conversion, which makes an ordinary LoRA of it.",
            )
        try:
            ranks = {str(key): int(value) for key, value in (values.get("rank_pattern") or {}).items()}
            alphas = {str(key): float(value) for key, value in (values.get("alpha_pattern") or {}).items()}
            if odd := [pattern for pattern in (*ranks, *alphas) if not _sound(pattern)]:
                raise ValueError(f"{odd[0]!r} is not a pattern of names")
            base = values.get("base_model_name_or_path")
            rank, alpha = int(values.get("r", 8)), float(values.get("lora_alpha" if kind == "LORA" else "alpha", 8))
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(f"{where}: r, lora_alpha or their patterns are not numbers ({error}).") from error
        return cls(
            rank,
            alpha,
            ranks,
            alphas,
            bool(values.get("use_rslora")),
            base if isinstance(base, str) else None,
            bool(values.get("fan_in_fan_out")),
            tuple(map(str, values.get("target_parameters") or ())),
            "unsloth" in str(values.get("auto_mapping")),
        )

    @classmethod
    def read(cls, path: Path, *, conversion: Conversion | None = None) -> Self:
        """Read `adapter_config.json`."""
        try:
            return cls.of(read_object(path), path, conversion=conversion)
        except ValueError as error:
            raise CorruptBlob(f"{path} is not valid JSON ({error}).", cure="Fetch the file again.") from error

    def rank_of(self, module: str) -> int:
        """Return a module's rank."""
        return int(_matching(self.ranks, module, self.rank))

    def scale(self, module: str, rank: int | None, where: Path) -> float:
        """Return a module's scale.

        `rank`: none where its tensors do not tell it.
        """
        stated = self.rank_of(module)
        rank = stated if rank is None else rank
        if stated != rank:
            raise CorruptBlob(
                f"{where}: {module} has rank {rank}, but {stated} according to its settings.",
                cure="Weights and adapter_config.json are of different adapters: fetch both again.",
            )
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.root else alpha / rank

    def to_json(self, modules: list[str]) -> dict[str, Any]:
        """Return the fields of peft's `LoraConfig` for these modules."""
        return (
            {
                "peft_type": "LORA",
                "base_model_name_or_path": self.base,
                "r": self.rank,
                "lora_alpha": _plain(self.alpha),
                "rank_pattern": dict(self.ranks),
                "alpha_pattern": {name: _plain(alpha) for name, alpha in self.alphas.items()},
                "target_modules": [name for name in modules if name not in self.parameters],
                "lora_dropout": 0.0,
                "bias": "none",
                "use_rslora": self.root,
                "fan_in_fan_out": self.transposed,
                "inference_mode": True,
            }
            | ({"target_parameters": list(self.parameters)} if self.parameters else {})
            | ({"task_type": "CAUSAL_LM"} if any(_LANGUAGE.match(name) for name in modules) else {})
        )


def settings_for(
    scales: Mapping[str, tuple[float, int]],
    base: str | None = None,
    *,
    transposed: bool = False,
    parameters: tuple[str, ...] = (),
) -> LoraSettings:
    """Find the settings that give modules, and parameters among them, their scales."""
    if not scales:
        raise UsageError("An adapter needs at least one module.")
    alphas = {name: alpha_of(scale, rank) for name, (scale, rank) in scales.items()}
    rank = Counter(rank for _, rank in scales.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return LoraSettings(
        rank,
        alpha,
        {_pattern(name, scales): own for name, (_, own) in scales.items() if own != rank},
        {_pattern(name, scales): own for name, own in alphas.items() if own != alpha},
        base=base,
        transposed=transposed,
        parameters=parameters,
    )


def _pattern(name: str, names: Mapping[str, Any]) -> str:
    """A module's name as peft's pattern, which without `^` would also match longer names that end in it."""
    return f"^{name}" if any(other.endswith(f".{name}") for other in names) else name


def _sound(pattern: str) -> bool:
    """Return whether a given pattern is valid and takes bounded time: no repetition within a repetition."""
    try:
        return len(pattern) <= _PATTERN and re.compile(pattern) and not _REPEATED.search(pattern)
    except re.error:
        return False


def _matching(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """The value of the first pattern that matches a name as peft matches: at its end, after a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _plain(alpha: float) -> float:
    """A whole number as an int, as peft writes it."""
    return int(alpha) if alpha.is_integer() else alpha


def settings_said(
    metadata: Mapping[str, str], where: Path, conversion: Conversion | None = None
) -> dict[str, LoraSettings]:
    """Read the settings of each component from a file's metadata; empty if it has none."""
    if DIFFUSERS_METADATA not in metadata:
        return {}
    try:
        fields = parse_json(metadata[DIFFUSERS_METADATA])
        parts = {component: rest for component, rest in (key.split(".", 1) for key in fields)}
    except (ValueError, TypeError) as error:
        raise CorruptBlob(
            f"{where}: its {DIFFUSERS_METADATA} cannot be read ({error}).", cure="Fetch the file again."
        ) from error
    return {
        component: LoraSettings.of(_fields_of(component, fields), where, conversion=conversion) for component in parts
    }


def _fields_of(component: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    head = f"{component}."
    return {key.removeprefix(head): value for key, value in fields.items() if key.startswith(head)}
