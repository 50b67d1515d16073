"""What is ignored never decides: neither score, verdict nor region knows what lies there, wherever the part lies."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

import drawings
from cases import each
from commands import run
from firm.detector import tune
from firm.detector.detector import Detector
from firm.detector.prepare import Embedder, align, frozen_backbone, prepare, working_frame
from firm.detector.read import as_data
from firm.detector.remember import Fitted
from firm.detector.tune import make_trial
from firm.errors import SettingError
from firm.images.foreground import Rule, foreground
from firm.images.preprocess import Preprocessing, brightness
from firm.networks.adaptor import Pretrained
from firm.networks.resnet import ResNet
from firm.outliers.registry import LOCAL, OUTLIERS, make_outliers
from firm.recipes.presets import ADAPTED, FAST, INSPECT
from firm.recipes.recipe import Recipe, change
from firm.scoring.memory import Memory
from firm.scoring.models import PatchScorer
from firm.scoring.patch_bank import Bank
from firm.scoring.patch_features import EncoderFeatures
from firm.scoring.patch_grid import Grid
from firm.training.batches import ImageTask
from firm.types import Focus, Outliers, Scene

SIDE = 96
PLAIN: Recipe = change(
    INSPECT,
    {
        "encoder.width": 8,
        "encoder.head.hidden": (16,),
        "encoder.head.out": 8,
        "training.epochs": 0,
        "training.batch": 16,
        "size": SIDE,
        "features": "pixels",
        "memory.neighbourhood": 1,
        "conditioning.illumination": "local",
        "automatic": (),
    },
)
ALIGNED = change(PLAIN, {"conditioning.align": True, "conditioning.foreground.method": "otsu"})
ALIGNED = change(ALIGNED, {"conditioning.illumination": "none"})
GOOD = drawings.screws(24).images
TURNED = drawings.screws(24, turned=True).images
CORNER = torch.zeros(SIDE, SIDE, dtype=torch.bool)
CORNER[:40, :44] = True  # its border runs through patches


def spotted(images: torch.Tensor, top: int, left: int) -> torch.Tensor:
    """The images with a glaring square."""
    wrong = images.clone()
    wrong[:, :, top : top + 12, left : left + 12] = 255 - wrong[:, :, top : top + 12, left : left + 12]
    wrong[:, :, top + 3 : top + 9, left + 3 : left + 9] = 0
    return wrong


def fitted(good: torch.Tensor, recipe: Recipe, ignored: torch.Tensor | None) -> Detector:
    return Detector.fit(good, recipe=recipe, seed=0, holdout=0.2, false_calls=0.2, ignored=ignored)


def task_of(recipe: Recipe, good: torch.Tensor, ignored: torch.Tensor | None) -> ImageTask:
    task = prepare(recipe, as_data(good, ignored), torch.arange(len(good)), seed=0).task
    assert isinstance(task, ImageTask)
    return task


@pytest.fixture(scope="module")
def detector() -> Detector:
    return fitted(GOOD, PLAIN, CORNER)


@pytest.fixture(scope="module")
def aligned() -> Detector:
    return fitted(TURNED, ALIGNED, CORNER)


def test_nothing_synthetic_lies_on_what_is_ignored() -> None:
    """Neither in training nor in the trial that chooses settings."""
    recipe = change(PLAIN, {"training.epochs": 1, "conditioning.foreground.method": "otsu"})
    task = task_of(recipe, GOOD, CORNER)
    assert task.foreground is not None
    assert not task.foreground[:, CORNER].any()
    assert task.buffer is not None
    made = task.buffer.take(0, 64)  # of all six kinds, as a step takes them
    assert made.where is not None
    assert made.where.any()
    assert not made.where[:, CORNER].any()
    seen: list[torch.Tensor] = []

    def noted(images: torch.Tensor, **rest: object) -> object:
        seen.append(rest["scene"].foreground)  # type: ignore[attr-defined]
        assert torch.equal(rest["scene"].hidden, ~seen[0])  # type: ignore[attr-defined]
        return recipe.outliers(images, **rest)  # type: ignore[arg-type]

    noted.per_inlier = noted.kinds = 1  # type: ignore[attr-defined]
    everywhere = torch.ones(24, SIDE, SIDE, dtype=torch.bool)
    make_trial(GOOD, everywhere, torch.arange(24), noted, seed=0, ignored=CORNER)  # type: ignore[arg-type]
    assert torch.equal(seen[0], (~CORNER).expand_as(seen[0]))


@settings(max_examples=40)
@given(
    name=st.sampled_from([name for name in (*LOCAL, "mixture") if not name.startswith("nsa-")]),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.3, 0.75]),
    data=st.data(),
)
def test_no_source_learns_a_defect_from_what_is_hidden(name: str, seed: int, share: float, data: st.DataObject) -> None:
    """Hidden pixels stay, what is altered lies beside them, and none comes back as it was."""
    images = F.interpolate(TURNED[:3].float(), size=48).byte()
    height, width = (48, round(48 * share))[:: data.draw(st.sampled_from([1, -1]))]
    top, left = data.draw(st.integers(0, 48 - height)), data.draw(st.integers(0, 48 - width))
    hidden = torch.zeros(3, 48, 48, dtype=torch.bool)
    hidden[:, top : top + height, left : left + width] = True
    hidden[0] = True
    hidden[0, 20:23, 20:23] = False  # hardly anything is left
    scene = Scene((images[:, 0] > 100) & ~hidden, images, images[:, 0] > 100, hidden)
    source = OUTLIERS[name]
    with mock.patch("firm.outliers.registry.TRIES", 3):
        made = make_outliers(source, images, rng=torch.Generator().manual_seed(seed), scene=scene)
    assert made.where is not None
    assert torch.equal(made.images[hidden[:, None].expand_as(images)], images[hidden[:, None].expand_as(images)])
    assert not (made.where & hidden).any()
    assert torch.equal(made.where, (made.images != images).any(1))
    seen = ((made.images.int() - images.int()).abs().amax(1) >= 5).flatten(1).sum(1)
    assert (seen > 0).all()
    assert made.group.min() >= 1
    assert made.group.max() <= source.kinds


def test_without_anything_hidden_outliers_are_those_of_the_source() -> None:
    masks = GOOD[:6, 0] > 100
    for hidden in (None, torch.zeros_like(masks)):
        for copy in (None, torch.arange(6) % 3):
            scene = Scene(masks, GOOD[:6], masks, hidden)
            one, other = (torch.Generator().manual_seed(0) for _ in range(2))
            made = make_outliers(OUTLIERS["mixture"], GOOD[:6], rng=one, copy=copy, scene=scene)
            plain = OUTLIERS["mixture"](GOOD[:6], rng=other, copy=copy, scene=replace(scene, hidden=None))
            assert torch.equal(made.images, plain.images)
            assert torch.equal(made.group, plain.group)
            assert torch.equal(one.get_state(), other.get_state())
    whole = make_outliers(OUTLIERS["rotations"], GOOD[:2], rng=one, scene=Scene(masks[:2], GOOD, masks, masks[:2]))
    assert whole.where is None


@each("recipe, good", [(PLAIN, GOOD), (ALIGNED, TURNED)])
def test_batches_take_no_defect_from_what_is_hidden(recipe: Recipe, good: torch.Tensor) -> None:
    """With outliers made ahead and without; upright and aligned."""
    for reuse in (1, 4):
        settled = change(recipe, {"outliers": "cutpaste-union", "training.epochs": 1, "training.reuse": reuse})
        task = task_of(settled, good, CORNER)
        assert task.hidden is not None
        assert (task.buffer is None) == (reuse == 1)
        focused: list[Focus] = []

        def noted(images: torch.Tensor, size: int, *, focus: Focus, **rest: object) -> object:
            focused.append(focus)  # noqa: B023
            return settled.views(images, size, focus=focus, **rest)  # type: ignore[arg-type]  # noqa: B023

        half = torch.zeros_like(task.hidden)
        half[:, :, :48] = True
        with mock.patch("firm.training.batches.READY", 8):
            replace(task, views=noted, hidden=half).batch(0)  # type: ignore[arg-type]
        altered = focused[0].altered
        assert 4 <= int(altered.flatten(1).any(1).sum()) < len(altered)
        assert not altered[:, :, :48].any()
    ready = recipe.conditioning(good, CORNER)
    hidden = ready.hidden()
    assert hidden is not None
    assert torch.equal(task.hidden, hidden)
    assert torch.equal(task.images, ready.completed(ready.typical()).images[:, :1])


def test_what_is_left_too_small_is_drawn_again_until_it_is_not() -> None:
    """The defect moves a little out of the mask with every draw."""
    drawn: list[int] = []

    @dataclass(frozen=True)
    class Moving:
        per_inlier = kinds = 1

        def __call__(self, inliers: torch.Tensor, **_: object) -> Outliers:
            drawn.append(len(inliers))
            images = inliers.clone()
            left = 43 + len(drawn)
            images[:, :, 5:13, left - 8 : left] ^= 128
            return Outliers(images, torch.ones(len(inliers)).long(), (images != inliers).any(1))

    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    hidden = torch.stack([CORNER, masks[0]])  # the second shows all of it at once
    scene = Scene(~masks, GOOD[:2], ~masks, hidden)
    made = make_outliers(Moving(), GOOD[:2], rng=torch.Generator(), scene=scene)
    assert drawn == [2, 1, 1]
    assert made.where is not None
    assert made.where.flatten(1).sum(1).tolist() == [16, 64]


def test_a_trial_and_the_places_of_the_object_know_what_is_hidden() -> None:
    masks = foreground(TURNED, Rule(method="otsu"))
    trial = make_trial(TURNED, masks, torch.arange(24), LOCAL["scratches"], seed=0, ignored=CORNER)
    extractor = EncoderFeatures(None, Preprocessing(SIDE), Grid(size=16, stride=16), ("pixels",), True)
    view = tune._View.of(trial, ALIGNED.conditioning, extractor, CORNER)
    typical = ALIGNED.conditioning(trial.known, CORNER).typical()
    for images, ready in ((trial.known, view.known), (trial.inspected, view.inspected)):
        assert torch.equal(ready.images, ALIGNED.conditioning(images, CORNER).completed(typical).images)
    hidden = view.known.hidden()
    assert hidden is not None
    everywhere = replace(view.known, foreground=~hidden)
    present = PatchScorer.fit(extractor.grid, view.known_features, everywhere, Memory(neighbourhood=0), seed=0).present
    torch.testing.assert_close(present, torch.ones_like(present))  # in whatever part of the images it was hidden


def test_a_mask_that_cannot_be_used_is_refused_before_the_training() -> None:
    with pytest.raises(SettingError, match="whole-image"):
        Detector.fit(GOOD, recipe=FAST, ignored=CORNER)
    with pytest.raises(SettingError, match="marks every pixel"):
        Detector.fit(GOOD, recipe=PLAIN, ignored=torch.ones_like(CORNER))


def test_another_mask_is_another_training() -> None:
    flat = torch.full_like(GOOD, 90)  # nothing to be overwritten: only the mask itself tells
    names = {task_of(PLAIN, flat, mask).fingerprint for mask in (None, CORNER, CORNER.T)}
    assert len(names) == 3


# the localiser


@each("least", [0.0, 0.2])
def test_a_patch_counts_as_far_as_it_is_not_hidden(least: float) -> None:
    grid = Grid(size=16, stride=8, min_foreground=least)
    hidden = CORNER.expand(2, -1, -1)
    free = grid.parts(~hidden)

    class Fixed(Bank):
        def score(self, features: torch.Tensor, needed: torch.Tensor | None = None) -> torch.Tensor:
            return features[..., 0]

    shape = free.shape[1:]
    one_patch = {"vectors": torch.zeros(1, 1), "image": torch.zeros(1).long(), "cell": torch.zeros(1).long()}
    bank = Fixed(Memory(), {**one_patch, "mean": torch.zeros(shape), "deviation": torch.ones(shape)})
    seen = {"pixels": torch.full((2, *free.shape[1:], 1), 3.0)}
    seen["pixels"][1] = -1.0
    one = PatchScorer(grid, {"pixels": bank}, torch.ones(shape))  # at this place all good images show the object
    cells = one.cells(seen, ~hidden, hidden)
    wanted = 3 * ((free[0] > 0).float() if least == 0 else (free[0] / least).clamp(max=1))
    torch.testing.assert_close(cells[0], wanted)
    assert (cells[0][free[0] == 0] == 0).all()
    assert (free[0] == 0).any()
    assert not cells[1].any()
    everywhere = torch.ones_like(hidden)
    assert torch.equal(one.cells(seen, everywhere)[0], seen["pixels"][0, ..., 0])


# the detector


@each("least", [0.2, 0.0])
def test_what_is_ignored_changes_nothing_and_the_same_beside_it_is_found(detector: Detector, least: float) -> None:
    recipe = change(PLAIN, {"tiling.min_foreground": least})
    one = detector if least else fitted(GOOD, recipe, CORNER)
    fresh = drawings.screws(4, seed=5).images
    clean, inside, across = (one.locate(images) for images in (fresh, spotted(fresh, 8, 8), spotted(fresh, 28, 32)))
    assert torch.equal(clean.scores, inside.scores)
    assert torch.equal(clean.maps, inside.maps)
    assert torch.equal(clean.maps, across.maps)  # up to the very border
    outside = one.locate(spotted(fresh, 64, 64))
    assert (outside.scores > one.decides.fail).all()
    assert not outside.maps[:, CORNER].any()
    peak = (outside.maps[0] == outside.maps[0].max()).nonzero()[0].tolist()
    assert 56 <= min(peak) <= max(peak) <= 84


def test_verdict_and_regions_are_those_without_the_defect(detector: Detector) -> None:
    fresh = drawings.screws(1, seed=5).images
    pictures = [one[0].permute(1, 2, 0).numpy() for one in (fresh, spotted(fresh, 20, 20), spotted(fresh, 38, 50))]
    clean, inside, outside = (detector.inspect(picture) for picture in pictures)
    assert inside == clean
    assert outside.verdict == "FAIL"
    assert outside.regions
    unaware = fitted(GOOD, PLAIN, None)
    assert unaware.inspect(pictures[1]).verdict == "FAIL"
    assert unaware.inspect(pictures[1]).regions


def test_aligned_parts_under_a_mask_of_the_camera() -> None:
    """A square that no part wears: under the mask it does not count, beside it it does, however the part lies."""
    ignored = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    ignored[30:66, 36:60] = True
    one = fitted(TURNED, ALIGNED, ignored)
    fresh = drawings.screws(8, turned=True, seed=7).images
    inside = one.locate(dulled(fresh, 44, 44))
    assert not inside.maps[:, ignored].any()
    clean = one.locate(fresh)
    still = as_posed(dulled(fresh, 44, 44), fresh)  # a threshold that moved moves the pose
    assert int(still.sum()) >= 3
    torch.testing.assert_close(inside.scores[still], clean.scores[still], atol=1e-4, rtol=1e-5)
    bad = drawings.screws(8, turned=True, seed=7, defect=True, level=20)
    free = torch.tensor([not bool((mask & ignored).any()) for mask in bad.masks])
    assert int(free.sum()) >= 2
    assert (one.score(bad.images[free]) > clean.scores.max()).all()


def dulled(images: torch.Tensor, top: int, left: int) -> torch.Tensor:
    """A faint square on the part, too faint to move its outline by much."""
    wrong = images.clone()
    wrong[:, :, top : top + 8, left : left + 8] = 165
    return wrong


def as_posed(images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which of the images are turned exactly as the others."""
    one, other = ALIGNED.conditioning(images).frames, ALIGNED.conditioning(others).frames
    assert one is not None
    assert other is not None
    return (one == other).flatten(1).all(1)


def test_aligned_parts_are_told_apart_as_well_as_without_a_mask(aligned: Detector) -> None:
    """What the mask takes of each part differs from part to part; that must not drown a faint defect beside it."""
    good = aligned.score(drawings.screws(16, turned=True, seed=7).images)
    bad = drawings.screws(16, turned=True, seed=8, defect=True, level=115)
    free = ~(bad.masks & CORNER).flatten(1).any(1)
    assert int(free.sum()) >= 12
    assert aligned.score(bad.images[free]).min() > good.max()


def test_hidden_patches_of_good_images_are_not_remembered(aligned: Detector) -> None:
    bank, learnt = aligned.model.scorer.banks["pixels"], int(aligned.origin["good_images"])
    assert len(bank.vectors) < learnt * math.prod(bank.shape)
    upright = fitted(GOOD, change(PLAIN, {"tiling.size": 16}), CORNER).model.scorer
    shown = upright.grid.parts(~CORNER[None])[0] > 0
    assert not shown.all()
    remembered = upright.banks["pixels"].cell.bincount(minlength=shown.numel())
    assert torch.equal(remembered > 0, shown.flatten())


def test_pretrained_features_see_beyond_their_patch_and_yet_nothing_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "resnet18.safetensors"
    save_file({name: value.contiguous() for name, value in ResNet("resnet18").state_dict().items()}, path)
    changes = {
        "pretrained": Pretrained(name=str(path), stages=(2,), margin=0, hidden=(16,), out=8),
        "encoder.head.hidden": [8],
        "encoder.head.out": 8,
        "training.epochs": 1,
        "training.batch": 32,
        "outliers": "perlin-blend",
        "outliers.per_inlier": 1,
        "size": 100,  # works at a multiple of the stride
        "automatic": ["illumination"],
    }
    large = F.interpolate(GOOD[:12].float(), size=(100, 100)).byte()
    asked = change(ADAPTED, changes)
    one = fitted(large, asked, F.pad(CORNER, (0, 4, 0, 4)))
    assert one.model.ignored.shape == (96, 96)
    assert torch.equal(one.locate(spotted(large[:2], 20, 24)).maps, one.locate(large[:2]).maps)
    pasting = change(one.recipe, {"outliers": "cutpaste", "outliers.per_inlier": 3})
    embedder = embedder_of(pasting, large, F.pad(CORNER, (0, 4, 0, 4)))
    altered = embedder.outliers(0, 36)[..., -2]
    assert altered.flatten(1).any(1).all()
    assert embedder.hidden is not None
    assert not altered[:, pasting.grid.parts(~embedder.hidden)[0] == 0].any()
    assert embedder_of(one.recipe, large, CORNER).key() != embedder_of(one.recipe, large, None).key()


def embedder_of(recipe: Recipe, images: torch.Tensor, ignored: torch.Tensor | None) -> Embedder:
    backbone, data = frozen_backbone(recipe), as_data(images, ignored)
    aligned = align(recipe, data, working_frame(recipe, data))
    assert backbone is not None
    assert aligned is not None
    return Embedder(recipe, recipe.views, backbone, aligned, Preprocessing(96), 0)


def test_it_is_saved_and_names_the_model(detector: Detector, aligned: Detector, tmp_path: Path) -> None:
    for one, images in ((detector, spotted(GOOD[:2], 8, 8)), (aligned, TURNED[:3])):
        one.save(tmp_path / "part.firm")
        loaded = Detector.load(tmp_path / "part.firm")
        assert torch.equal(loaded.model.ignored, CORNER)
        assert loaded.id == one.id
        assert loaded.decides == one.decides
        assert torch.equal(loaded.locate(images).maps, one.locate(images).maps)
    assert detector.model.typical is None
    assert "ignore_mask" not in without(detector, "ignore_mask").model.state_dict()
    assert len({detector.id, without(detector, "ignore_mask").id, without(aligned, "typical").id, aligned.id}) == 4
    turned = deepcopy(detector)
    turned.model.ignore_mask = CORNER.T
    assert Fitted(**fields_of(turned)).id != detector.id


def without(detector: Detector, name: str) -> Fitted:
    changed = deepcopy(detector)
    setattr(changed.model, name, None)
    return Fitted(**fields_of(changed))


def fields_of(detector: Detector) -> dict[str, object]:
    return {field.name: getattr(detector, field.name) for field in fields(Fitted)}


def test_a_mask_of_any_size_is_kept_at_the_side_of_the_detector() -> None:
    large = CORNER.repeat_interleave(2, 0).repeat_interleave(3, 1)
    one = fitted(GOOD, PLAIN, large)
    kept = one.model.ignored
    assert kept.shape == (SIDE, SIDE)
    assert (kept | ~CORNER).all()
    assert int((kept & ~CORNER).sum()) <= 90  # one row and one column at most


# the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts")
    (place / "good").mkdir()
    for number, image in enumerate(GOOD):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / "good" / f"{number:02d}.png")
    Image.fromarray(CORNER.numpy()).save(place / "mask.png")
    Image.new("L", (SIDE, SIDE), 255).save(place / "all.png")
    Image.new("L", (SIDE, 70), 255).save(place / "wide.png")
    narrow = Image.new("L", (SIDE, 70))
    narrow.putpixel((3, 3), 255)
    narrow.save(place / "narrow.png")
    (place / "broken.png").write_bytes(b"nothing")
    return place


SETTINGS = [
    f"--set={setting}"
    for setting in (
        "size=96",
        "encoder.width=8",
        "encoder.head.hidden=[16]",
        "training.epochs=0",
        "features=pixels",
        "conditioning.illumination=none",
        "conditioning.align=false",
        "memory.neighbourhood=1",
    )
]


def test_fit_takes_a_mask(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "part.firm"
    code, _, err = run(
        "fit", folder / "good", "-o", model, "--ignore", folder / "mask.png", "--preset=inspect", *SETTINGS
    )
    assert code == 0, err
    assert "19.1 % of the pixels ignored" in err
    assert torch.equal(Detector.load(model).model.ignored, CORNER)


@each(
    "mask, more, sentence",
    [
        ("all.png", (), "marks every pixel"),
        ("narrow.png", (), "the aspect differs"),
        ("broken.png", (), "broken.png"),
        ("nowhere.png", (), "does not exist"),
        ("mask.png", ("--preset=parts",), "whole-image"),
    ],
)
def test_fit_says_what_is_wrong_with_a_mask(
    folder: Path, tmp_path: Path, mask: str, more: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("fit", folder / "good", "-o", tmp_path / "x.firm", "--ignore", folder / mask, *more)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert not (tmp_path / "x.firm").exists()


def test_masks_shows_what_is_ignored(folder: Path, tmp_path: Path) -> None:
    shown = []
    for more in ((), ("--ignore", folder / "mask.png")):
        code, _, err = run("masks", folder / "good", "-o", tmp_path / "sheet.png", "--set=size=96", *more)
        assert code == 0, err
        pixels = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
        shown.append(int(((pixels[..., 0] - pixels[..., 2]) > 40).sum()))
    assert shown[1] > shown[0] + 1000


def test_what_is_ignored_is_no_light() -> None:
    images = torch.full((3, 3, 96, 96), 100, dtype=torch.uint8)
    mask = torch.zeros(96, 96, dtype=torch.bool)
    mask[:40, :40] = True
    images[1, :, :32, :32] = 255  # a display under the mask
    images[2] = 120
    plain, masked = brightness(images), brightness(images, mask)
    assert plain[1] > plain[0]
    assert masked.tolist() == pytest.approx([100 / 255, 100 / 255, 120 / 255], abs=0.002)
    mask[:], mask[95, 95] = True, False  # a single pixel counts
    assert brightness(images, mask).tolist() == pytest.approx([100 / 255, 100 / 255, 120 / 255], abs=0.002)
    assert brightness(images[:0]).shape == (0,)
