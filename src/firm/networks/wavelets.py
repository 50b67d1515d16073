"""Wavelets instead of learnt filters: a backbone for machines without pretrained weights.

Oriented filters of one shape are applied to the image and to ever coarser copies of it. Their responses are kept as
energy and as dark and bright lines, and the energies are filtered once more, one octave coarser: the first two orders
of a scattering transform. All of it is averaged over cells of 8 px, then over the cells of a patch, and only then taken
as logarithms, so that twice the contrast is the same step everywhere.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from firm.networks.backbone import Trunk

LEVELS = 4  # the image, and copies of half, a quarter and an eighth of its size
CELL = 8  # px: the stride of every stage
SIDE, WAVELENGTH, SPREAD = 7, 4.0, 1.8  # px of a filter, in the copy it is applied to
LONG = 0.7  # a filter is longer along its lines than across
FIRST, SECOND = 8, 4  # orientations
FAINT = 1e-3  # of full contrast: fainter than any camera's noise
LOW = 4.0  # weight of brightness, whose spread is smaller than that of the logarithms
LOWS = (1, 2, 4)  # cells over which brightness is averaged
BRIGHTNESS = 3 * len(LOWS)  # channels that are no energies: the last of the last stage


class Wavelets(Trunk):
    """A stage for every copy of the image, all at the same stride; brightness and colour in the last.

    The filters are saved with a detector although they are not learnt, so that other versions of firm score the same.
    """

    reach = 128

    lines: Tensor
    coarse: Tensor
    blur: Tensor
    faint: Tensor

    def __init__(self, *, deepest: int = LEVELS) -> None:
        super().__init__()
        self.deepest = deepest
        self.register_buffer("lines", _filters(FIRST))
        self.register_buffer("coarse", _filters(SECOND).repeat(FIRST, 1, 1, 1))
        taps = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
        self.register_buffer("blur", (taps[:, None] * taps)[None, None])
        self.register_buffer("faint", torch.tensor(FAINT))

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """Energies, bright and dark lines and spots of each copy, n, c, r, s, at cells of 8 px; not yet `finished`."""
        copy = images.mean(1, keepdim=True).contiguous()
        stages = []
        for level in range(self.deepest):
            smooth = _convolved(copy, self.blur)
            within = CELL >> level  # pixels of this copy in a cell, along each side
            energy, *parts = self._first(copy, _convolved(smooth, self.blur), within)
            others = [self._second(energy, within)] if level < LEVELS - 1 else _lows(images)
            stages.append(torch.cat([*parts, *others], 1))
            copy = F.avg_pool2d(smooth, 2)
        return stages

    def finished(self, stage: int, averaged: Float[Tensor, "n c r s"]) -> Float[Tensor, "n c r s"]:
        """A stage, counted from 1, averaged over patches: logarithms of its energies, then brightness and colour."""
        energies = averaged.shape[1] - (BRIGHTNESS if stage == LEVELS else 0)
        return torch.cat([(averaged[:, :energies] + self.faint).log(), averaged[:, energies:]], 1)

    def _first(self, copy: Float[Tensor, "n 1 h w"], base: Float[Tensor, "n 1 h w"], within: int) -> list[Tensor]:
        """The energy of every orientation at each pixel; then the cell means of energies, lines and spots."""
        even, odd = _convolved(copy, self.lines).unflatten(1, (2, FIRST)).unbind(1)
        energy = (even.square() + odd.square()).sqrt()
        spots = copy - base
        spots = torch.cat([spots, -spots], 1).relu()
        lines = torch.cat([energy, even.relu(), (-even).relu(), spots], 1)
        parts = [energy, F.avg_pool2d(lines, within)]
        return parts if within == 1 else [*parts, F.max_pool2d(spots, within)]

    def _second(self, energy: Float[Tensor, "n o h w"], within: int) -> Float[Tensor, "n _ r s"]:
        """How the energy of every orientation itself varies, one octave coarser."""
        responses = _convolved(F.avg_pool2d(energy, 2), self.coarse, groups=FIRST)
        even, odd = responses.unflatten(1, (FIRST, 2, SECOND)).unbind(2)
        return F.avg_pool2d((even.square() + odd.square()).sqrt().flatten(1, 2), within // 2)


def _filters(orientations: int) -> Float[Tensor, "f 1 s s"]:
    """Waves under a Gaussian, all even ones and then all odd ones; none responds to a uniform surface."""
    offsets = torch.arange(SIDE, dtype=torch.float32) - SIDE // 2
    y, x = offsets[:, None], offsets[None, :]
    even, odd = [], []
    for number in range(orientations):
        angle = math.pi * number / orientations
        across, along = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        bell = torch.exp(-(across.square() + (LONG * along).square()) / (2 * SPREAD**2))
        wave = bell * torch.cos(2 * math.pi * across / WAVELENGTH)
        even.append(wave - bell * (wave.sum() / bell.sum()))
        odd.append(bell * torch.sin(2 * math.pi * across / WAVELENGTH))
    return torch.stack([wave / wave.norm() for wave in (*even, *odd)])[:, None]


def _convolved(images: Float[Tensor, "n c h w"], filters: Float[Tensor, "f 1 s s"], groups: int = 1) -> Tensor:
    """Of the same size; beyond the border the image is mirrored, since zeros would be an edge."""
    margin = filters.shape[-1] // 2
    return F.conv2d(F.pad(images, (margin,) * 4, mode="reflect"), filters, groups=groups)


def _lows(images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
    """Brightness and two differences of colour over one, two and four cells."""
    red, green, blue = F.avg_pool2d(images, CELL).unbind(1)
    cells = LOW * torch.stack([(red + green + blue) / 3, red - green, (red + green) / 2 - blue], 1)
    return [F.interpolate(F.avg_pool2d(cells, size), size=cells.shape[-2:], mode="bilinear") for size in LOWS]
