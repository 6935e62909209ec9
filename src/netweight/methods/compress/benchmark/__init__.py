"""The codec against its peers, in one process and as ratios: `netweight benchmark codec`.

`data.py` holds what is compressed, `peers.py` and `ours.py` who compresses, `measure.py` the measurement, `result.py`
its numbers as JSON, `targets.py` what they should be. Reads no data set itself.
"""
