"""HyperFL's figure 8: who has which labels, and whether clients' embeddings end near those of similar clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from netweight.report.finding import Column, Finding
from netweight.reproduce.federated_run import FederatedRun, plan_of
from netweight.reproduce.registry import Measured, Row, Scale, table

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.report.finding import Figure

__all__ = ["figure8"]


@table("hyperfl-fig8", needs=("evidence",), stand_in=True)
def figure8(scale: Scale, out: Path, *, rounds: int | None = None) -> Measured:
    """Draw the label distribution of 20 clients and a t-SNE map of their embeddings after training.

    Args:
        scale: "small" trains 10 rounds on scikit-learn's digits; "paper" 50 on EMNIST letters.
        out: The federation's checkpoint is kept here.
        rounds: Another number of rounds.
    """
    import torch

    from netweight.core.progress import Progress
    from netweight.methods.federate import train

    run = FederatedRun("digits", "hyperfl", rounds=rounds or 10)
    if scale == "paper":
        run = FederatedRun("emnist-letters", "hyperfl", rounds=rounds or 50)
    plan = plan_of(run)
    task = plan.task()
    done = train(task, plan.make_method(task), plan.settings(), folder=out / run.name, progress=Progress("auto"))
    embeddings = torch.stack([done.private[number]["embedding"] for number in task.clients])
    classes = int(max(task.client(number).train[1].max() for number in task.clients)) + 1
    counts = torch.stack([task.client(n).train[1].bincount(minlength=classes) for n in task.clients])
    groups = _groups(counts)
    within, between = _distances(embeddings, groups)
    p = _permutation_test(embeddings, groups, seed=run.seed)
    separated = Finding(
        "distance between embeddings of clients with the same dominant classes, over that of others",
        within / between,
        better="lower",
        target=1.0,
        n=len(embeddings),
        seeds=(run.seed,),
        detail={"permutation test, one-sided p": p, "within": within, "between": between},
    )
    return Measured(
        columns=(Column("mean distance of embeddings", "", None),),
        rows=(Row("same dominant classes", (within,)), Row("other dominant classes", (between,))),
        differs=(f"{run.data}, {run.rounds} rounds; the paper draws EMNIST byclass after its training.",),
        findings=(separated,),
        figures=(_label_figure(counts), _map(embeddings, groups, run.seed)),
    )


def _groups(counts: Tensor) -> list[int]:
    """Number clients by their three most frequent classes."""
    tops = [tuple(sorted(row.topk(3).indices.tolist())) for row in counts]
    order = list(dict.fromkeys(tops))
    return [order.index(top) for top in tops]


def _distances(embeddings: Tensor, groups: list[int]) -> tuple[float, float]:
    import torch

    apart = torch.cdist(embeddings, embeddings)
    group = torch.tensor(groups)
    same = (group[:, None] == group[None]) & ~torch.eye(len(groups), dtype=torch.bool)
    return float(apart[same].mean()), float(apart[group[:, None] != group[None]].mean())


def _permutation_test(embeddings: Tensor, groups: list[int], *, seed: int, draws: int = 2000) -> float:
    """Return how often shuffled groups are as well separated as the true ones."""
    import torch

    from netweight.core import seeds

    generator = seeds.torch_generator(seed, "permutations")
    within, between = _distances(embeddings, groups)
    as_good = 0
    for _ in range(draws):
        shuffled = [groups[index] for index in torch.randperm(len(groups), generator=generator).tolist()]
        a, b = _distances(embeddings, shuffled)
        as_good += a / b <= within / between
    return (as_good + 1) / (draws + 1)


def _label_figure(counts: Tensor) -> Figure:
    from netweight.report.plots import canvas, to_figure

    with canvas(1) as (drawing, (axes,)):
        clients, classes = (range(size) for size in counts.shape)
        image = axes.pcolormesh(clients, classes, counts.T.numpy(), shading="nearest", cmap="viridis")
        axes.set_xticks(clients[::5])
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        scale = drawing.colorbar(image, ax=axes, label="training images")
        assert scale.solids is not None
        scale.solids.set_rasterized(False)  # an SVG of a report must not hold pictures
        return to_figure(
            drawing,
            alt="Number of training images of each class that each of the 20 clients has.",
            caption="(a) Label distribution of the clients.",
        )


def _map(embeddings: Tensor, groups: list[int], seed: int) -> Figure:
    from sklearn.manifold import TSNE  # type: ignore[import-untyped]

    from netweight.report.plots import canvas, series_color, to_figure

    places = TSNE(perplexity=5, random_state=seed, init="pca").fit_transform(embeddings.numpy())
    with canvas(1) as (drawing, (axes,)):
        for group in sorted(set(groups)):
            chosen = [index for index, own in enumerate(groups) if own == group]
            axes.scatter(places[chosen, 0], places[chosen, 1], color=series_color(group), label=f"group {group + 1}")
        for index, (x, y) in enumerate(places):
            axes.annotate(str(index), (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(fontsize=7, frameon=False)
        return to_figure(
            drawing,
            alt="t-SNE map of the clients' embeddings, colored by their dominant classes.",
            caption="(b) t-SNE of the clients' embeddings; a color for each set of dominant classes.",
        )
