"""An experiment: one recipe on one data set with one seed, and how it is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from firm.recipes.recipe import Recipe, digest


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training and how it is measured; both are part of its name, so that a result is found by what made it."""

    data: str
    recipe: Recipe
    seed: int
    probes: int = 10  # evenly spaced over the training, the last one at its end
    test_images: int = 0  # of a balanced subset; 0 is the whole test set

    @property
    def name(self) -> str:
        further = {"data": self.data, "seed": self.seed, "probes": self.probes, "test_images": self.test_images}
        readable = re.sub(r"[^\w.]+", "-", self.data).strip("-.")
        return f"{readable}-{self.recipe.positives}-{self.seed}-{digest(self.recipe, **further)}"
