"""Everything that the five papers show as a table or a figure, and how far it can be measured here.

The list is what `netweight reproduce --list` prints. What is registered can be run; for the rest the catalog says why
it cannot be. Titles are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from netweight_experiments.tables.published import published, published_ids
from netweight_experiments.tables.registry import registered, unmet

State: TypeAlias = Literal["reproduced here", "small stand-in", "needs data, GPU or package", "cannot be"]

# Beginning of an id → the paper.
PAPERS = {
    "neuzip": "NeuZip (arXiv 2410.20650)",
    "hyperfl": "HyperFL (arXiv 2412.07187)",
    "repnoise": "RepNoise (arXiv 2405.14577)",
    "nemo": "NeMo (arXiv 2406.02366)",
    "w2w": "weights2weights (arXiv 2406.09413)",
}

_FIGURES = {
    "neuzip-fig1": "Histograms of sign, exponent and mantissa of a trained model",
    "neuzip-fig2": "Memory of four ways to train a layer",
    "neuzip-fig3": "Memory against perplexity of lossy and lossless compression",
    "neuzip-fig4": "Throughput of compression and decompression by matrix size",
    "neuzip-fig5": "Histograms of sign, exponent and mantissa of a randomly initialized model",
    "hyperfl-fig1": "How HyperFL differs from defenses of shared gradients",
    "hyperfl-fig2": "The HyperFL framework",
    "hyperfl-fig3": "The HyperFL-LPM framework",
    "hyperfl-fig4": "Training loss by round, and change of the generated parameters",
    "hyperfl-fig5": "Images reconstructed by the inverting-gradients attack",
    "hyperfl-fig6": "Images reconstructed by the ROG attack",
    "hyperfl-fig7": "Images reconstructed by the tailored attack",
    "hyperfl-fig8": "Label distribution of the clients, and a map of their embeddings",
    "repnoise-fig1": "The idea of representation noising",
    "repnoise-layer-distances": "Distance between models' weights, layer by layer",
    "repnoise-pca": "Representations before and after the defense, in two principal components",
    "nemo-fig1": "The steps of the method",
    "nemo-fig3": "Similarity of noise differences, memorized against other prompts",
    "nemo-fig5": "Number of neurons per prompt and per layer",
    "nemo-fig6": "Image quality against the number of blocked neurons",
    "nemo-fig7": "Effect of scaling the neurons instead of switching them off",
    "nemo-thresholds": "Number of neurons found, by initial and refinement threshold",
    "nemo-ssim-by-type": "Similarity scores by kind of memorization",
    "nemo-shared-neurons": "What the neurons shared by several prompts do",
    "w2w-fig8": "Entanglement and identity kept, against the number of models",
    "w2w-components": "Edits and inversion with different numbers of components",
    "w2w-histograms": "Histograms of the first coefficients",
    "w2w-traversal": "Images along the first three components",
}
_TABLES = {
    "nemo-table1": "Memorization, diversity and alignment under different mitigations",
    "nemo-runtime": "Running time of each step",
    "nemo-ablation": "Ablation and sensitivity of the mitigation",
}
_UNSEEN = tuple(f"repnoise-table{number}" for number in (8, 10, 12, 13, 21, 22))
_DRAWING = "a drawing of the idea; it shows no measurement"
_CANNOT = {
    "hyperfl-fig1": _DRAWING,
    "hyperfl-fig2": _DRAWING,
    "hyperfl-fig3": _DRAWING,
    "repnoise-fig1": _DRAWING,
    "nemo-fig1": _DRAWING,
    "w2w-table3": "a study with 25 people; their judgment cannot be computed",
    "w2w-table6": "a study with people; their judgment cannot be computed",
} | dict.fromkeys(_UNSEEN, "neither its numbers nor what it measures are in the summaries that this work was made from")


@dataclass(frozen=True)
class Item:
    """One table or figure of a paper."""

    id: str  # its name here
    paper: str  # the paper it belongs to
    title: str  # what it shows
    state: State  # how far it is measured
    reason: str  # what is missing, why it cannot be, or what the small scale lacks; may be empty
    numbers: bool  # whether published numbers are at hand
    command: str  # what measures it at its largest scale here or elsewhere; empty where nothing does


def items() -> tuple[Item, ...]:
    """Return every table and figure of the five papers, in the papers' order, with its state."""
    numbered = dict.fromkeys(published_ids())
    everything = [*numbered, *_TABLES, *_UNSEEN, *_FIGURES]
    everything += [table_id for table_id in registered() if table_id not in everything]
    return tuple(
        Item(table_id, paper, title_of(table_id), *_state(table_id), table_id in numbered, _command(table_id))
        for prefix, paper in PAPERS.items()
        for table_id in everything
        if table_id.startswith(f"{prefix}-")
    )


def title_of(table_id: str) -> str:
    """Return what a table or figure shows; its id where the catalog has no title."""
    numbers = published(table_id)
    if numbers is not None:
        return numbers.title
    if table_id in _UNSEEN:
        return "A table of the appendix that is not at hand"
    return (_TABLES | _FIGURES).get(table_id, table_id)


def _state(table_id: str) -> tuple[State, str]:
    entry = registered().get(table_id)
    if entry is None:
        return "cannot be", _CANNOT.get(table_id, "no function of this version measures it")
    missing = "; ".join(unmet(entry.needs))
    if missing:
        return "needs data, GPU or package", missing
    at_size = f"paper scale needs {' and '.join(entry.paper_needs)}" if entry.paper_needs else ""
    return ("small stand-in" if entry.stand_in else "reproduced here"), at_size


_PLACEHOLDERS = {"model": "--model FOLDER", "judge": "--judge MODULE:FUNCTION", "recipe": "--recipe FILE"}


def _command(table_id: str) -> str:
    """What to type where everything that it needs is there."""
    entry = registered().get(table_id)
    if entry is None:
        return ""
    data = "NETWEIGHT_DATA=FOLDER " if any(need.startswith("data:") for need in entry.needs) else ""
    if not entry.paper_needs:
        return f"{data}netweight reproduce {table_id}"
    options = "".join(f" {_PLACEHOLDERS[option]}" for option in entry.options if option in _PLACEHOLDERS)
    return f"{data}netweight reproduce {table_id} --scale paper{options}"
