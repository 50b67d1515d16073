"""Parts drawn on the spot: nothing to download."""

from collections.abc import Sequence
from pathlib import Path

from firm.data.folder import Reading
from firm.drawn.render import draw_dataset
from firm.errors import SettingError
from firm.types import OneClass


def draw_parts(dataset: str, product: str, places: Sequence[Path], reading: Reading) -> OneClass:
    """Good and defective parts of one product, at the side that was asked for."""
    if not isinstance(reading.side, int):
        raise SettingError(f"drawn parts are squares; set size for {dataset}:{product} and leave shape out")
    return draw_dataset(product, size=reading.side)
