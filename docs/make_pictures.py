"""Write docs/report_group.png and docs/report_sample.png from a finished demo.

    make demo
    python -m tools.view_run outputs/demo_seed0    # only if tools/view_run.py has changed since
    python docs/make_pictures.py                   # uses outputs/demo_seed0; needs Chromium

The pictures show a sample with a correct answer in which the judge and the oracle name the same wrong
paragraph, and its group. It is the first such sample from --step on.
"""

import json
import subprocess
import sys
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import tyro
from PIL import Image, ImageChops

from run_folder import read_lines
from toy.toy_world import first_wrong_paragraph

WIDTH, HEIGHT = 1240, 1600
BESIDE_THE_GROUP = "#sample"
BESIDE_THE_SAMPLE = "header, #notes, body > .bar, section > .bar, .two"


@dataclass
class Config:
    """Writes the two pictures of a run's web page."""

    run: Path = Path("outputs/demo_seed0")  # Output directory of the demo.
    step: int = 15  # First step from which the group may come.
    chromium: str = "chromium"  # Name or path of the Chromium program.


def choose(run: Path, first_step: int) -> dict[str, int]:
    """Return the step, group and sample to show. Raises ValueError if no sample qualifies."""
    lines, _ = read_lines(run / "samples.jsonl")
    before = []
    for line in lines:
        same_group = before and all(before[-1][key] == line[key] for key in ("step", "group", "split"))
        before = [*before, line] if same_group else [line]
        said = line["reward_extra_info"]
        if line["split"] != "train" or line["step"] < first_step or not said.get("flawed_positive"):
            continue
        if said["first_wrong"] == first_wrong_paragraph(line["prompt"], line["response"]):
            return {"step": line["step"], "group": line["group"], "sample": len(before) - 1}
    raise ValueError(f"--step {first_step}: from this step on, judge and oracle never agree on a flaw in "
                     f"{run}; try a lower --step")  # fmt: skip


def photograph(page: Path, chromium: str, hidden: str, target: Path, **state) -> None:
    """Save a screenshot of the page in this state, without the `hidden` elements, and crop its bottom."""
    with tempfile.TemporaryDirectory() as folder:
        copy, picture = Path(folder, "page.html"), Path(folder, "picture.png")
        style = f"{hidden} {{ display: none !important }}</style>"
        copy.write_text(page.read_text().replace("</style>", style, 1))
        address = f"{copy.as_uri()}#{urllib.parse.urlencode(state)}"
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=2000"]
        command += [f"--screenshot={picture}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(picture).convert("RGB")
        bottom = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()[3]
        image.crop((0, 0, WIDTH, min(bottom + 12, HEIGHT))).save(target, optimize=True)


def main() -> None:
    config = tyro.cli(Config)
    chosen = choose(config.run / "fapo", config.step)
    state = {"view": "groups", "run": "fapo", "split": "train", **chosen}
    print(json.dumps(state))
    page = config.run / "report.html"
    photograph(page, config.chromium, BESIDE_THE_GROUP, DOCS / "report_group.png", **state)
    photograph(page, config.chromium, BESIDE_THE_SAMPLE, DOCS / "report_sample.png", **state)


if __name__ == "__main__":
    main()
