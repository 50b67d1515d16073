"""Parts drawn on the spot: nothing to download."""

from collections.abc import Sequence
from pathlib import Path

from firm.data.folder import Reading
from firm.drawn.render import draw_dataset
from firm.types import OneClass


def draw_parts(dataset: str, product: str, places: Sequence[Path], reading: Reading) -> OneClass:
    """Good and defective parts of one product, at the side that was asked for."""
    return draw_dataset(product, size=reading.side)
