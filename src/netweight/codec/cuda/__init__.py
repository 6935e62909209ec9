"""The codec on NVIDIA's GPUs: netweight's own kernels, compiled for the GPU at hand when they are first used.

Importing this needs neither a GPU nor the extra `cuda`; `unavailable_because` tells whether the kernels can run.
"""

from netweight.codec.cuda.compiling import compile_all
from netweight.codec.cuda.launching import launch, unavailable_because

__all__ = ["compile_all", "launch", "unavailable_because"]
