"""How good groups and similarities are, by how vectors are prepared, where classes are known.

    python benchmarks/groups.py VECTORS [VECTORS ...] [--images 1000] [--draw FOLDER]

VECTORS is a features file of the pipeline, or what `maect embed --kind folder` wrote (.parquet).
Labels are used to score, never to group. By k-means with the best silhouette on raw vectors, and by
the graph of neighbours on standardised ones: how many groups are found for how many classes, the
adjusted Rand index, how alike two images are by the median, and how many nearest neighbours are of
the right class. `--draw FOLDER` draws sets to embed: individuals, each
with a pattern of its own, in any position, size and light, before backgrounds that say nothing.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance

Array = NDArray[np.float32]
SETS = {"individuals8": (8, 40), "individuals15": (15, 30), "individuals25": (25, 20)}
"""Drawn sets: individuals, and images of each."""


def read(path: Path) -> tuple[Array, NDArray[np.int64]]:
    """Vectors and the numbers of their classes."""
    if path.suffix == ".parquet":
        from maect.answers.vectors import Vectors

        vectors = Vectors.read(path)
        return vectors.values, np.unique(vectors.labels, return_inverse=True)[1]
    from maect.evaluate.store import open_features

    file = open_features(path)
    return file.values, file.labels


def right_neighbours(rows: Array, labels: NDArray[np.int64]) -> tuple[float, float]:
    """Median cosine of two images, and percent of nearest neighbours of the right class."""
    similarity = rows @ rows.T
    median = float(np.median(similarity[np.triu_indices(len(rows), 1)]))
    np.fill_diagonal(similarity, -np.inf)
    return median, 100 * float((labels[similarity.argmax(axis=1)] == labels).mean())


def silhouette_groups(rows: Array) -> NDArray[np.int64]:
    """K-means with the number of largest silhouette coefficient."""
    from sklearn.metrics import silhouette_score

    from maect.evaluate.clustering import _kmeans

    found = [_kmeans(rows, count) for count in range(2, 31)]
    return max(found, key=lambda labels: silhouette_score(rows, labels))


def graph(rows: Array) -> NDArray[np.int64]:
    """What `maect cluster` does."""
    from maect.evaluate.clustering import choose_resolution, graph_groups

    found = graph_groups(rows)
    return found[choose_resolution(found)]


def compare(path: Path, images: int) -> None:
    """Print the lines of one set."""
    from sklearn.metrics import adjusted_rand_score

    from maect.evaluate.clustering import standardized
    from maect.evaluate.store import unit

    values, labels = read(path)
    chosen = np.random.default_rng(0).permutation(len(values))[:images]
    values, labels = values[chosen], labels[chosen]
    classes = len(np.unique(labels))
    for name, method, rows in (
        ("k-means, raw", silhouette_groups, unit(values)),
        ("graph, standardised", graph, unit(standardized(values))),
    ):
        median, right = right_neighbours(rows, labels)
        found = method(rows)
        count, rand = len(np.unique(found)), 100 * adjusted_rand_score(labels, found)
        print(
            f"{path.parent.name}/{path.stem:<20} {name:<19} {count:3d} of {classes:3d} groups, "
            f"ARI {rand:5.1f}; median cosine {median:6.3f}; 1-NN {right:5.1f} %",
            flush=True,
        )


def draw(folder: Path) -> None:
    """Write SET/INDIVIDUAL/NN.png of all sets."""
    for name, (individuals, images) in SETS.items():
        for number in range(individuals):
            look = np.random.default_rng([sum(map(ord, name)), number])
            colors = [tuple(look.integers(0, 256, 3).tolist()) for _ in range(3)]
            spots = look.uniform(0.05, 0.95, (6, 2)), look.uniform(0.08, 0.25, 6)
            for k in range(images):
                path = folder / name / f"{number:02d}" / f"{k:02d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                individual(colors, spots, np.random.default_rng([number, k, 1])).save(path)


def individual(
    colors: list[tuple[int, ...]],
    spots: tuple[NDArray[np.float64], NDArray[np.float64]],
    rng: np.random.Generator,
    side: int = 64,
) -> Image.Image:
    """One image: an ellipse with spots, turned, shifted, lit, before a smooth random background."""
    small = rng.integers(60, 200, (4, 4, 3), dtype=np.uint8)
    ground = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
    body = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    pen = ImageDraw.Draw(body)
    pen.ellipse((2, 10, side - 2, side - 10), fill=(*colors[0], 255))
    for (x, y), radius in zip(*spots, strict=True):
        box = [side * v for v in (x - radius / 2, y - radius / 2, x + radius / 2, y + radius / 2)]
        pen.ellipse(box, fill=(*colors[1 + int(radius > 0.16)], 255))
    mask = Image.new("L", (side, side), 0)
    ImageDraw.Draw(mask).ellipse((2, 10, side - 2, side - 10), fill=255)
    body.putalpha(mask)
    size = int(side * rng.uniform(0.65, 0.95))
    body = body.resize((size, size), Image.Resampling.BICUBIC).rotate(rng.uniform(-25, 25))
    at = rng.integers(0, side - size + 1, 2).tolist()
    ground.paste(body, (at[0], at[1]), body)
    return ImageEnhance.Brightness(ground).enhance(float(rng.uniform(0.7, 1.3)))


def main() -> None:
    """Draw, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("vectors", type=Path, nargs="*")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    if options.draw:
        draw(options.draw)
    for path in options.vectors:
        compare(path, options.images)


if __name__ == "__main__":
    sys.exit(main())
