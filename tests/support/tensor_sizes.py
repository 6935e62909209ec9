"""The size of the largest dense tensor that code makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Sizes(TorchDispatchMode):
    """Notes how many numbers the largest result of an operator has memory for."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            whole = type(each) is torch.Tensor and each.layout == torch.strided and each.device.type == "cpu"
            if whole and each.dtype != torch.uint8:  # not a compressed weight
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return result
