"""The report page in headless Chromium: no console error, no broken image, nothing wider than the window."""

import pytest
from browser import DARK, console, look, needs_chromium
from report_under_test import report_of_everything

pytestmark = needs_chromium
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report_of_everything().write(tmp_path_factory.mktemp("report"))


def test_the_console_stays_silent(page):
    assert console(page)[0] == []


@pytest.mark.parametrize(("width", "options"), [(390, ()), (768, (DARK,)), (1280, ()), (1280, (DARK,))])
def test_nothing_is_broken_or_pale_and_nothing_overflows(page, width, options):
    seen = look(page, width, *options)
    assert seen["pale"] == []
    assert seen["page"] <= width
    assert seen["outside"] == []
    assert seen["broken"] == 0
    assert seen["images"] == 2
    assert len(seen["drawings"]) == 3
    assert min(seen["drawings"]) > 50


def test_nothing_is_lost_on_paper(page, tmp_path):
    printed = tmp_path / "printed.html"  # what print does, in a window as wide as paper is between its margins
    printed.write_text(page.read_text().replace("@media print", "@media all"))
    seen = look(printed, 720)
    assert seen["page"] <= 720
    assert seen["broken"] == 0


def test_the_probe_sees_an_overflow(page):
    wide = page.with_name("wide.html")
    wide.write_text(page.read_text().replace("<footer>", '<footer><div style="width: 2000px">wide</div>'))
    assert look(wide, 390)["page"] > 390


def test_the_page_follows_the_readers_light_or_dark_setting(page):
    light = look(page, 1280)["dark"]
    dark = look(page, 1280, DARK)["dark"]
    assert light == "rgb(251, 250, 248)"
    assert dark == "rgb(20, 23, 26)"
