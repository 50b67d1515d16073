"""The graph of an export, still in torch, scores and locates as the model it is made of; what cannot be is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import each
from exports import BAD, GOOD, RECIPES, SIDE, fitted
from firm.deploy.export import Target, card_of
from firm.deploy.firm_runtime import Runtime
from firm.deploy.graph import Resize, graph_of, takes_any_size
from firm.detector.detector import Detector
from firm.errors import SettingError
from firm.images.preprocess import resize
from firm.recipes.recipe import change

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # so few good images can guarantee little


@torch.no_grad()
def by_graph(detector: Detector, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores and maps in the frame of the images, by the graph and the steps around it."""
    graph = graph_of(detector.model, any_size=takes_any_size(detector.model))
    runtime = Runtime.__new__(Runtime)
    runtime.card, runtime.limits = card_of(detector, Target(), graph), vars(detector.decides)

    def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = graph(*(torch.from_numpy(feeds[name]) for name in graph.inputs))
        found = found if isinstance(found, tuple) else (found,)
        return {name: value.numpy() for name, value in zip(graph.outputs, found, strict=True)}

    runtime.graph = run
    scores, maps = runtime.run(resize(images, runtime.card["file_side"]).numpy())
    return torch.from_numpy(scores), None if maps is None else torch.from_numpy(maps)


@each("name", RECIPES)
def test_the_graph_scores_and_locates_as_the_model(name: str) -> None:
    detector = fitted(name)
    images = resize(torch.cat([GOOD[:2], BAD[:3]]), detector.preprocessing.file_side)
    expected = detector.locate(images)
    scores, maps = by_graph(detector, images)
    assert torch.allclose(scores, expected.scores, rtol=1e-3, atol=1e-4), name
    assert (maps is None) == (not detector.model.has_maps)
    if maps is not None:
        assert torch.allclose(maps, expected.maps, rtol=1e-3, atol=1e-3), name


@each("height, width", [(64, 64), (97, 50), (30, 64), (200, 131)])
def test_the_graph_resizes_as_firm_does_up_to_rounding(height: int, width: int) -> None:
    images = torch.randint(0, 256, (2, 3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    apart = (Resize(64)(images).float() - resize(images, 64).float()).abs()
    assert apart.max() <= (0 if (height, width) == (64, 64) else 1)
    assert (apart > 0).float().mean() < 1e-3


@each(
    "changes, named",
    [
        ({"memory.reweight": 3, "memory.standardise": False, "features": "backbone"}, "reweight"),
        ({"conditioning.align": True, "conditioning.foreground.method": "otsu"}, "align"),
    ],
)
def test_what_cannot_be_exported_is_named(changes: dict[str, object], named: str) -> None:
    ignored = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    ignored[:9] = True
    recipe = change(RECIPES["within 2 cells"], changes)
    detector = Detector.fit(GOOD, recipe=recipe, calibration="split", ignored=ignored if named == "align" else None)
    with pytest.raises(SettingError, match=named):
        graph_of(detector.model, any_size=False)


def test_crops_are_refused() -> None:
    recipe = change(RECIPES["whole images"], {"score": "s_ens"})
    with pytest.raises(SettingError, match=r"score\.crops"):
        graph_of(Detector.fit(GOOD, recipe=recipe, calibration="split").model, any_size=False)
