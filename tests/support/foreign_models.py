"""Make tiny models with transformers, diffusers and peft, and load them where netweight cannot be imported.

Usage: foreign_models.py make FOLDER; or foreign_models.py load PLAIN NET, which prints, as JSON, what each loader said
of the compressed folders below NET: its warnings and the whole chain of errors, or null if it loaded.
"""

import io
import json
import logging
import sys
import traceback
from pathlib import Path


class NoNetweight:
    """An import finder that behaves as if netweight were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "netweight":
            raise ModuleNotFoundError("No module named 'netweight'", name="netweight")


sys.meta_path.insert(0, NoNetweight())

import diffusers  # noqa: E402
import peft  # noqa: E402
import safetensors.torch  # noqa: E402
import transformers  # noqa: E402

WARNINGS = io.StringIO()
transformers.logging.set_verbosity_warning()
transformers.logging.disable_default_handler()
transformers.logging.add_handler(logging.StreamHandler(WARNINGS))
diffusers.logging.set_verbosity_error()


def make(folder):
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
        )
    )
    bert.save_pretrained(folder / "bert")
    bert.save_pretrained(folder / "sharded", max_shard_size="20KB")
    bert.save_pretrained(folder / "variant", variant="fp16")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100
        )
    )
    llama.save_pretrained(folder / "llama")
    llama = transformers.LlamaForCausalLM.from_pretrained(folder / "llama")
    adapted = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder / "adapter")
    unet = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    unet.save_pretrained(folder / "unet")
    unet.save_pretrained(folder / "unet_sharded", max_shard_size="100KB", variant="fp16")
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(folder / "ddpm")
    pipeline = stable_diffusion()
    for part in ("unet", "vae", "text_encoder", "scheduler"):
        getattr(pipeline, part).save_pretrained(folder / "sd" / part)
    pipeline.save_config(folder / "sd")
    pipeline.unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    layers = peft.utils.get_peft_model_state_dict(pipeline.unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(folder / "sd_lora", unet_lora_layers=layers)


def stable_diffusion():
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=37, vocab_size=100,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8),
        text_encoder=encoder,
        scheduler=diffusers.PNDMScheduler(steps_offset=1, skip_prk_steps=True),
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def load(plain, net):
    def llama():
        return transformers.LlamaForCausalLM.from_pretrained(plain / "llama")

    def lora(folder):
        stable_diffusion().load_lora_weights(folder)

    bert_config = transformers.AutoConfig.from_pretrained(plain / "bert")
    adapter_config = peft.PeftConfig.from_pretrained(plain / "adapter")
    auto, unet = transformers.AutoModel.from_pretrained, diffusers.UNet2DModel.from_pretrained
    attempts = {
        "plain transformers": lambda: auto(plain / "bert"),
        "plain diffusers LoRA": lambda: lora(plain / "sd_lora"),
        "transformers": lambda: auto(net / "bert"),
        "transformers sharded": lambda: auto(net / "sharded"),
        "transformers variant": lambda: auto(net / "variant", variant="fp16"),
        "transformers use_safetensors": lambda: auto(net / "bert", use_safetensors=True),
        "transformers class": lambda: transformers.BertModel.from_pretrained(net / "bert"),
        "transformers from hub-like subfolder": lambda: transformers.CLIPTextModel.from_pretrained(
            net / "sd", subfolder="text_encoder"
        ),
        "transformers pipeline": lambda: transformers.pipeline("feature-extraction", model=str(net / "bert")),
        "transformers load_adapter": lambda: llama().load_adapter(net / "adapter"),
        "transformers with a foreign config": lambda: auto(net / "bert", config=bert_config),
        "diffusers pipeline": lambda: diffusers.DDPMPipeline.from_pretrained(net / "ddpm"),
        "diffusers pipeline of two libraries": lambda: diffusers.DiffusionPipeline.from_pretrained(net / "sd"),
        "diffusers model": lambda: unet(net / "unet"),
        "diffusers model, plain memory": lambda: unet(net / "unet", low_cpu_mem_usage=False),
        "diffusers sharded variant": lambda: unet(net / "unet_sharded", variant="fp16"),
        "diffusers LoRA": lambda: lora(net / "sd_lora"),
        "peft": lambda: peft.PeftModel.from_pretrained(llama(), net / "adapter"),
        "peft config": lambda: peft.PeftConfig.from_pretrained(net / "adapter"),
        "peft auto class": lambda: peft.AutoPeftModelForCausalLM.from_pretrained(net / "adapter"),
        "peft with a foreign config": lambda: peft.PeftModel.from_pretrained(
            llama(), str(net / "adapter"), config=adapter_config
        ),
        "safetensors load_model": lambda: safetensors.torch.load_model(
            auto(plain / "bert"), net / "bert" / "model.net.safetensors"
        ),
    }
    return {label: said(attempt) for label, attempt in attempts.items()}


def said(attempt):
    WARNINGS.truncate(WARNINGS.seek(0))
    try:
        attempt()
    except Exception:
        return WARNINGS.getvalue() + traceback.format_exc()
    return None


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(json.dumps(load(Path(sys.argv[2]), Path(sys.argv[3]))))
