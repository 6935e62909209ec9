"""vLLM opens folders that netweight compressed: `vllm serve FOLDER --load-format netweight`."""

from importlib import import_module


def register() -> None:
    """Make the quantization method and the load format known; vLLM calls this in each of its processes."""
    import_module("vllm_netweight.quantization")
