"""report.html in a real browser without a network: opens, navigates, shows, also small and dark."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from browser import Browser, browsing, need_chromium
from conftest import MINI, ROOT
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

ASKED: dict[str, Any] = {
    "evaluate": [{"runs": ["mae_tiny", "ct_min_tiny"], "protocols": ["knn", "clustering", "umap"]}],
    "tables": ["low_shot", "clustering"],
    "figures": ["umap", "pipeline"],
}


def write_results(root: Path) -> None:
    """Small results in the places where the pipeline leaves them: only tables and on are built."""
    images, labels = load_digits(return_X_y=True)
    sources = {"mae_tiny": None, "head_min_tiny": "mae_tiny", "ct_min_tiny": "head_min_tiny"}
    stages = ("pretrain", "head", "tune")
    for (run, source), stage in zip(sources.items(), stages, strict=True):
        folder = root / "runs" / run
        folder.mkdir(parents=True)
        record = {"run": run, "stage": stage, "source": source, "device_hours": 0.5, "seed": 0}
        (folder / "run.json").write_text(json.dumps(record))
    results = ("mae_tiny", "ct_min_tiny")
    for number, run in enumerate(results):
        metrics = {
            "knn": {"knn": 88.0 + number, "knn_standardized": 89.0 + number},
            "clustering": {"accuracy": 57.0 + number, "silhouette": 10.0},
            "umap": {},
        }
        folder = root / "evaluations" / run
        folder.mkdir(parents=True)
        for name, values in metrics.items():
            result = {"metrics": values, "settings": {}, "provenance": {"run": run}}
            (folder / f"{name}.json").write_text(json.dumps(result))
        points = np.ascontiguousarray(images[:300, 20 + number : 22 + number], np.float32)
        save_file({"points": points, "labels": labels[:300].astype(np.int64)},
                  folder / "umap.safetensors")  # fmt: skip
    index = root / "shards/digits/val/index.json"
    index.parent.mkdir(parents=True)
    index.write_text(json.dumps({"class_names": [str(n) for n in range(10)]}))
    # What is never read: empty, and older the earlier the pipeline makes it.
    shards = [f"shards/digits/{split}" for split in ("train", "val")]
    runs = [f"runs/{run}" for run in sources]
    left = [f"{n}.json" for n in ("knn", "clustering", "umap")]
    left += ["clustering.safetensors", "umap.safetensors"]
    of_run = ("encoder.safetensors", "head.safetensors", "run.json")
    features = [f"features/{run}/digits-{s}" for run in results for s in ("train", "val")]
    stages_of_files = [
        ["images/digits/done"],
        [f"{folder}/plan.json" for folder in shards],
        ["shards/digits/val/val-000000.tar"]
        + [f"shards/digits/train/train-00000{n}.tar" for n in range(2)],
        [f"{folder}/{name}" for folder in shards for name in ("index.npy", "index.json")],
        *([f"{run}/{n}" for n in of_run] for run in runs),
        [f"{name}.safetensors" for name in features],
        [f"evaluations/{run}/{n}" for run in results for n in left],
    ]  # fmt: skip
    for age, names in enumerate(reversed(stages_of_files), start=1):
        for path in (root / name for name in names):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (time.time() - 60 * age,) * 2)
    os.utime(root / "images/digits", (time.time() - 3600,) * 2)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_chromium()
    folder = tmp_path_factory.mktemp("report")
    write_results(folder / "results")
    file = folder / "small.yaml"
    text = MINI | ASKED | {"storage": str(folder / "results")}
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--directory", str(folder), "--cores", "2", "--rerun-triggers", "mtime"]
    command += ["--config", f"experiment={file}"]
    plan = subprocess.run([*command, "-n"], capture_output=True, text=True, cwd=ROOT)
    jobs = dict(re.findall(r"(?m)^(\w+) +(\d+)$", plan.stdout))
    assert set(jobs) == {"table", "figure", "claims", "report_html", "report", "total"}, jobs
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "results/report.html"


LISTED = "return [...document.querySelectorAll('#app nav tbody tr')].map(row => row.innerText)"
SHOW = "document.querySelectorAll('#app nav tbody tr')[arguments[0]].querySelector('a').click()"


def show(browser: Browser, category: str) -> list[str]:
    """Go to a category from the menu; what it lists."""
    browser.script("app.setView({navbarMode: 'menu'})")
    menu = "return document.querySelector('#app > div > nav').innerText.includes(arguments[0])"
    browser.wait_for(menu, category)
    browser.script("app.showCategory(arguments[0])", category)
    browser.wait_for(f"{LISTED}.length > 0")
    return [" ".join(row.split()) for row in browser.script(LISTED)]


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_the_report_in_a_browser(report: Path, tmp_path: Path, dark: bool, width: int) -> None:
    with browsing(dark, width) as browser:
        browser.open(report)
        # It opens on the verdict, at its top.
        browser.wait_for("return document.querySelector('#app > div > nav + div h1') !== null")
        title = "const h = document.querySelector('#app > div > nav + div h1');"
        assert browser.script(f"{title} return h.innerText") == "Claims"
        assert 0 <= browser.script(f"{title} return h.getBoundingClientRect().top") < 600
        verdict = browser.script(
            "return document.querySelector('#app > div > nav + div').innerText"
        )
        assert "hold" in verdict and "Tuning with minimal augmentation raises k-NN" in verdict
        wide = browser.script("return document.documentElement.scrollWidth")
        assert wide <= width
        back = browser.script("return getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(18, 22, 28)") == dark
        # The paper's order.
        tables = show(browser, "2 Tables")
        assert [row.split()[1] for row in tables] == ["1:", "2:"]
        for number in range(len(tables)):
            browser.script(SHOW, number)
            browser.wait_for("return document.querySelector('iframe') !== null")
            browser.frame("iframe")
            browser.wait_for("return document.querySelectorAll('td a').length > 0")
            # Each number leads to its result.
            browser.script("document.querySelector('td a').click()")
            browser.wait_for("return document.querySelector('details[open] pre') !== null")
            opened = browser.script("return document.querySelector('details[open]').textContent")
            assert "mae_tiny" in opened and '"metrics"' in opened
            assert "runs/mae_tiny/run.json" in browser.script("return document.body.textContent")
            browser.frame(None)
        figures = show(browser, "3 Figures")
        assert [row.split()[1] for row in figures] == ["4:", "6:"]
        for number in range(len(figures)):
            browser.script(SHOW, number)
            shown = browser.wait_for(
                "const i = document.querySelector('#app > div > nav + div img');"
                "return i && i.complete && i.naturalWidth && [i.naturalWidth, i.clientWidth]"
            )
            assert shown[0] == 1360 and 0 < shown[1] <= width
        browser.screenshot(tmp_path / "last.png")
        assert browser.errors() == []


def test_captions_are_in_it_and_nothing_comes_from_elsewhere(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    for words in ("Low-shot classification with 1, 2 and 5 labels", "UMAP embeddings of the"):
        assert words in text
    assert not re.search(r"""<(?:script|link|img)[^>]+(?:src|href)=["']https?://""", text)
