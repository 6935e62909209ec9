"""The closed form: keys and values of memorized prompts become those of anchors, by least squares.

Source: Gandikota et al., arXiv 2308.14761 (UCE), equation 7, for keys as well as values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, final

from pydantic import Field

from netweight.errors import Unsupported
from netweight.hf.pipeline_costs import Stage
from netweight.methods.forget.edits.edit import Edit, EditOutcome, EditSizes, EditTask
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import Tensor, nn

    from netweight.nn.text_to_image import Text

# Upper quartile of the NCC of a prompt's images to those from before the edit, from which they remain.
_BROKEN = 0.3


@final
class ClosedForm(Edit):
    """Keys and values of memorized prompts become those of other prompts, by least squares, in seconds."""

    name: ClassVar[str] = "closed-form"
    card: ClassVar[str] = "keys and values of their prompts were replaced by those of other prompts, in closed form"

    weight: Annotated[float, Cli(own=False)] = Field(
        0.2, gt=0, description="Weight of memorized tokens relative to tokens that are kept."
    )
    rounds: Annotated[int, Cli(own=False)] = Field(
        4,
        ge=1,
        description="Largest number of attempts; each doubles the weight and changes the anchor of prompts "
        "whose images remain.",
    )
    ridge: Annotated[float, Cli(own=False)] = Field(
        1e-4, gt=0, description="Weight of the distance from the original weights."
    )
    images: Annotated[int, Cli(own=False)] = Field(
        8,
        ge=1,
        description="Number of images of each memorized prompt that each attempt compares with those from "
        "before the edit.",
    )
    generation_steps: Annotated[int, Cli(own=False)] = Field(
        20, ge=2, description="Scheduler steps of the compared images."
    )

    def stages(self, sizes: EditSizes) -> list[Stage]:
        """Return the search for anchors, and the images of every try: one at least, and `rounds` at most."""
        how: Any = {"guidance": 3.0, "steps": self.generation_steps}
        stages = []
        if not sizes.anchors:
            stages.append(Stage.images(
                "search for anchors", sizes.memorized + min(24, sizes.ordinary), guidance=3.0, steps=20
            ))  # fmt: skip
        count = sizes.memorized * self.images
        stages.append(Stage.images("images before the edit, to compare with", count, **how))
        stages.append(Stage.images("first attempt: keys, values and images", count, **how, more=self.rounds > 1))
        return stages

    def apply(self, task: EditTask) -> EditOutcome:
        """Edit the prompts together, and those again, with more weight and the next anchor, whose images remain."""
        import torch

        from netweight.methods.forget.anchors import described_images
        from netweight.methods.forget.weights import exchange

        model, prompts = task.model, task.prompts
        descriptions, tried = (
            described_images(model, prompts, self.images, steps=self.generation_steps),
            [0] * len(prompts),
        )
        while True:
            anchors = [each[min(times, len(each) - 1)] for each, times in zip(task.anchors, tried, strict=True)]
            strength = torch.tensor([self.weight * 2**times for times in tried])
            before = self._replace(task, anchors, strength)
            images = described_images(model, prompts, self.images, steps=self.generation_steps)
            alike = (images * descriptions).sum(2).quantile(0.75, 1)
            # NaN counts as not removed.
            left = [row for row, value in enumerate(alike.tolist()) if not value <= _BROKEN]
            if not left or max(tried) + 1 == self.rounds:
                break
            exchange(model.denoiser, before)
            for row in left:
                tried[row] += 1
        return EditOutcome(before, {
            "anchors": dict(zip(prompts, anchors, strict=True)),
            "weights": dict(zip(prompts, strength.tolist(), strict=True)),
            "unresolved": [prompts[row] for row in left],
        })  # fmt: skip

    def _replace(self, task: EditTask, anchors: Sequence[str], weights: Tensor) -> dict[str, Tensor]:
        """Give the tokens of each prompt what the layers answer to its anchor's; return the weights as they were."""
        # W' minimizes Σ |W'k − Wk|² (kept tokens) + mean of weight · |W'b − Wa|² (memorized b, anchor a)
        # + ridge |W' − W|².
        import torch

        from netweight.methods.forget.layers import text_layers

        model = task.model
        names = {id(module): name for name, module in model.denoiser.named_modules()}
        texts = [model.embed(list(each)) for each in (task.prompts, anchors, [*task.ordinary, ""])]
        before: dict[str, Tensor] = {}
        with torch.no_grad():
            for layer in text_layers(model.denoiser):
                memorized, anchor, ordinary = (layer.inputs(text).double() for text in texts)
                shares = (weights / len(weights) / memorized.shape[1]).to(memorized)[:, None, None]
                change = _change(memorized, anchor, shares, _tokens(ordinary, texts[2]), self.ridge)
                for module in layer.modules:
                    name = f"{names[id(module)]}.weight"
                    before[name] = _multiplied(module, change, name)
        return before


def _change(memorized: Tensor, anchor: Tensor, shares: Tensor, ordinary: Tensor, ridge: float) -> Tensor:
    """The matrix that weights are multiplied with, from the right."""
    import torch

    energy = ordinary.T @ ordinary / len(ordinary)
    energy += ridge * energy.diagonal().mean() * torch.eye(len(energy)).to(energy)
    weighted = (shares * memorized).flatten(0, 1)
    target, given = energy + anchor.flatten(0, 1).T @ weighted, energy + memorized.flatten(0, 1).T @ weighted
    change: Tensor = torch.linalg.solve(given, target, left=False)
    return change


def _tokens(states: Tensor, text: Text) -> Tensor:
    """The tokens that count, of shape `(tokens, width)`."""
    return states.flatten(0, 1) if text.mask is None else states[text.mask.bool()]


def _multiplied(module: nn.Module, change: Tensor, name: str) -> Tensor:
    """Multiply a layer's weight in place; return it as it was."""
    import torch

    if not isinstance(module, torch.nn.Linear):
        raise Unsupported(
            f"{name} belongs to a {type(module).__name__}, not to a linear layer.",
            cure="Merge adapters first (pipeline.fuse_lora(), then pipeline.unload_lora_weights()), and load without "
            "quantization.",
        )
    weight: Any = module.weight
    before: Tensor = weight.detach().cpu().clone()
    weight.copy_((weight.double() @ change).to(weight.dtype))
    return before
