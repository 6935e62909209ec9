"""Every string that reaches a person, one list for each kind, read from the source alone.

    python scripts/messages.py                    # all kinds, each in the order of the files
    python scripts/messages.py errors help        # some kinds
    python scripts/messages.py --sample 200       # a random sample, to be read against docs/writing.md
    python scripts/messages.py --suspicious       # those that hold a word or a pattern that the rules advise against

Kinds: help (commands, options and settings), errors (messages and their cures), output (lines, warnings and progress),
findings (names, units aside, and reasons), report (titles, questions, introductions, tables, conclusions), label.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("help", "errors", "output", "findings", "report", "label")

# Calls by the last part of their name → the kind, and the arguments that a person reads: places or names.
_CALLS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "Field": ("help", ("description",)),
    "Argument": ("help", (2, "help")),
    "named": ("help", ("help",)),
    "Command": ("help", ("summary", "description", "example")),
    "Method": ("help", ("summary", "description", "example")),
    "Attack": ("help", ("title", "summary", "description", "example")),
    "Group": ("help", (1, 2)),
    "option": ("help", ("help",)),
    "not_found": ("errors", (0, 3)),
    "extra": ("errors", (1,)),
    "library": ("errors", (1,)),
    "line": ("output", (0,)),
    "warn": ("output", (0,)),
    "say": ("output", (0,)),
    "note": ("output", (0,)),
    "task": ("output", (0,)),
    "PrintedTable": ("output", (0,)),
    "Result": ("output", (0, "lines", "warnings", "next")),
    "Finding": ("findings", (0, "name")),
    "interval_finding": ("findings", (0,)),
    "mean_finding": ("findings", (0,)),
    "steps_finding": ("findings", (0,)),
    "Section": ("report", (0, "title", "question", "intro", "conclusion", "warnings")),
    "Table": ("report", (0, 1, "title", "columns", "notes")),
    "Column": ("report", (0, "name")),
    "Figure": ("report", ("caption", "alt")),
    "Chapter": ("report", ("title", "question", "intro")),
    "Report": ("report", (0,)),
    "CardEntry": ("report", (0, 1, "title", "text")),
    "by_targets": ("report", ("met", "missed")),
    "Row": ("label", ("title", "value", "basis")),
    "RowGroup": ("label", ("title", "basis")),
}
_ERRORS = ("Error", "Exists", "Blob", "Unsupported", "MissingExtra", "UnsafeInput", "OutputFailed", "NameNotFound")

# What the rules of writing advise against → why.
SUSPICIOUS: dict[str, str] = {
    r"\b(tells?|told)\b": "an everyday verb for a technical one: report, show, identify",
    r"\b(looks? at|looked at)\b": "an everyday verb: inspect, examine",
    r"\btakes? back\b|\btook back\b": "an everyday verb: undo, subtract",
    r"\b(nobody|no one|strangers?|obituary|wish|patiently|liars?)\b": "personification",
    r"(?<![Tt]here )\b(is|are) (no|none)\b": "negation by a noun: write it with not",
    r"\bholds? (no|none)\b": "an everyday verb: contain",
    r"\bwhat (it|is|was|they|he|she)\b(?! (measured|written|installed))": "a relative clause in place of a noun",
    r", too\b|\bbesides\b|\btherein\b|\bthereof\b": "inverted order",
    r"^(Whether|How|Which|Who)\b": "a riddle in place of a noun",
    r"\bever (smaller|larger)\b": "poetry",
    r"\bcomes? (back|of|from) (it|them)\b": "an everyday verb",
    r"\bmay well\b|\bas far as is known\b": "hedging",
}


@dataclass(frozen=True)
class Message:
    """A string that reaches a person, and where it stands."""

    kind: str
    """One of `KINDS`."""
    place: str
    """File and line."""
    text: str
    """The string; what is filled in stands in braces."""


def messages(source: Path = ROOT / "src" / "netweight") -> Iterator[Message]:
    """Yield every string that reaches a person, file by file.

    Args:
        source: Folder of the package.
    """
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source).as_posix()
        seen: set[int] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for kind, node in _strings(tree):
            if id(node) not in seen and (text := _text(node)):
                seen.add(id(node))
                yield Message(kind, f"{place}:{node.lineno}", text)


def _strings(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.ClassDef) and any("Settings" in ast.unparse(base) for base in node.bases):
            yield from (("help", each) for each in _docstrings(node))
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(d) for d in node.decorator_list):
            yield from (("help", each) for each in _docstrings(node)[:1])
        elif isinstance(node, ast.FunctionDef) and "Words" in ast.unparse(node.returns or ast.Constant("")):
            yield from (("report", each) for each in _sentences(node))


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = ast.unparse(node.func).rsplit(".", 1)[-1]
    if name.endswith(_ERRORS) and name[:1].isupper():
        chosen = [*node.args, *(each.value for each in node.keywords if each.arg == "cure")]
        yield from (("errors", part) for each in chosen for part in _parts(each))
        return
    if name not in _CALLS:
        return
    kind, places = _CALLS[name]
    chosen = [node.args[each] for each in places if isinstance(each, int) and each < len(node.args)]
    chosen += [each.value for each in node.keywords if each.arg in places]
    yield from ((kind, part) for each in chosen for part in _parts(each))


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """The strings within an argument: of both branches, of lists, of sums."""
    if isinstance(node, (ast.Constant, ast.JoinedStr)):
        yield node
    elif isinstance(node, ast.BinOp):
        yield from (*_parts(node.left), *_parts(node.right))
    elif isinstance(node, ast.IfExp):
        yield from (*_parts(node.body), *_parts(node.orelse))
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for each in node.elts:
            yield from _parts(each.value if isinstance(each, ast.Starred) else each)


def _docstrings(node: ast.ClassDef | ast.FunctionDef) -> list[ast.expr]:
    """The docstring of a class or function, and those of fields."""
    return [
        each.value for each in node.body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
    ]  # fmt: skip


def _sentences(node: ast.FunctionDef) -> Iterator[ast.expr]:
    """The strings of more than a word in a function's body, without its docstring and parts of other strings."""
    inner = {id(each) for part in ast.walk(node) if isinstance(part, ast.JoinedStr) for each in part.values}
    inner |= {id(each) for each in _docstrings(node)[:1]}
    for each in ast.walk(node):
        if id(each) in inner:
            continue
        if isinstance(each, ast.JoinedStr) or (
            isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value
        ):
            yield each


def _text(node: ast.expr) -> str:
    """The words of a string; what an f-string fills in stands in braces."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
    elif isinstance(node, ast.JoinedStr):
        text = "".join(
            each.value if isinstance(each, ast.Constant) else f"{{{ast.unparse(each.value)}}}"  # type: ignore[attr-defined]
            for each in node.values
        )
    else:
        text = ""
    text = re.sub(r"\s+", " ", text).strip()
    return text if re.search(r"[A-Za-z]{2}", text) else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the messages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"kinds to print, of {', '.join(KINDS)}; all by default")
    parser.add_argument("--sample", type=int, metavar="N", help="print a random sample of N")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--suspicious", action="store_true", help="print those that hold an advised-against pattern")
    given = parser.parse_args(arguments)
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"there is no kind {sorted(unknown)[0]}; there are {', '.join(KINDS)}")
    chosen = [each for each in messages() if not given.kinds or each.kind in given.kinds]
    if given.sample is not None:
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    count = 0
    for kind in KINDS:
        lines = [each for each in chosen if each.kind == kind]
        reasons = {each: [why for rule, why in SUSPICIOUS.items() if re.search(rule, each.text)] for each in lines}
        shown = [each for each in lines if reasons[each]] if given.suspicious else lines
        count += len(shown)
        if shown:
            print(f"\n## {kind}: {len(shown)}\n")
        for each in shown:
            print(f"{each.place}: {each.text}" + (f"  [{'; '.join(reasons[each])}]" if given.suspicious else ""))
    print(f"\n{count} strings", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
