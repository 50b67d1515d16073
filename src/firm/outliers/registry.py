"""The outlier sources by name, their mixture, and how outliers are made: good images in, synthetic outliers out."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Generator, Tensor

from firm.images.alignment import unmoved
from firm.images.foreground import Rule
from firm.outliers.cutpaste import CutPaste as CutPaste
from firm.outliers.drawing import Copy, check
from firm.outliers.marks import Scratches as Scratches
from firm.outliers.marks import Spots as Spots
from firm.outliers.nsa import PRESETS as NSA_PRESETS
from firm.outliers.nsa import Nsa as Nsa
from firm.outliers.perlin_blend import PerlinBlend as PerlinBlend
from firm.outliers.sia import Sia as Sia
from firm.outliers.whole_images import CutPerm as CutPerm
from firm.outliers.whole_images import Exposure as Exposure
from firm.outliers.whole_images import Rotations as Rotations
from firm.outliers.whole_images import RotationsAndExposure as RotationsAndExposure
from firm.runtime.random import stream
from firm.types import Outliers, OutlierSource, Scene

Images = UInt8[Tensor, "n c h w"]
Masks = Bool[Tensor, "n h w"]

VISIBLE = 5  # grey levels from which a change can be seen
MIN_PIXELS = 16  # of a defect that must stay visible beside ignored pixels
TRIES = 10
SHIFT = 48  # grey levels of the last resort

LOCAL: dict[str, OutlierSource] = {  # each alters a part of the image
    "cutpaste": CutPaste(variant="plain"),
    "cutpaste-scar": CutPaste(variant="scar"),
    "cutpaste-union": CutPaste(variant="union"),
    "perlin-blend": PerlinBlend(),
    "scratches": Scratches(),
    "spots": Spots(),
    "pits": Spots(size=(0.008, 0.03), long=(1.0, 2.0), change=(25.0, 110.0)),  # 2 to 8 px of 256: pores, dust
    "nsa": Nsa(),
    **{f"nsa-{preset}": source for preset, source in NSA_PRESETS.items()},
}

# one of each sort: for the self-check, and for training adaptors, which forget kinds of defects they are not shown
KINDS = ("perlin-blend", "nsa", "cutpaste-union", "scratches", "spots", "pits")

# old names: records hold them, and random streams keep them so that a seed draws the same outliers as before
OLD_NAMES = {"perlin-blend": "donor", "scratches": "strokes", "spots": "shades", "mixture": "mixed"}


def stream_name(source: str) -> str:
    """The name of a source in random streams."""
    return OLD_NAMES.get(source, source)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several local sources in one training: they have fewer artefacts in common than one.

    They take turns at the outliers of an inlier, and their kinds are numbered one source after another. With fewer
    outliers per inlier than sources, the source of each is drawn at random. Every source has a random stream of its own
    name, so that no source changes another's outliers.
    """

    sources: tuple[str, ...] = ("perlin-blend", "nsa", "cutpaste-union")
    per_inlier: int = 3  # where it exceeds the number of sources, the first of them are used more often

    def __post_init__(self) -> None:
        each_once = 0 < len(self.sources) == len(set(self.sources) & set(LOCAL))
        check(self, ("sources", each_once, f"give each once, some of {', '.join(LOCAL)}"))

    @property
    def kinds(self) -> int:
        return sum(LOCAL[name].kinds for name in self.sources)

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        seed = int(torch.randint(2**62, (1,), generator=rng))  # before the copies, which the caller may have drawn
        number = copy
        if number is None or self.per_inlier < len(self.sources):
            number = torch.randint(max(self.per_inlier, len(self.sources)), (len(inliers),), generator=rng)
        if scene is None:
            everywhere = torch.ones_like(inliers[:, 0], dtype=torch.bool)
            scene = Scene(everywhere, inliers, everywhere)  # all inliers are donors, not only those of one source
        images, group = inliers.clone(), torch.ones(len(inliers), dtype=torch.long)
        kinds = 0
        for turn, name in enumerate(self.sources):
            at = (number % len(self.sources) == turn).nonzero().squeeze(1)
            if len(at):
                # without `copy`, a source draws among all its variants
                made = LOCAL[name](inliers[at], rng=stream(seed, stream_name(name)), scene=scene[at])
                images[at], group[at] = made.images, kinds + made.group
            kinds += LOCAL[name].kinds
        return Outliers(images, group, (images != inliers).any(1))


OUTLIERS: dict[str, OutlierSource] = {
    "rotations": Rotations(),
    "exposure": Exposure(),
    "exposure-rotated": Exposure(rotate=True),
    "rotations-exposure": RotationsAndExposure(),
    "cutperm": CutPerm(),
    **LOCAL,
    "sia": Sia(),
    "mixture": Mixture(),
}


def make_outliers(
    source: OutlierSource, inliers: Images, *, rng: Generator, copy: Copy = None, scene: Scene | None = None
) -> Outliers:
    """The source's outliers with hidden pixels restored, so that no defect is learnt where nothing is inspected.

    Those of which too little is left are drawn again. Sources that alter whole images are left as they are.
    """
    made = source(inliers, rng=rng, copy=copy, scene=scene)
    if scene is None or scene.hidden is None or made.where is None:
        return made
    images, where, visible = _restored(made.images, inliers, scene.hidden)
    group, enough = made.group.clone(), ~(made.where & scene.hidden).flatten(1).any(1) | (visible >= MIN_PIXELS)
    for _ in range(TRIES):
        again = (~enough).nonzero().squeeze(1)
        if not len(again):
            break
        made = source(inliers[again], rng=rng, copy=None if copy is None else copy[again], scene=scene[again])
        fresh = _restored(made.images, inliers[again], scene.hidden[again])
        better = fresh[2] > visible[again]
        at = again[better]
        images[at], where[at], visible[at] = (values[better] for values in fresh)
        group[at], enough[at] = made.group[better], visible[at] >= MIN_PIXELS
    for number in (visible == 0).nonzero().squeeze(1).tolist():  # nothing else worked: another brightness
        inlier, seen = inliers[number], ~scene.hidden[number]
        places = (scene.foreground[number] & seen, seen)  # the visible object, else all that is visible, else all
        where[number] = next((place for place in places if bool(place.any())), torch.ones_like(seen))
        shifted = torch.where(inlier < 128, inlier + SHIFT, inlier - SHIFT)
        images[number] = torch.where(where[number], shifted, inlier)
    return Outliers(images, group, where)


def _restored(images: Images, inliers: Images, hidden: Masks) -> tuple[Images, Masks, Int[Tensor, " n"]]:
    """The images with hidden pixels of the inliers, where they still differ, and on how many pixels visibly."""
    restored = torch.where(hidden[:, None], inliers, images)
    change = (restored.int() - inliers.int()).abs().amax(1)
    return restored, change > 0, (change >= VISIBLE).flatten(1).sum(1)


def scene_of(
    good: UInt8[Tensor, "n c h w"],
    others: UInt8[Tensor, "m c h w"],
    ignored: Bool[Tensor, "a b"] | None,
    *,
    rule: Rule,
    masks: tuple[Bool[Tensor, "n h w"] | None, Bool[Tensor, "m h w"] | None] = (None, None),
) -> Scene:
    """Where defects may be placed on unaligned images: on the objects, except ignored pixels."""
    here, there = (unmoved(images, rule, ignored, of) for images, of in zip((good, others), masks, strict=True))
    return Scene(here.foreground, others, there.foreground, here.hidden())
