"""A calibration as a file beside the weights of its detector: it can be moved, replaced and set aside without them.

It is text that a person may read and no person may change: its id is a digest of what it says, so an edited one is
refused, and so is one of another model. The digest guards against accidents; it is no signature.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firm.calibration import SCHEMA, Calibration, Misses, Promise, Rate
from firm.errors import named
from firm.storage import write_atomically
from firm.types import FirmError

KIND = "calibration"
NAME = "calibration.json"
AGAIN = "run firm calibrate again"


def beside(model: Path | str) -> Path:
    """Where the calibration of a detector is looked for; of one that is a single file next to that."""
    path = Path(model)
    return path.with_name(f"{path.name}.{NAME}") if path.is_file() else path / NAME


def to_json(calibration: Calibration) -> dict[str, Any]:
    """All that it says, and its id."""
    return {"kind": KIND, "schema": SCHEMA, "id": calibration.id, **asdict(calibration)}


def from_json(values: Any) -> Calibration:
    """The calibration that `to_json` wrote; anything else is refused in a sentence."""
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise FirmError(f"this is no calibration; {AGAIN}")
    if values.get("schema") != SCHEMA:
        raise FirmError(f"it has schema {values.get('schema')}, this firm reads {SCHEMA}; upgrade firm or {AGAIN}")
    fields = {name: value for name, value in values.items() if name not in ("kind", "schema", "id")}
    try:
        found = Calibration(**(fields | _nested(fields)))
        same = found.id == values["id"]
    except (FirmError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FirmError(f"it does not say what one says ({_line(error)}); {AGAIN}") from error
    if not same:
        raise FirmError(f"it was damaged or edited after it was written; {AGAIN}")
    return found


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """The values that are more than a number, as what they are."""
    promises = {name: fields[name] and Promise(**fields[name]) for name in ("reviewed", "failed", "marked")}
    good = {name: tuple(fields[name]) for name in ("scores", "shown", "light") if name in fields}
    misses = fields["misses"]
    if misses is not None:
        misses = Misses(**(misses | {name: Rate(**misses[name]) for name in ("unfailed", "passed")}))
    return promises | good | {"misses": misses}


def write_calibration(path: Path | str, calibration: Calibration) -> None:
    """Readable JSON, replaced in one step."""
    write_atomically(Path(path), (json.dumps(to_json(calibration), indent=2) + "\n").encode())


def read_calibration(path: Path | str, *, model: str) -> Calibration:
    """The calibration of the model with this id; a damaged, edited or foreign one is refused."""
    try:
        values = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise FirmError(f"there is no file {named(path)}; {AGAIN}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FirmError(f"{named(path)} cannot be read as JSON ({_line(error)}); {AGAIN}") from None
    try:
        found = from_json(values)
    except FirmError as error:
        raise FirmError(f"the calibration {named(path)} cannot be used: {error}") from None
    if found.model != model:
        raise FirmError(
            f"the calibration {named(path)} is that of model {named(found.model)}, not of {model}; {AGAIN} or remove it"
        )
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
