"""The page about a weight space in headless Chromium: sliders, map, names from anywhere, phone, dark and light."""

import re
from dataclasses import replace

import pytest
from browser import DARK, console, look, needs_chromium
from views_under_test import NAMES, view

from netweight.methods.space.points import read_points
from netweight.methods.space.view.page import SliderSpace, write_view

pytestmark = needs_chromium

ACTIONS = """
  while (document.documentElement.dataset.ready !== "yes") await new Promise(next => setTimeout(next, 20));
  const one = selector => document.querySelector(selector), all = selector => [...document.querySelectorAll(selector)];
  const fire = (part, kind) => part.dispatchEvent(new Event(kind, { bubbles: true }));
  const pixel = (canvas, x, y) => [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
  const looks = all(".look"), sliders = all("input[type=range]"), plot = one("#plot"), color = one("#color");
  const fills = () => all("#plot .mark").map(part => getComputedStyle(part).fill + part.getAttribute("d"));
  const key = name => plot.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  const move = (slider, value) => { slider.value = value; fire(slider, "input"); };
  const painted = () => looks.map(canvas => pixel(canvas, 2, 2));
  const second = () => pixel(looks[0], looks[0].width - 2, 2);

  seen.start = painted();
  move(sliders[0], 2); move(sliders[1], 0);
  seen.moved = painted();
  seen.second = second();
  seen.told = [sliders[0].getAttribute("aria-valuetext"), one("output").textContent];
  seen.told.push(looks[1].getAttribute("aria-label"));
  const films = all(".film"), box = films[1].getBoundingClientRect();
  const corner = { clientX: box.right - 2, clientY: box.bottom - 2, bubbles: true };
  films[1].dispatchEvent(new PointerEvent("pointerdown", corner));
  seen.pointed = pixel(looks[1], 2, 2);
  move(sliders[0], 1); move(sliders[1], 1);
  seen.back = painted();

  seen.fills = {};
  for (const option of [...color.options].map(option => option.value)) {
    color.value = option; fire(color, "change");
    seen.fills[option] = fills();
    seen["legend " + option] = one("#legend").textContent;
  }
  seen.card = one("#card h3").textContent;
  plot.focus();
  seen.focus = document.activeElement === plot;
  const pressed = name => { key(name); return one("#card h3").textContent; };
  seen.walked = ["ArrowRight", "ArrowUp", "ArrowDown", "End", "Home"].map(pressed);
  seen.said = one("#said").textContent;
  const at = all("#plot .mark")[2].getBoundingClientRect();
  const where = { clientX: (at.left + at.right) / 2, clientY: (at.top + at.bottom) / 2, bubbles: true };
  plot.dispatchEvent(new PointerEvent("pointermove", where));
  seen.hovered = [one("#card h3").textContent, pixel(one("#card .portrait"), 1, 1), one("#card dl").textContent];
  plot.dispatchEvent(new PointerEvent("pointerleave", where));
  seen.left = one("#card h3").textContent;
  plot.dispatchEvent(new MouseEvent("click", where));
  seen.clicked = one("#card h3").textContent;
  seen.neighbors = all("#card .near button").map(part => part.textContent);
  one("#card .near button").click();
  seen.neighbor = one("#card h3").textContent;
  one("#find").value = "south"; fire(one("#find"), "input");
  seen.found = one("#card h3").textContent;
  seen.near_samples = all(".sample .near button").map(part => part.textContent);
  one(".sample .near button").click();
  seen.sampled = one("#card h3").textContent;
  const before = all("#plot .mark")[0].getAttribute("transform");
  one("#across").value = "2"; fire(one("#across"), "change");
  seen.turned = all("#plot .mark")[0].getAttribute("transform") !== before;
  one("#drawn").click();
  seen.crosses = all("#plot .drawn").length;
  const blank = one("#plot canvas").toDataURL();
  one("#pictures").click();
  seen.pictures = one("#plot canvas").toDataURL() !== blank;
  key("Escape");
  seen.empty = one("#card").children.length;
  seen.strange = all("section b, section i, section u").length;
  seen.page = Math.max(seen.page, document.documentElement.scrollWidth);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_view(view(), tmp_path_factory.mktemp("view") / "faces.html")


@pytest.fixture(scope="module")
def seen(page):
    return look(page, 360, "--virtual-time-budget=8000", actions=ACTIONS)


def test_its_own_policy_lets_the_script_run_and_the_console_stays_silent(page):
    said, document = console(page, "--virtual-time-budget=8000")
    assert said == []
    assert 'data-ready="yes"' in document


def test_the_policy_refuses_any_other_script(page):
    text = page.read_text().replace("</body>", '<script>document.title = "taken"</script></body>')
    other = page.with_name("other.html")
    other.write_text(text)
    said, document = console(other, "--virtual-time-budget=8000")
    assert len(said) == 1
    assert "Content Security Policy" in said[0]
    assert "<title>taken" not in document


def test_moving_a_slider_shows_the_picture_that_was_painted_there(seen):
    assert seen["start"] == [[100, 10, 0], [200, 10, 0]]  # -0.5 is nearest to 0
    assert seen["moved"] == [[100, 20, 0], [200, 0, 0]]
    assert seen["second"] == [100, 20, 1]
    assert seen["told"] == ["+1 standard deviations", "+1 σ", "component 1 at \u22122 σ"]
    assert seen["pointed"] == [200, 20, 0]
    assert seen["back"] == seen["start"]


def test_choosing_a_label_colors_the_map_anew(seen):
    kinds = seen["fills"]["kind"]
    assert kinds[0] == kinds[3]
    assert len(set(kinds)) == 3
    assert len({tuple(fills) for fills in seen["fills"].values()}) == 5
    assert len(set(seen["fills"][""])) == 1
    assert seen["fills"]["glasses"][2].startswith("none")
    assert "round (2)" in seen["legend kind"]
    assert "<i>odd</i> (1)" in seen["legend kind"]
    assert "not known" in seen["legend age"]
    assert "yes (2)no (1)" in seen["legend glasses"]


def test_pointer_keys_names_and_neighbors_lead_to_an_adapter(seen):
    assert seen["card"] == "west"
    assert seen["focus"]
    assert seen["walked"] == ["east", NAMES[2], "south", "south", "west"]
    assert seen["said"] == "west, age 20, kind round, many 1, glasses yes"
    assert seen["hovered"][:2] == [NAMES[2], [0, 0, 120]]
    assert "glassesnot known" in seen["hovered"][2]
    assert seen["left"] == "west"
    assert seen["clicked"] == NAMES[2]
    assert seen["neighbors"] == ["west0.30", "east0.10"]
    assert seen["neighbor"] == "west"
    assert seen["found"] == "south"
    assert seen["near_samples"] == [f"{NAMES[2]}0.75", "east0.50"]
    assert seen["sampled"] == NAMES[2]
    assert seen["turned"]
    assert seen["crosses"] == 2
    assert seen["pictures"]
    assert seen["empty"] == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_broken_nothing_overflows_and_names_are_only_text(page, seen, width):
    found = seen if width == 360 else look(page, width, "--virtual-time-budget=8000", DARK, actions=ACTIONS)
    assert found["page"] <= width
    assert found["outside"] == []
    assert found["broken"] == 0
    assert found["images"] == 5
    assert found["strange"] == 0
    assert found["dark"] == ("rgb(251, 250, 248)" if width == 360 else "rgb(20, 23, 26)")
    assert found["moved"] == seen["moved"]


def test_without_its_script_every_picture_is_there(page):
    bare = page.with_name("bare.html")
    bare.write_text(re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL))
    shown = """seen.live = [...document.querySelectorAll(".live")].filter(part => part.offsetParent !== null).length;
      seen.films = [...document.querySelectorAll(".film")].map(film => {
        const image = film.querySelector("img"), box = film.getBoundingClientRect();
        return [image.naturalWidth, image.naturalHeight, Math.abs(box.height - image.height) < 1];
      });"""
    seen = look(bare, 360, actions=shown)
    assert seen["live"] == 0
    assert seen["films"] == [[24, 16, True], [24, 16, True]]
    assert seen["broken"] == 0
    assert seen["page"] <= 360


TOGETHER = """
  while (document.documentElement.dataset.ready !== "yes") await new Promise(next => setTimeout(next, 20));
  const one = selector => document.querySelector(selector);
  const sliders = [...document.querySelectorAll("input[type=range]")], whole = one(".whole");
  const pixel = () => [...whole.getContext("2d").getImageData(3, 3, 1, 1).data];
  const move = (slider, value) => {
    slider.value = value;
    for (const kind of ["input", "change"]) slider.dispatchEvent(new Event(kind, { bubbles: true }));
  };
  const saved = () => decodeURIComponent(one("#save").href.replace("data:application/json,", ""));
  const look = () => [pixel(), one("#position").textContent, one("#undo").disabled];
  seen.start = look();
  const begun = performance.now();
  move(sliders[0], 2);
  seen.milliseconds = performance.now() - begun;
  move(sliders[1], 0);
  seen.both = look();
  seen.file = saved();
  one("#undo").click();
  seen.one = look();
  one("#undo").click();
  seen.none = look();
  one("#random").click();
  seen.random = [one("#undo").disabled, pixel()[3]];
  one("#undo").click();
  seen.again = look();
  seen.page = document.documentElement.scrollWidth;
"""


def test_one_large_picture_has_all_sliders_at_once_and_hands_its_point_over(tmp_path):
    strengths = (-2.0, 0.0, 1.0)
    walks = [replace(each, strengths=strengths) for each in view().traversals]
    vectors = {"beard <u>": [1.0, 0.0, 0.25], "component 1": [0.0, 2.0, 0.0]}
    shown = view(traversals=walks, sliders=SliderSpace("of this space", [0.5, 0.0, 1.0], vectors))
    page = write_view(shown, tmp_path / "faces.html")
    said, _ = console(page, "--virtual-time-budget=8000")
    assert said == []
    for width in (390, 1280):
        seen = look(page, width, "--virtual-time-budget=8000", actions=TOGETHER)
        assert seen["start"] == [[100, 10, 0, 255], "All at 0.", True]
        assert seen["both"] == [
            [100, 10, 0, 255],
            "beard <u> +1 σ, component 1 \u22122 σ",
            False,
        ]  # +10 and −10 of green
        assert seen["one"] == [[100, 20, 0, 255], "beard <u> +1 σ", False]
        assert seen["none"] == seen["again"] == seen["start"]
        assert seen["random"] == [False, 255]
        assert seen["page"] <= width
        (tmp_path / "point.json").write_text(seen["file"])
        points = read_points(tmp_path / "point.json")
        assert (points.names, points.space) == (("page",), "of this space")
        assert points.scores.tolist() == [[1.5, -4.0, 1.25]]
