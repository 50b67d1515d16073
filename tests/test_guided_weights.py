"""Weights of a guided-diffusion checkpoint, against that network written out by hand with the checkpoint's names."""

import math

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("diffusers", reason="needs the extra `diffusion`")

from firm.diffusion.guided_weights import start_from
from firm.diffusion.model import Denoiser, build, predict, sized
from firm.errors import ModelFileError

SMALL = Denoiser(
    side=16,
    channels=(32, 64, 64),
    layers=2,
    attention=(8, 4),
    head=32,
    residual_resampling=True,
    learned_sigma=True,
    classes=("a", "b", "c"),
)


class Weights(dict):
    """Tensors of a checkpoint, drawn when a layer first asks for them."""

    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(0)

    def of(self, name, *shape):
        if name not in self:
            self[name] = torch.randn(shape, generator=self.rng) * (0.5 / math.sqrt(math.prod(shape[1:]) or 1))
        return self[name]

    def linear(self, name, x, out):
        return F.linear(x, self.of(f"{name}.weight", out, x.shape[1]), self.of(f"{name}.bias", out))

    def conv(self, name, x, out, side=3):
        weight = self.of(f"{name}.weight", out, x.shape[1], side, side)
        return F.conv2d(x, weight, self.of(f"{name}.bias", out), padding=side // 2)

    def norm(self, name, x):
        return F.group_norm(x, 32, 1 + self.of(f"{name}.weight", x.shape[1]), self.of(f"{name}.bias", x.shape[1]))

    def residual(self, name, x, emb, out, resample=lambda h: h):
        h = resample(F.silu(self.norm(f"{name}.in_layers.0", x)))
        h = self.conv(f"{name}.in_layers.2", h, out)
        scale, shift = self.linear(f"{name}.emb_layers.1", F.silu(emb), 2 * out)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm(f"{name}.out_layers.0", h) * (1 + scale) + shift)
        h = self.conv(f"{name}.out_layers.3", h, out)
        x = resample(x)
        return h + (x if x.shape[1] == out else self.conv(f"{name}.skip_connection", x, out, 1))

    def attention(self, name, x, head):
        b, c, *side = x.shape
        flat = x.reshape(b, c, -1)
        qkv = F.conv1d(
            self.norm(f"{name}.norm", flat),
            self.of(f"{name}.qkv.weight", 3 * c, c, 1),
            self.of(f"{name}.qkv.bias", 3 * c),
        )
        q, k, v = qkv.reshape(b * c // head, 3 * head, -1).split(head, dim=1)
        each = torch.softmax(torch.einsum("bct,bcs->bts", q, k) / math.sqrt(head), dim=-1)
        a = torch.einsum("bts,bcs->bct", each, v).reshape(b, c, -1)
        a = F.conv1d(a, self.of(f"{name}.proj_out.weight", c, c, 1), self.of(f"{name}.proj_out.bias", c))
        return (flat + a).reshape(b, c, *side)


def guided(w, s, x, times, labels):
    """The network of guided diffusion, with its names."""
    width, half = s.channels[0], s.channels[0] // 2
    angle = times[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
    emb = torch.cat([angle.cos(), angle.sin()], dim=1)
    emb = w.linear("time_embed.2", F.silu(w.linear("time_embed.0", emb, 4 * width)), 4 * width)
    emb = emb + w.of("label_emb.weight", len(s.classes), 4 * width)[labels]
    attends = [s.side >> level in s.attention for level in range(len(s.channels))]
    h = w.conv("input_blocks.0.0", x, width)
    kept, n = [h], 1
    for level, out in enumerate(s.channels):
        for _ in range(s.layers):
            h = w.residual(f"input_blocks.{n}.0", h, emb, out)
            h = w.attention(f"input_blocks.{n}.1", h, s.head) if attends[level] else h
            kept.append(h)
            n += 1
        if level < len(s.channels) - 1:
            h = w.residual(f"input_blocks.{n}.0", h, emb, out, lambda x: F.avg_pool2d(x, 2))
            kept.append(h)
            n += 1
    h = w.residual("middle_block.0", h, emb, s.channels[-1])
    h = w.residual("middle_block.2", w.attention("middle_block.1", h, s.head), emb, s.channels[-1])
    n = 0
    for level, out in reversed(list(enumerate(s.channels))):
        for layer in range(s.layers + 1):
            h = w.residual(f"output_blocks.{n}.0", torch.cat([h, kept.pop()], dim=1), emb, out)
            h = w.attention(f"output_blocks.{n}.1", h, s.head) if attends[level] else h
            if level and layer == s.layers:
                place = f"output_blocks.{n}.{2 if attends[level] else 1}"
                h = w.residual(place, h, emb, out, lambda x: F.interpolate(x, scale_factor=2, mode="nearest"))
            n += 1
    return w.conv("out.2", F.silu(w.norm("out.0", h)), 6)


def checkpoint():
    """Tensors as they are published, an input, and what the network makes of it."""
    w = Weights()
    x, times = torch.randn(3, 3, 16, 16, generator=w.rng), torch.tensor([0, 321, 999])
    labels = torch.tensor([2, 0, 1])
    out = guided(w, SMALL, x, times.float(), labels)
    tensors = {
        name: 1 + v if v.dim() == 1 and _is_norm(name) and name.endswith("weight") else v for name, v in w.items()
    }
    return tensors, x, times, labels, out


def _is_norm(name):
    owner = name.rpartition(".")[0]
    return owner.endswith((".norm", "in_layers.0", "out_layers.0")) or owner == "out.0"


def test_a_checkpoint_computes_the_same_in_the_network_of_diffusers():
    tensors, x, times, labels, expected = checkpoint()
    network = build(SMALL, seed=0)
    start_from(network, SMALL, tensors)
    network.class_embedding.weight.data.copy_(tensors["label_emb.weight"])  # of other classes, so it is not loaded
    with torch.no_grad():
        found = predict(network, x, times, labels)
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_another_shape_is_refused():
    tensors, *_ = checkpoint()
    short = {name: value for name, value in tensors.items() if name != "middle_block.1.qkv.weight"}
    other = tensors | {"out.2.bias": torch.zeros(3)}
    for wrong in (short, other, {"conv1.weight": torch.zeros(3)}):
        with pytest.raises(ModelFileError, match="guided-diffusion"):
            start_from(build(SMALL, seed=0), SMALL, wrong)


def test_the_paper_size_is_that_of_the_public_checkpoint():
    """553 M parameters with 15 classes; the weights themselves are not here."""
    with torch.device("meta"):
        network = build(sized("paper", tuple("abcdefghijklmno")), seed=0)
    assert sum(each.numel() for each in network.parameters()) == pytest.approx(553e6, rel=0.01)
