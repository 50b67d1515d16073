"""Large images through a backbone in tiles: the same features, wherever a border falls."""

import pytest
import torch

import contracts
from firm.networks.adaptor import Pretrained
from firm.networks.weights import load_backbone
from firm.scoring import patch_features
from firm.scoring.patch_features import cell_features
from firm.scoring.patch_grid import Grid
from random_networks import random_backbone, trunk

GRID = Grid(size=8, stride=8)


def noise(height, width, channels=3):
    return torch.randint(256, (1, channels, height, width), dtype=torch.uint8, generator=contracts.generator(5))


@pytest.mark.parametrize("name", ["wavelets", "efficientnet-lite0", "efficientnet-lite1", "resnet18"])
@pytest.mark.parametrize("margin", [0, 32])
def test_tiles_leave_no_seam(name, margin, monkeypatch):
    backbone = load_backbone(name, deepest=4) if name == "wavelets" else random_backbone(name, deepest=4)
    settings, images = Pretrained(name=name, margin=margin), noise(456, 904)
    whole = cell_features(backbone, settings, GRID, images)
    monkeypatch.setattr(patch_features, "TILED", 10_000)
    for tile in (128, 320):
        monkeypatch.setattr(patch_features, "TILE", tile)
        tiled = cell_features(backbone, settings, GRID, images)
        torch.testing.assert_close(tiled, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))


def test_what_a_feature_depends_on_is_within_its_reach():
    backbone = random_backbone("efficientnet-lite0", deepest=4)
    reach, images = backbone.trunk.reach, torch.rand(1, 3, 64, 1024, generator=contracts.generator(5))
    changed = images.clone()
    changed[..., 512 + 16 :] = 0
    before, after = (backbone.stages(each)[3] for each in (images, changed))
    differing = (before != after).any(1)[0].any(0).nonzero()[0]
    assert 16 * int(differing) >= 512 - reach
    assert reach < 200


def test_attention_sees_all_of_an_image():
    assert trunk("resnet18").reach
    assert patch_features.TILE % 32 == 0
