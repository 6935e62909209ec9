"""`python -m netweight_experiments.benchmarks PART.NAME [OPTION …]`: runs a script, such as `compress.memory`."""

import json
import sys

from netweight_experiments.benchmarks.script import run

if __name__ == "__main__":
    result = run(sys.argv[1], sys.argv[2:])
    if result is not None:
        print(json.dumps(result, indent=1, ensure_ascii=False, default=str))
