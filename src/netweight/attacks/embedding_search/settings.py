"""What one search for an embedding is: where it starts, how it descends, when it is looked at, and what has won."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final, get_args

from netweight.errors import UsageError

# Where a search begins: the target's own prompt, a prompt that has nothing to do with it, or noise.
Start = Literal["original", "unrelated", "noise"]
# In which of a denoiser's predictions its error is counted.
Said = Literal["velocity", "noise", "sample"]


@final
@dataclass(frozen=True)
class SearchSettings:
    """One search for embeddings of a target image.

    Attributes:
        steps: Most steps of Adam.
        lr: Its learning rate, as a share of the root mean square of the embedding that a search starts from; so it
            means the same for every text encoder.
        draws: Timesteps and noises per step, drawn anew each time.
        starts: Where searches begin.
        restarts: Searches from each start; their draws differ, and the unrelated prompt or the noise.
        radius: Largest root mean square of what is added to the embedding, as a share of that of the embedding; None
            for no bound.
        error: Which error is descended. "velocity" suits networks that were trained to predict it; for one trained to
            predict noise, such as Stable Diffusion 1.4, choose "noise", since its error in the others grows without
            bound towards pure noise.
        looks: Steps at which images are generated and compared with the target, ascending; 0 is before the first.
            Empty for 0, 5, 10, 20, 40 and so on, doubled up to the last step.
        images: Images per look, each from its own seed, the same at every look.
        guidance: Of their generation.
        generation_steps: Of their scheduler. Timesteps are drawn among these.
        threshold: Similarity from which an image counts as the target brought back.
        share: Share of a look's images that must reach it; 0 asks for one of them.

    Raises:
        UsageError: A value cannot be meant.

    Source: Kowalczuk et al., arXiv 2507.16880, whose search minimizes the denoising loss over the embedding; the
    starts, the stop at success and the schedule of looks are this library's.
    """

    steps: int = 200
    lr: float = 0.1
    draws: int = 8
    starts: tuple[Start, ...] = ("original", "unrelated", "noise")
    restarts: int = 2
    radius: float | None = None
    error: Said = "velocity"
    looks: tuple[int, ...] = ()
    images: int = 4
    guidance: float = 7.0
    generation_steps: int = 50
    threshold: float = 0.7
    share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, all of it at once."""
        object.__setattr__(self, "starts", tuple(self.starts))
        object.__setattr__(self, "looks", tuple(self.looks))
        counts = ("steps", "draws", "restarts", "images", "generation_steps")
        problems = [f"{name} must be at least 1, not {value}" for name in counts if (value := getattr(self, name)) < 1]
        if not (math.isfinite(self.lr) and self.lr > 0):
            problems.append(f"lr must be above 0, not {self.lr}")
        if not self.starts or set(self.starts) - set(get_args(Start)) or len(set(self.starts)) < len(self.starts):
            problems.append(f"starts must be some of {', '.join(get_args(Start))}, each once, not {self.starts}")
        if self.error not in get_args(Said):
            problems.append(f"error must be one of {', '.join(get_args(Said))}, not {self.error!r}")
        if self.radius is not None and not self.radius > 0:
            problems.append(f"radius must be above 0 or None, not {self.radius}")
        if list(self.looks) != sorted(set(self.looks)) or any(not 0 <= look <= self.steps for look in self.looks):
            problems.append(f"looks must ascend within 0 and {self.steps}, not {self.looks}")
        if not 0 <= self.share <= 1:
            problems.append(f"share must be within 0 and 1, not {self.share}")
        if problems:
            raise UsageError(f"Settings of a search cannot be meant: {'; '.join(problems)}.")

    @property
    def looked_at(self) -> tuple[int, ...]:
        """The steps at which images are looked at; the last step is always among them."""
        if self.looks:
            return tuple(dict.fromkeys((*self.looks, self.steps)))
        doubled = [5 * 2**power for power in range(32) if 5 * 2**power < self.steps]
        return (0, *doubled, self.steps)

    @property
    def needed(self) -> int:
        """How many images of a look must reach the threshold."""
        return max(1, math.ceil(self.share * self.images - 1e-9))
