"""weights2weights: a collection of low-rank adapters as one space, after arXiv 2406.09413.

Read `settings`, then how a bank becomes a space: `gram` (inner products), `basis`, `fit` and `space`; then `points`,
`labels`, `directions`, `edits` and `inversion`, which work on scores; `view` is the page; `space_files`, `recipe` and
`images` are what commands and recipes call.
"""

from netweight.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Direction": "netweight.methods.space.points",
        "edit": "netweight.methods.space.edits",
        "fit_direction": "netweight.methods.space.directions",
        "read_labels": "netweight.methods.space.labels",
    },
)
