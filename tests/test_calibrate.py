"""A detector calibrated on parts it never saw, and its verdicts: in Python, through every door, and by commands."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import run
from firm.calibration import SCHEMA, Threshold, Wishes, of_threshold
from firm.calibration_file import beside, read_calibration, to_json, write_calibration
from firm.data.drawn import write_folder
from firm.data.folder import read_files
from firm.detector import Detector
from firm.holdout import split
from firm.images import decode
from firm.leaks import copies
from firm.model_folder import read_model
from firm.promises import doubts
from firm.recipes.presets import INSPECT, PARTS
from firm.recipes.recipe import change, sparse
from firm.report.inspection import Inspection
from firm.storage import digest, save_tensors
from firm.types import Depth, FirmError
from firm.verdicts import regions_of

SIDE = 48
CHEAP = change(
    INSPECT,
    {"features": "pixels", "training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": SIDE,
     "encoder.head.hidden": (8,), "automatic": (), "memory.reach": 1, "tiling.size": 16, "tiling.stride": 16},
)  # fmt: skip
WHOLE = change(PARTS, {"training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": 32})


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    # fewer than 20 good images each, among which sisters are not looked for
    write_folder(folder, "plate", size=SIDE, train=18, good=19, bad=6)
    return folder


@pytest.fixture(scope="module")
def model(plates: Path) -> Path:
    path = plates.parent / "part.firm"
    images, _, _ = read_files([plates / "train" / "good"], SIDE)
    Detector.fit(images, recipe=CHEAP, holdout=0.25).save(path)
    return path


@pytest.fixture
def mine(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may calibrate."""
    return Path(shutil.copytree(model, tmp_path / "part.firm"))


def test_images_that_were_learnt_from_are_told(model: Path, plates: Path) -> None:
    detector = Detector.load(model)
    images, _, _ = read_files([plates / "train" / "good"], SIDE)
    learn, _ = split(torch.arange(18), 0.25, seed=0)
    assert torch.equal(copies(images, detector.thumbnails).nonzero().squeeze(1), learn)
    fresh, _, _ = read_files([plates / "test"], SIDE)
    assert not copies(fresh, detector.thumbnails).any()
    told: list[str] = []
    before = detector.decides
    found = detector.calibrate(images, on_doubt=told.append)
    assert detector.decides is found
    assert told == ["14 of the 18 good images were learnt from and are left out"]
    assert found == before  # held out by the fit, and the same four again
    assert found.images == len(found.scores) == 4
    with pytest.raises(FirmError, match="no good image that was not learnt from"):
        detector.calibrate(images[learn])


def test_images_of_the_calibration_lie_on_their_side_of_it(model: Path, plates: Path) -> None:
    detector = Detector.load(model)
    images, files, _ = read_files([plates / "test" / "good"], SIDE)
    detector.calibrate(images, wishes=Wishes(fail=0.1, false_calls=0.3))
    scores, peaks = detector.measured(images)
    assert peaks is not None
    found = [detector.inspect(file) for file in files]
    assert [one.score for one in found] == scores.tolist()
    assert [max((region.peak for region in one.regions), default=-1.0) for one in found] == [
        peak if peak > detector.calibration.pixel else -1.0 for peak in peaks.tolist()
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
    assert max(region.box[3] for region in regions) > 100  # across the picture as it came


def test_deep_images_are_read_by_the_detectors_depth(model: Path) -> None:
    detector = Detector.load(model)
    eight = (np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 256).astype(np.uint8)
    detector.preprocessing = replace(detector.preprocessing, depth=Depth(4095))
    deep = np.round(eight.astype(float) * 4095 / 255).astype(np.uint16)
    assert detector.inspect(deep) == detector.inspect(eight)


def test_the_fit_calibrates(mine: Path, plates: Path) -> None:
    detector = Detector.load(mine)
    by = detector.decides
    assert by == read_calibration(mine / "calibration.json", model=detector.id)
    assert by.images == 4
    assert by.review == by.fail == max(by.scores) == detector.limit
    found = detector.inspect(next((plates / "test" / "good").iterdir()))
    assert (found.review, found.fail, found.calibration) == (by.review, by.fail, by.id)


def test_without_a_calibration_it_scores_and_does_not_decide(mine: Path, plates: Path) -> None:
    (mine / "calibration.json").unlink()
    detector = Detector.load(mine)
    assert detector.calibration is None
    file = next((plates / "test" / "good").iterdir())
    assert detector.score(detector.preprocessing.read(file)).isfinite().all()
    with pytest.raises(FirmError, match="no calibration to decide by; run firm calibrate"):
        detector.inspect(file)
    assert run("score", mine, file)[0] == 2
    assert json.loads(run("card", mine)[1])["calibration"] is None


def test_a_detector_of_schema_1_decides_by_the_threshold_of_its_fit(mine: Path, plates: Path, tmp_path: Path) -> None:
    detector, bound = Detector.load(mine), Threshold(2.5, 0.05, 19, 19)
    content = detector.card() | {"threshold": asdict(bound)}
    save_tensors(tmp_path / "old.firm", detector.tensors(), content, kind="detector", schema=1)
    old = Detector.load(tmp_path / "old.firm")
    assert old.decides == of_threshold(bound, detector.id, maps=True)
    assert old.limit == 2.5
    images, _, _ = read_files([plates / "test" / "good"], SIDE)
    write_calibration(tmp_path / "old.firm.calibration.json", detector.calibrate(images))
    assert Detector.load(tmp_path / "old.firm").decides == detector.decides
    with pytest.raises(FirmError, match="is a file; name another place"):
        old.save(tmp_path / "old.firm")


def test_whole_images_have_a_verdict_and_no_regions(plates: Path, tmp_path: Path) -> None:
    images, files, _ = read_files([plates / "train" / "good"], SIDE)
    detector = Detector.fit(images, recipe=WHOLE, holdout=0.25)
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
    deciding = {k: v for k, v in read_model(mine)[0].items() if not k.startswith(("thumbnails", "examples."))}
    assert detector.id == digest(deciding, json.dumps(how, sort_keys=True))[:16]
    changed = Detector.load(mine)
    changed.localiser.banks["pixels"].vectors[0, 0] += 1
    assert replace(changed).id != detector.id  # an id is looked up once
    assert replace(detector, recipe=change(detector.recipe, {"tiling.worst": 2})).id != detector.id
    assert replace(detector, preprocessing=replace(detector.preprocessing, side=9)).id != detector.id
    assert replace(detector, origin=detector.origin | {"grey": None}).id != detector.id


def test_a_calibration_beside_decides_unless_told_otherwise(mine: Path, plates: Path, tmp_path: Path) -> None:
    detector = Detector.load(mine)
    images, _, _ = read_files([plates / "test" / "good"], SIDE)
    low = detector.calibrate(images, wishes=Wishes(review_at=-1.0, fail_at=-1.0))
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
    with pytest.raises(FirmError, match="there is no file"):
        Detector.load(mine, calibration=tmp_path / "nowhere.json")


def test_calibrations_that_cannot_be_trusted_are_refused(mine: Path, plates: Path) -> None:
    detector = Detector.load(mine)
    images, _, _ = read_files([plates / "test" / "good"], SIDE)
    found = detector.calibrate(images)
    write_calibration(beside(mine), replace(found, model="0" * 16))
    with pytest.raises(FirmError, match=rf"that of model 0{{16}}, not of {detector.id}; run firm calibrate again"):
        Detector.load(mine)
    detector.save(mine)  # its own in place of the other
    assert Detector.load(mine).decides == found
    write_calibration(beside(mine), found)
    beside(mine).write_text(beside(mine).read_text().replace('"images": 19', '"images": 190'))
    with pytest.raises(FirmError, match="damaged or edited"):
        Detector.load(mine)


def test_a_calibration_that_knows_no_light_is_read_as_it_was(mine: Path, plates: Path) -> None:
    """Light was added to what a calibration says; those written before keep their id and say nothing of it."""
    detector = Detector.load(mine)
    images, _, _ = read_files([plates / "test" / "good"], SIDE)
    found = replace(detector.calibrate(images), light=())
    written = {name: value for name, value in to_json(found).items() if name != "light"}
    before = {name: value for name, value in asdict(found).items() if name != "light"}
    assert found.id == hashlib.sha256(json.dumps([SCHEMA, before], sort_keys=True).encode()).hexdigest()[:16]
    beside(mine).write_text(json.dumps(written))
    loaded = Detector.load(mine)
    assert loaded.decides == found
    batch = Inspection(loaded)
    deque(batch(sorted((plates / "test" / "good").iterdir())), maxlen=0)
    assert batch.drift() is not None
    assert batch.light_drift() is None


# the verb


def test_calibrate_writes_beside_the_detector_and_score_obeys(mine: Path, model: Path, plates: Path) -> None:
    code, out, err = run("calibrate", mine, plates / "test" / "good")
    assert code == 0, err
    found = read_calibration(beside(mine), model=Detector.load(mine).id)
    lines = out.splitlines()
    assert lines[0] == f"{beside(mine)}: from 19 held-out good images"
    assert lines[1] == f"PASS up to {found.review:.6g}, REVIEW up to {found.fail:.6g}, FAIL above"
    assert lines[2] == "good parts: at most 5.0 % for REVIEW or FAIL, at most 5.0 % FAIL"
    sure = 100 * (1 - 0.05 ** (1 / 19))  # none of 19 lies above
    kept = f"at most {sure:.1f} % and {sure:.1f} %"
    assert lines[3] == f"over many calibrations, that is; this one keeps {kept} with 95 % confidence"
    assert lines[4] == f"regions: heat above {found.pixel:.6g}, in at most 5.0 % of good parts"
    few = "19 good images cannot promise 1 % for FAIL: the lowest honest rate is 5.0 %, and 1 % takes 99"
    assert f"warning: {few}" in err
    assert "warning: review and fail are the same threshold, so nothing is for REVIEW" in err
    code, out, _ = run("score", mine, plates / "test", "--json")
    told = json.loads(out)
    assert told["threshold"] == found.review != Detector.load(model).limit
    code, out, _ = run("card", mine)
    assert json.loads(out)["calibration"]["id"] == found.id
    assert json.loads(out)["id"] == found.model


def test_score_and_inspect_say_the_same(mine: Path, plates: Path) -> None:
    good = plates / "test" / "good"
    assert ", 0 REVIEW, " in run("score", mine, good)[1]
    assert run("calibrate", mine, good, "--fail=0.1", "--false-calls=0.3")[0] == 0
    rows = json.loads(run("score", mine, good, "--json")[1])["images"]
    assert [row["verdict"] for row in rows].count("REVIEW") in (3, 4, 5)  # four, up to rounding among many images
    assert all((row["label"] == 1) == (row["verdict"] == "PASS") for row in rows)
    file = sorted(good.iterdir())[0]
    scored, inspected = (run(verb, mine, file)[1].splitlines() for verb in ("score", "inspect"))
    assert (
        scored[0].split()[::2] == inspected[0].split()[:3:2]
    )  # verdict and file; the score is the same up to rounding
    assert scored[1] == inspected[1]
    assert scored[1].startswith("1 image: ")
    beside(mine).unlink()
    missing = [run(verb, mine, good)[2].splitlines()[-1] for verb in ("inspect", "score", "evaluate")]
    assert missing == [f"firm: {beside(mine)} is missing; copy it again, or run firm calibrate with good images"] * 3


def test_two_thresholds_and_no_doubt(mine: Path, plates: Path, tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.json"
    code, out, err = run(
        "calibrate", mine, plates / "test" / "good", "--fail=0.05", "--false-calls=0.3", "--out", file, "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["review"] < told["fail"]
    assert told["doubts"] == []
    assert Detector.load(mine).decides.id != told["id"]
    assert read_calibration(file, model=told["model"]).id == told["id"]


@pytest.mark.parametrize("layout", ["parts", "test", "kind"])
def test_what_is_missed_of_defects_is_said_with_its_price(
    mine: Path, plates: Path, layout: str, tmp_path: Path
) -> None:
    kinds = sorted(folder for folder in (plates / "test").iterdir() if folder.name != "good")
    folder = {"parts": plates, "test": plates / "test", "kind": kinds[0]}[layout]
    count = len(list(kinds[0].iterdir())) if layout == "kind" else 6
    code, out, err = run(
        "calibrate", mine, plates / "test" / "good", "--defects", folder, "--fail-at=1e6", "--misses=0", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["misses"]["unfailed"]["count"] == told["misses"]["unfailed"]["of"] == count
    assert told["source"] == f"from 19 held-out good images and {count} defects; fail set by hand"
    found = read_calibration(beside(mine), model=told["model"])
    assert told["doubts"] == doubts(found)
    assert f"fail threshold of {found.misses.enough:.6g}, at which up to" in told["doubts"][-1]
    assert "at most 0 % misses cannot be had with at most 5.0 % false calls, which are kept" in told["doubts"][-1]


def test_mistakes_are_one_sentence(mine: Path, plates: Path, tmp_path: Path) -> None:
    good = plates / "test" / "good"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no image")
    (tmp_path / "only" / "good").mkdir(parents=True)
    shutil.copy(next(good.iterdir()), tmp_path / "only" / "good")
    before = beside(mine).read_bytes()
    for arguments, why in [
        ((good, "--misses=0.1"), "--misses needs defects"),
        ((good, "--false-calls=2"), "must lie between 0 and 1"),
        ((good, "--fail-at=-1"), "lies above fail at -1; set review no higher"),
        ((good, "--out", tmp_path), "is a folder; name the file to write"),
        ((good, "--defects", tmp_path / "broken"), "none of the defects in"),
        ((good, "--defects", tmp_path / "only"), "holds good images alone"),
        ((tmp_path / "nowhere",), "nowhere"),
    ]:
        code, _, err = run("calibrate", mine, *arguments)
        assert code == 2, arguments
        assert why in err
        assert "Traceback" not in err
    assert beside(mine).read_bytes() == before


def test_a_stale_calibration_can_be_replaced(mine: Path, plates: Path) -> None:
    beside(mine).write_text("{}")
    code, _, err = run("score", mine, plates / "test" / "good")
    assert (code, "run firm calibrate again" in err) == (2, True)
    assert run("calibrate", mine, plates / "test" / "good")[0] == 0
    assert run("score", mine, plates / "test" / "good")[0] == 0
