"""Localizations in a report: how many neurons prompts need, in which layers, and which prompts share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

from netweight.core.progress import QUIET
from netweight.methods.forget.audit import neuron_findings
from netweight.methods.forget.results import Localization
from netweight.report.finding import Column, Figure, Finding, Table
from netweight.report.plots import bars, heat_maps, histogram
from netweight.report.report import Report

__all__ = ["add_section", "counts_figure", "layers_figure", "overlap", "overlap_figure", "prompts_table"]

Groups = Mapping[str, Sequence[Localization]]
"""Kind of prompt → localizations."""
_MOST = 40
"""Prompts of an overlap's matrix, at most."""


def counts_figure(groups: Groups) -> Figure | None:
    """Draw how many prompts need how many neurons; None if nothing was looked for.

    Args:
        groups: Localizations by kind.

    Returns:
        The figure, or None.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    counts = {name: [len(each.neurons) for each in _searched(found)] for name, found in groups.items()}
    counts = {name: values for name, values in counts.items() if values}
    if not counts:
        return None
    words = "; ".join(
        f"{name}: median {median(values):g}, {min(values)} to {max(values)}" for name, values in counts.items()
    )
    return histogram(
        counts,
        alt=f"Histogram of the number of neurons per prompt. {words}.",
        caption=f"Neurons per prompt. {words}.",
        xlabel="neurons",
        ylabel="prompts",
    )


def layers_figure(groups: Groups, layers: Sequence[str]) -> Figure | None:
    """Draw the mean number of neurons per prompt in every layer; None if nothing was looked for.

    Args:
        groups: Localizations by kind.
        layers: Names of the layers, in their order.

    Returns:
        The figure, or None.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    means = {
        name: [mean(len(set(each.refined.get(layer, ()))) for each in searched) for layer in layers]
        for name, found in groups.items()
        if (searched := _searched(found))
    }
    if not means:
        return None
    return bars(
        means,
        [str(number) for number in range(len(layers))],
        alt="Mean number of neurons per prompt in each value layer.",
        caption="Neurons per prompt and layer, the mean. Layers: "
        + "; ".join(f"{number}: {layer}" for number, layer in enumerate(layers))
        + ".",
        xlabel="layer",
        ylabel="neurons, mean",
    )


def overlap(first: Localization, second: Localization) -> float:
    """Return how far two prompts' neurons are the same: the share of common ones among all of both (Jaccard).

    Args:
        first: What was found for one prompt.
        second: What was found for another.
    """
    together = len(first.neurons | second.neurons)
    return len(first.neurons & second.neurons) / together if together else 0.0


def overlap_figure(found: Sequence[Localization]) -> Figure | None:
    """Draw which prompts share neurons, for the first 40 that have some; None if there are none.

    Args:
        found: What was found, prompt by prompt.

    Returns:
        The figure, or None.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    shown = [each for each in found if each.neurons][:_MOST]
    if not shown:
        return None
    return heat_maps(
        {"common neurons, as a share of both": [[overlap(one, other) for other in shown] for one in shown]},
        rows=[_short(each.prompt) for each in shown],
        columns=[str(number + 1) for number in range(len(shown))],
        alt="Matrix of the share of neurons that every two prompts have in common.",
        caption="Neurons that every two prompts have in common, as a share of all neurons of the two; columns are in "
        "the order of rows.",
    )


def prompts_table(found: Sequence[Localization]) -> Table:
    """Return a table of prompts with the number of their neurons and what blocking them came to.

    Args:
        found: What was found, prompt by prompt.
    """
    return Table(
        "Neurons by prompt",
        (
            "prompt", "status", Column("initial", "neurons"), Column("refined", "neurons"),
            Column("similarity left", better="lower"), Column("threshold"),
        ),
        [
            (
                each.prompt, each.status, sum(len(set(part)) for part in each.initial.values()), len(each.neurons),
                each.refined_similarity, each.threshold,
            )
            for each in found
        ],
        ["Unresolved: even the last stage of the search did not bring every seed to the threshold."],
    )  # fmt: skip


def add_section(
    report: Report, found: Sequence[Localization], layers: Sequence[str], *, figures: Sequence[Figure] = ()
) -> list[Finding]:
    """Add a section on neurons to a report: findings, distributions, overlaps, a table of prompts.

    Args:
        report: The report.
        found: Localizations of one model, at least one.
        layers: Names of its value layers, in their order.
        figures: Further pictures, such as grids of images, which come first.

    Returns:
        The section's findings.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    groups = {"prompts": found}
    drawn = (counts_figure(groups), layers_figure(groups, layers), overlap_figure(found))
    findings = neuron_findings(found, None, seed=0, progress=QUIET)
    report.section(
        "Neurons that prompts are memorized in",
        findings,
        figures=[*figures, *(figure for figure in drawn if figure is not None)],
        tables=[prompts_table(found)],
        question="Which neurons does each memorized prompt need?",
    )
    return findings


def _searched(found: Sequence[Localization]) -> list[Localization]:
    return [each for each in found if each.status in ("resolved", "unresolved")]


def _short(prompt: str, most: int = 32) -> str:
    return prompt if len(prompt) <= most else prompt[: most - 1] + "…"
