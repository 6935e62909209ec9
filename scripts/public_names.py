"""The public names, read from the source alone; `--write` makes docs/reference.md of them.

Public are the names in `__all__` of netweight and of each method's and attack's package; `lazy_names` says where each
is defined. A name that is in none of them may change without a word.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [
    "netweight", "netweight.codec", "netweight.methods.compress", "netweight.methods.federate",
    "netweight.methods.forget", "netweight.methods.immunize", "netweight.methods.space",
    "netweight.attacks.embedding_search", "netweight.attacks.finetuning", "netweight.attacks.gradient_inversion",
]  # fmt: skip
HEAD = """# Public names

This page lists the public names of `netweight` and of the packages of methods and attacks. All other names may change
without notice. The documentation's site shows the docstring of a name in place of each line that begins with `:::`.
`python scripts/public_names.py --write` writes this page.
"""


def public_names(source: Path) -> dict[str, dict[str, str]]:
    """Return, for each package, its public names and the module that defines each."""
    return {package: dict(sorted(_homes(source, package).items())) for package in PACKAGES}


def _homes(source: Path, package: str) -> dict[str, str]:
    path = source.joinpath(*package.split("."), "__init__.py")
    tree, homes = ast.parse(path.read_text()), dict[str, str]()
    exported = [
        name.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.walk(node.value)
        if isinstance(name, ast.Constant)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names":
            homes |= ast.literal_eval(node.args[1])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            homes |= {name.name: node.module or "" for name in node.names if name.name in exported}
    return homes


def page(source: Path) -> str:
    """Write the reference page."""
    parts = [HEAD]
    for package, homes in public_names(source).items():
        if homes:
            parts.append(f"## {package}\n")
        for name, home in homes.items():
            dotted = home if source.joinpath(*home.split(".")).is_dir() else f"{home}.{name}"
            parts.append(f"::: {dotted}\n")
    parts.append("## netweight.errors\n\n::: netweight.errors\n")
    return "\n".join(parts)


def main() -> int:
    """Write the page, or say that it is not what the source says; print how many names are public."""
    file, made = ROOT / "docs" / "reference.md", page(ROOT / "src")
    if "--write" in sys.argv:
        file.write_text(made)
    names = len({(name, home) for homes in public_names(ROOT / "src").values() for name, home in homes.items()})
    print(f"{names} public names.")
    if file.read_text() != made:
        print("docs/reference.md is not up to date: run python scripts/public_names.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
