"""The layouts of peft, diffusers and kohya: names of modules and tensors, and what scales them.

peft: `adapter_model.safetensors` of one model, and `adapter_config.json`, which says what it is scaled by.

    base_model.model.layers.0.self_attn.q_proj.lora_A.weight

diffusers: one file for all components of a pipeline, as `pipeline.load_lora_weights` reads it.

    unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight
    text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_linear_layer.down.weight

Older files say `….attn1.processor.to_q_lora.down.weight`, or leave the component out. What factors are scaled by stands
in the metadata (peft's settings by component, `lora_adapter_metadata`), or in `.alpha` tensors, or it is 1.

kohya: dots of modules' names have become underscores.

    lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0.lora_down.weight

Names have underscores of their own, so the way back needs knowledge: the names of a model's modules if they are given,
else the structure of the U-Nets, transformers and text encoders of diffusers, below. SDXL is trained on a U-Net whose
blocks are counted through (`input_blocks_4_1_…`); these are told by their numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar, final

from netweight.core.files import parse_json, read_object
from netweight.core.names import expand, nearest_names
from netweight.errors import CorruptBlob, NameNotFound, Unsupported, UsageError
from netweight.store.lora_formats.parts import CONVERT, CONVERT_DORA, TENSOR, Role, alpha_of, by_module
from netweight.store.safetensors import MAX_HEADER

# What a name begins with → the component of the pipeline.
PREFIXES = {
    "lora_unet_": "unet",
    "lora_transformer_": "transformer",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
}

DENOISER = "lycoris_"  # what names begin with where nothing says which denoiser it is

# The denoiser with its authors' names of modules, as ComfyUI calls it; loaders of diffusers translate these.
AUTHORS = "diffusion_model"
_LAYERS_PER_BLOCK = 2  # of Stable Diffusion 1 and 2 and SDXL: resnets between two changes of resolution
# The modules of models by component, in the grammar of `Select`; `#` is any number. Under the authors' names are Flux,
# Chroma, Hunyuan's, PixArt, Stable Diffusion 3, Wan, Lumina and Z-Image, most with queries, keys and values in one.
_STRUCTURES = {
    "unet": """
        {down_blocks.#,mid_block,up_blocks.#}.attentions.#.transformer_blocks.#.{attn1,attn2}.{to_q,to_k,to_v,to_out.0}
        {down_blocks.#,mid_block,up_blocks.#}.attentions.#.{transformer_blocks.#.ff.net.{0.proj,2},proj_in,proj_out}
        {down_blocks.#,mid_block,up_blocks.#}.resnets.#.{conv1,conv2,conv_shortcut,time_emb_proj}
        down_blocks.#.downsamplers.0.conv up_blocks.#.upsamplers.0.conv
        {time,add}_embedding.linear_{1,2} conv_in conv_out
    """,
    "transformer": """
        transformer_blocks.#.{attn1,attn2}.{to_q,to_k,to_v,to_out.0}
        transformer_blocks.#.attn.{to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out}
        transformer_blocks.#.{ff,ff_context,img_mlp,txt_mlp}.net.{0.proj,2}
        transformer_blocks.#.{norm1.linear,norm1_context.linear,img_mod.1,txt_mod.1}
        single_transformer_blocks.#.{attn.{to_q,to_k,to_v},proj_mlp,proj_out,norm.linear}
        blocks.#.{{attn1,attn2}.{to_q,to_k,to_v,to_out.0},attn2.{add_k_proj,add_v_proj},ffn.net.{0.proj,2}}
        x_embedder context_embedder proj_out norm_out.linear img_in txt_in pos_embed.proj
        adaln_single.{linear,emb.timestep_embedder.linear_#} caption_projection.linear_#
        time_text_embed.{timestep,guidance,text}_embedder.linear_#
    """,
    "diffusion_model": """
        double_blocks.#.{img,txt}_{attn.{qkv,proj},mlp.{0,2,fc1,fc2},mod.{lin,linear}}
        joint_blocks.#.{x,context}_block.{{attn,attn2}.{qkv,proj},mlp.{fc1,fc2},adaLN_modulation.1}
        single_blocks.#.{linear1,linear2,modulation.{lin,linear}}
        blocks.#.{{self,cross}_attn.{q,k,v,o},cross_attn.{k_img,v_img},ffn.{0,2},default_modulation.1,skip_linear}
        blocks.#.{attn1.{Wqkv,out_proj},attn2.{q_proj,kv_proj,out_proj},mlp.{fc1,fc2}}
        blocks.#.{attn.{qkv,proj},cross_attn.{q_linear,kv_linear,proj}}
        {layers,context_refiner,noise_refiner}.#.attention.{qkv,out,to_q,to_k,to_v,to_out.0}
        {layers,context_refiner,noise_refiner}.#.{feed_forward.{w1,w2,w3},adaLN_modulation.#}
        txt_in.individual_token_refiner.blocks.#.{self_attn.{qkv,proj},mlp.{fc1,fc2},adaLN_modulation.1}
        img_in img_in.proj txt_in txt_in.input_embedder x_embedder x_embedder.proj context_embedder
        cap_embedder.1 {t,y}_embedder.mlp.# final_layer.{linear,adaLN_modulation.1} head.head
        {time,text}_embedding.# time_projection.1 img_emb.proj.# {time,vector,guidance}_in.{in,out}_layer
        distilled_guidance_layer.{in_proj,out_proj,layers.#.{in,out}_layer}
    """,
    "text_encoder": """
        {text_model.encoder,encoder}.layers.#.{self_attn.{q_proj,k_proj,v_proj,out_proj},mlp.{fc1,fc2}}
        encoder.block.#.layer.{0.SelfAttention.{q,k,v,o},1.DenseReluDense.{wi,wi_0,wi_1,wo}} text_projection
    """,
}
_RESNET = {
    "in_layers_2": "conv1", "out_layers_3": "conv2", "emb_layers_1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}  # fmt: skip
_OUTSIDE_BLOCKS = {
    "input_blocks_0_0": "conv_in", "out_2": "conv_out",
    "time_embed_0": "time_embedding_linear_1", "time_embed_2": "time_embedding_linear_2",
    "label_emb_0_0": "add_embedding_linear_1", "label_emb_0_2": "add_embedding_linear_2",
}  # fmt: skip


@final
class KohyaNames:
    """The way back from kohya's names."""

    def __init__(self, modules: Iterable[str] | None = None) -> None:
        self._known: dict[str, list[str]] | None = None
        self._found: dict[str, str] = {}  # names that were told already: files of one kind repeat them
        if modules is not None:
            self._known = {}
            for component, _, rest in (module.partition(".") for module in modules):
                self._known.setdefault(f"{component} {_flat(rest)}", []).append(rest)

    def module(self, name: str) -> str:
        """Return the model's own name of a module."""
        if name not in self._found:  # some trainers leave its dots behind the prefix
            self._found[name] = self._told(_flat(name))
        return self._found[name]

    def modules(self, names: Iterable[str]) -> dict[str, str]:
        """The models' own names for those of one file, in which a denoiser is one component."""
        found = {name: self.module(name) for name in names}
        if any(module.startswith(f"{AUTHORS}.") for module in found.values()):
            for name, module in found.items():
                component, _, rest = module.partition(".")
                if component == "transformer" and (own := self._spelled(AUTHORS, _flat(rest))):
                    found[name] = f"{AUTHORS}.{own[0]}"
        return found

    def _told(self, name: str) -> str:
        prefix = next((start for start in PREFIXES if name.startswith(start)), None)
        if name.startswith(DENOISER):
            prefix = DENOISER
        if prefix is None:
            raise Unsupported(
                f"The name {name!r} belongs to no known component.", cure=f"Known are {', '.join(PREFIXES)}."
            )
        component, flat = PREFIXES.get(prefix, "unet"), name.removeprefix(prefix)
        ways = [(component, flat), (component, _by_resolution(flat))]
        if component == "unet":  # which kohya and musubi call the denoiser of every model
            ways += [("transformer", flat), (AUTHORS, flat)]
        if prefix == DENOISER:
            ways += [("text_encoder", flat)]
        for component, spelling in dict.fromkeys(ways):
            found = self._spelled(component, spelling)
            if len(found) > 1:
                raise UsageError(
                    f"The name {name!r} may mean {' or '.join(sorted(found))}.",
                    cure="Give the names of the model's modules, or save the adapter in diffusers' layout.",
                )
            if found:
                return f"{component}.{found[0]}"
        raise self._unknown(name, PREFIXES.get(prefix, "unet"), flat)

    def _spelled(self, component: str, flat: str) -> list[str]:
        if self._known is not None:
            text_model = [] if not component.startswith("text_encoder") else [flat.removeprefix("text_model_")]
            return next((self._known[k] for f in (flat, *text_model) if (k := f"{component} {f}") in self._known), [])
        kind = "text_encoder" if component.startswith("text_encoder") else component
        found = []
        for expression, pattern in _expressions(kind):
            if match := expression.fullmatch(flat):
                pieces = pattern.split("#")
                numbers = [*match.groups(), ""]
                found.append("".join(piece + number for piece, number in zip(pieces, numbers, strict=True)))
        return found

    def counted(self, module: str) -> list[str]:
        """Names in diffusers of a module of Stable Diffusion's U-Net, whose authors count its blocks through."""
        flat = _flat(module.removeprefix(f"{AUTHORS}."))
        renamed = _by_resolution(flat)
        return self._spelled("unet", renamed) if module.startswith(f"{AUTHORS}.") and renamed != flat else []

    def _unknown(self, name: str, component: str, flat: str) -> Unsupported | NameNotFound:
        if self._known is None:
            return Unsupported(
                f"The name {name!r} is of no known structure, so where its dots were cannot be told.",
                cure="Give the names of the model's modules, or save the adapter in diffusers' layout.",
            )
        near = ", ".join(key.partition(" ")[2] for key in nearest_names(f"{component} {flat}", self._known))
        return NameNotFound(f"No module of the model is called {name!r} by kohya.", cure=f"The nearest are {near}.")


def kohya_name(component: str, rest: str, *, several_encoders: bool) -> str:
    """Return kohya's name of a module."""
    component = "unet" if component == AUTHORS else component
    prefixes = [start for start, known in PREFIXES.items() if known == component]
    if not prefixes:
        raise UsageError(
            f"Module {rest!r} of component {component!r} has no name in kohya's layout.",
            cure=f"Names begin with {', '.join(dict.fromkeys(PREFIXES.values()))}; or choose layout='peft'.",
        )
    if component.startswith("text_encoder") and rest.startswith("encoder.layers."):
        rest = f"text_model.{rest}"  # as programs that know CLIP by its older structure expect
    return prefixes[-1 if several_encoders else 0] + _flat(rest)


_COMFY_ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"}


def dotted(module: str) -> str:
    """The name in diffusers of a module that ComfyUI calls as Stable Diffusion's authors do; other names stay."""
    if match := re.fullmatch(r"(?:text_encoders\.)?(clip_l|clip_g|t5xxl)\.(?:transformer\.)?(.+)", module):
        return f"{_COMFY_ENCODERS[match[1]]}.{match[2]}"
    module = module.removeprefix("model.") if module.startswith(f"model.{AUTHORS}.") else module
    # Names that Stable Diffusion's do not know, of other models, are their authors' own.
    return f"unet.{own[0]}" if (own := _STRUCTURED.counted(module)) else module


def structure(kind: str) -> list[str]:
    """Names of the modules of a kind of component, `#` for any number."""
    return list(dict.fromkeys(each for line in _STRUCTURES[kind].split() for each in expand(line)))


@cache
def _expressions(kind: str) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(_flat(pattern).replace("#", r"(\d+)")), pattern) for pattern in structure(kind)]


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _by_resolution(flat: str) -> str:
    """Rename a block that is counted through to the name it has in diffusers; other names stay."""
    if flat in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[flat]
    if match := re.fullmatch(r"middle_block_([012])_(.+)", flat):
        number, rest = int(match[1]), match[2]
        return f"mid_block_{'attentions' if number == 1 else 'resnets'}_{number // 2}_{_RESNET.get(rest, rest)}"
    match = re.fullmatch(r"(input|output)_blocks_(\d+)_([012])_(.+)", flat)
    if match is None:
        return flat
    down, number, part, rest = match[1] == "input", int(match[2]), int(match[3]), match[4]
    block, layer = divmod(number - 1 if down else number, _LAYERS_PER_BLOCK + 1)
    side = "down" if down else "up"
    if rest == ("op" if down else "conv"):
        return f"{side}_blocks_{block}_{side}samplers_0_conv"
    return f"{side}_blocks_{block}_{('resnets', 'attentions', '')[part]}_{layer}_{_RESNET.get(rest, rest)}"


_TEXT_MODEL = ".text_model."  # a level of CLIP's text encoder that older files have, and newer models may lack
T = TypeVar("T")


@final
class ModelNames:
    """The names of a model's modules."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._names = set(modules)
        self._older = {name.replace(_TEXT_MODEL, ".", 1): name for name in self._names}
        self.kohya = KohyaNames(self._names)  # the way back from kohya's names

    def own(self, parts: Mapping[str, T], where: Path) -> dict[str, T]:
        """Rename modules as the model calls them."""
        return {self._own(name, where): part for name, part in parts.items()}

    def _own(self, name: str, where: Path) -> str:
        if name in self._names:
            return name
        plain = name.replace(_TEXT_MODEL, ".", 1)
        if plain in self._older:
            return self._older[plain]
        near = ", ".join(nearest_names(name, self._names))
        raise NameNotFound(
            f"{where}: the model has no module {name!r}.", cure=f"It is of another model; the nearest names are {near}."
        )


_STRUCTURED = KohyaNames()

# Other names of the same weights: the last part of a path or mirror, kohya's kinds of models, short names.
_ALIASES = (
    (r"(stable-diffusion|sd)-?v?1(-[x5])?(-pruned.*)?|v1-5-pruned.*|sd15", "stable-diffusion-v1-5"),
    (r"(stable-diffusion|sd)-?v?2-1(-base|-768-v)?|v2-1.*pruned.*", "stable-diffusion-2-1"),
    (r"(stable-diffusion-xl|sd-?xl)(-v1)?(-base)?(-v?1-0)?(-0-9vae)?", "stable-diffusion-xl-base-1-0"),
    (r"flux-?1?-?dev|flux-?1|flux", "flux-1-dev"),
)


def base_key(base: str) -> str:
    """What a base model is compared by: mirrors, local paths, files and short names of the same weights have one."""
    parts = [part for part in re.split(r"[/\\]", base.strip()) if part]
    cached = next((part for part in parts if part.startswith("models--")), None)  # a path in the hub's cache
    last = cached.rpartition("--")[2] if cached else parts[-1] if parts else ""
    plain = re.sub(r"[-_. ]+", "-", re.sub(r"\.(safetensors|ckpt|bin|gguf)$", "", last.lower())).removesuffix(
        "-diffusers"
    )
    return next((name for pattern, name in _ALIASES if re.fullmatch(pattern, plain)), plain)


def is_hub_name(base: str) -> bool:
    """Whether a model's name is that of a repository of a hub, `owner/name`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) is not None


COMPONENTS = ("unet", AUTHORS, "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3")

_UNET = re.compile(r"(down_blocks|up_blocks)\.\d+\..+|(mid_block|conv_in|conv_out|time_embedding|add_embedding)(\..+)?")
_TRANSFORMER = re.compile(
    r"(transformer_blocks|single_transformer_blocks)\.\d+\..+|blocks\.\d+\.attn[12]\..+"
    r"|x_embedder|context_embedder|(norm_out|time_text_embed)\..+"
)
_BY_AUTHORS = re.compile(r"(double|single|joint)_blocks\.\d+\..+|blocks\.\d+\.(self|cross)_attn\..+")
_OWN_PREFIX = "transformer."  # which language models have, too: GPT-2 calls its own body so


def split_component(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Tell components from names of modules, for all names of one adapter."""
    names = list(names)
    diffuses = any(_TRANSFORMER.fullmatch(name.removeprefix(_OWN_PREFIX)) for name in names)
    parts = {}
    for name in names:
        first, _, rest = name.partition(".")
        known = first in COMPONENTS and rest and (first != _OWN_PREFIX[:-1] or diffuses)
        parts[name] = (first, rest) if known else ("", name)
    return parts


def in_component(names: Iterable[str], component: str | None = None) -> dict[str, str]:
    """Give names of modules the component that they lack."""
    parts = split_component(names)
    if component is None and any(not found and _BY_AUTHORS.fullmatch(rest) for found, rest in parts.values()):
        component = AUTHORS
    return {name: name if found else _joined(component, rest) for name, (found, rest) in parts.items()}


def _joined(component: str | None, name: str) -> str:
    if component is None:
        component = "unet" if _UNET.fullmatch(name) else "transformer" if _TRANSFORMER.fullmatch(name) else ""
    return f"{component}.{name}" if component else name


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
COMPRESSED_WEIGHTS = "adapter_model.net.safetensors"  # as `netweight compress` names it
PREFIX = "base_model.model."

_TENSOR = re.compile(r"(?P<module>.+?)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_OTHERS = {  # settings that make more of an adapter than ΔW = scale · up @ down, and what to do
    "use_dora": CONVERT_DORA,
    "lora_bias": "Train with lora_bias=False.",
    "modules_to_save": "Train without modules_to_save: these modules are whole, no low-rank change.",
    "trainable_token_indices": "Train without trainable_token_indices.",
    "target_parameters": "Train with target_modules instead.",
    "layer_replication": "Train without layer_replication.",
    "alora_invocation_tokens": "Train without alora_invocation_tokens.",
    "use_qalora": "Train with use_qalora=False.",
    "use_bdlora": "Train without use_bdlora.",
    "arrow_config": "Give the experts one by one.",
    "kasa_config": "Train without kasa_config.",
    "monteclora_config": "Train without monteclora_config.",
}
# Layers of language models, by which those that know the class of a model by its task find it.
_LANGUAGE = re.compile(r"(model\.)?(layers|decoder\.layers|gpt_neox\.layers|transformer\.h)\.\d+\.")
_PATTERN, _REPEATED = 1000, re.compile(r"[*+}][^()]*\)+[*+{]|\([^()]*\|[^()]*\)+[*+{]")
_CONVERTIBLE = ("LOHA", "LOKR")
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # they change the base's weights before training


@final
@dataclass(frozen=True)
class LoraSettings:
    """The settings that scale a LoRA."""

    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)  # pattern of module names → rank
    alphas: Mapping[str, float] = field(default_factory=dict)  # pattern of module names → alpha
    root: bool = False  # whether the scale is alpha / √rank instead of alpha / rank
    base: str | None = None  # the model's name, if it is known

    @classmethod
    def of(cls, values: Mapping[str, Any], where: Path, *, converts: bool = False) -> Self:
        """Take peft's settings; LoHa's, LoKr's and DoRA's only to be converted."""
        kind = values.get("peft_type", "LORA")
        if kind != "LORA" and not (converts and kind in _CONVERTIBLE):
            cure = CONVERT if kind in _CONVERTIBLE else "Only LoRA has low-rank factors."
            raise Unsupported(f"{where} describes an adapter of kind {kind}.", cure=cure)
        for name, cure in _OTHERS.items():
            if values.get(name) and not (converts and name == "use_dora"):
                raise Unsupported(f"{where} asks for {name}: {values[name]!r}.", cure=cure)
        if values.get("bias", "none") not in ("none", None):
            raise Unsupported(f"{where} trains biases: {values['bias']!r}.", cure='Train with bias="none".')
        if str(values.get("init_lora_weights", True)).lower().startswith(_OTHER_BASE):
            raise Unsupported(
                f"{where} was begun with {values['init_lora_weights']!r}, which changes the base model.",
                cure="Save it with path_initial_model_for_weight_conversion, which makes an ordinary LoRA of it.",
            )
        try:
            ranks = {str(key): int(value) for key, value in (values.get("rank_pattern") or {}).items()}
            alphas = {str(key): float(value) for key, value in (values.get("alpha_pattern") or {}).items()}
            if odd := [pattern for pattern in (*ranks, *alphas) if not _sound(pattern)]:
                raise ValueError(f"{odd[0]!r} is no pattern of names")
            base = values.get("base_model_name_or_path")
            rank, alpha = int(values.get("r", 8)), float(values.get("lora_alpha" if kind == "LORA" else "alpha", 8))
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(f"{where}: r, lora_alpha or their patterns are no numbers ({error}).") from error
        return cls(rank, alpha, ranks, alphas, bool(values.get("use_rslora")), base if isinstance(base, str) else None)

    @classmethod
    def read(cls, path: Path, *, converts: bool = False) -> Self:
        """Read `adapter_config.json`."""
        try:
            return cls.of(read_object(path, limit=MAX_HEADER), path, converts=converts)
        except ValueError as error:
            raise CorruptBlob(f"{path} is no JSON ({error}).", cure="Fetch the file again.") from error

    def scale(self, module: str, rank: int | None, where: Path) -> float:
        """Return a module's scale."""
        # `rank`: None where its tensors do not tell it
        stated = int(_matching(self.ranks, module, self.rank))
        rank = stated if rank is None else rank
        if stated != rank:
            raise CorruptBlob(
                f"{where}: {module} has rank {rank}, its settings say {stated}.",
                cure="Weights and adapter_config.json are of different adapters: fetch both again.",
            )
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.root else alpha / rank

    def to_json(self, modules: list[str]) -> dict[str, Any]:
        """Return the fields of peft's `LoraConfig` for these modules."""
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": _plain(self.alpha),
            "rank_pattern": dict(self.ranks),
            "alpha_pattern": {name: _plain(alpha) for name, alpha in self.alphas.items()},
            "target_modules": modules,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": self.root,
            "inference_mode": True,
        } | ({"task_type": "CAUSAL_LM"} if any(_LANGUAGE.match(name) for name in modules) else {})


def locate_peft(names: list[str], where: Path) -> dict[str, dict[Role, str]]:
    """Find the factors of each module."""
    found: list[tuple[str, str, Role]] = []
    for name in names:
        if (other := TENSOR.fullmatch(name)) is not None:
            found.append((name, other["module"].removeprefix(PREFIX), other["role"]))
            continue
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise Unsupported(
                f"{where}: tensor {name!r} is no factor of a LoRA.",
                cure="Train without modules_to_save; only low-rank changes can be put into a bank.",
            )
        found.append((name, match["module"].removeprefix(PREFIX), "down" if match["side"] == "A" else "up"))
    return by_module(found, where)


def settings_for(scales: Mapping[str, tuple[float, int]], base: str | None = None) -> LoraSettings:
    """Find the settings that give modules their scales."""
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
    )


def _pattern(name: str, names: Mapping[str, Any]) -> str:
    """A module's name as peft's pattern, which without `^` would also match longer names that end in it."""
    return f"^{name}" if any(other.endswith(f".{name}") for other in names) else name


def _sound(pattern: str) -> bool:
    """Whether a stranger's pattern is one, and takes no endless time: nothing is repeated in what is repeated."""
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


DIFFUSERS_METADATA = "lora_adapter_metadata"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"

_DIFFUSERS_TENSOR = re.compile(
    r"(?P<module>.+?)(?:\.lora_(?P<side>[AB])(?:\.[^.]+)?"
    r"|(?:\.lora|\.lora_linear_layer|(?P<joined>_lora))\.(?P<way>down|up)"
    r"|\.lora_(?P<kohya>down|up))\.weight"
)
_ALPHA = re.compile(
    r"(?P<module>.+?)(?:\.lora|\.lora_linear_layer|(?P<joined>_lora))?(?:\.(?:down|up)\.weight)?\.alpha"
)
_ROLES: dict[str, Role] = {"A": "down", "B": "up", "down": "down", "up": "up"}
_UNET_NAMES = {"to_out": "to_out.0"}
_TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def locate_diffusers(names: list[str], where: Path) -> dict[str, dict[Role, str]]:
    """Find the factors and alphas of each module."""
    found: dict[str, tuple[str, Role]] = {}
    for name in names:
        plain = _xlabs(name).replace(".processor.", ".")
        if (other := TENSOR.fullmatch(plain)) is not None:
            found[name] = (other["module"], other["role"])
            continue
        match = _ALPHA.fullmatch(plain) or _DIFFUSERS_TENSOR.fullmatch(plain)
        if match is None:
            raise Unsupported(
                f"{where}: tensor {name!r} is no factor of a LoRA.", cure="Save the adapter without other weights."
            )
        fields = match.groupdict()
        written = fields.get("side") or fields.get("way") or fields.get("kohya")
        module = _current(fields["module"]) if fields["joined"] else fields["module"]
        found[name] = (module, _ROLES[written] if written else "alpha")
    owners = {module for module, role in found.values() if role != "alpha"}
    for name, (module, role) in found.items():
        if role == "alpha" and module not in owners:
            found[name] = (_current(module), role)
    own = {module: dotted(module) for module, _ in found.values()}
    full = in_component(own.values())
    return by_module(((name, full[own[module]], role) for name, (module, role) in found.items()), where)


_XLABS = re.compile(r"(diffusion_model\.)?(double_blocks\.\d+)\.processor\.(qkv|proj)_lora([12])\.(down|up)\.weight")


def _xlabs(name: str) -> str:
    """The name that ComfyUI has for a tensor of XLabs' trainer; other names stay."""
    if (match := _XLABS.fullmatch(name)) is None:
        return name
    stream = "img" if match[4] == "1" else "txt"
    return f"diffusion_model.{match[2]}.{stream}_attn.{match[3]}.lora_{match[5]}.weight"


def settings_said(metadata: Mapping[str, str], where: Path) -> dict[str, LoraSettings]:
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
    return {component: LoraSettings.of(_fields_of(component, fields), where) for component in parts}


def diffusers_names(modules: list[str]) -> dict[str, tuple[str, str]]:
    """Return the names of the down and up factors by module name, as diffusers writes them today."""
    names = {}
    for module, (component, _) in split_component(modules).items():
        text = component.startswith("text_encoder")
        down, up = ("lora_linear_layer.down", "lora_linear_layer.up") if text else ("lora_A", "lora_B")
        names[module] = (f"{module}.{down}.weight", f"{module}.{up}.weight")
    return names


def _fields_of(component: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    head = f"{component}."
    return {key.removeprefix(head): value for key, value in fields.items() if key.startswith(head)}


def _current(module: str) -> str:
    """Today's name of a module that older files write as `to_q_lora`."""
    parent, _, last = module.rpartition(".")
    names = _TEXT_NAMES if parent.endswith("self_attn") else _UNET_NAMES
    return f"{parent}.{names.get(last, last)}"
