"""Figures of README.md and docs, taken from result files by cog: `make figures` writes them, `make check` compares.

A page holds the text with places for figures, in a comment, and below it the text as readers see it:

    <!-- [[[cog
    text(\"""
    On one core, generation runs at {speed:.2f} × the speed of the dense model.
    \""", speed=value("compress/generation.json|settings|batch 1, threads 1|codec, speed / dense|median"))
    ]]] -->
    On one core, generation runs at 1.01 × the speed of the dense model.
    <!-- [[[end]]] -->

Edit the text in the comment, then run `make figures`. Where a table has many figures, name the files that they are
from instead: `text(\"""…\""", "immunize/content-delay-2026-11-27.json")`; a figure that none of them holds is an error.
"""

from __future__ import annotations

import json
import pkgutil
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cog

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAPERS = ROOT / "experiments" / "netweight_experiments"  # below it: published/PAPER-TABLE.json
# What is not a measured figure: code, links, what is in square brackets (a paper's), targets, versions.
APART = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\[[^]]*\](?!\()|[≤≥] ?[\d.]+|95 %|N\([^)]*\)|\b[A-Za-z-]+ \d+\.[\d.]+\.\d+", re.S
)
MEASURED = re.compile(r"(?<![\w.,/-])(?:\d[\d,]*)?\.\d+(?![\w/-]|\.\d)|(?<![\w.,/-])\d[\d,]*(?= ?%|×)")


def read(file: str) -> Any:
    """Return the content of a result file, or of a paper's table (`published/…`)."""
    return json.loads(((PAPERS if file.startswith("published/") else RESULTS) / file).read_text())


def value(path: str) -> float:
    """Return a value of a result: a file, then keys, joined by `|`. `#` counts; of a list the median is taken."""
    file, *keys = path.split("|")
    node = read(file)
    for key in keys:
        node = len(node) if key == "#" else node[int(key)] if isinstance(node, list) else node[key]
    return statistics.median(node) if isinstance(node, list) else float(node)


def cell(page: str, row: str, column: str) -> float:
    """Return a number of the first table with this row and column in a page that is made from results."""
    head: list[str] = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [each.strip() for each in line.strip().strip("|").split("|")]
        head = [] if not line.startswith("|") else head or cells
        if cells[0] == row and column in head:
            return float(re.sub(r"[^\d.]", "", cells[head.index(column)]))
    raise KeyError(f"docs/{page} has no cell {row!r}, {column!r}")


def options(where: str) -> None:
    """Write the table of a settings class's options, named as MODULE:CLASS."""
    cog.outl(pkgutil.resolve_name(where).table())


def written(where: str, file: str, otherwise: str = "This was not measured yet.") -> None:
    """Write what a function (MODULE:FUNCTION) makes of a result, or another text while there is no such result."""
    cog.outl(pkgutil.resolve_name(where)(read(file)) if (RESULTS / file).exists() else otherwise)


def picture(name: str, alternative: str) -> None:
    """Show a picture of docs/pictures with its text alternative; nothing while the picture does not exist."""
    if (ROOT / "docs" / "pictures" / name).exists():
        cog.outl(f"\n![{alternative}](pictures/{name})")


def leaves(node: Any) -> Iterator[float]:
    """Yield all numbers of a result, those in intervals such as "0.2-0.3" (with a dash) included."""
    if isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from leaves(each)
    elif isinstance(node, str) and re.fullmatch(r"[\d.]+\u2013[\d.]+", node):
        yield from map(float, node.split("\u2013"))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield float(node)


def absent(shown: str, files: tuple[str, ...]) -> list[str]:
    """Return the measured figures of a text that are not values of these files, as it is or in percent."""
    numbers = {abs(scale * number) for file in files for number in leaves(read(file)) for scale in (1, 100)}
    lost = []
    for figure in MEASURED.findall(APART.sub(" ", shown)):
        plain = figure.replace(",", "")
        half = 0.5 * 10.0 ** -len(plain.partition(".")[2]) * (1 + 1e-6)
        if not any(abs(number - float(plain)) <= half for number in numbers):
            lost.append(figure)
    return lost


def text(template: str, *files: str, **figures: float) -> None:
    """Write a text into a page, its places filled with figures; with files, check its other figures against them."""
    template = template.strip("\n")
    if files and (lost := absent(re.sub(r"\{\w+:[^}]*\}", " ", template), files)):
        raise ValueError(f"{', '.join(lost)}: in none of {', '.join(files)}")
    cog.out(template.format(**figures) + "\n")


GENERATION = "compress/generation.json"
GENERATION_AVX2 = "compress/generation-avx2.json"


EVIDENCE = (
    "- **Compression**: sizes, and speed and memory on CPUs, on two models that people use: all-MiniLM-L6-v2 and "
    "Qwen2.5-Coder-0.5B-Instruct. Speed and memory on GPUs, on random weights in the shape of Llama-3 models.",
    "- **Labels**: on models and adapters that people use.",
    "- **Federated learning**: on public pictures such as Fashion-MNIST, with the small networks of the HyperFL paper.",
    "- **Defenses of language models**: on small models, and in one run on Qwen2.5-Coder-0.5B-Instruct. **Removal of "
    "refusals**: on Qwen2.5-Coder-0.5B-Instruct.",
    "- **Forgetting** and **weight spaces**: on small models only.",
    "",
    "A **small model** has less than a million weights and was trained for this project. It shows that a method works, "
    "not how well it works on a large model. Our copy of Qwen2.5-Coder-0.5B-Instruct was converted from 4-bit weights, "
    "so the sizes of the original after compression may differ. Its files contain 630 million numbers, although the "
    "model has 0.49 billion weights, because the output layer, which equals the embedding in the original, is stored "
    "separately.",
)
"""What was tested on which models, as lines: one statement for all pages."""


def evidence() -> None:
    """Write what was tested on which models."""
    cog.outl("\n".join(EVIDENCE))


def generation() -> None:
    """Write the tables of generation on the CPU, with processor and date, as far as `make bench-generation` ran."""
    measured = [file for file in (GENERATION, GENERATION_AVX2) if (RESULTS / file).is_file()]
    if not measured:
        cog.outl("These speeds were not measured on the present code: run `make bench-generation MODEL=FOLDER`.")
        return
    for number, file in enumerate(measured):
        result = read(file)
        where = result["environment"]
        instructions = {"avx512": "With AVX-512", "avx2": "With AVX2 only, for the dense model too"}[
            where["codec_path"]
        ]
        cog.outl(
            ("\n" if number else "") + f"**{instructions}** ({where['cpu']}, {result['date'][:10]}, load average "
            f"{result['load_average'][0]:.1f}):\n\n| Setting | Processor time of the dense model for a step, ms | "
            "Speed of the codec's form | Speed of the fixed-length form | Same tokens as the dense model? |\n"
            "|---|---:|---:|---:|---|"
        )
        for setting, row in result["settings"].items():
            forms = (row[f"{form}, speed / dense"] for form in ("codec", "fixed"))
            cells = " | ".join(f"{of['median']:.2f} × ({of['least']:.2f} to {of['most']:.2f})" for of in forms)
            cog.outl(
                f"| {counted(setting)} | {row['dense ms a step']:.0f} | {cells} | "
                f"{'yes' if row['tokens equal'] else 'no'} |"
            )


def counted(setting: str) -> str:
    """Return the name of a setting such as "batch 8, threads 1" in words: "8 sequences, 1 thread"."""
    batch, threads = re.findall(r"\d+", setting)
    return f"{batch} sequence{'s' * (batch != '1')}, {threads} thread{'s' * (threads != '1')}"


TRAINING = {
    "plain, chunked loss": "AdamW with checkpoints, `chunk_loss`",
    "LOMO": "`LayerwiseOptimizer`, dense weights and states",
    "codec": "`LayerwiseOptimizer`, weights and states compressed",
    "codec, chunked loss": "`LayerwiseOptimizer`, weights and states compressed, `chunk_loss`",
    "fixed": "`LayerwiseOptimizer`, weights in the fixed-length form, states compressed",
}
"""Ways to train a real model, as `compress.training` names them → as the page does."""


def training() -> None:
    """Write the table of training a real model on the CPU; nothing before `compress.training` ran."""
    if not (RESULTS / "compress/training-real.json").is_file():
        return
    result = read("compress/training-real.json")
    plain = result["plain"]
    where = f"{result['environment']['cpu']}, {result['date'][:10]}, load average {result['load_average'][0]:.1f}"
    cog.outl(
        f"All rows use activation checkpointing, bf16, {result['tokens']} tokens in a step, and one thread ({where}). "
        f"The values are relative to AdamW on the dense model with checkpoints and nothing else. Its peak is "
        f"{plain['peak bytes'] / 1e9:.2f} GB, and a step takes {plain['seconds a step']:.1f} seconds of processor time."
    )
    cog.outl("\n| How the model is trained | Peak memory of tensors, relative | Speed, relative |\n|---|---:|---:|")
    for name, shown in TRAINING.items():
        if name in result:
            cog.outl(f"| {shown} | {result[name]['peak / plain']:.2f} | {result[name]['speed / plain']:.2f} |")


def loading() -> None:
    """Write what loading a compressed model takes beside a dense one; nothing before `compress.loading` ran."""
    if not (RESULTS / "compress/loading.json").is_file():
        return
    result = read("compress/loading.json")
    dense, packed = (result["medians"][name] for name in ("dense", "compressed"))
    cog.outl(
        f"The table is for Qwen2.5-Coder-0.5B with one thread ({result['environment']['cpu']}, {result['date'][:10]}, "
        f"load average {result['load_average'][0]:.1f}). Lower is better. Compressed weights are also "
        "checked. The memory is smaller than the size, because only the needed rows of the embedding are read.\n"
    )
    cog.outl("| Measurement | Dense folder | Compressed folder |\n|---|---:|---:|")
    cog.outl(f"| size | {result['dense bytes'] / 1e6:,.0f} MB | {result['compressed bytes'] / 1e6:,.0f} MB |")
    for shown, key, unit in (
        ("time to load", "seconds", "s"),
        ("time of the first token", "first token, seconds", "s"),
        ("growth of resident memory up to the first token", "peak", "MB"),
    ):
        cells = (f"{each[key] / 1e6:,.0f}" if unit == "MB" else f"{each[key]:.2f}" for each in (dense, packed))
        cog.outl(f"| {shown} | {' | '.join(f'{cell} {unit}' for cell in cells)} |")
