"""Settings of detection and localization; the defaults are the paper's where it is consistent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from netweight.errors import UsageError
from netweight.methods.forget.layers import Scope


@final
@dataclass(frozen=True)
class DetectionConfig:
    """How prompts are looked at."""

    seeds: tuple[int, ...] = tuple(range(10))  # every two are compared
    steps: int = 50
    # "paper" looks at the first timestep; "code" at the second, with noise that took no step, as the released code
    # does.
    timing: Literal["paper", "code"] = "paper"
    rows: int = 64  # most images at a time; halved where memory runs out

    def __post_init__(self) -> None:
        """Check the values."""
        if len(set(self.seeds)) < 2 or len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"Seeds {self.seeds} cannot be compared.", cure="Give at least 2, each once.")
        if self.steps < 2 or self.rows < 1:
            raise UsageError(f"{self.steps} steps and {self.rows} rows cannot be.", cure="Give 2 steps, 1 row or more.")
        if self.timing not in ("paper", "code"):
            raise UsageError(f"The timing {self.timing!r} is unknown.", cure='Use "paper" or "code".')


@final
@dataclass(frozen=True)
class LocalizationConfig:
    """How the neurons of a memorized prompt are searched for."""

    # Source: arXiv 2406.02366, section 3 and its code: theta from 5 to 1 by 0.25, and k from 0 up by 1.

    detection: DetectionConfig = field(default_factory=DetectionConfig)  # how predictions are made and compared
    scope: Scope = "down+mid"
    theta: float = 5.0  # deviations from its mean beyond which a neuron is out of distribution, at the first stage
    theta_step: float = 0.25  # what is taken from it at every further stage
    theta_least: float = 1.0  # its least value: the last stage
    # "corrected" removes repeated neurons and takes equality as reached; "reference" keeps a neuron as often as both
    # rules chose it, and demands less than the threshold in refinement, as the released code does.
    fidelity: Literal["corrected", "reference"] = "corrected"
    ahead: int = 32  # removals tried at once in refinement; 1 is the one-by-one loop. The result is the same.
    prompts: int = 8  # prompts searched at a time: what they ask goes through the denoiser in the same batches
    # Whether refinement looks at every seed after each removal, and so finds what the one-by-one loop finds. False
    # looks at the two that are likeliest to forbid it, and at all after a run of removals: less work, memorization is
    # as surely broken, but other neurons may be found to be spared.
    every_seed: bool = True
    initial: float | None = None  # similarity that stages are to fall to, in place of the threshold's
    # Threshold that refinement is to keep to, in place of the one that stages were to reach.
    refinement: float | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if not (self.theta >= self.theta_least > 0 and self.theta_step > 0):
            raise UsageError(
                f"theta from {self.theta} to {self.theta_least} by {self.theta_step} cannot be.",
                cure="It falls from theta to theta_least, above 0, by a positive step.",
            )
        for name in ("ahead", "prompts"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} cannot be.", cure="Give 1 or more.")
        if any(limit is not None and not 0 <= limit <= 1 for limit in (self.initial, self.refinement)):
            raise UsageError(
                f"Thresholds of {self.initial} and {self.refinement} cannot be.",
                cure="Similarities are within 0 and 1.",
            )
        if self.fidelity not in ("corrected", "reference"):
            raise UsageError(f"The fidelity {self.fidelity!r} is unknown.", cure='Use "corrected" or "reference".')

    @property
    def thetas(self) -> tuple[float, ...]:
        """Theta of every stage; the stage's number is its k."""
        count = int((self.theta - self.theta_least) / self.theta_step + 1e-9) + 1
        falling = [self.theta - stage * self.theta_step for stage in range(count)]
        return tuple(falling if falling[-1] == self.theta_least else [*falling, self.theta_least])
