"""FIRM's semantic branch in one file, with nothing but torch and numpy: from good images to an AUROC.

    python examples/nano_firm.py                                                # drawn glyphs
    python examples/nano_firm.py --data ~/.cache/firm/fashion-mnist --normal 5  # sandals (firm fetch fashion-mnist)

It prints the AUROC of the untrained encoder, the falling loss, and the AUROC of the trained one (1 is perfect, 0.5 is
guessing): about 0.61 -> 0.83 for the glyphs, 0.53 -> 0.91 for the sandals, in half a minute on one core.

The method: good images rotated by 90, 180 and 270 degrees serve as outliers. All good images attract each other, an
outlier attracts only its own second view. An image is anomalous if it is far from every good image. Images are grey, so
colour jitter is brightness and contrast. The sizes are ours; the paper trains a ResNet-18 of width 64 with a head of
eight hidden layers for 2000 epochs.
"""

from __future__ import annotations

import argparse
import gzip
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

INLIER = 0  # group 0 is normal; groups 1, 2, 3 are the quarter turns
Data = tuple[Tensor, Tensor, Tensor]  # inliers to learn from, test images, which of those are anomalous


def fashion_mnist(folder: Path, normal: int) -> Data:
    """One class against the other nine, from the four official IDX files, grey in 0..1 at 32 x 32."""

    def read(name: str, header: int) -> Tensor:
        file = folder / f"{name}.gz" if (folder / f"{name}.gz").exists() else folder / name
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).copy())

    def images(split: str) -> Tensor:
        pixels = read(f"{split}-images-idx3-ubyte", 16).view(-1, 1, 28, 28) / 255
        return F.interpolate(pixels, size=32, mode="bilinear", align_corners=False)  # n 1 32 32

    train, test = (read(f"{split}-labels-idx1-ubyte", 8) for split in ("train", "t10k"))
    return images("train")[train == normal], images("t10k"), test != normal


GLYPHS = (  # strokes x0 y0 x1 y1 in -1..1, y down: arrow, tee, cross, zed, hook, fork
    ((0, -0.8, 0, 0.8), (-0.6, -0.2, 0, -0.8), (0.6, -0.2, 0, -0.8)),
    ((0, -0.8, 0, 0.8), (-0.6, -0.8, 0.6, -0.8)),
    ((0, -0.8, 0, 0.8), (-0.6, 0, 0.6, 0)),
    ((-0.6, -0.8, 0.6, -0.8), (0.6, -0.8, -0.6, 0.8), (-0.6, 0.8, 0.6, 0.8)),
    ((0, -0.8, 0, 0.8), (0, 0.8, -0.6, 0.4)),
    ((0, 0, 0, 0.8), (-0.6, -0.8, 0, 0), (0.6, -0.8, 0, 0)),
)


def glyphs(normal: int, rng: Generator) -> Data:
    """One glyph against the other five, each slightly moved, scaled and tilted, thick or thin, dark or bright."""
    inliers = draw(GLYPHS[normal], 400, rng)
    test = torch.cat([draw(strokes, 100, rng) for strokes in GLYPHS])
    return inliers, test, torch.arange(len(GLYPHS)).repeat_interleave(100) != normal


def draw(strokes: tuple[tuple[float, ...], ...], n: int, rng: Generator) -> Tensor:
    """n drawings of one glyph: ink near every stroke."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")  # 32 32
    x, y, tilt = x + uniform(n, -0.2, 0.2, rng), y + uniform(n, -0.2, 0.2, rng), uniform(n, -0.25, 0.25, rng)
    x, y = x * tilt.cos() - y * tilt.sin(), x * tilt.sin() + y * tilt.cos()  # n 1 32 32
    size, far = uniform(n, 0.6, 0.9, rng), torch.full_like(x, torch.inf)
    for x0, y0, x1, y1 in strokes:
        u, v, dx, dy = x / size - x0, y / size - y0, x1 - x0, y1 - y0
        along = ((u * dx + v * dy) / (dx**2 + dy**2)).clamp(0, 1)  # the stroke's nearest point: 0 its start, 1 its end
        far = torch.minimum(far, torch.hypot(u - along * dx, v - along * dy))
    ink = torch.sigmoid(20 * (uniform(n, 0.08, 0.2, rng) - far))
    paper, contrast = uniform(n, 0, 1, rng), uniform(n, 0.4, 0.7, rng) * uniform(n, -1, 1, rng).sign()
    return (paper + contrast * ink + 0.05 * torch.randn(x.shape, generator=rng)).clamp(0, 1)  # n 1 32 32


def uniform(n: int, low: float, high: float, rng: Generator) -> Tensor:
    """One number per image, shaped to act on it."""
    return low + (high - low) * torch.rand(n, 1, 1, 1, generator=rng)


def turned(images: Tensor, quarters: Tensor) -> Tensor:
    """Each image rotated by its number of quarter turns: the synthetic outliers of section 3.4."""
    return torch.stack([torch.rot90(x, int(q), dims=(1, 2)) for x, q in zip(images, quarters, strict=True)])


def view(images: Tensor, rng: Generator) -> Tensor:
    """One random view of each image: a resized crop of 1/4 to all of its area, brightness, contrast, blur."""
    n = len(images)
    side = uniform(n, 0.25, 1, rng).sqrt()  # n 1 1 1
    x, y = (1 - side) * uniform(n, -1, 1, rng), (1 - side) * uniform(n, -1, 1, rng)
    theta = torch.cat([side, 0 * side, x, 0 * side, side, y], dim=3).view(n, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)  # n 32 32 2
    images = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    images = (images * uniform(n, 0.6, 1.4, rng)).clamp(0, 1)
    images = torch.lerp(images.mean((1, 2, 3), keepdim=True), images, uniform(n, 0.6, 1.4, rng)).clamp(0, 1)
    tap = torch.exp(-1 / (2 * uniform(n, 0.1, 2, rng) ** 2)) * (uniform(n, 0, 1, rng) < 0.75)  # three taps, or none
    for dim in (2, 3):  # roll wraps around the border: simple, and harmless here
        images = (images + tap * (images.roll(1, dim) + images.roll(-1, dim))) / (1 + 2 * tap)
    return images  # n 1 32 32


class Block(nn.Module):
    """A residual block as in ResNet-18."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside))
        self.two = nn.Sequential(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.one(x))) + self.skip(x))


def network(width: int, rng: Generator) -> tuple[nn.Module, nn.Module]:
    """The encoder f, whose features are scored, and the projection head g, which only the loss uses."""
    stem = [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]  # n w 16 16
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]  # n 4w 4 4
    encoder = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())  # n 4w
    hidden = [nn.Linear(4 * width, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()]
    head = nn.Sequential(*hidden, nn.Linear(128, 64, bias=False))  # n 64
    for module in (*encoder.modules(), *head.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=rng)
    return encoder, head


def firm_loss(z: Tensor, source: Tensor, group: Tensor, temperature: float) -> Tensor:
    """Equations 4 and 5. Two views of one image share a source; inliers attract all inliers, the rest only i+."""
    z = F.normalize(z, dim=1)  # b d
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)  # b b: nothing is its own key
    inlier = group == INLIER
    positive = (source[:, None] == source) | (inlier[:, None] & inlier)  # b b: row i is P(i), and i itself
    positive.fill_diagonal_(False)
    log_prob = torch.where(positive, logits.log_softmax(dim=1), 0)  # not a product: 0 * -inf is nan
    return -(log_prob.sum(1) / positive.sum(1)).mean()


def train(
    encoder: nn.Module, head: nn.Module, inliers: Tensor, o: argparse.Namespace, rng: Generator
) -> Iterator[float]:
    """The loop: o holds the options; yields the loss of every step."""
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=o.lr, momentum=0.9, weight_decay=3e-4)
    n, items = len(inliers), torch.empty(0, dtype=torch.long)
    for step in range(o.steps):
        if len(items) < o.batch:  # an epoch: every inlier and its three turns, shuffled; an incomplete batch is dropped
            items = torch.randperm(4 * n, generator=rng)
        now, items = items[: o.batch], items[o.batch :]  # b
        group = now // n  # b: 0 the inlier itself, else the quarters it is turned by
        clean = turned(inliers[now % n], group)  # b 1 32 32
        views = torch.cat([view(clean, rng), view(clean, rng)])  # 2b 1 32 32
        encoder.train()
        z = head(encoder(views))  # 2b 64
        loss = firm_loss(z, torch.arange(len(now)).repeat(2), group.repeat(2), o.temperature)
        warm = (step + 1) / max(1, o.steps // 20)  # linear over the first twentieth, then a cosine towards 0
        optimizer.param_groups[0]["lr"] = o.lr * min(warm, (1 + math.cos(math.pi * step / o.steps)) / 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def features(encoder: nn.Module, images: Tensor) -> Tensor:
    """Unit vectors; in evaluation mode, so that the features of an image do not depend on the other images."""
    encoder.eval()
    return F.normalize(torch.cat([encoder(part) for part in images.split(256)]), dim=1)  # n 4w


def score(encoder: nn.Module, images: Tensor, inliers: Tensor, k: int) -> Tensor:
    """Equation 6, negated: one minus the mean cosine to the k nearest inliers. Higher is more anomalous."""
    cosine = features(encoder, images) @ features(encoder, inliers).T  # m n
    return 1 - cosine.topk(k, dim=1).values.mean(1)  # m


def auroc(scores: Tensor, anomalous: Tensor) -> float:
    """The probability that an anomaly scores above a good image; ties count half."""
    bad, good = scores[anomalous], scores[~anomalous].sort().values
    beaten = torch.searchsorted(good, bad) + torch.searchsorted(good, bad, right=True)
    return beaten.double().mean().item() / (2 * len(good))


def run(o: argparse.Namespace) -> tuple[float, list[float], float]:
    """AUROC of the untrained encoder, the losses, AUROC of the trained encoder; the options decide all of it."""
    rng = Generator().manual_seed(o.seed)
    inliers, test, anomalous = fashion_mnist(o.data, o.normal) if o.data else glyphs(o.normal, rng)
    encoder, head = network(o.width, rng)
    before = auroc(score(encoder, test, inliers, o.k), anomalous)
    print(f"{len(inliers)} inliers, {len(test)} test images; untrained AUROC {before:.3f}", flush=True)
    losses = []
    for loss in train(encoder, head, inliers, o, rng):
        losses.append(loss)
        if len(losses) % 50 == 0:
            print(f"step {len(losses)}: loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    after = auroc(score(encoder, test, inliers, o.k), anomalous)
    print(f"trained AUROC {after:.3f}")
    return before, losses, after


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FIRM in one file")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's IDX files; without it, drawn glyphs")
    for name, default in {"normal": 0, "steps": 300, "batch": 32, "width": 16, "k": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    for name, default in {"lr": 0.05, "temperature": 0.2}.items():
        parser.add_argument(f"--{name}", type=float, default=default, help="default %(default)s")
    return parser.parse_args(given)


if __name__ == "__main__":
    run(options())
