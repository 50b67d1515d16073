"""A detector on disk: a folder with a card to read, the weights it names, and the calibration that decides.

part.firm/
  card.json                      what it is, from what and how it was made; a digest over itself and the weights
  weights-<digest>.safetensors   named by their content
  calibration.json               the thresholds; replaced without touching the rest

The card is written last of the first two, in one step, so a folder is the old detector or the new one. Nothing in it is
ever executed. Detectors of schema 1 were a single file, and are still read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firm.errors import named
from firm.storage import Card, check_card, digest, load_tensors, write_atomically
from firm.types import FirmError

KIND, SCHEMA, OLD = "detector", 2, 1
CARD = "card.json"
WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
UNFINISHED = re.compile(
    rf"({WEIGHTS.pattern})|\.({WEIGHTS.pattern}|card\.json)\..+"
)  # what a death or a full disk leaves
COPY = "copy it again from its source"


def check_target(path: Path) -> None:
    """A detector may be written where nothing is, or in place of another; anything else would be lost or mixed."""
    if path.is_file():
        raise FirmError(f"{named(path)} is a file; name another place for the detector, or remove it")
    foreign = path.is_dir() and any(not UNFINISHED.fullmatch(file.name) for file in path.iterdir())
    if not path.name or (foreign and not (path / CARD).is_file()):
        raise FirmError(f"{named(path)} is a folder of other things; name a new one, for example {path / 'part.firm'}")


def write_model(path: Path, tensors: dict[str, Tensor], card: Card) -> None:
    """The weights, then the card that makes them the detector, then what it replaced is removed."""
    check_target(path)
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    name = f"weights-{digest(tensors, '')[:16]}.safetensors"
    written: Card = {**card, "kind": KIND, "schema": SCHEMA, "weights": name}
    written["digest"] = digest(tensors, _text(written))
    write_atomically(path / name, save(tensors))
    write_atomically(path / CARD, (json.dumps(written, indent=2) + "\n").encode())
    for file in path.iterdir():
        if UNFINISHED.fullmatch(file.name) and file.name != name:
            file.unlink()


def read_model(path: Path) -> tuple[dict[str, Tensor], Card]:
    """Tensors and card; a future, foreign, damaged, edited or incomplete detector is refused with a sentence."""
    if path.is_file():
        return load_tensors(path, kind=KIND, schema=OLD)
    if not (path / CARD).is_file():
        raise FirmError(f"there is no detector {named(path)}; give the folder that firm fit has written")
    text = _read(path / CARD).decode(errors="replace")
    card = check_card(path / CARD, text, KIND, SCHEMA)
    if not WEIGHTS.fullmatch(str(card.get("weights"))):
        raise FirmError(f"{named(path / CARD)} names no weights; {COPY}")
    file = path / card["weights"]
    try:
        tensors = load(_read(file))
    except SafetensorError as error:
        raise FirmError(f"{named(file)} is not a readable file of weights ({error}); {COPY}") from error
    if card.pop("digest", None) != digest(tensors, _text(card)):
        raise FirmError(f"{named(path)} was damaged or edited after it was written; {COPY}")
    return tensors, card


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FirmError(f"{named(file)} cannot be read ({error.strerror}); {COPY}") from error


def _text(card: Card) -> str:
    return json.dumps(card, sort_keys=True)
