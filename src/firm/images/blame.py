"""Who is to blame for an image that cannot be read: the file, which is named, or a machine without memory."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from firm.errors import ImageError, MachineError, named

REPLACE = "replace or remove it"
DECODING = 8  # bytes that a decoder takes for a pixel, beside the image: of a progressive JPEG six are coefficients

_warning_filters = threading.Lock()  # warning filters are global


class Refused(ValueError):
    """Why an image cannot be used; the message starts with its name."""


@contextlib.contextmanager
def errors_named(source: object) -> Iterator[None]:
    """Turn every error into an ImageError that names the file, or a MachineError, and silence warnings."""
    try:
        with _warning_filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # damaged files raise anything from SyntaxError to struct.error
        path = Path(source) if isinstance(source, Path | str) else None
        name = "the image" if path is None else named(path)
        if isinstance(error, Refused):
            raise ImageError(f"{name} {error}", path) from None
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError) or reason.startswith("out of memory"):
            raise MachineError(f"memory is too short to read {name}; free some or scale the image down") from error
        raise ImageError(f"{name} cannot be decoded as an image ({reason}); {REPLACE}", path) from error


def load(image: Image.Image) -> None:
    """Decode the pixels. libtiff and libjpeg call a lack of memory a damaged file, so an error is looked into."""
    try:
        image.load()
    except Exception as error:
        if _is_short_of(DECODING * image.width * image.height):
            raise MemoryError from error
        raise


def _is_short_of(size: int) -> bool:
    try:
        bytearray(size)
    except MemoryError:
        return True
    return False
