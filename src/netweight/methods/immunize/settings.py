"""Settings of immunization: how a defense is trained, each defense's own, and those of a whole folder.

`ImmunizeSettings` is what `netweight immunize` and recipes take: files, training, and the chosen defense with its own
settings under its name. `immunize` in Python takes a defense's settings and `TrainingSettings`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, FilePath

from netweight.errors import UsageError
from netweight.settings import Cli, Settings, Variants

_BY_SET = Cli(own=False)


class TrainingSettings(Settings):
    """Training by Adam without weight decay, its rate rising linearly and then falling along a cosine to 0.

    Source: RepNoise (arXiv 2405.14577), appendix B.2: 1 epoch, batches of 8, 2e-5, 10 % warmup, seed 42.
    """

    options_group = "Training"

    lr: float = Field(2e-5, gt=0, allow_inf_nan=False, description="Highest learning rate.")
    epochs: int = Field(1, ge=1, description="Passes over the pairs.")
    batch_size: int = Field(8, ge=1, description="Pairs per step.")
    warmup: Annotated[float, _BY_SET] = Field(
        0.1, ge=0, le=1, description="Share of the steps over which the rate rises."
    )
    clip: Annotated[float | None, _BY_SET] = Field(
        1.0, gt=0, allow_inf_nan=False, description="Largest norm of the gradient of all weights; null for no bound."
    )
    context: Annotated[int | None, _BY_SET] = Field(
        None, ge=1, description="Most tokens of a prompt with an answer, if fewer than the model allows."
    )
    seed: int = Field(42, description="Seed of the order of pairs, of noise and of dropout.")
    measure_every: Annotated[int, _BY_SET] = Field(
        25, ge=1,
        description="Steps between two measurements of each term's gradient norm, by which weights are balanced; such "
        "a step goes backward once per term.",
    )  # fmt: skip
    checkpoint_every: int | None = Field(None, ge=1)
    """Steps between two checkpoints, from which a run that was stopped continues; none by default. A checkpoint holds
    the weights in float32 and the optimizer's states."""
    states: Annotated[Literal["full", "compact"] | None, _BY_SET] = None
    """Adam's states: `full` keeps both moments in float32; `compact` keeps the first in bfloat16, the second of a
    matrix by its rows and columns, and the gradients in the weights' dtype, which takes a quarter of the memory. By
    default compact where more than 200 million weights are trained."""
    frozen: Annotated[str | None, Cli(name="--freeze", metavar="LAYERS")] = Field(
        None, description="Layers not to train, such as 0-3,head: for ablations."
    )

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at a `step`, counted from 0, of so many `steps`."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


class DefenseSettings(Settings):
    """A defense's own settings."""


class RepNoise(DefenseSettings):
    """Keep harmless answers, unlearn harmful ones at every layer, turn their representations to noise.

    Source: RepNoise (arXiv 2405.14577), algorithm 1; appendix B: alpha 1 and beta 0.001, as in the authors' code.
    Equation 5 of the paper exchanges the two names.
    """

    fidelity: Literal["corrected", "reference"] = Field(
        "corrected", description="`reference` gives the numbers of the published code, its accidents included."
    )
    alpha: float = Field(1.0, ge=0, description="Weight of the ascent on harmful answers.")
    # The values of the two terms say nothing of how hard they pull, hence gradient norms. 2 was chosen on a miniature.
    beta: float = Field(
        2.0, ge=0,
        description="Weight of the noise: the norm of its gradient as a multiple of that of the weighted ascent; with "
        "fidelity `reference` a factor of its value. 0 leaves it out.",
    )  # fmt: skip
    lens_layers: int | None = Field(None, ge=0)
    """Number of depths below the last one, drawn anew at each step, at which the loss on harmful answers is raised.
    0 leaves the model's own logits alone. By default all, or two where the vocabulary has more than 65,536 tokens,
    since each costs a product with the whole vocabulary. Corrected only."""
    noise_tokens: int | None = Field(
        256, ge=2,
        description="Tokens at which the noise looks, drawn anew at each step and layer; null for all. Corrected only.",
    )  # fmt: skip
    norms: float | None = Field(
        None, gt=0,
        description="Bound on the norms of states on harmful rows, as a multiple of those of random tokens before the "
        "defense: what is above is lowered. Null for none.",
    )  # fmt: skip
    chunk: int = Field(512, ge=1, description="Tokens whose logits are held at once.")

    def check(self) -> None:
        """Refuse what the published loss does not do."""
        super().check()
        if self.fidelity == "reference" and self.lens_layers is not None:
            raise UsageError("The published loss looks at all layers.", cure="Leave lens_layers out.")


class RepNoiseReference(RepNoise, defaults={"fidelity": "reference", "beta": 0.001, "noise_tokens": None}):
    """The published loss with its published weights."""


class SecurityVectors(DefenseSettings, recommended={"lr": 1e-3}):
    """A low-rank change that answers harmfully and stays in the model while others train it.

    Source: Zhou et al., security vectors (arXiv 2311.02105); rank 8 and alpha 32 as in RepNoise's appendix.
    """

    rank: int = Field(8, ge=1, description="Rank of the change (security-vectors).")
    alpha: float = Field(32.0, gt=0, description="The change is scaled by alpha / rank.")


class Vaccine(DefenseSettings):
    """Training on harmless answers that stays good under perturbed representations.

    Source: Huang et al., Vaccine (arXiv 2402.01109), algorithm 1; Liu et al., T-Vaccine (arXiv 2410.09760): a share of
    1/4, of norm 3.
    """

    rho: float = Field(
        1.0, gt=0, description="Norm of the perturbations of all blocks together, for the batch (vaccine)."
    )
    share: float = Field(
        1.0, gt=0, le=1,
        description="Share of the blocks that are perturbed, drawn anew at each step by how much their states decide "
        "on harmful answers (t-vaccine); 1 for all.",
    )  # fmt: skip


class VaccineRho10(Vaccine, defaults={"rho": 10.0}):
    """Vaccine with perturbations of norm 10."""


class TVaccine(Vaccine, defaults={"rho": 3.0, "share": 0.25}, recommended={"lr": 1e-3}):
    """T-Vaccine (arXiv 2410.09760): a quarter of the blocks, perturbations of norm 3."""


class SafetyTraining(DefenseSettings):
    """Fine-tuning on the harmless answers, and nothing else. Source: a baseline of RepNoise (arXiv 2405.14577)."""


class GradientAscent(DefenseSettings):
    """Raise the loss on harmful answers, and nothing else. Source: a baseline of RepNoise (arXiv 2405.14577)."""


class AdversarialLoss(DefenseSettings, recommended={"lr": 1e-5}):
    """Lower the loss on harmless answers and raise that on harmful ones, at the last layer alone.

    Source: a baseline of RepNoise (arXiv 2405.14577).
    """

    alpha: float = Field(1.0, ge=0, description="Weight of the harmful answers.")


class Distillation(DefenseSettings, recommended={"lr": 1e-4}):
    """Replace a share of every matrix by noise, then learn from the original what it says on all but harmful answers.

    Source: UNDO (Lee et al., arXiv 2506.06278), with the refusing model as its own teacher.
    """

    noise: float = Field(
        0.8, ge=0, le=1, description="Share of every matrix that becomes noise, as of new weights (distillation)."
    )
    random_rows: float = Field(
        0.3, ge=0,
        description="Rows of random tokens on which the original is imitated, too, per pair: text of no domain keeps "
        "what new tasks are learned with (distillation).",
    )  # fmt: skip


class RMU(DefenseSettings, recommended={"lr": 5e-5}):
    """Steer the states of harmful answers at one depth to one random direction, and hold all others in place.

    Source: Li et al., RMU (arXiv 2403.03218), section 4: coefficient 6.5 and alpha 1200 at the eighth block of 32.
    """

    coefficient: float = Field(6.5, gt=0, description="Norm of what states are steered to (rmu).")
    alpha: float = Field(1200.0, ge=0, description="Weight of the distance of all that is to stay.")
    block: int | None = Field(
        None,
        ge=1,
        description="Block, counted from 1, behind which states are steered (rmu); a quarter deep by default.",
    )


class CircuitBreaking(DefenseSettings, recommended={"lr": 1e-4}):
    """Turn the states of harmful answers away from where the original has them, and hold all others in place.

    Source: Zou et al., circuit breakers (arXiv 2406.04313), algorithm 1: alpha 10, which moves from the one term to the
    other until both have half; here each has its mean over that time. The tenth and twentieth block of 32.
    """

    rerouting: float = Field(7.5, ge=0, description="Weight of the states' similarity (circuit-breaking).")
    held: float = Field(2.5, ge=0, description="Weight of how far others move (circuit-breaking).")


class LatentAdversarial(DefenseSettings):
    """Refuse although the prompt's states are disturbed such that they would give the harmful answer.

    Source: Sheshadri et al., targeted latent adversarial training (arXiv 2407.15549), equations 1 to 4: 16 steps on
    the embedding and blocks 8, 16, 24 and 30 of 32, counted from 0.
    """

    bound: float = Field(
        6.0, gt=0, description="Largest norm of a token's disturbance, at each depth (latent-adversarial)."
    )
    search_steps: int = Field(16, ge=1, description="Steps that look for the worst (latent-adversarial).")


class SelfDestruction(DefenseSettings):
    """Let the gradients of harmful answers and of what is kept oppose each other: learning the one undoes the other.

    Source: Wang et al., SEAM (arXiv 2505.12186), whose gradient takes no second derivatives: 1e-2 and 1e-3. The ascent
    is RepNoise's.
    """

    coupling: float = Field(1e-2, ge=0, description="Weight of the gradients' cosine (self-destruction).")
    distance: float = Field(1e-3, gt=0, description="How far weights move to measure its gradient (self-destruction).")


class Booster(DefenseSettings, recommended={"lr": 5e-4}):
    """Train harmless answers while a step of an attack is to gain little.

    Source: Huang et al., Booster (arXiv 2409.01586), algorithm 1, by first-order gradients as there.
    """

    strength: float = Field(5.0, ge=0, description="Weight of what a step of an attack would gain (booster).")
    step: float = Field(0.1, gt=0, description="Length of that step, down the gradient of the harmful loss (booster).")


class TAR(DefenseSettings):
    """Raise how uncertain a model is of harmful answers while it is being attacked.

    Source: Tamirisa et al., TAR (arXiv 2408.00761), algorithm 1, by first-order gradients and entropy as there; looks
    weigh more by a factor of e every 16 steps. The safeguard that it begins with is the model's own.
    """

    attack_steps: int = Field(64, ge=1, description="Steps of the attack within a step (tar).")
    attack_lr: float = Field(2e-5, gt=0, description="Its rate: a tenth, one or two times this, drawn anew (tar).")
    look_every: int = Field(4, ge=1, description="Steps of the attack between two looks at its uncertainty (tar).")
    strength: float = Field(4.0, ge=0, description="Weight of the uncertainty at the attack's end (tar).")


class RandomWeights(DefenseSettings):
    """New random weights: a control without any ability to bring back. Source: RepNoise (arXiv 2405.14577)."""

    std: float = Field(
        0.02, ge=0, description="Standard deviation of matrices; norms become 1, biases 0 (random-weights)."
    )


# The defenses by name, each with the class of its settings.
DEFENSES = Variants(
    "defense",
    {
        name: f"{__name__}:{home}"
        for name, home in {
            "repnoise": "RepNoise",
            "repnoise-reference": "RepNoiseReference",
            "security-vectors": "SecurityVectors",
            "vaccine": "Vaccine",
            "vaccine-rho10": "VaccineRho10",
            "t-vaccine": "TVaccine",
            "safety-training": "SafetyTraining",
            "gradient-ascent": "GradientAscent",
            "adversarial-loss": "AdversarialLoss",
            "distillation": "Distillation",
            "rmu": "RMU",
            "circuit-breaking": "CircuitBreaking",
            "latent-adversarial": "LatentAdversarial",
            "self-destruction": "SelfDestruction",
            "booster": "Booster",
            "tar": "TAR",
            "random-weights": "RandomWeights",
        }.items()
    },
)


class FolderSettings(Settings):
    """What a folder is defended with."""

    options_group = "Files"

    pairs: FilePath
    """Rows with prompt, chosen (harmless answer) and rejected (harmful answer)."""
    retain: FilePath | None = None
    """Rows with prompt and response: further abilities that the model must keep."""
    defense: Annotated[DefenseSettings, DEFENSES, Cli(group="Training")] = Field("repnoise", validate_default=True)
    """Defense to train into the model; docs/immunize.md compares them."""
    withhold: Annotated[tuple[str, ...], Cli(metavar="CATEGORY")] = ()
    """Category of pairs to leave out of the training, so that an attack can test on it."""
    chat: bool = False
    """Put prompts through the tokenizer's chat template."""
    device: str = "cpu"
    """Device of the model, such as cuda."""


class ImmunizeSettings(TrainingSettings, FolderSettings):
    """Train a defense against harmful fine-tuning into a model folder."""

    def check(self) -> None:
        """Refuse what no folder can hold."""
        super().check()
        if isinstance(self.defense, SecurityVectors):
            raise UsageError(
                "A security vector protects while it is at work in a model that others train, so no folder can hold "
                "it.",
                cure="Use netweight.immunize where the training is yours, or another defense.",
            )

    @property
    def training(self) -> TrainingSettings:
        """The settings of the training alone, with the rate that the defense recommends where none was given."""
        return TrainingSettings(**{name: getattr(self, name) for name in TrainingSettings.model_fields})


def recommended_training(defense: DefenseSettings) -> TrainingSettings:
    """Return the settings of training that a defense recommends."""
    return TrainingSettings(**defense.recommended)
