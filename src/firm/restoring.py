"""What a detector is made of: the network a run has trained, or all of it built again from saved tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from firm.adaptor import Adapted, Adaptor
from firm.backbones import rebuild
from firm.cells import CellTask
from firm.encoder import Network, arranged
from firm.localiser import Localiser, kinds_of
from firm.recipes.recipe import Recipe
from firm.runs import Run
from firm.tiling import Grid


def network_of(run: Run) -> Network | Adapted:
    """What a run has trained, together with what it was trained behind."""
    trained = run.state.network
    if isinstance(run.task, CellTask):
        assert isinstance(trained, Adaptor)
        return Adapted(run.task.backbone, trained)
    assert isinstance(trained, Network)
    return trained


def network_from(recipe: Recipe, origin: dict[str, Any], tensors: dict[str, Tensor]) -> Network | Adapted:
    """The network a file holds; a pretrained backbone is in it whole, so nothing needs to be installed."""
    if not recipe.pretrained.name:
        network = Network(recipe.encoder)
        network.load_state_dict(tensors)
        return arranged(network)
    backbone = rebuild(origin["backbone"], under("backbone.", tensors))
    parts = under("adaptor.", tensors)
    adaptor = Adaptor(len(parts["mean"]), recipe.pretrained, recipe.encoder.head)
    adaptor.load_state_dict(parts)
    return Adapted(backbone, adaptor)


def localiser_from(recipe: Recipe, tensors: dict[str, Tensor]) -> Localiser | None:
    """None for a recipe that looks at whole images."""
    if not isinstance(recipe.tiling, Grid):
        return None
    return Localiser.from_tensors(tensors, recipe.tiling, recipe.memory, kinds_of(recipe.features))


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
