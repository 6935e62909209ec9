"""Models whose weights stay compressed in memory while they run and train, bit for bit.

`box.py` holds one weight's bytes, `ops.py` decodes them, on GPUs by `device.py`; `ahead.py` decodes the next layer
while one computes, in the `order.py` of the last pass, on GPUs by `side_stream.py`;
`tensor.py` is the parameter that stands for the weight, `compute.py` how layers calculate with it, `model.py` turns
whole models over, `layerwise.py` trains them, `activations.py` keeps their activations compressed, `checkpoint.py`
saves them. After NeuZip (arXiv 2410.20650).
"""
