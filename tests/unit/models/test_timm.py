"""Encoders by timm's name: table, import, features beside a second writing of the forward pass."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import timm
import torch
from safetensors.torch import save_file
from stamping import outdated
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn import functional as F

import maect
from maect import experiment
from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import read_record
from maect.evaluate.features import Encoding
from maect.experiment.resolve import run_config
from maect.models.checkpoints import convert_timm
from maect.models.foreign import create, create_for
from maect.recipes import Encoder, load_encoder
from maect.recipes.cost import encode_flops
from maect.recipes.timm_encoders import find_timm, timm_encoders
from maect.records import ImportedFile, RunRecord
from maect.stages import load_recipe
from maect.stages.imported import Import, import_weights

SCRIPT = Path(__file__).parents[3] / "docs/reference/timm_table.py"
timm_table = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
TINY = "vit_tiny_patch16_dinov3_qkvb.eupe_lvd1689m"


def random_model(name: str, side: int, **arguments: Any) -> nn.Module:
    """timm's model, every weight drawn anew: what is initialised to 0 or 1 would hide faults."""
    sized = {} if name.startswith(("convnext", "resnet")) else {"img_size": side}
    module = timm.create_model(name, pretrained=False, num_classes=0, **sized, **arguments)
    module.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            scale = 0.05 if value.ndim > 1 else 0.3
            value.copy_(torch.randn(value.shape, generator=generator) * scale + (value.ndim < 2))
    return module


def imported(module: nn.Module, name: str, side: int, folder: Path, **more: Tensor) -> Path:
    """A run that holds the module's weights."""
    weights = folder / "weights.safetensors"
    save_file({k: v.contiguous() for k, v in (module.state_dict() | more).items()}, weights)
    run = folder / "runs" / "it"
    import_weights(weights, run, image_size=side, timm=name)
    return run


def second_writing(module: Any, images: Tensor, pooling: str) -> Tensor:
    """The feature vector by timm's own calls."""
    x = module.forward_features(images)
    if pooling == "head":
        return module.forward_head(x, pre_logits=True)
    if pooling == "cls":
        return x[:, 0]
    return x[:, module.num_prefix_tokens :].mean(1)


def test_weights_of_another_patch_size_are_refused(tmp_path):
    """timm would resample them without a word."""
    module = random_model("vit_small_patch8_224.dino", 112)
    with pytest.raises(UserError, match=r"patch_embed.proj.weight is of patches of 8 pixels, not"):
        imported(module, "vit_small_patch16_224.dino", 112, tmp_path)


def test_several_blocks_are_those_of_timm(tmp_path):
    module: Any = random_model(TINY, 64)
    weights = imported(module, TINY, 64, tmp_path) / "encoder.safetensors"
    several, one = (Encoding(weights, torch.device("cpu"), blocks=blocks) for blocks in (3, 1))
    images = torch.randn(2, 3, 64, 64)
    found = several(images)
    assert torch.equal(found[:, -one.width :], one(images))
    with torch.no_grad():
        earlier = module.forward_intermediates(
            images, [9, 10], norm=False, return_prefix_tokens=True, intermediates_only=True
        )
    expected = torch.cat([prefix[:, 0] for _, prefix in earlier], dim=1)
    torch.testing.assert_close(found[:, : 2 * one.width], expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=f"{TINY} encodes all patches; only plain ViTs can leave"):
        one.encoder(images, torch.zeros(2, 1, dtype=torch.int64))


def test_a_map_of_features_has_places_whatever_the_images_shape(tmp_path):
    name = "convnextv2_atto.fcmae"
    weights = imported(random_model(name, 64), name, 64, tmp_path) / "encoder.safetensors"
    encoding = Encoding(weights, torch.device("cpu"))
    wide = encoding.encoder(torch.randn(2, 3, 64, 96))
    assert wide.grid == (2, 3) and wide.patch_tokens().shape == (2, 6, encoding.width)


def test_a_plain_vit_becomes_an_encoder_that_stages_start_from(tmp_path):
    name = "vit_small_patch16_224.dino"
    module = random_model(name, 224)
    run = imported(module, name, 224, tmp_path, **{"head.weight": torch.ones(2, 384)})
    assert read_record(RunRecord.path(run))["weights"]["left_out"] == {"head.*": 1}
    encoder = find_timm(name).encoder()
    start = load_recipe("ct_min", "small16")
    start.check_source(load_encoder("small16"), Import(timm=name), encoder)
    encoding = Encoding(run / "encoder.safetensors", torch.device("cpu"))
    assert encoding.settings == encoder and encoder.timm is None
    images = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        expected = second_writing(module.double(), images, "cls")
        found = encoding.encoder.double()(images, pooling="cls")
    pooled = encoding.encoder.pool(found.tokens, "cls")
    assert (pooled - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_positions_of_another_grid_are_interpolated_once(caplog):
    """A file with 6 x 6 patches of 16 pixels, for a model of 224 pixels."""
    name = "vit_small_patch16_224.dino"
    stored = random_model(name, 96).state_dict()
    prefix, patches = stored["pos_embed"].tensor_split([1], dim=1)
    rows = patches.transpose(1, 2).unflatten(2, (6, 6))
    for image_size in (None, 96, 64):
        caplog.clear()
        new = convert_timm(stored, name, "w.pth", image_size)
        side = (image_size or 224) // 16
        once = F.interpolate(rows, (side, side), mode="bicubic") if side != 6 else rows
        once = once.flatten(2).transpose(1, 2)
        torch.testing.assert_close(new.tensors["pos_embed"][:, 1:], once, rtol=0, atol=1e-6)
        torch.testing.assert_close(new.tensors["cls_token"], stored["cls_token"] + prefix)
        said = "its positions are those of 96 pixels, interpolated to 224; --image-size 96"
        assert (said in caplog.text) == (image_size is None)
    stored["pos_embed"] = stored["pos_embed"][:, :-3]
    with pytest.raises(UserError, match=r"pos_embed is \[1, 34, 384\], which is no square"):
        convert_timm(stored, name, "w.pth")


def test_files_in_published_names_are_converted_by_timm(tmp_path):
    name = "vit_small_patch14_reg4_dinov2.lvd142m"
    module = random_model(name, 518)
    ours = {"reg_token": "register_tokens"}
    published = {ours.get(k, k): v.clone() for k, v in module.state_dict().items()}
    # DINOv2 has a row of positions for [CLS], which timm adds to the token.
    row = torch.full((1, 1, 384), 0.25)
    published["pos_embed"] = torch.cat([row, published["pos_embed"]], 1)
    published["cls_token"] = published["cls_token"] - row
    published["mask_token"] = torch.zeros(1, 384)
    torch.save(published, tmp_path / "dinov2_vits14_reg4_pretrain.pth")
    run = tmp_path / "runs/it"
    import_weights(tmp_path / "dinov2_vits14_reg4_pretrain.pth", run, image_size=56, timm=name)
    small = timm.create_model(name, pretrained=False, num_classes=0, img_size=56)
    small.load_state_dict(checkpoint_filter_fn(dict(published), small))
    torch.testing.assert_close(small.cls_token, module.cls_token)
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        expected = small.eval()(images)
        found = maect.load(run).encoding.encoder(images).tokens[:, 0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_names_and_shapes_are_strict(tmp_path, caplog):
    tensors, norm = create(TINY, img_size=64).state_dict(), "blocks.3.norm1.weight"
    weights, run = tmp_path / "it.pth", tmp_path / "run"
    no_values = f"{norm} has values that are missing or not finite; fetch it again"
    for changed, message in (
        ({k: tensors[k] for k in tensors if k != norm}, f"{norm} is missing"),
        (tensors | {"another": torch.zeros(3)}, "unexpected another"),
        (tensors | {norm: torch.zeros(3)}, f"{norm} is [3] and should be [192]"),
        (tensors | {norm: torch.full((192,), torch.nan)}, no_values),
        (tensors | {norm: torch.empty(192, device="meta")}, no_values),
    ):
        torch.save(changed, weights)
        with pytest.raises(UserError) as told:
            import_weights(weights, run, image_size=64, timm=TINY)
        assert message in str(told.value) and "\n" not in str(told.value)
    for words, message in (
        (["vit_small_patch14_dinov"], "did you mean 'vit_small_patch14_dinov2'?"),
        ([TINY, "--size", "base"], "leave out --layout and --size"),
    ):
        assert main(["import", str(weights), str(run), "--timm", *words]) == 2
        assert message in caplog.text
    assert not run.exists()


def test_a_tag_can_be_left_out_where_a_name_has_one():
    """`vit_base_patch16_224` is DINO's or MAE's, and CLIP's resize depends on whose weights."""
    assert find_timm("vit_large_patch14_reg4_dinov2").name.endswith(".lvd142m")
    for name, some in {
        "vit_large_patch16_dinov3": "lvd1689m or vit_large_patch16_dinov3.sat493m",
        "vit_base_patch16_224": "dino or vit_base_patch16_224.mae",
        "vit_base_patch16_clip_224": "openai",
    }.items():
        with pytest.raises(UserError, match=rf"^timm: {name} has several weights: .*\.{some}"):
            find_timm(name)


def written(names: list[str]) -> list[dict[str, str]]:
    """These rows of the table as they are in the file."""
    table = pd.read_csv(timm_table.CSV, dtype=str, keep_default_na=False)
    return table.set_index("name", drop=False).loc[names].to_dict("records")


def as_text(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{key: str(value) for key, value in row.items()} for row in rows]


def test_rows_of_the_table_are_what_timm_builds():
    names = [
        "vit_small_patch14_reg4_dinov2.lvd142m",
        TINY,
        "eva02_tiny_patch14_224.mim_in22k",
        "convnextv2_atto.fcmae",
        "vit_base_patch16_siglip_gap_224.webli",
    ]
    assert as_text(timm_table.rows(names)) == written(names)
    assert len(timm_encoders()) >= 150
    assert set(timm_encoders()) == set(timm_table.wanted())
    for row in timm_encoders().values():
        row.encoder()


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("convnextv2_atto.fcmae", (224,)),  # four stages that differ
        ("resnet50_clip.openai", (224,)),  # bottlenecks, and attention at the end
        ("vit_small_plus_patch16_dinov3.lvd1689m", (256, 512)),  # an MLP of three products
        (TINY, (64, 256)),
    ],
)
def test_operations_are_those_that_pytorch_counts(name, sides):
    for side in sides:
        with torch.device("meta"):
            module = create_for(name, side).eval()
        operations = timm_table.counted(module, side)[1]
        found = encode_flops(find_timm(name).encoder(side))
        assert found == pytest.approx(operations, rel=0.01), side


@pytest.mark.slow
def test_the_whole_table_and_its_page_are_what_timm_builds():
    made = timm_table.rows()
    assert as_text(made) == written([row["name"] for row in made])
    assert timm_table.page(made) == timm_table.PAGE.read_text(encoding="utf-8")


def test_an_experiment_names_an_encoder_of_timm(tmp_path):
    file = tmp_path / "it.yaml"
    text = """
storage: {root}
datasets: {{digits: {{kind: digits, splits: {{train: {{}}, val: {{}}}}}}}}
runs:
  it: {{timm: vit_tiny_patch16_dinov3_qkvb, weights: {root}/w.safetensors, image_size: 64}}
{more}
evaluate: [{{runs: [it], protocols: [knn]}}]
tables: [low_shot]
"""
    file.write_text(text.format(root=tmp_path, more=""))
    chosen = experiment.load(str(file))
    run = chosen.runs["it"]
    assert run.architecture == "vit_tiny_patch16_dinov3_qkvb"
    assert run.encoder.timm == TINY
    save_file(create(run.encoder.timm, img_size=64).state_dict(), tmp_path / "w.safetensors")
    config = tmp_path / "runs/it/config.yaml"
    run_config(chosen, "it").write(config)
    assert main(["import", str(config)]) == 0
    record, row = read_record(RunRecord.path(tmp_path / "runs/it")), find_timm(TINY)
    assert record["versions"]["timm"] == timm.__version__
    assert (record["weights"]["timm"], record["weights"]["layer_scale_folded"]) == (TINY, False)
    # Those of 0.2.0 have more.
    assert ImportedFile.model_validate(record["weights"] | {"timm_version": "1.0"}).timm == TINY
    encoder = Encoder.model_validate(record["encoder"])
    assert (encoder.timm, encoder.image_size) == (TINY, 64)
    resize = maect.load(tmp_path / "runs/it").resize
    assert encoder.default_resize == resize == row.resize_for(64)
    assert encoder.pixels.statistics == (row.mean, row.std)
    assert outdated(experiment.load(str(file))) == []
    weights = tmp_path / "w.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert outdated(experiment.load(str(file))) == [config.with_name("done")]

    for recipe in ("ct_min", "ct_aug", "head_min", "head_aug", "refine", "refine_heads"):
        more = f"  ct: {{recipe: {recipe}, size: base, from: it}}"
        file.write_text(text.format(root=tmp_path, more=more))
        with pytest.raises(UserError, match=r"ct: only plain ViTs are trained.*of it$"):
            experiment.load(str(file))
    file.write_text(text.format(root=tmp_path, more="").replace("timm:", "size: base, timm:"))
    with pytest.raises(UserError, match="a run with it takes no `size`"):
        experiment.load(str(file))
