"""Public weights, each in its published layout, against a forward pass written a second time."""

import hashlib
import json
import math
import os
import pickle
import sys
import types
from collections import defaultdict
from typing import Any

import plain_vit
import pytest
import torch
from safetensors.torch import save_file
from stamping import outdated
from torch.nn import functional as F

from maect import experiment, recipes
from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import RUN, write_record
from maect.experiment.resolve import run_config
from maect.models.checkpoints import convert, find_layout, read_checkpoint
from maect.models.layouts import LAYOUTS
from maect.models.vit import build_encoder
from maect.models.weights import load_encoder_weights
from maect.records import RunRecord
from maect.stages.imported import import_weights, is_imported

PUBLISHED = [
    ("mae", "mae_pretrain_vit_base.pth", "mae", "mean"),
    ("mae_full", "mae_pretrain_vit_base_full.pth", "mae", "mean"),
    ("mae_reimpl", "mae_reimpl_base16.th", "mae", "mean"),
    ("mae_reimpl", "maect_base16.th", "mae_ct", "mean"),
    ("mae_ct_legacy", "maectaug_base16.th", "mae_ct", "mean"),
    ("moco_v3", "vit-b-300ep.pth.tar", "moco_v3", "cls"),
    ("moco_v3_linear", "linear-vit-b-300ep.pth.tar", "moco_v3", "cls"),
    ("layer_grafting", "checkpoint_final.pth.tar", "layer_grafting", "cls"),
    ("msn", "vitb16_600ep.pth.tar", "msn", "cls"),
    ("ibot", "checkpoint_teacher.pth", "ibot", "cls"),
    ("ibot_full", "checkpoint.pth", "ibot", "cls"),
    ("dino", "dino_vitbase16_pretrain.pth", "dino", "cls"),
    ("mae_full", "86.6_dbot_large_pre.pth", "mae", "mean"),
    ("crossmae", "imagenet-mae-cross-vitl-pretrain-wfm-mr0.75-kmr0.75.pth", "crossmae", "mean"),
    ("data2vec2", "large_imagenet.pt", "data2vec2", "cls"),
    ("data2vec2_fine_tuned", "large_imagenet_1k_ft.pt", "data2vec2", "cls"),
    ("mim_refiner", "maerefined_l16.th", "mim_refiner", "cls"),
    ("mim_refiner", "crossmaerefined_l16.th", "mim_refiner_mean", "mean"),
    ("mim_refiner", "l16_CrossMAE-refined.th", "mim_refiner_mean", "mean"),
    ("mim_refiner_post", "d2v2refined_l16.th", "mim_refiner_post", "cls"),
    ("ijepa", "IN1K-vit.h.14-300e.pth.tar", "ijepa", "mean"),
    ("pixio", "pixio_vitb16.pth", "pixio", "mean_cls"),
]


@pytest.mark.parametrize(("published", "file", "layout", "pooling"), PUBLISHED)
def test_features_are_those_of_a_plain_forward_pass(published, file, layout, pooling, tmp_path):
    checkpoint, weights = getattr(plain_vit, published)()
    torch.save(checkpoint, tmp_path / file)
    assert import_weights(tmp_path / file, tmp_path / "run")[0] == layout
    module, _, actual = load_encoder_weights(tmp_path / "run" / "encoder.safetensors")
    assert actual == pooling
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        features = module.pool(module.double()(images).tokens, actual)
    tokens = plain_vit.plain_tokens(weights, images)
    first = weights["cls_token"].shape[1] if "cls_token" in weights else 0
    poolings = {"mean": tokens[:, first:].mean(dim=1), "mean_cls": tokens[:, :first].mean(dim=1)}
    expected = tokens[:, 0] if pooling == "cls" else poolings[pooling]
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)


def test_every_layout_is_tested():
    own = {"capi"}  # in test_foreign.py
    assert {layout for _, _, layout, _ in PUBLISHED} | own == set(LAYOUTS)


@pytest.mark.parametrize(
    ("published", "entry", "left_out"),
    [
        ("mim_refiner", "state_dict", 0),
        ("mim_refiner_post", "state_dict", 0),
        ("data2vec2", "model", 3),
        ("crossmae", "model", 7),
        ("capi", None, 3),
        ("pixio", None, 0),
    ],
)
def test_every_name_is_used_or_left_out(published, entry, left_out):
    checkpoint, weights = getattr(plain_vit, published)()
    state, used = checkpoint[entry] if entry else checkpoint, []

    def made(state):
        return convert({entry: state} if entry else state, published, "x")

    converted = made(state)
    assert sum(converted.left_out.values()) == left_out
    if entry:
        assert converted.tensors.keys() == weights.keys()
        assert converted.encoder.norm == ("post" if "norm_pre.weight" in weights else "pre")
    for name, value in state.items():
        try:
            made({key: x for key, x in state.items() if key != name})
        except UserError:
            used.append(name)
            if not entry and value.shape[-1] > 1:
                with pytest.raises(UserError, match=r"should be|none of the sizes|no pos_"):
                    made({**state, name: value[..., :1]})
    assert len(used) == len(state) - left_out
    with pytest.raises(UserError, match=r"unexpected (head|other)\.weight"):
        made({**state, "head.weight" if entry else "other.weight": torch.ones(2)})


def test_the_record_of_an_import(tmp_path, capsys):
    torch.save(plain_vit.ibot()[0], tmp_path / "checkpoint_teacher.pth")
    file, run = tmp_path / "checkpoint_teacher.pth", tmp_path / "runs/ibot"
    words = ["import", str(file), str(run)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "layout ibot, size tiny, 16 pixels, pooling cls; 3 tensors left out" in told
    record = json.loads(RunRecord.path(run).read_text())
    assert {key: value for key, value in record["weights"].items() if value is not None} == {
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "size": file.stat().st_size,
        "modified": file.stat().st_mtime_ns,
        "layout": "ibot",
        "left_out": {"masked_embed": 1, "head.*": 2},
        "layer_scale_folded": False,
    }
    about = [record.get(key) for key in ("stage", "run", "source", "pooling")]
    assert about == ["import", "ibot", None, "cls"]
    before = (run / "encoder.safetensors").read_bytes()
    assert main([*words, "--layout", "ibot", "--size", "tiny"]) == 0
    assert (run / "encoder.safetensors").read_bytes() == before


@pytest.mark.parametrize("published", ["ijepa", "pixio", "capi", "d2v2refined"])
def test_an_import_of_a_layout_that_was_detected_is_what_is_asked_for(published, tmp_path):
    """Also once its file is gone, whatever the layout says of the encoder's shape."""
    weights, file = tmp_path / f"{published}.pth", tmp_path / "mine.yaml"
    made = {"d2v2refined": "mim_refiner_post"}.get(published, published)
    torch.save(getattr(plain_vit, made)()[0], weights)

    def asked(**more):
        values = {
            "storage": str(tmp_path / "results"),
            "datasets": {"digits": {"kind": "digits", "splits": {"train": {}, "val": {}}}},
            "runs": {"it": {"weights": str(weights), "size": "tiny", **more}},
            "evaluate": [{"runs": ["it"], "protocols": ["knn"]}],
        }
        file.write_text(json.dumps(values))
        return experiment.load(str(file))

    config = tmp_path / "results/runs/it/config.yaml"
    run_config(asked(), "it").write(config)
    assert main(["import", str(config)]) == 0
    for _ in range(2):
        for same in ({}, {"layout": made}):
            wanted = run_config(asked(**same), "it")
            assert is_imported(config.parent, weights, wanted.settings, wanted.encoder)
        for other in ({"layout": "msn"}, {"image_size": 32}, {"size": "tiny8"}):
            wanted = run_config(asked(**other), "it")
            assert outdated(asked(**other)) == [config.with_name("done")]
            assert not is_imported(config.parent, weights, wanted.settings, wanted.encoder)
        assert outdated(asked()) == []
        weights.unlink(missing_ok=True)


def thin(width, depth, patch, rows, cls=True):
    """An encoder's names and shapes at full size, in no memory but that of its positions."""
    zero, sides = torch.zeros(1), {4: width, 12: 3 * width, 16: 4 * width}
    small = plain_vit.encoder_weights(0, torch.zeros(1, 1, 4), cls, 4, depth, 1)
    weights = {
        name: zero.expand([sides.get(side, side) for side in value.shape])
        for name, value in small.items()
    }
    weights["patch_embed.proj.weight"] = zero.expand(width, 3, patch, patch)
    positions = plain_vit.mae_table(width, math.isqrt(rows), rows != math.isqrt(rows) ** 2)
    return weights | {"pos_embed": positions}


@pytest.mark.parametrize(
    ("size", "image_size", "pooling", "arguments"),
    [
        ("base", 224, "cls", (768, 12, 16, 197)),
        ("large", 224, "cls", (1024, 24, 16, 196)),
        ("huge14", 224, "cls", (1280, 32, 14, 257)),
        ("small", 32, "mean", (192, 12, 4, 65)),
        ("huge", 448, "mean", (1280, 32, 16, 784, False)),  # I-JEPA's
    ],
)
def test_sizes_are_found_from_the_shapes(size, image_size, pooling, arguments):
    weights = thin(*arguments)
    checkpoint = {"target_encoder": plain_vit.prefixed("module.", weights), "model": weights}
    found = convert(checkpoint, "mae" if "cls_token" in weights else "ijepa", "x")
    assert (found.size, found.encoder.image_size, found.pooling) == (size, image_size, pooling)


def test_a_shape_that_no_size_has_is_refused():
    with pytest.raises(UserError, match="patch size 16, width 320 and 12 blocks are those of none"):
        convert({"model": thin(320, 12, 16, 197)}, "mae", "x")


def test_registers_are_seen_and_fitted(monkeypatch):
    """And sizes like another one leave that one's weights to it."""
    entries = recipes._read("encoders") | {
        "reg": {"like": "tiny", "registers": 3},
        "tiny32": {"like": "tiny", "image_size": 32},
    }
    read = recipes._read
    monkeypatch.setattr(recipes, "_read", lambda n: entries if n == "encoders" else read(n))
    checkpoint, weights = plain_vit.mae()
    assert convert(checkpoint, "mae", "x").size == "tiny"
    token, moved = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    cls, patches = weights["pos_embed"][:, :1], weights["pos_embed"][:, -16:]
    for positions, expected in (
        (torch.cat([cls, moved, patches], dim=1), token + moved),
        (patches, token),
    ):
        own = weights | {"reg_token": token, "pos_embed": positions}
        converted = convert({"model": own}, "mae", "x")
        assert (converted.size, converted.encoder.prefix_tokens) == ("reg", 4)
        torch.testing.assert_close(converted.tensors["reg_token"], expected)
        assert torch.equal(converted.tensors["pos_embed"][:, 4:], patches)
        build_encoder(converted.encoder).load_state_dict(converted.tensors)
    with pytest.raises(UserError, match="patch size 4, width 64, 2 registers and 4 blocks are"):
        convert({"model": weights | {"reg_token": token[:, :2]}}, "mae", "x")


def test_maect_and_mae_base_are_told_apart_by_the_files_name():
    checkpoint = {"state_dict": thin(768, 12, 16, 196)}
    assert find_layout(checkpoint, "maectaug_base16.th") == "mae_ct"
    assert find_layout(checkpoint, "mae_reimpl_base16.th") == "mae"
    with pytest.raises(UserError, match=r"x\.th: fits mae .*cls.* and mae_ct .*mean.*--layout"):
        find_layout(checkpoint, "x.th")
    assert convert(checkpoint, "mae_ct", "x").pooling == "mean"
    assert convert(checkpoint, "mae", "x").pooling == "cls"


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"norm.bias": torch.full((64,), torch.nan)}, [], "norm.bias has values that are missing"),
        ({"norm.bias": torch.empty(64, device="meta")}, [], "norm.bias has values that are miss"),
        ({"blocks.3.norm1.weight": None}, [], "size tiny: blocks.3.norm1.weight is missing"),
        ({"blocks.3.ls1.gamma": torch.ones(64)}, [], "layout mae, size tiny: unexpected blocks.3"),
        ({"blocks.2.mlp.fc1.weight": torch.ones(64, 64)}, [], "[64, 64] and should be [256, 64]"),
        ({"norm.bias": 3}, [], "norm.bias is no tensor of real numbers"),
        ({}, ["--layout", "msn"], "layout msn: no module.patch_embed.proj.weight in 'target_enc"),
        ({}, ["--layout", "mea"], "unknown layout 'mea'; known: mae, mae_ct"),
        ({}, ["--size", "small"], "size small: cls_token is [1, 1, 64] and should be [1, 1, 192]"),
        ({}, ["--image-size", "18"], "image_size 18 is not a multiple of patch_size 4"),
    ],
)
def test_what_does_not_fit_is_one_line(changed, options, message, tmp_path, capsys):
    weights = plain_vit.mae()[1] | changed
    model = {name: value for name, value in weights.items() if value is not None}
    torch.save({"model": model}, tmp_path / "mae.pth")
    assert main(["import", str(tmp_path / "mae.pth"), str(tmp_path / "run"), *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
    assert not (tmp_path / "run").exists()


def test_names_that_fit_nothing_are_shown():
    with pytest.raises(UserError, match=r"fits none of the layouts .*first entries: epoch, net$"):
        find_layout({"epoch": 3, "net": {"layers.0.weight": torch.zeros(3, 1)}}, "x.pth")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("container", ["zip", "legacy", "bare pickle"])
def test_a_malicious_pickle_is_refused(container, tmp_path, capsys):
    trace, file = tmp_path / "trace", tmp_path / "mae.pth"
    evil = Evil(os.system, f"touch {trace}")
    if container == "bare pickle":
        file.write_bytes(pickle.dumps(evil, protocol=2))
    else:
        checkpoint = {**plain_vit.mae()[0], "args": evil}
        torch.save(checkpoint, file, _use_new_zipfile_serialization=container == "zip")
    assert main(["import", str(file), str(tmp_path / "run")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "mae.pth: refused, since reading it would run" in error and "system" in error
    assert not trace.exists() and not (tmp_path / "run").exists()
    pickle.loads(pickle.dumps(evil))  # and it does run where it is unpickled
    assert trace.exists()


def configured(monkeypatch, *names):
    """Classes of packages that are not installed; each says when it is built."""
    built = []

    def start(self, *arguments):
        built.append((type(self), arguments))

    for name in names:
        package, module, kind = name.split(".")
        for path in (package, f"{package}.{module}"):
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        parts = {"__module__": path, "__init__": start, "__setstate__": start}
        setattr(sys.modules[path], kind, type(kind, (), parts))
    return built


def test_a_configuration_is_left_out_not_built(tmp_path, monkeypatch):
    """fairseq's, by the names of its classes; nothing of these packages is looked up."""
    checkpoint, weights = plain_vit.data2vec2()
    with monkeypatch.context() as patch:
        built = configured(patch, "fairseq.configs.FairseqConfig", "omegaconf.base.DictConfig")
        config = sys.modules["fairseq.configs"].FairseqConfig()
        config.model = sys.modules["omegaconf.base"].DictConfig()
        vars(config.model).update(depth=4, kind=Any, resolver_cache=defaultdict(dict))
        state = plain_vit.training_state(cfg=config)
        torch.save(checkpoint | state, tmp_path / "large_imagenet.pt")
        built.clear()
        found = read_checkpoint(tmp_path / "large_imagenet.pt")
        assert not built and not hasattr(found["cfg"], "model")
        assert not hasattr(found["args"], "lr") and found["epoch"] == 7
        config.model.evil = Evil(os.system, f"touch {tmp_path / 'trace'}")
        torch.save(checkpoint | {"cfg": config}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"refused, since reading it would run .*system"):
        read_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "trace").exists()
    assert find_layout(found, "large_imagenet.pt") == "data2vec2"
    assert convert(found, "data2vec2", "x").tensors.keys() == weights.keys()


def test_refined_weights_of_an_unknown_encoder_are_asked_about(tmp_path, capsys):
    """CrossMAE's are read by the mean of the patch tokens; nothing in the file says so."""
    torch.save(plain_vit.mim_refiner()[0], tmp_path / "refined.th")
    words = ["import", str(tmp_path / "refined.th"), str(tmp_path / "run")]
    assert main(words) == 2 and "say which with --layout" in capsys.readouterr().err
    assert main([*words, "--layout", "mim_refiner_mean"]) == 0
    assert "pooling mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK\x03\x04 broken", b"\n<!DOCTYPE html><html>Not found</html>",
        pickle.dumps({"model": object()}), "a cut file", "a cut old file",
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_one_line(content, tmp_path):
    if isinstance(content, str):
        is_zip = content == "a cut file"
        torch.save(plain_vit.mae()[0], tmp_path / "x.pth", _use_new_zipfile_serialization=is_zip)
        assert read_checkpoint(tmp_path / "x.pth").keys() == {"model"}
        content = (tmp_path / "x.pth").read_bytes()[:100_000]
    for name in ("x.pth", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name) as error:
            read_checkpoint(tmp_path / name)
        assert "\n" not in str(error.value) and "trusted source" not in str(error.value)


@pytest.mark.parametrize("beside", [None, '[1, {"a": 2}]', "\x00"])
def test_safetensors_are_read_too(beside, tmp_path):
    """A config beside them may be anybody's."""
    weights = plain_vit.learned()
    save_file(weights, tmp_path / "dino.safetensors")
    if beside is not None:
        (tmp_path / "config.json").write_text(beside)
    layout, actual = import_weights(tmp_path / "dino.safetensors", tmp_path / "run")
    assert layout == "dino" and actual.tensors["norm.bias"].equal(weights["norm.bias"])


@pytest.mark.parametrize("published", ["dino", "ijepa"])
def test_positions_for_another_image_size_are_interpolated(published):
    checkpoint, weights = getattr(plain_vit, published)()
    actual = convert(checkpoint, published, "x", image_size=24)
    assert actual.encoder.image_size == 24
    rows = weights["pos_embed"][:, -16:].transpose(1, 2).unflatten(2, (4, 4))
    expected = F.interpolate(rows, (6, 6), mode="bicubic").flatten(2).transpose(1, 2)
    torch.testing.assert_close(actual.tensors["pos_embed"][:, -36:], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sign", [RUN, "metrics.jsonl"])
def test_a_trained_run_is_not_replaced(sign, tmp_path):
    torch.save(plain_vit.mae()[0], tmp_path / "mae.pth")
    write_record(tmp_path / "run" / sign, {"run": "run", "stage": "tune"})
    with pytest.raises(UserError, match="holds a run that was trained here"):
        import_weights(tmp_path / "mae.pth", tmp_path / "run")
    assert not (tmp_path / "run/encoder.safetensors").exists()
