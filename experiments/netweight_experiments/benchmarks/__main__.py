"""`python -m netweight_experiments.benchmarks PART.NAME [OPTION …]` runs a script; without a name it lists them."""

import json
import sys

from netweight_experiments.benchmarks.script import run, scripts

if __name__ == "__main__":
    if not sys.argv[1:]:
        print("\n".join(f"{name:<28}{line}" for name, line in scripts().items()))
        sys.exit()
    result = run(sys.argv[1], sys.argv[2:])
    if result is not None:
        print(json.dumps(result, indent=1, ensure_ascii=False, default=str))
