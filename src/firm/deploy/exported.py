"""An export as a detector: the same interface, its scores and maps by the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.decision.calibration import beside, read_calibration
from firm.deploy.firm_runtime import BATCH, Runtime
from firm.deploy.image_steps import ExportError
from firm.detector.detector import Detector
from firm.errors import ModelFileError, SettingError, named
from firm.images.alignment import Conditioned
from firm.images.preprocess import Preprocessing, resize
from firm.recipes.recipe import from_json
from firm.scoring.models import Examination, Located, Model, OnChunk, Scores

Images = UInt8[Tensor, "n c h w"]
Result = TypeVar("Result")
DETECTOR = "use the detector that it was exported from"


class ExportedModel(Model):
    """A model that runs in an engine: it scores and locates, and cannot explain or be saved."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.card = runtime, runtime.card
        self.preprocessing = Preprocessing.from_card(self.card["preprocessing"])
        self.has_maps = bool(self.card["maps"])

    @property
    def ignored(self) -> Bool[Tensor, "s s"] | None:
        if not self.card["fill"]:
            return None
        hidden = torch.zeros(self.card["size"] ** 2, dtype=torch.bool)
        hidden[self.card["fill"]["to"]] = True
        return hidden.view(self.card["size"], -1)

    def score(self, images: Images, on_chunk: OnChunk | None = None) -> Scores:
        return self.locate(images, on_chunk).scores

    def locate(self, images: Images, on_chunk: OnChunk | None = None) -> Located:
        """Images of any size; they are resized to the side at which the detector works."""
        side = self.card["size"]
        scores, maps = [torch.empty(0)], [torch.empty(0, side, side) if self.has_maps else torch.empty(0, 0, 0)]
        for chunk in images.split(BATCH) if len(images) else ():
            pixels = resize(chunk.expand(-1, 3, -1, -1), side).cpu().numpy()
            found = read(partial(self.runtime.run, pixels))
            scores.append(torch.from_numpy(np.ascontiguousarray(found[0])))
            maps.append(torch.empty(len(chunk), 0, 0) if found[1] is None else torch.from_numpy(found[1]))
            if on_chunk is not None:
                on_chunk(len(chunk))
        return Located(torch.cat(scores), torch.cat(maps))

    def examine(self, images: Images) -> Examination:
        located = self.locate(images)
        return Examination(located.scores, located.maps)

    def align(self, images: Images) -> Conditioned:
        raise SettingError(f"an export does not tell how it aligns images; {DETECTOR}")

    def score_aligned(self, aligned: Conditioned, on_chunk: OnChunk | None = None) -> Scores:
        raise SettingError(f"an export takes images as they come; {DETECTOR}")

    def state_dict(self) -> dict[str, Tensor]:
        raise SettingError(f"an export cannot be saved as a detector; {DETECTOR}")


def read(action: Callable[[], Result]) -> Result:
    """The result; what the runtime refuses is an error of firm."""
    try:
        return action()
    except ExportError as error:
        raise ModelFileError(str(error)) from error


def open_export(folder: Path, calibration: Path | None = None) -> Detector:
    """The detector that `firm export` wrote; `calibration` is another one of the same model."""
    file = calibration or beside(folder)
    runtime = read(lambda: Runtime(folder, calibration=file))
    card: dict[str, Any] = runtime.card
    detector = Detector(from_json(card["recipe"]), ExportedModel(runtime), card["origin"])
    vars(detector)["id"] = card["model"]  # that of the weights, which the engine holds
    detector.calibration = read_calibration(file, model=card["model"])
    detector._calibration_file = named(file)
    return detector
