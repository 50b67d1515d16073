"""What is kept of the good parts, the one most like an inspected one, and copies of what was learnt."""

from __future__ import annotations

import io

import cv2
import numpy as np
import torch
from PIL import Image

import drawings
from cases import each
from firm.data.duplicates import copies_of_known, thumbnails
from firm.detector.detector import Detector
from firm.detector.inspection import most_similar
from firm.detector.remember import NONE, Examples
from firm.drawn.render import draw_dataset
from firm.images.alignment import Conditioning
from firm.images.foreground import Rule
from firm.images.preprocess import resize, to_tensor
from firm.recipes.presets import INSPECT, PARTS
from firm.recipes.recipe import change
from firm.scoring.memory import Memory
from firm.scoring.patch_bank import fit_bank

SIDE = 64
CHEAP = change(
    INSPECT,
    {"features": "pixels", "training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": SIDE,
     "encoder.head.hidden": (8,), "automatic": (), "tiling.size": 16, "tiling.stride": 16,
     "tiling.min_foreground": 0.0},
)  # fmt: skip


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    """Smooth patterns, each its own."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=rng) * 255
    return torch.nn.functional.interpolate(coarse, size=SIDE, mode="bilinear").to(torch.uint8)


def far(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(float) - other.astype(float)).mean())


def test_examples_are_the_images_up_to_jpeg() -> None:
    images = pictures(5)
    for given in (images, images[:, :1]):
        kept = Examples.of(given)
        again = Examples(**kept.tensors())
        assert len(again) == 5
        for number, image in enumerate(given):
            assert far(again.picture(number), image.expand(3, -1, -1).permute(1, 2, 0).numpy()) < 4
        assert kept.picture(5) is None
        assert kept.picture(-1) is None
    assert NONE.picture(0) is None
    assert len(Examples.of(images[:0])) == 0


@each("radius, metric", [(-1, "l2"), (0, "cosine"), (1, "l2")])
def test_the_nearest_is_the_one_a_loop_finds(radius: int, metric: str) -> None:
    rng = torch.Generator().manual_seed(1)
    features = torch.randn(6, 3, 4, 5, generator=rng)
    bank = fit_bank(features, Memory(neighbourhood=radius, metric=metric), rng=rng)
    for _ in range(20):
        patch, cell = torch.randn(5, generator=rng), int(torch.randint(12, (1,), generator=rng))
        best, found = float("inf"), None
        for image in range(6):
            for there in range(12):
                away = max(abs(there // 4 - cell // 4), abs(there % 4 - cell % 4))
                other = features[image, there // 4, there % 4]
                distance = (
                    1 - torch.cosine_similarity(patch, other, 0) if metric == "cosine" else (patch - other).norm()
                )
                if (radius < 0 or away <= radius) and float(distance) < best:
                    best, found = float(distance), (image, there)
        assert bank.nearest(patch, cell) == found


def test_the_most_similar_good_part_is_shown() -> None:
    images = pictures(20)
    detector = Detector.fit(images, recipe=change(CHEAP, {"memory.neighbourhood": 0}), holdout=0.2)
    number = 3
    one = detector.examples.picture(number)
    damaged = one.copy()
    damaged[20:24, 20:24] = 255 - damaged[20:24, 20:24]
    found = detector.examine(damaged)
    assert far(most_similar(detector, found), one) < 1  # the very part, where it lies
    large = detector.examine(cv2.resize(damaged, (100, 90)))
    assert most_similar(detector, large).shape == (90, 100, 3)
    detector.examples = NONE
    assert most_similar(detector, found) is None


def test_a_patch_found_elsewhere_is_moved_to_where_it_is_compared() -> None:
    images = pictures(20)
    detector = Detector.fit(images, recipe=change(CHEAP, {"memory.neighbourhood": -1}), holdout=0.2)
    one = detector.examples.picture(2)
    moved = np.roll(one, (16, 32), axis=(0, 1))  # by whole patches
    found = detector.examine(moved)
    worst = int(found.examination.patches.cells.flatten().argmax())
    top, left = 16 * (worst // 4), 16 * (worst % 4)
    shown = most_similar(detector, found)
    patch = (slice(top, top + 16), slice(left, left + 16))
    assert far(shown[patch], moved[patch]) < far(one[patch], moved[patch]) / 2


def test_what_lies_outside_of_the_good_part_is_grey_and_not_smeared() -> None:
    screws = drawings.screws(24).images
    settings = {"conditioning.align": True, "conditioning.foreground.method": "otsu", "size": 96}
    settings |= {"memory.neighbourhood": 0}
    detector = Detector.fit(screws, recipe=change(CHEAP, settings), holdout=0.2)
    found = detector.examine(screws[0].permute(1, 2, 0).numpy())
    (frame,), (height, width) = found.examination.aligned.frames.numpy(), found.picture.shape[:2]
    everywhere = np.full((96, 96), 255, np.uint8)
    for number in range(3):  # what the aligned picture does not show of a part is grey in what is kept of it
        kept, own = detector.examples.picture(number), Conditioning(align=True, foreground=Rule(method="otsu"))
        (moved,) = own(resize(screws[number : number + 1], 96)).frames.numpy()
        outside = cv2.erode((cv2.warpAffine(everywhere, moved, (96, 96)) == 0).astype(np.uint8), np.ones((9, 9))) > 0
        assert np.abs(kept[outside].astype(int) - 128).max(initial=0) < 12
    away = detector.model.nearest(found.examination).shift
    inside = cv2.warpAffine(everywhere, frame, (96, 96), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
    outside = cv2.resize(cv2.erode((inside == 0).astype(np.uint8), np.ones((5, 5))), (width, height)) > 0
    assert away == (0, 0)
    assert (most_similar(detector, found)[outside] == 128).all()


def test_it_lies_as_the_picture_does() -> None:
    screws = drawings.screws(24).images
    settings = {
        "conditioning.align": True,
        "conditioning.foreground.method": "otsu",
        "memory.neighbourhood": 0,
        "size": 96,
    }
    detector = Detector.fit(screws, recipe=change(CHEAP, settings), holdout=0.2)
    looks = [image.permute(1, 2, 0).numpy() for image in screws[:12]]
    shown = [most_similar(detector, detector.examine(picture)) for picture in looks]
    upright = detector.examples.picture(0)
    moved, unmoved = (sum(map(far, looks, others)) for others in (shown, [upright] * 12))
    assert moved < 0.85 * unmoved  # noise and the turn by half a circle are left


def test_whole_images_have_no_such_part() -> None:
    whole = change(PARTS, {"training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": 32})
    detector = Detector.fit(pictures(20), recipe=whole, holdout=0.2)
    found = detector.examine(pictures(1)[0].permute(1, 2, 0).numpy())
    assert (found.heat, found.examination.patches, most_similar(detector, found)) == (None, None, None)
    assert found.verdict == detector.inspect(pictures(1)[0].permute(1, 2, 0).numpy())


@each("product", ["plate", "weave", "label"])
def test_copies_are_found_and_strangers_are_not(product: str) -> None:
    data = draw_dataset(product, train=90, good=20, bad=20, seed=3)
    learnt, fresh = data.train[:60], data.train[60:]
    known = thumbnails(learnt)
    assert copies_of_known(learnt, known).all()
    assert not copies_of_known(fresh, known).any()
    assert not copies_of_known(data.test, known).any()
    saved = torch.cat([_as_jpeg(image) for image in learnt[:20]])
    assert copies_of_known(saved, known).float().mean() > 0.9


def test_nothing_is_a_copy_of_nothing() -> None:
    images = pictures(3)
    assert not copies_of_known(images, thumbnails(images)[:0]).any()
    assert copies_of_known(images[:0], thumbnails(images)).shape == (0,)
    assert copies_of_known(images, thumbnails(images[:1])).tolist() == [True, False, False]  # one alone: the same


def _as_jpeg(image: torch.Tensor) -> torch.Tensor:
    content = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(content, "JPEG", quality=80)
    return to_tensor(np.array(Image.open(content).convert("RGB")))


def test_beside_a_mean_the_patches_that_are_remembered_tell_which_part_is_most_similar() -> None:
    good = pictures(12)
    shown = {}
    for features in ("projection", "pixels", "projection+pixels"):
        detector = Detector.fit(good, recipe=change(CHEAP, {"features": features}), holdout=0.25)
        shown[features] = most_similar(detector, detector.examine(pictures(1, seed=5)[0].permute(1, 2, 0).numpy()))
    assert shown["projection"] is None
    assert shown["pixels"] is not None
    assert shown["projection+pixels"] is not None
