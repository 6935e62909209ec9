"""Formats of low-rank adapters: the files of peft, diffusers, kohya and ComfyUI.

Reading order: `tensor_names` (which part of a change a tensor is), `naming` and its tables (what modules are called),
`identify` (which architecture a file is of), `peft_settings`, `scales` and `metadata` (what scales it, and where it
comes from), `other_kinds` and `parts` (a module's change), `reading`, `writing`; `base_weights` and `quantized` read
the model's own files.
"""
