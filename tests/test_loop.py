"""The schedules against their formulas and torch's own, and a training that learns, repeats and resumes to the bit."""

import math

import pytest
import torch

import contracts
from cases import each
from firm.errors import ModelFileError, SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.heads import Encoder, Head
from firm.outliers.registry import Rotations
from firm.training.batches import ImageTask
from firm.training.loop import (
    SCHEDULES,
    Training,
    learning_rate,
    set_schedule,
    start,
    train,
)
from firm.training.methods import Contrastive
from firm.training.runs import load_checkpoint, save_checkpoint
from firm.views.registry import SimCLR

FIRM = Contrastive()
TINY = Encoder(width=8, stem="3x3/2", head=Head(hidden=(32,), out=16))


def gradients_of_grey(n, side=16):
    """Images that are bright on top, each with noise of its own: a rotation is plain to see."""
    ramp = torch.linspace(220, 30, side)[None, None, :, None].expand(n, 3, side, side)
    noise = torch.randint(-25, 26, (n, 3, side, side), generator=contracts.generator())
    return (ramp + noise).clamp(0, 255).to(torch.uint8)


def task_with(*, seed=0, **training):
    return ImageTask(
        images=gradients_of_grey(16),
        preprocessing=Preprocessing(16),
        outliers=Rotations(),
        views=SimCLR(),
        training=Training(**({"epochs": 2, "batch": 16, "lr": 0.05, "warmup": 0.1} | training)),
        seed=seed,
    )


def fresh(task):
    return start(task.network(TINY), task.training)


def steps_of(task):
    return task.steps_per_epoch * task.training.epochs


def trained(state, task, method=FIRM):
    return list(train(state, task, method))


def same_state(one, other):
    """Weights, running statistics, momenta and step, to the bit."""
    here, there = one.network.state_dict(), other.network.state_dict()
    momenta = [
        [state.optimizer.state[parameter]["momentum_buffer"] for parameter in state.network.parameters()]
        for state in (one, other)
    ]
    return (
        one.step == other.step
        and all(torch.equal(here[name], there[name]) for name in here)
        and all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
    )


# --- schedules ---


@each("steps, warmup", [(1000, 0.01), (500, 0.2), (30, 0.0), (7, 0.5), (1, 0.01)])
def test_cosine_is_a_linear_rise_and_half_a_cosine(steps, warmup):
    training = Training(lr=0.01, warmup=warmup)
    warm = round(warmup * steps)
    for step in range(steps):
        lr, momentum = learning_rate(training, step, steps)
        assert momentum == 0.9
        if step < warm:
            assert lr == pytest.approx(0.01 * (step + 1) / warm)
        else:
            part = (step - warm) / (steps - warm)
            assert lr == pytest.approx(0.005 * (1 + math.cos(math.pi * part)))
        assert 0 < lr <= 0.01 + 1e-12


def test_the_paper_warms_up_for_20_of_2000_epochs_and_ends_near_zero():
    training, steps = Training(), 2000 * 625
    assert learning_rate(training, 20 * 625 - 1, steps)[0] == pytest.approx(0.01)
    assert learning_rate(training, 10 * 625 - 1, steps)[0] == pytest.approx(0.005)
    assert learning_rate(training, 1010 * 625, steps)[0] == pytest.approx(0.005)
    assert learning_rate(training, steps - 1, steps)[0] < 1e-10


@each("steps, warmup", [(1000, 0.01), (400, 0.3), (50, 0.01), (3, 0.5)])
def test_one_cycle_is_torchs_over_a_full_run(steps, warmup):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps, pct_start=warmup)
    training = Training(schedule="one-cycle", warmup=warmup)
    for step in range(steps):
        (group,) = optimizer.param_groups
        lr, momentum = learning_rate(training, step, steps)
        assert lr == pytest.approx(group["lr"], rel=1e-9, abs=1e-15)
        assert momentum == pytest.approx(group["momentum"], rel=1e-9)
        optimizer.step()
        if step < steps - 1:
            schedule.step()


@each("schedule", SCHEDULES)
def test_the_schedule_reaches_the_optimizer(schedule):
    task = task_with(schedule=schedule)
    state = fresh(task)
    returned = set_schedule(state.optimizer, task.training, 3, steps_of(task))
    expected = learning_rate(task.training, 3, steps_of(task))
    assert returned == expected[0]
    assert [(group["lr"], group["momentum"]) for group in state.optimizer.param_groups] == [expected]


def test_weight_decay_is_on_every_parameter():
    state = fresh(task_with(weight_decay=0.25))
    (group,) = state.optimizer.param_groups
    assert group["weight_decay"] == 0.25
    assert len(group["params"]) == len(list(state.network.parameters()))
    assert not group["nesterov"]


# --- the loop ---


@pytest.mark.parametrize("positives", ["firm", "ntxent"])
def test_a_short_training_learns(positives):
    task = task_with(epochs=10)
    losses = [float(progress.loss) for progress in train(fresh(task), task, Contrastive(positives))]
    assert len(losses) == steps_of(task) == 40
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])


def test_progress_tells_what_happened():
    task = task_with()
    state = fresh(task)
    events = trained(state, task)
    assert [event.step for event in events] == list(range(1, 9))
    assert {event.steps for event in events} == {8}
    assert [event.epoch for event in events] == [step / 4 for step in range(1, 9)]
    assert [event.lr for event in events] == [learning_rate(task.training, step, 8)[0] for step in range(8)]
    assert not events[0].loss.requires_grad
    assert -1 <= events[0].diagnose().numbers["compactness"] <= 1
    assert state.step == 8
    assert trained(state, task) == []  # nothing is missing


def test_a_step_is_sgd_on_the_loss_of_the_batch():
    """One step by hand: gradient plus decay, no momentum yet, times the learning rate."""
    from firm.training.positives import POSITIVES, contrastive_loss

    task = task_with(epochs=1)
    by_hand, state = fresh(task), fresh(task)
    batch = task.batch(0)
    by_hand.network.train()
    loss = contrastive_loss(by_hand.network(batch.images), POSITIVES["firm"](batch.source, batch.group), 0.2)
    loss.backward()
    progress = next(iter(train(state, task, FIRM)))
    assert torch.equal(progress.loss, loss.detach())
    lr = learning_rate(task.training, 0, steps_of(task))[0]
    for expected, found in zip(by_hand.network.parameters(), state.network.parameters(), strict=True):
        moved = expected.detach() - lr * (expected.grad + 3e-4 * expected.detach())
        torch.testing.assert_close(found.detach(), moved)


def test_training_goes_on_after_an_evaluation_in_between():
    task = task_with()
    disturbed, calm = fresh(task), fresh(task)
    for _ in train(disturbed, task, FIRM):
        disturbed.network.eval()
        torch.rand(3)
    for _ in train(calm, task, FIRM):
        pass
    assert same_state(disturbed, calm)


def test_one_seed_gives_one_network():
    task = task_with()
    states = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        states.append(fresh(task))
        trained(states[-1], task)
    assert same_state(*states)
    other = task_with(seed=1)
    different = fresh(other)
    trained(different, other)
    assert not same_state(states[0], different)


def test_bfloat16_trains_and_keeps_its_weights_in_float32():
    task = task_with(epochs=1, precision="bfloat16")
    state = fresh(task)
    losses = [float(progress.loss) for progress in train(state, task, FIRM)]
    assert all(math.isfinite(loss) for loss in losses)
    assert {parameter.dtype for parameter in state.network.parameters()} == {torch.float32}
    exact = task_with(epochs=1)
    first = float(next(iter(train(fresh(exact), exact, FIRM))).loss)
    assert losses[0] == pytest.approx(first, rel=0.05)
    assert losses[0] != first


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_epochs_leave_the_network_as_it_was_initialised(tmp_path, schedule):
    task = task_with(epochs=0, schedule=schedule)
    state, untouched = fresh(task), fresh(task)
    assert steps_of(task) == 0
    assert trained(state, task) == []
    assert state.step == 0
    for name, value in untouched.network.state_dict().items():
        assert torch.equal(state.network.state_dict()[name], value)
    save_checkpoint(tmp_path / "c.safetensors", state, "task")
    load_checkpoint(tmp_path / "c.safetensors", untouched, "task")
    assert untouched.step == 0


# --- checkpoints ---


@pytest.mark.parametrize(
    ("schedule", "precision", "stop"),
    [("cosine", "float32", 1), ("one-cycle", "float32", 5), ("cosine", "bfloat16", 2)],
)
def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path, schedule, precision, stop):
    task = task_with(schedule=schedule, precision=precision)
    whole = fresh(task)
    trained(whole, task)

    first = fresh(task)
    for progress in train(first, task, FIRM):
        if progress.step == stop:
            save_checkpoint(tmp_path / "c.safetensors", first, "task")
            break
    resumed = fresh(task)
    load_checkpoint(tmp_path / "c.safetensors", resumed, "task")
    assert same_state(first, resumed)
    trained(resumed, task)
    assert same_state(whole, resumed)


def test_a_checkpoint_before_the_first_step_is_a_fresh_state(tmp_path):
    task = task_with(epochs=1)
    state, resumed = fresh(task), fresh(task)
    save_checkpoint(tmp_path / "c.safetensors", state, "task")
    load_checkpoint(tmp_path / "c.safetensors", resumed, "task")
    for one in (state, resumed):
        trained(one, task)
    assert same_state(state, resumed)


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    task = task_with(epochs=1)
    state = fresh(task)
    save_checkpoint(tmp_path / "c.safetensors", state, "one task")
    before = {name: value.clone() for name, value in state.network.state_dict().items()}
    with pytest.raises(ModelFileError, match=r"c\.safetensors"):
        load_checkpoint(tmp_path / "c.safetensors", state, "another task")
    assert all(torch.equal(before[name], value) for name, value in state.network.state_dict().items())


@each(
    "wrong",
    [
        {"schedule": "step"},
        {"precision": "float16"},
        {"epochs": -1},
        {"batch": 1},
        {"warmup": 1.0},
        {"reuse": 0},
        {"lr": 0.0},
        {"momentum": 1.0},
    ],
)
def test_impossible_settings_are_named(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Training(**wrong)
