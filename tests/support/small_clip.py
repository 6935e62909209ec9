"""A small CLIP of random weights in a folder of transformers."""

import torch


def small_clip(folder, prompts):
    """Write one that knows the prompts' words and sees images of 16 × 16 pixels; returns its folder."""
    import transformers

    from netweight.toys.diffusion import word_clip_tokenizer

    tokenizer = word_clip_tokenizer(" ".join(prompts).split(), length=12)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 12, **sizes, **special}
    torch.manual_seed(0)
    vision = {"image_size": 16, "patch_size": 4, **sizes}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
