"""Methods hand the loop its loss: the contrastive one says when it has collapsed, and any other one fits as well."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import contracts
import oracles
from cases import each
from firm.errors import SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.heads import Encoder, Head
from firm.outliers.registry import CutPaste, Rotations
from firm.training.batches import ImageTask
from firm.training.loop import Training
from firm.training.methods import Contrastive, Diagnosis, properties
from firm.training.positives import POSITIVES, collapsed_loss
from firm.training.runs import Run
from firm.types import Batch
from firm.views.registry import VIEWS

GROUP = torch.tensor([0, 0, 1, 2, 1, 3])
SIDE = 16


def as_batch(z, group):
    return Batch(images=z, source=torch.arange(len(group)).repeat(2), group=group.repeat(2))


# --- contrastive ---


@each("positives", POSITIVES)
def test_the_loss_is_that_of_the_networks_output(positives):
    z = torch.randn(12, 4, generator=contracts.generator(), dtype=torch.float64)
    network = nn.Linear(4, 3, dtype=torch.float64)
    loss, outputs = Contrastive(positives, 0.3, "pairwise").loss(network, as_batch(z, GROUP))
    assert torch.equal(outputs, network(z))
    source, group = list(range(6)) * 2, GROUP.repeat(2).tolist()
    assert loss.item() == pytest.approx(oracles.loss(outputs.tolist(), source, group, 0.3, positives, "pairwise"))


def test_the_three_properties_are_the_loops():
    z = torch.randn(12, 5, generator=contracts.generator())
    batch = as_batch(z, GROUP)
    numbers, _ = properties(z, batch.source, batch.group)
    expected = oracles.diagnostics(z.tolist(), batch.source.tolist(), batch.group.tolist())
    assert numbers == pytest.approx(expected, abs=1e-6)
    assert Contrastive().diagnose(z, batch, torch.tensor(1.0)) == Diagnosis(numbers, collapsed=False)


def test_the_properties_of_the_ideal_are_one_each():
    ideal = torch.eye(4)[[0, 0, 1, 2]].repeat(2, 1)
    batch = as_batch(ideal, torch.tensor([0, 0, 1, 2]))
    assert properties(ideal, batch.source, batch.group)[0] == {"compactness": 1, "margin": 1, "outlier_spread": 1}


def test_a_property_without_pairs_is_none():
    z = torch.randn(4, 3)
    inliers, single = as_batch(z, torch.tensor([0, 0])), as_batch(z[:2], torch.tensor([0]))
    numbers, _ = properties(z, inliers.source, inliers.group)
    assert numbers["compactness"] is not None
    assert (numbers["margin"], numbers["outlier_spread"]) == (None, None)
    assert set(properties(z[:2], single.source, single.group)[0].values()) == {None}
    assert not Contrastive().diagnose(z[:2], single, torch.tensor(1.0)).collapsed


@each("layout", ["concat", "pairwise"])
def test_collapse_is_one_direction_or_the_loss_of_one_point(layout):
    method, batch = Contrastive(layout=layout), as_batch(torch.zeros(8, 4), torch.tensor([0, 0, 1, 2]))
    spread = torch.randn(8, 4, generator=contracts.generator())
    assert not method.diagnose(spread, batch, torch.tensor(0.1)).collapsed
    assert method.diagnose(torch.ones(8, 4) + 1e-3 * spread, batch, torch.tensor(0.1)).collapsed
    assert method.diagnose(spread, batch, torch.tensor(collapsed_loss(8, layout))).collapsed


@each("wrong", [{"positives": "both"}, {"temperature": 0.0}, {"layout": "square"}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(SettingError, match=str(next(iter(wrong.values())))):
        Contrastive(**wrong)


# --- baselines: each is one class, and the loop and the run are those of FIRM ---


class RotationPrediction:
    """Which quarter turn is it? Cross-entropy on a head with four outputs."""

    def loss(self, network, batch):
        logits = network(batch.images)
        return F.cross_entropy(logits, batch.group), logits

    def diagnose(self, outputs, batch, loss):
        return Diagnosis({"accuracy": float((outputs.argmax(1) == batch.group).float().mean())})


@dataclass
class Segmentation:
    """Where was the image altered? Its own batches, with the mask of altered pixels, and the loss on them."""

    images: torch.Tensor
    training: Training
    seed: int = 0
    steps_per_epoch: int = 6

    def batch(self, step, device="cpu", *, rank=0, world=1):
        rng = torch.Generator().manual_seed(1000 * self.seed + step)
        made = CutPaste()(self.images, rng=rng)
        return (made.images.to(device) / 255)[rank::world], made.where.to(device)[rank::world]

    def loss(self, network, batch):
        images, altered = batch
        logits = network(images)[:, 0]
        return F.binary_cross_entropy_with_logits(logits, altered.float()), logits

    def diagnose(self, outputs, batch, loss):
        return Diagnosis({"altered": float(batch[1].float().mean())}, collapsed=bool(outputs.amax() == outputs.amin()))


def rotation_run(folder=None):
    images = (torch.linspace(220, 30, SIDE)[:, None] + contracts.images_of(12, 3, SIDE) / 8).to(torch.uint8)
    training = Training(epochs=12, batch=16, lr=0.05, warmup=0.1)
    task = ImageTask(images, Preprocessing(SIDE), Rotations(), VIEWS["simclr"], training, 0)
    network = task.network(Encoder(width=8, stem="3x3/2", head=Head(hidden=(), out=4)))
    return Run(task, RotationPrediction(), network, digest="rotation", folder=folder, log_every=1)


def segmentation_run(folder=None):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1))
    flat = contracts.images_of(8, 3, SIDE) // 8 + torch.arange(8, dtype=torch.uint8).view(-1, 1, 1, 1) * 25
    task = Segmentation(flat, Training(epochs=6, lr=0.1, warmup=0.1))
    return Run(task, task, network, digest="segmentation", folder=folder, log_every=1)


@pytest.mark.parametrize(("make", "number"), [(rotation_run, "accuracy"), (segmentation_run, "altered")])
def test_another_loss_and_head_train_through_the_same_loop_and_resume_to_the_bit(make, number, tmp_path):
    whole = make()
    losses = [float(progress.loss) for progress in whole]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    assert all(math.isfinite(line[number]) and line["collapsed"] is False for line in whole.history.lines)

    first = make(tmp_path)
    for progress in first:
        if progress.step == 7:
            first.save()
            break
    list(resumed := make(tmp_path))
    assert (resumed.resumed_at, resumed.state.step) == (7, whole.state.step)
    for name, value in whole.state.network.state_dict().items():
        assert torch.equal(resumed.state.network.state_dict()[name], value), name
    assert [line["loss"] for line in resumed.history.lines] == losses


def test_a_method_may_say_that_the_network_has_collapsed():
    run = segmentation_run()
    with torch.no_grad():
        run.state.network[3].weight.zero_()
    next(iter(run))
    assert run.collapsed
