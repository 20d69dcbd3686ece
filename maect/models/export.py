"""Export of a run's encoder: a folder that timm, transformers and the Hugging Face hub read."""

import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from maect.core.errors import UserError
from maect.core.files import (
    atomic_write,
    fill_template,
    read_json,
    sealed,
    sha256_file,
    verified,
    write_json,
    write_text,
)
from maect.models.vit import timm_arguments
from maect.models.weights import HEAD, load_encoder_weights, load_tensors, save_tensors
from maect.recipes import IMAGENET, Encoder
from maect.records import RunRecord, checked_sha256

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

MODEL, ONNX, ONNX_DATA = "model.safetensors", "model.onnx", "model.onnx.data"
ONNX_BYTES = 2_000_000_000
"""Bytes of one file, at most (Protocol Buffers)."""
TRANSFORM = "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"

_READ = ("input_size", "crop_pct")
"""Entries of `pretrained_cfg` from which the resize is computed."""

# timm's models by (patch size, width, depth); any other shape is one of these with arguments.
_ARCHITECTURES = {
    (16, 768, 12): "vit_base_patch16_224",
    (16, 1024, 24): "vit_large_patch16_224",
    (14, 1280, 32): "vit_huge_patch14_224",
    (16, 1280, 32): "vit_huge_patch14_224",
}


@dataclass(frozen=True)
class Card:
    """Contents of the model card, in addition to the run's record.

    Attributes:
        labelled: whether the last stage learnt from labels, so there is a classifier.
        reads_labels: whether any stage read labels; None: unknown, as for imported weights.
        licence: of the weights, by the hub's name.
        sections: on use, data, training, results, licence and citation, in Markdown.
        results: for the hub's `model-index`.
        repository: on the hub, if the folder is a clone of one.
        base_model: on the hub, if there is one.
        datasets: on the hub.
    """

    labelled: bool = False
    reads_labels: bool | None = None
    licence: str | None = None
    sections: str = ""
    results: "tuple[EvalResult, ...]" = ()
    repository: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()


def export_run(
    run: Path,
    out: Path,
    resize: int | None = None,
    card: Card = Card(),
    head: Path | None = None,
) -> str:
    """Write `model.safetensors`, `config.json` and a model card `README.md`.

    An earlier `export_onnx` in the folder is removed, since it is of the former encoder. A folder
    with files of others under these names is refused, but a clone of a hub repository
    (`card.repository`) may have any README.

    Args:
        run: folder of the finished run.
        out: folder to write to.
        resize: shorter side of images before the centre crop; None: 256/224 of their size.
        card: contents of the model card.
        head: file of a fine-tuned run's classifier, to include in the model; None: no classifier.

    Returns:
        Python code by which timm builds the model and the transform of its images.

    Raises:
        UserError: the run is not finished, its encoder is damaged or no model of timm, `resize` is
            smaller than the encoder's images, or the folder has files of others.
    """
    record = RunRecord.of(run)
    source = run / "encoder.safetensors"
    checksum = checked_sha256(source)
    _, encoder, pooling = load_encoder_weights(source)
    if encoder.norm == "post" or pooling == "mean_cls":
        raise UserError(
            f"{run}: no model of timm has its norms behind the sums, or gives the mean of several "
            f"[CLS] tokens; use the run as it is: maect.load({str(run)!r})"
        )
    resize = resize or encoder.default_resize
    if resize < encoder.image_size:
        raise UserError(f"{run}: resize {resize} is smaller than image_size {encoder.image_size}")
    arguments = timm_arguments(encoder, pooling)
    architecture = architecture_of(encoder)
    config = hub_config(architecture, encoder, arguments, resize)
    _check_replaceable(out, card.repository is not None)
    for name in (ONNX, ONNX_DATA):  # first, so they never are beside another encoder
        (out / name).unlink(missing_ok=True)
    with atomic_write(out / MODEL) as temporary:
        if head is None:
            shutil.copyfile(source, temporary)
            sha256 = checksum
        else:
            tensors, metadata = load_tensors(source)
            classifier, texts = load_tensors(head)
            tensors |= {f"{HEAD}{name}": value for name, value in classifier.items()}
            save_tensors(temporary, tensors, metadata)
            classes = json.loads(texts["classes"])
            config |= {"num_classes": len(classes), "label_names": classes}
            config["pretrained_cfg"] |= {"num_classes": len(classes), "label_names": classes}
            sha256 = sha256_file(temporary)
        read = {key: config["pretrained_cfg"][key] for key in _READ}
        config["maect"] = sealed({"sha256": sha256, "encoder_sha256": checksum} | read)
        # First: after a kill it says whose folder this is, and that the weights are missing.
        write_json(out / "config.json", config)
    text = model_card(record, encoder, pooling, resize, checksum, card, config["num_classes"])
    write_text(out / "README.md", text)
    return f'model = timm.create_model("local-dir:{out}", pretrained=True).eval()\n{TRANSFORM}'


def _check_replaceable(out: Path, is_clone: bool) -> None:
    """Raise UserError if a folder has files of these names that no export wrote."""
    names = ["config.json", MODEL, ONNX, ONNX_DATA]
    if not is_clone:
        names.append("README.md")
    found = [name for name in names if (out / name).exists()]
    config = out / "config.json"
    # Also a damaged one, since exporting again is its cure.
    ours = config.exists() and b'"maect"' in config.read_bytes()
    if found and not ours:
        raise UserError(
            f"{out}: has {' and '.join(found)}, not written by maect export; choose another folder "
            "or move them away"
        )


def export_onnx(folder: Path) -> Path:
    """Write `model.onnx` into an exported folder: `images` [n, C, S, S], normalised, to `vectors`.

    The weights of a model of more than 2 GB are in `model.onnx.data`.
    """
    import timm
    import torch

    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError(
            "--onnx needs the packages onnx and onnxscript: install maect[onnx]"
        ) from None
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, exportable=True).eval()
    pretrained = read_json(folder / "config.json")["pretrained_cfg"]
    # torch.export would take a batch of 1 for the only size.
    images = torch.zeros(2, *pretrained["input_size"])
    shapes = ({0: torch.export.Dim("n")},)
    program = torch.onnx.export(
        model, (images,), dynamo=True, dynamic_shapes=shapes, verbose=False,
        input_names=["images"], output_names=["vectors"],
    )  # fmt: skip
    assert program is not None
    program.model.metadata_props.update(
        {key: json.dumps(pretrained[key]) for key in (*_READ, "mean", "std")}
    )
    large = sum(value.nbytes for value in model.state_dict().values()) > ONNX_BYTES
    with tempfile.TemporaryDirectory(dir=folder, prefix=".onnx-") as place:
        program.save(f"{place}/{ONNX}", external_data=large)
        for file in Path(place).iterdir():
            os.replace(file, folder / file.name)
    return folder / ONNX


def read_export(folder: Path) -> tuple[Path, str, int]:
    """Return an exported folder's weights, the encoder's sha256, and the shorter side of images.

    Raises:
        UserError: it is damaged, or `export_run` has not written it.
    """
    path = folder / "config.json"
    weights = folder / MODEL
    config = read_json(path)
    try:
        about = verified(config["maect"])
        same = all(about[key] == config["pretrained_cfg"][key] for key in _READ)
        promised, identity = about["sha256"], about["encoder_sha256"]
        resize = math.floor(about["input_size"][-1] / about["crop_pct"])
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); export it again") from None
    except (KeyError, TypeError, IndexError):
        raise UserError(
            f"{folder}: not written by `maect export`; `maect import` reads weights of others"
        ) from None
    if not same:
        raise UserError(f"{path}: {' or '.join(_READ)} edited; export it again with --resize")
    if not weights.exists() or sha256_file(weights) != promised:
        raise UserError(f"{weights}: missing or damaged (see config.json); export it again")
    return weights, identity, resize


def architecture_of(encoder: Encoder) -> str:
    """Return the name of timm's model that an encoder is, or becomes with arguments."""
    shape = (encoder.patch_size, encoder.width, encoder.depth)
    return _ARCHITECTURES.get(shape, "vit_base_patch16_224")


def crop_fraction(image_size: int, resize: int) -> float:
    """Return timm's `crop_pct`: it resizes the shorter side to floor(image_size / crop_pct)."""
    fraction = image_size / resize
    exact = math.floor(image_size / fraction) == resize
    return fraction if exact else math.nextafter(fraction, 0)


def hub_config(
    architecture: str, encoder: Encoder, arguments: dict[str, Any], resize: int
) -> dict[str, Any]:
    """Return `config.json` of timm's models on the hub: evaluation transform, model arguments.

    `num_classes` is not among the arguments, since transformers passes it itself. timm's own
    `save_for_hf` and `generate_readme` would write tag and licence of the architecture's default
    weights.
    """
    # timm 1.0.20 to 1.0.28 would adapt this layer to 3 channels, whatever it has, and leave it
    # random if it cannot.
    first = {"first_conv": "patch_embed.proj"} if encoder.pixels.channels == 3 else {}
    return {
        "architecture": architecture,
        "num_classes": 0,
        "num_features": encoder.width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [encoder.pixels.channels, encoder.image_size, encoder.image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": crop_fraction(encoder.image_size, resize),
            "crop_mode": "center",
            "mean": list(encoder.pixels.statistics[0]),
            "std": list(encoder.pixels.statistics[1]),
            "num_classes": 0,
            "pool_size": None,
            **first,
            "classifier": "head",
        },
    }


def model_card(
    record: RunRecord,
    encoder: Encoder,
    pooling: str,
    resize: int,
    sha256: str,
    card: Card,
    classes: int,
) -> str:
    """Return the hub's `README.md`: the model, how to load it, and its origin."""
    from huggingface_hub import ModelCardData

    task = "image-classification" if classes else "image-feature-extraction"
    front = ModelCardData(
        license=card.licence,
        library_name="timm",
        pipeline_tag=task,
        tags=[task, "timm", "maect"],
        base_model=card.base_model,
        datasets=list(card.datasets) or None,
        model_name=record.run,
        eval_results=list(card.results) or None,
    ).to_dict()
    return fill_template(
        Path(__file__).with_name("model_card.md"),
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        record=record,
        sha256=sha256,
        more=json.dumps({"settings": record.settings, "versions": record.versions}, indent=2),
        encoder=encoder,
        imagenet=IMAGENET,
        resize=resize,
        pooling=pooling,
        classes=classes,
        card=card,
        transform=TRANSFORM,
    )
