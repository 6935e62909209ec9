"""NeuZip's figure 2: where the memory of a training step goes, four ways, as a measured ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.report.finding import Column, Finding
from netweight.reproduce.neuzip_training import digests_of_texts, pretrained
from netweight.reproduce.pretraining import Pretraining
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.training_ways import COMPRESSED, LOMO, VANILLA

if TYPE_CHECKING:
    from netweight.report.finding import Figure

__all__ = ["figure2"]

_MIB = 1 << 20
_STACKS = {
    "vanilla": {"way": VANILLA, "checkpointing": False},
    "checkpointing": {"way": VANILLA, "checkpointing": True},
    "checkpointing + LOMO": {"way": LOMO, "checkpointing": True},
    "checkpointing + LOMO\n+ NeuZip": {"way": COMPRESSED, "checkpointing": True},
}
_OPTIMIZERS = ("SGD", "AdamW")


@table("neuzip-fig2", needs=("llm", "evidence", "data:text"), stand_in=True)
def figure2(scale: Scale, out: Path) -> Measured:
    """The peak of one training step by what it is for: plain, with checkpointing, layer by layer, compressed.

    Args:
        scale: "small" and "paper" measure the same miniature: the paper's figure is a drawing without numbers.
        out: Finished runs are kept here.

    Raises:
        NetweightError: A run failed.
    """
    from netweight.metrics.memory import PARTS

    asked = [(optimizer, label) for optimizer in _OPTIMIZERS for label in _STACKS]
    configs = [
        Pretraining(**_STACKS[label], optimizer=optimizer, learning_rate=1e-4, steps=5, held_out=0)  # type: ignore[arg-type]
        for optimizer, label in asked
    ]
    found = dict(zip(asked, pretrained(configs, out), strict=True))
    rows = tuple(
        Row(_row(optimizer, label), (*(result["parts"][part] / _MIB for part in PARTS), *_totals(result)))
        for (optimizer, label), result in found.items()
    )
    findings = tuple(
        Finding(
            f"{optimizer}: peak of tensors, compressed against {label}",
            found[optimizer, list(_STACKS)[-1]]["counted"] / found[optimizer, label]["counted"],
            better="lower", target=1.0, seeds=(configs[0].seed,), detail={"bound": "compressed takes no more"},
        )
        for optimizer in _OPTIMIZERS
        for label in list(_STACKS)[:-1]
    )  # fmt: skip
    return Measured(
        columns=(
            *(Column(part, "MiB", "lower") for part in PARTS),
            Column("all tensors", "MiB", "lower"),
            Column("process", "MiB", "lower"),
        ),
        rows=rows,
        differs=(
            "The paper's figure is a drawing of one layer; this is a ledger of a whole model's training step.",
            f"A miniature: a Llama of {found[asked[0]]['weights'] / 1e6:.1f} M weights in bf16, batches of 4 windows "
            "of 256 tokens.",
        ),
        findings=findings,
        figures=(_stacked_bars({key: result["parts"] for key, result in found.items()}),),
        notes=(
            "Tensors are counted one by one; the parts are those of the moment at which they are most together. "
            "The last column is what the process held for itself at its peak, sampled; in every row it includes what "
            "the tokenizer and the text took, which is no tensor.",
            "“other” are gradients on their way, work space, and what an optimizer's step needs for a moment.",
        ),
        inputs=digests_of_texts(),
    )


def _row(optimizer: str, label: str) -> str:
    return f"{optimizer}, {' '.join(label.split())}"


def _narrow(label: str) -> str:
    """A label in lines that fit below a bar."""
    return label.replace("\n", " ").replace(" + ", "\n+ ").replace("checkpointing", "check-\npointing")


def _totals(result: Mapping[str, Any]) -> tuple[float, float]:
    return result["counted"] / _MIB, result["sampled"] / _MIB


def _stacked_bars(parts: Mapping[tuple[str, str], Mapping[str, int]]) -> Figure:
    from netweight.metrics.memory import PARTS
    from netweight.report.plots import canvas, series_color, to_figure

    totals = {key: sum(values.values()) / _MIB for key, values in parts.items()}
    with canvas(len(_OPTIMIZERS), height=3.6) as (drawing, panels):
        for axes, optimizer in zip(panels, _OPTIMIZERS, strict=True):
            for place, label in enumerate(_STACKS):
                bottom = 0.0
                for index, part in enumerate(PARTS):
                    height = parts[optimizer, label][part] / _MIB
                    axes.bar(place, height, 0.7, bottom=bottom, color=series_color(index), label=part)
                    bottom += height
                axes.text(place, bottom, f"{bottom:.0f}", ha="center", va="bottom", fontsize=8)
            axes.set_title(optimizer)
            axes.set_xticks(range(len(_STACKS)), [_narrow(label) for label in _STACKS], fontsize=7.5)
            axes.set_ylim(0, max(totals.values()) * 1.08)
            axes.grid(axis="y")
            axes.tick_params(length=3)
        panels[0].set_ylabel("MiB at the peak")
        handles, names = panels[0].get_legend_handles_labels()
        known = dict(zip(names, handles, strict=True))
        drawing.legend(known.values(), known.keys(), loc="outside upper left", ncols=3, fontsize=8.5)
        least = min(_OPTIMIZERS, key=lambda optimizer: totals[optimizer, "vanilla"])
        saved = totals[least, list(_STACKS)[-1]] / totals[least, "vanilla"]
        alt = (
            "Peak memory of a training step by what it is for, four ways, two optimizers. With "
            f"{least}, compressed layer by layer training takes {saved:.2f} of what plain training takes."
        )
        return to_figure(drawing, alt=alt, caption="Peak of tensors during one training step, by what they are for.")
