"""Small worlds: models and data sets that are small and at hand offline; what the tour, the tests and the docs use."""

from importlib.util import find_spec
from pathlib import Path

from netweight.errors import MissingExtra


def checkpoint(name: str) -> Path:
    """The folder of a small trained model: of the package netweight-toys, or of the clone that this file is in."""
    spec = find_spec("netweight_toys")
    where = spec.origin if spec is not None else None
    folder = Path(where).parent if where else Path(__file__).parents[3] / "toys" / "netweight_toys"
    if not folder.is_dir():
        raise MissingExtra(
            "The small models are in the package netweight-toys, which is not installed.",
            cure="Run: pip install netweight-toys (in a clone: pip install ./toys)",
        )
    return folder / name
