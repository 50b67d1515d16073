"""The inspection page in a real browser, made from drawn parts: it asks for nothing, sorts, filters and shows heat."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import browser
from firm.decision.verdict import Verdict, marked, regions_of
from firm.detector.detector import Detector
from firm.detector.inspection import InspectedImage
from firm.drawn.render import draw_dataset
from firm.images.decode import decode
from firm.recipes.presets import INSPECT
from firm.recipes.recipe import change
from firm.report.heatmap import write_overlay
from firm.report.live_page import LivePage
from firm.report.page import write_page

pytestmark = pytest.mark.slow
HOSTILE = "<script>document.title='owned'</script>\".png"
SIDE = 160


def inspected():
    """Drawn parts as a cheap detector sees them, and its scores of further good parts."""
    data = draw_dataset("weave", size=SIDE, train=60, good=22, bad=12)
    recipe = change(INSPECT, {"features": "pixels", "training.epochs": 0, "size": SIDE, "automatic": ()})
    detector = Detector.fit(data, recipe=recipe, seed=0, holdout=0.3)
    good = detector.score(data.test[:12]).tolist()
    located = detector.locate(data.test[12:])
    review, fail = max(good), 1.6 * max(good)
    shown = []
    for number, (score, heat) in enumerate(zip(located.scores.tolist(), located.maps.numpy(), strict=True)):
        verdict = "FAIL" if score > fail else "REVIEW" if score > review else "PASS"
        name = HOSTILE if number == 15 else f"lot 7/{data.truth.kinds[12 + number].replace(' ', '_')}_{number:03d}.png"
        regions = regions_of(torch.from_numpy(heat), 0.7 * review, SIDE, SIDE)
        pixels = data.test[12 + number].permute(1, 2, 0).numpy()
        away = (data.train.float() - data.test[12 + number].float()).abs()
        nearest = data.train[int(away.mean((1, 2, 3)).argmin())].permute(1, 2, 0).numpy() if regions else None
        decided = Verdict(name, score, verdict, regions, "weave 3f9a2c", "2f81d0", review, fail)
        shown.append(InspectedImage(decided, pixels, heat, nearest, marked(heat, 0.7 * review)))
    return shown, good, detector


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if browser.missing():
        pytest.skip(browser.missing())
    folder = tmp_path_factory.mktemp("page")
    shown, good, detector = inspected()
    written = write_page(
        folder / "out",
        iter(shown),
        title="Weave, lot 7",
        good_scores=good,
        left_out=[("lot 7/torn.png", "lot 7/torn.png is cut short; copy it again"), (HOSTILE, "is no image")],
        card={"origin": detector.origin, "threshold": {"false_calls": 0.05, "images": 18}},
        notes=["The scores of this batch lie higher than those of the calibration: check light and camera."],
    )
    with browser.browse(folder) as opened:
        opened.open(written)
        yield opened


NAMES = "return [...document.querySelectorAll('.entry')].filter(e => !e.hidden).map(e => e.dataset.%s)"


def choose(page, order):
    page.run(
        "const s = document.getElementById('order'); s.value = arguments[0];s.dispatchEvent(new Event('change'))", order
    )


def test_it_asks_for_nothing_and_complains_of_nothing(page):
    wanted = page.requested()
    assert [Path(one).name for one in wanted if one.startswith("file:")] == ["report.html"]
    assert {one.split(":")[0] for one in wanted} - {"chrome", "chrome-untrusted"} == {
        "file",
        "data",
    }  # chrome: is the browser's own
    assert page.log("browser") == []
    assert page.run("return document.title") == "Weave, lot 7"
    assert page.run("return document.compatMode") == "CSS1Compat"
    assert page.run("return [...document.images].every(i => i.complete ? i.naturalWidth > 0 : i.loading == 'lazy')")


def test_it_sorts_and_filters(page):
    by_default = page.run(NAMES % "score")
    choose(page, "low")
    low = [float(one) for one in page.run(NAMES % "score")]
    assert low == sorted(low)
    choose(page, "name")
    assert page.run(NAMES % "name") != by_default
    choose(page, "worst")
    assert page.run(NAMES % "score") == by_default
    page.press(" ", "[data-show=pass]")  # by the keyboard
    assert "2" not in page.run(NAMES % "rank")
    assert page.run("return document.getElementById('count').textContent").startswith(
        str(len(page.run(NAMES % "rank")))
    )
    page.press(" ", "[data-show=pass]")
    assert page.run(NAMES % "score") == by_default


def test_heat_is_shown_when_a_picture_is_selected(page):
    seen = "return getComputedStyle(document.querySelector('.entry .hot')).opacity"
    assert page.run(seen) == "0"
    page.press(" ", ".entry .look input")
    assert page.run(seen) == "1"
    page.press(" ", ".entry .look input")
    assert page.run(seen) == "0"


PLACE = """
const place = document.querySelector('.entry .stack ' + arguments[0]).getBoundingClientRect();
return [place.x, place.y, place.width, place.height]
"""


def test_boxes_and_heat_lie_over_their_pictures(page):
    picture = page.run(PLACE, ".plain")
    assert picture[2:] == [256, 256]
    assert page.run(PLACE, "svg") == pytest.approx(picture, abs=0.5)
    assert page.run(PLACE, ".hot") == pytest.approx(picture, abs=0.5)


def test_nothing_is_wider_than_the_window(page):
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_it_works_on_a_narrow_screen(page, tmp_path):
    page.resize(400)
    try:
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [400, 400]
        spill = "[...document.querySelectorAll(arguments[0])].filter(e => e.getBoundingClientRect().right > innerWidth)"
        for what in (".numbers li", ".entry", ".entry img", ".entry p", ".tools *", "td", "th"):
            assert page.run(f"return {spill}.length", what) == 0, what
        page.press(" ", ".entry .look input")
        assert page.run("return getComputedStyle(document.querySelector('.entry .hot')).opacity") == "1"
        page.press(" ", ".entry .look input")
        assert page.run("return document.querySelector('.tools').getBoundingClientRect().height") < 200
        page.photograph(Path(os.environ.get("FIRM_PICTURES", tmp_path)) / "report-narrow.png", width=400)
    finally:
        page.resize(None)


def test_it_looks_like_something_in_light_and_dark_and_on_paper(page, tmp_path):
    keep = Path(os.environ.get("FIRM_PICTURES", tmp_path))
    means = {}
    for name, features, media in (
        ("illumination", {"prefers-color-scheme": "illumination"}, ""),
        ("dark", {"prefers-color-scheme": "dark"}, ""),
        ("print", {"prefers-color-scheme": "dark"}, "print"),
    ):
        page.emulate(features, media)
        page.photograph(keep / f"report-{name}.png")
        means[name] = decode(keep / f"report-{name}.png").mean()
    page.emulate({})
    assert means["illumination"] > 150 > 100 > means["dark"]
    assert means["print"] > 150  # whatever the screen's scheme


def test_the_page_of_a_watch_shows_its_heat_maps(page, tmp_path):
    """The last test of this page: it opens another one."""
    where = tmp_path / "heat" / "7 <b>.png.png"
    write_overlay(where, np.full((40, 60, 3), 90, np.uint8), np.full((4, 6), 3.0, np.float32), 2.0)
    board = LivePage(tmp_path / "watched.html", "Watching line 3", [0.5, 1.0, 1.5], (2.0, 3.0))
    board.add([{"file": "7 <b>.png", "verdict": "FAIL", "score": 3.5, "map": str(where)}])
    board.add([{"file": "8.png", "verdict": "PASS", "score": 1.1}])
    board.write()
    page.log("browser")
    page.open(board.path)
    assert page.run("return document.title") == "Watching line 3"
    assert page.run("return [...document.images].map(i => i.naturalWidth > 0)") == [True]
    assert page.run("return [...document.querySelectorAll('tbody tr')].length") == 2
    assert page.run("return document.querySelector('.numbers .fail b').textContent") == "1"
    assert page.log("browser") == []
