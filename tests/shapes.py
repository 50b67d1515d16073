"""Objects of known shape on a plain ground, as images."""

import cv2
import numpy as np
import torch

SIDE = 64
Y, X = np.mgrid[:SIDE, :SIDE] / SIDE - 0.5  # from the centre
R = np.hypot(Y, X)


def as_images(planes):
    """Grey levels (n, h, w), or colours (n, h, w, 3), as images."""
    pixels = np.clip(np.stack(planes), 0, 255).round().astype(np.uint8)
    return torch.from_numpy(pixels)[:, None] if pixels.ndim == 3 else torch.from_numpy(pixels).permute(0, 3, 1, 2)


def two_levels(mask, low=40, high=200):
    return as_images([np.where(mask, high, low)])


def grain(rng, deviation, blur=0.0):
    """Noise of this deviation, smoothed over `blur` pixels."""
    plane = rng.standard_normal((SIDE, SIDE))
    plane = cv2.GaussianBlur(plane, (0, 0), blur) if blur else plane
    return deviation * plane / plane.std()


def disc(x, y, radius):
    return np.hypot(X - x, Y - y) < radius


def near(rng):
    return rng.uniform(-0.1, 0.1)


SHAPES = {
    "disc": lambda rng: disc(near(rng), near(rng), rng.uniform(0.22, 0.26)),
    "large": lambda rng: disc(0, 0, rng.uniform(0.44, 0.47)),
    "small": lambda rng: disc(4 * near(rng), 4 * near(rng), 0.07),
    "off centre": lambda rng: disc(-0.33, 0.3 + near(rng) / 4, 0.12),
    "cut by a side": lambda rng: disc(-0.5, near(rng), 0.3),
    "cut by a corner": lambda rng: disc(-0.45, -0.45, 0.4),
    "from side to side": lambda rng: np.abs(Y - near(rng)) < 0.15,
    "two": lambda rng: disc(-0.22, near(rng), 0.15) | disc(0.22, near(rng), 0.15),
    "four": lambda rng: disc(np.sign(X) * 0.25, np.sign(Y) * 0.25, 0.14),
    "ring": lambda rng: np.abs(R - 0.3) < 0.06,
    "thin": lambda rng: (np.abs(Y - 2 * near(rng) * X) < 0.03) & (np.abs(X) < 0.4),
}


def objects(name, count=8, ground=60, level=170, rough=10):
    """Images of a drawn object with soft edges on a slightly noisy ground, and where it is."""
    rng = np.random.default_rng(sum(map(ord, name)))
    masks = [SHAPES[name](rng) for _ in range(count)]
    planes = [
        cv2.GaussianBlur(np.where(mask, level, ground).astype(float), (0, 0), 0.5)
        + np.where(mask, grain(rng, rough, 1), grain(rng, 4))
        for mask in masks
    ]
    return as_images(planes), np.stack(masks)


def overlap(found, expected):
    found = np.asarray(found)
    return (found & expected).sum() / (found | expected).sum()
