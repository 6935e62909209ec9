"""Checks figures of README.md and docs against the results that they come from: `python scripts/claims.py [--untied]`.

A comment ties figures of the paragraph, list or table above it, one per line, to an expression over dated results:

    <!-- figures
    0.56 = `training-memory-2026-11-23.json|rows|0|counted / baseline|value`
    66.1 = 100 / `performance.md|netweight avx512, default|ratio`
    -->

`all = FILE, FILE` says that every figure above is a value of these files, as it is or in percent; targets, and what
is in square brackets, a paper's, apart. `given = 0.98, 1.3` names settings and published numbers. A path is a file
below benchmarks/results (`published/…`: a paper's numbers; `PAGE.md`: a table of a page that is made from results),
then keys, joined by `|`; `#` counts entries, and of a list of numbers the median is taken. A page that says "Made by"
in its first line, and a table between `<!-- edits of FILES -->` and `<!-- /edits -->`, are tied as a whole: a test
makes them again.
Fails where a figure is not above its comment, or differs from its result in a digit shown.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PUBLISHED = ROOT / "experiments" / "netweight_experiments"
MOST = 1000  # numbers of a file that may be tied as a whole: among more, any would be found
COMMENT = re.compile(r"<!-- figures\n(.*?)-->", re.S)
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


def faults(page: Path) -> tuple[list[str], int]:
    """What is wrong with the claims of a page, and how many there are."""
    text, wrong, count = page.read_text(), [], 0
    for found in COMMENT.finditer(text):
        above = text[: found.start()].rstrip().rpartition("\n\n")[2]
        for line in found[1].strip().splitlines():
            said, _, rule = line.partition(" = ")
            count += len(MEASURED.findall(above)) if said == "all" else 1
            try:
                if said == "given":
                    wrong += [f"{page.name}: {each} is not above" for each in rule.split(", ") if each not in above]
                    continue
                if said == "all":
                    wrong += [f"{page.name}: {each} is in none of {rule}" for each in missing(above, rule)]
                    continue
                terms = re.sub(r"`([^`]+)`", lambda match: repr(value(match[1])), rule)
                if not re.fullmatch(r"[\d.e+*/() -]+", terms):
                    raise ValueError(f"{rule} is no sum of results")
                number, half = shown(said)
                if abs(eval(terms) - number) > half * (1 + 1e-9):  # numbers and signs alone, see above
                    wrong.append(f"{page.name}: {said} is {eval(terms):.6g} in the results ({rule})")
            except (KeyError, IndexError, OSError, ValueError) as error:
                wrong.append(f"{page.name}: {line}: {type(error).__name__} {error}")
            if not re.search(rf"(?<![\d.]){re.escape(said)}(?!\d)", above):
                wrong.append(f"{page.name}: {said} is tied, and not above its comment")
    return wrong, count


def untied(page: Path) -> list[str]:
    """Figures that look measured, outside code, which no comment ties."""
    text = page.read_text()
    if text.startswith("<!-- Made by"):
        return []
    found = []
    kept: list[str] = []
    plain = COMMENT.sub(lambda found: kept.append(found[1]) or f"\0{len(kept) - 1}\0", text)
    for block in OTHERS.sub("", plain).split("\n\n"):
        claims = "\n".join(kept[int(number)] for number in re.findall("\0(\\d+)\0", block))
        tied = {line.partition(" = ")[0] for line in claims.splitlines()}
        tied |= set(", ".join(re.findall("^given = (.*)$", claims, re.M)).split(", "))
        found += [each for each in MEASURED.findall(re.sub("\0\\d+\0", "", block)) if not tied & {each, "all"}]
    return found


def main() -> None:
    wrong: list[str] = []
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        found, count = faults(page)
        wrong += found
        if "--untied" in sys.argv:
            print(f"{page.name}: {count} tied, {len(untied(page))} not: {' '.join(untied(page)[:12])}")
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
