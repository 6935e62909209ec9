"""The settings of RepNoise, frozen and checked. `repnoise.py` computes by them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from netweight.errors import UsageError


@final
@dataclass(frozen=True)
class RepNoiseConfig:
    """How RepNoise's loss is put together.

    Attributes:
        fidelity: "corrected", or "reference" for the numbers that the published code gives, its accidents included.
        alpha: Weight of the ascent term, 0 or more.
        beta: Weight of the noise term, 0 or more; 0 leaves it out. In "reference" a factor of its value. In
            "corrected" its gradient's norm as a multiple of that of the weighted ascent term, since the values of the
            two say nothing of how hard they pull; 2 was chosen on a miniature, see docs/immunize.md.
        lens_layers: At how many states below the last one, drawn anew at each step, the ascent term looks; None for
            all, 0 for none, so that the ascent is at the model's own logits alone. "corrected" only.
        noise_tokens: How many tokens the noise term looks at, drawn anew at each step and layer; None for all.
            "corrected" only.
        chunk: Tokens whose logits are held at once.

    Raises:
        UsageError: A value is out of its range or does not go with the fidelity.

    Source: RepNoise (arXiv 2405.14577), appendix B: alpha 1 and beta 0.001, as in the authors' code. Equation 5 of the
        paper exchanges the two names.
    """

    fidelity: Literal["corrected", "reference"] = "corrected"
    alpha: float = 1.0
    beta: float = 2.0
    lens_layers: int | None = None
    noise_tokens: int | None = 256
    chunk: int = 512

    def __post_init__(self) -> None:
        """Check the values."""
        if self.fidelity not in ("corrected", "reference"):
            raise UsageError(f"There is no fidelity {self.fidelity!r}.", cure='Use "corrected" or "reference".')
        if not self.alpha >= 0 or not self.beta >= 0:
            raise UsageError(f"alpha {self.alpha} and beta {self.beta} cannot be.", cure="Give 0 or more.")
        if self.chunk < 1 or (self.lens_layers or 0) < 0 or (self.noise_tokens or 2) < 2:
            raise UsageError(
                f"lens_layers {self.lens_layers}, noise_tokens {self.noise_tokens} and chunk {self.chunk} cannot be.",
                cure="Give None or at least 0 layers, None or at least 2 tokens, and chunks of at least 1 token.",
            )
        if self.fidelity == "reference" and self.lens_layers is not None:
            raise UsageError("The published loss looks at all layers.", cure="Leave lens_layers out.")

    @classmethod
    def reference(cls, *, alpha: float = 1.0, beta: float = 0.001) -> RepNoiseConfig:
        """The published loss with its published weights.

        Args:
            alpha: Weight of the ascent.
            beta: Weight of the noise.
        """
        return cls(fidelity="reference", alpha=alpha, beta=beta, noise_tokens=None)


@final
@dataclass(frozen=True)
class Settings:
    """Training by Adam without weight decay, its rate rising linearly and then falling along a cosine to 0.

    Attributes:
        lr: Highest learning rate.
        epochs: Passes over the pairs.
        batch_size: Pairs per step.
        warmup: Share of the steps over which the rate rises.
        clip: Largest norm of the gradient of all weights; infinity does not clip.
        context: Most tokens of a prompt with an answer; what the model's configuration allows holds besides.
        seed: Of the order of pairs, of noise and of dropout.
        measure_every: Gradient norms of single terms are measured, and balanced weights found anew, every so many
            steps, at the first one too; such a step goes backward once per term.
        save_every: Steps between two checkpoints, where a folder is given.
        frozen: Layers that are not trained, such as "0-3,head"; see `freezing.block_numbers`.

    Raises:
        UsageError: A value is out of its range.

    Source: RepNoise (arXiv 2405.14577), appendix B.2: 1 epoch, batches of 8, 2e-5, 10 % warmup, seed 42.
    """

    lr: float = 2e-5
    epochs: int = 1
    batch_size: int = 8
    warmup: float = 0.1
    clip: float = 1.0
    context: int | None = None
    seed: int = 42
    measure_every: int = 25
    save_every: int = 100
    frozen: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.epochs, self.batch_size, self.measure_every, self.save_every, self.context or 1) < 1:
            raise UsageError(
                f"Epochs {self.epochs}, batches of {self.batch_size}, context {self.context}, measure_every "
                f"{self.measure_every} and save_every {self.save_every} cannot be.",
                cure="Give at least 1 of each.",
            )
        if not 0 < self.lr < math.inf or not self.clip > 0 or not 0 <= self.warmup <= 1:
            raise UsageError(
                f"Learning rate {self.lr}, clip {self.clip} and warmup {self.warmup} cannot be.",
                cure="Rate and clip are above 0, warmup is from 0 to 1.",
            )

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at a step, counted from 0, of so many.

        Args:
            step: From 0.
            steps: How many there are.
        """
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
