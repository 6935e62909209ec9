"""Small text-to-image pipelines with random weights, for tests: Stable Diffusion's kind and PixArt's."""

import diffusers
import torch
import transformers

WORDS = "a the red blue green small large square circle of on photo".split()


def tokenizer(length=10):
    """Whole words over an in-memory vocabulary; letters for the rest."""
    pieces = [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for word in WORDS:
        left = word[0] if len(word) > 1 else None
        for index, letter in enumerate(word[1:], start=1):
            right = letter + ("</w>" if index == len(word) - 1 else "")
            if (left, right) not in merges:
                merges.append((left, right))
                vocab.setdefault(left + right, len(vocab))
            left += right
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def stable_diffusion(*, prediction="epsilon", seed=0, text_in_up_blocks=True, scheduler=None, size=8, widths=(16, 32)):
    """A pipeline with two cross-attentions on the way down, one in the middle and, if wanted, more on the way up."""
    torch.manual_seed(seed)
    words = tokenizer()
    unet = diffusers.UNet2DConditionModel(
        sample_size=size,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=(("CrossAttnUpBlock2D",) if text_in_up_blocks else ("UpBlock2D",)) * 2,
        cross_attention_dim=24,
        norm_num_groups=4,
        attention_head_dim=2,
    )
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            vocab_size=len(words), max_position_embeddings=10,
            bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
        )
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, sample_size=2 * size, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet, vae=vae, text_encoder=encoder, tokenizer=words,
        scheduler=scheduler or diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1,
            set_alpha_to_one=False, prediction_type=prediction,
        ),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stable_diffusion_xl(seed=0):
    """A pipeline of SDXL's kind: two text encoders, pooled text, sizes, and an autoencoder that asks for float32."""
    torch.manual_seed(seed)
    words = tokenizer()
    config = transformers.CLIPTextConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=len(words),
        max_position_embeddings=10, projection_dim=16, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", norm_num_groups=4,
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=64,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, sample_size=16, layers_per_block=1, force_upcast=True,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=vae, text_encoder=transformers.CLIPTextModel(config), tokenizer=words, tokenizer_2=tokenizer(), unet=unet,
        text_encoder_2=transformers.CLIPTextModelWithProjection(config), add_watermarker=False,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pixart(seed=0, *, size=8):
    """PixArt-Alpha's pipeline: masks, a caption projection and a learned variance."""
    torch.manual_seed(seed)
    encoder = transformers.T5EncoderModel(
        transformers.T5Config(d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=256)
    )
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=16, sample_size=size, patch_size=2, caption_channels=24,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, sample_size=2 * size, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.PixArtAlphaPipeline(
        tokenizer=tokenizer(), text_encoder=encoder, vae=vae, transformer=transformer,
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _t5():
    return transformers.T5EncoderModel(
        transformers.T5Config(d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=256)
    ).eval()


def _autoencoder(size, channels):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, sample_size=2 * size, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip


def stable_diffusion_3(seed=0, *, size=8, t5=True):
    """SD3's pipeline: two CLIPs and, if wanted, T5; joint attention, flow matching."""
    torch.manual_seed(seed)
    words = tokenizer()
    config = transformers.CLIPTextConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=len(words),
        max_position_embeddings=10, projection_dim=12, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=size, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=16, pooled_projection_dim=24, out_channels=4,
        pos_embed_max_size=size,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_autoencoder(size, 4), tokenizer=words, tokenizer_2=tokenizer(), tokenizer_3=tokenizer() if t5 else None,
        text_encoder=transformers.CLIPTextModelWithProjection(config),
        text_encoder_2=transformers.CLIPTextModelWithProjection(config), text_encoder_3=_t5() if t5 else None,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def flux(seed=0, *, size=8, guided=True):
    """Flux's pipeline: pooled text of CLIP, states of T5, latents in patches; guidance as an input if wanted."""
    torch.manual_seed(seed)
    words = tokenizer()
    config = transformers.CLIPTextConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=len(words),
        max_position_embeddings=10, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=16, guidance_embeds=guided, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        transformer=transformer, vae=_autoencoder(size, 4), tokenizer=words, tokenizer_2=tokenizer(),
        text_encoder=transformers.CLIPTextModel(config), text_encoder_2=_t5(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guided),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
