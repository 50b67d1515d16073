"""When the training is over: whether patches are compared by what lies before the head of the adaptor, or behind it.

Behind the head good patches lie together and taught defects apart; before it more is left of what was not taught. Which
tells more depends on the product, so both are tried on good images that were spared, as they are and with synthetic
defects: no real defect is seen, and their features are stored already. What is compared near its own place stays before
the head: the mean behind it knows no places, and where a hole is missing it sees nothing but good surface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from firm.adaptor import Adapted, CellLooker
from firm.bank import Bank
from firm.cells import CellTask, Spare
from firm.choosing import WORTH
from firm.encoder import Network
from firm.localiser import Localiser, Seen, kinds_of, remember
from firm.metrics import auroc
from firm.prototype import Prototype
from firm.recipes.recipe import Recipe
from firm.streams import stream
from firm.tiling import Grid
from firm.training import Teaching
from firm.trial import KNOWN
from firm.types import FirmError

BEFORE, BEHIND = "encoder+backbone", "projection+backbone"
THIN = 0.1  # part of the known patches that is remembered
ALTERED = 0.5  # of a cell: that much altered it is defective; of those between this and none nothing is asked


def prefer(
    recipe: Recipe,
    network: Network | Adapted,
    task: Teaching,
    *,
    seed: int,
    on_choice: Callable[[str], None] | None = None,
) -> Recipe:
    """The recipe with its features chosen, where it leaves them open.

    Without spare images, and where places count, they stay as they are. What is compared behind the head must win by as
    much as a further setting of `choosing`.
    """
    if "features" not in recipe.automatic:
        return recipe
    settled = replace(recipe, automatic=())
    if not isinstance(task, CellTask) or task.spare is None or not isinstance(recipe.tiling, Grid):
        return settled
    if recipe.memory.reach >= 0:  # places count
        return settled
    if not isinstance(network, Adapted):
        raise FirmError("features are chosen behind a pretrained backbone; set automatic without features")
    tell = on_choice or (lambda sentence: None)
    look = CellLooker(network, recipe.pretrained, recipe.tiling, tuple({*kinds_of(BEFORE), *kinds_of(BEHIND)}))
    found = _told_apart(settled, look, task, task.spare, seed)
    for features, value in found.items():
        tell(f"tried features {features}: {100 * value:.1f}")
    best = BEHIND if found[BEHIND] >= found[BEFORE] + WORTH else BEFORE
    tell(f"chosen: features {best}: {100 * found[best]:.1f}")
    return replace(settled, features=best)


def _told_apart(recipe: Recipe, look: CellLooker, task: CellTask, spare: Spare, seed: int) -> dict[str, float]:
    """For both, how well defects on the spare images are told from good ones."""
    count = len(spare.foreground)
    learnt = (~torch.isin(torch.arange(count), spare.images)).nonzero().squeeze(1)
    known = learnt[torch.randperm(len(learnt), generator=stream(seed, "preferring"))[:KNOWN]]
    bad = torch.isin(torch.arange(len(spare.altered)) % count, spare.images).nonzero().squeeze(1)
    seen = look.kinds_from(torch.cat([task.good.features[spare.images], task.outliers.features[bad]]))
    whose = torch.cat([spare.images, bad % count])
    altered = torch.cat([torch.zeros(len(spare.images), *spare.altered.shape[1:]), spare.altered[bad]])
    hidden = None if spare.hidden is None else spare.hidden[whose]
    remembered = _remembered(recipe, look.kinds_from(task.good.features[known]), seed)
    nowhere = torch.zeros(altered.shape[1:])  # places do not count here
    found = {}
    for features in (BEFORE, BEHIND):
        localiser = Localiser(look.grid, {kind: remembered[kind] for kind in kinds_of(features)}, nowhere)
        cells = localiser.cells(seen, spare.foreground[whose], hidden)
        found[features] = _judged(localiser.scores(cells), cells, altered, len(spare.images))
    return found


def _remembered(recipe: Recipe, known: Seen, seed: int) -> dict[str, Bank | Prototype]:
    """Banks of a few good images: as the detector's will be, but small."""
    memory = replace(recipe.memory, keep=THIN, choose="random")
    return {
        kind: remember(kind, features, memory, rng=stream(seed, "preferring", kind)) for kind, features in known.items()
    }


def _judged(
    scores: Float[Tensor, " n"], cells: Float[Tensor, "n r c"], altered: Float[Tensor, "n r c"], good: int
) -> float:
    """The mean of the AUROC of images, the first of which are good, and of cells; of images if no cell tells."""
    of_images = auroc(scores, torch.arange(len(scores)) >= good)
    if not bool((altered >= ALTERED).any()):
        return of_images
    sure = (altered == 0) | (altered >= ALTERED)
    of_cells = auroc(cells[sure], altered[sure] > 0)
    return (of_images + of_cells) / 2
