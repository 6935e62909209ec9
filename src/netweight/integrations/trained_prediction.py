"""Which prediction a pipeline's denoiser was trained to make, in the words that losses count errors in."""

from __future__ import annotations

from typing import Literal

from netweight.integrations.diffusion_pipeline import PipelineModel

__all__ = ["trained_prediction"]

_SAID: dict[str, Literal["velocity", "noise", "sample"]] = {
    "epsilon": "noise", "v_prediction": "velocity", "sample": "sample",
}  # fmt: skip


def trained_prediction(model: PipelineModel) -> Literal["velocity", "noise", "sample"]:
    """Return noise, velocity or sample; `text_to_image` has refused all other kinds.

    Args:
        model: What was trained.
    """
    return _SAID[str(model.pipeline.scheduler.config.prediction_type)]
