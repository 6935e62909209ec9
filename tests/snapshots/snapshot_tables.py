"""Small runs of the tables of `netweight reproduce`: which, with which options, and what they measured.

The one import below the surface of this folder: where the tables are.
"""

import json

from netweight_experiments.tables import run_table

REPNOISE = ["layer-distances", "notebook", "pca"]
REPNOISE += [f"table{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 11, *range(14, 21), 23)]
NEMO = ["table1", "runtime", "fig3", "fig5", "fig6", "fig7", "thresholds", "ablation", "ssim-by-type", "shared-neurons",
        "rerun-neurons", "rerun-layers", "rerun-shared-sets"]  # fmt: skip
W2W = ["table2-4", "table5", "fig8", "components", "histograms", "traversal"]

# Smaller than `--scale small`: two steps of a defense, two prompts, five people, two rounds.
SMALL = {
    **{f"repnoise-{name}": {"share": 0.002} for name in REPNOISE},
    **{f"nemo-{name}": {"prompts": 2, "images": 2} for name in NEMO},
    "hyperfl-fig4": {"rounds": 2},
    "hyperfl-fig8": {"rounds": 2},
    "hyperfl-table1": {"only": "digits-20-local-*", "rounds": 2},
    "hyperfl-table3": {},
    "hyperfl-table4": {},
    "hyperfl-table5": {},
    "hyperfl-fig5": {},
    "hyperfl-fig6": {},
    "hyperfl-fig7": {},
    "neuzip-fig1": {},
    "neuzip-fig4": {},
    "neuzip-fig5": {},
    **{f"w2w-{name}": {"people": 5} for name in W2W},
}
PAPERS = ("neuzip", "repnoise", "nemo", "hyperfl", "w2w")
# Held in every run of the tests; the others are marked as studies.
QUICK = ("neuzip-fig5", "nemo-fig3", "nemo-fig5", "nemo-rerun-neurons", "nemo-rerun-layers", "nemo-rerun-shared-sets",
         "nemo-ssim-by-type", "repnoise-table16")  # fmt: skip


def measure(table, out):
    """Measure a table and return its columns, rows and findings as JSON has them."""
    result = run_table(table, out=out, options=SMALL[table], overwrite=True)
    written = json.loads((out / f"{table}-small" / "result.json").read_text())
    return {
        "columns": written["columns"],
        "rows": written["rows"],
        "findings": [{key: each[key] for key in ("name", "value", "unit", "target")} for each in written["findings"]],
        "tables": [{key: each[key] for key in ("title", "columns", "rows")} for each in written["tables"]],
        "compared": len(result.to_json()["rows"]),
    }
