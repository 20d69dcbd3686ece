"""Checks `maect/{report,recipes}/paper/*.csv` cell by cell against the paper's LaTeX tables.

    python tests/transcription.py mae_ct.tex

The source (arXiv 2304.10520) is not part of this project. Prints a Markdown table of what was
compared and exits with status 1 if any cell is different, missing or in excess.
"""

import csv
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PAPER = Path(__file__).parents[1] / "maect" / "report" / "paper"
SETTINGS = Path(__file__).parents[1] / "maect" / "recipes" / "paper"
Cells = dict[tuple[str, str, str], str]
Grid = list[list[str]]

ARCHITECTURES = {
    "B/16": "base", "L/16": "large", "H/16": "huge", "H/14": "huge14", "S/8": "small8",
    "B/8": "base8", "L/7": "large7", "L/7-BN": "large7_bn", "H/14-BN": "huge14_bn",
    "H/16_448": "huge_448",
}  # fmt: skip
METHODS = {
    "MAE": "mae", "MAE (reimpl.)": "mae", "MAE_public": "mae_public", "MAE_reimpl": "mae",
    "MoCo v3": "moco_v3", "Moco v3": "moco_v3", "MSN": "msn", "iBOT": "ibot", "DINO": "dino",
    "I-JEPA": "i_jepa", "SimMIM": "simmim", "NNCLR": "nnclr", "CMAE": "cmae",
    "Layer Grafting": "layer_grafting", "MAE-CT_min": "ct_min", "MAE-CT_aug": "ct_aug",
    "MAE-CT_min (ours)": "ct_min", "MAE-CT_aug (ours)": "ct_aug",
}  # fmt: skip
# In these tables the tuned model has k = 1 (text of sections 4.4 and A.1).
K1 = {
    "MAE-CT_min": "ct_min_k1",
    "apply masking (75%) during CT": "ct_min_k1_masked",
    "skip NNCLR head initialization": "ct_min_k1_no_head",
    "NNCLR without NN lookup": "ct_min_k1_no_lookup",
    "MAE": "mae",
    "combined pre-training": "combined",
    "combined pre-training + CT_skip": "combined_ct_skip",
    "detached pre-training + CT_skip": "detached_ct_skip",
    "combined pre-training + CT": "combined_ct",
    "MAE_public": "mae_public",
    "MAE_reimpl": "mae",
    "MAE_public-CT_min": "ct_min_k1_public",
    "MAE_reimpl-CT_min": "ct_min_k1",
}
SWEEPS = {
    "Training epochs": "epochs", "Trainable layers": "trainable", "Encoder EMA": "encoder_ema",
    "Temperature \\tau": "temperature", "k-NN lookup k": "topk", "Projector EMA": "projector_ema",
}  # fmt: skip
ORACLE = {
    "MAE-CT_oracle linear probe": ("ct_oracle", "linear_probe"),
    "MAE fine-tuned": ("crop_flip", "fine_tune"),
    "+ Label smoothing": ("label_smoothing", "fine_tune"),
    "+ Mixup": ("mixup", "fine_tune"),
    "+ Cutmix": ("cutmix", "fine_tune"),
    "+ RandomErasing": ("random_erasing", "fine_tune"),
    "+ RandAugment": ("randaugment", "fine_tune"),
}
LOW_SHOT = ["low_shot_1", "low_shot_2", "low_shot_5", "low_shot_1pct", "low_shot_10pct"]
FEATURES = ["linear_probe", "knn"]
# Rows of the extended table that have one cell too few: the mask ratio is not there, so the last
# two numbers are printed one column to the left. They are read as probe and k-NN, which are also
# the values of DINO's own publication.
SHORT_ROWS = {("small8", "dino"), ("base", "dino")}


def argument(text: str, start: int) -> int:
    """Index behind the braced group that opens at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"unbalanced braces: {text[start : start + 60]!r}")


def drop(text: str, macro: str, arguments: int, keep: int | None) -> str:
    """Replace every `\\macro{..}..{..}` by its argument number `keep`, or by nothing."""
    while (found := re.search(rf"\\{macro}(?![A-Za-z])", text)) is not None:
        end, values = found.end(), []
        for _ in range(arguments):
            stop = argument(text, text.index("{", end))
            values.append(text[text.index("{", end) + 1 : stop - 1])
            end = stop
        text = text[: found.start()] + (values[keep] if keep is not None else "") + text[end:]
    return text


def plain(cell: str) -> str:
    """A cell as a reader sees it, with subscripts as `_x`."""
    cell = drop(cell, "multirow", 3, 2)
    for macro in ("textbf", "textit", "underline", "deemph", "text"):
        cell = drop(cell, macro, 1, 0)
    for macro in ("cite", "cellcolor"):
        cell = drop(cell, macro, 1, None)
    cell = cell.replace(r"\nobreakdash", "").replace("--CT", "-CT").replace(r"\approx", "≈")
    cell = cell.replace(r"\dag", "†").replace(r"\%", "%")
    cell = re.sub(r"\s+|~", " ", re.sub(r"[{}$^]", "", cell))
    return re.sub(r"\s+", " ", cell).strip()


def grids(source: str) -> Iterator[tuple[str, Grid]]:
    """Every tabular that has a label, as rows of plain cells."""
    source = re.sub(r"(?<!\\)%.*", "", source)
    for table in re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", source, flags=re.S):
        label = re.search(r"\\label\{tab:(\w+)\}", table)
        start = re.search(r"\\begin\{tabular\}", table)
        assert label and start, table[:80]
        body = table[argument(table, start.end()) : table.index(r"\end{tabular}")]
        rows = []
        for line in re.split(r"\\\\", body.replace(r"\hline", "")):
            cells: list[str] = []
            for cell in re.split(r"(?<!\\)&", line):
                wide = re.match(r"\s*\\multicolumn\{(\d+)\}", cell)
                text = drop(cell, "multicolumn", 3, 2) if wide else cell
                cells += [plain(text)] + [""] * (int(wide[1]) - 1 if wide else 0)
            if any(cells):
                rows.append(cells)
        yield label[1], rows


def by_model(columns: list[str]) -> Callable[[Grid], Cells]:
    """Architecture (once a group), method, one number a column."""

    def read(grid: Grid) -> Cells:
        cells, architecture = {}, ""
        for first, method, *values in grid[2:]:
            architecture = ARCHITECTURES[first.removeprefix("ViT-")] if first else architecture
            for column, value in zip(columns, values, strict=True):
                cells[architecture, METHODS[method], column] = value
        return cells

    return read


def by_name(columns: list[str]) -> Callable[[Grid], Cells]:
    """Method, one number a column; ViT-L throughout."""

    def read(grid: Grid) -> Cells:
        return {
            ("large", K1[method], column): value
            for method, *values in grid[1:]
            for column, value in zip(columns, values, strict=True)
        }

    return read


def by_size(columns: list[str]) -> Callable[[Grid], Cells]:
    """Method, and `value (second value)` for each size."""

    def read(grid: Grid) -> Cells:
        sizes = [ARCHITECTURES[cell.removeprefix("ViT-")] for cell in grid[0][1:] if cell]
        cells = {}
        for method, *values in grid[1:]:
            for size, value in zip(sizes, values, strict=False):
                numbers = re.findall(r"-?[\d.]+", value) if value != "-" else []
                for column, number in zip(columns, numbers, strict=False):
                    cells[size, METHODS[method], column] = number
        return cells

    return read


def clusters(grid: Grid) -> Cells:
    """Method, and four measures for each size."""
    sizes = [ARCHITECTURES[cell.removeprefix("ViT-")] for cell in grid[0] if cell]
    columns = [cell.lower().replace("acc", "accuracy") for cell in grid[1][1:]]
    return {
        (sizes[position // 4], METHODS[row[0]], columns[position]): value
        for row in grid[2:]
        if any(row[1:])
        for position, value in enumerate(row[1:])
    }


def robustness(grid: Grid) -> Cells:
    """Method, k, and four test sets."""
    cells = {}
    for method, k, *values in grid[1:]:
        name = METHODS[method]
        if name == "ct_min" and k != "20":  # 20 is the k of the headline model
            name = f"ct_min_k{k}"
        for column, value in zip(grid[0][2:], values, strict=True):
            cells["large", name, f"imagenet_{column.lower()}"] = value
    return cells


def sensitivity(grid: Grid) -> Cells:
    """Three lines a hyper-parameter: its values, probing, k-NN."""
    cells = {}
    for names, probes, neighbours in zip(grid[::3], grid[1::3], grid[2::3], strict=True):
        assert (probes[0], neighbours[0]) == ("Probing accuracy", "k-NN accuracy")
        for value, probe, knn in zip(names[1:], probes[1:], neighbours[1:], strict=True):
            if value != "-":
                cells["large", f"{SWEEPS[names[0]]}_{value}", "linear_probe"] = probe
                cells["large", f"{SWEEPS[names[0]]}_{value}", "knn"] = knn
    return cells


def concatenated(grid: Grid) -> Cells:
    """Method, size, and the number of blocks."""
    columns = [f"concat_{n}" for n in grid[0][2:6]] + ["concat_cls_mean"]
    assert grid[0][6] == "1†"
    return {
        (ARCHITECTURES[size], METHODS[method], column): value
        for method, size, *values in grid[1:]
        for column, value in zip(columns, values, strict=True)
    }


def invariance(grid: Grid) -> Cells:
    """Two blocks, rotations and colour, of the same rows; the column specification has one more."""
    cells, column = {}, ""
    sizes = [ARCHITECTURES[cell] for cell in grid[0][1:]]
    for row in grid[1:]:
        if not any(row[1:]):
            column = "ei_rotation" if "rotations" in row[0] else "ei_color"
            continue
        for size, value in zip(sizes, row[1:], strict=True):
            cells[size, METHODS[row[0]], column] = value
    return cells


def oracle(grid: Grid) -> Cells:
    """One number a row, below two headers."""
    return {("large", *ORACLE[name]): value for name, value, *_ in grid[1:] if value}


def extended(grid: Grid) -> Cells:
    """Method, architecture, training details, and two numbers."""
    cells = {}
    for row in grid[1:]:
        if not any(row[1:]):
            continue
        name, size, epochs, views, *rest = row
        size = ARCHITECTURES[size.removeprefix("ViT-")]
        # Only its own MAE is called MAE without a citation in the other tables.
        method = "mae_public" if name == "MAE" else METHODS[name]
        if (size, method) in SHORT_ROWS:
            assert len(rest) == 2, row
            rest = ["-", *rest]
        columns = ["epochs", "views", "mask_ratio", "linear_probe", "knn"]
        for column, value in zip(columns, [epochs, views, *rest], strict=True):
            cells[size, method, column] = value
    return cells


READERS: dict[str, tuple[str, Callable[[Grid], Cells]]] = {
    "lowshot": ("low_shot", by_model(LOW_SHOT + FEATURES)),
    "clustering_metrics": ("clustering", by_size(["accuracy", "silhouette"])),
    "ablation": ("ablation", by_name(FEATURES)),
    "combined": ("combined", by_name(FEATURES)),
    "transfer_large": ("robustness", robustness),
    "mae_reimpl": ("reimplementation", by_name(FEATURES)),
    "sensitivity": ("sensitivity", sensitivity),
    "concat_probe": ("concat_probe", concatenated),
    "finetune_100p": ("fine_tune", by_size(["fine_tune", "fine_tune_std"])),
    "lowshot_huge": ("huge14", by_model(LOW_SHOT + FEATURES)),
    "effective_invariance": ("effective_invariance", invariance),
    "finetune_minaug": ("oracle", oracle),
    "results_ext": ("extended", extended),
    "clustering_metrics_additional_best": ("clustering_best", clusters),
    "clustering_metrics_additional_average": ("clustering_mean", clusters),
    "clustering_metrics_dogs_best": ("dogs15_best", clusters),
    "clustering_metrics_dogs_average": ("dogs15_mean", clusters),
}
HYPER_PARAMETERS = {"linear_probing_hyperparameters"}
RECIPES = {
    "hyperparams_tuning": "ct_min",
    "hyperparams_aug_tuning": "ct_aug",
    "lowshot_finetuning_hyperparameters": "fine_tune_10pct",
}
SYMBOLS = {r"\beta_": "β", r"\rightarrow": "→", r"\tau": "τ"}
SYMBOLS |= {r"\tt": "", r"\_": "_", "2242": "224²"}


def settings(grid: Grid) -> Grid:
    """A table of hyper-parameters: indented lines with the line that they belong to."""
    rows, part = [["setting", *(cell.lower() for cell in grid[0][1:])]], ""
    for name, *values in grid[1:]:
        indented = name.startswith((r"\quad", r"\qquad"))
        name = name.removeprefix(r"\quad").removeprefix(r"\qquad").strip()
        part = part if indented else name
        if any(values):
            wide = [value or values[0] for value in values]
            rows.append([f"{part}: {name}" if indented else name, *wide])
    for symbol, text in SYMBOLS.items():
        rows = [[cell.replace(symbol, text) for cell in row] for row in rows]
    return rows


def compare_settings(name: str, printed: Grid) -> list[str]:
    """Differences between a printed table of hyper-parameters and our transcription."""
    with open(SETTINGS / f"{name}.csv", encoding="utf-8", newline="") as file:
        ours = list(csv.reader(file))
    pairs = itertools.zip_longest(printed, ours, fillvalue=[])
    return [f"{name}: paper {theirs}, csv {row}" for theirs, row in pairs if theirs != row]


def transcribed(name: str) -> Cells:
    """The cells of one of our CSVs, without the empty ones."""
    with open(PAPER / f"{name}.csv", encoding="utf-8", newline="") as file:
        return {
            (row["architecture"], row["method"], column): value
            for row in csv.DictReader(file)
            for column, value in row.items()
            if column not in ("architecture", "method") and value
        }


def compare(name: str, printed: Cells) -> list[str]:
    """Differences between what the paper prints and what we transcribed."""
    printed = {key: value for key, value in printed.items() if value not in ("-", "")}
    ours = transcribed(name)
    return [
        f"{name}: {' '.join(key)}: paper {printed.get(key)}, csv {ours.get(key)}"
        for key in sorted(printed.keys() | ours.keys())
        if printed.get(key) != ours.get(key)
    ]


def main(path: str) -> int:
    """Compare all tables; returns the exit status."""
    differences, total, seen = [], 0, set()
    print("| table | cells | differences |\n| --- | ---: | ---: |")
    for number, (label, grid) in enumerate(grids(Path(path).read_text(encoding="utf-8")), start=1):
        seen.add(label)
        if label in RECIPES:
            name, table = RECIPES[label], settings(grid)
            found = compare_settings(name, table)
            differences += found
            cells = sum(len(row) - 1 for row in table[1:])
            total += cells
            print(f"| recipe {name} (table {number}) | {cells} | {len(found)} |")
            continue
        if label in HYPER_PARAMETERS:
            continue
        name, read = READERS[label]
        found = compare(name, read(grid))
        differences += found
        total += len(transcribed(name))
        print(f"| {name} (table {number}) | {len(transcribed(name))} | {len(found)} |")
    differences += [f"no table {label}" for label in {*READERS, *RECIPES, *HYPER_PARAMETERS} - seen]
    differences += [
        f"{file.name}: not a table of the paper"
        for file in PAPER.glob("*.csv")
        if file.stem not in {name for name, _ in READERS.values()}
    ]
    print(f"| all | {total} | {len(differences)} |")
    print(*differences, sep="\n", file=sys.stderr)
    return bool(differences)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
