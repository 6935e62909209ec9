"""The paper's size of weights2weights' tables: a recipe names a pipeline, a space of adapters, labels and photographs.

Everything that can be known is checked before a model is opened, and all that is wrong is said at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from torch import Tensor

from netweight.data.images.sources import decode_splits
from netweight.data.memorized_pairs import image_size
from netweight.data.rows import Row, Troubles, read_rows
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image, trained_prediction
from netweight.hf.train_adapters import ATTENTION
from netweight.methods.space.directions import read_labels
from netweight.methods.space.edits import perceptual_distance
from netweight.methods.space.inversion import SETTINGS
from netweight.methods.space.space import WeightSpace
from netweight.metrics.copies import TorchScriptDescriptor
from netweight.nn.lora import Adapter
from netweight.nn.train_lora import AdapterRecipe
from netweight.recipes.entries import configured
from netweight.recipes.recipe import read_mapping, refusal
from netweight.reproduce.space_ground import Fitting, Ground, Stranger, Wanted
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.files import read_adapter

if TYPE_CHECKING:
    from netweight.hf.clip import Clip

__all__ = ["RecipeEdit", "SpaceRecipe", "ground_of_recipe", "read_space_recipe"]


@final
@dataclass(frozen=True)
class RecipeEdit:
    """An edit of table 1.

    Attributes:
        title: Gender, Chubby or Eyes, to stand beside the paper's; or another.
        column: The label.
        text: What images should show after it, for CLIP.
        prompt: What asks for it in words; without it prompting has no row.
        slider: The file of a Concept Slider; without it sliders have no row.
        confounders: Labels that are to stay as they are.
    """

    title: str
    column: str
    text: str
    prompt: str | None = None
    slider: Path | None = None
    confounders: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class SpaceRecipe:
    """What the paper's scale is measured on. Paths start at the current folder.

    Attributes:
        model: Folder of the pipeline that the adapters are of.
        space: Folder of `netweight space fit`.
        labels: Table of the adapters' attributes.
        edits: Edits of table 1.
        photographs: Table of people who are in no bank, columns person and image; a column use says "learn" (the first
            of these is the one image) or "test".
        face: A face recognition network in TorchScript.
        face_sha256: Its SHA-256: the file is a program.
        clip: A folder of transformers with a CLIP.
        bank: The bank that the space was fitted to, where the space does not stand alone.
        name_column: Column of the labels with names of adapters.
        lpips: A backbone for LPIPS; without it 1 − SSIM stands for it and is called so.
        face_side: Pixels of the network's images.
        prompt: Of a person.
        device: Where the model goes.
        images: Images per person.
        guidance: Of generations.
        steps: Of their scheduler.
        people: So many are edited.
        held: So many adapters, the last ones, are left out where directions are found.
        rows: Most images at a time.
        together: People who are trained or inverted at a time.
        rank: Of DreamBooth's adapters.
        scale: Of their change, alpha / rank.
        adapter_steps: Of their training.
        learning_rate: Of their training.
        inversion: Settings of the inversion, by name.
    """

    model: Path
    space: Path
    labels: Path
    edits: tuple[RecipeEdit, ...]
    photographs: Path
    face: Path
    face_sha256: str
    clip: Path
    bank: Path | None = None
    name_column: str = "name"
    lpips: Path | None = None
    face_side: int = 160
    prompt: str = "sks person"
    device: str = "cuda"
    images: int = 4
    guidance: float = 3.0
    steps: int = 50
    people: int = 100
    held: int = 1000
    rows: int = 8
    together: int = 1
    rank: int = 1
    scale: float = 27.0
    adapter_steps: int = 800
    learning_rate: float = 1e-4
    inversion: Literal["default", "reference"] = "default"

    @property
    def files(self) -> dict[str, Path]:
        """The files that it names, by key."""
        names = ("labels", "photographs", "face", "lpips")
        found = {name: path for name in names if (path := getattr(self, name)) is not None}
        return found | {f"edits, {one.title}": one.slider for one in self.edits if one.slider is not None}

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that it names, by key."""
        names = ("model", "space", "clip", "bank")
        return {name: path for name in names if (path := getattr(self, name)) is not None}


def read_space_recipe(path: Path) -> SpaceRecipe:
    """Read a recipe and check everything that can be known before a model is opened.

    Raises:
        UsageError: It cannot be read, or something in it is wrong or missing; the message lists every problem.
    """
    problems: list[str] = []
    recipe = configured(SpaceRecipe, read_mapping(path, "the keys of recipes/space-tables.yaml"), "", problems)
    if recipe is not None:
        problems += [f"{key}: there is no file {file}." for key, file in recipe.files.items() if not file.exists()]
        problems += [f"{key}: there is no folder {one}." for key, one in recipe.folders.items() if not one.is_dir()]
        if len({one.title for one in recipe.edits}) < max(len(recipe.edits), 1):
            problems.append("edits: give at least one, each title once.")
        counts = ("images", "steps", "rows", "together", "rank", "adapter_steps", "face_side")
        problems += [f"{key}: must be at least 1." for key in counts if getattr(recipe, key) < 1]
        problems += [f"{key}: must be at least 10." for key in ("people", "held") if getattr(recipe, key) < 10]
    if problems or recipe is None:
        raise refusal(
            path,
            problems,
            cure="recipes/space-tables.yaml says what each key is for and where the files come from.",
        )
    return recipe


def ground_of_recipe(path: Path) -> Ground:
    """Open what a recipe names.

    Raises:
        UsageError: Something in it is wrong.
        Unsupported: The pipeline is of a kind that is not known.
        UnsafeInput: The TorchScript file has another digest.
        MissingExtra: Pillow or transformers is not installed.
    """
    from netweight.hf.clip import Clip

    recipe = read_space_recipe(path)
    face = TorchScriptDescriptor(
        recipe.face, recipe.face_sha256, name="face recognition", side=recipe.face_side, mean=(0.5,) * 3,
        deviation=(0.5,) * 3,
    )  # fmt: skip
    bank = None if recipe.bank is None else AdapterBank.open(recipe.bank)
    space = WeightSpace.open(recipe.space, bank)
    labels = read_labels(recipe.labels, space.names, key=recipe.name_column)
    clip = Clip(recipe.clip)
    model = load_text_to_image(recipe.model, device=recipe.device)
    count = len(space.names)
    if count < 2 * recipe.held:
        raise UsageError(f"{recipe.held} of {count} adapters cannot be held out.", cure="Lower held in the recipe.")
    adapters = AdapterRecipe(
        rank=recipe.rank, scale=recipe.scale, steps=recipe.adapter_steps, learning_rate=recipe.learning_rate
    )
    return Ground(
        model=model,
        space=space,
        labels=labels,
        wanted=tuple(
            Wanted(one.title, one.column, one.prompt, one.confounders, one.text, one.slider is not None)
            for one in recipe.edits
        ),
        held=tuple(range(count - recipe.held, count)),
        people=recipe.people,
        strangers=_strangers(recipe.photographs, recipe.prompt, image_size(model)),
        prompts=(recipe.prompt,),
        seeds=tuple(range(recipe.images)),
        guidance=recipe.guidance,
        steps=recipe.steps,
        identity=lambda without: face,
        identity_name=f"cosine by {face.name}, {face.sha256[:8]}",
        distance=perceptual_distance(recipe.lpips),
        match=lambda wanted, images: _aligned(clip, wanted, images),
        match_name=f"alignment by {clip.name}, × 100",
        effect=None,
        read=None,
        attributes=(),
        sliders=lambda: _sliders(recipe.edits),
        fitting=Fitting(
            adapters, ATTENTION, 1, 1, SETTINGS[recipe.inversion], trained_prediction(model), recipe.together
        ),
        small=False,
        differs=(
            f"The model is {model.name}, with {count} adapters; the paper has Stable Diffusion 1.5 and 64,974.",
            "Faces are not found and cut out before they are compared, as the paper does with MTCNN: give a network "
            "that does so, or photographs and prompts that show faces alone.",
            "Adapters are trained without prior images.",
        ),
        rows=recipe.rows,
    )  # fmt: skip


def _aligned(clip: Clip, wanted: Wanted, images: Tensor) -> Tensor:
    return 100 * clip.alignment(images, [wanted.text] * len(images))


def _sliders(edits: Sequence[RecipeEdit]) -> Mapping[str, Adapter]:
    return {one.title: read_adapter(one.slider) for one in edits if one.slider is not None}


def _strangers(path: Path, prompt: str, size: tuple[int, int]) -> tuple[Stranger, ...]:
    """People of a table, in its order."""
    rows = read_rows(path)
    rows.need("person", "image")
    troubles, people = Troubles(rows.name), dict[str, dict[str, list[Row]]]()
    for row in rows.rows:
        use = row.values.get("use") or "learn"
        if use not in ("learn", "test"):
            troubles.add(row.where, f"use is {use!r}, not learn or test")
        elif not (path.parent / str(row.values.get("image"))).is_file():
            troubles.add(row.where, f"there is no file {path.parent / str(row.values.get('image'))}")
        else:
            people.setdefault(str(row.values["person"]), {"learn": [], "test": []})[use].append(row)
    troubles.refuse("Name a person and an image file in every row; paths start at the table's folder.")
    bare = [name for name, found in people.items() if not found["learn"] or not found["test"]]
    if bare or len(people) < 5:
        raise UsageError(
            f"{path}: {bare[0]!r} has no photograph to learn from, or none to test on." if bare
            else f"{path}: {len(people)} people are too few.",
            cure="Give 5 people or more, each with rows of both uses.",
        )  # fmt: skip

    def opened(part: Sequence[Row]) -> Tensor:
        named = [(f"{rows.name}, {row.where}", str(path.parent / row.values["image"])) for row in part]
        images: Tensor = decode_splits([named], of=rows.name, size=size)[0].float() / 255
        return images.expand(-1, 3, -1, -1)

    return tuple(
        Stranger(name, opened(found["learn"]), (prompt,) * len(found["learn"]), opened(found["test"]))
        for name, found in people.items()
    )
