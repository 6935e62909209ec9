"""Settings of `netweight attack gradient-inversion`: the model, the update, the attacker's knowledge and the search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias, final

import click
from pydantic import Field

from netweight.errors import UsageError
from netweight.settings import Cli, Settings

_File: TypeAlias = Annotated[Path, Cli(type=click.Path(path_type=Path, exists=True))]


@final
class GradientInversionSettings(Settings):
    """An attack on the update of one client."""

    model: Annotated[str, Cli(metavar="MODULE:NAME")] = Field(
        description="The network as MODULE:NAME: a torch module, or a function that returns one."
    )
    params: _File | None = Field(
        default=None,
        description="Weights from which the client started; by default those that the network is made with.",
    )
    shape: Annotated[tuple[int, ...], Cli(comma=True, metavar="N,C,H,W")] = Field(
        description="Shape of the client's batch."
    )
    labels: Annotated[tuple[int, ...] | None, Cli(comma=True, metavar="L,L,...")] = Field(
        default=None,
        description="Labels of the batch, if they are known; by default they are recovered from the update.",
    )
    classes: int | None = Field(default=None, ge=2, description="Number of classes, for dlg without labels.")
    attack: Literal["ig", "dlg", "rog", "first-layer"] = Field(
        default="ig",
        description="ig minimizes the cosine distance of gradients with total variation; dlg the squared "
        "distance, labels included; rog searches a coarse latent; first-layer solves the first "
        "layer without a search.",
    )
    layer: str | None = Field(default=None, description="Name of the first layer, for first-layer.")
    sent: Literal["gradient", "difference"] = Field(
        default="gradient",
        description="Kind of update: the gradient of one batch, or the difference of the parameters after and "
        "before local SGD.",
    )
    lr: float | None = Field(default=None, gt=0, description="The client's learning rate, for a difference.")
    local_steps: int = Field(default=1, ge=1, description="The client's local steps.")
    batch_size: int | None = Field(default=None, ge=1, description="Images per local step; all by default.")
    momentum: float = Field(default=0.0, description="The client's momentum.")
    weight_decay: float = Field(default=0.0, description="The client's weight decay.")
    mean: Annotated[tuple[float, ...], Cli(comma=True, metavar="M,...")] = Field(
        default=(0.0,), description="Mean that the client subtracts from each channel."
    )
    std: Annotated[tuple[float, ...], Cli(comma=True, metavar="S,...")] = Field(
        default=(1.0,), description="Standard deviation by which the client divides each channel."
    )
    steps: int | None = Field(default=None, ge=1, description="Steps of the search; each attack has its own default.")
    restarts: int = Field(default=1, ge=1, description="Number of starting points.")
    total_variation: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the total variation in ig, 0.01 by default; a larger one gives smoother images.",
    )
    reference: _File | None = Field(
        default=None, description="The true images, within 0 and 1, to measure against (.safetensors)."
    )
    lpips_backbone: _File | None = Field(default=None, description="Weights of AlexNet or VGG-16, for LPIPS.")
    lpips_heads: _File | None = Field(default=None, description="Heads of LPIPS 0.1.")
    max_psnr: float | None = Field(default=None, description="Exit with 1 if the mean PSNR is above this many dB.")

    def check(self) -> None:
        """Refuse before any work what would fail, or pass unseen, after it."""
        shape = self.shape
        if len(shape) != 4 or min(shape) < 1 or shape[1] not in (1, 3):
            raise UsageError(
                f"--shape {shape} is not (n, c, h, w) of gray or color images.",
                cure="Write it as 1,3,32,32; c is 1 or 3.",
            )
        if any(len(values) not in (1, shape[1]) for values in (self.mean, self.std)) or min(self.std) <= 0:
            raise UsageError(
                f"--mean {self.mean} and --std {self.std} do not normalize images of {shape[1]} channels.",
                cure="Give one number, or one per channel; deviations are above 0.",
            )
        if self.labels is not None and len(self.labels) != shape[0]:
            raise UsageError(f"{len(self.labels)} labels were given for {shape[0]} images.")
        if self.sent == "difference" and self.lr is None:
            raise UsageError("A difference of parameters needs the client's learning rate.", cure="Give --lr.")
        local = ("lr", "local_steps", "batch_size", "momentum", "weight_decay")
        set_ = [n for n in local if getattr(self, n) != type(self).model_fields[n].default]
        if self.sent == "gradient" and set_:
            raise UsageError(
                f"{', '.join('--' + name.replace('_', '-') for name in set_)} can be given only for local "
                f"training, but the "
                "client sent a gradient.",
                cure="Give --sent difference if the client sent the change of its parameters.",
            )
        if self.reference is None and (self.max_psnr is not None or self.lpips_backbone is not None):
            raise UsageError("PSNR and LPIPS compare with the true images.", cure="Give --reference.")

    @property
    def files(self) -> list[Path]:
        """The files that the attack reads."""
        paths = (self.params, self.reference, self.lpips_backbone, self.lpips_heads)
        return [path for path in paths if path is not None and path.is_file()]


def tested(settings: GradientInversionSettings) -> list[tuple[str, str]]:
    """Return the attack, its limits, and what the attacker knows: names and values.

    Args:
        settings: Settings of the attack.
    """
    steps = "the default of the attack" if settings.steps is None else f"{settings.steps:,}"
    rows = [
        ("attack", settings.attack),
        ("images of the batch", str(settings.shape[0])),
        ("steps of the search", steps),
        ("starting points", str(settings.restarts)),
        ("labels", "recovered from the update" if settings.labels is None else "known to the attacker"),
        ("update", settings.sent),
    ]
    if settings.max_psnr is not None:
        rows.append(("target", f"a mean PSNR of at most {settings.max_psnr:g} dB"))
    return rows
