"""Check that every public name has a full docstring; `make check` runs it. The source is read, not imported.

Public are the names that `public_names.py` lists, and the public methods of the classes among them. griffe parses the
docstrings. A docstring is full if it has a summary, describes every parameter, describes what is returned (unless the
function is a property, returns None or has a summary that begins with "Return"), and names every error of
`netweight.errors` that the function's own body raises. Fields of data classes and settings may be described under
`Args`, under `Attributes`, or by a docstring below the field. A method that overrides one of a described base class
needs no docstring of its own.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator

import griffe
from public_names import ROOT, public_names

SECTIONS = (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)
ANSWERS = (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields)
ERRORS = {
    node.name
    for node in ast.parse((ROOT / "src/netweight/errors.py").read_text()).body
    if isinstance(node, ast.ClassDef)
}


def sections(thing: griffe.Object) -> list[griffe.DocstringSection]:
    """Return the parsed sections of a docstring; none if there is no docstring."""
    return thing.docstring.parse("google", warnings=False) if thing.docstring else []


def described(thing: griffe.Object) -> set[str]:
    """Return the names that a docstring describes: entries of its lists, and names in backquotes."""
    names = {part.lstrip("*").strip() for one in sections(thing) if one.kind in SECTIONS
             for entry in one.value for part in entry.name.split(",")}  # fmt: skip
    text = thing.docstring.value if thing.docstring else ""
    return names | {name for code in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\w+", code)}


def parameters(function: griffe.Function) -> Iterator[str]:
    """Yield the names of a function's public parameters, without `self` and `cls`."""
    for parameter in function.parameters:
        name = parameter.name.lstrip("*")
        if name not in ("self", "cls") and not name.startswith("_"):
            yield name


def raised(function: griffe.Function) -> set[str]:
    """Return the errors of netweight that the body of a function raises itself."""
    tree = ast.parse(
        "\n".join(line[len(function.lines[0]) - len(function.lines[0].lstrip()) :] for line in function.lines)
    )
    kinds = [
        ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    return {kind.split(".")[-1] for kind in kinds} & ERRORS


def function_faults(function: griffe.Function, outer: set[str]) -> Iterator[str]:
    """Yield what the docstring of a function lacks; `outer` are names that the docstring of its class describes."""
    if function.docstring is None:
        yield "has no docstring"
        return
    text, known = function.docstring.value, described(function) | outer
    if re.search(r"\b[Aa]s (for|in|of) `|\b[Ss]ee `", text):  # refers to the full docstring elsewhere
        return
    yield from (f"does not describe the parameter {name}" for name in parameters(function) if name not in known)
    answer = str(function.returns or "None")
    if (
        answer not in ("None", "Never", "NoReturn", "Iterator[None]", "Self")
        and not any(one.kind in ANSWERS for one in sections(function))
        and not re.match(r"(Return|Yield|Make|Build|Count|Compute|The|Whether|A|An)\b", text)
    ):
        yield "does not describe what it returns"
    yield from (f"does not say when it raises {error}" for error in sorted(raised(function)) if error not in text)


def class_faults(kind: griffe.Class) -> Iterator[str]:
    """Yield what the docstrings of a class, its fields and its public methods lack."""
    if kind.docstring is None:
        yield "has no docstring"
    known = described(kind)
    bases = [base for base in kind.mro() if base.path.startswith("netweight")]
    for base in bases:
        known |= described(base)
    data = "dataclass" in " ".join(kind.labels) or any(
        word in str(base) for base in kind.bases for word in ("Settings", "Model")
    )
    for name, member in kind.members.items():
        if member.is_alias or (name.startswith("_") and name != "__init__"):
            continue
        if isinstance(member, griffe.Attribute) and member.annotation is not None and "property" not in member.labels:
            told = re.search(r"['\"]\w+ |description=|help=", f"{member.annotation} {member.value}")
            if (
                data
                and not told
                and "ClassVar" not in str(member.annotation)
                and not member.docstring
                and name not in known
            ):
                yield f"does not describe the field {name}"
        elif isinstance(member, griffe.Function):
            if name == "__init__":
                yield from (f"does not describe the parameter {p}" for p in parameters(member)
                            if p not in known | described(member))  # fmt: skip
            elif not any(name in base.members for base in bases) and "property" not in member.labels:
                yield from (f"{name} {fault}" for fault in function_faults(member, known))


def main() -> int:
    """Print what is missing and return 1 if anything is."""
    logging.disable(logging.WARNING)
    package = griffe.load("netweight", search_paths=[ROOT / "src"], resolve_aliases=False)
    homes = {(name, home) for names in public_names(ROOT / "src").values() for name, home in names.items()}
    lacking, faults = set(), []
    for name, home in sorted(homes):
        path = home.removeprefix("netweight").lstrip(".")
        thing = package[path] if path else package
        if not (ROOT / "src" / home.replace(".", "/")).is_dir() or name in thing.members:
            thing = thing[name]
        found = class_faults(thing) if isinstance(thing, griffe.Class) else (
            function_faults(thing, set()) if isinstance(thing, griffe.Function) else
            iter(() if thing.docstring or isinstance(thing, griffe.Attribute) else ("has no docstring",)))  # fmt: skip
        for fault in found:
            lacking.add(name)
            faults.append(f"{home}.{name} {fault}")
    print("\n".join([*faults, f"{len(lacking)} of {len(homes)} public names lack a full docstring."]))
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
