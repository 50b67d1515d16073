"""Fashion-MNIST from its official IDX files, gzipped or not."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from firm.data.registry import DATASETS
from firm.errors import DataError
from firm.types import Split

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
NAMES = tuple(f"{split}-{part}-ubyte" for split in ("train", "t10k") for part in ("images-idx3", "labels-idx1"))


def read_fashion_mnist(places: Sequence[Path]) -> tuple[Split, Split]:
    """The official train and test splits; images stay 28 x 28 with one channel."""
    for place in (*places, DEBIAN):
        found = [file for name in NAMES if (file := _find(place, name))]
        if len(found) == len(NAMES):
            return _split(found[0], found[1]), _split(found[2], found[3])
    run = "run `firm fetch fashion-mnist` or `apt-get install dataset-fashion-mnist`"
    files = ", ".join(DATASETS["fashion-mnist"].files)
    raise DataError(f"fashion-mnist is not in {places[0]}; {run}, or download into it {files}")


def _find(place: Path, name: str) -> Path | None:
    return next((file for file in (place / f"{name}.gz", place / name) if file.is_file()), None)


def _split(image_file: Path, label_file: Path) -> Split:
    images, labels = _read_idx(image_file, 3), _read_idx(label_file, 1)
    if images.shape != (len(labels), 28, 28):
        wrong = f"has shape {images.shape}, not (n, 28, 28) for the {len(labels)} labels of {label_file}"
        raise DataError(f"{image_file} {wrong}; fetch both again")
    if (labels > 9).any():
        raise DataError(f"{label_file} holds label {labels.max()}, not only 0..9; fetch it again")
    return images[:, None], labels.astype(np.int64)


def _read_idx(file: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An IDX array of unsigned bytes: 0, 0, 8, the number of dimensions, each length as big-endian int32, the bytes."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} is damaged ({error}); fetch it again") from error
    start = 4 + 4 * dimensions
    shape = tuple(np.frombuffer(content[4:start], dtype=">i4").tolist()) if len(content) >= start else ()
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != start + np.prod(shape, dtype=np.int64):
        raise DataError(f"{file} is not a whole IDX file of {dimensions} dimensions of bytes; fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
