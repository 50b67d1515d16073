"""Small pictures of the good parts a detector has learnt, kept to show what it compared with; they decide nothing."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from firm.images import decode

MOST = 2000  # pictures that are kept: some ten megabytes
QUALITY = 85

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Examples:
    """JPEG pictures one after the other, of the first good images; tensors only, so that they can be saved."""

    encoded: UInt8[Tensor, " b"]
    ends: Int[Tensor, " n"]

    @classmethod
    def of(cls, images: UInt8[Tensor, "n c h w"]) -> Examples:
        parts = [_encoded(image.permute(1, 2, 0).numpy()) for image in images[:MOST]]
        ends = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)
        return cls(torch.cat([torch.empty(0, dtype=torch.uint8), *parts]), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def picture(self, number: int) -> UInt8[Pixels, "h w 3"] | None:
        """A good image as it was learnt from, None where it was not kept."""
        if not 0 <= number < len(self):
            return None
        begin = int(self.ends[number - 1]) if number else 0
        return decode(self.encoded[begin : int(self.ends[number])].numpy().tobytes())

    def tensors(self) -> dict[str, Tensor]:
        return {"encoded": self.encoded, "ends": self.ends}


NONE = Examples(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))


def _encoded(picture: Pixels) -> UInt8[Tensor, " b"]:
    pixels = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR) if picture.shape[2] == 3 else np.ascontiguousarray(picture)
    return torch.from_numpy(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].copy())
