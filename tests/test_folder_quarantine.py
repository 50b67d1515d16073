"""Bad files among good ones: named with their reasons and left out, or the end of it; one depth for all."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import run
from firm.data.folder import Reading, find_files, image_files, load_folder, read_files, read_test
from firm.data.registry import load
from firm.detector.detector import Detector
from firm.detector.model_folder import read_model, write_model
from firm.detector.prepare import prepare
from firm.errors import FirmError, ImageError
from firm.images.decode import decode
from firm.recipes.presets import PARTS
from firm.recipes.recipe import change
from firm.types import FULL_DEPTH, Depth
from image_files import encoded, png, tiff

RNG = np.random.default_rng(0)
SMALL = {
    "encoder.width": 8,
    "encoder.head.hidden": (8,),
    "encoder.head.out": 8,
    "training.epochs": 1,
    "training.batch": 4,
    "size": 16,
}
OPTIONS = ("--preset=parts", *(f"--set={name}={list(v) if isinstance(v, tuple) else v}" for name, v in SMALL.items()))


def save(file: Path, white: int = 255, dtype: type = np.uint8) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    samples = RNG.integers(0, white + 1, (20, 20)).astype(dtype)
    samples[0, 0] = white
    file.write_bytes(encoded(samples) if file.suffix == ".png" else tiff(samples))
    return file


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """MVTec's layout with one bad file in each part."""
    for number in range(8):
        save(tmp_path / "train" / "good" / f"{number}.png")
    for kind in ("good", "dent"):
        for number in range(3):
            save(tmp_path / "test" / kind / f"{number}.png")
            save(tmp_path / "ground_truth" / "dent" / f"{number}_mask.png")
    return tmp_path


def spoil(*files: Path) -> None:
    for file in files:
        file.write_bytes(b"no image")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted on 12 bits in 16."""
    folder = tmp_path_factory.mktemp("model")
    for number in range(8):
        save(folder / "good" / f"{number}.tif", 4000, np.uint16)
    with pytest.warns(UserWarning, match="no sample above 4095"):
        data = load(str(folder / "good"), side=32)
    Detector.fit(data, recipe=change(PARTS, SMALL)).save(folder / "parts.firm")
    return folder / "parts.firm"


# quarantine


def test_bad_files_are_listed_with_their_reasons_and_cost_nothing_else(parts: Path) -> None:
    spoil(parts / "train" / "good" / "3.png", parts / "test" / "dent" / "1.png")
    (parts / "train" / "good" / "late.gif").write_bytes(encoded(np.zeros((4, 4), np.uint8), "GIF"))
    (parts / "train" / "good" / "lost.png").symlink_to(parts / "gone")
    (parts / "train" / "good" / "notes.txt").write_text("no image, and not called so")
    (parts / "train" / "good" / "folder.png").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = load_folder(parts, Reading(16))
    assert (len(task.train), len(task.test)) == (7, 5)
    expected = {
        "test/dent/1.png": "content is not PNG",
        "train/good/3.png": "content is not PNG",
        "train/good/late.gif": "content is not PNG",
        "train/good/lost.png": "does not exist",
    }
    for line, (name, why) in zip(sorted(str(one.message) for one in caught), expected.items(), strict=True):
        assert line.startswith(f"left out: {parts / name} ")
        assert why in line


def test_strict_stops_at_the_first(parts: Path) -> None:
    for bad in ("ground_truth/dent/1_mask.png", "test/dent/1.png", "train/good/3.png"):  # each is met before the last
        spoil(parts / bad)
        with pytest.raises(ImageError, match=bad) as found:
            load(str(parts), side=16, strict=True)
        assert found.value.path == parts / bad
        if not bad.startswith("train"):
            with pytest.raises(ImageError, match=bad):
                read_test(parts, 16, strict=True)
    good = parts / "train" / "good"
    spoil(good / "3.png", good / "5.png")
    assert len(read_files([good], 16)[2]) == 2
    with pytest.raises(ImageError, match=r"3\.png"):
        read_files([good], 16, strict=True)


def test_strict_holds_for_published_sets(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parts / "mvtec").mkdir()
    (parts / "mvtec" / "screw").symlink_to(parts)
    monkeypatch.setenv("FIRM_DATA", str(parts))
    spoil(parts / "train" / "good" / "3.png")
    with pytest.warns(UserWarning, match=r"left out: .*3\.png"), pytest.warns(UserWarning, match="the published set"):
        task = load("mvtec:screw", side=16)
    assert (len(task.train), task.depth) == (7, Depth(255))
    with pytest.raises(ImageError, match=r"3\.png"):
        load("mvtec:screw", side=16, strict=True)


# folders


def test_folders_are_entered_once_however_links_lead(tmp_path: Path) -> None:
    save(tmp_path / "in" / "b" / "2.png")
    save(tmp_path / "in" / "1.png")
    save(tmp_path / "elsewhere" / "3.png")
    save(tmp_path / "in" / ".hidden" / "4.png")
    (tmp_path / "in" / "b" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "b" / "self").symlink_to(tmp_path / "in" / "b" / "self")
    (tmp_path / "in" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "x.png").mkdir()
    save(tmp_path / "in" / "x.png" / "5.png")
    found = [str(file.relative_to(tmp_path / "in")) for file in find_files([tmp_path / "in"])]
    assert found == ["1.png", "b/2.png", "c/3.png", "x.png/5.png"]


def test_a_folder_that_may_not_be_opened_is_named(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, scandir = parts / "test" / "dent", os.scandir

    def guarded(path: str | os.PathLike[str] = ".") -> object:
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(FirmError, match=r"dent cannot be listed \(Permission denied\); check its permissions"):
        image_files(locked)
    with pytest.raises(FirmError, match="dent cannot be listed"):  # without a kind of defect it were another test
        load_folder(parts, Reading(16))
    images, files, skipped = read_files([parts / "test"], 16)
    assert (len(images), len(files)) == (3, 3)
    ((place, reason),) = skipped
    assert place == locked
    assert "may not be listed" in reason
    with pytest.raises(ImageError, match="may not be listed"):
        read_files([parts / "test"], 16, strict=True)
    with pytest.raises(FirmError, match="dent cannot be listed"):
        find_files([locked])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open anything")
def test_a_locked_folder(tmp_path: Path) -> None:
    save(tmp_path / "in" / "a.png")
    save(tmp_path / "in" / "locked" / "b.png")
    (tmp_path / "in" / "locked").chmod(0)
    _, files, skipped = read_files([tmp_path / "in"], 16)
    (tmp_path / "in" / "locked").chmod(0o700)
    assert (len(files), len(skipped)) == (1, 1)


# one depth for a folder and its detector


def test_the_depth_is_found_on_good_images_alone(tmp_path: Path) -> None:
    save(tmp_path / "train" / "good" / "a.tif", 300, np.uint16)
    save(tmp_path / "train" / "good" / "b.tif", 4095, np.uint16)
    save(tmp_path / "test" / "good" / "dark.tif", 100, np.uint16)
    save(tmp_path / "test" / "dent" / "bright.tif", 5000, np.uint16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = load_folder(tmp_path, Reading(20))
    assert task.depth == Depth(4095)
    assert (task.train[0].max(), task.train[1].max(), task.test[0].max()) == (19, 255, 6)
    told = [str(one.message) for one in caught]
    assert "no sample above 4095" in told[0]
    assert "bright.tif has samples up to 5000 where 4095 is white" in told[1]
    declared = load_folder(tmp_path, Reading(20, Depth(16383)))
    assert (declared.depth, len(declared.test), int(declared.train[1].max())) == (Depth(16383), 2, 64)


def test_a_folder_of_8_bits_expects_no_more(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    assert load_folder(tmp_path, Reading(16)).depth == Depth(255)


def test_a_detector_keeps_the_depth_it_was_fitted_in(model: Path, tmp_path: Path) -> None:
    detector = Detector.load(model)
    assert detector.preprocessing.depth == Depth(4095)
    assert detector.card()["preprocessing"]["depth"] == {"whole": 4095, "real": 1.0}
    dark, bright = save(tmp_path / "dark.tif", 200, np.uint16), save(tmp_path / "bright.tif", 4096, np.uint16)
    code, out, err = run("inspect", model, tmp_path, "--json")
    told = json.loads(out)
    assert code in (1, 4)
    assert [row["image"] for row in told["images"]] == [str(dark)]
    assert [left["file"] for left in told["left_out"]] == [str(bright)]
    assert f"left out: {bright} has samples up to 4096 where 4095 is white" in err
    expected = float(detector.score(detector.preprocessing.read(dark))[0])
    assert told["images"][0]["score"] == pytest.approx(expected, abs=1e-5)
    assert decode(dark, Depth(4095)).max() == 12  # not brightened for being dark


def test_a_detector_of_before_reads_as_it_did(model: Path, tmp_path: Path) -> None:
    tensors, card = read_model(model)
    del card["preprocessing"]["depth"]
    write_model(tmp_path / "old.firm", tensors, card)
    old = Detector.load(tmp_path / "old.firm")
    assert old.preprocessing.depth == FULL_DEPTH
    samples = RNG.integers(0, 65536, (20, 20)).astype(np.uint16)
    expected = torch.from_numpy((samples.astype(np.int64) + 128) // 257)
    read = decode(png(samples[..., None], 16), old.preprocessing.depth)
    assert torch.equal(torch.from_numpy(read[..., 0].astype(np.int64)), expected)


def test_a_run_is_named_by_its_pixels_not_by_the_depth_of_their_files(tmp_path: Path) -> None:
    """So a training that was begun before depths were kept goes on."""
    for number in range(6):
        save(tmp_path / f"{number}.png")
    recipe = change(PARTS, SMALL)
    sets = [load_folder(tmp_path, Reading(16, depth)) for depth in (None, FULL_DEPTH)]
    first, second = (prepare(recipe, data, torch.arange(6), seed=0) for data in sets)
    assert first.task.preprocessing != second.task.preprocessing
    assert first.run().digest == second.run().digest


# the command line


def test_fit_goes_on_without_bad_files_or_stops_at_the_first(parts: Path, tmp_path: Path) -> None:
    spoil(parts / "train" / "good" / "3.png")
    code, out, err = run("fit", parts, "-o", tmp_path / "a.firm", *OPTIONS, "--json")
    assert code == 1, err
    (line,) = json.loads(out)["left_out"]
    assert f"{line}\n" in err
    assert line.startswith(f"left out: {parts / 'train' / 'good' / '3.png'} cannot be decoded")
    code, out, err = run("fit", parts, "-o", tmp_path / "b.firm", *OPTIONS, "--strict")
    assert (code, out) == (2, "")
    assert err.startswith(f"firm: {parts / 'train' / 'good' / '3.png'} cannot be decoded")
    assert not (tmp_path / "b.firm").exists()


def test_fit_takes_a_declared_depth(tmp_path: Path) -> None:
    for number in range(8):
        save(tmp_path / "good" / f"{number}.tif", 1000, np.uint16)
    code, out, err = run("fit", tmp_path / "good", "-o", tmp_path / "a.firm", *OPTIONS, "--depth=10", "--json")
    assert code == 0, err
    assert "no sample above" not in err
    assert json.loads(out)["preprocessing"]["depth"]["whole"] == 1023
    code, _, err = run("fit", tmp_path / "good", "-o", tmp_path / "a.firm", *OPTIONS, "--depth=8")
    assert code == 2
    assert "has samples up to 1000 where 255 is white" in err
    assert run("fit", tmp_path / "good", "-o", tmp_path / "a.firm", "--depth=17")[0] == 2


def test_evaluate_goes_on_without_bad_files_or_stops_at_the_first(parts: Path, model: Path) -> None:
    spoil(parts / "test" / "dent" / "1.png")
    code, out, err = run("evaluate", model, parts, "--json")
    assert code == 1, err
    assert json.loads(out)["left_out"] == [str(parts / "test" / "dent" / "1.png")]
    assert f"left out: {parts / 'test' / 'dent' / '1.png'}" in err
    code, out, err = run("evaluate", model, parts, "--strict")
    assert (code, out) == (2, "")
    assert f"firm: {parts / 'test' / 'dent' / '1.png'}" in err


def test_odd_names_are_printed_whatever_they_are_made_of(model: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/in\xff"))
    file = save(odd / "two\nlines.png")
    _, out, _ = run("inspect", model, odd)
    first = out.splitlines()[0]
    assert first.encode().decode().endswith("in\\udcff/two\\nlines.png")
    _, out, _ = run("inspect", model, odd, "--json")
    assert json.loads(out)["images"][0]["image"] == str(file)
