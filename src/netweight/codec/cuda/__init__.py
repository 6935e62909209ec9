"""The codec on CUDA devices: what a blob's layout is, and whether kernels can run here.

Importing this needs neither a GPU nor its libraries.
"""

from netweight.codec.cuda.layout import BlobLayout, layout_of

__all__ = ["BlobLayout", "layout_of", "unavailable_because"]


def unavailable_because() -> str | None:
    """Why kernels cannot run here, with the cure, in one sentence; None when they can."""
    return "This build has no CUDA kernels. Update netweight."
