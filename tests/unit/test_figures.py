import base64
import io
import re
import xml.etree.ElementTree as ET

import numpy
import pytest
from PIL import Image
from report_under_test import all_figures

from netweight.errors import UsageError
from netweight.methods.compress.bits import bit_statistics
from netweight.methods.compress.inspect import bits_figure, plot_bits
from netweight.report import plots as figures

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")


@pytest.fixture(scope="module")
def drawn():
    return all_figures()


def test_svg_is_well_formed_says_what_it_shows_and_takes_the_pages_colors(drawn):
    for figure in (figure for figure in drawn if figure.kind == "svg"):
        root = ET.fromstring(figure.data)
        assert root.get("role") == "img"
        assert root[0].tag.endswith("title")
        assert root[0].text == figure.alt
        assert "var(--ink" in figure.data
        assert "var(--series-1" in figure.data or "<image" in figure.data
        for mark in (figures.INK_MARK, figures.GRID_MARK, *figures.SERIES_MARKS, "DejaVu", "<style"):
            assert mark not in figure.data


def test_the_same_plot_gives_the_same_bytes(drawn):
    assert all_figures() == drawn


@pytest.mark.parametrize("kind", ["uint8", "float", "gray"])
def test_large_images_are_reduced_so_that_a_page_can_hold_them(kind):
    noise = numpy.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=numpy.uint8)
    image = {"uint8": noise, "float": noise / 255, "gray": noise[:, :, 0]}[kind]
    grid = figures.image_grid([[image] * 6] * 4, rows=list("abcd"), columns=list("123456"), alt="noise")
    assert len(grid.data) < 1_200_000
    pictures = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", grid.data)
    sizes = {Image.open(io.BytesIO(base64.b64decode(each))).size for each in pictures}
    assert len(pictures) == 24
    assert sizes == {(91, 91)}
    flat = numpy.full((512, 512, 3), 77, dtype=numpy.uint8)
    (picture,) = re.findall(
        r"data:image/png;base64,([A-Za-z0-9+/=\s]+)",
        figures.image_grid([[flat]], rows=["a"], columns=["1"], alt="flat").data,
    )
    assert set(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").getcolors()[0][1]) == {77}


def test_an_image_grid_holds_its_pixels_and_names_in_the_pages_color(drawn):
    inner = re.findall(r'<image xlink:href="data:image/png;base64,([A-Za-z0-9+/=\s]+)"', drawn[-1].data)
    assert inner
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in inner)
    assert re.search(r"<text[^>]*var\(--ink", drawn[-1].data)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: figures.bars({"a": [1]}, ["p", "q"], alt="x"), "1 bars for 2 labels"),
        (lambda: figures.lines({"a": ([1], [1, 2])}, alt="x"), "different length"),
        (lambda: figures.image_grid([[None]], rows=["r"], columns=["a", "b"], alt="x"), "1 rows of 2 images"),
        (lambda: figures.image_grid([[numpy.zeros((2, 2, 4))]], rows=["r"], columns=["c"], alt="x"), r"\(2, 2, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call()


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".PDF", b"%PDF")])
def test_bits_are_plotted_into_the_format_of_the_suffix(tmp_path, suffix, magic):
    labeled = {
        "floats": bit_statistics(numpy.linspace(-1, 1, 100, dtype="f4")),
        "bytes": bit_statistics(numpy.eye(3) > 0),
    }
    path = plot_bits(labeled, tmp_path / f"bits{suffix}")
    assert path.read_bytes().startswith(magic)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert plot_bits(labeled, path).read_bytes() == path.read_bytes()


def test_plots_that_cannot_be_are_refused(tmp_path):
    some = {"a": bit_statistics(numpy.ones(3, "f4"))}
    with pytest.raises(UsageError, match=r"\.svg, \.png, \.pdf"):
        plot_bits(some, tmp_path / "bits.jpg")
    with pytest.raises(UsageError, match="does not exist"):
        plot_bits(some, tmp_path / "nowhere" / "bits.svg")
    with pytest.raises(UsageError, match="no weights"):
        bits_figure({"a": bit_statistics(numpy.ones(0, "f4"))})


def test_the_alternative_text_tells_the_entropies():
    figure = bits_figure({"ones": bit_statistics(numpy.ones(8, "f4"))}, caption="c")
    assert "ones: sign 0.00 of 1 bits, exponent 0.00 of 8 in 1 values, mantissa 0.00 of 23" in figure.alt
