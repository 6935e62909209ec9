"""Loaders of transformers and diffusers models, below the methods that work on them."""

from importlib.metadata import entry_points


def open_compressed_with(library: str) -> None:
    """Let `transformers` or `diffusers` open compressed folders: load the plug-ins registered for it."""
    for plugin in entry_points(group="netweight.formats", name=library):
        plugin.load()
