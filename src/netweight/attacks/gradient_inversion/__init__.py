"""Gradient inversion: private images from the gradient or the update that a client sent. One attack per file.

Every attack takes `local_update(params, (images, labels)) -> tensors`, the client's own training rule (`victim.py`), so
it works on any PyTorch model and any rule that is differentiable with respect to the images. Import the files
themselves; nothing is loaded here.
"""
