"""The door to other libraries: transformers, diffusers, peft, Flower, opacus, Ray. Only `zoo` knows them beside it.

Importing this loads none of them. Modules that register a plug-in (`transformers`, `diffusers`) do so when they are
imported.
"""
