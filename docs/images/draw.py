"""Draws the pictures of the README: the report and the plan of a run, in headless Chromium.

    python docs/images/draw.py [RUN]           # or `make images`

Without the directory of a run it trains configs/minimal_gpt.yaml. It writes both pages anew, and report.png and
plan.png next to this file. Needs chromium and the extra `plot`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent
CONFIG = FOLDER.parents[1] / "configs" / "minimal_gpt.yaml"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000"]
WIDTH, HEIGHT, COLORS = 1200, 680, 96


def spmdkit(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "spmdkit", *arguments], check=True, timeout=900)


def draw(page: Path, picture: Path, folder: Path) -> None:
    """Writes the upper part of a page as a PNG with few colors."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("docs/images/draw.py needs chromium, found none on PATH. Install it: apt-get install chromium")
    options = [*FLAGS, f"--window-size={WIDTH},{HEIGHT}", f"--user-data-dir={folder / 'profile'}"]
    command = [chromium, *options, f"--screenshot={picture}", f"file://{page.resolve()}"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS).save(picture, optimize=True)


def main(run: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(run or f"{folder}/run")
        if run is None:
            spmdkit("train", str(CONFIG), f"run_dir={directory}", "log.progress=off")
        spmdkit("report", str(directory))
        spmdkit("plan", str(directory / "plan.json"), "--html", f"{folder}/plan.html")
        draw(directory / "report.html", FOLDER / "report.png", Path(folder))
        draw(Path(folder, "plan.html"), FOLDER / "plan.png", Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
