"""What reading one file may cost: pixels, sides, scans and bytes are bounded, and a lack of memory is not its fault."""

import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from cases import each
from firm.data.folder import read_files
from firm.errors import ImageError, MachineError
from firm.images import decode as pixels
from firm.images.decode import decode, decode_mask
from image_files import encoded, png

PHOTO = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)


def refused(source):
    with pytest.raises(ImageError) as found:
        decode(source)
    assert "\n" not in str(found.value)
    return str(found.value)


# --- pixels and scans ---


@each("size", [(1, 20_000_000), (20_000_000, 1), (pixels.MAX_SIDE + 1, 2)])
def test_a_thread_of_pixels_is_refused_by_its_header(size):
    """Resizing it would first widen each of its rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.core, "new", lambda *_: pytest.fail("memory was taken for its pixels"))
        assert f"{size[0]} x {size[1]}" in refused(png(np.zeros((1, 1, 1), np.uint8), 1, size=size))


def test_the_longest_side_itself_is_read():
    assert decode(encoded(np.zeros((pixels.MAX_SIDE, 1), np.uint8))).shape == (pixels.MAX_SIDE, 1, 3)


def test_scans_without_end_are_refused_before_they_are_decoded(monkeypatch):
    photo = encoded(PHOTO, "JPEG", progressive=True)
    scans = [found.start() for found in pixels.SCAN.finditer(photo)]
    bomb = photo[:-2] + 100 * photo[scans[-1] : -2] + photo[-2:]
    assert decode(bomb).shape == PHOTO.shape  # small enough to be worth it
    refused(photo[:-2] + 1_000 * photo[scans[-1] : -2] + photo[-2:])
    monkeypatch.setattr(pixels, "MAX_SCANNED", len(scans) * 1_000_000)
    assert decode(photo).shape == PHOTO.shape
    assert decode(photo + bytes([255, 0xDA]) * 9_999).shape == PHOTO.shape  # such as a film behind the photograph
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("was decoded"))
    assert "scans" in refused(bomb)


def test_scans_are_counted_in_a_tiff_as_well(monkeypatch):
    tall = np.tile(PHOTO, (10, 1, 1))
    plain = encoded(tall, "TIFF", compression="jpeg", tiffinfo={278: 16})  # a scan for every 16 rows
    assert len(pixels.SCAN.findall(plain)) == -(-len(tall) // 16) > 1
    monkeypatch.setattr(pixels, "MAX_SCANNED", 1_000_000)
    assert decode(plain).shape == tall.shape
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("was decoded"))
    assert "scans" in refused(plain + b"\xff\xda\x00\x08\x01" * 2)


def test_ten_scans_of_the_largest_image_are_read():
    assert 10 * pixels.MAX_PIXELS <= pixels.MAX_SCANNED


# --- memory ---


@each(
    "error", [MemoryError(), MemoryError("Unable to allocate 9 GiB"), OSError("out of memory when reading image file")]
)
def test_a_lack_of_memory_is_the_machines(error, tmp_path, monkeypatch):
    file = tmp_path / "part.png"
    file.write_bytes(encoded(PHOTO))

    def short(_):
        raise error

    monkeypatch.setattr(ImageFile.ImageFile, "load", short)
    for read in (decode, decode_mask, lambda path: read_files([path])):  # which would leave out an unreadable file
        with pytest.raises(MachineError, match=r"memory.*part\.png"):
            read(file)


SHORT = """
import resource, sys
from pathlib import Path
from firm.errors import FirmError
from firm.images.decode import decode
file, room = Path(sys.argv[1]), int(sys.argv[2])
try:
    decode(file.with_name("small.png"))  # loads what is only loaded once
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if room:
        resource.setrlimit(resource.RLIMIT_AS, (taken + room, resource.RLIM_INFINITY))
    decode(file)
except FirmError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
@each("kind", ["tiff", "jpeg"])
def test_a_decoder_without_memory_does_not_blame_the_file(kind, tmp_path):
    """Room for the pixels and not for decoding them: libtiff and libjpeg then report a damaged file."""
    side = 4000
    options = {"tiff": {"compression": "tiff_lzw", "strip_size": 4 * side**2}, "jpeg": {"progressive": True}}
    file, damaged = tmp_path / f"part.{kind}", tmp_path / f"damaged.{kind}"
    Image.new("RGB", (side, side), "red").save(file, **options[kind])
    content = file.read_bytes()
    damaged.write_bytes(content[: len(content) // 2] if kind == "jpeg" else content.replace(content[9:999], bytes(990)))
    (tmp_path / "small.png").write_bytes(encoded(PHOTO))

    def said(path, room):
        command = [sys.executable, "-c", SHORT, str(path), str(room)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert said(file, 0) == ""
    assert said(file, 5 * side**2).startswith("MachineError memory")
    assert said(damaged, 0).startswith("ImageError")


# --- files without end ---


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="needs Linux")
def test_links_to_devices_and_to_the_kernel_are_left_out(tmp_path):
    (tmp_path / "part.png").write_bytes(encoded(PHOTO))
    for number, target in enumerate(("/dev/zero", "/dev/tty", "/proc/self/pagemap", "/proc/kmsg", "/proc/self/maps")):
        (tmp_path / f"{number}.png").symlink_to(target)
    os.mkfifo(tmp_path / "pipe.png")
    _, files, skipped = read_files([tmp_path])
    assert files == [tmp_path / "part.png"]
    assert {file.name for file, _ in skipped} == {"0.png", "1.png", "2.png", "3.png", "4.png", "pipe.png"}


# --- the library ---


def stated():
    """The lowest Pillow that pyproject.toml allows."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (bound,) = [line.removeprefix("pillow>=") for line in project["dependencies"] if line.startswith("pillow")]
    return bound


READ = """
import numpy as np
from firm.images.decode import decode
from image_files import png, tiff
samples = np.arange(24, dtype=np.uint16).reshape(2, 3, 4) * 2849
for content in (png(samples, 16), png(samples[..., :3], 16), png(samples[..., :2], 16), tiff(samples[..., :3])):
    assert decode(content).shape == (2, 3, 3)
"""


def test_deep_colours_need_tiles_with_names():
    """What Pillow has from the stated version on: see `_reread`."""
    assert tuple(map(int, stated().split("."))) >= (11, 0)
    with Image.open(io.BytesIO(png(np.zeros((1, 1, 3), np.uint16), 16))) as opened:
        assert opened.tile[0]._replace(args="RGB;16L").args == "RGB;16L"


@pytest.mark.slow
@pytest.mark.parametrize(("version", "reads"), [(stated(), True), ("10.4", False)])
def test_the_stated_pillow_is_the_oldest_that_reads_deep_colours(version, reads, tmp_path):
    install = ["-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", f"--target={tmp_path}"]
    if subprocess.run([sys.executable, *install, f"pillow=={version}"], check=False).returncode:
        pytest.skip("this Pillow cannot be installed here")
    folders = [tmp_path, Path(pixels.__file__).parents[2], Path(__file__).parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, check=False, capture_output=True)
    assert (done.returncode == 0) == reads, done.stderr.decode()
