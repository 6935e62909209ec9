"""The registration of `netweight attack gradient-inversion`; it imports nothing heavy."""

from typing import Any

from netweight.registry import ATTACK_PLAN, RESULTS, SEED, Argument, Attack, lazy

_FOLDER = "netweight.attacks.gradient_inversion.attack_files"

GRADIENT_INVERSION: Attack[Any] = Attack(
    "gradient-inversion",
    lazy("netweight.attacks.gradient_inversion.settings:GradientInversionSettings"),
    attack=lazy(f"{_FOLDER}:attack"),
    title="Gradient inversion",
    summary="Reconstruct private images from the update that a client sent.",
    description="UPDATE is a .safetensors file with a client's update. The model's code is imported from the current "
    "folder or from what is installed, and is run. OUT receives the images as PNG files, a report, and checkpoints of "
    "the search, from which a second call continues. Exits with 1 if --max-psnr is given and the reconstruction is "
    "better than that.",
    example="netweight attack gradient-inversion update.safetensors --model mynet:make --shape 1,3,32,32 --out images",
    arguments=(
        Argument("update", "file"),
        RESULTS,
        SEED.named("seed", help="Seed of the starting points."),
        ATTACK_PLAN,
    ),
    check=lazy(f"{_FOLDER}:check"),
    tested=lazy("netweight.attacks.gradient_inversion.settings:tested"),
    takes=("update",),
)
