"""Are all public names described? Read from the source alone; nothing of netweight is imported. `make check` runs it.

Public are the names that `public_names.py` lists, with the public methods of the classes among them. The docstring of
each must say:

- what it is or does (a docstring at all);
- every parameter: by an entry under `Args`, for a constructor also under `Attributes` of the class, or by its name in
  backquotes in the text; and no entry may name a parameter that does not exist;
- of a parameter that is a tensor or an array, its shape or dtype, in the docstring of the function or of its class;
- what comes back: under `Returns` or `Yields`, unless the docstring opens with one of these verbs, or with a noun that
  is the answer ("The …", "Whether …"), or the annotation is a class of netweight, which is described itself;
- no description begins with "Of …";
- every error of `netweight.errors` that its own body raises, by name;
- where it comes from, if it is listed in `public_sources.py` as taken from a paper: the paper, the section or equation.

Said once is enough: the constructor of a class that is "made by" other code belongs to that code;
a method that overrides a method of netweight, or has the name and parameters of a protocol's
method, is described there; "as for `name`" refers to another docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from public_names import public_names
from public_sources import SOURCES

EXTENDED = ("HfQuantizer", "DiffusersQuantizer", "Trainer", "Strategy", "_Base")
Function = ast.FunctionDef | ast.AsyncFunctionDef

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples?|Notes?|Source):(.*)$")
ANSWERS = re.compile(
    r"((Return|Yield)s?|(Tell|Say)s? \w+|The|A|An|Whether|How|Every|All|Each|Which|What|Where|Its|One|This|These|"
    r"Number|Names?)\b"
)
NOTHING = ("None", "Never", "NoReturn", "Iterator[None]")
MADE_BY = re.compile(r"\b[Mm]ade by\b")
ELSEWHERE = re.compile(r"\bas (for|in|of) `|\bsee `|\bSee `|\bthose of `")
ARRAYS = re.compile(r"\b(Tensor|ndarray|NDArray|LongTensor|Tensors)\b")
SHAPES = re.compile(
    r"\bshapes?\b|\bshaped\b|\bdtypes?\b|\bscalars?\b|\bvectors?\b|\bmatri(x|ces)\b|\bimages?\b|\bone number\b|"
    r"\b(float|int|uint|bfloat|bf|fp)\d+\b|\bnumbers?\b|\bintegers?\b|\bbool(ean)?s?\b|\([^)]*,[^)]*\)|"
    r"\bany (tensor|dtype|shape)s?\b|\btoken ids\b|\bby name\b|\bstate dict\b|\bparameters?\b|\bbuffers?\b|"
    r"\bweights\b|\bgradients?\b|\bU\d+\b|\bbytes\b",
    re.IGNORECASE,
)


@dataclass
class Class:
    """What the checker knows of a class: its bases, its methods' parameters, and whether it is a protocol."""

    bases: list[str]
    methods: dict[str, list[str]]


@dataclass
class Module:
    """A source file and what its `__all__` names."""

    path: Path
    tree: ast.Module
    public: list[str] = field(default_factory=list)


def modules(root: Path) -> Iterator[Module]:
    """Read the source files."""
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        public: list[str] = []
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                public = [str(name.value) for name in ast.walk(node.value) if isinstance(name, ast.Constant)]
        yield Module(path, tree, public)


def parameters(function: Function) -> list[ast.arg]:
    """List the parameters of a function but `self` and `cls`."""
    given = function.args
    plain = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    rest = [arg for arg in (given.vararg, given.kwarg) if arg]
    return [arg for arg in [*plain, *rest] if arg.arg not in ("self", "cls") and not arg.arg.startswith("_")]


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def sections(text: str) -> dict[str, str]:
    """Split a docstring into its text, under "", and its sections."""
    found: dict[str, list[str]] = {"": []}
    here = ""
    for line in text.splitlines():
        heading = SECTION.match(line)
        if heading:
            here = heading[1]
            found.setdefault(here, []).append(heading[2])
        else:
            found[here].append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def entries(text: str) -> dict[str, str]:
    """Read a section of entries, `name: description`, several names joined by commas; deeper lines belong to them."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        entry = re.match(r"^ {4}([*\w]+(?:, [*\w]+)*)(?: \([^)]*\))?: ?(.*)$", line)
        if entry:
            names = [name.lstrip("*") for name in entry[1].split(", ")]
        for name in names:
            found[name] = found.get(name, "") + " " + (entry[2] if entry else line.strip())
    return found


class Checker:
    """Collects what is missing; `complaints` are lines to print."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = list(modules(root))
        errors = next(module for module in self.modules if module.path == root / "errors.py")
        self.errors = {node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)}
        self.classes: dict[str, list[Class]] = {}
        self.protocols: set[tuple[str, tuple[str, ...]]] = set()
        for module in self.modules:
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    self._remember(node)
        self.complaints: list[str] = []
        self.described = 0
        self.unknown_sources = dict(SOURCES)

    def _remember(self, node: ast.ClassDef) -> None:
        methods = {b.name: [p.arg for p in parameters(b)] for b in node.body if isinstance(b, Function)}
        bases = base_names(node)
        self.classes.setdefault(node.name, []).append(Class(bases, methods))
        if "Protocol" in bases:
            self.protocols |= {(name, tuple(names)) for name, names in methods.items()}

    def run(self, homes: dict[str, set[str]]) -> None:
        """Check every public name.

        Args:
            homes: Names to check by the dotted name of their module.
        """
        for module in self.modules:
            place = module.path.relative_to(self.root)
            names = homes.get(".".join(("netweight", *place.with_suffix("").parts)), set())
            for node in module.tree.body:
                if isinstance(node, Function) and node.name in names:
                    self._function(module, node, None)
                elif isinstance(node, ast.ClassDef) and node.name in names:
                    self._class(module, node)
        for name in self.unknown_sources:
            self.complaints.append(f"scripts/public_sources.py: {name} is no public name")

    def _say(self, module: Module, node: ast.AST, name: str, problem: str) -> None:
        path = module.path.relative_to(self.root.parents[1])
        self.complaints.append(f"{path}:{getattr(node, 'lineno', 0)}: {name}: {problem}")

    def _source(self, module: Module, node: ast.AST, name: str, text: str) -> None:
        dotted = ".".join(module.path.relative_to(self.root).with_suffix("").parts) + "." + name
        wanted = self.unknown_sources.pop(dotted, None)
        if wanted and wanted not in text:
            self._say(module, node, name, f"does not name its source, {wanted!r}")

    def _class(self, module: Module, node: ast.ClassDef) -> None:
        self.described += 1
        text = ast.get_docstring(node)
        if text is None:
            self._say(module, node, node.name, "has no docstring")
            return
        self._source(module, node, node.name, text)
        said = sections(text)
        described = entries(said.get("Args", "")) | entries(said.get("Attributes", ""))
        init = next((b for b in node.body if isinstance(b, Function) and b.name == "__init__"), None)
        fields = _fields(node) if init is None else []
        given = parameters(init) if init else []
        if not ELSEWHERE.search(text) and not (init and MADE_BY.search(text)):
            self._parameters(module, node, node.name, text, described, [*given, *fields])
            if init is not None or any(isinstance(b, Function) and b.name == "__post_init__" for b in node.body):
                self._raises(module, node, node.name, text)
        for method in node.body:
            if isinstance(method, Function) and not method.name.startswith("_"):
                self._function(module, method, node)

    def _function(self, module: Module, node: Function, owner: ast.ClassDef | None) -> None:
        self.described += 1
        name = f"{owner.name}.{node.name}" if owner else node.name
        decorators = [ast.unparse(d) for d in node.decorator_list]
        if any(d.split(".")[-1] in ("overload", "override", "setter") for d in decorators):
            return
        if owner and self._said_elsewhere(owner, node):
            return
        text = ast.get_docstring(node)
        if text is None:
            fields = sections(ast.get_docstring(owner) or "") if owner else {}
            if node.name not in entries(fields.get("Attributes", "")):
                self._say(module, node, name, "has no docstring")
            return
        self._source(module, node, name, text)
        extends = owner is not None and any(base in EXTENDED for base in base_names(owner))
        if extends or any("property" in d for d in decorators) or ELSEWHERE.search(text):
            return
        said = sections(text)
        around = text + (ast.get_docstring(owner) or "") if owner else text
        self._parameters(module, node, name, around, entries(said.get("Args", "")), parameters(node))
        self._raises(module, node, name, text)
        returns = None if node.returns is None else ast.unparse(node.returns)
        if returns is None or returns in NOTHING or {"Returns", "Yields"} & said.keys():
            return
        if not ANSWERS.match(text) and not self._is_class(returns):
            self._say(module, node, name, "does not say what it returns")

    def _is_class(self, annotation: str) -> bool:
        """Whether an annotation names one class of netweight, whose own docstring says what comes back."""
        return annotation == "Self" or annotation.strip("'\"").split("[")[0].split(".")[-1] in self.classes

    def _said_elsewhere(self, owner: ast.ClassDef, node: Function) -> bool:
        names = tuple(p.arg for p in parameters(node))
        bases = base_names(owner)
        if "Protocol" not in bases and (node.name, names) in self.protocols:
            return True
        waiting, seen = list(bases), set()
        while waiting:
            base = waiting.pop()
            if base in seen:
                continue
            seen.add(base)
            for known in self.classes.get(base, []):
                if node.name in known.methods:
                    return True
                waiting += known.bases
        return False

    def _parameters(
        self, module: Module, node: ast.AST, name: str, text: str, described: dict[str, str], given: list[ast.arg]
    ) -> None:
        for parameter in given:
            entry = described.get(parameter.arg)
            if entry is not None and entry.strip().startswith("Of "):
                self._say(module, node, name, f"the description of {parameter.arg!r} begins with 'Of'")
            if entry is None and not re.search(rf"`[^`\n]*\b{re.escape(parameter.arg)}\b[^`\n]*`", text):
                self._say(module, node, name, f"parameter {parameter.arg!r} is not described")
            elif (
                parameter.annotation is not None
                and ARRAYS.search(ast.unparse(parameter.annotation))
                and not SHAPES.search(entry if entry is not None else text)
            ):
                self._say(module, node, name, f"neither shape nor dtype of {parameter.arg!r} is told")
        known = {parameter.arg for parameter in given}
        for entry in described if isinstance(node, Function) else ():
            if entry not in known and entry != "self":
                self._say(module, node, name, f"describes {entry!r}, which is no parameter")

    def _raises(self, module: Module, node: ast.AST, name: str, text: str) -> None:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        bodies = [
            b for b in inside if b is node or (isinstance(b, Function) and b.name in ("__init__", "__post_init__"))
        ]
        for error in sorted({error for body in bodies for error in _raised(body)} & self.errors):
            if not re.search(rf"\b{error}\b", text):
                self._say(module, node, name, f"raises {error} and does not say when")


def _fields(node: ast.ClassDef) -> list[ast.arg]:
    """List the public fields of a dataclass, as parameters."""
    if not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return []
    return [
        ast.arg(b.target.id, b.annotation)
        for b in node.body
        if isinstance(b, ast.AnnAssign)
        and isinstance(b.target, ast.Name)
        and not b.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(b.annotation)
        and "init=False" not in ast.unparse(b)
    ]


def _raised(function: ast.AST) -> Iterator[str]:
    """Name what a function raises itself; functions defined in it are not its own body."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield ast.unparse(kind).split(".")[-1]
        waiting += ast.iter_child_nodes(node)


def homes_of(source: Path) -> dict[str, set[str]]:
    """Return the public names by the module that defines them."""
    found: dict[str, set[str]] = {}
    for homes in public_names(source).values():
        for name, home in homes.items():
            found.setdefault(home, set()).add(name)
    return found


def main(root: Path) -> int:
    """Check the package in `root`, print what is missing, and return 1 if anything is."""
    checker = Checker(root)
    checker.run(homes_of(root.parent))
    for line in checker.complaints:
        print(line)
    if checker.complaints:
        print(f"{len(checker.complaints)} things to say about {checker.described} public names and methods.")
        return 1
    print(f"{checker.described} public names and methods are described.")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1] / "src" / "netweight"))
