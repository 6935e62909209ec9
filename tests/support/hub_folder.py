"""Some fifty adapters as they lie on hubs: odd, old, hostile; each with what should become of it."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

ATTENTION = "mid_block.attentions.0.transformer_blocks.0"
Q, V = f"{ATTENTION}.attn1.to_q", f"{ATTENTION}.attn2.to_v"
CONV = "down_blocks.0.resnets.0.conv1"
SHAPES = {Q: (12, 8), V: (12, 8), CONV: (12, 8, 3, 3)}
TEXT = "text_model.encoder.layers.0.self_attn.q_proj"
SD, XL, FLUX = "sd_1.5", "sdxl_base_v1-0", "black-forest-labs/FLUX.1-dev"
LLAMA = "meta-llama/Llama-3.2-1B"
KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")


@dataclass(frozen=True)
class Case:
    """One adapter of the folder."""

    name: str
    base: str | None  # what its file says it was trained on
    change: dict | None  # module → change, dense; None for what is to be refused
    refused: str = ""  # what the refusal says


class Hub:
    """A folder that fills."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cases, self.draw = folder, [], torch.Generator().manual_seed(0)
        folder.mkdir(parents=True)

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.draw).to(dtype)

    def pair(self, shape, rank, dtype=torch.float32):
        """Factors, a kernel's in four dimensions, and their product."""
        ones = [1] * (len(shape) - 2)
        down, up = self.normal(rank, *shape[1:], dtype=dtype), self.normal(shape[0], rank, *ones, dtype=dtype)
        return down, up, up.double().flatten(1) @ down.double().flatten(1)

    def file(self, name, tensors, change=None, *, base=SD, metadata=None, refused="", said=True):
        path = self.folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {**({"ss_base_model_version": base} if base and said else {}), **(metadata or {})}
        save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)
        self.cases.append(Case(name, base, None if refused else change, refused))

    def lora(self, name, modules, *, own=None, parts=KOHYA, rank=2, alpha=None, dtype=torch.float32, ranks=None, **how):
        """A plain LoRA: `modules` from the name in the file to (the module's own name, its shape)."""
        tensors, change = {}, {}
        for number, (written, (module, shape)) in enumerate(modules.items()):
            r = ranks[number] if ranks else rank
            down, up, product = self.pair(shape, r, dtype)
            tensors[f"{written}.{parts[0]}"], tensors[f"{written}.{parts[1]}"] = down, up
            if alpha is not None:
                tensors[f"{written}.alpha"] = torch.tensor(float(alpha))
            change[module] = product * (1 if alpha is None else alpha / r)
        self.file(name, tensors, change, **how)

    def peft(self, name, tensors, change, config, *, base=SD, refused=""):
        path = self.folder / name
        path.mkdir(parents=True)
        tensors = {f"base_model.model.{key}": value.contiguous() for key, value in tensors.items()}
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base} | config
        (path / "adapter_config.json").write_text(json.dumps(config))
        self.cases.append(Case(name, base, None if refused else change, refused))


def flat(head, *modules):
    """kohya's names of modules of the U-Net."""
    return {f"{head}_{m.replace('.', '_')}": (f"unet.{m}", SHAPES[m]) for m in modules}


def base_weights(folder):
    """A base model with weights of the U-Net's modules; and these."""
    draw = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()}
    (folder / "unet").mkdir(parents=True)
    save_file({f"{n}.weight": w for n, w in weights.items()}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    return folder, weights


def build(folder, weights):
    """Fill a folder; returns its cases."""
    hub = Hub(folder)
    usual = flat("lora_unet", Q, V, CONV)
    # Layouts and names of Stable Diffusion 1.
    hub.lora("kohya sd15", usual, alpha=1)
    hub.lora("kohya without alpha", flat("lora_unet", Q, V))
    hub.lora("kohya mixed ranks", usual, ranks=(1, 3, 2), alpha=2)
    hub.lora("Grüße, Käthe v2.0 (final) [1]", flat("lora_unet", Q), alpha=4)
    hub.lora("kohya bf16", usual, alpha=1, dtype=torch.bfloat16)
    hub.lora("kohya fp16", usual, alpha=1, dtype=torch.float16)
    hub.lora("kohya fp8", flat("lora_unet", Q), alpha=1, dtype=torch.float8_e4m3fn)
    hub.lora("kohya fp8 e5m2", flat("lora_unet", Q), alpha=1, dtype=torch.float8_e5m2)
    text = {"lora_te_" + TEXT.replace(".", "_"): (f"text_encoder.{TEXT}", (6, 5))}
    hub.lora("kohya with text encoder", flat("lora_unet", Q) | text, alpha=1)
    hub.lora("deep/er/kohya", flat("lora_unet", V), alpha=1)
    block = "lora_unet_down_blocks_0_resnets_0_conv1"
    core, small = hub.normal(2, 2, 3, 3), (hub.normal(2, 8, 1, 1), hub.normal(12, 2, 1, 1))
    tucker = torch.einsum("oa,abxy,bi->oixy", small[1][..., 0, 0], core, small[0][..., 0, 0]).flatten(1)
    hub.file("locon tucker", {f"{block}.lora_down.weight": small[0], f"{block}.lora_up.weight": small[1],
                              f"{block}.lora_mid.weight": core, f"{block}.alpha": torch.tensor(1.0)},
             {f"unet.{CONV}": tucker / 2})  # fmt: skip
    own = {f"unet.{m}": (f"unet.{m}", SHAPES[m]) for m in (Q, V)}
    hub.lora("diffusers", own, parts=PEFT)
    hub.lora("diffusers with alphas", own, parts=PEFT, alpha=8)
    hub.lora("diffusers without component", {Q: (f"unet.{Q}", SHAPES[Q])}, parts=PEFT)
    hub.lora("diffusers 2023", {f"unet.{ATTENTION}.attn1.processor.to_q_lora": (f"unet.{Q}", SHAPES[Q])},
             parts=("down.weight", "up.weight"))  # fmt: skip
    comfy = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q"
    clip = "text_encoders.clip_l.transformer." + TEXT
    hub.lora("comfy sd15", {comfy: (f"unet.{Q}", SHAPES[Q]), clip: (f"text_encoder.{TEXT}", (6, 5))}, alpha=2)
    down, up, product = hub.pair(SHAPES[Q], 2)
    hub.peft("peft unet", {f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, {f"unet.{Q}": 2 * product}, {})
    hub.peft("peft rslora", {f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up},
             {f"unet.{Q}": product * 4 / 2**0.5}, {"use_rslora": True})  # fmt: skip
    hub.lora("odd metadata", flat("lora_unet", Q), alpha=1,
             metadata={"ss_tag_frequency": "{broken", "ss_network_args": "\x00", "modelspec.license": "ü" * 500,
                       })  # fmt: skip
    hub.lora("base by modelspec", flat("lora_unet", Q), alpha=1, said=False,
             metadata={"modelspec.architecture": "stable-diffusion-v1/lora"})  # fmt: skip
    hub.lora("base by file name", flat("lora_unet", Q), alpha=1, said=False,
             metadata={"ss_sd_model_name": "v1-5-pruned-emaonly.safetensors"})  # fmt: skip
    hub.lora("nothing said", flat("lora_unet", Q), alpha=1, said=False)
    # Other kinds.
    q = "lora_unet_" + Q.replace(".", "_")
    w = [hub.normal(*side) for side in ((12, 2), (2, 8), (12, 2), (2, 8))]
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    loha = {f"{q}.{name}": value for name, value in zip(names, w, strict=True)} | {f"{q}.alpha": torch.tensor(1.0)}
    dense = ((w[0].double() @ w[1].double()) * (w[2].double() @ w[3].double())) / 2
    hub.file("loha", loha, {f"unet.{Q}": dense})
    tripled = {key.replace("lora_unet", "lycoris"): value * (3 if "w1_a" in key else 1) for key, value in loha.items()}
    hub.file("lycoris prefix", tripled, {f"unet.{Q}": dense * 3})
    one, left, right = hub.normal(3, 2), hub.normal(4, 2), hub.normal(2, 4)
    lokr = {f"{q}.lokr_w1": one, f"{q}.lokr_w2_a": left, f"{q}.lokr_w2_b": right, f"{q}.alpha": torch.tensor(3.0)}
    hub.file("lokr", lokr, {f"unet.{Q}": torch.kron(one.double(), left.double() @ right.double()) * 1.5})
    whole = hub.normal(4, 4)
    hub.file("lokr whole", {f"{q}.lokr_w1": one, f"{q}.lokr_w2": whole, f"{q}.alpha": torch.tensor(1e9)},
             {f"unet.{Q}": torch.kron(one.double(), whole.double())})  # fmt: skip
    down, up, product = hub.pair(SHAPES[Q], 2)
    sum_ = weights[Q].double() + product / 2
    for kind, scale, axis in (("rows", hub.normal(12, 1).abs(), 1), ("columns", hub.normal(1, 8).abs(), 0)):
        change = scale.double() * sum_ / sum_.norm(dim=axis, keepdim=True) - weights[Q].double()
        hub.file(f"dora by {kind}", {f"{q}.lora_down.weight": down, f"{q}.lora_up.weight": up,
                                     f"{q}.alpha": torch.tensor(1.0), f"{q}.dora_scale": scale},
                 {f"unet.{Q}": change})  # fmt: skip
    difference = hub.normal(12, 8)
    hub.file("full difference", {f"{q}.diff": difference}, {f"unet.{Q}": difference.double()})
    # Other models.
    xl = {"lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k":
          ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k", (10, 9)),
          "lora_te2_" + TEXT.replace(".", "_"): (f"text_encoder_2.{TEXT}", (7, 6))}  # fmt: skip
    hub.lora("kohya sdxl", xl, alpha=1, base=XL)
    double = ("diffusion_model.double_blocks.0.img_attn.qkv", (24, 8))
    hub.lora("kohya flux", {"lora_unet_double_blocks_0_img_attn_qkv": double}, alpha=1, base=FLUX)
    hub.lora("comfy flux", {double[0]: double}, parts=PEFT, base=FLUX)
    hub.lora("xlabs flux", {"double_blocks.0.processor.qkv_lora1": double}, parts=("down.weight", "up.weight"),
             base=FLUX)  # fmt: skip
    single = ("transformer.single_transformer_blocks.0.attn.to_q", (8, 8))
    hub.lora("diffusers flux", {single[0]: single}, parts=PEFT, base=FLUX)
    hub.lora("kohya flux in diffusers names", {"lora_transformer_single_transformer_blocks_0_attn_to_q": single},
             alpha=1, base=FLUX)  # fmt: skip
    wan = ("diffusion_model.blocks.0.self_attn.q", (8, 8))
    hub.lora("musubi wan", {"lora_unet_blocks_0_self_attn_q": wan}, alpha=1, base="wan2.1-t2v-14b")
    hub.lora("comfy wan", {wan[0]: wan}, base="wan2.1-t2v-14b")
    hub.lora("musubi hunyuan", {"lora_unet_double_blocks_0_txt_mlp_fc1":
                                ("diffusion_model.double_blocks.0.txt_mlp.fc1", (8, 8))},
             alpha=1, base="hunyuan-video")  # fmt: skip
    hub.lora("musubi qwen image", {"lora_unet_transformer_blocks_0_img_mlp_net_0_proj":
                                   ("transformer.transformer_blocks.0.img_mlp.net.0.proj", (8, 8))},
             alpha=1, base="qwen-image")  # fmt: skip
    down, up, product = hub.pair((6, 6), 2)
    layer = "model.layers.0.self_attn.q_proj"
    hub.peft("peft llama", {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}, {layer: 2 * product},
             {"task_type": "CAUSAL_LM"}, base=LLAMA)  # fmt: skip
    hub.peft("peft loha", {f"{Q}.{name}": value for name, value in zip(names, w, strict=True)},
             {f"unet.{Q}": dense * 4}, {"peft_type": "LOHA", "alpha": 4})  # fmt: skip
    blocks = ("diffusion_model.blocks.0.cross_attn.k", (8, 8))
    hub.lora("comfy wan with embeddings", {blocks[0]: blocks, "diffusion_model.time_embedding.0":
             ("diffusion_model.time_embedding.0", (8, 4))}, base="wan2.1-t2v-14b")  # fmt: skip
    hub.lora("musubi wan with embeddings", {"lora_unet_blocks_0_cross_attn_k": blocks, "lora_unet_time_projection_1":
             ("diffusion_model.time_projection.1", (8, 4))}, base="wan2.1-t2v-14b")  # fmt: skip
    hub.lora("diffsynth wan", {"blocks.0.cross_attn.k": blocks}, base="wan2.1-t2v-14b",
             parts=("lora_A.default.weight", "lora_B.default.weight"))  # fmt: skip
    hub.lora("flux by its authors", {double[0].partition(".")[2]: double}, parts=PEFT, base=FLUX)
    hub.lora("kohya flux whole", {
        "lora_unet_double_blocks_0_img_attn_qkv": double,
        "lora_unet_img_in": ("diffusion_model.img_in", (8, 4)),
        "lora_unet_final_layer_adaLN_modulation_1": ("diffusion_model.final_layer.adaLN_modulation.1", (16, 8)),
        "lora_te3_encoder_block_0_layer_0_SelfAttention_q":
            ("text_encoder_3.encoder.block.0.layer.0.SelfAttention.q", (6, 6)),
    }, alpha=1, base=FLUX)  # fmt: skip
    hub.lora("kohya sd3", {
        "lora_unet_joint_blocks_0_x_block_attn2_qkv": ("diffusion_model.joint_blocks.0.x_block.attn2.qkv", (24, 8)),
        "lora_unet_context_embedder": ("diffusion_model.context_embedder", (8, 4)),
        "lora_unet_t_embedder_mlp_0": ("diffusion_model.t_embedder.mlp.0", (8, 4)),
    }, alpha=1, base="sd3.5-large")  # fmt: skip
    hub.lora("musubi z-image", {"lora_unet_layers_0_attention_to_q":
                                ("diffusion_model.layers.0.attention.to_q", (8, 8))},
             alpha=1, base="z-image")  # fmt: skip
    hub.lora("onetrainer flux", {"lora_transformer_time_text_embed_timestep_embedder_linear_1":
                                 ("transformer.time_text_embed.timestep_embedder.linear_1", (8, 4)),
                                 "lora_transformer_single_transformer_blocks_0_attn_to_q": single},
             alpha=1, base=FLUX)  # fmt: skip
    hub.lora("checkpoint's names", {f"model.{comfy}": (f"unet.{Q}", SHAPES[Q])}, alpha=1)
    scale, (down, up, product) = hub.normal(12).abs(), hub.pair(SHAPES[Q], 2)
    sum_ = weights[Q].double() + product
    named = {f"unet.{Q}.lora_A.one.weight": down, f"unet.{Q}.lora_B.one.weight": up,
             f"unet.{Q}.lora_magnitude_vector.one.weight": scale}  # fmt: skip
    change = scale[:, None].double() * sum_ / sum_.norm(dim=1, keepdim=True) - weights[Q].double()
    hub.file("dora of a named adapter", named, {f"unet.{Q}": change})
    # Hostile and broken.
    good = {f"{q}.lora_down.weight": hub.normal(2, 8), f"{q}.lora_up.weight": hub.normal(12, 2)}
    hub.file("rank 0", {f"{q}.lora_down.weight": torch.empty(0, 8), f"{q}.lora_up.weight": torch.empty(12, 0)},
             refused="rank 0")  # fmt: skip
    hub.file("nan", good | {f"{q}.lora_up.weight": torch.full((12, 2), torch.nan)}, refused="NaN")
    hub.file("alpha is nan", good | {f"{q}.alpha": torch.tensor(torch.nan)}, refused="scale of")
    hub.file("one factor", {f"{q}.lora_down.weight": hub.normal(2, 8)}, refused="no up")
    hub.file("ranks that differ", good | {f"{q}.lora_up.weight": hub.normal(12, 3)}, refused="up factor of 3")
    pair = {"lora_A.weight": hub.normal(2, 8), "lora_B.weight": hub.normal(12, 2)}
    lora = {f"unet.{Q}.{part}": value for part, value in pair.items()}
    inside = {f"{Q}.{part}": value for part, value in pair.items()}
    hub.file("norm", lora | {f"unet.{ATTENTION}.norm1.diff": hub.normal(8)}, refused="norm or bias")
    hub.file("norm of lycoris", good | {f"{q}.w_norm": hub.normal(8)}, refused="full change")
    hub.file("embedding bundled", lora | {"bundle_emb.word.clip_l": hub.normal(2, 8)}, refused="no factor")
    hub.file("cascade", {"lora_prior_unet_down_blocks_0.lora_down.weight": hub.normal(2, 8),
                         "lora_prior_unet_down_blocks_0.lora_up.weight": hub.normal(8, 2)},
             refused="no known component")  # fmt: skip
    hub.file("control", lora | {f"unet.{Q}.lora_B.bias": hub.normal(12)}, refused="with biases")
    for name, pattern in (("pattern", "("), ("endless pattern", "(a+)+$"), ("endless choice", "(a|a)*$")):
        hub.peft(name, inside, None, {"rank_pattern": {pattern: 2}}, refused="no pattern")
    hub.peft("whole modules", inside, None, {"modules_to_save": ["lm_head"]}, refused="modules_to_save")
    (folder / "a link to itself").symlink_to(folder)
    (folder / "a link to nothing.safetensors").symlink_to(folder / "nothing")
    hub.cases.append(Case("a link to nothing.safetensors", None, None, "no file"))
    hub.file("integers", {key: value.int() for key, value in good.items()}, refused="dtype I32")
    hub.file(
        "unknown names", {"lora_unet_somewhere_else.lora_down.weight": hub.normal(2, 8)}, refused="no known structure"
    )
    hub.file("oft", {f"{q}.oft_blocks": hub.normal(2, 4, 4)}, refused="OFT")
    hub.file("not an adapter", {"model.embed_tokens.weight": hub.normal(4, 4)}, refused="no factor of a LoRA")
    hub.file("wrong shape", {f"{q}.lora_down.weight": hub.normal(2, 9), f"{q}.lora_up.weight": hub.normal(12, 2)},
             {f"unet.{Q}": None}, refused="in shape (12, 9)")  # fmt: skip
    hub.file("empty of tensors", {}, refused="holds no tensor")
    (folder / "empty.safetensors").write_bytes(b"")
    whole = (folder / "kohya sd15.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "lying header.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    (folder / "web page.safetensors").write_text("<!doctype html><title>404</title>")
    (folder / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    (folder / "z copy.safetensors").write_bytes(whole)
    twice = folder / "taken"
    twice.mkdir()
    (folder / "taken.safetensors").write_bytes(whole)
    (twice / "adapter_config.json").write_text("{}")
    for name, words in {"empty": "", "truncated": "", "lying header": "", "web page": "", "pickle.pt": "pickle",
                        "z copy": "holds the same adapter",
                        "taken": "holds no", "taken.safetensors": "same name"}.items():  # fmt: skip
        hub.cases.append(Case(name, None, None, words or name))
    return hub.cases
