"""Drift of a batch against the calibration's good images, by score and by brightness.

A rank test: for any score distribution, a batch of good images with up to a fifth of higher-scoring defects is reported
at most at the stated rate. More defects look like drift.
"""

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.decision.calibration import plural
from firm.errors import DataError, SettingError

DEFECTS = 5  # one in so many images may be defective without drift
EDGE = 10  # one in so many reference scores at either end is not used, because few images decide there
PLACES = 99  # maximum number of reference scores to compare with, evenly spaced
ALIEN = 0.9  # fraction of the batch above every good image that indicates another product
FEW = 5  # images needed to report that
SLIGHT = 0.05  # relative change of brightness that is tolerated; a guess
STRICTER = 20  # times, for estimated references: their scores come from other models than those of the batch
SPREADS = 6  # interquartile ranges above the reference's median: other products were at 21 to 102, defects alone at 2

New = Float[Tensor, " m"]  # scores of the batch
Old = Float[Tensor, " n"]  # scores of the reference
Parts = Int[Tensor, " n"] | None


@dataclass(frozen=True)
class Drift:
    """Drift of the scores; `p_value` bounds the chance of it for good images like the reference."""

    moved: bool
    foreign: bool  # probably another product; implies moved
    p_value: float
    level: float  # false-alarm rate: moved if p_value <= level
    images: int
    reference: int  # good images it was compared with, one of each part
    direction: str  # "higher", "lower", or "" without drift
    enough: bool  # False: too few images for any drift to be reported
    above: int  # images of the batch that score above every good image
    estimated: bool = False  # the reference is scored out of fold

    @property
    def sentence(self) -> str:
        """The message to the user; empty without one."""
        if not self.enough:
            good = plural(self.reference, "good image")
            needed = images_needed(self.reference, _strict(self.level, estimated=self.estimated))
            return f"{plural(self.images, 'image')} cannot show drift against {good} of the calibration; give {needed}"
        if self.foreign:
            return (
                f"these images do not look like the product of this detector: {self.above} of {self.images} "
                "score above every good image of the calibration (so would a batch of defects alone)"
            )
        if not self.moved:
            return ""
        cause = f"or more than one in {DEFECTS} is defective" if self.direction == "higher" else "and defects may pass"
        chance = _chance(self.p_value, self.level, "about" if self.estimated else "at most")
        return (
            f"the batch has drifted: its images score {self.direction} than the good ones of the calibration; light, "
            f"camera or material have changed, {cause} ({chance})"
        )


@dataclass(frozen=True)
class LightDrift:
    """Drift of the brightness: the guarantees hold for the illumination of the calibration only."""

    moved: bool
    p_value: float  # bounds the chance of it for good images like the reference
    level: float  # false-alarm rate
    images: int
    reference: int  # good images it was compared with, one of each part
    direction: str  # "brighter", "darker", or "" without drift
    change: float  # relative change of the median

    @property
    def sentence(self) -> str:
        """The message to the user; empty without one."""
        if not self.moved:
            return ""
        return (
            f"the light has drifted: the images are {100 * abs(self.change):.0f} % {self.direction} than the good ones "
            f"of the calibration ({_chance(self.p_value, self.level)}), whose rates hold for its own light; "
            "restore the light, or run firm calibrate on good images taken in this one"
        )


def drift(
    batch: New, reference: Old, *, parts: Parts = None, images: int = 0, level: float = 0.01, estimated: bool = False
) -> Drift:
    """Compare the scores of a batch, one per part (`one_of_each`), with those of held-out good images of `parts`.

    `images` counts all images of the batch, of which a fifth may be defects of different parts. `estimated`: the
    reference is scored out of fold. No theorem covers that, so a chance must be lower still, and the median of the
    batch outside the middle half of the reference.
    """
    new, good, alone = _compared(batch, reference, parts, level)
    kept = new.sort().values[: max(0, len(new) - _allowed(max(images, len(new))))]  # the rest may be defects
    higher, lower = _chance_of_higher(kept, alone), _chance_of_higher(-new, -alone)
    p_value = min(1.0, 2 * min(higher, lower))
    strict = _strict(level, estimated=estimated)
    enough = 2 * _least_chance(len(kept), len(alone)) <= strict
    low, middle, high = good.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    clear = not estimated or (float(kept.median()) > high if higher < lower else float(new.median()) < low)
    moved = enough and p_value <= strict and clear
    direction = ("higher" if higher < lower else "lower") if moved else ""
    above = int((new > good.max()).sum())
    far = float(new.median()) > middle + SPREADS * (high - low)
    foreign = direction == "higher" and len(new) >= FEW and above >= ALIEN * len(new) and far
    return Drift(moved, foreign, p_value, level, len(new), len(alone), direction, enough, above, estimated)


def light_drift(batch: New, reference: Old, *, parts: Parts = None, images: int = 0, level: float = 0.01) -> LightDrift:
    """The same for brightness, ignoring changes below `SLIGHT`. Defects may be brighter or darker."""
    new, _, alone = _compared(batch, reference, parts, level)
    allowed = min(len(new), _allowed(max(images, len(new))))
    ordered = new.sort().values
    brighter = _chance_of_higher(ordered[: len(new) - allowed], alone)
    darker = _chance_of_higher(-ordered[allowed:], -alone)
    p_value = min(1.0, 2 * min(brighter, darker))
    usual = float(alone.median())
    change = float(ordered.median()) / usual - 1 if usual > 0 else 0.0
    moved = p_value <= level and abs(change) >= SLIGHT and (change > 0) == (brighter < darker)
    direction = ("brighter" if change > 0 else "darker") if moved else ""
    return LightDrift(moved, p_value, level, len(new), len(alone), direction, change)


def one_of_each(scores: Float[Tensor, " n"], parts: Int[Tensor, " n"]) -> Float[Tensor, " k"]:
    """One score per part: the first of the first part, the second of the second, ... A mean would vary less."""
    numbers = parts.unique(return_inverse=True)[1]
    sizes = numbers.bincount()
    turn = torch.arange(len(sizes), device=sizes.device) % sizes
    return scores[numbers.argsort(stable=True)[sizes.cumsum(0) - sizes + turn]]


def images_needed(reference: int, level: float) -> int:
    """The smallest batch for which drift can be reported with this many reference images."""

    def enough(kept: int) -> bool:
        return 2 * _least_chance(kept, reference) <= level

    most = next(2**power for power in itertools.count() if enough(2**power))
    kept = bisect_left(range(most), True, key=enough)
    return kept - (-kept // (DEFECTS - 1))  # kept images plus possible defects


def surprise(batch: Float[Tensor, "b g"], reference: Float[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """The minimum over reference scores of the hypergeometric tail probability of the count above, per row."""
    g, n = batch.shape[1], reference.shape[1]
    places = _places(n)
    against = reference.sort(dim=1).values[:, places].contiguous()
    # ties count as not above, so they only lower the false-alarm rate
    above = g - torch.searchsorted(batch.sort(dim=1).values, against, right=True)
    return _tails(places, n, g).expand(len(batch), -1, -1).gather(2, above[:, :, None]).amin((1, 2))


def chance_of(surprises: Float[Tensor, " b"], g: int, n: int) -> Float[Tensor, " b"]:
    """The chance of such a minimum for g images and n of the reference, if all are exchangeable."""
    places = _places(n)
    tails = _tails(places, n, g)
    alike = (surprises * (1 + 1e-9)).expand(len(places), -1).contiguous()  # equal up to rounding
    bounds = torch.full((len(surprises), n), g + 1)
    bounds[:, places] = g + 1 - torch.searchsorted(tails.flip(1), alike, right=True).T
    # clamped to the exact bounds, because the difference loses digits
    return (1 - _never_reached(bounds, g)).clamp(surprises, (len(places) * surprises).clamp(max=1)).clamp(max=1)


def _compared(batch: New, reference: Old, parts: Parts, level: float) -> tuple[New, Old, Float[Tensor, " k"]]:
    """The validated batch, the reference, and one score per part of the reference."""
    for name, scores in (("batch", batch), ("calibration", reference)):
        if not len(scores):
            raise DataError(f"the {name} holds no scores; drift needs at least one image of each")
        if not bool(scores.isfinite().all()):
            raise SettingError(f"a score of the {name} is not finite; the training diverged, lower training.lr")
    if not 0 < level < 1:
        raise SettingError(f"level is {level}; it must lie between 0 and 1")
    new, good = (scores.detach().cpu().double() for scores in (batch, reference))
    return new, good, good if parts is None else one_of_each(good, parts)


def _strict(level: float, *, estimated: bool) -> float:
    return level / STRICTER if estimated else level


def _chance(p_value: float, level: float, about: str = "at most") -> str:
    chance = "below 0.000001" if p_value < 1e-6 else f"= {p_value:.2g}"
    return f"p {chance}; a false alarm in {about} {100 * level:.2g} % of batches"


def _chance_of_higher(new: Float[Tensor, " g"], good: Float[Tensor, " n"]) -> float:
    return float(chance_of(surprise(new[None], good[None]), len(new), len(good))) if len(new) else 1.0


def _allowed(images: int) -> int:
    """How many images of a batch may be defects: a fifth, rounded up."""
    return -(-images // DEFECTS)


def _places(n: int) -> Int[Tensor, " p"]:
    """Indices of the sorted reference scores to compare with, symmetric."""
    first, last = n // EDGE, n - 1 - n // EDGE
    return torch.linspace(first, last, min(PLACES, last - first + 1), dtype=torch.float64).round().long()


def _least_chance(g: int, n: int) -> float:
    """The smallest possible chance: all g images are above the highest compared score."""
    over = n - 1 - int(_places(n)[-1])
    return math.exp(sum(math.log(i) - math.log(g + i) for i in range(over + 1, n + 1)))


def _tails(places: Int[Tensor, " p"], n: int, g: int) -> Float[Tensor, "p a"]:
    """The chance that at least a = 0..g of g images are above each place among n."""
    log = torch.arange(1, n + g + 2, dtype=torch.float64).lgamma()  # of factorials
    above, place = torch.arange(g + 1), places[:, None]
    over = log[above + n - 1 - place] - log[above] - log[n - 1 - place]
    under = log[g - above + place] - log[g - above] - log[place]
    orders = over + under - (log[n + g] - log[n] - log[g])
    return orders.exp().flip(1).cumsum(1).flip(1)


def _never_reached(bounds: Int[Tensor, "b n"], g: int) -> Float[Tensor, " b"]:
    """The fraction of orders of g images and n of the reference in which every count above stays below its bound."""
    rows, n = bounds.shape
    held = torch.arange(g + 1)
    orders = torch.full((rows, g + 1), -math.inf, dtype=torch.float64)
    orders[:, 0] = 0
    for place in reversed(range(n)):
        orders = orders.logcumsumexp(1).masked_fill(held >= bounds[:, place, None], -math.inf)
    return (orders.logsumexp(1) - (math.lgamma(n + g + 1) - math.lgamma(g + 1) - math.lgamma(n + 1))).exp()
