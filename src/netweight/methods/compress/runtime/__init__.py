"""Models whose weights stay compressed in memory while they run and train, bit for bit.

`tensor.py` is the parameter that stands for a compressed weight, `storage.py` its bytes, `functional.py` how layers
calculate with it. `cuda.py` decodes on GPUs, `prefetch.py` decodes the next layer while one computes, `fsdp.py` shards
weights over processes. `model.py` turns whole models over, `layerwise.py` trains them, `activations.py` keeps their
activations compressed, `checkpoint.py` saves them. After NeuZip (arXiv 2410.20650).
"""
