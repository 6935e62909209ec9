"""Check that every public name has a full docstring; `make check` runs it. The source is read, not imported.

Public are the names that `public_names.py` lists, and the public methods of the classes among them. griffe parses the
docstrings. A docstring is full if it has a summary, describes every parameter, describes what is returned (unless the
function is a property, returns None or has a summary that begins with "Return"), and names every error of
`netweight.errors` that the function's own body raises. Fields of data classes and settings may be described under
`Args`, under `Attributes`, or by a docstring below the field. A method that overrides one of a described base class, or
that a described protocol has with the same parameters, needs no docstring of its own; nor does a constructor that the
class says is "made by" other code.
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


def has_docstring(thing: griffe.Object | griffe.Alias) -> bool:
    """Tell whether a field has a docstring below it."""
    return isinstance(thing, griffe.Attribute) and thing.docstring is not None


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
    own = re.fullmatch(r"[A-Z]\w*", answer) and answer not in ("Any", "Tensor", "Path")  # its class says what it is
    if (
        not own
        and answer not in ("None", "Never", "NoReturn", "Iterator[None]", "Self")
        and not any(one.kind in ANSWERS for one in sections(function))
        and not re.match(r"(Return|Yield|Make|Build|Count|Compute|The|Whether|A|An)\b", text)
    ):
        yield "does not describe what it returns"
    yield from (f"does not say when it raises {error}" for error in sorted(raised(function)) if error not in text)


def class_faults(kind: griffe.Class, promised: set[tuple[str, ...]]) -> Iterator[str]:
    """Yield what the docstrings of a class, its fields and its public methods lack.

    Args:
        kind: The class.
        promised: Name and parameters of each method that a protocol of netweight describes.
    """
    if kind.docstring is None:
        yield "has no docstring"
    bases = [base for base in kind.mro() if base.path.startswith("netweight")]
    known: set[str] = set()
    for base in [kind, *bases]:
        known |= described(base) | {name for name, member in base.members.items() if has_docstring(member)}
    made_elsewhere = kind.docstring is not None and "ade by `" in kind.docstring.value
    data = "__init__" not in kind.members and (
        "dataclass" in kind.labels or any(word in str(base) for base in kind.bases for word in ("Settings", "Model"))
    )
    for name, member in kind.members.items():
        if member.is_alias or (name.startswith("_") and name != "__init__"):
            continue
        if isinstance(member, griffe.Attribute) and member.annotation is not None and "property" not in member.labels:
            inline = re.search(r"['\"]\w+ |description=|help=", f"{member.annotation} {member.value}")
            if data and "instance-attribute" in member.labels and name not in known and not inline:
                yield f"does not describe the field {name}"
        elif isinstance(member, griffe.Function):
            if name == "__init__":
                for parameter in parameters(member):
                    if not made_elsewhere and parameter not in known | described(member):
                        yield f"does not describe the parameter {parameter}"
            elif "property" not in member.labels:
                inherited = any(name in base.members for base in bases)
                if not inherited and (name, *parameters(member)) not in promised:
                    yield from (f"{name} {fault}" for fault in function_faults(member, known))


def methods_of_protocols(package: griffe.Module) -> set[tuple[str, ...]]:
    """Return the name and the parameters of every described method of a protocol."""
    found: set[tuple[str, ...]] = set()
    for member in package.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Module):
            found |= methods_of_protocols(member)
        elif isinstance(member, griffe.Class) and any("Protocol" in str(base) for base in member.bases):
            methods = (each for each in member.members.values() if isinstance(each, griffe.Function) and each.docstring)
            found |= {(each.name, *parameters(each)) for each in methods}
    return found


def main() -> int:
    """Print what is missing and return 1 if anything is."""
    logging.disable(logging.WARNING)
    package = griffe.load("netweight", search_paths=[ROOT / "src"], resolve_aliases=False)
    homes = {(name, home) for names in public_names(ROOT / "src").values() for name, home in names.items()}
    promised = methods_of_protocols(package)
    lacking, faults = set(), []
    for name, home in sorted(homes):
        path = home.removeprefix("netweight").lstrip(".")
        thing = package[path] if path else package
        if not (ROOT / "src" / home.replace(".", "/")).is_dir() or name in thing.members:
            thing = thing[name]
        found = class_faults(thing, promised) if isinstance(thing, griffe.Class) else (
            function_faults(thing, set()) if isinstance(thing, griffe.Function) else
            iter(() if thing.docstring or isinstance(thing, griffe.Attribute) else ("has no docstring",)))  # fmt: skip
        for fault in found:
            lacking.add(name)
            faults.append(f"{home}.{name} {fault}")
    print("\n".join([*faults, f"{len(lacking)} of {len(homes)} public names lack a full docstring."]))
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
