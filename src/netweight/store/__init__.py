"""Tensors at rest: safetensors files and folders whose tensors may be compressed, read and written one at a time.

A compressed file is an ordinary safetensors file. Each tensor `name` is stored as a U8 tensor `name.net` that holds the
codec's bytes; the entry `netweight` of `__metadata__` says what each was (see `safetensors.py`).
"""

from netweight.store.reader import Store as Store
from netweight.store.reader import TensorInfo as TensorInfo
from netweight.store.reader import open_store as open_store
from netweight.store.writer import StoreWriter as StoreWriter
