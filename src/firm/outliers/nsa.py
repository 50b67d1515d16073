"""NSA, natural synthetic anomalies: pieces of other good images, blended in without a seam (section 3.4 (b)).

A patch is cut from another good image, resized and put where the object is; the Poisson equation is then solved
inside it, so that its gradients are the patch's and its rim is the inlier's. nsa_presets.json has the values that its
authors chose for each product of MVTec-AD and, as "uniform", those of the FIRM authors' code; the defaults here are for
any other product.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int16, UInt8
from torch import Generator, Tensor

from firm.images.colour import Jitter, jittered
from firm.outliers.drawing import Copy, Mask, Pixels, altered, check, each_image
from firm.types import Outliers, Scene

GAMMA = (0.03, 2.0, 0.05)  # offset, shape and scale of the half-sides, as parts of the image's side
PLACES = 200  # positions tried for a patch
MIN_PIXELS = 50  # of a patch inside its rim
TRIES = 10  # outliers drawn before a simpler change is made
VISIBLE_LEVELS = 5.0  # of grey, mean over the channels, and ...
VISIBLE_PIXELS = 16  # ... on so many pixels: less is not an outlier
SMALLEST = 5  # side of a pasted rectangle: enough for VISIBLE_PIXELS

Rgb = UInt8[np.ndarray, "h w 3"]
Patch = UInt8[np.ndarray, "a b 3"]
Value = TypeVar("Value", bound=np.generic)
Shape = tuple[int, int]  # height and width
Range = tuple[float, float]


class Part(NamedTuple):
    """A good image, and where its object is (None: everywhere)."""

    pixels: Rgb
    mask: Mask | None

    @property
    def shape(self) -> Shape:
        height, width, _ = self.pixels.shape
        return height, width


class Box(NamedTuple):
    """An upright rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, image: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """A view of the image's pixels in it."""
        return image[self.top : self.top + self.height, self.left : self.left + self.width]


@dataclass(frozen=True, kw_only=True)
class Nsa:
    """Pieces of another good image blended into each inlier, where the object is if that is known.

    `blend` auto is normal where the object is known and mixed where it fills the image, as a texture does: a patch
    of a texture has the gradients of its surroundings, and blended normally it leaves nothing to find.
    """

    blend: str = "auto"
    sizes: str = "gamma"  # or uniform between the bounds
    half_height: Range = (0.03, 0.4)  # of the image; after resizing the bounds of the whole height, as published
    half_width: Range = (0.03, 0.4)
    patches: int = 3  # at most: one for certain, each further one with equal chance
    background: Range = (0.0, 0.0)  # its brightness and the object's distance from it; 0: the scene gives the object
    min_object: float = 0.5  # of the patch; 0: the object is everywhere
    min_overlap: float = 0.25  # of the object in the patch, with the object under it
    resize: Range = (0.7, 1.3)
    other: float = 1.0  # chance that a patch comes from another image; else from the inlier itself
    jitter: float = 0.0  # colours of patches from other images
    per_inlier: int = 1

    kinds = 1

    def __post_init__(self) -> None:
        half, fraction = "it must rise within 0..0.5 of the side", "it must lie in 0..1, below 1"
        check(
            self,
            ("blend", self.blend in ("auto", "normal", "mixed"), "use auto, normal or mixed"),
            ("sizes", self.sizes in ("gamma", "uniform"), "use gamma or uniform"),
            ("half_height", 0 < self.half_height[0] <= self.half_height[1] < 0.5, half),
            ("half_width", 0 < self.half_width[0] <= self.half_width[1] < 0.5, half),
            ("resize", 0 < self.resize[0] <= self.resize[1], "it must rise and start above 0"),
            ("background", all(0 <= level <= 255 for level in self.background), "give levels in 0..255"),
            ("min_object", 0 <= self.min_object < 1, fraction),
            ("min_overlap", 0 <= self.min_overlap < 1, fraction),
            ("other", 0 <= self.other <= 1, "a chance lies in 0..1"),
            ("jitter", 0 <= self.jitter <= 0.5, "it must lie in 0..0.5"),
            ("patches", self.patches >= 1, "use 1 or more"),
        )

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        donors = scene.donors if scene else inliers
        objects = scene.donor_foreground if scene else None

        def alter(image: Pixels, foreground: Mask | None, draw: np.random.Generator) -> Pixels:
            target = self._part(image, foreground)
            made = self._outlier(target, self._sources(image, target, donors, objects, draw), draw)
            return np.stack(cv2.split(made)[: len(image)]).astype(np.uint8, copy=False)

        return altered(inliers, [alter(*image) for image in each_image(inliers, scene, rng=rng)])

    def _part(self, image: Pixels, foreground: Mask | None) -> Part:
        pixels = np.asarray(cv2.merge(list(np.broadcast_to(image, (3, *image.shape[1:])))))
        mask = object_mask(pixels, *self.background) if self.min_object and self.background[1] else foreground
        # an object that fills the image, or was not found at all, says nothing about places
        tells = bool(self.min_object) and mask is not None and mask.any() and not mask.all()
        return Part(pixels, mask if tells else None)

    def _sources(
        self, image: Pixels, target: Part, donors: Tensor, objects: Tensor | None, rng: np.random.Generator
    ) -> Iterator[Part]:
        """Endlessly another good image, or with the chance left by `other` the inlier itself."""
        while True:
            if not len(donors) or rng.random() >= self.other:
                yield target
                continue
            index = int(rng.integers(len(donors)))
            if np.array_equal(donors[index].cpu().numpy(), image):  # the inlier itself: take the next, if there is one
                index = (index + 1) % len(donors)
            yield self._part(donors[index].cpu().numpy(), None if objects is None else objects[index].cpu().numpy())

    def _outlier(self, target: Part, sources: Iterator[Part], rng: np.random.Generator) -> Rgb:
        """A blended image; a pasted one if the blend is invisible; on a blank inlier an inverted rectangle."""
        (_, height), (_, width) = bounds(self, target.shape)
        blendable = (height - 2) * (width - 2) >= MIN_PIXELS  # in a small image the largest patch may be too small
        for change in (self._blended, self._pasted) if blendable else (self._pasted,):
            for source in islice(sources, TRIES):
                image = change(target, source, rng)
                if is_visible(image, target.pixels):
                    return image
        image = target.pixels.copy()
        self._rectangle(target, rng).of(image)[:] ^= 128  # half the range away: a negative keeps middle grey
        return image

    def _blended(self, target: Part, source: Part, rng: np.random.Generator) -> Rgb:
        """Steps 1 and 6: one patch after another onto the running image."""
        image = target.pixels.copy()
        mixed = self.blend == "mixed" or (self.blend == "auto" and target.mask is None)
        for _ in range(patch_count(self.patches, rng)):
            boxes = draw_patch(self, source.mask, target.mask, target.shape, rng)
            if boxes is None:
                continue
            cut, place = boxes
            patch = cv2.resize(cut.of(source.pixels), (place.width, place.height))
            if self.jitter and source is not target:
                patch = _jittered(patch, self.jitter, rng)
            clone(image, patch, place, mixed=mixed)
        return image

    def _pasted(self, target: Part, source: Part, rng: np.random.Generator) -> Rgb:
        """A rectangle of the source, unchanged, from object to object."""
        image = target.pixels.copy()
        place = self._rectangle(target, rng)
        cut = _around(_random_pixel(source, rng), (place.height, place.width), source.shape)
        place.of(image)[:] = cut.of(source.pixels)
        return image

    def _rectangle(self, part: Part, rng: np.random.Generator) -> Box:
        height, width = half_sizes(self, part.shape, rng)
        size = max(SMALLEST, 2 * height), max(SMALLEST, 2 * width)
        return _around(_random_pixel(part, rng), size, part.shape)


def _preset(published: dict[str, Any]) -> Nsa:
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in published.items()}
    return Nsa(**settings)


_PUBLISHED = json.loads(files("firm.outliers").joinpath("nsa_presets.json").read_text(encoding="utf-8"))
PRESETS: dict[str, Nsa] = {product: _preset(settings) for product, settings in _PUBLISHED.items()}


def object_mask(pixels: Rgb, brightness: float, distance: float) -> Mask:
    """Step 0: where the mean of the channels is far from the background's brightness, after a 7 x 7 median."""
    far = (np.abs(_total(pixels) - 3 * brightness) > 3 * distance).astype(np.uint8)
    side = int(7 * min(*far.shape, 256) / 256) | 1  # a small image shows the part smaller
    # the median of zeros and ones is their majority, and a sum is found much faster
    count = cv2.boxFilter(far, cv2.CV_16U, (side, side), normalize=False, borderType=cv2.BORDER_REPLICATE)
    return count > side * side // 2


def patch_count(most: int, rng: np.random.Generator) -> int:
    """Step 1: one for certain, each further one with equal chance."""
    return 1 + int(rng.binomial(most - 1, 0.5))


def draw_patch(
    nsa: Nsa, source: Mask | None, target: Mask | None, shape: Shape, rng: np.random.Generator
) -> tuple[Box, Box] | None:
    """Steps 2 to 5: what is cut from the source, and where it lands; None: no place was found for it."""
    cut = cut_box(nsa, source, shape, rng)
    if cut is None:
        return None
    size = resized(nsa, cut, shape, rng)
    place = place_box(nsa, size, None if source is None else cut.of(source), target, shape, rng)
    return None if place is None else (cut, place)


def cut_box(nsa: Nsa, mask: Mask | None, shape: Shape, rng: np.random.Generator) -> Box | None:
    """Steps 2 and 3: a rectangle about a centre anywhere in the image, clipped to it, with enough of the object."""
    starts, ends = [], []
    for side, half, (low, _) in zip(shape, half_sizes(nsa, shape, rng), bounds(nsa, shape), strict=True):
        centre = rng.integers(low, max(low + 1, side - low), PLACES)
        starts.append(np.maximum(centre - half, 0))
        ends.append(np.minimum(centre + half, side))
    (top, left), (bottom, right) = starts, ends
    first = 0
    if mask is not None:
        table = cv2.integral(mask.astype(np.uint8))  # one row and column larger: sums of all above and to the left
        inside = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
        enough = inside / ((bottom - top) * (right - left)) > nsa.min_object
        if not enough.any():
            return None
        first = int(enough.argmax())
    return Box(*(int(edge[first]) for edge in (top, left, bottom - top, right - left)))


def place_box(
    nsa: Nsa, size: Shape, seen: Mask | None, mask: Mask | None, shape: Shape, rng: np.random.Generator
) -> Box | None:
    """Step 5: where the whole patch fits, and enough of the object in the cut meets that of the image."""
    tops, lefts = (rng.integers(side - extent + 1, size=PLACES) for side, extent in zip(shape, size, strict=True))
    if seen is None and mask is None:
        return Box(int(tops[0]), int(lefts[0]), *size)
    cut = np.ones(size, np.uint8) if seen is None else seen.astype(np.uint8)
    patch = cv2.resize(cut, size[::-1], interpolation=cv2.INTER_NEAREST) > 0
    if patch.mean() <= nsa.min_object:
        return None
    whole = np.count_nonzero(patch)
    for top, left in zip(tops.tolist(), lefts.tolist(), strict=True):
        place = Box(top, left, *size)
        if np.count_nonzero(patch if mask is None else patch & place.of(mask)) / whole > nsa.min_overlap:
            return place
    return None


def half_sizes(nsa: Nsa, shape: Shape, rng: np.random.Generator) -> Shape:
    """Step 2: half the height and half the width of a patch in pixels."""
    (rows, columns), (offset, form, scale) = bounds(nsa, shape), GAMMA
    if nsa.sizes == "uniform":
        return int(rng.integers(*rows, endpoint=True)), int(rng.integers(*columns, endpoint=True))
    tall, wide = ((offset + rng.gamma(form, scale)) * side for side in shape)
    return int(np.clip(tall, *rows)), int(np.clip(wide, *columns))


def bounds(nsa: Nsa, shape: Shape) -> tuple[Shape, Shape]:
    """The bounds of height and width in pixels."""
    sides = zip(shape, (nsa.half_height, nsa.half_width), strict=True)
    (low, high), (narrow, wide) = ([max(1, round(part * side)) for part in half] for side, half in sides)
    return (low, high), (narrow, wide)


def resized(nsa: Nsa, cut: Box, shape: Shape, rng: np.random.Generator) -> Shape:
    """Step 4: the size at which a patch lands, its aspect kept as far as the bounds allow."""
    high, wide = bounds(nsa, shape)  # published so: the bounds of the half-sizes hold the whole height and width here
    scale = np.clip(rng.normal(1, 0.5), *nsa.resize)
    height = np.clip(scale * cut.height, *high)
    width = np.clip(height / cut.height * cut.width, *wide)
    height = np.clip(width / cut.width * cut.height, *high)
    return int(height), int(width)


def clone(image: Rgb, patch: Patch, place: Box, *, mixed: bool) -> None:
    """Step 6: blend the patch, less its rim, in place; one too small, or that OpenCV refuses, changes nothing."""
    if (place.height - 2) * (place.width - 2) < MIN_PIXELS:
        return
    mask = np.zeros((place.height, place.width), np.uint8)  # a new one each time: OpenCV writes into it
    mask[1:-1, 1:-1] = 255
    centre = (place.width // 2, place.height // 2)  # of the mask's bounding box, which OpenCV centres there
    under = np.ascontiguousarray(place.of(image))  # the rest of the image has no part in the solution
    try:
        flag = cv2.MIXED_CLONE if mixed else cv2.NORMAL_CLONE
        place.of(image)[:] = cv2.seamlessClone(patch, under, mask, centre, flag)
    except cv2.error:
        return


def is_visible(image: Rgb, before: Rgb) -> bool:
    """Whether enough pixels changed by more than rounding and noise."""
    change = _total(cv2.absdiff(image, before))
    return bool(np.count_nonzero(change > 3 * VISIBLE_LEVELS) >= VISIBLE_PIXELS)


def _total(pixels: Rgb) -> Int16[np.ndarray, "h w"]:
    """The sum of the channels."""
    return pixels[..., 0].astype(np.int16) + pixels[..., 1] + pixels[..., 2]


def _random_pixel(part: Part, rng: np.random.Generator) -> Shape:
    """A pixel of the object."""
    if part.mask is None:
        return int(rng.integers(part.shape[0])), int(rng.integers(part.shape[1]))
    rows, columns = part.mask.nonzero()
    index = rng.integers(len(rows))
    return int(rows[index]), int(columns[index])


def _around(centre: Shape, size: Shape, shape: Shape) -> Box:
    """The rectangle about a pixel, moved into the image where it would leave it."""
    height, width = (min(extent, side) for extent, side in zip(size, shape, strict=True))
    top = min(max(0, centre[0] - height // 2), shape[0] - height)
    left = min(max(0, centre[1] - width // 2), shape[1] - width)
    return Box(top, left, height, width)


def _jittered(patch: Rgb, strength: float, rng: np.random.Generator) -> Rgb:
    """As if the whole source were jittered: they differ by a constant, and blending keeps gradients only."""
    levels = Jitter(brightness=strength, contrast=strength, saturation=strength, hue=strength)
    generator = Generator().manual_seed(int(rng.integers(2**62)))
    pixels = torch.from_numpy(patch).permute(2, 0, 1)[None].float() / 255
    changed = jittered(pixels, levels, rng=generator)[0].permute(1, 2, 0)
    return (changed * 255).round().to(torch.uint8).contiguous().numpy()
