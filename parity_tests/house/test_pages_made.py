"""Pages and pictures that scripts make are up to date, and the site is built from docs/ without a warning."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.config.file import settings
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.docs import pictures, settings_page
from lockstep.scripts.docs.pages import DOCS
from lockstep.scripts.docs.site_links import _inside, on_page_content
from lockstep.scripts.studies import calibration_page


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as a reader would: `mkdocs build --strict`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})


def test_the_page_of_settings_is_what_the_configuration_says() -> None:
    """Else: python -m lockstep.scripts.docs.settings_page."""
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page()
    for key in settings():
        assert f"| `{key.rpartition('.')[2]}` |" in written
    assert "| fp16: initial loss scale" in written and "| Tokens per chunk" in written  # a value keeps its case


def test_the_page_of_calibration_is_that_of_the_table_in_force() -> None:
    """Else: python -m lockstep.scripts.studies.calibrate --page."""
    table = json.loads(calibrated_bounds.TABLE.read_text(encoding="utf-8"))
    written = (DOCS / "results/calibration.md").read_text(encoding="utf-8")
    _, heading, text = calibration_page.page(table, "made", "draws").partition("## How a bound follows")
    assert text and written.endswith(heading + text)
    assert (DOCS / "results/calibration.csv").read_text(encoding="utf-8") == calibration_page.rows(table)
    assert calibration_page.measured(table) == [one for one in calibration_page.RECIPES if one in table["recipes"]]
    kinds = sum(len(table["recipes"][recipe]) for recipe in calibration_page.measured(table))
    assert len(calibration_page.rows(table).splitlines()) == 1 + kinds


def test_a_held_out_run_that_is_accused_is_counted() -> None:
    table = json.loads(calibrated_bounds.TABLE.read_text(encoding="utf-8"))
    held_out = table["held_out"]["bf16/eager"]
    draws = sum(row["draws"] for row in held_out.values())
    assert f" | {draws:,} | 0 |" in calibration_page.page(table, "made", "draws")
    held_out["forward/q"]["accused"] += 3
    assert f" | {draws:,} | 3 |" in calibration_page.page(table, "made", "draws")


@pytest.mark.parametrize("picture", ["cost.svg", "idea.svg", "rooms.svg", "verdict.svg"])
def test_a_picture_is_what_its_script_draws(picture: str) -> None:
    """Else: python -m lockstep.scripts.docs.pictures."""
    drawn = {file.name: text for file, text in pictures.pictures().items()}[picture]
    assert (DOCS / "pictures" / picture).read_text(encoding="utf-8") == drawn
    assert not re.search(r"(?:href|src|url)\W{1,2}https?:", drawn)


def test_a_link_to_the_sources_becomes_its_words() -> None:
    text = "[a](../../core/x.py) [b](verdict.md#stages) [c](../results) [d](https://e.org) ![e](../pictures/idea.svg)"
    assert _inside(text, "guide") == "a [b](verdict.md#stages) c [d](https://e.org) ![e](../pictures/idea.svg)"


def test_no_line_of_the_site_is_broken_within_an_option() -> None:
    html = "<p><code>train --optim.peak-lr 1e-3 -h</code> well-known</p><pre><code>train --resume a-b</code></pre>"
    whole = '<span class="option">--optim.peak-lr</span>', '<span class="option">-h</span>'
    assert on_page_content(html) == html.replace("--optim.peak-lr", whole[0]).replace(" -h<", f" {whole[1]}<")
    assert on_page_content("<code>bits-per-byte 1e-3</code>") == "<code>bits-per-byte 1e-3</code>"
    assert re.search(r"code \.option \{\s*white-space: nowrap", (DOCS / "site.css").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def small_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], str]:
    """Build a site of one page, with the configuration of the real one; the slow test builds that without a warning."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "docs").mkdir()
    links = "[a](#here) [b](index.md#there) [c](nowhere.md)"
    lists = "- one\n  on two lines\n  - two\n    on two lines"
    (folder / "docs/index.md").write_text(f"# Page\n\n## Here\n\n{links}\n\n{lists}\n")
    (folder / "docs/site.css").write_text("")
    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    text = re.sub(r"\nnav:\n(?:  .*\n)+", "\n", text).replace("scripts/docs/", f"{REPO}/scripts/docs/")
    (folder / "mkdocs.yml").write_text(text)
    built = build(folder / "mkdocs.yml", folder / "site")
    return built, (folder / "site/index.html").read_text(encoding="utf-8")


def test_a_broken_link_and_a_broken_anchor_fail_the_build(small_site) -> None:
    built, _ = small_site
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    assert built.returncode == 1 and len(warnings) == 2, built.stderr
    assert "'nowhere.md'" in built.stderr and "'index.md#there'" in built.stderr


def test_a_list_within_a_list_is_one_on_the_site(small_site) -> None:
    """The pages indent it by two spaces."""
    html = re.sub(r"\s*(<[^>]+>)\s*", r"\1", " ".join(small_site[1].split()))
    assert "<li>one on two lines<ul><li>two on two lines</li></ul></li>" in html


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(REPO / "mkdocs.yml", tmp_path / "site")
    assert (built.returncode, "WARNING" in built.stderr) == (0, False), built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    loads = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+\"|@import[^;]*//")
    for page in pages:
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page.name
