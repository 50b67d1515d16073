"""The one pipeline: the same detector by every door, nothing computed twice, and few lines about it."""

from __future__ import annotations

import itertools
import json
import pkgutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from commands import run
from firm.detector.detector import Detector
from firm.detector.fit import fit
from firm.detector.read import Options, read_good
from firm.drawn.render import write_folder
from firm.errors import ImageError, SettingError
from firm.images.alignment import Conditioning
from firm.images.preprocess import fingerprint
from firm.recipes.presets import recipe as preset
from firm.recipes.recipe import Recipe
from listening import Heard

SMALL = {"size": 64, "training.epochs": 1, "encoder.head.hidden": [16], "outliers": "perlin-blend"}
WAVELETS = SMALL | {"pretrained.margin": 0, "pretrained.hidden": [16], "pretrained.out": 8, "training.batch": 64}
ENCODER = SMALL | {"encoder.width": 8, "training.batch": 8, "views.sizes": [16], "tiling.size": 16, "tiling.stride": 16}
RECIPES = {
    "wavelets": ("wavelets", WAVELETS, ("--encoder=wavelets",)),
    "inspect": ("inspect", ENCODER, ("--preset=inspect",)),
}


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=64, train=24, good=2, bad=2)
    return folder


def settings(changes: dict[str, object]) -> list[str]:
    return [f"--set={path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items()]


# --- one detector by every door ---


@pytest.mark.parametrize("name", RECIPES)
def test_python_and_the_command_line_give_the_same_detector(plates: Path, name: str, tmp_path: Path) -> None:
    preset_name, changes, options = RECIPES[name]
    code, out, err = run("fit", plates, "--out", tmp_path / "x.firm", *options, *settings(changes), "--json")
    assert code == 0, err
    by_command = Detector.load(tmp_path / "x.firm")
    by_python = Detector.fit(plates, recipe=preset(preset_name, **changes), listener=Heard())
    assert json.loads(json.dumps(by_python.card())) == json.loads(json.dumps(by_command.card()))
    printed = json.loads(out)
    assert {name: printed[name] for name in by_command.card()} == json.loads(json.dumps(by_python.card()))
    assert by_python.decides == by_command.decides
    assert by_python.id == by_command.id
    images = torch.stack([by_python.preprocessing.read(file)[0] for file in sorted(plates.rglob("test/*/*.png"))])
    here, there = by_python.locate(images), by_command.locate(images)
    assert torch.equal(here.scores, there.scores)
    assert torch.equal(here.maps, there.maps)


def test_the_default_recipe_is_that_of_the_command_line(
    plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes: list[Recipe] = []
    monkeypatch.setattr("firm.detector.read.most_images", lambda recipe, *_: recipes.append(recipe) or 1 / 0)
    for weights in (True, False):
        monkeypatch.setattr("firm.recipes.presets.installed", lambda name, weights=weights: weights)
        monkeypatch.setattr("firm.detector.read.frozen_backbone", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            Detector.fit(plates)
        assert run("fit", plates, "--out", tmp_path / "x.firm").code == 70
    assert recipes[0] == recipes[1] == preset("adapted")
    assert recipes[2] == recipes[3] == preset("wavelets")


def test_what_is_wrong_is_refused_before_the_images_are_read(plates: Path, tmp_path: Path) -> None:
    """Wrong rates, a mask of another aspect, and a mask for whole images."""
    Image.new("L", (64, 32), 255).save(tmp_path / "wide.png")
    mask = Image.new("L", (64, 64))
    mask.putpixel((3, 3), 255)
    mask.save(tmp_path / "mask.png")
    recipe = preset("wavelets", **WAVELETS)
    for changes, kind, culprit in (
        ({"false_calls": 0.0}, SettingError, "false_calls"),
        ({"fail": 2.0}, SettingError, "fail"),
        ({"ignored": tmp_path / "wide.png"}, SettingError, r"wide\.png"),
        ({"ignored": tmp_path / "nowhere.png"}, ImageError, r"nowhere\.png"),
        ({"ignored": tmp_path / "mask.png", "recipe": preset("parts")}, SettingError, "whole-image"),
    ):
        options = {"recipe": recipe, "memory": 0.0} | changes  # no memory: reading would be refused, too
        with pytest.raises(kind, match=culprit):
            Detector.fit(plates, **options)
    images = torch.zeros(4, 3, 64, 64, dtype=torch.uint8)
    images[:, :, :2] = torch.arange(4, dtype=torch.uint8)[:, None, None, None]
    good = read_good(images, recipe, Options(ignored=tmp_path / "mask.png"))
    assert int(good.data.ignored.sum()) == 1


# --- nothing twice ---


ONCE = {
    "read": ("group_by_part", "check_good", "load"),
    "fit": ("by_folds", "audit_images", "warnings_about"),
    "prepare": ("load_backbone",),
}


class Counted:
    """How often each step ran, and how often each file, image to align and image to embed went through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.steps: Counter[str] = Counter()
        self.files: Counter[Path] = Counter()
        self.aligned: Counter[str] = Counter()
        self.embedded: Counter[str] = Counter()
        for module, names in ONCE.items():
            for name in names:
                self._watch(f"firm.detector.{module}:{name}", lambda *_, name=name, **__: self.steps.update([name]))
        self._watch("firm.data.folder:decode", lambda file, *_: self.files.update([Path(file)]))
        self._watch("firm.images.alignment:Conditioning.__call__", self._align)
        for module in ("firm.detector.prepare", "firm.scoring.patch_features"):
            self._watch(f"{module}:cell_features", lambda *given: self.embedded.update(map(fingerprint, given[-1])))

    def _watch(self, path: str, note: Callable[..., None]) -> None:
        watched = pkgutil.resolve_name(path)

        def call(*given: object, **options: object) -> object:
            note(*given, **options)
            return watched(*given, **options)

        self._patch.setattr(path.replace(":", "."), call)

    def _align(self, conditioning: Conditioning, images: torch.Tensor, *_: object) -> None:
        if conditioning.align:
            self.aligned.update(map(fingerprint, images))


ALIGNED = {"conditioning.foreground.method": "otsu", "conditioning.align": True, "memory.neighbourhood": 1}


def test_nothing_is_read_split_aligned_embedded_or_loaded_twice(plates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    recipe = preset("wavelets", **WAVELETS | ALIGNED | {"automatic": []})
    good = read_good(plates, recipe, Options())
    detector = Detector.of(fit(good, Heard()))
    assert counted.steps == dict.fromkeys(itertools.chain(*ONCE.values()), 1)
    assert len(counted.files) == 24
    assert set(counted.files.values()) == {1}
    learnt = detector.origin["good_images"]
    images = good.data.train
    times = [counted.aligned[fingerprint(image)] for image in images]
    # for the audit, to learn from, and once more beside its synthetic defect
    assert learnt == 24
    assert Counter(times) == {3: 16, 2: 8}  # the self-check inspects as many as the first folds hold
    aligned = recipe.conditioning(images).images
    seen = [counted.embedded[fingerprint(image)] for image in aligned]
    assert Counter(seen) == {3: 16, 2: 8}


def test_choosing_settings_adds_no_more_than_the_trial(plates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    heard = Heard()
    detector = Detector.fit(plates, recipe=preset("wavelets", **WAVELETS), listener=heard)
    assert counted.steps == dict.fromkeys(itertools.chain(*ONCE.values()), 1)
    assert set(counted.files.values()) == {1}
    assert detector.recipe.automatic == ()
    stages = ["choosing settings", "embedding good images", "embedding synthetic defects", "training"]
    folds = [f"{step} fold {number} of 5" for number in range(1, 6) for step in ("training", "scoring")]
    assert list(heard.stages) == ["auditing good images", *stages, "remembering good images", *folds]
    assert all(done == total for done, total in heard.stages.values() if total is not None)


# --- lines ---


def test_a_fit_prints_at_most_eight_lines(plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it found and chose, the result, the guarantee, where the detector is; warnings beside."""
    monkeypatch.setattr("firm.recipes.presets.installed", lambda name: False)
    monkeypatch.setattr("firm.detector.fit.epochs_within", lambda *_, **__: 1)
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:9, :9] = True
    Image.fromarray(mask.numpy()).save(tmp_path / "mask.png")
    command = ("fit", plates, "--ignore", tmp_path / "mask.png", "--minutes=1", *settings(WAVELETS))
    lines = {}
    for level in ("", "--verbose", "--quiet"):
        model = tmp_path / f"x{level}.firm"
        code, out, err = run(*command, "--out", model, *([level] if level else []))
        assert code == 0, err
        lines[level] = [line for line in (err + out).splitlines() if not line.startswith("warning: ")]
        assert str(model) in out
        assert (model / "curve.png").is_file()
        result = out.replace(str(model), "x.firm")
        lines[f"result{level}"] = result.splitlines()
    assert len(lines[""]) <= 8
    assert len(lines["--verbose"]) > len(lines[""])
    assert lines["result"] == lines["result--verbose"] == lines["result--quiet"]
    assert len(lines["--quiet"]) == len(lines["result"])
    for word in ("24 good images", "% of the pixels ignored", "chosen", "training", "self-check", "about"):
        assert any(word in line for line in lines[""]), word
