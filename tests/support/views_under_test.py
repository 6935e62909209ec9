"""A page about a weight space of flat pictures, whose colors say which picture is which. Not a test itself."""

import numpy as np

from netweight.methods.space.view.page import AdapterMap, NearestAdapters, Samples, Traversal, View

SIDE = 8
STRENGTHS = (-2.0, -0.5, 1.0)
NAMES = ["west", "east", "<b>north</b> & \"co\" 'x'", "south"]
PLACES = np.array([[-2.0, 0.1, 0.5], [2.0, 0.0, -0.5], [0.0, 1.5, 1.0], [0.1, -1.5, 0.0]])
KINDS = ["round", "square", "<i>odd</i>", "round"]


def flat(*colors):
    """Pictures of one color each, shape (n, SIDE, SIDE, 3)."""
    return np.broadcast_to(np.array(colors, np.uint8)[:, None, None], (len(colors), SIDE, SIDE, 3)).copy()


def walk(red):
    """Red says which walk, green the place of the strength, blue the noise."""
    return np.stack([flat(*[(red, 10 * place, noise) for noise in range(2)]) for place in range(len(STRENGTHS))])


def adapter_map(**changes):
    near = np.array([[1, 2], [0, 3], [0, 1], [1, 0]])
    parts = {
        "names": NAMES,
        "coordinates": PLACES,
        "axes": ["component 1", "component 2", "component 3"],
        "thumbnails": flat(*[(0, 0, 60 * number) for number in range(4)]),
        "labels": {
            "age": [20.0, 30.5, 41.0, None],
            "kind": KINDS,
            "many": [1.0, 2.0, 3.0, 4.0],
            "glasses": [True, False, None, True],
        },
        "neighbors": NearestAdapters(near, np.array([[0.9, 0.2], [0.9, -0.125], [0.3, 0.1], [0.5, 0.4]])),
    }
    return AdapterMap(**{**parts, **changes})


def samples(**changes):
    parts = {
        "images": np.stack([flat((0, 90, 0), (0, 91, 0)), flat((0, 190, 0), (0, 191, 0))]),
        "neighbors": NearestAdapters(np.array([[2], [1]]), np.array([[0.75], [0.5]])),
        "coordinates": np.array([[1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]]),
        "note": "Drawn <at> random.",
    }
    return Samples(**{**parts, **changes})


def view(**changes):
    parts = {
        "title": "A space <script>alert(1)</script>",
        "traversals": [
            Traversal("beard <u>", "direction", STRENGTHS, walk(100), "held-out R² 0.9 <&>"),
            Traversal("component 1", "component", STRENGTHS, walk(200)),
        ],
        "points": adapter_map(),
        "samples": samples(),
        "summary": "Two sliders.",
        "reader": "a <b>reader</b>",
        "facts": {"a very long digest": "0f" * 64, "prompt": "</script><script>alert(2)</script>"},
        "command": "netweight space view space --out " + "long" * 40,
    }
    return View(**{**parts, **changes})
