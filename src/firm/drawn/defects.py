"""The defects of drawn parts: each alters a scene's relief, colour or gloss, never the photograph.

So it has the light, the shadow and the grain of its part. Strengths are drawn from obvious to subtle.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from firm.drawn.scene import Light, Plane, Scene, Spot, clouds, length, mix, plane, shifted, soften, srgb, step

Defect = Callable[[Scene, Light, Generator], Scene]
Path = NDArray[np.float32]  # (n, 2) canvas pixels
Place = tuple[float, float]
FAR = 0.12


def place(scene: Scene, rng: Generator) -> Place:
    """A canvas pixel where a defect may sit."""
    rows, columns = np.nonzero(scene.site)
    at = int(rng.random() * len(rows))
    return float(columns[at]), float(rows[at])


def around(scene: Scene, at: Place) -> tuple[Plane, Plane]:
    """Offsets of every pixel from a place, in units."""
    line = np.arange(scene.side, dtype=np.float32)
    return (line[None, :] - at[0]) / scene.unit, (line[:, None] - at[1]) / scene.unit


def ellipse(scene: Scene, at: Place, angle: float, squeeze: float) -> Plane:
    """Distance of every pixel from a place in units, longer across the angle."""
    dx, dy = around(scene, at)
    cos, sin = math.cos(angle), math.sin(angle)
    return length(cos * dx + sin * dy, plane((cos * dy - sin * dx) / squeeze))


def wander(rng: Generator, scene: Scene, start: Place, *, extent: float, heading: float, bend: float) -> Path:
    """A path of that extent in units whose heading turns by about `bend` radians on its way."""
    steps = 40
    turns = np.linspace(0, rng.normal(0, bend), steps) + np.cumsum(rng.normal(0, bend / steps**0.5, steps)) / 2
    ahead = heading + turns
    strides = np.stack([np.cos(ahead), np.sin(ahead)], 1) * (extent * scene.unit / steps)
    return plane(np.array(start) + np.cumsum(strides, 0) - strides.sum(0) / 2)


def distance(scene: Scene, path: Path) -> Plane:
    """Distance of every pixel to a path, in units, measured on a finer grid and no farther than FAR."""
    margin, fine = round(FAR * scene.unit), 4
    low = np.maximum(np.floor(path.min(0)).astype(int) - margin, 0)
    high = np.minimum(np.ceil(path.max(0)).astype(int) + margin, scene.side)
    width, height = (int(extent) for extent in high - low)
    ground = np.full((height * fine, width * fine), 255, np.uint8)
    cv2.polylines(ground, [np.round((path - low) * fine).astype(np.int32)], False, 0, 1)
    near = cv2.resize(cv2.distanceTransform(ground, cv2.DIST_L2, 5), (width, height), interpolation=cv2.INTER_AREA)
    far = np.full((scene.side, scene.side), FAR, np.float32)
    far[low[1] : high[1], low[0] : high[0]] = plane(near) / np.float32(fine * scene.unit)
    return far


def blot(rng: Generator, scene: Scene, at: Place, radius: float, ragged: float) -> Plane:
    """An irregular spot: 1 in its middle, 0 on its ragged outline, negative beyond."""
    r = ellipse(scene, at, rng.uniform(0, math.pi), rng.uniform(0.6, 1)) / np.float32(radius)
    edge = clouds(rng, scene.side, max(6, round(2.2 / radius))) + 0.25 * clouds(rng, scene.side, 40)
    return 1 - r + ragged * edge * np.minimum(r, 1)


def lay(scene: Scene, light: Light, cover: Plane, colour: Plane, *, gloss: float, lift: float) -> Scene:
    """Something lying on the part, `lift` units thick: it hides what is under it and casts a shadow."""
    fall = lift * scene.unit
    shadow = soften(shifted(cover, -light.x * fall * 1.6, -light.y * fall * 1.6), 0.6 + fall * 0.35)
    lit = 1 - np.float32(0.6) * shadow * (1 - cover)
    relief = soften(cover, 0.7) * np.float32(fall * 0.6)
    height = mix(scene.height, soften(scene.height, 2), cover) + relief
    albedo, shine = mix(scene.albedo * lit, colour, cover), mix(scene.gloss * lit, plane(gloss), cover)
    return replace(scene, albedo=albedo, height=height, gloss=shine)


def scratch(scene: Scene, light: Light, rng: Generator) -> Scene:
    """One to three grooves side by side, skipping where the tool bounced, with a bright burr."""
    start, heading = place(scene, rng), rng.uniform(0, math.pi)
    extent, width, depth = rng.uniform(0.3, 1.0), rng.uniform(0.012, 0.024), rng.uniform(0.5, 1.2)
    groove = np.zeros_like(scene.height)
    for _ in range(rng.integers(1, 4)):
        near = (start[0] + rng.normal(0, 0.03) * scene.unit, start[1] + rng.normal(0, 0.03) * scene.unit)
        path = wander(rng, scene, near, extent=extent * rng.uniform(0.6, 1), heading=heading, bend=0.15)
        groove = np.maximum(groove, np.clip(1 - distance(scene, path) / width, 0, 1))
    groove = soften(groove * step(clouds(rng, scene.side, 14), -1.6, -0.8) * scene.surface, 0.4)
    height = scene.height - groove * np.float32(depth * width * scene.unit)
    albedo, gloss = scene.albedo * (1 - 0.45 * groove), scene.gloss * (1 + 0.4 * groove)
    return replace(scene, albedo=albedo, height=height, gloss=gloss)


def dent(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A blow: a bowl with a raised rim, its finish bruised."""
    at = place(scene, rng)
    angle, radius, squeeze = rng.uniform(0, math.pi), rng.uniform(0.06, 0.17), rng.uniform(0.55, 1)
    r = ellipse(scene, at, angle, squeeze) / np.float32(radius) * (1 + 0.08 * clouds(rng, scene.side, 12))
    bowl = plane(np.exp(-2.2 * r * r) - 0.1 * np.exp(-9 * (r - 1.3) ** 2))
    depth = rng.uniform(0.16, 0.36) * radius * squeeze
    height = scene.height - bowl * scene.surface * np.float32(depth * scene.unit)
    return replace(scene, height=height, albedo=scene.albedo * (1 - 0.15 * np.exp(-4 * r * r) * scene.surface))


@dataclass(frozen=True)
class Stain:
    """A liquid that dried or soaked in: a blot with splashes that filters the colour, denser at its dried edge."""

    tints: tuple[int, ...]
    wet: float  # what it adds to the gloss
    soak: float  # how soft its edge is
    radius: tuple[float, float] = (0.1, 0.28)

    def __call__(self, scene: Scene, light: Light, rng: Generator) -> Scene:
        at, radius = place(scene, rng), rng.uniform(*self.radius)
        depth = blot(rng, scene, at, radius, 0.22)
        for _ in range(rng.integers(0, 4)):
            beside = (at[0] + rng.normal(0, radius) * scene.unit, at[1] + rng.normal(0, radius) * scene.unit)
            depth = np.maximum(depth, blot(rng, scene, beside, radius * rng.uniform(0.1, 0.35), 0.15))
        inside = step(depth, 0, self.soak) * scene.surface
        dried = rng.uniform(0, 0.6) * np.exp(-(((depth - 0.1) / 0.09) ** 2))
        dense = inside * (rng.uniform(0.35, 0.85) * (1 + 0.12 * clouds(rng, scene.side, 16)) + dried)
        tint, cover = srgb(self.tints[rng.integers(len(self.tints))]), np.clip(dense, 0, 1)
        gloss = np.maximum(scene.gloss * (1 + self.wet * cover), 0)
        return replace(scene, albedo=scene.albedo * (1 - cover * (1 - tint)), gloss=gloss)


def missing_hole(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A hole never drilled; every third one was at least started, and left a dimple."""
    assert scene.before is not None
    spot = scene.spots[rng.integers(len(scene.spots))]
    dx, dy = around(scene, (spot.x, spot.y))
    r = length(dx, dy) * np.float32(scene.unit / spot.half_width)
    here = plane(r < 1.2)
    dimple = np.clip(0.4 - r, 0, 0.4) * np.float32(0.8 * spot.half_width * (rng.random() < 0.34))
    albedo, gloss = mix(scene.albedo, scene.before.albedo, here), mix(scene.gloss, scene.before.gloss, here)
    return replace(scene, albedo=albedo, height=mix(scene.height, scene.before.height - dimple, here), gloss=gloss)


def pulled_thread(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A snag: the cloth gathers along one thread, and the thread stands off in a loop."""
    at, upright = place(scene, rng), rng.random() < 0.5
    extent, (dx, dy) = rng.uniform(0.4, 0.9), around(scene, at)
    along, across = (dy, dx) if upright else (dx, dy)
    fade = np.exp(-((along / (extent / 2)) ** 4))
    pull = rng.uniform(0.035, 0.06) * scene.unit * fade * np.sign(across) * np.exp(-np.abs(across) / 0.05)
    gathered = warped(scene, pull * upright, pull * (not upright))
    gap = np.exp(-((across / 0.016) ** 2)) * fade
    gathered = replace(gathered, albedo=gathered.albedo * (1 - 0.7 * gap), gloss=gathered.gloss * (1 - gap))
    heading = (math.pi / 2 if upright else 0.0) + rng.normal(0, 0.1)
    loop = wander(rng, scene, at, extent=rng.uniform(0.25, 0.5), heading=heading, bend=1.6)
    return lay_thread(gathered, light, loop, rng)


def warped(scene: Scene, dx: Plane, dy: Plane) -> Scene:
    """The scene with every pixel taken from (dx, dy) pixels beside it."""
    line, layers = np.arange(scene.side, dtype=np.float32), (*scene.albedo, scene.height, scene.gloss)
    x, y = plane(line[None, :] + dx), plane(line[:, None] + dy)
    moved = [plane(cv2.remap(layer, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)) for layer in layers]
    return replace(scene, albedo=np.stack(moved[:3]), height=moved[3], gloss=moved[4])


def lay_thread(scene: Scene, light: Light, path: Path, rng: Generator, width: float = 0.02) -> Scene:
    """A loose end of the cloth's own yarn, round and lit from its side."""
    off = distance(scene, path) / width
    cover = np.clip((1 - off) * width * scene.unit + 0.5, 0, 1)
    colour = srgb((0xC9C2B2, 0x4C6E8F)[rng.integers(2)]) * (1 - 0.35 * np.minimum(off, 1) ** 2)
    return lay(scene, light, cover, colour, gloss=0.03, lift=rng.uniform(0.02, 0.05))


def cut(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A slit that gapes in its middle, with frayed ends reaching across."""
    at, heading = place(scene, rng), rng.uniform(0, math.pi)
    extent, gape = rng.uniform(0.3, 0.7), rng.uniform(0.025, 0.05)
    path = wander(rng, scene, at, extent=extent, heading=heading, bend=0.2)
    dx, dy = around(scene, at)
    lens = np.sqrt(np.maximum(1 - (dx * dx + dy * dy) * np.float32(4 / extent**2), 0)) * gape
    ragged = lens * (1 + 0.35 * clouds(rng, scene.side, 50))
    inside = np.clip((ragged - distance(scene, path)) * scene.unit, 0, 1)
    albedo, gloss = mix(scene.albedo, srgb(0x16181A), inside), scene.gloss * (1 - inside)
    height = scene.height - soften(inside, 1.5) * np.float32(gape * scene.unit)
    opened = replace(scene, albedo=albedo, height=height, gloss=gloss)
    for start in path[rng.integers(6, 34, 4)]:
        end = (float(start[0]), float(start[1]))
        fray = wander(rng, scene, end, extent=rng.uniform(0.06, 0.12), heading=heading + rng.normal(1.5, 0.5), bend=0.6)
        opened = lay_thread(opened, light, fray, rng, width=0.007)
    return opened


def torn_cloth(scene: Scene, light: Light, rng: Generator) -> Scene:
    """Cloth does not scratch: a thread is pulled or the fabric is cut."""
    return (pulled_thread if rng.random() < 0.6 else cut)(scene, light, rng)


def scuff(scene: Scene, light: Light, rng: Generator) -> Scene:
    """Ink and the paper's skin rubbed off along a stroke; the raw fibres under it are duller."""
    start, heading = place(scene, rng), rng.uniform(0, math.pi)
    path = wander(rng, scene, start, extent=rng.uniform(0.3, 0.9), heading=heading, bend=0.25)
    width = rng.uniform(0.012, 0.035) * (1 + 0.5 * clouds(rng, scene.side, 24))
    bare = soften(np.clip((width - distance(scene, path)) * scene.unit, 0, 1) * scene.surface, 0.5)
    fibres = srgb(0xB9AE9A) * (1 + 0.15 * clouds(rng, scene.side, 100))
    height, gloss = scene.height - bare * np.float32(0.012 * scene.unit), scene.gloss * (1 - bare)
    return replace(scene, albedo=mix(scene.albedo, fibres, bare), height=height, gloss=gloss)


def misprint(scene: Scene, light: Light, rng: Generator) -> Scene:
    """One printed element gone wrong: ink that failed, smeared, printed twice or slipped."""
    assert scene.before is not None
    spot = scene.spots[rng.integers(len(scene.spots))]
    ink = scene.albedo / scene.before.albedo
    fault = (failed_ink, smeared_ink, doubled_ink, slipped_ink)[rng.integers(4)]
    dx, dy = around(scene, (spot.x, spot.y))
    beyond_x = np.abs(dx) - np.float32(spot.half_width / scene.unit)
    beyond_y = np.abs(dy) - np.float32(spot.half_height / scene.unit)
    here = 1 - step(np.maximum(beyond_x, beyond_y), 0, 0.02)  # 1 over the element, with a narrow soft border
    rest, element = mix(ink, plane(1), here), mix(plane(1), ink, here)
    wrong = rest * fault(element, scene, spot, rng)
    return replace(scene, albedo=scene.before.albedo * mix(ink, wrong, scene.surface))


def failed_ink(ink: Plane, scene: Scene, spot: Spot, rng: Generator) -> Plane:
    """The ribbon creased or the plate was dry: bands or patches without ink."""
    if rng.random() < 0.5:
        patches = step(clouds(rng, scene.side, 12) + 0.6 * clouds(rng, scene.side, 50), -0.1, 0.3)
        return mix(ink, plane(1), patches * np.float32(rng.uniform(0.7, 1)))
    dx, dy = around(scene, (spot.x, spot.y))
    slant = dy + dx * np.float32(rng.normal(0, 0.15)) + np.float32(rng.normal(0, 0.2) * spot.half_height / scene.unit)
    band = 1 - step(np.abs(slant), 0.02, rng.uniform(0.04, 0.06))
    return mix(ink, plane(1), band * np.float32(rng.uniform(0.75, 1)))


def smeared_ink(ink: Plane, scene: Scene, spot: Spot, rng: Generator) -> Plane:
    """Touched while wet: the ink trails off to one side."""
    reach = max(3, round(rng.uniform(0.06, 0.14) * scene.unit))
    trail = np.zeros((1, 2 * reach + 1), np.float32)
    trail[0, reach:] = np.linspace(1, 0.2, reach + 1)
    trail = trail[:, ::-1].copy() if rng.random() < 0.5 else trail
    return np.minimum(ink * 0.6 + 0.4, plane([cv2.filter2D(c, cv2.CV_32F, trail / trail.sum()) for c in ink]))


def doubled_ink(ink: Plane, scene: Scene, spot: Spot, rng: Generator) -> Plane:
    """The web jumped and the element was struck twice."""
    jump = rng.uniform(0.03, 0.055) * scene.unit
    angle = rng.uniform(0, 2 * math.pi)
    again = np.stack([shifted(channel, jump * math.cos(angle), jump * math.sin(angle)) for channel in ink])
    return ink * (1 - np.float32(rng.uniform(0.6, 0.9)) * (1 - again))


def slipped_ink(ink: Plane, scene: Scene, spot: Spot, rng: Generator) -> Plane:
    """The element sits askew: shifted and turned about its middle."""
    angle = float(rng.choice([-1, 1]) * rng.uniform(3, 8))
    matrix = np.asarray(cv2.getRotationMatrix2D((spot.x, spot.y), angle, 1), np.float64)
    matrix[:, 2] += rng.normal(0, 0.035, 2) * scene.unit
    return plane([cv2.warpAffine(channel, matrix, (scene.side, scene.side), borderValue=1) for channel in ink])


def contamination(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A fibre, a chip of metal or a scatter of dust lying on the part."""
    return (fibre, chip, dust)[rng.integers(3)](scene, light, rng)


def fibre(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A curled hair or lint of thread."""
    path = wander(rng, scene, place(scene, rng), extent=rng.uniform(0.35, 0.9), heading=rng.uniform(0, 6.3), bend=1.8)
    width = rng.uniform(0.006, 0.011)
    cover = np.clip((width - distance(scene, path)) * scene.unit + 0.5, 0, 1) * np.float32(rng.uniform(0.8, 1))
    colour = srgb((0x14161C, 0x14161C, 0xF2F0EA, 0xA02A24, 0x20407E)[rng.integers(5)])
    return lay(scene, light, cover, colour, gloss=0.05, lift=rng.uniform(0.012, 0.035))


def chip(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A curl of swarf: a narrowing spiral ribbon, bright where it turns to the lamp."""
    at, turns, radius = place(scene, rng), rng.uniform(1.2, 2.6), rng.uniform(0.05, 0.1)
    t = np.linspace(0, 1, 70)
    angle = rng.uniform(0, 6.3) + t * turns * 2 * math.pi
    drift = t * rng.uniform(0.1, 0.22) * scene.unit
    aim, r = rng.uniform(0, 6.3), (1 - 0.5 * t) * radius * scene.unit
    x = at[0] + r * np.cos(angle) + drift * math.cos(aim)
    y = at[1] + r * np.sin(angle) + drift * math.sin(aim)
    width = rng.uniform(0.012, 0.02)
    cover = np.clip((width - distance(scene, plane(np.stack([x, y], 1)))) * scene.unit + 0.5, 0, 1)
    dx, dy = around(scene, at)
    glint = 0.5 + 0.5 * np.sin((dx * math.cos(aim) + dy * math.sin(aim)) * 55 + 2 * np.arctan2(dy, dx))
    return lay(scene, light, cover, srgb(0xAEB2B8) * (0.2 + 1.2 * glint**2), gloss=0.2, lift=0.035)


def dust(scene: Scene, light: Light, rng: Generator) -> Scene:
    """A scatter of crumbs, each a small ragged polygon."""
    at, spread = place(scene, rng), rng.uniform(0.06, 0.2) * scene.unit
    ground = np.zeros((scene.side, scene.side), np.uint8)
    for _ in range(rng.integers(6, 26)):
        middle = np.array(at) + rng.normal(0, spread, 2)
        corners = np.sort(rng.uniform(0, 2 * math.pi, 6))
        reach = rng.gamma(3, 0.005) * scene.unit * rng.uniform(0.6, 1.3, 6)
        outline = middle + np.stack([np.cos(corners), np.sin(corners)], 1) * (reach[:, None] + 0.5)
        cv2.fillPoly(ground, [np.round(outline * 16).astype(np.int32)], 255, cv2.LINE_AA, shift=4)
    colour = srgb((0x1B1A18, 0x4A3A28, 0xE8E4DA)[rng.integers(3)]) * (1 + 0.25 * clouds(rng, scene.side, 60))
    return lay(scene, light, plane(ground) * (1 / 255), colour, gloss=0.03, lift=0.014)


PLATE: dict[str, Defect] = {
    "scratch": scratch,
    "dent": dent,
    "stain": Stain(tints=(0x5A4630, 0x3A3630, 0x9A5A30), wet=-0.75, soak=0.25),
    "missing hole": missing_hole,
    "contamination": contamination,
}
WEAVE: dict[str, Defect] = {
    "scratch": torn_cloth,
    "stain": Stain(tints=(0x6A4A2C, 0x3C3A36, 0x7A3038), wet=0.5, soak=0.5, radius=(0.16, 0.42)),
    "contamination": contamination,
}
LABEL: dict[str, Defect] = {
    "misprint": misprint,
    "scratch": scuff,
    "stain": Stain(tints=(0x9A6A34, 0x5E5A50, 0x3E5A80), wet=0.8, soak=0.2),
    "contamination": contamination,
}
