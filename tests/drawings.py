"""Small drawn parts for the tests of the industrial branch: cheap to make, and wrong where it is known."""

from dataclasses import dataclass

import cv2
import numpy as np
import torch

# a screw lying level in 96 px, around the middle: a wide head and a long shank
SCREW = np.array([[-34, -14], [-20, -14], [-20, -6], [34, -6], [34, 6], [-20, 6], [-20, 14], [-34, 14]], float)


@dataclass(frozen=True)
class Parts:
    images: torch.Tensor  # uint8 n, 3, side, side
    masks: torch.Tensor  # bool n, side, side: the defect
    places: list[tuple[float, float]]  # row and column of its middle; nan without one


def screws(n, *, turned=False, light=0.0, defect=False, level=60, seed=0, side=96, outline=SCREW):
    """Grey screws on grey ground with a little noise, each turned, shifted and lit by itself; a defect is a spot."""
    rng = np.random.default_rng(seed)
    images, masks, places = [], [], []
    for _ in range(n):
        angle = rng.uniform(0, 2 * np.pi) if turned else 0.0
        middle = (side - 1) / 2 + (rng.uniform(-5, 5, 2) if turned else np.zeros(2))
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * side / 96
        image = np.full((side, side), 60, np.uint8)
        cv2.fillPoly(image, [_sixteenths(np.asarray(outline) @ turn.T + middle)], 150, lineType=cv2.LINE_AA, shift=4)
        place = turn @ np.array([rng.uniform(-14, 28), 0.0]) + middle
        mask = np.zeros_like(image)
        if defect:
            cv2.circle(mask, _sixteenths(place).tolist(), round(4 * 16 * side / 96), 1, -1, shift=4)
        lit = np.where(mask > 0, level, image) * (1 + light * rng.uniform(-1, 1)) + rng.normal(0, 3, image.shape)
        images.append(np.clip(np.round(lit), 0, 255).astype(np.uint8))
        masks.append(mask > 0)
        places.append((place[1], place[0]) if defect else (np.nan, np.nan))
    pixels = torch.from_numpy(np.stack(images))[:, None].expand(-1, 3, -1, -1).contiguous()
    return Parts(pixels, torch.from_numpy(np.stack(masks)), places)


def _sixteenths(points):
    return np.round(np.asarray(points) * 16).astype(np.int32)
