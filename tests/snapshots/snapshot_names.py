"""Which names are public: found in the package, and as its documentation and examples import them."""

import importlib
import re
import warnings
from pathlib import Path

import netweight

ROOT = Path(__file__).parents[2]
FROM = re.compile(r"^ *from (netweight[\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)


def at_the_top():
    """The names that `import netweight` offers."""
    return sorted(netweight.__all__)


def documented():
    """`module:name` of what the documentation's and the examples' code imports."""
    found = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text()
        blocks = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            for module, names in re.findall(FROM, block):
                found |= {f"{module}:{name}" for name in re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", names))}
            found |= {f"{module}:" for module in re.findall(r"^ *import (netweight[\w.]+)", block, re.MULTILINE)}
    return sorted(found)


def resolve(name):
    """Import `module:attribute`, `module:` or a dotted name below netweight; deprecation is no failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if ":" in name:
            module, attribute = name.split(":")
            found = importlib.import_module(module)
            if not attribute or hasattr(found, attribute):
                return found if not attribute else getattr(found, attribute)
            return importlib.import_module(f"{module}.{attribute}")
        found, path = netweight, "netweight"
        for part in name.split("."):
            path = f"{path}.{part}"
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        return found
