"""The docs are right: examples run, settings, options and names exist, links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

import firm
from firm.cli.app import app
from firm.drawn.render import draw_dataset, write_folder
from firm.errors import SettingError
from firm.outliers.registry import OUTLIERS
from firm.recipes.presets import PRESETS
from firm.recipes.recipe import Recipe, change, parse_settings
from firm.research.tables import Row, Table, plan
from firm.training.positives import POSITIVES

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "docs" / "python.md"
OURS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOREIGN = {"--extra-index-url"}  # an option of pip
WRITTEN = [page for page in OURS if "results" not in page.parts]  # the pages of results are made by `firm bench`


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small parts for the default settings."""
    import cv2

    write_folder(tmp_path / "drawn", "plate", size=64, train=14, good=6, bad=1)
    (tmp_path / "parts").mkdir()
    (tmp_path / "drawn" / "train" / "good").rename(tmp_path / "parts" / "good")
    (tmp_path / "drawn" / "test" / "good").rename(tmp_path / "parts" / "more")
    (tmp_path / "parts" / "new").mkdir()
    for number, image in enumerate(draw_dataset("plate", size=64, train=0, good=3, bad=3, seed=5).test, 12):
        cv2.imwrite(str(tmp_path / "parts" / "new" / f"{number:03d}.png"), image.permute(1, 2, 0).numpy())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")  # so few good images can guarantee little
def test_the_python_page_runs_from_top_to_bottom(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    blocks = re.findall(r"```python\n(.*?)```", PYTHON.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 10
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # where the classes of the page belong
    try:
        torch.set_num_threads(1)
        for block in blocks:
            exec(compile(block, str(PYTHON), "exec", dont_inherit=True), page.__dict__)
    finally:
        torch.set_num_threads(threads)
    assert (workshop / "out" / "report.html").is_file()
    assert (workshop / "part.firm" / "card.json").is_file()


def test_every_setting_that_the_docs_name_exists() -> None:
    recipes = {name: change(preset, {}) for name, preset in PRESETS.items()}
    recipes |= {f"outliers={name}": change(PRESETS["patches"], {"outliers": name}) for name in OUTLIERS}
    recipes["object"] = change(PRESETS["inspect"], {"conditioning.foreground.method": "otsu"})
    roots = "|".join(vars(recipes["paper"]))
    value = r"(\[[^\]]*\]|[^\s`,;)]+)"
    path = re.compile(rf"(?<![\w./])((?:{roots})(?:\.[a-z_]+)+)(?:={value})?")
    plain = re.compile(rf"(?:--set |`)({roots})={value}")
    wrong, count = [], 0
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        for name, value in [*path.findall(text), *plain.findall(text)]:
            if name.endswith((".md", ".py", ".png")) or _is_module(name):
                continue
            count += 1
            if not any(_accepts(each, name, value) for each in recipes.values()):
                wrong.append(f"{page.name}: {name}={value}")
    assert not wrong
    assert count > 100


def _is_module(name: str) -> bool:
    return (ROOT / "src" / "firm" / Path(*name.split(".")[:2])).with_suffix(".py").is_file()


def _accepts(recipe: Recipe, path: str, value: str) -> bool:
    """Whether the recipe has the setting, and may be given the value if there is one."""
    here: object = recipe
    for name in path.split("."):
        if not hasattr(here, name):
            return False
        here = getattr(here, name)
    try:
        change(recipe, parse_settings([f"{path}={value}"] if value else []))
    except SettingError:
        return False
    return True


def test_every_command_and_option_that_the_docs_name_exists() -> None:
    commands = typer.main.get_command(app).commands
    groups = ("bench", "sia")
    commands |= {f"{group} {name}": verb for group in groups for name, verb in commands[group].commands.items()}
    verbs = {
        name: {option for each in verb.params for option in each.opts + each.secondary_opts}
        for name, verb in commands.items()
    }
    known = {"--version", "--install-completion", "--show-completion", "--help"}.union(*verbs.values())
    wrong, count = [], 0
    for page in OURS:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        for line in [*lines, *re.findall(r"`(firm [^`]+)`", text)]:
            words = line.partition("#")[0].split()
            if len(words) < 2 or words[0] != "firm" or words[1].startswith("-"):
                continue
            count += 1
            verb, used = words[1], {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
            if verb in groups and len(words) > 2:
                verb = f"{verb} {words[2]}"
            if verb not in verbs or used - verbs[verb]:
                wrong.append(f"{page.name}: {line}")
        wrong += [
            f"{page.name}: {option}"
            for option in re.findall(r"`(--[a-z][a-z-]+)", text)
            if option not in known | FOREIGN
        ]
    assert not wrong
    assert count > 40


def test_every_name_of_the_package_that_the_docs_mention_exists() -> None:
    wrong, count = [], 0
    for page in OURS:
        for name in re.findall(r"`(firm\.[a-z_]+(?:\.\w+)*)`", page.read_text(encoding="utf-8")):
            count += 1
            if not _importable(name):
                wrong.append(f"{page.name}: {name}")
    assert not wrong
    assert count > 60


def _importable(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            fields = getattr(thing, "__dataclass_fields__", {})
            if attribute in fields:
                return True
            if not hasattr(thing, attribute):
                return False
            thing = getattr(thing, attribute)
        return True
    return False


@pytest.mark.filterwarnings("ignore::UserWarning")  # so few good images can guarantee little
def test_the_script_of_the_research_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "parts", "plate", size=64, train=10, good=3, bad=3)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "research.md").read_text("utf-8"), re.DOTALL)
    script = ModuleType("study")
    monkeypatch.setitem(sys.modules, "study", script)
    monkeypatch.setitem(POSITIVES, "within kind", POSITIVES["firm"])  # forgotten after the test
    exec(compile(block, "research.md", "exec", dont_inherit=True), script.__dict__)
    assert "| within kind | 2 |" in capsys.readouterr().out


def test_the_table_of_the_research_page_can_be_planned() -> None:
    block = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "research.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    for fields in json.loads("{" + block[1] + "}").values():
        rows = {name: Row(**row) for name, row in fields.pop("rows").items()}
        assert len(plan(Table(rows=rows, **fields), "short", [0])) == 6


@pytest.mark.slow
def test_the_example_of_own_images_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_images.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own-report" / "report.html").is_file()


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """As `make docs` builds it: a broken link or an unknown name of the API page is an error."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?(https?://[^\"' >]+)")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.findall(page.read_text(encoding="utf-8")), f"{page.name} loads something from the network"


def test_the_map_of_the_architecture_page_is_that_of_the_package() -> None:
    block = re.search(
        r"```text\nsrc/firm/\n(.*?)```", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    listed = re.findall(r"^  (\w+)(?:/|\.py) ", block[1], re.MULTILINE)
    assert listed == re.findall(r"^    (\w+) {2,}\w", str(firm.__doc__), re.MULTILINE)


def test_every_file_of_the_repository_that_the_docs_name_exists() -> None:
    for page in OURS:
        for name in re.findall(r"`((?:tests|examples|src|results|docs)/[\w./-]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_links_lead_somewhere() -> None:
    for page in OURS:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            file = (page.parent / target) if target else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor and file.suffix == ".md":
                assert anchor in _anchors(file), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
