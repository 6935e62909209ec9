"""NeuZip's figures 1 and 5: how sign, exponent and mantissa are spread, in a trained and in a random model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from netweight.core.digests import digest_file
from netweight.errors import UsageError
from netweight.methods.compress.bits import BitStatistics, bit_statistics, merge
from netweight.methods.compress.inspect import bits_figure
from netweight.report.finding import Finding
from netweight.store import open_store
from netweight.toys import minilm
from netweight_experiments.tables.registry import Column, MeasuredTable, Row, Scale, table

SEED = 20241031
# Spread of freshly initialized weights in Llama and BERT alike (`initializer_range`).
STANDARD_DEVIATION = 0.02
BLOCK = 1 << 22

_COLUMNS = (
    Column("entropy of the sign", "bits"),
    Column("entropy of the exponent", "bits", "lower"),
    Column("entropy of the mantissa", "bits"),
    Column("exponent values that occur", "of 256"),
    Column("bits per weight, exponent coded", "bits", "lower"),
)
_NO_NUMBERS = "The paper prints this figure as histograms without numbers."
# A Llama-3 8B: vocabulary, width, feed-forward width, width of keys and values, layers.
_LLAMA3_8B = (128256, 4096, 14336, 1024, 32)


@table("neuzip-fig1", needs=("evidence",), paper_needs=("the weights of Llama-3 8B: --model FOLDER",), stand_in=True)
def figure1(scale: Scale, out: Path, *, model: str | None = None) -> MeasuredTable:
    """Histograms of a trained model's bits, as bf16."""
    model = model or os.environ.get("NETWEIGHT_MODEL")
    if scale == "paper" and not model:
        raise UsageError(
            "Paper scale measures Llama-3 8B, and no model was named.", cure="Give its folder: --model FOLDER"
        )
    path = Path(model) if model else minilm.weights_file()
    name = Path(model).name if model else "MiniLM"
    differs = (
        f"Measured on {name}; the paper's figure shows Llama-3 8B.",
        "Weights stored wider than bf16 are rounded to bf16 first.",
    )
    with open_store(path) as store:
        statistics = _statistics(map(store.get, store.names()))
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return _measured(f"{name}, trained", statistics, differs, {file.name: digest_file(file) for file in files})


@table("neuzip-fig5", needs=("evidence",), stand_in=True)
def figure5(scale: Scale, out: Path) -> MeasuredTable:
    """Histograms of a randomly initialized model's bits, as bf16."""
    share = 1 if scale == "paper" else 200
    differs = [f"Weights are drawn from N(0, {STANDARD_DEVIATION}²), norms are 1, as transformers initializes a Llama."]
    if share > 1:
        differs.append(f"Every {share}th weight of each tensor is drawn: the histogram is the same but for noise.")
    statistics = _statistics(_random_llama(share))
    return _measured("Llama-3 8B, random", statistics, tuple(differs), {}, seeds=(SEED,))


def _measured(
    label: str, statistics: BitStatistics, differs: tuple[str, ...], inputs: dict[str, str], seeds: tuple[int, ...] = ()
) -> MeasuredTable:
    values = (
        statistics.sign_entropy,
        statistics.exponent_entropy,
        statistics.mantissa_entropy,
        statistics.exponents_used,
        statistics.exponent_only_bits,
    )
    return MeasuredTable(
        columns=_COLUMNS,
        rows=(Row(label, values),),
        differs=differs,
        findings=_findings(statistics, seeds),
        figures=(bits_figure({label: statistics}, caption=f"{label}: {statistics.count:,} weights as bf16."),),
        notes=(_NO_NUMBERS,),
        inputs=inputs,
    )


def _findings(statistics: BitStatistics, seeds: tuple[int, ...]) -> tuple[Finding, ...]:
    """The claims of section 3.1 as numbers; where they are bounded, the bounds are ours."""
    whose = {"bound": "ours; the paper says “low” and “high” in words"}
    common: dict[str, Any] = {"n": statistics.count, "seeds": seeds, "unit": "bits", "detail": whose}
    signs, mantissas, exponents = (getattr(statistics, f"{part}_entropy") for part in ("sign", "mantissa", "exponent"))
    return (
        Finding("signs look random: entropy", signs, better="higher", target=0.99, **common),
        Finding("mantissas look random: entropy of 7 bits", mantissas, better="higher", target=6.9, **common),
        Finding("exponents do not: entropy of 8 bits", exponents, better="lower", target=4.0, **common),
        Finding("size, exponent coded ideally", statistics.exponent_only_bits / 16, n=statistics.count, better="lower"),
    )


def _statistics(tensors: Iterator[torch.Tensor]) -> BitStatistics:
    """The statistics of all floating-point tensors together, as bf16; one tensor in memory at a time."""
    parts = [bit_statistics(tensor.to(torch.bfloat16)) for tensor in tensors if tensor.is_floating_point()]
    if not any(part.count for part in parts):
        raise UsageError("The model contains no floating-point weights.", cure="Name another file or folder.")
    return merge(parts)


def _random_llama(share: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    vocabulary, width, inner, keys, layers = _LLAMA3_8B
    shapes = [vocabulary * width] * 2
    shapes += [width * width, width * keys, width * keys, width * width, *[width * inner] * 3] * layers
    for count in shapes:
        for start in range(0, count // share, BLOCK):
            size = min(BLOCK, count // share - start)
            yield torch.randn(size, generator=generator).mul_(STANDARD_DEVIATION)
    yield torch.ones((2 * layers + 1) * width // share)
