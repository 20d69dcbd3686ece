"""A run's encoder for others: a folder that timm, transformers and the Hugging Face hub read."""

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
    read_json,
    sealed,
    sha256_file,
    verified,
    write_json,
    write_text,
)
from maect.core.templates import fill_template
from maect.models.vit import timm_arguments
from maect.models.weights import HEAD, load_encoder_weights, load_tensors, save_tensors
from maect.recipes import IMAGENET, Encoder
from maect.records import RunRecord, checked_sha256

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

MODEL, ONNX, ONNX_DATA = "model.safetensors", "model.onnx", "model.onnx.data"
ONNX_BYTES = 2_000_000_000  # what one file may hold (Protocol Buffers)
TRANSFORM = "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"

_READ = ("input_size", "crop_pct")
"""Of `pretrained_cfg`: what the resize is read from."""

# timm's models by (patch size, width, depth); any other shape is one of these with arguments.
_ARCHITECTURES = {
    (16, 768, 12): "vit_base_patch16_224",
    (16, 1024, 24): "vit_large_patch16_224",
    (14, 1280, 32): "vit_huge_patch14_224",
    (16, 1280, 32): "vit_huge_patch14_224",
}


@dataclass(frozen=True)
class Card:
    """Contents of the model card beside the model itself.

    Attributes:
        labelled: whether the last stage learnt from labels, so that there is a classifier.
        reads_labels: whether any stage read labels; none: not known, as of imported weights.
        licence: of the weights, as the hub calls it.
        sections: on use, data, training, results, licence and citation, in Markdown.
        results: the same results as the hub reads them, its `model-index`.
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

    What `export_onnx` wrote there before is removed, since it is of the encoder of then. Files of
    others stay: a folder that has some under these names is refused. A clone of a hub repository
    (`card.repository`) may have any README.

    Args:
        resize: shorter side of images before the centre crop; none: 256/224 of their size.
        card: what the model card says beside what the run's record does.
        head: the classifier that a fine-tuned run left, as part of the model; none: an encoder.

    Returns:
        How timm makes the model and the transform of its images, as Python.

    Raises:
        UserError: the run is not finished, its encoder is damaged or none that timm has, images
            would become smaller than it is given, or the folder has files of others.
    """
    record = RunRecord.of(run)
    source = run / "encoder.safetensors"
    checksum = checked_sha256(source)
    _, encoder, pooling = load_encoder_weights(source)
    if encoder.norm == "post":
        raise UserError(
            f"{run}: its blocks have their norms behind the sums, which no model of timm has; use "
            f"the run as it is: maect.load({str(run)!r})"
        )
    if pooling == "mean_cls":
        raise UserError(
            f"{run}: its features are the mean of several [CLS] tokens, which no model of timm "
            f"gives; use the run as it is: maect.load({str(run)!r})"
        )
    resize = resize or encoder.default_resize
    if resize < encoder.image_size:
        raise UserError(f"{run}: resize {resize} is smaller than image_size {encoder.image_size}")
    arguments = timm_arguments(encoder, pooling)
    architecture = architecture_of(encoder)
    config = hub_config(architecture, encoder, arguments, resize)
    _check_replaceable(out, card.repository is not None)
    for name in (ONNX, ONNX_DATA):  # first: never beside another encoder
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
        # First: after a break it says whose folder this is, and that the weights are not there.
        write_json(out / "config.json", config)
    # What timm would otherwise take from its own model of that name.
    transform = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in config["pretrained_cfg"].items()
        if key in ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    }
    given = {**arguments, "num_classes": config["num_classes"], "pretrained_cfg_overlay": transform}
    words = ", ".join(f"{key}={value!r}" for key, value in given.items())

    def call(file: Path) -> str:
        return f"""model = timm.create_model(
    "{architecture}", checkpoint_path="{file}", {words}
).eval()
{TRANSFORM}"""

    # The card goes to others, who have the folder elsewhere.
    code = call(Path(out.resolve().name, MODEL))
    text = model_card(record, encoder, pooling, resize, checksum, code, card, config["num_classes"])
    write_text(out / "README.md", text)
    return call(out / MODEL)


def _check_replaceable(out: Path, is_clone: bool) -> None:
    """Refuse, by a UserError, a folder with files of these names that no export wrote."""
    names = ["config.json", MODEL, ONNX, ONNX_DATA, *([] if is_clone else ["README.md"])]
    found, config = [name for name in names if (out / name).exists()], out / "config.json"
    # A damaged one is ours, too: exporting again is its cure.
    ours = config.exists() and b'"maect"' in config.read_bytes()
    if found and not ours:
        raise UserError(
            f"{out}: has {' and '.join(found)}, not written by maect export; choose another folder "
            "or move them away"
        )


def export_onnx(folder: Path) -> Path:
    """Write `model.onnx` of an exported folder: `images` [n, C, S, S], normalised, to `vectors`.

    A model of more than 2 GB has its weights in `model.onnx.data` beside it.
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
    # A size of 1 would be taken for the only one.
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
        UserError: damaged, or not as `export_run` writes it.
    """
    path, weights = folder / "config.json", folder / MODEL
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
    """Name of the model in timm that this is, or that it becomes with arguments."""
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
    """`config.json` of timm's models on the hub: evaluation transform and model arguments.

    `num_classes` is not among the latter, since transformers gives it itself.

    timm's `save_for_hf` and `generate_readme` would write tag and licence of other weights into it,
    those of timm's default for the architecture.
    """
    # timm 1.0.20 to 1.0.28 would adapt this layer to other channels than 3, whatever it has, and
    # leave it random where it cannot.
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
    call: str,
    card: Card,
    classes: int,
) -> str:
    """The hub's `README.md`: what the model is, how to load it, where it comes from."""
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
        call=call,
    )
