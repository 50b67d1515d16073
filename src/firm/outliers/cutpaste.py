"""CutPaste: a piece of the image pasted elsewhere in it (section 3.4 (b); constants of the CutPaste paper)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Generator, Tensor
from torch.nn import functional as F

from firm.images.colour import Jitter, jittered
from firm.outliers.drawing import Copy, check
from firm.types import Outliers, Scene

TRIES = 10


@dataclass(frozen=True, kw_only=True)
class CutPaste:
    """`plain` pastes an upright rectangle, `scar` a thin turned one, `union` either with equal chance."""

    variant: str = "union"
    area: tuple[float, float] = (0.02, 0.15)  # of the image, plain
    aspect: float = 0.3  # plain: drawn log-uniformly in aspect..1/aspect
    width: tuple[float, float] = (2.0, 16.0)  # scar, in pixels of a 256 px image
    height: tuple[float, float] = (10.0, 25.0)
    angle: float = 45.0
    jitter: float = 0.1
    per_inlier: int = 3

    def __post_init__(self) -> None:
        check(
            self,
            ("variant", self.variant in ("plain", "scar", "union"), "use plain, scar or union"),
            ("area", 0 < self.area[0] <= self.area[1] < 1, "it must rise within 0..1"),
            ("aspect", 0 < self.aspect <= 1, "it must lie in 0..1"),
        )

    @property
    def kinds(self) -> int:
        return 2 if self.variant == "union" else 1

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        images, where, scar = self._paste(inliers, rng)
        for _ in range(TRIES):  # a piece of plain background on plain background changes nothing: draw again
            same = ~where.flatten(1).any(1)
            if not same.any():
                break
            images[same], where[same], scar[same] = self._paste(inliers[same], rng)
        same = ~where.flatten(1).any(1)
        images[same] = 255 - inliers[same]  # a blank image has no pieces that differ: its negative still does
        where[same] = True
        return Outliers(images, torch.where(scar, self.kinds, 1), where)

    def _paste(
        self, inliers: UInt8[Tensor, "n c h w"], rng: Generator
    ) -> tuple[UInt8[Tensor, "n c h w"], Bool[Tensor, "n h w"], Bool[Tensor, " n"]]:
        n, _, height, width = inliers.shape
        union = self.variant == "union"
        scar = torch.rand(n, generator=rng) < 0.5 if union else torch.full((n,), self.variant == "scar")
        size, angle = self._pieces(n, height, width, scar, rng)
        source = _centres(size, angle, height, width, rng)
        target = _centres(size, angle, height, width, rng)
        pixels = inliers.float() / 255
        level = Jitter(brightness=self.jitter, contrast=self.jitter, saturation=self.jitter, hue=self.jitter)
        piece = jittered(pixels, level, rng=rng) if self.jitter else pixels
        inside, moved = _move(piece, source, target, size, angle)
        images = torch.where(inside[:, None], (moved * 255).round().to(torch.uint8), inliers)
        return images, (images != inliers).any(1), scar

    def _pieces(
        self, n: int, height: int, width: int, scar: Tensor, rng: Generator
    ) -> tuple[Float[Tensor, "n 2"], Float[Tensor, " n"]]:
        """Height and width of each piece in pixels, and its turn in radians."""
        area = _uniform(n, self.area, rng) * height * width
        ratio = torch.exp(_uniform(n, (math.log(self.aspect), -math.log(self.aspect)), rng))
        tall, wide = (area / ratio).sqrt().clamp(max=height - 1), (area * ratio).sqrt().clamp(max=width - 1)
        scale = min(height, width) / 256
        thin = torch.stack([_uniform(n, self.height, rng), _uniform(n, self.width, rng)], 1) * scale
        angle = _uniform(n, (-self.angle, self.angle), rng) * math.pi / 180
        return torch.where(scar[:, None], thin, torch.stack([tall, wide], 1)).clamp(min=1), torch.where(scar, angle, 0)


def _uniform(n: int, between: tuple[float, float], rng: Generator) -> Float[Tensor, " n"]:
    low, high = between
    return low + (high - low) * torch.rand(n, generator=rng)


def _centres(
    size: Float[Tensor, "n 2"], angle: Float[Tensor, " n"], height: int, width: int, rng: Generator
) -> Float[Tensor, "n 2"]:
    """A uniform place for each piece such that it stays within the image."""
    cos, sin = angle.cos().abs(), angle.sin().abs()
    radius = torch.stack([size[:, 0] * cos + size[:, 1] * sin, size[:, 0] * sin + size[:, 1] * cos], 1) / 2
    span = torch.tensor([height, width]) - 2 * radius
    return radius + span.clamp(min=0) * torch.rand(len(size), 2, generator=rng)


def _move(
    images: Float[Tensor, "n c h w"], source: Tensor, target: Tensor, size: Tensor, angle: Tensor
) -> tuple[Bool[Tensor, "n h w"], Float[Tensor, "n c h w"]]:
    """Where each turned piece lands, and the image as seen there: pixel p shows turn(p - target) + source."""
    device = images.device
    source, target, size, angle = (value.to(device) for value in (source, target, size, angle))
    height, width = images.shape[-2:]
    y = torch.arange(height, device=device)[None, :, None] + 0.5 - target[:, 0, None, None]  # n, h, 1
    x = torch.arange(width, device=device)[None, None, :] + 0.5 - target[:, 1, None, None]  # n, 1, w
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    v, u = cos * y - sin * x, sin * y + cos * x  # the pixel in the piece's own upright frame
    inside = (v.abs() <= size[:, 0, None, None] / 2) & (u.abs() <= size[:, 1, None, None] / 2)
    across, down = 2 * (u + source[:, 1, None, None]) / width - 1, 2 * (v + source[:, 0, None, None]) / height - 1
    grid = torch.stack([across, down], dim=-1)
    return inside, F.grid_sample(images, grid, mode="nearest", padding_mode="border", align_corners=False)
