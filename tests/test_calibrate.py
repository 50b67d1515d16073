"""A detector calibrated on parts it never saw, and its verdicts: in Python, through every door, and by commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import run
from firm.data.duplicates import copies_of_known
from firm.data.folder import read_files
from firm.data.splits import split_by_part
from firm.decision.calibration import (
    PASS,
    TargetRates,
    beside,
    read_calibration,
    summary_of,
    warnings_of,
    write_calibration,
)
from firm.decision.verdict import regions_of
from firm.detector.detector import Detector
from firm.detector.model_folder import read_model
from firm.detector.remember import measure
from firm.drawn.render import write_folder
from firm.errors import DataError, ModelFileError
from firm.images.decode import decode
from firm.recipes.presets import INSPECT, PARTS
from firm.recipes.recipe import change, sparse
from firm.runtime.files import digest
from firm.runtime.listener import Listener
from firm.types import Depth

SIDE = 48
CHEAP = change(
    INSPECT,
    {"features": "pixels", "training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": SIDE,
     "encoder.head.hidden": (8,), "automatic": (), "memory.neighbourhood": 1, "tiling.size": 16, "tiling.stride": 16},
)  # fmt: skip
WHOLE = change(PARTS, {"training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": 32})


class Recorder(Listener):
    """Keeps what is said, warnings included."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    warn = say


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    # fewer than 20 good images each, among which images of one part are not looked for
    write_folder(folder, "plate", size=SIDE, train=18, good=19, bad=6)
    return folder


@pytest.fixture(scope="module")
def model(plates: Path) -> Path:
    path = plates.parent / "part.firm"
    images, _, _ = read_files([plates / "train" / "good"], SIDE)
    Detector.fit(images, recipe=CHEAP, holdout=0.25, listener=Recorder()).save(path)
    return path


@pytest.fixture
def mine(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may calibrate."""
    return Path(shutil.copytree(model, tmp_path / "part.firm"))


def test_images_that_were_learnt_from_are_left_out(model: Path, plates: Path) -> None:
    detector = Detector.load(model)
    images, _, _ = read_files([plates / "train" / "good"], SIDE)
    learn, _ = split_by_part(torch.arange(18), 0.25, seed=0)
    assert torch.equal(copies_of_known(images, detector.thumbnails).nonzero().squeeze(1), learn)
    fresh, _, _ = read_files([plates / "test"], SIDE)
    assert not copies_of_known(fresh, detector.thumbnails).any()
    before, heard = detector.decides, Recorder()
    found = detector.calibrate(images, listener=heard)
    assert detector.decides is found
    assert [line for line in heard.lines if "14 of the 18 good images" in line]
    assert found == before  # held out by the fit, and the same four again
    assert found.images == len(found.scores) == 4
    with pytest.raises(DataError, match="training image"):
        detector.calibrate(images[learn])


def test_images_of_the_calibration_lie_on_their_side_of_it(model: Path, plates: Path) -> None:
    detector = Detector.load(model)
    images, files, _ = read_files([plates / "test" / "good"], SIDE)
    detector.calibrate(images, targets=TargetRates(fail=0.1, false_calls=0.3))
    scores, peaks, _ = measure(detector.model, images)
    assert peaks is not None
    found = [detector.inspect(file) for file in files]
    assert [one.score for one in found] == scores.tolist()
    assert [max((region.peak for region in one.regions), default=-1.0) for one in found] == [
        peak if peak > detector.calibration.pixel or one.verdict != PASS else -1.0
        for one, peak in zip(found, peaks.tolist(), strict=True)
    ]
    words = [one.verdict for one in found]
    assert words.count("FAIL") == 1  # 0.9 * 20 = 18 of 19 lie at or below
    assert words.count("PASS") == 14
    assert {(one.model, one.calibration) for one in found} == {(detector.id, detector.calibration.id)}
    assert (found[0].review, found[0].fail) == (detector.calibration.review, detector.calibration.fail)


def test_every_door_gives_the_same_verdict(model: Path, plates: Path, tmp_path: Path) -> None:
    detector = Detector.load(model)
    file = sorted((plates / "test").glob("[!g]*/*.png"))[0]
    with Image.open(file) as picture:
        larger = picture.convert("RGB").resize((150, 100))
    larger.save(tmp_path / "part.png")
    file = tmp_path / "part.png"
    doors = [file, str(file), file.read_bytes(), np.array(larger), larger]
    found = [detector.inspect(door, name="x") for door in doors]
    assert all(one == found[0] for one in found)
    assert detector.inspect(file).image == str(file)
    assert detector.inspect(larger).image == "image"
    located = detector.locate(detector.preprocessing.read(decode(file)))
    assert found[0].score == float(located.scores)
    low = replace(detector.calibration, pixel=float(located.maps.median()))
    detector.calibration = low
    regions = detector.inspect(file).regions
    assert regions == regions_of(located.maps[0], low.pixel, 100, 150)
    assert regions
    assert max(region.box[3] for region in regions) > located.maps.shape[2]  # in pixels of the picture as it came


def test_deep_images_are_read_by_the_detectors_depth(model: Path) -> None:
    detector = Detector.load(model)
    eight = (np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 256).astype(np.uint8)
    detector.model.preprocessing = replace(detector.preprocessing, depth=Depth(4095))
    deep = np.round(eight.astype(float) * 4095 / 255).astype(np.uint16)
    assert detector.inspect(deep) == detector.inspect(eight)


def test_the_fit_calibrates(mine: Path, plates: Path) -> None:
    detector = Detector.load(mine)
    by = detector.decides
    assert by == read_calibration(mine / "calibration.json", model=detector.id)
    assert by.images == 4
    assert by.review == detector.limit == sorted(by.scores)[-2]  # of four, the highest is for REVIEW
    assert by.fail == max(by.scores)
    found = detector.inspect(next((plates / "test" / "good").iterdir()))
    assert (found.review, found.fail, found.calibration) == (by.review, by.fail, by.id)


def test_without_a_calibration_it_scores_and_does_not_decide(mine: Path, plates: Path) -> None:
    (mine / "calibration.json").unlink()
    detector = Detector.load(mine)
    assert detector.calibration is None
    file = next((plates / "test" / "good").iterdir())
    assert detector.score(detector.preprocessing.read(file)).isfinite().all()
    with pytest.raises(ModelFileError, match="firm calibrate"):
        detector.inspect(file)
    assert run("inspect", mine, file)[0] == 2
    assert json.loads(run("card", mine)[1])["calibration"] is None


def test_whole_images_have_a_verdict_and_no_regions(plates: Path, tmp_path: Path) -> None:
    images, files, _ = read_files([plates / "train" / "good"], SIDE)
    detector = Detector.fit(images, recipe=WHOLE, holdout=0.25, listener=Recorder())
    detector.calibrate(images)
    assert detector.calibration.pixel is None
    found = detector.inspect(files[0])
    assert (found.regions, found.verdict) == ((), "PASS")
    assert found.score == float(detector.score(images[:1]))
    detector.save(tmp_path / "x.firm")
    again = Detector.load(tmp_path / "x.firm")
    assert again.calibration == detector.calibration
    assert again.inspect(files[0]) == found


def test_the_id_is_of_what_scores_and_survives_the_file(mine: Path) -> None:
    detector, again = Detector.load(mine), Detector.load(mine)
    again.calibration = None
    again.thumbnails = again.thumbnails[:0]
    again.examples = replace(detector.examples, ends=detector.examples.ends[:0])
    assert detector.id == again.id
    how = {"recipe": sparse(detector.recipe), "preprocessing": sparse(detector.preprocessing)}
    how |= {"grey": detector.origin["grey"], "backbone": None}  # a setting added later renames no model
    stored = read_model(mine)[0]
    deciding = {name.removeprefix("model."): stored[name] for name in stored if name.startswith("model.")}
    assert detector.id == digest(deciding, json.dumps(how, sort_keys=True))[:16]
    changed = Detector.load(mine)
    changed.model.scorer.banks["pixels"].vectors[0, 0] += 1
    assert replace(changed).id != detector.id  # an id is computed once
    assert replace(detector, recipe=change(detector.recipe, {"tiling.top_patches": 2})).id != detector.id
    assert replace(detector, origin=detector.origin | {"grey": None}).id != detector.id
    changed = Detector.load(mine)
    changed.model.preprocessing = replace(detector.preprocessing, side=9)
    assert replace(changed).id != detector.id


def test_a_calibration_beside_decides_unless_told_otherwise(mine: Path, plates: Path, tmp_path: Path) -> None:
    detector = Detector.load(mine)
    images, _, _ = read_files([plates / "test" / "good"], SIDE)
    low = detector.calibrate(images, targets=TargetRates(review_at=-1.0, fail_at=-1.0))
    write_calibration(beside(mine), low)
    loaded = Detector.load(mine)
    assert loaded.calibration == low
    assert loaded.limit == -1
    assert (loaded.predict(images) == -1).all()
    assert loaded.card() == detector.card()
    assert Detector.load(mine, calibration=False).calibration is None
    other = detector.calibrate(images)
    write_calibration(tmp_path / "other.json", other)
    assert Detector.load(mine, calibration=tmp_path / "other.json").calibration == other
    with pytest.raises(ModelFileError, match="nowhere"):
        Detector.load(mine, calibration=tmp_path / "nowhere.json")


def test_calibrations_that_cannot_be_trusted_are_refused(mine: Path, plates: Path) -> None:
    detector = Detector.load(mine)
    images, _, _ = read_files([plates / "test" / "good"], SIDE)
    found = detector.calibrate(images)
    write_calibration(beside(mine), replace(found, model="0" * 16))
    with pytest.raises(ModelFileError, match=rf"model 0{{16}}, not to {detector.id}"):
        Detector.load(mine)
    detector.save(mine)  # its own in place of the other
    assert Detector.load(mine).decides == found
    write_calibration(beside(mine), found)
    beside(mine).write_text(beside(mine).read_text().replace('"images": 19', '"images": 190'))
    with pytest.raises(ModelFileError, match="edited"):
        Detector.load(mine)


# the verb


def test_calibrate_writes_beside_the_detector_and_inspect_obeys(mine: Path, model: Path, plates: Path) -> None:
    code, out, err = run("calibrate", mine, plates / "test" / "good", "--false-calls=0.04", "--fail=0.01")
    assert code == 0, err
    found = read_calibration(beside(mine), model=Detector.load(mine).id)
    assert out.splitlines() == [f"{beside(mine)}: from 19 held-out good images", *summary_of(found)]
    assert found.upper_bound(found.fail) == pytest.approx(1 - 0.05 ** (1 / 19))  # none of 19 lies above
    assert sum("cannot keep" in text for text in warnings_of(found)) == 2
    assert all(f"warning: {warning}" in err for warning in warnings_of(found))
    _, out, _ = run("inspect", mine, plates / "test", "--json")
    assert json.loads(out)["images"][0]["review"] == found.review != Detector.load(model).limit
    code, out, _ = run("card", mine)
    assert json.loads(out)["calibration"]["id"] == found.id
    assert json.loads(out)["id"] == found.model


def test_parts_of_a_calibration_are_named_by_their_files(mine: Path, plates: Path) -> None:
    code, out, err = run("calibrate", mine, plates / "test" / "good", "--group-by", r"(\d)\.png", "--json")
    assert code == 0, err
    assert (json.loads(out)["images"], json.loads(out)["parts"]) == (19, 10)
    assert run("calibrate", mine, plates / "test" / "good", "--group-by", "screw")[0] == 2


def test_a_calibration_with_room_between_its_thresholds_sends_parts_to_review(mine: Path, plates: Path) -> None:
    good = plates / "test" / "good"
    assert run("calibrate", mine, good, "--fail=0.05", "--false-calls=0.05")[0] == 0
    assert ", 0 REVIEW, " in run("inspect", mine, good)[1]
    assert run("calibrate", mine, good, "--fail=0.1", "--false-calls=0.3")[0] == 0
    images = json.loads(run("inspect", mine, good, "--json")[1])["images"]
    assert [image["verdict"] for image in images].count("REVIEW") in (3, 4, 5)  # four, up to rounding
    beside(mine).unlink()
    for verb in ("inspect", "evaluate"):
        code, _, err = run(verb, mine, good)
        assert (code, beside(mine).name in err) == (2, True)


def test_two_thresholds_and_no_warning(mine: Path, plates: Path, tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.json"
    code, out, err = run(
        "calibrate", mine, plates / "test" / "good", "--fail=0.05", "--false-calls=0.3", "--out", file, "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["review"] < told["fail"]
    assert not [text for text in told["warnings"] if "look at it" not in text]
    assert Detector.load(mine).decides.id != told["id"]
    assert read_calibration(file, model=told["model"]).id == told["id"]


@pytest.mark.parametrize("layout", ["parts", "kind"])
def test_what_is_missed_of_defects_is_said_with_its_price(
    mine: Path, plates: Path, layout: str, tmp_path: Path
) -> None:
    kinds = sorted(folder for folder in (plates / "test").iterdir() if folder.name != "good")
    folder = {"parts": plates, "kind": kinds[0]}[layout]
    count = len(list(kinds[0].iterdir())) if layout == "kind" else 6
    code, out, err = run(
        "calibrate", mine, plates / "test" / "good", "--defects", folder, "--fail-at=1e6", "--misses=0", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["misses"]["unfailed"]["count"] == told["misses"]["unfailed"]["of"] == count
    assert told["source"] == f"from 19 held-out good images and {count} defects; fail set by hand"
    found = read_calibration(beside(mine), model=told["model"])
    assert told["warnings"] == warnings_of(found)
    assert f"{found.misses.enough:.6g}" in told["warnings"][-1]


def test_mistakes_are_one_sentence(mine: Path, plates: Path, tmp_path: Path) -> None:
    good = plates / "test" / "good"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no image")
    (tmp_path / "only" / "good").mkdir(parents=True)
    shutil.copy(next(good.iterdir()), tmp_path / "only" / "good")
    before = beside(mine).read_bytes()
    for arguments, culprit in [
        ((good, "--misses=0.1"), "--misses"),
        ((good, "--false-calls=2"), "false_calls is 2"),
        ((good, "--fail-at=-1"), "fail at -1"),
        ((good, "--out", tmp_path), str(tmp_path)),
        ((good, "--defects", tmp_path / "broken"), str(tmp_path / "broken")),
        ((good, "--defects", tmp_path / "only"), str(tmp_path / "only")),
        ((tmp_path / "nowhere",), "nowhere"),
    ]:
        code, _, err = run("calibrate", mine, *arguments)
        assert code == 2, arguments
        assert culprit in err
        assert "Traceback" not in err
    assert beside(mine).read_bytes() == before


def test_a_stale_calibration_can_be_replaced(mine: Path, plates: Path) -> None:
    beside(mine).write_text("{}")
    code, _, err = run("inspect", mine, plates / "test" / "good")
    assert (code, "firm calibrate" in err) == (2, True)
    assert run("calibrate", mine, plates / "test" / "good")[0] == 0
    assert run("inspect", mine, plates / "test" / "good")[0] == 3  # decided: the highest few are for REVIEW
