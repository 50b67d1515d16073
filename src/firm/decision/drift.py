"""Whether a batch of new images is still like the good images of the calibration, as a whole: by score and by light.

A threshold promises its rate of false calls only while good images look as they did. Here the scores of a batch are
ranked among those of the calibration. Whatever the scores' distribution, a batch of good images like those, of which
up to a fifth are replaced by defects that score higher, is called moved at most at the stated rate. More defects than
that look like drift: no score tells a batch of worn parts from a worn lamp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.images import resize
from firm.types import FirmError

DEFECTS = 5  # one in so many images may be defective without the batch having moved, however high it scores
EDGE = 10  # of the reference, one in so many at either end is not compared with: there a few images decide
PLACES = 99  # scores of the reference, evenly spread, that are compared with at most
ALIEN = 0.9  # of the batch above every good image: it is of something else
FEW = 5  # images below which that is not said
SLIGHT = 0.05  # of the brightness: less is no change of light; a guess of what scores hardly mind
LIT, LOOKED = 64, 64  # side at which images are looked at for their light, and how many of them at once
# interquartile ranges by which the middle of something else lies above the reference's: beside a detector of drawn
# plates, other products and blank images lay 21 to 102 above, and nothing but defective plates 2
SPREADS = 6


@dataclass(frozen=True)
class Drift:
    """What a batch's scores say; `p_value` bounds how often good images like the reference would look so moved."""

    moved: bool
    foreign: bool  # so far above the reference that it is hardly the same product; then it has moved, too
    p_value: float
    level: float  # the rate of false alarms: moved if p_value is not above it
    images: int
    reference: int  # good images it was compared with, one of each part
    direction: str  # "higher", "lower", or "" if nothing moved
    enough: bool  # False: so few images that nothing could be called moved
    above: int  # images of the batch that score above every good image

    @property
    def sentence(self) -> str:
        """For a person; empty where there is nothing to say."""
        if not self.enough:
            return (
                f"{_counted(self.images, 'image')} cannot tell whether light, camera or material have changed; beside "
                f"{_counted(self.reference, 'good image')} of the calibration it takes "
                f"{images_needed(self.reference, self.level)}"
            )
        if self.foreign:
            return (
                f"these images do not look like the product this detector has learnt: {self.above} of {self.images} "
                "score above every good image of the calibration (so would a batch of nothing but defects)"
            )
        if not self.moved:
            return ""
        cause = f"or more than one in {DEFECTS} is defective" if self.direction == "higher" else "and defects may pass"
        return (
            f"these images as a whole score {self.direction} than the good ones of the calibration: light, camera or "
            f"material have changed, {cause} ({_chance(self.p_value, self.level)})"
        )


@dataclass(frozen=True)
class LightDrift:
    """What the brightness of a batch says, whatever it scores: nothing was promised of good parts in another light.

    `p_value` bounds how often good images like the reference would look so moved.
    """

    moved: bool
    p_value: float
    level: float  # the rate of false alarms
    images: int
    reference: int  # good images it was compared with, one of each part
    direction: str  # "brighter", "darker", or "" if nothing moved
    change: float  # of the middle of the batch against that of the reference, as a part of it

    @property
    def sentence(self) -> str:
        """For a person; empty where there is nothing to say."""
        if not self.moved:
            return ""
        return (
            f"these images as a whole are {100 * abs(self.change):.0f} % {self.direction} than the good ones of the "
            f"calibration ({_chance(self.p_value, self.level)}): what it promises of good parts is for its own light; "
            "set the light back, or run firm calibrate on good images taken in this one"
        )


def drift(
    batch: Float[Tensor, " m"],
    reference: Float[Tensor, " n"],
    *,
    parts: Int[Tensor, " n"] | None = None,
    images: int = 0,
    level: float = 0.01,
) -> Drift:
    """Compares the scores of a batch with those of held-out good images; `parts` numbers the part each of these shows.

    The batch is taken to show a part once; of several photographs of its parts give only `one_of_each`, or the rate of
    false alarms is higher than stated, and the number of all `images`: a fifth of those may be defects, each of another
    part.
    """
    new, good, alone = _compared(batch, reference, parts, level)
    kept = new.sort().values[: max(0, len(new) - _allowed(max(images, len(new))))]  # any other may be a defect
    higher, lower = _chance_of_higher(kept, alone), _chance_of_higher(-new, -alone)
    p_value = min(1.0, 2 * min(higher, lower))
    enough = 2 * _least_chance(len(kept), len(alone)) <= level
    moved = enough and p_value <= level
    direction = ("higher" if higher < lower else "lower") if moved else ""
    above = int((new > good.max()).sum())
    foreign = direction == "higher" and len(new) >= FEW and above >= ALIEN * len(new) and _far(new, good)
    return Drift(moved, foreign, p_value, level, len(new), len(alone), direction, enough, above)


def light_drift(
    batch: Float[Tensor, " m"],
    reference: Float[Tensor, " n"],
    *,
    parts: Int[Tensor, " n"] | None = None,
    images: int = 0,
    level: float = 0.01,
) -> LightDrift:
    """The same of how bright the images are; a change below `SLIGHT` is none, however sure.

    Up to a fifth of the batch may be defects, brighter or darker than any good part.
    """
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


def brightness(images: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "s s"] | None = None) -> Float[Tensor, " n"]:
    """The mean grey level of each, 0 to 1, without what is ignored: a sign of another light, whatever scores say."""
    counting = torch.ones(LIT, LIT, dtype=torch.bool) if ignored is None else ~ignored.cpu()
    parts = images.split(LOOKED) if len(images) else ()
    levels = [resize(part, len(counting)).cpu().float().mean(1)[:, counting].mean(1) / 255 for part in parts]
    return torch.cat([torch.empty(0), *levels])


def one_of_each(scores: Float[Tensor, " n"], parts: Int[Tensor, " n"]) -> Float[Tensor, " k"]:
    """The score of one photograph of each part: the first of the first part, the second of the second, and around.

    Chosen without regard to the score, it is as good a draw as the only photograph of a part is. A mean or median of
    the part would vary less than that; and always the first may always be the same side of the part.
    """
    numbers = parts.unique(return_inverse=True)[1]
    sizes = numbers.bincount()
    turn = torch.arange(len(sizes), device=sizes.device) % sizes
    return scores[numbers.argsort(stable=True)[sizes.cumsum(0) - sizes + turn]]


def images_needed(reference: int, level: float) -> int:
    """The smallest batch that could be called moved either way beside so many good images."""
    low, high = 0, 1
    while 2 * _least_chance(high, reference) > level:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if 2 * _least_chance(middle, reference) > level else (low, middle)
    return high - (-high // (DEFECTS - 1))  # so many are left when the possible defects are gone


def surprise(batch: Float[Tensor, "b g"], reference: Float[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """How unlikely it is that so many images lie above a score of the reference, where it is least likely; by rows.

    At each compared score of the reference the images above it are counted; of exchangeable scores the count follows
    the hypergeometric law. Equal scores count as not above, so ties only lower the rate of false alarms.
    """
    g, n = batch.shape[1], reference.shape[1]
    places = _places(n)
    against = reference.sort(dim=1).values[:, places].contiguous()
    above = g - torch.searchsorted(batch.sort(dim=1).values, against, right=True)
    return _tails(places, n, g).expand(len(batch), -1, -1).gather(2, above[:, :, None]).amin((1, 2))


def chance_of(surprises: Float[Tensor, " b"], g: int, n: int) -> Float[Tensor, " b"]:
    """How often g images beside n of the reference are as surprising anywhere, if all are exchangeable."""
    places = _places(n)
    tails = _tails(places, n, g)
    alike = (surprises * (1 + 1e-9)).expand(len(places), -1).contiguous()  # what is equal by symmetry differs in digits
    bounds = torch.full((len(surprises), n), g + 1)
    bounds[:, places] = g + 1 - torch.searchsorted(tails.flip(1), alike, right=True).T
    # it lies between the least chance and the sum over the places, which hold where a difference has lost its digits
    return (1 - _never_reached(bounds, g)).clamp(surprises, (len(places) * surprises).clamp(max=1)).clamp(max=1)


def _compared(
    batch: Float[Tensor, " m"], reference: Float[Tensor, " n"], parts: Int[Tensor, " n"] | None, level: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " n"], Float[Tensor, " k"]]:
    """The batch, the reference, and one of each part of it; what cannot be compared is refused."""
    new, good = _checked(batch, "batch"), _checked(reference, "calibration")
    if not 0 < level < 1:
        raise FirmError(f"level is {level}; it must lie between 0 and 1")
    return new, good, good if parts is None else one_of_each(good, parts)


def _chance(p_value: float, level: float) -> str:
    """How sure it is, and how often it is said falsely."""
    chance = "below 0.000001" if p_value < 1e-6 else f"= {p_value:.2g}"
    return f"p {chance}; at most {100 * level:.2g} % of batches are called so falsely"


def _checked(scores: Float[Tensor, " n"], name: str) -> Float[Tensor, " n"]:
    if not len(scores):
        raise FirmError(f"the {name} holds no scores; drift is told from at least one image of each")
    if not bool(scores.isfinite().all()):
        raise FirmError(f"a score of the {name} is not finite; the training diverged, lower training.lr")
    return scores.detach().cpu().double()


def _chance_of_higher(new: Float[Tensor, " g"], good: Float[Tensor, " n"]) -> float:
    return float(chance_of(surprise(new[None], good[None]), len(new), len(good))) if len(new) else 1.0


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _allowed(images: int) -> int:
    """How many of a batch may be defects: a fifth, rounded up, so that the only defect of four is no drift."""
    return -(-images // DEFECTS)


def _far(new: Float[Tensor, " m"], good: Float[Tensor, " n"]) -> bool:
    """Whether the middle of the batch lies several spreads above that of the reference."""
    low, middle, high = good.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return float(new.median()) > middle + SPREADS * (high - low)


def _places(n: int) -> Int[Tensor, " p"]:
    """Which of the sorted scores of the reference are compared with, lowest first; the same from either end."""
    first, last = n // EDGE, n - 1 - n // EDGE
    return torch.linspace(first, last, min(PLACES, last - first + 1), dtype=torch.float64).round().long()


def _least_chance(g: int, n: int) -> float:
    """The chance that all of g images lie above the highest compared score: nothing is more surprising."""
    over = n - 1 - int(_places(n)[-1])
    return math.exp(sum(math.log(i) - math.log(g + i) for i in range(over + 1, n + 1)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _tails(places: Int[Tensor, " p"], n: int, g: int) -> Float[Tensor, "p a"]:
    """The chance that at least a = 0..g of g images lie above each place among n: orders of those above and below."""
    log = torch.arange(1, n + g + 2, dtype=torch.float64).lgamma()  # of factorials
    above, place = torch.arange(g + 1), places[:, None]
    over = log[above + n - 1 - place] - log[above] - log[n - 1 - place]
    under = log[g - above + place] - log[g - above] - log[place]
    orders = over + under - (log[n + g] - log[n] - log[g])
    return orders.exp().flip(1).cumsum(1).flip(1)


def _never_reached(bounds: Int[Tensor, "b n"], g: int) -> Float[Tensor, " b"]:
    """The part of all orders of g images and n of reference in which, above each of these, are fewer than its bound.

    From the highest of the reference downwards, the orders so far are counted by how many images they hold; as
    logarithms, since there are more than floating point reaches.
    """
    rows, n = bounds.shape
    held = torch.arange(g + 1)
    orders = torch.full((rows, g + 1), -math.inf, dtype=torch.float64)
    orders[:, 0] = 0
    for place in reversed(range(n)):
        orders = orders.logcumsumexp(1).masked_fill(held >= bounds[:, place, None], -math.inf)
    return (orders.logsumexp(1) - _log_choose(n + g, g)).exp()
