"""An experiment: one recipe on one data set with one seed, how it is measured, and the record of its run.

A run is named by what decides it, not by the table that asks for it, so several tables share one run.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firm.errors import DataError
from firm.recipes.recipe import Recipe, sparse, to_json

Changes = dict[str, object]  # settings by path
Record = dict[str, Any]  # what is stored of a run
PLAIN: dict[str, Changes] = {"": {}}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training and how it is measured; experiments that agree in every field are one run."""

    protocol: str  # how it is conducted: semantic, patches or guarantees
    data: str
    recipe: Recipe
    seed: int
    probes: int = 1  # evenly spaced over the training, the last one at its end
    steps: int = 0  # of the training; 0: as many epochs as the recipe has
    test_images: int = 0  # of a balanced subset; 0: the whole test set
    side: int = 0  # at which images are read; 0: the data set's own
    variants: dict[str, Changes] = field(default_factory=lambda: dict(PLAIN))  # ways of scoring one training
    keep_back: bool = False  # some good images are kept from the fit and measured on

    @property
    def content(self) -> dict[str, Any]:
        """All that decides the run as plain JSON; settings at their defaults are left out."""
        content: dict[str, Any] = json.loads(json.dumps(sparse(self), default=to_json))
        if self.protocol == "semantic":
            content["recipe"].pop("score", None)  # every score is measured
        return content

    @property
    def key(self) -> str:
        """The name of the run: readable, and made unique by a digest."""
        digest = hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()[:16]
        data = re.sub(r"[^\w.]+", "-", self.data).strip("-.")
        return f"{data}-{self.recipe.positives}-{self.seed}-{digest}"


def record_path(folder: Path, experiment: Experiment) -> Path:
    """The file that holds, or will hold, the record of a run."""
    return folder / f"{experiment.key}.json"


def read_record(folder: Path, experiment: Experiment) -> Record | None:
    """The record of a run, None if there is none; one that belongs to another experiment is refused."""
    path = record_path(folder, experiment)
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is not a readable record ({error}); remove it and run again") from error
    if not isinstance(record, dict) or not {"experiment", "recipe"} <= record.keys():
        raise DataError(f"{path} is not a record of `firm bench`; remove it and run again")
    if record["experiment"] != experiment.content:
        raise DataError(f"{path} was made with other settings than its name says; remove it and run again")
    return record
