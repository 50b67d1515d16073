"""The steps of sampling against diffusers' schedulers and naive sums; a training that resumes to the bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="needs the extra `diffusion`")

from firm.diffusion.model import SIZES, TIMES, Denoiser, DiffusionModel, alpha_bar, build, sized, to_model
from firm.diffusion.sample import CARD, Sampling, log_variance, reverse_step, sample, times, write_samples
from firm.diffusion.train import (
    LEARNING,
    Denoising,
    DenoisingTask,
    Learning,
    NoisyBatch,
    cost_of,
    learn_images,
    variance_bound,
)
from firm.errors import DataError, ModelFileError, SettingError
from firm.outliers.sia import MODELS
from firm.training.runs import CHECKPOINT

TINY = Denoiser(side=8, channels=(32, 32), attention=(4,), classes=("screw",))
TWO = Denoiser(side=8, channels=(32, 32), attention=(4,), classes=("screw", "nut"), learned_sigma=True)
FEW = Learning(steps=6, batch=4)


def good_images(n=10, side=8):
    rng = torch.Generator().manual_seed(0)
    return torch.randint(90, 140, (n, 3, side, side), dtype=torch.uint8, generator=rng)


def learnt(settings=TINY, learning=FEW, seed=0, **how):
    images = good_images()
    labels = torch.arange(len(images)) % len(settings.classes)
    return learn_images(images, labels, settings, learning, seed=seed, **how)


def weights_of(model):
    return model.network.state_dict()


def same(one, other):
    return all(torch.equal(value, weights_of(other)[name]) for name, value in weights_of(one).items())


@pytest.fixture(scope="module")
def model():
    return learnt()


# --- the steps of sampling ---


def test_the_noise_levels_are_those_of_ddpm():
    assert alpha_bar().shape == (1000,)
    assert float(alpha_bar()[0]) == pytest.approx(0.9999)
    assert float(alpha_bar()[-1]) == pytest.approx(4.0358e-5, rel=1e-3)


def drawn(seed, channels=3):
    return torch.randn(4, channels, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("steps", "variance"), [(20, "fixed_small"), (20, "learned_range"), (50, "fixed_small")])
def test_at_strength_0_a_step_is_that_of_diffusers_ddpm(steps, variance):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(beta_schedule="linear", variance_type=variance, timestep_spacing="leading")
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == times(steps)
    for at in times(steps):
        noisy, output, noise = drawn(at), drawn(at + 1, 6 if variance == "learned_range" else 3), drawn(7)
        expected = scheduler.step(output, at, noisy, generator=torch.Generator().manual_seed(7)).prev_sample
        found = reverse_step(noisy, output, noise, time=at, stride=TIMES // steps, strength=0.0, ddim=False)
        assert torch.equal(found, expected)


def test_at_strength_0_a_step_is_that_of_diffusers_ddim():
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(beta_schedule="linear", timestep_spacing="leading")
    scheduler.set_timesteps(20)
    for at in times(20):
        noisy, output = drawn(at), drawn(at + 1)
        expected = scheduler.step(output, at, noisy).prev_sample
        found = reverse_step(noisy, output, drawn(3), time=at, stride=50, strength=0.0, ddim=True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("ddim", "grows"), [(False, lambda s: 1 + s), (True, lambda s: s)])
def test_the_added_variance_grows_with_the_strength(ddim, grows):
    """Over many draws of the noise, and by the algebra: (1 + s) of the ancestral variance, s of it for DDIM."""
    bars = alpha_bar().double()
    noise = torch.randn(20000, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    noisy, output = drawn(1)[:1, :, :2, :2].expand_as(noise), drawn(2)[:1, :, :2, :2].expand_as(noise)
    for at in (950, 500, 50):
        variance = float((1 - bars[at - 50]) / (1 - bars[at]) * (1 - bars[at] / bars[at - 50]))
        quiet = reverse_step(noisy, output, 0 * noise, time=at, stride=50, strength=0.3, ddim=ddim)
        for strength in (0.0, 0.1, 0.4, 1.0):
            found = reverse_step(noisy, output, noise, time=at, stride=50, strength=strength, ddim=ddim) - quiet
            assert float(found.double().var()) == pytest.approx(grows(strength) * variance, rel=0.01, abs=1e-12)
    last = [reverse_step(noisy, output, noise, time=0, stride=50, strength=s, ddim=ddim) for s in (0.0, 1.0)]
    assert torch.equal(*last)


def test_the_learnt_variance_lies_between_its_bounds():
    least, most = torch.tensor(0.01), torch.tensor(0.02)
    found = log_variance(torch.tensor([-1.0, 0.0, 1.0]), least, most).exp()
    torch.testing.assert_close(found, torch.tensor([0.01, math.sqrt(0.0002), 0.02]))


class Exact(torch.nn.Module):
    """The best denoiser there is of images whose values are Gaussian about a grey: it needs no training."""

    def __init__(self, grey, deviation):
        super().__init__()
        self.grey, self.variance = torch.nn.Parameter(torch.tensor(grey)), deviation**2

    def forward(self, noisy, times, class_labels, return_dict):
        left = alpha_bar()[times][:, None, None, None]
        return ((1 - left).sqrt() * (noisy - left.sqrt() * self.grey) / (left * self.variance + 1 - left),)


def variance_after(strength, deviation, ddim):
    """Of a sampled value, step by step: each step scales it and adds a Gaussian of its own."""
    bars, variance = alpha_bar().double().tolist(), 1.0
    for at in times(20):
        now, before = bars[at], bars[at - 50] if at else 1.0
        alpha, seen = now / before, now * deviation**2 + 1 - now
        noise = math.sqrt(1 - now) / seen  # d noise / d x
        image = (1 - math.sqrt(1 - now) * noise) / math.sqrt(now)
        sigma2 = (1 - before) / (1 - now) * (1 - alpha)
        ancestral = math.sqrt(before) * (1 - alpha) / (1 - now) * image + math.sqrt(alpha) * (1 - before) / (1 - now)
        scale = math.sqrt(before) * image + math.sqrt(1 - before) * noise if ddim else ancestral
        variance = scale**2 * variance + (strength if ddim else 1 + strength) * sigma2 * (at > 0)
    return variance


@pytest.mark.parametrize("ddim", [False, True])
def test_samples_of_the_best_denoiser_spread_with_the_strength(ddim):
    """All of the sampling against its algebra. White noise on good images would also raise their deviation."""
    model = DiffusionModel(Exact(0.1, 0.15), Denoiser(side=64), {})
    found = []
    for strength in (0.0, 0.1, 0.2, 0.4):
        how = Sampling(strength=(strength, strength), batch=6, method="ddim" if ddim else "ddpm")
        (_, images), *_ = sample(model, 6, how, seed=0)
        values = images.double() / 127.5 - 1
        assert float(values.mean()) == pytest.approx(0.1, abs=0.01)
        found.append(float(values.std()))
        assert found[-1] == pytest.approx(math.sqrt(variance_after(strength, 0.15, ddim)), rel=0.03)
    assert found == sorted(found)
    assert found[0] < 0.15  # that of good images: so few steps narrow it
    assert found[-1] > 1.1 * found[0]


def test_samples_depend_on_seed_class_and_number_only(model):
    few = Sampling(steps=3, batch=4)
    every = dict(sample(model, 10, few, seed=0))
    assert [len(images) for images in every.values()] == [4, 4, 2]
    for numbers, images in sample(model, 6, few, seed=0):
        assert torch.equal(images, every[range(numbers.start, min(numbers.start + 4, 10))][: len(images)])
    (only,) = sample(model, 8, few, seed=0, skip=lambda numbers: numbers.start == 0)
    assert torch.equal(only[1], every[range(4, 8)])
    assert not torch.equal(next(sample(model, 4, few, seed=1))[1], every[range(0, 4)])
    stronger = Sampling(steps=3, batch=4, strength=(3.0, 3.0))
    assert not torch.equal(next(sample(model, 4, stronger, seed=0))[1], every[range(0, 4)])


def test_samples_fill_a_folder_in_the_layout_of_realnet(tmp_path):
    model, few = learnt(TWO), Sampling(steps=2, batch=4)
    places = write_samples(model, tmp_path / "sdas", 6, few, seed=0)
    assert [place.relative_to(tmp_path).as_posix() for place in places] == ["sdas/screw", "sdas/nut"]
    files = sorted(places[1].iterdir())
    assert [file.name for file in files] == [f"{number:05d}.jpg" for number in range(6)]
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    files[1].unlink()  # as if it had been interrupted
    counted = []
    write_samples(model, tmp_path / "sdas", 7, few, seed=0, classes=("nut",), on_images=counted.append)
    assert sum(counted) == 7
    assert files[1].read_bytes() == before[files[1]][0]
    assert files[5].read_bytes() == before[files[5]][0]
    for other in ({"seed": 1}, {"sampling": Sampling(steps=3, batch=4)}):
        given = {"seed": 0, "sampling": few} | other
        with pytest.raises(SettingError, match="sdas has images of another model or other settings"):
            write_samples(model, tmp_path / "sdas", 6, given["sampling"], seed=given["seed"])
    for damaged in (b"{", b"\xff", 200_000 * b"["):
        (tmp_path / "sdas" / CARD).write_bytes(damaged)
        with pytest.raises(DataError, match=CARD):
            write_samples(model, tmp_path / "sdas", 6, few, seed=0)
    with pytest.raises(SettingError, match="no class 'bolt'"):
        write_samples(model, tmp_path / "other", 6, few, seed=0, classes=("bolt",))


# --- training ---


def test_a_batch_is_a_pure_function_of_seed_and_step():
    images = good_images(7)
    task = DenoisingTask(images, torch.arange(7), Learning(batch=4), 0)
    seen = torch.cat([task.batch(step).labels for step in range(7)])
    assert [sorted(part.tolist()) for part in seen.split(7)] == [list(range(7))] * 4  # passes over all images
    one = task.batch(5)
    left = alpha_bar()[one.times][:, None, None, None]
    assert torch.equal(one.clean, images[one.labels].float() / 127.5 - 1)
    torch.testing.assert_close(one.noisy, left.sqrt() * one.clean + (1 - left).sqrt() * one.noise)
    parts = [task.batch(5, rank=rank, world=2) for rank in (0, 1)]
    assert torch.equal(torch.stack([part.noisy for part in parts], dim=1).flatten(0, 1), one.noisy)
    assert not torch.equal(
        task.batch(5).noise, DenoisingTask(images, torch.arange(7), Learning(batch=4), 1).batch(5).noise
    )


def test_the_bound_is_the_divergence_of_two_gaussians():
    """One number per image, summed pixel by pixel in Python."""
    levels = alpha_bar().double().tolist()
    rng = torch.Generator().manual_seed(0)
    clean, noise, guess, learnt = (torch.randn(3, 3, 2, 2, generator=rng) for _ in range(4))
    drawn = torch.tensor([0, 1, 700])
    clean = clean.clamp(-1, 1).mul(127.5).round() / 127.5
    left = alpha_bar()[drawn][:, None, None, None]
    noisy = left.sqrt() * clean + (1 - left).sqrt() * noise
    found = variance_bound(NoisyBatch(clean, noise, noisy, drawn, drawn), guess, learnt)
    for image, at in enumerate(drawn.tolist()):
        now, before = levels[at], levels[at - 1] if at else 1.0
        beta = 1 - now / before
        posterior = (
            (1 - before) / (1 - now) * beta if at else (1 - levels[0]) / (1 - levels[1]) * (1 - levels[1] / levels[0])
        )
        total = 0.0
        values = (each[image].double().flatten().tolist() for each in (clean, noisy, guess, learnt))
        for x0, xt, eps, v in zip(*values, strict=True):
            variance = math.exp((v + 1) / 2 * math.log(beta) + (1 - v) / 2 * math.log(posterior))
            x0_guess = (xt - math.sqrt(1 - now) * eps) / math.sqrt(now)
            means = [
                math.sqrt(before) * beta / (1 - now) * x + math.sqrt(now / before) * (1 - before) / (1 - now) * xt
                for x in (x0, x0_guess)
            ]
            if at:
                ratio = posterior / variance
                total += 0.5 * (ratio - 1 - math.log(ratio) + (means[0] - means[1]) ** 2 / variance)
            else:
                cdf = [0.5 * math.erfc(-(x0 + side / 255 - means[1]) / math.sqrt(2 * variance)) for side in (-1, 1)]
                low, high = 0.0 if x0 < -0.999 else cdf[0], 1.0 if x0 > 0.999 else cdf[1]
                total -= math.log(max(high - low, 1e-12))
        assert float(found[image]) == pytest.approx(total / 12 / math.log(2), rel=2e-3)


def test_a_denoiser_learns():
    """Batches it has not seen: the noise is told much better than by the network it started as."""
    images = good_images(4).fill_(200)
    images[:, :, :4] = 40
    learning = Learning(steps=120, batch=8, lr=2e-3, warmup=5)
    labels = torch.zeros(4).long()
    model = learn_images(images, labels, TINY, learning, seed=0)
    task = DenoisingTask(images, labels, learning, 1)
    losses = {}
    with torch.no_grad():
        for name, network in (("before", build(TINY, seed=0)), ("after", model.network)):
            losses[name] = sum(float(Denoising().loss(network, task.batch(step))[0]) for step in range(8)) / 8
    assert losses["after"] < 0.4 * losses["before"]


def test_the_average_follows_the_weights_and_gradients_are_summed(tmp_path):
    """Two batches of four summed are one of eight, as far as the numbers go."""
    images, labels = good_images(8), torch.zeros(8).long()
    quick = {"lr": 1e-3, "warmup": 0, "average": 0.0}
    whole = DenoisingTask(images, labels, Learning(batch=8, **quick), 0)
    halves = [whole.batch(0, rank=rank, world=2) for rank in (0, 1)]

    def stepped(batches, learning):
        network = build(TINY, seed=0)
        optimizer = learning.optimizer(network)
        for turn, batch in enumerate(batches):
            learning.set_rate(optimizer, turn, len(batches))
            optimizer.zero_grad()
            Denoising().loss(network, batch)[0].backward()
            optimizer.step()
        return network, optimizer

    one, _ = stepped([whole.batch(0)], whole.training)
    two, optimizer = stepped(halves, Learning(batch=4, accumulate=2, **quick))
    start = build(TINY, seed=0)
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=3e-4)
        assert torch.equal(optimizer.state[second]["average"], second)  # no decay: the weights themselves
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("settings", [TINY, TWO], ids=["one product", "two products, learnt sigma"])
def test_a_stopped_training_ends_bit_equal(settings, tmp_path):
    learning = Learning(steps=6, batch=4, accumulate=2)
    straight = learnt(settings, learning)

    class Enough(Exception):
        pass

    def interrupt(step, _samples):
        if step == 3:
            raise Enough

    with pytest.raises(Enough):  # samples are drawn before the checkpoint of a step is written
        learnt(settings, learning, folder=tmp_path, checkpoint_seconds=0.0, on_samples=interrupt)
    assert (tmp_path / CHECKPOINT).exists()
    again = learnt(settings, learning, folder=tmp_path)
    assert same(straight, again)
    assert straight.id == again.id
    with pytest.raises(ModelFileError, match="other settings or images"):
        learnt(settings, learning, seed=1, folder=tmp_path)


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_diffusion import learnt, Learning
learnt(learning=Learning(steps=40, batch=4), folder=Path(sys.argv[1]), checkpoint_seconds=0.0)
"""


def test_a_killed_training_ends_bit_equal(tmp_path):
    """A real process, SIGKILL as soon as its first checkpoint is there."""
    here = os.path.dirname(__file__)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), here])
    deadline = time.monotonic() + 300
    while not (tmp_path / CHECKPOINT).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    learning = Learning(steps=40, batch=4)
    assert same(learnt(learning=learning, folder=tmp_path), learnt(learning=learning))


def test_samples_are_shown_while_training_and_change_nothing(tmp_path):
    shown = []
    seen = learnt(on_samples=lambda step, samples: shown.append((step, tuple(samples.shape), samples.dtype)))
    assert same(seen, learnt())
    assert shown[-1] == (6, (8, 3, 8, 8), torch.uint8)


# --- files and settings ---


def test_a_model_is_one_file_without_pickle(model, tmp_path):
    model.save(tmp_path / "part.sia")
    assert [file.name for file in tmp_path.iterdir()] == ["part.sia"]
    again = DiffusionModel.load(tmp_path / "part.sia")
    assert same(model, again)
    assert (again.settings, again.id) == (TINY, model.id)
    content = bytearray((tmp_path / "part.sia").read_bytes())
    content[-5] ^= 1
    (tmp_path / "part.sia").write_bytes(content)
    with pytest.raises(ModelFileError, match="damaged or edited"):
        DiffusionModel.load(tmp_path / "part.sia")


def test_sizes_are_those_that_a_source_may_name():
    assert set(SIZES) == set(MODELS) == set(LEARNING)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in build(sized("tiny"), seed=0).parameters())
    assert 2e6 < parameters < 5e6
    with pytest.raises(SettingError, match="no diffusion model 'huge'"):
        sized("huge")


def test_images_come_at_the_side_and_in_the_channels_of_a_model():
    grey = torch.full((2, 1, 20, 20), 70, dtype=torch.uint8)
    assert torch.equal(to_model(grey, 8), torch.full((2, 3, 8, 8), 70, dtype=torch.uint8))
    with pytest.raises(DataError, match="good images"):
        learn_images(good_images(side=16), torch.zeros(10).long(), TINY, FEW, seed=0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Denoiser(side=10),
        lambda: Denoiser(channels=(33,)),
        lambda: Denoiser(head=48),
        lambda: Denoiser(classes=("a", "a")),
        lambda: Sampling(strength=(0.2, 0.1)),
        lambda: Sampling(steps=0),
        lambda: Sampling(method="euler"),
        lambda: Learning(steps=0),
        lambda: Learning(lr=0.0),
        lambda: Learning(average=1.0),
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(SettingError):
        wrong()


def test_the_cost_of_a_large_model_is_told_without_building_it():
    tiny = cost_of(TINY, FEW)
    assert tiny.step > 0
    assert tiny.seconds(10, 5) == pytest.approx(10 * tiny.step + 5 * tiny.image)
    assert json.dumps(tiny.parameters)
    assert np.isfinite(tiny.image)


# --- a trained model ---


@pytest.mark.slow
def test_strength_moves_samples_away_from_good_images():
    """At s = 0 they lie about as near to the good images as others held out; noise on those raises it as well."""
    from firm.drawn.render import draw_dataset

    data = draw_dataset("plate", size=64, train=240, good=60, bad=0)
    good, held_out = to_model(data.train, 16), to_model(data.test, 16)
    settings = Denoiser(side=16, channels=(32, 64), attention=(8,))
    learning = Learning(steps=4000, lr=1e-3, average=0.995)
    model = learn_images(good, torch.zeros(len(good)).long(), settings, learning, seed=0)

    def nearest(images):
        """Median distance to the nearest good image, in grey levels."""
        rows = [each.float().flatten(1) for each in (images, good)]
        return float(torch.cdist(*rows).amin(1).median()) / math.sqrt(3 * 16 * 16)

    def samples(strength):
        sampling = Sampling(strength=(strength, strength), batch=32)
        return torch.cat([images for _, images in sample(model, 32, sampling, seed=0)])

    usual, rng = nearest(held_out), torch.Generator().manual_seed(0)
    noise = torch.randn(held_out.shape, generator=rng)
    by_strength = [nearest(samples(strength)) for strength in (0.0, 0.2, 0.4, 1.0)]
    by_noise = [nearest((held_out + 20 * math.sqrt(s) * noise).clamp(0, 255)) for s in (0.0, 0.2, 0.4, 1.0)]
    assert by_strength == sorted(by_strength)
    assert by_noise == sorted(by_noise)
    assert 0.5 * usual < by_strength[0] < 1.5 * usual
    assert by_strength[-1] > 1.3 * by_strength[0]
