"""The namings of LoRA files that exist, by architecture, and where diffusers reads them otherwise than the model means.

The table in `docs/lora-namings.md` is written from this list and from what the test of it finds.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """One way of writing LoRAs of one architecture."""

    table: str
    """The table of names."""
    trainers: str
    """Who writes so."""
    start: str
    """What names begin with; with `_` at the end, dots become underscores."""
    mixin: str | None
    """The class of diffusers that reads them; None where diffusers reads no LoRA of this naming."""
    kohya: bool = False
    """Whether factors are called lora_down and lora_up."""
    alpha: float | None = None
    """Alpha in tensors, if there are any."""
    diffusers: bool = False
    """Whether modules are called as in diffusers."""
    skip: str = ""
    """Modules (a regular expression) that diffusers does not load in this naming, or not as the model means them."""
    exception: str = ""
    """These modules and the reason, as the table of the documentation has them."""
    only: str = field(default=".*")
    """Modules of files that exist."""


_NORMS = "left out: normalizations"
_RENAMES = "diffusers keeps the authors' names there, and finds no such modules"
_SWAP = (
    "except for the modulation of the final layer (`adaLN`): diffusers exchanges the halves of this matrix when it "
    "converts a whole model, but not when it converts a LoRA"
)
_ALPHA = "except for the final layer, whose alpha diffusers ignores"
_FINAL = f"except for `x_embedder` and the final layer: {_RENAMES}"
_VIEWS = "left out: attention to an input image"

FAMILIES = [
    Family("stable-diffusion", "kohya", "lora_unet_", "StableDiffusionLoraLoaderMixin", True, 2.0, True,
           skip=".*norm.*|time_emb.*|.*motion.*",
           exception=f"{_NORMS}, the time embedding, motion modules"),
    Family("stable-diffusion", "diffusers", "unet.", "StableDiffusionLoraLoaderMixin", diffusers=True,
           skip=".*norm.*|.*motion.*", exception=f"{_NORMS}, motion modules"),
    Family("stable-diffusion", "ComfyUI, OneTrainer", "diffusion_model.", None),
    Family("sdxl", "kohya", "lora_unet_", "StableDiffusionXLLoraLoaderMixin", True, 2.0,
           skip=".*norm.*|.*(in_layers_0|out_layers_0).*|out_0", exception=_NORMS),
    Family("sdxl", "diffusers", "unet.", "StableDiffusionXLLoraLoaderMixin", diffusers=True, skip=".*norm.*",
           exception=_NORMS),
    Family("sdxl", "OneTrainer", "unet.", None),
    Family("sdxl", "ComfyUI", "diffusion_model.", None),
    Family("sd3", "diffusers, SimpleTuner", "transformer.", "SD3LoraLoaderMixin", diffusers=True),
    Family("sd3", "kohya", "lora_unet_", None, True, 2.0),
    Family("sd3", "ComfyUI", "diffusion_model.", None),
    Family("flux", "kohya", "lora_unet_", "FluxLoraLoaderMixin", True, 2.0, skip="final_layer.*", exception=_ALPHA),
    Family("flux", "ComfyUI", "diffusion_model.", "FluxLoraLoaderMixin", True, 2.0,
           skip="final_layer.*", exception=_ALPHA),
    Family("flux", "diffusers, ai-toolkit", "transformer.", "FluxLoraLoaderMixin", diffusers=True),
    Family("flux", "OneTrainer", "lora_transformer_", "FluxLoraLoaderMixin", True, 2.0, True,
           skip=".*(ff|norm1|norm|proj_mlp|proj_out|single_transformer).*",
           exception="but only for attention in double blocks and for the embedders; diffusers refuses the other "
                     "modules"),
    Family("chroma", "kohya", "lora_unet_", None, True, 2.0),
    Family("chroma", "diffusers, ai-toolkit", "transformer.", "FluxLoraLoaderMixin", diffusers=True),
    Family("flux2", "ai-toolkit, ComfyUI", "diffusion_model.", "Flux2LoraLoaderMixin",
           skip="final_layer.adaLN.*", exception=_SWAP),
    Family("flux2", "peft, on the authors' model", "base_model.model.", "Flux2LoraLoaderMixin",
           skip="final_layer.adaLN.*", exception=_SWAP),
    Family("flux2", "kohya, musubi-tuner", "lora_unet_", "Flux2LoraLoaderMixin", True, 2.0,
           only="double_blocks.*|single_blocks.*|img_in|txt_in|time_in.*|final_layer.linear"),
    Family("flux2", "diffusers", "transformer.", "Flux2LoraLoaderMixin", diffusers=True),
    Family("qwen-image", "kohya, musubi-tuner", "lora_unet_", "QwenImageLoraLoaderMixin", True, 2.0,
           skip=".*addition_t.*", exception="left out: the embedding of additional timesteps (`addition_t`)"),
    Family("qwen-image", "ComfyUI, ai-toolkit", "diffusion_model.", "QwenImageLoraLoaderMixin"),
    Family("qwen-image", "Qwen-Image-Lightning", "", "QwenImageLoraLoaderMixin", True, 2.0),
    Family("qwen-image", "diffusers", "transformer.", "QwenImageLoraLoaderMixin", diffusers=True),
    Family("z-image", "ai-toolkit, ComfyUI", "diffusion_model.", "ZImageLoraLoaderMixin", True, 2.0,
           skip="x_embedder|final_layer.*", exception=_FINAL),
    Family("z-image", "kohya, musubi-tuner", "lora_unet_", "ZImageLoraLoaderMixin", True, 2.0,
           skip="x_embedder|final_layer.*", exception=_FINAL),
    Family("z-image", "diffusers", "transformer.", "ZImageLoraLoaderMixin", diffusers=True),
    Family("wan", "DiffSynth, ComfyUI, ai-toolkit", "diffusion_model.", "WanLoraLoaderMixin",
           skip="vace.*|patch_embedding|blocks.0.cross_attn.*_img",
           exception="except for VACE, the patch embedding and attention to an input image, which diffusers refuses"),
    Family("wan", "lightx2v", "diffusion_model.", "WanLoraLoaderMixin", True, 2.0,
           only="blocks.0.(self_attn|cross_attn|ffn).*", skip=".*_img", exception=_VIEWS),
    Family("wan", "musubi-tuner", "lora_unet_", "WanLoraLoaderMixin", True, 2.0,
           only="blocks.0.(self_attn|cross_attn|ffn).*", skip=".*_img", exception=_VIEWS),
    Family("wan", "diffusers", "transformer.", "WanLoraLoaderMixin", diffusers=True),
    Family("hunyuan-video", "the authors, ComfyUI", "diffusion_model.", "HunyuanVideoLoraLoaderMixin",
           skip="final_layer.adaLN.*|txt_in.individual.*qkv|txt_in.c_embedder.*",
           exception="except for the modulation of the final layer, and the fused queries, keys and values of the "
                     "token refiner: diffusers swaps or splits the up factors of these modules, which is right, but "
                     "their down factors too; left out: `txt_in.c_embedder`"),
    Family("hunyuan-video", "musubi-tuner", "lora_unet_", None, True, 2.0),
    Family("hunyuan-video", "diffusers", "transformer.", "HunyuanVideoLoraLoaderMixin", diffusers=True),
    Family("ltx", "ComfyUI, the authors", "diffusion_model.", "LTXVideoLoraLoaderMixin",
           skip="patchify_proj|adaln.*", exception=f"except for `patchify_proj` and `adaln`: {_RENAMES}"),
    Family("ltx", "diffusers", "transformer.", "LTXVideoLoraLoaderMixin", diffusers=True),
    Family("ltx2", "ComfyUI, the authors", "diffusion_model.", "LTX2LoraLoaderMixin"),
    Family("ltx2", "diffusers", "transformer.", "LTX2LoraLoaderMixin", diffusers=True),
    Family("hidream", "ai-toolkit, ComfyUI", "diffusion_model.", "HiDreamImageLoraLoaderMixin"),
    Family("hidream", "diffusers", "transformer.", "HiDreamImageLoraLoaderMixin", diffusers=True),
    Family("lumina2", "ComfyUI, OneTrainer", "diffusion_model.", "Lumina2LoraLoaderMixin",
           only="(layers|noise_refiner|context_refiner).*",
           skip="context_refiner.0.adaLN.*"),  # no model has this module
    Family("lumina2", "diffusers", "transformer.", "Lumina2LoraLoaderMixin", diffusers=True),
    Family("krea2", "the authors, ComfyUI", "diffusion_model.", "Krea2LoraLoaderMixin"),
    Family("krea2", "ai-toolkit", "base_model.model.", "Krea2LoraLoaderMixin"),
    Family("krea2", "diffusers", "transformer.", "Krea2LoraLoaderMixin", diffusers=True),
    Family("ernie", "ai-toolkit", "diffusion_model.", "ErnieImageLoraLoaderMixin"),
    Family("ernie", "peft", "base_model.model.", "ErnieImageLoraLoaderMixin"),
    Family("ernie", "diffusers", "transformer.", "ErnieImageLoraLoaderMixin", diffusers=True),
    Family("anima", "ComfyUI", "diffusion_model.", "AnimaLoraLoaderMixin"),
    Family("anima", "diffusers", "transformer.", "AnimaLoraLoaderMixin", diffusers=True),
    Family("kandinsky5", "diffusers", "transformer.", "KandinskyLoraLoaderMixin", diffusers=True),
    Family("auraflow", "diffusers", "transformer.", "AuraFlowLoraLoaderMixin", diffusers=True),
    Family("auraflow", "ComfyUI", "diffusion_model.", None),
    Family("pixart", "diffusers", "transformer.", None, diffusers=True),
    Family("pixart", "ComfyUI", "diffusion_model.", None),
    Family("minimax-h3", "ai-toolkit", "diffusion_model.", "MiniMaxH3LoraLoaderMixin"),
    Family("minimax-h3", "the authors, ComfyUI", "", "MiniMaxH3LoraLoaderMixin"),
    Family("minimax-h3", "musubi-tuner", "lora_unet_", "MiniMaxH3LoraLoaderMixin", True, 2.0),
]  # fmt: skip


def table() -> str:
    """The table of families for the documentation."""
    from netweight.store.lora_formats.naming import naming_called

    lines = [
        "| architecture | written by | prefix of the names | names of modules | change in diffusers |",
        "|---|---|---|---|---|",
    ]
    for each in FAMILIES:
        start = f"`{each.start}`" if each.start else "none"
        loaded = "the same"
        if each.mixin is None:
            what = f"the pipelines of {naming_called(each.table).title} load no LoRA" if each.diffusers else "not read"
            loaded = f"not compared: {what}"
        if each.exception:
            loaded += f"{';' if each.exception.startswith('left out') else ','} {each.exception}"
        whose = "diffusers' names" if each.diffusers else "authors' names"
        lines.append(f"| {naming_called(each.table).title} | {each.trainers} | {start} | {whose} | {loaded} |")
    return "\n".join(lines)
