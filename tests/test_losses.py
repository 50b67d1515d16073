"""The public losses: against loops over the equations, in a plain torch loop, and with what users hand them."""

import doctest
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import contracts
import firm
import oracles
from cases import each
from firm import losses
from firm.errors import SettingError
from firm.losses import FirmLoss, NTXentLoss, RotSupConLoss, SupConLoss

KINDS = {"firm": FirmLoss, "ntxent": NTXentLoss, "supcon": SupConLoss, "rot-supcon": RotSupConLoss}
SOURCE = torch.tensor([0, 1, 2, 3, 4, 5] * 2)
GROUP = torch.tensor([0, 0, 1, 2, 1, 3] * 2)


def projections(views=12, dim=4, seed=0, dtype=torch.float64):
    return torch.randn(views, dim, generator=contracts.generator(seed), dtype=dtype)


@given(
    group=st.lists(st.integers(-2, 3), min_size=1, max_size=6),
    kind=st.sampled_from(sorted(KINDS)),
    layout=st.sampled_from(["concat", "pairwise"]),
    seed=st.integers(0, 2**32),
    tau=st.floats(0.05, 2),
)
def test_the_loss_is_the_loops_over_its_equation(group, kind, layout, seed, tau):
    z = projections(2 * len(group), seed=seed)
    source, both = [7 * i - 9 for i in range(len(group))] * 2, group * 2
    found = KINDS[kind](tau, layout=layout)(z, source=torch.tensor(source), group=torch.tensor(both))
    assert found.item() == pytest.approx(oracles.loss(z.tolist(), source, both, tau, kind, layout), abs=1e-9)


def test_a_plain_torch_loop_learns_the_three_properties():
    """Normal images come together, outliers leave them and each other; nothing else of firm takes part."""
    torch.manual_seed(0)
    normal, outliers = torch.randn(8, 8) + 2, torch.randn(8, 8)
    source, group = torch.arange(16).repeat(2), torch.tensor([0] * 8 + [1] * 8).repeat(2)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    criterion = FirmLoss(temperature=0.2)
    values = []
    for _ in range(60):
        views = torch.cat([normal, outliers]).repeat(2, 1)
        loss = criterion(network(views + 0.05 * torch.randn_like(views)), source=source, group=group)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.9 * values[0]
    found = oracles.diagnostics(network(torch.cat([normal, outliers])).tolist(), list(range(16)), [0] * 8 + [1] * 8)
    assert found["compactness"] > 0.9
    assert found["margin"] > 0.8
    assert found["outlier_spread"] > 0.5


@each(
    "labels, dtype",
    [
        (torch.uint8, torch.float16),
        (torch.int16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.int64, torch.float64),
    ],
)
def test_any_dtype_gives_the_loss_of_its_numbers(labels, dtype):
    z = projections(dtype=dtype).requires_grad_()
    loss = FirmLoss()(z, source=SOURCE.to(labels), group=GROUP.to(labels))
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert z.grad.dtype == dtype
    expected = oracles.loss(z.tolist(), SOURCE.tolist(), GROUP.tolist(), 0.2, "firm")
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_groups_may_be_true_for_outliers():
    z = projections()
    found = FirmLoss()(z, source=SOURCE, group=GROUP > 0)
    assert torch.equal(found, FirmLoss()(z, source=SOURCE, group=GROUP))


def test_autocast_does_not_reach_the_loss():
    z = projections(dtype=torch.float32)
    expected = FirmLoss(0.01)(z, source=SOURCE, group=GROUP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(FirmLoss(0.01)(z, source=SOURCE, group=GROUP), expected)


def test_labels_follow_z_to_its_device():
    with torch.device("meta"):
        z = torch.empty(12, 4)
    assert FirmLoss()(z, source=SOURCE, group=GROUP).device.type == "meta"


@each(
    "culprit, wrong",
    [
        ("z", {"z": torch.zeros(12)}),
        ("z", {"z": torch.zeros(12, 4, dtype=torch.long)}),
        ("z", {"z": torch.zeros(1, 4), "source": SOURCE[:1], "group": GROUP[:1]}),
        ("source", {"source": SOURCE[:6]}),
        ("source", {"source": SOURCE[:, None]}),
        ("group", {"group": GROUP.float()}),
        ("group", {"group": GROUP[:11]}),
    ],
)
def test_a_batch_that_cannot_be_names_the_culprit(culprit, wrong):
    given = {"z": projections(), "source": SOURCE, "group": GROUP} | wrong
    with pytest.raises(SettingError, match=f"^{culprit} is "):
        FirmLoss()(given.pop("z"), **given)


@each("wrong", [{"temperature": 0.0}, {"temperature": math.nan}, {"layout": "square"}])
def test_impossible_settings_name_the_culprit(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        FirmLoss(**wrong)


def test_pairwise_needs_two_views_of_every_image():
    with pytest.raises(SettingError, match="11 views"):
        FirmLoss(layout="pairwise")(projections(11), source=SOURCE[:11], group=GROUP[:11])


def test_a_loss_has_no_state_and_says_what_it_is():
    assert FirmLoss(0.3).state_dict() == {}
    assert repr(FirmLoss(0.3)) == "FirmLoss(temperature=0.3, layout='concat')"


def test_the_example_of_the_documentation_runs():
    assert doctest.testmod(losses) == doctest.TestResults(failed=0, attempted=5)


def test_the_losses_are_public_names_that_load_nothing_of_detectors():
    assert firm.FirmLoss is FirmLoss
    code = "import sys; from firm import FirmLoss; assert not {m for m in sys.modules if m.startswith('firm.detector')}"
    subprocess.run([sys.executable, "-c", code], check=True)
