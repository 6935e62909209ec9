"""Training adapters of the small faces pipeline: many in one forward pass against one at a time, and against peft.

    python -m netweight_experiments.benchmarks space.adapter_training

All ways train the same people from the same noise with Adam, rank 1 on queries and values of all attention, on one
thread. Processor seconds per adapter and step, medians over rounds that take all ways in turn, so that what else the
machine does meets all alike; ratios are against one adapter at a time. peft's loop is its users': an adapter added to
the U-Net, one backward pass and one optimizer step for each batch of one person. `--each` is the pictures of a person
at a step; 1 is the reference's. A miniature on a CPU: larger models leave less to gain there, and accelerators more.
"""

import statistics
import time

import torch

from netweight.core.progress import Progress
from netweight.hf.adapters import ATTENTION, Subject, train_pictures
from netweight.hf.load_pipeline import text_to_image
from netweight.nn import combined
from netweight.nn.train_lora import AdapterRecipe
from netweight.toys.faces_pipeline import FaceBank, faces_pipeline
from netweight_experiments.timing import ratios
from netweight_experiments.toys.drawn_worlds import person_name


def subjects(count):
    bank = FaceBank()
    found = []
    for number in range(count):
        prompts, pictures = bank.photographs(number)
        found.append(Subject(person_name(number), pictures, tuple(prompts)))
    return found


def together(people, recipe, each):
    """Seconds per adapter and step of all people in one forward pass."""
    model = text_to_image(faces_pipeline())
    begun = time.process_time()
    train_pictures(model, people, recipe, layers=ATTENTION, each=each)
    return (time.process_time() - begun) / recipe.steps / len(people)


def by_peft(person, recipe, each):
    """Seconds per step of one adapter of peft, trained as its examples do."""
    import peft

    model = text_to_image(faces_pipeline())
    unet = model.denoiser.requires_grad_(False)
    clean, text = model.to_latents(person.images), model.embed(person.prompts)
    begun = time.process_time()
    unet.add_adapter(peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=["to_q", "to_v"]))
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=recipe.learning_rate, fused=True)
    noise = torch.Generator().manual_seed(0)
    for _ in range(recipe.steps):
        rows = torch.randint(len(clean), (each,), generator=noise)
        timesteps = torch.randint(model.levels, (each,), generator=noise)
        drawn = torch.randn(each, *model.latent_shape, generator=noise)
        model.training_errors(clean[rows], drawn, timesteps, text.rows(rows)).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.process_time() - begun) / recipe.steps


def measured(counts, each, steps, rounds):
    """Seconds of every way, by name."""
    people, recipe = subjects(max(counts)), AdapterRecipe(steps=steps)
    ways = {"peft, one at a time": lambda: by_peft(people[0], recipe, each)}
    for count in counts:
        ways[f"{count} in one forward pass"] = lambda count=count: together(people[:count], recipe, each)
    seconds = {name: [] for name in ways}
    for _ in Progress().track(range(rounds), f"{each} pictures a step", unit="rounds"):
        for name, way in ways.items():
            seconds[name].append(way())
    return seconds


def same_adapters():
    """How far adapters trained together are from those trained alone, relative to their size."""
    model, people, recipe = text_to_image(faces_pipeline()), subjects(3), AdapterRecipe(steps=20)
    whole = train_pictures(model, people, recipe).stack
    away = []
    for number, person in enumerate(people):
        one = train_pictures(model, [person], recipe).stack
        apart = combined([whole.adapter(number), one.adapter(0)], [1.0, -1.0])
        away.append(apart.norm() / one.adapter(0).norm())
    return max(away)


def main(*, adapters: tuple[int, ...] = (1, 8, 32), each: tuple[int, ...] = (1, 4), steps: int = 10, rounds: int = 5):
    rows = []
    for count in each:
        times = measured(adapters, count, steps, rounds)
        for name, values in times.items():
            faster = ratios(times, "1 in one forward pass", name)
            rows.append(
                {"pictures a step": count, "way": name, "ms": 1e3 * statistics.median(values),
                 "times as fast": statistics.median(faster), "least": min(faster), "most": max(faster)}
            )  # fmt: skip
            print(rows[-1], flush=True)
    return {"rows": rows, "together against alone": same_adapters()}
