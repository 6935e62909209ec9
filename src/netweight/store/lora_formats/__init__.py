"""How others write low-rank adapters: the layouts of peft, diffusers and kohya; `files.py` chooses one and reads.

Each layout says, from a file's names, shapes and a few numbers alone, which tensors are which module's factors and what
they are scaled by (`parts.Part`); and how an adapter is written. Names of modules begin with the component of the
pipeline, if there is one (`layouts`).
"""
