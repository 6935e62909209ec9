"""Endings of the names of files that contain weights, one list for every place that finds, copies or refuses them."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Checkpoints of PyTorch: pickles, which run code when they are opened by programs that do not restrict them."""
FOREIGN = (
    ".h5", ".hdf5", ".keras", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf", ".tflite", ".pb", ".mlmodelc",
)  # fmt: skip
"""Weights in the formats of other programs, which are never read here."""
WEIGHTS = (".safetensors", *PICKLES, *FOREIGN)
"""Every file that contains weights."""
