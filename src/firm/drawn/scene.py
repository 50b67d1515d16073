"""A drawn scene and the camera that looks at it: surfaces in, a photograph out.

A scene is a relief with a colour and a gloss, so a dent is a dent in the relief and the light does the rest.
Lengths are in units of half the picture, so a part looks the same at every resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Plane = NDArray[np.float32]  # (side, side), or (3, side, side) for colours in linear light: channels first is faster


def srgb(code: int) -> Plane:
    """A 0xRRGGBB colour in linear light, where mixing and shading are sums and products; shaped (3, 1, 1)."""
    channels = [(code >> bits & 255) / 255 for bits in (16, 8, 0)]
    return plane(channels)[:, None, None] ** np.float32(2.2)


@dataclass(frozen=True)
class Light:
    """One near lamp and the camera's settings under it."""

    x: float  # towards the lamp, as a slope: (x, y, 1) points at it
    y: float
    near: float  # how fast its direction changes across the picture
    exposure: float
    warmth: float
    vignette: float
    ambient: float


def switch_on(rng: Generator) -> Light:
    """A lamp somewhere to the upper left, as bright and as warm as this draw has it."""
    azimuth = math.radians(rng.uniform(-175, -85))
    tilt = rng.uniform(0.5, 0.85)
    near, exposure, warmth = rng.uniform(0.08, 0.28), rng.uniform(0.8, 1.15), rng.uniform(-0.06, 0.06)
    vignette, ambient = rng.uniform(0.08, 0.22), rng.uniform(0.25, 0.35)
    return Light(tilt * math.cos(azimuth), tilt * math.sin(azimuth), near, exposure, warmth, vignette, ambient)


@dataclass(frozen=True)
class Spot:
    """A place on the canvas where the part was worked: its middle and half its extent, in pixels."""

    x: float
    y: float
    half_width: float
    half_height: float


@dataclass(frozen=True)
class Scene:
    """What the camera looks at, as layers a defect can alter."""

    albedo: Plane  # (3, side, side)
    height: Plane  # in pixels of the canvas
    gloss: Plane
    site: NDArray[np.bool_]  # where a defect may have its middle
    surface: Plane  # how far a pixel belongs to the part's face: marks end where it does
    roughness: float = 0.3
    spots: tuple[Spot, ...] = ()
    before: Scene | None = None  # the same part before its last step of making: undrilled, unprinted

    @property
    def side(self) -> int:
        """Pixels along an edge of the canvas."""
        return self.height.shape[0]

    @property
    def unit(self) -> float:
        """Pixels per unit of length: half the canvas."""
        return self.side / 2


@dataclass(frozen=True)
class Pose:
    """How the part lies under the camera: turned, shifted and a little nearer or farther."""

    angle: float
    shift: tuple[float, float]
    scale: float

    def to_part(self, side: int) -> tuple[Plane, Plane]:
        """Part coordinates of every canvas pixel."""
        x, y = canvas(side)
        x, y = x - self.shift[0], y - self.shift[1]
        cos, sin = math.cos(self.angle) / self.scale, math.sin(self.angle) / self.scale
        return cos * x + sin * y, cos * y - sin * x

    def to_canvas(self, u: float, v: float, side: int) -> tuple[float, float]:
        """The canvas pixel of a point on the part."""
        cos, sin = math.cos(self.angle) * self.scale, math.sin(self.angle) * self.scale
        x, y = cos * u - sin * v + self.shift[0], sin * u + cos * v + self.shift[1]
        return (x + 1) * side / 2, (y + 1) * side / 2

    def turn(self, texture: Plane) -> Plane:
        """A texture drawn upright, lying as the part does."""
        middle = texture.shape[0] / 2
        matrix = cv2.getRotationMatrix2D((middle, middle), -math.degrees(self.angle), self.scale)
        matrix[:, 2] += np.array(self.shift) * middle
        return plane(cv2.warpAffine(texture, matrix, texture.shape[::-1], borderMode=cv2.BORDER_REFLECT))


def lay_down(rng: Generator, *, turn: float, shift: float, stretch: float) -> Pose:
    """A pose within `turn` degrees, `shift` units and `stretch` of the nominal one."""
    angle, moved = math.radians(rng.uniform(-turn, turn)), (rng.uniform(-shift, shift), rng.uniform(-shift, shift))
    return Pose(angle, moved, scale=rng.uniform(1 - stretch, 1 + stretch))


def plane(values: object) -> Plane:
    """Anything array-like as single precision."""
    return np.asarray(values, dtype=np.float32)


def canvas(side: int) -> tuple[Plane, Plane]:
    """Coordinates of the pixels as a row and a column, from -1 to 1."""
    line = (np.arange(side, dtype=np.float32) + 0.5) * np.float32(2 / side) - 1
    return line[None, :], line[:, None]


def length(x: Plane, y: Plane) -> Plane:
    """Length of vectors; several times as fast as hypot, whose care for overflow is not needed here."""
    return np.sqrt(x * x + y * y)


def clouds(rng: Generator, side: int, rows: int, columns: int | None = None) -> Plane:
    """Smooth noise of so many cells, the same at every resolution; few columns and many rows give streaks."""
    grid = rng.standard_normal((rows, columns or rows), dtype=np.float32)
    return plane(cv2.resize(grid, (side, side), interpolation=cv2.INTER_CUBIC))


def soften(values: Plane, sigma: float) -> Plane:
    return plane(cv2.GaussianBlur(values, (0, 0), sigma, borderType=cv2.BORDER_REFLECT))


def shifted(values: Plane, dx: float, dy: float) -> Plane:
    """The plane moved by a fraction of pixels, its edge repeated."""
    matrix = plane([[1, 0, dx], [0, 1, dy]])
    return plane(cv2.warpAffine(values, matrix, values.shape[1::-1], borderMode=cv2.BORDER_REPLICATE))


def step(values: Plane, low: float, high: float) -> Plane:
    """A smooth rise from 0 at `low` to 1 at `high`."""
    t = np.clip((values - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return t * t * (3 - 2 * t)


def mix(under: Plane, over: Plane, cover: Plane) -> Plane:
    """`over` painted on `under` where `cover` is 1; a colour may stand for a whole layer."""
    return under + (over - under) * cover


def shade(scene: Scene, light: Light) -> Plane:
    """Light leaving the scene towards the camera: diffuse by Lambert, gloss as a lobe of slopes around the mirror."""
    x, y = canvas(scene.side)
    slope_x = plane(cv2.Sobel(scene.height, cv2.CV_32F, 1, 0, scale=1 / 8))
    slope_y = plane(cv2.Sobel(scene.height, cv2.CV_32F, 0, 1, scale=1 / 8))
    lamp_x, lamp_y = light.x - light.near * x, light.y - light.near * y
    facing = 1 - slope_x * lamp_x - slope_y * lamp_y
    facing /= np.sqrt((1 + slope_x * slope_x + slope_y * slope_y) * (1 + lamp_x * lamp_x + lamp_y * lamp_y))
    off_x, off_y = slope_x + lamp_x / 2, slope_y + lamp_y / 2
    mirror = np.exp((off_x * off_x + off_y * off_y) * np.float32(-0.5 / scene.roughness**2))
    diffuse = light.ambient + np.float32(1 - light.ambient) * np.maximum(facing, 0)
    return scene.albedo * diffuse + scene.gloss * mirror


def photograph(scene: Scene, light: Light, size: int) -> Plane:
    """The noiseless picture in display values 0..1; averaging comes before the tone curve, as in a sensor."""
    full = cv2.merge(list(shade(scene, light)))
    seen = plane(cv2.resize(full, (size, size), interpolation=cv2.INTER_AREA))
    x, y = canvas(size)
    lens = light.exposure * (1 + light.near * (x * light.x + y * light.y)) * (1 - light.vignette / 2 * (x * x + y * y))
    tint = plane([1 + light.warmth, 1, 1 - light.warmth])
    seen = np.maximum(seen * lens[..., None] * tint, 0)
    return np.clip(seen * (1 + seen * 0.3) / (1 + seen * 0.55), 0, 1) ** np.float32(1 / 2.2)


def record(picture: Plane, grain: Plane) -> NDArray[np.uint8]:
    """The picture as stored: sensor grain, a little stronger in the light, and 8 bits."""
    noisy = picture + grain * (0.006 + 0.006 * picture)
    return np.clip(noisy * 255 + 0.5, 0, 255).astype(np.uint8)
