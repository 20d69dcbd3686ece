"""report.html in a real browser without a network: small, dark, by keyboard, on paper."""

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from browser import Browser, browsing, need_chromium
from mini_pipeline import MINI
from PIL import Image
from safetensors.numpy import save_file

from maect.answers.groups import write_clusters
from maect.answers.vectors import Vectors
from maect.core.files import write_record
from maect.evaluate.clustering import cluster
from maect.evaluate.pictures import atlas
from maect.experiment import Experiment, load
from maect.experiment.pages import make_page, pages
from maect.experiment.resolve import evaluation_config, run_config
from maect.records import EvaluationRecord, RunRecord
from maect.report.configs import ImagesConfig, ReportConfig
from maect.report.pages import make_images, make_report

ASKED: dict[str, Any] = {
    "evaluate": [
        {"runs": ["mae_tiny", "ct_min_tiny"], "protocols": ["knn", "clustering", "explore"]}
    ],
    "tables": ["low_shot", "clustering"],
    "figures": ["pipeline"],
}
NASTY = "<b onclick=alert(1)>'\"&</script>"
"""What somebody's files and folders may be called."""


def write_explored(path: Path, count: int = 200, classes: bool = True, side: int = 32) -> None:
    """What the protocol `explore` leaves, of noise: pictures that cannot be made any smaller."""
    rng = np.random.default_rng(0)
    near = (np.arange(count)[:, None] + [1, 2, 3]) % count
    tensors = {
        "points": rng.normal(size=(count, 2)).astype(np.float32),
        "splits": np.arange(count) % 2,
        "ids": np.arange(count),
        "labels": np.arange(count) % 3 if classes else np.full(count, -1),
        "clusters": np.arange(count) * 4 // count,
        "distance": rng.random(count),
        "grains": np.array([2]),
        "grain_clusters": np.arange(count)[None] * 2 // count,
        "grain_distance": rng.random((1, count)),
        "neighbors": near,
        "similarity": rng.random((count, 3)).astype(np.float32),
        "atlas": np.frombuffer(
            atlas(rng.integers(0, 256, (count, side, side, 3), np.uint8)), np.uint8
        ),
    }
    about = {
        # The last two have one name, each in its split.
        "names": [f"{NASTY}/No. {min(n, count - 2)}.png" for n in range(count)],
        "splits": ["train", "val"],
        "classes": [f"class {n} {NASTY}" for n in range(3)] if classes else [],
        "side": side,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, path,
        {"maect": json.dumps(about)},
    )  # fmt: skip


def write_results(experiment: Experiment) -> None:
    """Small results in the places where the pipeline leaves them, for the pages to be made of."""
    for run in experiment.runs:
        told = run_config(experiment, run)
        RunRecord(
            run=run, stage=told.stage, settings=told.settings.model_dump(mode="json"),
            seed=told.seed, encoder=told.encoder, source=told.source and told.source.name,
            device_hours=0.5,
        ).write(RunRecord.path(experiment.folder(run)))  # fmt: skip
    for run, tuned in (("mae_tiny", 0), ("ct_min_tiny", 1)):
        metrics = {
            "knn": {"knn": 88.0 + tuned, "knn_standardized": 89.0 + tuned},
            "clustering": {"accuracy": 57.0 + 10 * tuned, "silhouette": 10.0},
            "explore": {"images": 200},
        }
        folder = experiment.root / "evaluations" / run
        for name, values in metrics.items():
            config = evaluation_config(experiment, run, name)
            settings = config.settings.model_dump(mode="json") | {"resize": config.resize}
            record = EvaluationRecord(metrics=values, settings=settings, provenance={"run": run})
            record.write(folder / f"{name}.json")
        write_explored(folder / "explore.safetensors")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_chromium()
    folder = tmp_path_factory.mktemp("report")
    file = folder / "small.yaml"
    text = MINI | ASKED | {"storage": str(folder / "results")}
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    experiment = load(str(file))
    write_results(experiment)
    for path, config in pages(experiment):
        config.write(path)
        make_page(path)
    return experiment.root / "report.html"


def look_through(browser: Browser, run: str) -> None:
    """Use the map of images as a reader would."""
    browser.wait_for("return document.body.dataset.ready === 'yes'")
    text = browser.script("return document.body.innerText")
    assert f"from the vectors of {run}" in text and "4 groups" in text
    assert browser.script("return document.querySelectorAll('[onclick]').length") == 0  # no markup
    # Something is drawn, and more of it when one is nearer.
    drawn = (
        "const c = document.getElementById('map'), d = c.getContext('2d');"
        "return new Set(new Uint32Array(d.getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert browser.script(drawn) > 1000
    browser.script("for (let i = 0; i < 6; i++) document.getElementById('in').click()")
    assert browser.script(drawn) > 1000
    browser.script("document.getElementById('all').click()")
    # The pointer on an image shows it with its name, a click what looks like it.
    spot = "const [x, y] = place(5), b = canvas.getBoundingClientRect();"
    event = "{clientX: b.left + x, clientY: b.top + y, pointerId: 1}"
    browser.script(f"{spot} canvas.dispatchEvent(new PointerEvent('pointermove', {event}))")
    tip = "return getComputedStyle(tip).display !== 'none' && tip.innerText"
    assert f"{NASTY}/No. " in browser.script(tip)
    browser.script("choose(5)")
    near = browser.script("return document.getElementById('one').innerText")
    assert f"{NASTY}/No. 5.png" in near and "What looks like it" in near
    assert browser.script("return document.querySelectorAll('#one .card').length") == 3
    assert browser.script("return document.querySelectorAll('#groups .card').length") == 48
    browser.script("document.getElementById('coarser').click()")
    assert "2 groups" in browser.script("return document.getElementById('about').innerText")
    assert browser.script("return document.querySelectorAll('#groups .card').length") == 24
    assert browser.script("return document.getElementById('coarser').disabled")
    # The keyboard does the same: the image in the middle of the map is opened.
    browser.script(
        "document.getElementById('all').click(); chosen = -1; canvas.focus();"
        "for (const key of ['ArrowLeft', '+', '+', 'Enter'])"
        "  canvas.dispatchEvent(new KeyboardEvent('keydown', {key}))"
    )
    assert browser.script("return document.activeElement === canvas && chosen >= -1 && zoom > 2")
    browser.script("const f = document.getElementById('find'); f.value = 'no. 7'; f.oninput()")
    assert browser.script("return [...Array(200).keys()].filter(fits).length") == 11


# What the Tab key reaches, in its order, that cannot be named to somebody who does not see it.
TABBED = """
return [...document.querySelectorAll('a[href], summary, iframe, [tabindex="0"]')]
  .filter(e => !e.textContent.trim() && !e.title && !e.getAttribute('aria-label')
               && !e.querySelector('img[alt]')).map(e => e.outerHTML.slice(0, 80))
"""
# Boxes of what is not within something that scrolls by itself.
BOXES = """
return [...document.querySelectorAll('main :is(h1, h2, h3, p, table, li, img)')]
  .filter(e => !e.closest('.scroll')).map(e => e.getBoundingClientRect())
  .filter(b => b.width).map(b => [b.left, b.right])
"""


def open_page(browser: Browser, page: Path, dark: bool, width: int) -> str:
    """Open a page, which fits into the window and has the reader's colours; return its text."""
    browser.open(page)
    assert browser.script("return document.documentElement.scrollWidth") <= width, page
    back = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(18, 22, 28)") == dark
    return browser.script("return document.body.textContent")


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_the_report_in_a_browser(report, dark, width):
    with browsing(dark, width) as browser:
        text = open_page(browser, report, dark, width)
        first = browser.script("return document.querySelector('h1').innerText")
        assert first.startswith("Cluster accuracy rises from 57.0 % (MAE) to 67.0 % (MAE-CT min)")
        assert browser.script("return document.querySelector('th + th').innerText") == (
            "Cluster accuracy"
        )
        top = "return document.querySelector('h1').getBoundingClientRect().top"
        assert 0 <= browser.script(top) < 300
        assert "Tuning with minimal augmentation raises k-NN" in text
        words = browser.script("return [...document.querySelectorAll('abbr')].map(e => e.title)")
        assert any("before tuning" in word for word in words)
        # Nothing is to the left or the right of what can be seen without scrolling sideways.
        boxes = browser.script(BOXES)
        assert min(left for left, _ in boxes) >= 0 and max(right for _, right in boxes) <= width
        # Figures are drawn for the page: the corner of a dark one is as dark as the page.
        corner = (
            "const i = document.querySelector('figure img'), c = document.createElement('canvas');"
            "const d = c.getContext('2d'); d.drawImage(i, 0, 0);"
            "return i.complete && [...d.getImageData(2, 2, 1, 1).data.slice(0, 3)]"
        )
        assert browser.wait_for(corner) == ([18, 22, 28] if dark else [255, 255, 255])
        # A number leads to its result, which is folded away until then.
        browser.script("document.querySelector('td a').click()")
        browser.wait_for("return document.querySelector('details[open] pre') !== null")
        opened = browser.script("return document.querySelector('details[open]').textContent")
        assert "mae_tiny" in opened and '"metrics"' in opened and "runs/mae_tiny/run.json" in text
        # The keyboard reaches everything, and the first link leads past the menu.
        assert browser.script(TABBED) == []
        assert browser.script("return document.querySelector('a').hash") == "#main"
        browser.frame("iframe")
        look_through(browser, "ct_min_tiny")
        browser.frame(None)
        assert browser.errors() == []
        # On paper there is no menu, and nothing is cut off.
        browser.devtools("Emulation.setEmulatedMedia", media="print")
        of_each = "return [...document.querySelectorAll(arguments[0])].map"
        widths = browser.script(f"{of_each}(e => e.offsetWidth)", "nav, iframe, #sources")
        assert widths == [0, 0, 0]
        cut = browser.script(f"{of_each}(e => getComputedStyle(e).overflowX)", ".scroll")
        assert set(cut) == {"visible"}
    text = report.read_text(encoding="utf-8")
    assert not re.search(r"""<(?:script|link|img)[^>]+(?:src|href)=["']https?://""", text)
    assert report.stat().st_size < 5_000_000


# What the groups on show look like: a picture belongs to several, and is in the page once.
PICTURES = """
return [...document.querySelectorAll('figure span')].filter(one => one.offsetWidth)
  .map(one => getComputedStyle(one).backgroundImage)
"""


# The image that a click on each cell of the pairs opens; -1: none.
PAIRED = """
return [...document.querySelectorAll('#pairs td.pair')]
  .map(cell => { chosen = -1; cell.click(); return chosen; })
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """First page, page of images and page of clusters of images without classes."""
    need_chromium()
    root = tmp_path_factory.mktemp("own")
    explored = root / "evaluations/ct_min/explore.safetensors"
    write_explored(explored, classes=False)
    splits = {"split_a": "train", "split_b": "val"}
    names = (f"{NASTY}/No. 198.png",) * 2, (f"{NASTY}/No. 1.png", "elsewhere.png")
    pairs = [{"a": a, "b": b, "similarity": 0.991} | splits for a, b in names]
    about = {"features_train": {"index_digest": "1"}, "features_val": {"index_digest": "2"}}
    record = EvaluationRecord(metrics={"images": 200}, provenance={"splits": about})
    record.write(explored.with_suffix(".json"))
    searched = {"run": "mae", "splits": {"train": "1", "val": "2"}, "pairs": pairs}
    write_record(root / "duplicates.json", searched)
    ImagesConfig(name="birds", explored=[explored], duplicates=root / "duplicates.json").write(
        root / "images.yaml"
    )
    make_images(root / "images.yaml")
    about = {"run": root / "runs/ct_min", "folder": root / "my birds", "explored": explored}
    about |= {"images": root / "images.html"}
    ReportConfig(name="birds", classifies=True, **about).write(root / "report.yaml")
    make_report(root / "report.yaml")
    photos = root / "photos"
    photos.mkdir()
    for number in range(8):
        name = f"{NASTY} {number}.png".replace("/", "")
        Image.fromarray(np.full((40, 40, 3), 30 * number, np.uint8)).save(photos / name)
    about = {"run": NASTY, "images": str(photos), "kind": "unlabelled"}
    values = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    vectors = Vectors(sorted(file.name for file in photos.iterdir()), values, about=about)
    write_clusters(vectors, cluster(values, 2), root / "clusters", vectors.source())
    return root


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_pages_of_somebodys_own_images(own, dark, width):
    with browsing(dark, width) as browser:
        for page in ("images.html", "report.html", "clusters/index.html"):
            text = open_page(browser, own / page, dark, width).lower()
            assert "paper" not in text and "claim" not in text
            assert browser.script("return document.querySelectorAll('b[onclick]').length") == 0
            images = "return [...document.images].filter(i => !i.hidden).map(i => i.naturalWidth)"
            shown = browser.script(images)
            if page == "images.html":
                look_through(browser, "ct_min")
                pair = browser.script("return document.getElementById('pairs').innerText")
                assert "0.991" in pair and "train and val" in pair and "elsewhere.png" in pair
                # Number 1 is in the other split: nothing is shown for one of its name.
                assert browser.script(PAIRED) == [198, 199, -1, -1] and "2 pairs by mae" in text
            elif page == "report.html":
                assert shown == [32] * 4 * 8
                assert "maect embed" in text and "my birds' --out birds.parquet" in text
                assert "maect duplicates" in text and "my birds' --out birds-classes.csv" in text
                browser.frame("iframe")
                browser.wait_for("return document.body.dataset.ready === 'yes'")
                browser.frame(None)
            else:
                seen = browser.script(PICTURES)
                files = [BytesIO(b64decode(url.partition(",")[2][:-2])) for url in seen]
                sizes = [Image.open(file).size for file in files]
                assert sizes == [(40, 40)] * 8 and NASTY.replace("/", "").lower() in text
            assert browser.errors() == []
