"""Checks figures of README.md and docs against the results that they come from: `python scripts/claims.py [--untied]`.

benchmarks/figures.yaml ties figures to expressions over dated results: of each page, words that one paragraph, list or
table alone has, and below them the figures of that block, one per line:

    README.md:
      "memory of training": |
        0.56 = `training-memory-2026-11-23.json|rows|0|counted / baseline|value`
        66.1 = 100 / `performance.md|netweight avx512, default|ratio`

`all = FILE, FILE` says that every figure of the block is a value of these files, as it is or in percent; targets, and
what is in square brackets, a paper's, apart. `given = 0.98, 1.3` names settings and published numbers. A path is a
file below benchmarks/results (`published/…`: a paper's numbers; `PAGE.md`: a table of a page that is made from
results), then keys, joined by `|`; `#` counts entries, and of a list of numbers the median is taken. A page that says
"Made by" in its first line, and a table between `<!-- edits of FILES -->` and `<!-- /edits -->`, are tied as a whole:
a test makes them again.
Fails where a figure is not in its block, or differs from its result in a digit shown.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
FIGURES = ROOT / "benchmarks" / "figures.yaml"
PUBLISHED = ROOT / "experiments" / "netweight_experiments"
MOST = 1000  # numbers of a file that may be tied as a whole: among more, any would be found
OTHERS = re.compile(  # a paper's numbers and its own, targets, files, code, shares of intervals, versions
    r"\[[^]]*\](?!\()|\d{4}\.\d{5}|[≤≥] ?[\d.]+|\([^)]*\.json\)|95 %|N\([^)]*\)|```.*?```|`[^`]*`"
    r"|<!-- options of.*?<!-- end -->|<!-- edits of .*?<!-- /edits -->"
    r"|\b(?:torch|Flower|diffusers|transformers|CUDA|NVRTC|lm-eval|vLLM) \d+\.[\d.]+",
    re.S,
)
MEASURED = re.compile(
    r"(?<![\w.,/-])(?:\d[\d,]*)?\.\d+(?![\w/-]|\.\d)|(?<![\w.,/-])\d[\d,]*(?= ?%|×)"
)  # 0.56, 17 %, 12×


def _cell(path: Path, row: str, column: str) -> float:
    """A cell of a page's first table that has this row and column."""
    head: list[str] = []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        head = [] if not line.startswith("|") else head or cells
        if cells[0] == row and column in head:
            return float(re.sub(r"[^\d.]", "", cells[head.index(column)]))
    raise KeyError(f"{row}|{column}")


def value(path: str) -> float:
    """What a path leads to."""
    file, *keys = path.split("|")
    if file.endswith(".md"):
        return _cell(DOCS / file, *keys)
    found: Any = read(file)
    for key in keys:
        found = len(found) if key == "#" else found[int(key)] if isinstance(found, list) else found[key]
    return statistics.median(found) if isinstance(found, list) else float(found)


def shown(text: str) -> tuple[float, float]:
    """A number as it is written, and half of its last digit."""
    plain = text.replace(",", "")
    return float(plain), 0.5 * 10.0 ** -len(plain.partition(".")[2])


def read(file: str) -> Any:
    """The content of a result file."""
    return json.loads(((PUBLISHED if file.startswith("published/") else RESULTS) / file).read_text())


def leaves(node: Any) -> Iterator[float]:
    """All numbers of a result."""
    if isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from leaves(each)
    elif isinstance(node, str) and re.fullmatch(r"[\d.]+\u2013[\d.]+", node):  # an interval in a cell
        yield from map(float, node.split("\u2013"))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield float(node)


def missing(block: str, files: str) -> list[str]:
    """The figures of a block that are no value of these files."""
    known = {number for file in files.split(", ") for number in leaves(read(file))}
    if len(known) > MOST:
        raise ValueError(f"{len(known)} numbers in {files}; name keys")
    own = MEASURED.findall(OTHERS.sub("", block))
    return [
        each for each in own
        if not any(abs(scale * abs(leaf) - number) <= half * (1 + 1e-6) for number, half in [shown(each)]
                   for leaf in known for scale in (1, 100))
    ]  # fmt: skip


def ties(page: Path) -> dict[str, str]:
    """What figures.yaml has of a page: words of a block, and the figures of that block, one per line."""
    known: dict[str, dict[str, str]] = yaml.safe_load(FIGURES.read_text())
    return known.get(page.relative_to(ROOT).as_posix(), {})


def blocks(text: str, tied: dict[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Blocks of a page, each with its ties, and the words that not exactly one block has."""
    found = text.split("\n\n")
    plain = [" ".join(block.split()) for block in found]
    lines, lost = [""] * len(found), []
    for words, below in tied.items():
        homes = [number for number, block in enumerate(plain) if words in block]
        if len(homes) == 1:
            lines[homes[0]] += below
        else:
            lost.append(f"{len(homes)} blocks have the words {words!r}")
    return list(zip(found, lines, strict=True)), lost


def faults(page: Path, tied: dict[str, str]) -> tuple[list[str], int]:
    """What is wrong with the claims of a page, and how many there are."""
    found, lost = blocks(page.read_text(), tied)
    wrong, count = [f"{page.name}: {each}" for each in lost], 0
    for block, lines in found:
        for line in lines.strip().splitlines():
            said, _, rule = line.partition(" = ")
            count += len(MEASURED.findall(block)) if said == "all" else 1
            try:
                if said == "given":
                    absent = [each for each in rule.split(", ") if each not in block]
                    wrong += [f"{page.name}: {each} is not in its block" for each in absent]
                    continue
                if said == "all":
                    wrong += [f"{page.name}: {each} is in none of {rule}" for each in missing(block, rule)]
                    continue
                terms = re.sub(r"`([^`]+)`", lambda match: repr(value(match[1])), rule)
                if not re.fullmatch(r"[\d.e+*/() -]+", terms):
                    raise ValueError(f"{rule} is no sum of results")
                number, half = shown(said)
                if abs(eval(terms) - number) > half * (1 + 1e-9):  # numbers and signs alone, see above
                    wrong.append(f"{page.name}: {said} is {eval(terms):.6g} in the results ({rule})")
            except (KeyError, IndexError, OSError, ValueError) as error:
                wrong.append(f"{page.name}: {line}: {type(error).__name__} {error}")
            if not re.search(rf"(?<![\d.]){re.escape(said)}(?!\d)", block):
                wrong.append(f"{page.name}: {said} is tied, and not in its block")
    return wrong, count


def untied(page: Path, tied: dict[str, str]) -> list[str]:
    """Figures that look measured, outside code, which nothing ties."""
    text = page.read_text()
    if text.startswith("<!-- Made by"):
        return []
    found = []
    own = OTHERS.sub(lambda other: "\n\n" * other[0].count("\n\n"), text).split("\n\n")
    for (_, lines), block in zip(blocks(text, tied)[0], own, strict=True):
        known = {line.partition(" = ")[0] for line in lines.splitlines()}
        known |= set(", ".join(re.findall("^given = (.*)$", lines, re.M)).split(", "))
        found += [each for each in MEASURED.findall(block) if not known & {each, "all"}]
    return found


def main() -> None:
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    known = yaml.safe_load(FIGURES.read_text())
    strangers = known.keys() - {str(page.relative_to(ROOT)) for page in pages}
    wrong = [f"{FIGURES.name}: no page {name}" for name in strangers]
    for page in pages:
        tied = ties(page)
        found, count = faults(page, tied)
        wrong += found
        if "--untied" in sys.argv:
            left = untied(page, tied)
            print(f"{page.name}: {count} tied, {len(left)} not: {' '.join(left[:12])}")
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
