"""Inliers + outliers + views -> Batch, as a pure function of seed, step, rank and world.

An epoch is one pass over the list of every inlier and its outliers (section 6; four times the inliers for rotations),
shuffled, the incomplete last batch dropped. No batch depends on one made before, so a resumed run makes the same ones.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor, nn

from firm.errors import DataError, SettingError
from firm.images.preprocess import Preprocessing, fingerprint
from firm.networks.heads import Encoder, Network, build
from firm.outliers.registry import make_outliers
from firm.runtime.random import stream
from firm.training.loop import Training
from firm.types import INLIER, Batch, Focus, Outliers, OutlierSource, Scene, Views

READY = 128  # buffered outliers at hand


@dataclass
class OutlierBuffer:
    """Outliers made ahead and used several times, so that synthesis keeps up with training on one core.

    A window of ready outliers moves along with the steps. Outlier j depends on the seed and on j alone, so a resumed
    run fills the window with the same ones.
    """

    source: OutlierSource
    images: UInt8[Tensor, "n c h w"]
    foreground: Bool[Tensor, "n h w"]
    seed: int
    per_step: float  # new outliers per step; fewer than a step uses means that they are used several times
    hidden: Bool[Tensor, "n h w"] | None = None
    made: dict[int, Outliers] = field(default_factory=dict, init=False)

    def take(self, step: int, count: int) -> Outliers:
        """`count` different outliers of this step's window, drawn for this step."""
        first = int(step * self.per_step)
        ready = max(READY, count)
        window = range(first, first + ready)
        self.made = {number: self.made.get(number) or self._make(number) for number in window}
        drawn = first + torch.randperm(ready, generator=stream(self.seed, "replay", step))[:count]
        chosen = [self.made[number] for number in drawn.tolist()]
        return Outliers(
            torch.cat([outlier.images for outlier in chosen]),
            torch.cat([outlier.group for outlier in chosen]),
            torch.cat([_where(outlier) for outlier in chosen]),
        )

    def _make(self, number: int) -> Outliers:
        which = torch.randint(len(self.images), (1,), generator=stream(self.seed, "replay image", number))
        scene = Scene(self.foreground, self.images, self.foreground, self.hidden)[which]
        rng = stream(self.seed, "replay outlier", number)
        return make_outliers(self.source, self.images[which], rng=rng, scene=scene)


def _where(outlier: Outliers) -> Bool[Tensor, "1 h w"]:
    return torch.ones_like(outlier.images[:, 0], dtype=torch.bool) if outlier.where is None else outlier.where


@dataclass(frozen=True)
class ImageTask:
    """Training on images: all that decides its batches."""

    images: Tensor  # uint8 n, c, h, w: inliers only
    preprocessing: Preprocessing
    outliers: OutlierSource
    views: Views
    training: Training
    seed: int
    foreground: Tensor | None = None  # bool n, h, w: the object in each image, for local outliers and views
    ignored: Tensor | None = None  # bool h, w: what was taken from every foreground
    hidden: Tensor | None = None  # bool n, h, w: the same in each image once aligned; no outlier is altered there

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.images), self.outliers.per_inlier, self.training.batch)

    @property
    def fingerprint(self) -> str:
        """Names the images, so that a run is never resumed on others."""
        return "-".join(fingerprint(pixels) for pixels in (self.images, self.ignored) if pixels is not None)

    def network(self, encoder: Encoder) -> Network:
        """A new network; its weights depend on the seed alone."""
        return build(encoder, rng=stream(self.seed, "weights"))

    def complete(self, network: nn.Module) -> Network:
        """The trained network, which computes features by itself."""
        assert isinstance(network, Network)
        return network

    @cached_property
    def buffer(self) -> OutlierBuffer | None:
        """Outliers made ahead, where each is to be used several times."""
        if self.training.reuse == 1 or self.foreground is None:
            return None
        share_of_outliers = self.outliers.per_inlier / (1 + self.outliers.per_inlier)
        per_step = self.training.batch * share_of_outliers / self.training.reuse
        return OutlierBuffer(self.outliers, self.images, self.foreground, self.seed, per_step, self.hidden)

    def batch(self, step: int, device: torch.device | str = "cpu", *, rank: int = 0, world: int = 1) -> Batch:
        """The multiview batch of one step: all first views, then all second views in the same order.

        With a foreground, outliers and views get the position of the object, and views that of the altered pixels.
        """
        items = self._items(step)
        which, copy = items % len(self.images), items // len(self.images) - 1
        places = (copy >= 0).nonzero().squeeze(1)
        made = self._outliers(step, which[places], copy[places])
        clean, group = _fill(self.images[which], places, made)
        focus = None
        if self.foreground is not None:
            focus = Focus(self.foreground[which], torch.zeros_like(self.foreground[which]))
            focus.altered[places] = True if made.where is None else made.where
        rng = stream(self.seed, "views", step)
        views = self.views(clean.to(device), self.preprocessing.size, rng=rng, focus=focus)
        return paired(self.preprocessing.normalise(torch.cat(views)), group, rank, world)

    def _items(self, step: int) -> Int[Tensor, " b"]:
        """Numbers below the number of images are inliers, the next as many are their first outliers, and so on."""
        training = self.training
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _epoch(
            len(self.images), self.outliers.per_inlier, training.batch, training.stratified, self.seed, epoch
        )
        return order[place * training.batch : (place + 1) * training.batch]

    def _outliers(self, step: int, which: Int[Tensor, " m"], copy: Int[Tensor, " m"]) -> Outliers:
        """The outliers of a step: the given copies of the given inliers, or from the buffer."""
        inliers = self.images[which]
        if not len(which):
            return Outliers(inliers, copy)
        if self.buffer is not None:
            return self.buffer.take(step, len(which))
        objects = self.foreground
        scene = None if objects is None else Scene(objects, self.images, objects, self.hidden)[which]
        return make_outliers(self.outliers, inliers, rng=stream(self.seed, "outliers", step), copy=copy, scene=scene)


def paired(images: Tensor, group: Int[Tensor, " b"], rank: int, world: int) -> Batch:
    """The batch of all first views, then all second views, or the part of it for process `rank` of `world`.

    A part is every world-th item with both its views. The parts of all ranks are disjoint and together are the whole
    batch, bit for bit, whatever `world` is; for that each process makes the whole batch and keeps its part.
    """
    if not 0 <= rank < world <= len(group):
        raise SettingError(
            f"rank {rank} of {world} processes cannot be; ranks are 0..world-1, for at most {len(group)} items"
        )
    mine = torch.arange(rank, len(group), world).repeat(2).to(images.device)
    if world > 1:
        images = torch.cat([half[rank::world] for half in images.chunk(2)])
    return Batch(images, mine, group.to(images.device)[mine])


def steps_per_epoch(inliers: int, per_inlier: int, batch: int) -> int:
    """Whole batches in one pass over inliers and outliers; an error if there is not even one."""
    items = inliers * (1 + per_inlier)
    if items < batch:
        raise DataError(
            f"{inliers} good images with {per_inlier} outliers each make {items} items, fewer than one batch of "
            f"{batch}; add images or set training.batch={max(2, items)} or less"
        )
    return items // batch


def _fill(
    clean: UInt8[Tensor, "b c h w"], places: Int[Tensor, " m"], made: Outliers
) -> tuple[UInt8[Tensor, "b k h w"], Int[Tensor, " b"]]:
    """The batch's images with the outliers in their places, and the group of each."""
    if made.images.shape[1] > clean.shape[1]:  # colour outliers beside grey inliers
        clean = clean.expand(-1, made.images.shape[1], -1, -1).clone()
    clean[places] = made.images
    group = torch.full((len(clean),), INLIER)
    group[places] = made.group
    return clean, group


@lru_cache(maxsize=2)
def _epoch(inliers: int, per_inlier: int, batch: int, stratified: bool, seed: int, epoch: int) -> Int[Tensor, " m"]:
    """The order of one epoch's items; `stratified` gives every batch the same number of inliers."""
    rng = stream(seed, "order", epoch)
    if not stratified:
        return torch.randperm(inliers * (1 + per_inlier), generator=rng)
    steps = steps_per_epoch(inliers, per_inlier, batch)
    normal = max(1, batch // (1 + per_inlier))
    first = _repeated(inliers, steps * normal, rng).view(steps, normal)
    rest = inliers + _repeated(inliers * per_inlier, steps * (batch - normal), rng).view(steps, batch - normal)
    return torch.cat([first, rest], dim=1).flatten()


def _repeated(n: int, wanted: int, rng: torch.Generator) -> Int[Tensor, " wanted"]:
    """Shuffled passes over 0..n-1 until there are enough."""
    passes = [torch.randperm(n, generator=rng) for _ in range(-(-wanted // n))]
    return torch.cat(passes)[:wanted]
