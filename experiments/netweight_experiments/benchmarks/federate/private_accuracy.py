"""Whether noise with a small ε leaves a federation worth joining: DP-FedAvg, then training at home, Fashion-MNIST.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.private_accuracy SETTINGS --search
    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.private_accuracy SETTING

20 clients of 600 + 600 images; the paper's network, or with `--network small` two layers on images of 14 pixels, which
noise hurts less. Each client gives DP-SGD answers whose ε (opacus's RDP, Poisson sampling, an example of a
client) holds for all rounds together; what it trains at home afterwards without noise never leaves it and costs no ε.
Beside it training at home alone, for as many epochs in all, and FedAvg without noise, then at home, too. The search is
made on another split and seed than the report. The file is written after every arm and keeps the arms that it has.
"""

from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import nn

from netweight.data.images import Images, load
from netweight.methods.federate import Federation, Task, train
from netweight.methods.federate.algorithms.direct import fedavg, local_only
from netweight.methods.federate.algorithms.private_sgd import dp_fedavg
from netweight.methods.federate.partition import federated_images
from netweight.methods.federate.plan import REFERENCE_SPLIT
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.small_cnn import small_cnn
from netweight.methods.federate.task_privacy import noise_for_task, task_guarantee
from netweight_experiments.benchmarks.script import fill

CLIENTS, DELTA, HOME = 20, 1e-5, 10  # epochs at home after the federation
SEARCH = {"seed": 1, "split": REFERENCE_SPLIT + 1}


@cache
def images() -> Images:
    """The data set, read once."""
    return load("fashion-mnist")


def task_of(seed, split, network):
    """The network and the paper's split, as another seed splits it."""
    if network == "cnn":
        halves = small_cnn(1, 28, 10, seed=seed)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 64), nn.ReLU())
            halves = body, nn.Linear(64, 10)
    return Task(*halves, federated_images(images(), clients=CLIENTS, seed=split))


def curve(task, method, rounds, seed):
    """Train; return the run, and [before, after] in percent of every fifth round."""
    done = train(task, method, Federation(rounds=rounds, seed=seed, evaluate_every=5), workers=1)
    return done, {
        r.round: [round(100 * r.mean_before, 2), round(100 * r.mean_after, 2)] for r in done.rounds if r.after
    }


def at_home(task, run, seed):
    """Train every client from the federation's model, without noise; accuracy by epoch."""
    method = local_only(LocalTraining(epochs=1))
    start = run.weights(task.clients[0])
    body, head = task.body, task.head
    for module, layout, vector in ((body, task.body_layout, start.body), (head, task.head_layout, start.head)):
        module.load_state_dict(layout.split(vector))
    return curve(Task(body, head, task.data), method, HOME, seed)[1]


def private(epsilon, rounds, epochs, batch_size, lr, clip, *, seed, split, network):
    """DP-FedAvg within a budget for all rounds, then training at home."""
    task = task_of(seed, split, network)
    training = LocalTraining(epochs=epochs, batch_size=batch_size, lr=lr)
    noise = noise_for_task(task, epsilon, DELTA, batch_size=batch_size, epochs=epochs * rounds)
    method = dp_fedavg(noise, training=training, clip=clip)
    promise = task_guarantee(task, method, dict.fromkeys(task.clients, rounds), DELTA)
    run, shared = curve(task, method, rounds, seed)
    return {"promise": str(promise), "federation": shared, "at home": at_home(task, run, seed + 1)}


def alone(epochs, *, seed, split, network):
    """Training at home from the first weights."""
    task = task_of(seed, split, network)
    return curve(task, local_only(LocalTraining(epochs=1)), epochs, seed)[1]


def plain(rounds, epochs, *, seed, split, network):
    """FedAvg without noise, for as many rounds and epochs, then training at home."""
    task = task_of(seed, split, network)
    run, shared = curve(task, fedavg(LocalTraining(epochs=epochs)), rounds, seed)
    return {"federation": shared, "at home": at_home(task, run, seed + 1)}


def main(
    setting: Annotated[tuple[str, ...], "ROUNDS,EPOCHS,BATCH,LR,CLIP"],
    /,
    *,
    search: bool = False,
    seeds: tuple[int, ...] = (520, 521, 522),
    epsilon: float = 8.0,
    network: Literal["cnn", "small"] = "cnn",
    output: Path,
):
    settings = [tuple(map(float, text.split(","))) for text in setting]
    arms = []
    for chosen in [SEARCH] if search else [{"seed": seed, "split": REFERENCE_SPLIT} for seed in seeds]:
        about, where = chosen | {"network": network}, f"seed {chosen['seed']}, split {chosen['split']}"
        for rounds, epochs, size, lr, clip in settings:
            name = f"dp-fedavg, ε {epsilon:g}, {rounds:g} rounds of {epochs:g} epochs"
            name += f", batch {size:g}, lr {lr:g}, clip {clip:g}"
            numbers = (epsilon, int(rounds), int(epochs), int(size), lr, clip)
            arms.append((f"{name}, {where}", partial(private, *numbers, **about)))
        rounds, epochs = map(int, settings[0][:2])
        arms.append(
            (f"local, {rounds * epochs + HOME} epochs, {where}", partial(alone, rounds * epochs + HOME, **about))
        )
        if not search:
            name = f"fedavg, {rounds} rounds of {epochs} epochs, {where}"
            arms.append((name, partial(plain, rounds, epochs, **about)))
    yield from fill(output, "arms", arms)
