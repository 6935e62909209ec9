"""What a page about a weight space takes and refuses, and the pictures in its file."""

import base64
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from views_under_test import STRENGTHS, adapter_map, flat, samples, view, walk

from netweight.errors import OutputExists, UsageError
from netweight.methods.space.view import page as view_page
from netweight.methods.space.view.page import NearestAdapters, Traversal, render_view, write_view
from netweight.metrics.images import png_bytes


def read(png):
    image = pytest.importorskip("PIL.Image", reason="pillow is in the federated extra")
    return np.asarray(image.open(io.BytesIO(png)))


def sheets(page):
    return [read(base64.b64decode(data)) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1), st.booleans())
def test_a_png_holds_the_same_pixels(height, width, channels, seed, smooth):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    if smooth:
        pixels = np.cumsum(pixels // 100, axis=1).astype(np.uint8)
    assert (read(png_bytes(pixels)).reshape(pixels.shape) == pixels).all()


@pytest.mark.parametrize("pixels", [np.zeros((2, 2), np.uint8), np.zeros((2, 2, 3)), np.zeros((0, 2, 3), np.uint8)])
def test_what_is_no_picture_makes_no_png(pixels):
    with pytest.raises(UsageError, match="cannot contain pixels"):
        png_bytes(pixels)


def test_the_sheets_hold_every_picture_at_its_place():
    first, second, thumbnails, *drawn = sheets(render_view(view()))
    side = flat((0, 0, 0)).shape[1]
    for red, sheet in ((100, first), (200, second)):
        for place in range(len(STRENGTHS)):
            for noise in range(2):
                cell = sheet[noise * side : (noise + 1) * side, place * side : (place + 1) * side]
                assert (cell == (red, 10 * place, noise)).all()
    assert [int(thumbnails[y * side, x * side, 2]) for y in range(2) for x in range(2)] == [0, 60, 120, 180]
    assert [tuple(map(int, image[0, x])) for image in drawn for x in (0, side)] == [
        (0, 90, 0), (0, 91, 0), (0, 190, 0), (0, 191, 0),
    ]  # fmt: skip


def test_the_page_needs_nothing_from_outside_and_holds_names_as_text(tmp_path):
    page = write_view(view(), tmp_path / "faces.html")
    text = page.read_text()
    assert not re.search(r"""(src|href)="(?!data:|#)|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)""", text)
    for raw in ("<b>north", "<i>odd", "<u>", "alert(1)</script>", "</script><script>alert(2)", "<at>"):
        assert raw not in text
    assert text.count("<script") == 2
    assert "&lt;b&gt;north" in text
    with pytest.raises(OutputExists):
        write_view(view(), page)
    write_view(view(title="Another"), page, overwrite=True)
    assert "<title>Another</title>" in page.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["faces.html"]


def test_a_page_of_sliders_alone_is_a_page():
    text = render_view(view(points=None, samples=None, facts={}, command=None))
    assert len(sheets(text)) == 2
    assert 'id="map"' not in text


def test_a_page_too_large_is_refused_and_says_what_takes_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr(view_page, "MAX_BYTES", 20_000)
    with pytest.raises(UsageError, match=r"2 traversals take \d.*4 thumbnails.*2 samples.*Show fewer"):
        write_view(view(), tmp_path / "faces.html")
    assert not list(tmp_path.iterdir())


def _walk(**changes):
    parts = {"name": "beard", "kind": "direction", "strengths": STRENGTHS, "images": walk(1)}
    return Traversal(**{**parts, **changes})


nan = float("nan")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: _walk(strengths=(-1, nan, 1)), "A strength of 'beard' is NaN"),
        (lambda: _walk(strengths=(0, 0, 1)), "'beard' do not ascend"),
        (lambda: _walk(strengths=(0,), images=walk(1)[:1]), "'beard' do not ascend"),
        (lambda: _walk(images=walk(1)[:2]), r"images of 'beard' have shape \(2, 2, 8, 8, 3\).*\(3, any, height"),
        (lambda: _walk(images=walk(1) / 255), "type float64.*uint8"),
        (lambda: _walk(images=[flat((1, 1, 1)), np.zeros((1, 4, 4, 3), np.uint8)]), "images of 'beard'"),
        (lambda: view(traversals=[_walk(images=None)]), "no images.*a live pipeline"),
        (lambda: view(traversals=[]), "no traversal to show"),
        (lambda: view(traversals=[_walk(), _walk()]), "Two traversals are called 'beard'"),
        (lambda: view(traversals=[_walk(images=walk(1)[:, :, :4])]), "8 × 8 pixels, those of beard 8 × 4"),
        (lambda: view(points=None), "there is no map"),
        (lambda: adapter_map(names=["a", "b", "a", "c"]), "called 'a'"),
        (lambda: adapter_map(coordinates=np.full((4, 3), nan)), "coordinate of the map is NaN"),
        (lambda: adapter_map(coordinates=np.zeros((3, 3))), r"shape \(3, 3\), not \(4, 3\)"),
        (lambda: adapter_map(axes=["one"], coordinates=np.zeros((4, 1))), "two axes"),
        (lambda: adapter_map(thumbnails=flat((1, 1, 1))), "thumbnails of the map"),
        (lambda: adapter_map(labels={"age": [1, 2, 3]}), "'age' has 3 values for 4"),
        (lambda: adapter_map(labels={"age": [1, "x", None, 3]}), "'age' mixes"),
        (lambda: adapter_map(labels={"age": [1, nan, None, 3]}), "'age' is NaN"),
        (lambda: adapter_map(neighbors=NearestAdapters(np.full((4, 1), 4), np.zeros((4, 1)))), "outside 0 to 3"),
        (lambda: adapter_map(neighbors=NearestAdapters(np.zeros((2, 1), int), np.zeros((2, 1)))), "has 4"),
        (lambda: NearestAdapters(np.zeros((2, 1), int), np.zeros((2, 2))), "do not fit similarities"),
        (lambda: NearestAdapters(np.zeros((1, 1), int), np.full((1, 1), nan)), "similarity is NaN"),
        (lambda: view(samples=samples(coordinates=np.zeros((2, 2)))), r"the samples have shape \(2, 2\)"),
        (lambda: samples(images=np.zeros((0, 1, 8, 8, 3), np.uint8)), "images of samples"),
    ],
)
def test_what_does_not_fit_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()
