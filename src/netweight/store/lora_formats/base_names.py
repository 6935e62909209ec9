"""Names of base models, and the comparison of two names for the same weights."""

from __future__ import annotations

import re

# Other names of the same weights: the last part of a path or mirror, kohya's kinds of models, short names.
_ALIASES = (
    (r"(stable-diffusion|sd)-?v?1(-[x5])?(-pruned.*)?|v1-5-pruned.*|sd15", "stable-diffusion-v1-5"),
    (r"(stable-diffusion|sd)-?v?2-1(-base|-768-v)?|v2-1.*pruned.*", "stable-diffusion-2-1"),
    (r"(stable-diffusion-xl|sd-?xl)(-v1)?(-base)?(-v?1-0)?(-0-9vae)?", "stable-diffusion-xl-base-1-0"),
    (r"flux-?1?-?dev|flux-?1|flux", "flux-1-dev"),
)


def base_key(base: str) -> str:
    """Return the key by which base models are compared: equal for mirrors, paths and short names of a model."""
    parts = [part for part in re.split(r"[/\\]", base.strip()) if part]
    # The path may be one in the hub's cache.
    cached = next((part for part in parts if part.startswith("models--")), None)
    last = cached.rpartition("--")[2] if cached else parts[-1] if parts else ""
    plain = re.sub(r"[-_. ]+", "-", re.sub(r"\.(safetensors|ckpt|bin|gguf)$", "", last.lower())).removesuffix(
        "-diffusers"
    )
    return next((name for pattern, name in _ALIASES if re.fullmatch(pattern, plain)), plain)


def is_hub_name(base: str) -> bool:
    """Return whether a model's name is that of a repository of a hub, `owner/name`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) is not None
