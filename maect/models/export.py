"""A run's encoder for others: a folder that timm and the Hugging Face hub read."""

import json
from pathlib import Path
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from maect.core.files import checked_sha256, read_json, write_json, write_text
from maect.models.weights import load_encoder_weights, save_tensors
from maect.recipes import Encoder

# timm's models by (patch size, width, depth); any other shape is one of these with arguments.
_ARCHITECTURES = {
    (16, 768, 12): "vit_base_patch16_224",
    (16, 1024, 24): "vit_large_patch16_224",
    (14, 1280, 32): "vit_huge_patch14_224",
    (16, 1280, 32): "vit_huge_patch14_224",
}


def export_run(run: Path, out: Path, labelled: bool = False) -> str:
    """Write `model.safetensors`, `config.json` and a model card `README.md`.

    Args:
        run: folder of a finished run.
        out: folder to write to; what it holds under these names is replaced.
        labelled: whether the run learnt from labels.

    Returns:
        How timm makes the model, as Python.

    Raises:
        UserError: the run is not finished or its encoder is damaged.
    """
    record = read_json(run / "run.json")
    source = run / "encoder.safetensors"
    checksum = checked_sha256(source)
    module, encoder, pooling = load_encoder_weights(source)
    arguments = timm_arguments(encoder, pooling)
    architecture = architecture_of(encoder)
    save_tensors(out / "model.safetensors", module.state_dict(), {})
    write_json(out / "config.json", hub_config(architecture, encoder, arguments))
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    call = (
        f'timm.create_model("{architecture}", '
        f'checkpoint_path="{out.name}/model.safetensors", {words})'
    )
    write_text(out / "README.md", model_card(record, encoder, pooling, labelled, checksum, call))
    return call


def architecture_of(encoder: Encoder) -> str:
    """Name of the model in timm that this is, or that it becomes with arguments."""
    shape = (encoder.patch_size, encoder.width, encoder.depth)
    return _ARCHITECTURES.get(shape, "vit_base_patch16_224")


def timm_arguments(encoder: Encoder, pooling: str) -> dict[str, Any]:
    """Arguments with which the output of timm's `VisionTransformer` is our feature vector."""
    return {
        "img_size": encoder.image_size,
        "patch_size": encoder.patch_size,
        "embed_dim": encoder.width,
        "depth": encoder.depth,
        "num_heads": encoder.heads,
        "class_token": encoder.class_token,
        **({"reg_tokens": encoder.registers} if encoder.registers else {}),
        "global_pool": "token" if pooling == "cls" else "avg",
        # Only fine-tuned encoders take the norm of the mean, the others the mean of normed patches.
        "fc_norm": pooling == "fc_norm",
        "num_classes": 0,
    }


def hub_config(architecture: str, encoder: Encoder, arguments: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of timm's models on the hub: evaluation transform and model arguments.

    timm's `save_for_hf` and `generate_readme` would write tag and licence of other weights into it,
    those of timm's default for the architecture.
    """
    return {
        "architecture": architecture,
        "num_classes": 0,
        "num_features": encoder.width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [3, encoder.image_size, encoder.image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.875,  # centre crop of 224 out of a shorter side of 256
            "crop_mode": "center",
            "mean": list(IMAGENET_DEFAULT_MEAN),
            "std": list(IMAGENET_DEFAULT_STD),
            "num_classes": 0,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def model_card(
    record: dict[str, Any], encoder: Encoder, pooling: str, labelled: bool, sha256: str, call: str
) -> str:
    """The hub's `README.md`: what the model is, how to load it, where it comes from."""
    facts = {
        "run": record["run"],
        "stage": record["stage"],
        "started from": record["source"],
        "seed": record["seed"],
        "finished": record["finished"],
        "source revision": record["source_revision"],
        "sha256 of the run's encoder.safetensors": sha256,
    }
    if "weights" in record:
        given = record["weights"]
        facts |= {f"imported {key}": given[key] for key in ("file", "sha256", "layout")}
    lines = "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value is not None)
    more = {key: record[key] for key in ("recipe", "versions") if key in record}
    vector = {
        "cls": "[CLS] token after the final norm",
        "mean": "mean of the patch tokens after the final norm",
        "fc_norm": "norm of the mean of the patch tokens",
    }[pooling]
    labels = "fine-tuned with labels" if labelled else "trained without labels"
    return f"""---
library_name: timm
pipeline_tag: image-feature-extraction
tags:
- image-feature-extraction
- timm
---
# {record["run"]}

A vision transformer without a classifier, {labels}: {encoder.depth} blocks of width
{encoder.width}, patches of {encoder.patch_size} pixels, images of {encoder.image_size} pixels.
Its output is the {vector}, {encoder.width} numbers an image.

```python
import timm

model = timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True)
```

or, from the file alone,

```python
model = {call}
```

Images: shorter side to 256/224 of the image size (bicubic), centre crop, normalised with
ImageNet's mean and standard deviation (`config.json`).

## Where it comes from

| | |
| --- | --- |
{lines}

```json
{json.dumps(more, indent=2)}
```
"""
