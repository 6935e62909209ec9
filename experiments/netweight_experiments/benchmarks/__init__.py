"""Benchmarks, each a script with a function `main`: `python -m netweight_experiments.benchmarks PART.NAME`."""

import sys

_asked = dict(zip(sys.orig_argv, sys.orig_argv[1:], strict=False)).get("-m", "").removeprefix(f"{__name__}.")
if sys.argv[0] == "-m" and "." in _asked and not _asked.startswith("netweight"):  # which would do nothing
    sys.exit(f"Write it as: python -m {__name__} {_asked}")
