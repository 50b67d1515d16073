"""Choose the crop and the size at which images are encoded, before they are read.

Images of one aspect keep it. How many pixels they keep is tried on synthetic defects of a few sizes, given in pixels of
the files: more pixels show smaller defects, but more patches have more chances of a false maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from firm.errors import ImageError, SettingError
from firm.images.alignment import Conditioned
from firm.images.crop import SQUARE, Crop, Picture, crop_around, object_box
from firm.images.decode import Source, decode
from firm.images.foreground import Rule, automatic
from firm.images.resize import resize, to_tensor
from firm.metrics.image import auroc
from firm.networks.backbone import Backbone
from firm.outliers.marks import Scratches, Spots
from firm.recipes.recipe import Recipe
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.scoring.memory import Memory
from firm.scoring.models import PatchScorer
from firm.scoring.patch_features import CHUNK, UnadaptedFeatures
from firm.types import FULL_DEPTH, Depth

LOOKED_AT = 48  # images whose shape and object decide
LARGEST = 2**21  # pixels to which these are reduced
ALIKE = 1.1  # ratio of two aspects up to which they are one
AGREEING = 0.9  # of the images that must have it
SIDE = 256  # of the presets' square, of which a size has this many times the pixels
USUAL = 4.0  # times as many pixels at most, and no more than make the shorter side `SIDE`
STEPS = (1.0, 2.0, 4.0, 8.0, 16.0)  # if a smallest defect is given
MULTIPLE, LEAST = 32, 96  # px: of every side
KNOWN, INSPECTED = 40, 20  # images of a trial
FEWEST = 9  # images on which a size is tried
KEPT = 4000  # patches that the trial compares with
DEFECTS = (1 / 32, 1 / 16, 1 / 8)  # of the shorter side: sizes tried if none is given
GROWING = (1, 2, 4)  # times the smallest defect, if one is given
WINDOW = 192  # px around a defect whose features are computed again
AROUND = 24  # px around a defect in which it shows
CHANGE = (25.0, 110.0)  # grey levels
MARGIN = 0.02  # AUROC by which more pixels must win
FOUND = 0.9  # AUROC from which a defect can be expected to be found
SMALL = 0.2  # of the image: an object in a smaller box is worth a crop


@dataclass(frozen=True)
class Trial:
    """Reference pictures, and pictures with the same defect in several sizes (px of the files)."""

    known: list[Picture]
    good: list[Picture]
    places: list[tuple[int, int]]  # of the defect
    sizes: tuple[float, ...]
    altered: list[list[Picture]]  # for each good picture, one for each size


def cropped(
    recipe: Recipe, asked: str | None, sources: Sequence[Source], depth: Depth | None, listener: Listener = SILENT
) -> Recipe:
    """The recipe with the crop that was asked for: `auto`, or x,y,w,h in pixels."""
    if asked is None:
        return recipe
    pictures, scale = _sample(sources, depth)
    if not pictures:
        raise SettingError("--crop needs images in files or arrays of their own; crop these before the fit")
    if asked != "auto":
        height, width = (int(np.median(sides)) for sides in zip(*(each.shape[:2] for each in pictures), strict=True))
        return replace(recipe, crop=Crop.parse(asked, round(height / scale), round(width / scale)))
    rule = _rule(pictures)
    if rule.method == "ones":
        raise SettingError("--crop auto finds no object on a plain background; give --crop x,y,w,h or leave it out")
    crop = crop_around(pictures, rule)
    listener.say(
        f"cropped to {100 * crop.width:.0f} % of the width and {100 * crop.height:.0f} % of the height ({rule})"
    )
    return replace(recipe, crop=crop)


def sized(
    recipe: Recipe,
    smallest: float | None,
    sources: Sequence[Source],
    backbone: Backbone | None,
    depth: Depth | None,
    *,
    seed: int = 0,
    listener: Listener = SILENT,
) -> Recipe:
    """The recipe with the size to work at; squares stay as they are unless a smallest defect (px of files) is given."""
    if smallest is not None and not smallest > 0:
        raise SettingError(f"--smallest-defect is {smallest:g} px; give the extent of a defect, such as 8")
    is_open = recipe.automatic and recipe.patchwise and recipe.size == SIDE and not recipe.shape
    pictures, scale = _sample(sources if is_open and backbone is not None else [], depth)
    if not pictures or backbone is None:
        if smallest is not None:
            raise SettingError(
                "--smallest-defect needs image files, frozen features of patches and no size set by hand"
            )
        return recipe
    _warn_if_small(pictures, recipe.crop, listener)
    shapes = [picture[recipe.crop.window(picture)].shape[:2] for picture in pictures]
    sizes = candidates(shapes, STEPS if smallest is not None else ())
    if smallest is None and sizes[0][0] == sizes[0][1]:
        return recipe
    if len(pictures) < FEWEST:
        return _with_size(
            recipe, sizes[-1], shapes, scale, f"{len(pictures)} images are too few to try others", listener
        )
    trial = make_trial(pictures, recipe.crop, smallest and smallest * scale, seed=seed)
    tried = []
    for number, size in enumerate(sizes, 1):
        tried.append(found(trial, size, recipe, backbone, seed=seed))
        detail = ", ".join(
            f"{px / scale:.0f} px {100 * value:.0f}" for px, value in zip(trial.sizes, tried[-1], strict=True)
        )
        listener.detail(f"tried {size[1]} x {size[0]} px: AUROC on defects of {detail}")
        listener.progress("choosing the size", number, len(sizes))
    values = [each[0] if smallest is not None else sum(each) / len(each) for each in tried]
    best = next(number for number, value in enumerate(values) if value >= max(values) - MARGIN)
    seen = [px / scale for px, value in zip(trial.sizes, tried[best], strict=True) if value >= FOUND]
    expected = f"from {seen[0]:.0f} px on" if seen else f"only if larger than {trial.sizes[-1] / scale:.0f} px"
    return _with_size(recipe, sizes[best], shapes, scale, f"expect defects to be found {expected}", listener)


def _with_size(
    recipe: Recipe,
    size: tuple[int, int],
    shapes: Sequence[tuple[int, ...]],
    scale: float,
    remark: str,
    listener: Listener,
) -> Recipe:
    """The recipe with this size; tells the listener what was chosen."""
    height, width = (round(float(side) / scale) for side in np.median(shapes, axis=0))
    listener.say(f"working size {size[1]} x {size[0]} px of {width} x {height}; {remark}")
    return replace(recipe, size=size[0]) if size[0] == size[1] else replace(recipe, shape=size)


def candidates(shapes: Sequence[tuple[int, ...]], steps: Sequence[float] = ()) -> list[tuple[int, int]]:
    """Heights and widths to try, smallest first: squares where the images are nearly square, or not of one aspect.

    `steps` are their pixels, in those of the square; by default as many, and as many as make the shorter side equal.
    """
    sides = np.array([shape[:2] for shape in shapes], float)
    aspects = sides[:, 1] / sides[:, 0]
    aspect = float(np.median(aspects))
    off = np.maximum(aspects / aspect, aspect / aspects)
    longer = max(aspect, 1 / aspect)
    if (off <= ALIKE).mean() < AGREEING or longer <= SQUARE:
        longer = 1.0
    pixels, sizes = float(np.median(sides.prod(1))), list[tuple[int, int]]()
    for step in steps or (1.0, min(USUAL, longer)):
        short = max(LEAST, MULTIPLE * round(SIDE * (step / longer) ** 0.5 / MULTIPLE))
        long = MULTIPLE * round(short * longer / MULTIPLE)
        size = (short, long) if aspect > 1 else (long, short)
        if not sizes or (step * SIDE**2 <= ALIKE * pixels and size != sizes[-1]):
            sizes.append(size)
    return sizes


def make_trial(pictures: Sequence[Picture], crop: Crop, smallest: float | None, *, seed: int) -> Trial:
    """Draw defects on some of the pictures; neighbours in the order of the files are on one side, as of one part."""
    shown = [picture[crop.window(picture)] for picture in pictures]
    count = min(INSPECTED, len(shown) // 3)
    good, known, rule = shown[:count], shown[count:][:KNOWN], _rule(shown)
    short = float(np.median([min(picture.shape[:2]) for picture in shown]))
    sizes = tuple(smallest * times for times in GROWING) if smallest else tuple(short * part for part in DEFECTS)
    places, altered = [], []
    for number, picture in enumerate(good):
        rng = stream(seed, "smallest defect", number)
        places.append(_place(picture, rule, rng))
        altered.append([_with_defect(picture, places[-1], px, number, rng) for px in sizes])
    return Trial(known, good, places, sizes, altered)


def found(trial: Trial, size: tuple[int, int], recipe: Recipe, backbone: Backbone, *, seed: int) -> list[float]:
    """The AUROC of unadapted features on the defects of each size, with images encoded at `size`."""
    grid = recipe.grid
    extract = UnadaptedFeatures(backbone, recipe.pretrained, grid)
    known, good = (_features(extract, pictures, size) for pictures in (trial.known, trial.good))
    everywhere = torch.ones(len(known), *size, dtype=torch.bool)
    images = Conditioned(torch.empty(len(known), 1, *size, dtype=torch.uint8), everywhere, None)
    memory = Memory(standardise=True, sampling_ratio=min(1.0, KEPT / known[..., 0].numel()))
    scorer = PatchScorer.fit(replace(grid, min_foreground=0.0), {"backbone": known}, images, memory, seed=seed)

    def scores(features: Float[Tensor, "n r c d"]) -> Float[Tensor, " n"]:
        return scorer.scores(scorer.cells({"backbone": features}, everywhere[: len(features)]))

    of_good = scores(good)
    values = []
    for number, px in enumerate(trial.sizes):
        bad = good.clone()
        for features, place, pictures in zip(bad, trial.places, trial.altered, strict=True):
            _replace_around(features, pictures[number], place, px, size, extract)
        values.append(auroc(torch.cat([of_good, scores(bad)]), torch.arange(2 * len(good)) >= len(good)))
    return values


def _features(
    extract: UnadaptedFeatures, pictures: Sequence[Picture], size: tuple[int, int]
) -> Float[Tensor, "n r c d"]:
    images = torch.cat([resize(to_tensor(picture), size) for picture in pictures])
    return torch.cat([extract(chunk)["backbone"] for chunk in images.split(CHUNK)])


def _replace_around(
    features: Float[Tensor, "r c d"],
    picture: Picture,
    place: tuple[int, int],
    px: float,
    size: tuple[int, int],
    extract: UnadaptedFeatures,
) -> None:
    """Features of the cells at the defect, computed on a window of the picture with it."""
    cell, cut, inner = extract.grid.stride, [], []
    for at, side, length in zip(place, size, picture.shape, strict=False):
        scale = side / length
        reach = int(px * scale) // 2 + AROUND
        window = min(side, max(WINDOW, MULTIPLE * -(-2 * (reach + MULTIPLE) // MULTIPLE)))
        begin = max(0, min(side - window, int(at * scale) - window // 2)) // MULTIPLE * MULTIPLE
        first, last = max(0, int(at * scale) - reach) // cell, min(side, int(at * scale) + reach) // cell
        cut.append((slice(round(begin / scale), round((begin + window) / scale)), window))
        inner.append((slice(first, last), slice(first - begin // cell, last - begin // cell)))
    (rows, tall), (columns, wide) = cut
    window_features = extract(resize(to_tensor(picture[rows, columns]), (tall, wide)))["backbone"][0]
    features[inner[0][0], inner[1][0]] = window_features[inner[0][1], inner[1][1]]


def _place(picture: Picture, rule: Rule, rng: torch.Generator) -> tuple[int, int]:
    """A random pixel (y, x) in the middle of the object's box, where the object is most likely."""
    box, draw = object_box(picture, rule), torch.rand(2, generator=rng).tolist()
    return tuple(  # type: ignore[return-value]
        int((first + (0.1 + 0.8 * part) * (last - first)) * side)
        for (first, last), part, side in zip(box, draw, picture.shape, strict=False)
    )


def _with_defect(picture: Picture, place: tuple[int, int], px: float, number: int, rng: torch.Generator) -> Picture:
    """The picture with a pit, or a scratch of the same extent, at a place."""
    side = round(max(48, 4 * px))
    rows, columns = (
        slice(max(0, at - side // 2), min(length, at + side // 2))
        for at, length in zip(place, picture.shape, strict=False)
    )
    altered = picture.copy()
    longest = max(altered[rows, columns].shape[:2])
    half, thin = px / 2 / longest, max(1.0, px / 4) / longest
    pit = Spots(size=(half, half), long=(1.0, 1.5), change=CHANGE)
    scratch = Scratches(width=(thin, thin), length=(1.5 * px / longest,) * 2, change=CHANGE)
    made = (scratch if number % 2 else pit)(to_tensor(altered[rows, columns]), rng=rng).images[0]
    altered[rows, columns] = made.permute(1, 2, 0).numpy()
    return altered


def _warn_if_small(pictures: Sequence[Picture], crop: Crop, listener: Listener) -> None:
    rule = _rule(pictures) if crop.whole else Rule()
    if rule.method == "ones":
        return
    boxes = [object_box(picture, rule) for picture in pictures]
    share = float(np.median([(bottom - top) * (right - left) for (top, bottom), (left, right) in boxes]))
    if share < SMALL:
        text = f"the object is small in the image (its box is {100 * share:.0f} % of it)"
        listener.warn(f"{text}: --crop auto would show it in more pixels")


def _rule(pictures: Sequence[Picture]) -> Rule:
    """How the object is found in pictures, by copies of one size."""
    return automatic(torch.cat([resize(to_tensor(picture), SIDE) for picture in pictures]))


def _sample(sources: Sequence[Source], depth: Depth | None) -> tuple[list[Picture], float]:
    """Evenly spaced pictures of those that can be read, large ones reduced; and the scale of that."""
    pictures, scales = list[Picture](), list[float]()
    for source in sources[:: max(1, -(-len(sources) // LOOKED_AT))]:
        try:
            picture = decode(source, depth or FULL_DEPTH)
        except ImageError:
            continue  # reported when it is read
        height, width = picture.shape[:2]
        scales.append(min(1.0, (LARGEST / (height * width)) ** 0.5))
        if scales[-1] < 1:
            reduced = (max(1, round(width * scales[-1])), max(1, round(height * scales[-1])))
            picture = np.asarray(cv2.resize(picture, reduced, interpolation=cv2.INTER_AREA), np.uint8)
        pictures.append(picture)
    return pictures, float(np.median(scales)) if scales else 1.0
