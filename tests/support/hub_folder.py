"""Over a hundred adapters as they lie on hubs: odd, old, hostile; each with what should become of it."""

import json
import os
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


def _other_trainers(hub):
    """What OneTrainer, ai-toolkit, DiffSynth, diffusion-pipe, LyCORIS and peft write besides."""
    q, c = (f"lora_unet_{module.replace('.', '_')}" for module in (Q, CONV))
    text = "lora_te_" + TEXT.replace(".", "_")
    hub.lora("kohya with dots", {f"lora_unet_{Q}": (f"unet.{Q}", SHAPES[Q])}, alpha=1)
    hub.lora("kohya of A and B", flat("lora_unet", Q), parts=PEFT, alpha=1)
    hub.lora("text encoder alone", {text: (f"text_encoder.{TEXT}", (6, 5))}, alpha=1)
    (down, up, product), (te_down, te_up, te) = hub.pair(SHAPES[Q], 2), hub.pair((6, 5), 2)
    hub.file("diffusers beside kohya",
             {f"unet.{Q}.lora_A.weight": down, f"unet.{Q}.lora_B.weight": up, f"{text}.lora_down.weight": te_down,
              f"{text}.lora_up.weight": te_up, f"{text}.alpha": torch.tensor(1.0)},
             {f"unet.{Q}": product, f"text_encoder.{TEXT}": te / 2})  # fmt: skip
    pixart = ("transformer_blocks.0.attn1.to_q", "adaln_single.linear", "caption_projection.linear_1",
              "pos_embed.proj", "adaln_single.emb.timestep_embedder.linear_1")  # fmt: skip
    named = {f"lora_transformer_{name.replace('.', '_')}": (f"transformer.{name}", (8, 4)) for name in pixart}
    hub.lora("onetrainer pixart", named, alpha=1, base="pixart-sigma")
    for name, modules in {
        "hunyuan-dit": ("blocks.0.attn1.Wqkv", "blocks.0.attn2.kv_proj", "blocks.0.mlp.fc1"),
        "lumina2": ("layers.0.attention.qkv", "cap_embedder.1"),
        "pixart-alpha": ("blocks.0.attn.qkv", "blocks.0.cross_attn.kv_linear"),
    }.items():
        named = {f"lora_unet_{one.replace('.', '_')}": (f"diffusion_model.{one}", (24, 4)) for one in modules}
        hub.lora(f"kohya {name}", named, alpha=1, base=name)
    for name, base in {
        "diffusion_model.transformer_blocks.0.attn1.to_q": "ltxv",
        "diffusion_model.double_blocks.0.img_attn_qkv": "hunyuan-video",
        "transformer_2.blocks.0.attn1.to_q": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "transformer.transformer_blocks.0.attn2.to_q": "stabilityai/stable-diffusion-3.5-large",
        "unet.down_blocks.1.motion_modules.0.transformer_blocks.0.attention_blocks.0.to_q": SD,
    }.items():
        hub.lora(f"{base.rpartition('/')[2]} {name.rpartition('.')[2]}", {name: (name, (24, 8))}, parts=PEFT, base=base)
    motion = "down_blocks.1.motion_modules.1.transformer_blocks.0.attention_blocks.0"
    hub.lora("animatediff", {f"{motion}.processor.to_q_lora": (f"unet.{motion}.to_q", (8, 8))},
             parts=("down.weight", "up.weight"))  # fmt: skip
    qwen = "transformer_blocks.0.attn.add_q_proj"
    hub.lora("diffsynth qwen image", {qwen: (f"transformer.{qwen}", (8, 8))}, base="Qwen/Qwen-Image",
             parts=("lora_A.default.weight", "lora_B.default.weight"))  # fmt: skip
    double = "diffusion_model.double_blocks.0.img_attn.qkv"
    hub.lora("flux in short", {"lora_unet_double_blocks_0_img_attn_qkv": (double, (24, 8))}, alpha=1, base="flux1")
    hidream = "diffusion_model.double_stream_blocks.0.block.attn1.to_q"
    for head, module, base in (
        (hidream, hidream, "HiDream-ai/HiDream-I1-Full"),
        ("lycoris_transformer_blocks_0_attn_to_q", "transformer.transformer_blocks.0.attn.to_q", FLUX),
    ):
        one, left, right = hub.normal(3, 2), hub.normal(4, 2), hub.normal(2, 4)
        hub.file(f"lokr of {base.partition('/')[0]}",
                 {f"{head}.lokr_w1": one, f"{head}.lokr_w2_a": left, f"{head}.lokr_w2_b": right,
                  f"{head}.alpha": torch.tensor(2.0)},
                 {module: torch.kron(one.double(), left.double() @ right.double())}, base=base)  # fmt: skip

    def kernel(core, left, right):
        return torch.einsum("ijkl,ip,jr->prkl", core.double(), left.double(), right.double())

    one, core, left, right = hub.normal(3, 2), hub.normal(2, 2, 3, 3), hub.normal(2, 4), hub.normal(2, 4)
    change = torch.einsum("ab,prkl->apbrkl", one.double(), kernel(core, left, right)).reshape(12, -1)
    hub.file("lokr tucker", {f"{c}.lokr_w1": one, f"{c}.lokr_w2_a": left, f"{c}.lokr_w2_b": right,
                             f"{c}.lokr_t2": core, f"{c}.alpha": torch.tensor(1.0)},
             {f"unet.{CONV}": change / 2})  # fmt: skip
    names = ("hada_t1", "hada_w1_a", "hada_w1_b", "hada_t2", "hada_w2_a", "hada_w2_b")
    cores = [hub.normal(*shape) for shape in ((2, 2, 3, 3), (2, 12), (2, 8)) * 2]
    hub.file("loha tucker", {f"{c}.{name}": value for name, value in zip(names, cores, strict=True)},
             {f"unet.{CONV}": (kernel(*cores[:3]) * kernel(*cores[3:])).reshape(12, -1)})  # fmt: skip
    for name, alpha in (("one number", torch.tensor([3])), ("bf16", torch.tensor(3.0).bfloat16()),
                        ("fp8", torch.tensor(3.0).to(torch.float8_e4m3fn))):  # fmt: skip
        down, up, product = hub.pair(SHAPES[Q], 2)
        hub.file(f"alpha in {name}",
                 {f"{q}.lora_down.weight": down, f"{q}.lora_up.weight": up, f"{q}.alpha": alpha},
                 {f"unet.{Q}": product * 1.5})  # fmt: skip
    down, up = hub.normal(2, 8, dtype=torch.float16), hub.normal(12, 2, dtype=torch.bfloat16)
    hub.file("dtypes that differ", {f"{q}.lora_down.weight": down, f"{q}.lora_up.weight": up},
             {f"unet.{Q}": up.double() @ down.double()})  # fmt: skip
    hub.lora("kohya fp64", flat("lora_unet", Q), dtype=torch.float64)
    down, up, product = hub.pair(SHAPES[Q], 2)
    settings = {"r": 2, "lora_alpha": 6, "peft_type": "LORA", "base_model_name_or_path": SD, "target_modules": [Q]}
    said = {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in settings.items()})}
    hub.file("diffusers with settings", {f"unet.{Q}.lora_A.weight": down, f"unet.{Q}.lora_B.weight": up},
             {f"unet.{Q}": 3 * product}, said=False, metadata=said)  # fmt: skip
    other = hub.pair(SHAPES[V], 3)
    factors = {f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}
    hub.peft("peft with patterns", factors | {f"{V}.lora_A.weight": other[0], f"{V}.lora_B.weight": other[1]},
             {f"unet.{Q}": product * 4 / 2**0.5, f"unet.{V}": other[2] * 9 / 3**0.5},
             {"rank_pattern": {"attn2.to_v": 3}, "alpha_pattern": {r".*\.attn2\.to_v": 9}, "use_rslora": True,
              "modules_to_save": None, "target_parameters": None, "loftq_config": {}, "use_dora": False})  # fmt: skip
    words = {key: value + 1 for key, value in factors.items()}
    hub.peft("peft with texts", words, {f"unet.{Q}": 2 * ((up.double() + 1) @ (down.double() + 1))},
             {"r": "2", "lora_alpha": "4"})  # fmt: skip
    down, up, product = hub.pair((6, 6), 2)
    for task, module, base in (("SEQ_2_SEQ_LM", "encoder.block.0.layer.0.SelfAttention.q", "google/flan-t5-small"),
                               ("CAUSAL_LM", "transformer.h.0.attn.c_attn", "gpt2")):  # fmt: skip
        hub.peft(f"peft {base.rpartition('/')[2]}", {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up},
                 {module: 2 * product}, {"task_type": task, "fan_in_fan_out": base == "gpt2"}, base=base)  # fmt: skip
    upper = hub.folder / "UPPER.SAFETENSORS"
    hub.lora("upper", flat("lora_unet", Q), alpha=1)
    (hub.folder / "upper.safetensors").rename(upper)
    hub.lora("linked", flat("lora_unet", Q), alpha=1)
    outside = (hub.folder / "linked.safetensors").rename(hub.folder.parent / "elsewhere.safetensors")
    (hub.folder / "linked.safetensors").symlink_to(outside)
    hub.cases[-2] = Case(upper.name, SD, hub.cases[-2].change)


def _hostile(hub, good, inside):
    """Files of other programs under an adapter's name, broken settings, headers that lie."""
    q, folder = next(iter(good)).partition(".")[0], hub.folder

    def raw(name, data, words):
        (folder / name).write_bytes(data)
        hub.cases.append(Case(name.removesuffix(".safetensors"), None, None, words))

    os.mkfifo(folder / "pipe.safetensors")
    hub.cases.append(Case("pipe.safetensors", None, None, "no file"))
    raw("pointer.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "git lfs pull")
    torch.save(good, folder / "pickle in disguise.safetensors")
    hub.cases.append(Case("pickle in disguise", None, None, "is a pickle"))
    raw("lora.gguf", b"GGUF\3\0\0\0" + bytes(64), "not a safetensors file")
    with (folder / "sparse.safetensors").open("wb") as file:
        file.write((200 << 20).to_bytes(8, "little"))
        file.truncate(300 << 20)
    hub.cases.append(Case("sparse", None, None, "not a safetensors file"))
    one = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
    entry = json.dumps({f"{q}.lora_down.weight": one})[1:-1]
    for name, head, words in (
        ("named twice", f"{{{entry},{entry}}}", "given twice"),
        ("overlapping", f'{{{entry},"b":{json.dumps(one | {"data_offsets": [4, 12]})}}}', "starts at 4"),
        ("sides below 0", f"{{{entry}}}".replace("[1, 2]", "[-1, -2]"), "contradict"),
        ("sides without end", f"{{{entry}}}".replace("[1, 2]", f"[{2**62}, {2**62}]"), "contradict"),
        ("a list", "[1]", "not a JSON object"),
    ):
        raw(f"{name}.safetensors", len(head).to_bytes(8, "little") + head.encode() + bytes(12), words)
    for name, config, words in (
        ("experts", {"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ("rank 0 said", {"r": 0}, "0 according to its settings"),
        ("rank in words", {"r": "two"}, "not numbers"),
        ("alpha without end", {"lora_alpha": float("inf")}, "scale of"),
        ("pattern in a list", {"rank_pattern": ["a"]}, "not numbers"),
    ):
        hub.peft(name, inside, None, config, refused=words)
    for name, text in (("settings in a list", "[1]"), ("deep settings", "[" * 100_000)):
        hub.peft(name, inside, None, {}, refused="not valid JSON")
        (folder / name / "adapter_config.json").write_text(text)
    for name, weights in (("pickled", "adapter_model.bin"), ("in shards", "adapter_model-00001-of-00002.safetensors")):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
        (folder / name / weights).write_bytes(pickle.dumps({}))
        hub.cases.append(Case(name, None, None, "is a pickle" if name == "pickled" else "contains no adapter_model"))
    hub.file("inf", good | {f"{q}.lora_up.weight": torch.full((12, 2), torch.inf).half()}, refused="infinity")
    hub.file("two alphas", good | {f"{q}.alpha": torch.ones(2)}, refused="is not an alpha")
    hub.file("dora of another size", good | {f"{q}.dora_scale": hub.normal(5, 1)}, refused="the magnitude of")
    hub.file("under two names", good | {f"unet.{k}": v for k, v in inside.items()}, refused="under two names")
    hub.file("peft alone", {f"base_model.model.{k}": v for k, v in inside.items()}, refused="in peft's layout")
    hub.file("glora", {f"{q}.{k}.weight": hub.normal(2, 8) for k in ("a1", "a2", "b1", "b2")}, refused="contains GLoRA")
    hub.file("ia3", {f"{q}.weight": hub.normal(12, 1), f"{q}.on_input": torch.tensor(False)}, refused="IA³")
    hub.file("pivotal tuning", {"unet:0:up": hub.normal(12, 2), "unet:0:down": hub.normal(2, 8)}, refused="factor of a")
    hub.file("dylora", {f"{q}.lora_A.0": hub.normal(1, 8), f"{q}.lora_B.0": hub.normal(12, 1)}, refused="factor of a")


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
            ("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q", (6, 6)),
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
    _other_trainers(hub)
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
    hub.file("norm", lora | {f"unet.{ATTENTION}.norm1.diff": hub.normal(8)}, refused="biases or other vectors")
    hub.file("norm of lycoris", good | {f"{q}.w_norm": hub.normal(8)}, refused="biases or other vectors")
    hub.file("cascade", {"lora_prior_unet_down_blocks_0.lora_down.weight": hub.normal(2, 8),
                         "lora_prior_unet_down_blocks_0.lora_up.weight": hub.normal(8, 2)},
             refused="does not belong to a known component")  # fmt: skip
    hub.file("control", lora | {f"unet.{Q}.lora_B.bias": hub.normal(12)}, refused="biases or other vectors")
    for name, pattern in (("pattern", "("), ("endless pattern", "(a+)+$"), ("endless choice", "(a|a)*$")):
        hub.peft(name, inside, None, {"rank_pattern": {pattern: 2}}, refused="not a pattern")
    hub.peft("whole modules", inside, None, {"modules_to_save": ["lm_head"]}, refused="modules_to_save")
    (folder / "a link to itself").symlink_to(folder)
    (folder / "a link to nothing.safetensors").symlink_to(folder / "nothing")
    hub.cases.append(Case("a link to nothing.safetensors", None, None, "no file"))
    _hostile(hub, good, inside)
    hub.file("integers", {key: value.int() for key, value in good.items()}, refused="dtype I32")
    hub.file("unknown names", {"lora_unet_somewhere_else.lora_down.weight": hub.normal(2, 8),
                               "lora_unet_somewhere_else.lora_up.weight": hub.normal(8, 2)},
             refused="is not in an")  # fmt: skip
    hub.file("oft", {f"{q}.oft_blocks": hub.normal(2, 4, 4)}, refused="OFT")
    hub.file("not an adapter", {"model.embed_tokens.weight": hub.normal(4, 4)}, refused="factor of a")
    hub.file("wrong shape", {f"{q}.lora_down.weight": hub.normal(2, 9), f"{q}.lora_up.weight": hub.normal(12, 2)},
             {f"unet.{Q}": None}, refused="in shape (12, 9)")  # fmt: skip
    hub.file("empty of tensors", {}, refused="contains no tensor")
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
                        "z copy": "contains the same adapter",
                        "taken": "contains no", "taken.safetensors": "same name"}.items():  # fmt: skip
        hub.cases.append(Case(name, None, None, words or name))
    return hub.cases
