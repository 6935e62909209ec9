"""The components of a diffusers pipeline, with which the names of adapted modules begin."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["COMPONENTS", "in_component", "split_component"]

COMPONENTS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3")

_UNET = re.compile(r"(down_blocks|up_blocks)\.\d+\..+|(mid_block|conv_in|conv_out|time_embedding|add_embedding)(\..+)?")
_TRANSFORMER = re.compile(
    r"(transformer_blocks|single_transformer_blocks)\.\d+\..+|blocks\.\d+\.attn[12]\..+"
    r"|x_embedder|context_embedder|(norm_out|time_text_embed)\..+"
)
_OWN_PREFIX = "transformer."  # which language models have, too: GPT-2 calls its own body so


def split_component(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Tell components from names of modules, for all names of one adapter.

    Args:
        names: Of modules, such as "unet.mid_block.attentions.0.proj_in".

    Returns:
        Each name with its component, "" if it has none, and the rest of it. "transformer." is a component only if some
        name goes on as transformers of diffusers do.
    """
    names = list(names)
    diffuses = any(_TRANSFORMER.fullmatch(name.removeprefix(_OWN_PREFIX)) for name in names)
    parts = {}
    for name in names:
        first, _, rest = name.partition(".")
        known = first in COMPONENTS and rest and (first != _OWN_PREFIX[:-1] or diffuses)
        parts[name] = (first, rest) if known else ("", name)
    return parts


def in_component(names: Iterable[str], component: str | None = None) -> dict[str, str]:
    """Give names of modules the component that they lack.

    Args:
        names: All names of one file.
        component: Where the file says it; otherwise names that only a U-Net or a transformer of diffusers has are taken
            for these, and others stay as they are.

    Returns:
        The full name by the name given.
    """
    return {name: name if found else _joined(component, rest) for name, (found, rest) in split_component(names).items()}


def _joined(component: str | None, name: str) -> str:
    if component is None:
        component = "unet" if _UNET.fullmatch(name) else "transformer" if _TRANSFORMER.fullmatch(name) else ""
    return f"{component}.{name}" if component else name
