"""The settings of RepNoise, frozen and checked. `repnoise.py` computes by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from netweight.errors import UsageError

__all__ = ["RepNoiseConfig"]


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
