"""The house in numbers: prints a table of size, order and words, and fails on a step back.

`python scripts/house.py --write` keeps the numbers in house.json. Sources are parsed; nothing is imported.
"""

from __future__ import annotations

import ast
import collections.abc
import json
import re
import sys
from pathlib import Path

from claims import ties, untied

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).with_suffix(".json")
MODELS = ("Finding", "Table", "Column", "Row", "Figure")
# What is measured → its goal; a negative goal is a least one, None is only told.
GOALS = {
    "Python lines in src": 45_000, "Python lines in experiments": 9_000, "files in src": 210,
    "files in the fullest folder": 15, "files imported by one sibling only": 15, "import circles": 0,
    "import circles at import time": 0, "packages whose parts import in circles": 0, "names in __all__ of modules": 0,
    "public names (__all__ of packages)": 80, "docstring share, %": 14.0, "tests to source": -0.7,
    "public names defined in 3 files or more": 5, "descriptions that begin 'Of …'": 0,
    "definitions of " + ", ".join(MODELS): 5, "files that resume or publish beside core and Job": 0,
    "words in docs": 30_000, "words in README": 900, "figures of pages that no result is tied to": 0,
}  # fmt: skip
Graph = dict[str, set[str]]


def lines(folder: str) -> int:
    """Lines of all Python files below a folder of the project."""
    return sum(path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py"))


def statements(tree: ast.Module) -> collections.abc.Iterator[ast.AST]:
    """What runs when a module is imported: no bodies of functions, nothing for type checkers alone."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left += ast.iter_child_nodes(node)


def imports(nodes: collections.abc.Iterable[ast.AST], known: collections.abc.Iterable[str]) -> set[str]:
    """Which of the known modules are imported by name; the project has no relative imports."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in inner}
    return found & set(known)


def circles(graph: Graph) -> int:
    """Strongly connected components of more than one node."""
    reached: Graph = {}
    for start in graph:
        left, seen = [start], reached.setdefault(start, set())
        while left:
            fresh = graph.get(left.pop(), set()) - seen
            seen |= fresh
            left += fresh
    bound = [name for name in graph if name in reached[name]]
    return len({frozenset(x for x in bound if x in reached[name] and name in reached[x]) for name in bound})


def siblings(graph: Graph, package: str) -> Graph:
    """The imports between the direct parts of a package."""
    prefix, found = package + ".", collections.defaultdict(set)
    part = {name: name[len(prefix) :].partition(".")[0] for name in graph if name.startswith(prefix)}
    for start, ends in graph.items():
        found[part.get(start, "")] |= {part[end] for end in ends if end in part}
    return {start: ends - {start} for start, ends in found.items() if start}


def exported(tree: ast.Module) -> set[str]:
    """The names in `__all__` or of `lazy_names`, through lists and mappings that `__all__` is made of."""
    lazy = [n.args[1] for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "lazy_names"]
    if lazy:
        return set(ast.literal_eval(lazy[0]))
    values = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    names = values.get("__all__", ast.List([]))
    parts = [values[n.id] for n in ast.walk(names) if isinstance(n, ast.Name) and n.id in values]
    parts = [key for one in parts for key in (one.keys if isinstance(one, ast.Dict) else [one]) if key]
    return {n.value for one in (names, *parts) for n in ast.walk(one) if isinstance(n, ast.Constant)}


def words(tree: ast.Module) -> tuple[int, int]:
    """Lines of docstrings, and how many descriptions begin with "Of"."""
    lines, of = 0, 0
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                lines += (node.end_lineno or 0) - node.lineno + 1
                of += len(re.findall(r"^\s+\w+: Of [a-z]", text, re.MULTILINE))
            case ast.keyword(arg="help" | "description", value=ast.Constant(value=str(text))):
                of += text.startswith("Of ")
    return lines, of


def own_resuming(path: Path) -> bool:
    """Whether a file renames, syncs or remembers by itself what `core.files` and `job.Job` do for all."""
    own = r"\bos\.(replace|rename|fsync)\b|\.rename\(|\bLedger\b|\bmap_runs\b"
    return not {"core", "job.py"} & set(path.parts) and bool(re.search(own, path.read_text()))


def measure() -> dict[str, float]:
    """All numbers, in the order of `GOALS`."""
    known = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / "src").rglob("*.py"))
    }
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    graph = {name: imports(ast.walk(tree), known) - {name} for name, tree in trees.items()}
    early = {name: imports(statements(tree), known) - {name} for name, tree in trees.items()}
    by = {name: [start for start, ends in graph.items() if name in ends] for name in known}
    leaves = [name for name, path in known.items() if path.name != "__init__.py"]
    packages = known.keys() - leaves
    folder = {name: name.rpartition(".")[0] for name in known}
    homes = collections.Counter(
        node.name for tree in trees.values() for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    )
    told = [words(tree) for tree in trees.values()]
    return dict(zip(GOALS, (
        lines("src"), lines("experiments"), len(known), max(collections.Counter(map(folder.get, leaves)).values()),
        sum(len(by[name]) == 1 and folder[by[name][0]] == folder[name] for name in leaves),
        circles(graph), circles(early), sum(bool(circles(siblings(graph, name))) for name in packages),
        sum(len(exported(trees[name])) for name in leaves), len(set().union(*(exported(trees[p]) for p in packages))),
        round(100 * sum(doc for doc, _ in told) / lines("src"), 1), round(lines("tests") / lines("src"), 2),
        sum(count >= 3 and name[0] != "_" for name, count in homes.items()), sum(of for _, of in told),
        sum(homes[name] + homes[f"{name}Document"] for name in MODELS),
        sum(own_resuming(p) for folder in ("src", "experiments") for p in (ROOT / folder).rglob("*.py")),
        sum(len(p.read_text().split()) for p in ROOT.glob("docs/**/*.md")),
        len((ROOT / "README.md").read_text().split()),
        sum(len(untied(p, ties(p))) for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]),
    ), strict=True))  # fmt: skip


def main() -> int:
    """Print the table; 1 if a number misses its goal and is farther from it than the one that was kept."""
    now = measure()
    if "--write" in sys.argv:
        KEPT.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
    kept, back = json.loads(KEPT.read_text()), 0
    for (name, value), goal in zip(now.items(), GOALS.values(), strict=True):
        before, sign = kept.get(name, value), -1 if (goal or 0) < 0 else 1
        wanted = "" if goal is None else f"≤ {goal:,}" if sign > 0 else f"≥ {-goal}"
        slack = 0.01 * before if isinstance(before, float) or before > 5000 else 0  # lines and shares waver
        worse = goal is not None and sign * value > max(goal, sign * before + slack)
        back += worse
        print(f"{name:55} {value:>10,} {wanted:>10}" + (f"   a step back: {before:,} were kept" if worse else ""))
    return int(back > 0)


if __name__ == "__main__":
    sys.exit(main())
