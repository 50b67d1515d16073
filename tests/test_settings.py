"""A user's own outlier source, views and score work from a script, and a detector that has them is saved and loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import own_parts
from cases import each
from firm.detector.detector import Detector
from firm.errors import SettingError
from firm.recipes.presets import PARTS
from firm.recipes.recipe import Recipe, change, digest, from_json, sparse, to_json
from firm.scoring.image_scores import Scoring
from own_parts import Farthest, NoisyViews, Stripes

OWN = change(
    PARTS,
    {
        "outliers": Stripes(width=5),
        "views": NoisyViews(),
        "score": Scoring(by=Farthest(power=2.0)),
        "encoder.width": 8,
        "encoder.head.hidden": (8,),
        "training.epochs": 1,
        "training.batch": 8,
        "size": 16,
    },
)


def test_a_detector_with_parts_of_your_own_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(256, (24, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    detector = Detector.fit(images, recipe=OWN, holdout=0.3)
    detector.save(tmp_path / "own.firm")
    written = json.loads((tmp_path / "own.firm" / "card.json").read_text())["recipe"]
    assert written["outliers"] == {"kind": "own_parts:Stripes", "width": 5, "per_inlier": 1, "kinds": 1}
    loaded = Detector.load(tmp_path / "own.firm")
    assert loaded.recipe == OWN
    assert torch.equal(loaded.score(images), detector.score(images))
    assert bool((detector.score(images) > 0).all())
    # a detector must not run code that its reader has not imported
    monkeypatch.delitem(sys.modules, "own_parts")
    with pytest.raises(SettingError, match="import own_parts"):
        Detector.load(tmp_path / "own.firm")  # its score decides
    assert "own_parts" not in sys.modules


def test_what_only_a_training_needs_is_not_needed_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and settings it is kept, also through another save; a training asks for it."""
    images = torch.randint(256, (24, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    detector = Detector.fit(images, recipe=change(OWN, {"score": "s_con"}), holdout=0.3)
    detector.save(tmp_path / "own.firm")
    with monkeypatch.context() as gone:
        gone.delitem(sys.modules, "own_parts")
        loaded = Detector.load(tmp_path / "own.firm")
        loaded.save(tmp_path / "again.firm")
        with pytest.raises(SettingError, match="import own_parts"):
            Detector.fit(images, recipe=loaded.recipe, holdout=0.3)
    assert (loaded.id, loaded.decides) == (detector.id, detector.decides)
    assert json.dumps(loaded.card()) == json.dumps(detector.card())
    assert torch.equal(loaded.score(images), detector.score(images))
    assert Detector.load(tmp_path / "again.firm").recipe == detector.recipe


def test_a_setting_that_cannot_be_saved_is_refused_at_once() -> None:
    with pytest.raises(SettingError, match=r"outliers .*Stripes"):
        change(OWN, {"outliers": Stripes(width=Path("5"))})  # type: ignore[arg-type]


def test_settings_of_your_own_parts_are_changed_by_path_and_name_the_training() -> None:
    wider = change(OWN, {"outliers.width": 7, "views.noise": 1})
    assert (wider.outliers.width, wider.views.noise) == (7, 1.0)
    assert from_json(json.loads(json.dumps(to_json(wider)))) == wider
    assert from_json(sparse(wider)) == wider
    assert len({digest(OWN), digest(wider), digest(change(OWN, {"outliers": "rotations"}))}) == 3
    assert digest(change(OWN, {"score.by.power": 1.0})) == digest(OWN)
    with pytest.raises(SettingError, match=r"outliers\.width is 'wide'"):
        change(OWN, {"outliers.width": "wide"})
    with pytest.raises(SettingError, match=r"no setting 'outliers\.depth'; Stripes has width"):
        change(OWN, {"outliers.depth": 3})


class Plain(Stripes):
    """A dataclass by inheritance alone."""


class NoDataclass:
    per_inlier, kinds = 1, 1

    def __call__(self, inliers, **_):
        raise AssertionError


@dataclass(frozen=True)
class NoSource:
    per_inlier: int = 1


@each(
    "path, value, culprit",
    [
        ("outliers", NoDataclass(), "NoDataclass; make it a dataclass"),
        ("outliers", NoSource(), r"NoSource\(per_inlier=1\)"),
        ("outliers", Farthest(), "Farthest"),
        ("score.by", Stripes(), "Stripes"),
        ("outliers", {"kind": "own_parts:Circles"}, "Circles of module own_parts"),
        ("outliers", {"kind": "own_parts:torch"}, "torch of module own_parts"),
        ("outliers", {"kind": "subprocess:Popen", "args": "true"}, "Popen of module subprocess"),
        ("outliers", {"kind": "own_parts:Farthest"}, r"Farthest\(power=1.0\)"),
        ("outliers", {"kind": "nowhere.at_all:Class"}, "Class of module nowhere.at_all"),
        ("tiling", {"kind": "own_parts:Stripes"}, "use one of whole, grid"),
    ],
)
def test_what_does_not_fit_a_family_is_refused(path: str, value: object, culprit: str) -> None:
    with pytest.raises(SettingError, match=rf"{path}\S* (is|needs) .*{culprit}"):
        change(PARTS, {path: value})
    if path == "outliers" and not isinstance(value, dict):
        with pytest.raises(SettingError, match="outliers is "):
            Recipe(outliers=value)


def test_own_parts_may_inherit_and_stand_in_any_module() -> None:
    assert to_json(Plain())["kind"] == f"{__name__}:Plain"
    assert to_json(own_parts.NoisyViews()) == {"kind": "own_parts:NoisyViews", "noise": 0.1}
    assert Recipe(score=Scoring(by=Farthest())).score.by == Farthest()
