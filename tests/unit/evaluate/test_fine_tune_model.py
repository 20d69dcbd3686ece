"""The classifier against timm's own, its loss against sums written out in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from maect.models.weights import load_encoder_weights
from maect.stages.classifier import Classifier, Examples, drop_rates
from maect.stages.fine_tune import FineTune

CLASSES = 10
PLAIN = FineTune(precision="fp32", drop_path=0, pooling="cls")


def classifier(images: Path, settings: FineTune, seed: int = 0) -> Classifier:
    encoder, _, pooling = load_encoder_weights(images / "runs" / "mae" / "encoder.safetensors")
    return Classifier(settings, encoder, CLASSES, pooling, seed)


def batch(n: int = 6, share: float = 1.0, kept: torch.Tensor | None = None) -> Examples:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(n, 3, 16, 16, generator=generator)
    return Examples(pixels, torch.arange(n) % CLASSES, share, kept)


def timms(model: Classifier, **options) -> VisionTransformer:
    """timm's classifier with the same weights, and random ones in the head of both."""
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    vit = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=CLASSES,
        **options,
    )  # fmt: skip
    weights = {k.removeprefix("encoder."): v for k, v in model.state_dict().items()}
    weights |= {f"norm.{k}": v for k, v in model.encoder.norm.state_dict().items()}
    vit.load_state_dict(weights)
    return vit.eval()


@pytest.mark.parametrize(
    ("pooling", "options"),
    [
        ("cls", {"global_pool": "token"}),
        ("fc_norm", {"global_pool": "avg", "fc_norm": True}),
        ("mean", {"global_pool": "avg", "fc_norm": False}),
        ("encoder", {"global_pool": "avg", "fc_norm": False}),  # the file says mean
    ],
)
def test_logits_are_timms(images, pooling, options):
    model = classifier(images, PLAIN.model_copy(update={"pooling": pooling}))
    vit = timms(model, **options)
    x = batch().images
    torch.testing.assert_close(model.logits(x), vit(x), atol=1e-5, rtol=1e-5)


def test_the_head_is_small_random_and_seeded(images):
    one, two = classifier(images, PLAIN), classifier(images, PLAIN, seed=1)
    assert torch.equal(one.head.weight, classifier(images, PLAIN).head.weight)
    assert not torch.equal(one.head.weight, two.head.weight)
    assert 1e-5 < float(one.head.weight.detach().std()) < 3e-5 and not one.head.bias.any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
def test_loss_in_float64(images, smoothing, share):
    model = classifier(images, PLAIN.model_copy(update={"label_smoothing": smoothing}))
    torch.nn.init.normal_(model.head.weight)
    examples = batch(share=share)
    loss, parts = model(examples)
    logits = model.logits(examples.images).detach().double().numpy()
    labels = examples.labels.tolist()
    total = 0.0
    for i, row in enumerate(logits):
        partner = labels[i + 1 if i % 2 == 0 else i - 1]
        logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
        target = np.full(CLASSES, smoothing / CLASSES)
        target[labels[i]] += share * (1 - smoothing)
        target[partner] += (1 - share) * (1 - smoothing)
        assert target.sum() == pytest.approx(1)
        total -= (target * logp).sum()
    assert not parts
    assert float(loss) == pytest.approx(total / len(logits), rel=1e-5)


def test_drop_rates():
    linear = drop_rates(FineTune(drop_path=0.3), 4)
    assert linear == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert drop_rates(FineTune(drop_path=0.3, drop_path_schedule="constant"), 3) == [0.3] * 6
    assert drop_rates(FineTune(drop_path=0.3), 1) == [0, 0]


def test_drop_path_drops_whole_branches_of_single_samples(images):
    model = classifier(images, PLAIN.model_copy(update={"drop_path": 0.5}))
    torch.nn.init.normal_(model.head.weight)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda m, inputs, out: seen.append(out))
    everything = torch.ones(6, 6)
    nothing = everything.clone()
    nothing[:, 0] = 0
    for kept in (None, everything, nothing):
        model(batch(kept=kept))
    assert torch.equal(seen[0], seen[1])
    torch.testing.assert_close(seen[2][1:], seen[1][1:])
    # All branches of sample 0 gone: embedding and final norm are left.
    encoder = model.encoder
    cls = encoder.norm(encoder.cls_token + encoder.pos_embed[:, :1])[:, 0]
    torch.testing.assert_close(seen[2][:1], model.head(cls.detach()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "fc_norm"])
def test_layer_decay_is_timms(images, pooling):
    settings = FineTune(pooling=pooling, layer_decay=0.65, base_lr=1e-3, batch_size=512)
    model = classifier(images, settings)
    from timm.optim import param_groups_layer_decay  # which imports PyTorch's compiler

    vit = timms(model, global_pool="avg" if pooling == "fc_norm" else "token")
    expected = {}
    by_id = {id(p): name for name, p in vit.named_parameters()}
    for group in param_groups_layer_decay(vit, 0.05, layer_decay=0.65):
        for parameter in group["params"]:
            scale = group["lr_scale"]
            expected[by_id[id(parameter)]] = (2e-3 * scale, group["weight_decay"])
    found = {}
    for group in settings.parameter_groups(model):
        for name in group["names"]:
            found[name.removeprefix("encoder.")] = (group["peak_lr"], group["weight_decay"])
    # Here the positions are fixed, and as in the authors' code the [CLS] token is decayed and the
    # final norm learns at the full rate, as in MAE's; timm counts it to the last block.
    expected |= {k: (2e-3, v[1]) for k, v in expected.items() if k.startswith("norm.")}
    expected.pop("pos_embed", None)
    expected["cls_token"] = (expected["cls_token"][0], 0.05)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values), name


def test_freezing(images):
    settings = PLAIN.model_copy(update={"frozen_blocks": 2})
    model = classifier(images, settings)
    names = {name for group in settings.parameter_groups(model) for name in group["names"]}
    assert {n.split(".")[1] for n in names if n.startswith("encoder.")} == {"blocks", "norm"}
    assert {n.split(".")[2] for n in names if ".blocks." in n} == {"2"}
    model(batch())[0].backward()
    assert model.encoder.blocks[1].mlp.fc1.weight.grad is None
    assert model.encoder.blocks[2].mlp.fc1.weight.grad.abs().sum() > 0
    too_many = PLAIN.model_copy(update={"frozen_blocks": 4})
    with pytest.raises(ValueError, match="frozen_blocks 4: the encoder has 3 blocks"):
        too_many.check_encoder(model.encoder.settings)


def test_schedule_ends_at_the_lowest_rate():
    settings = FineTune(epochs=10, warmup_epochs=2, base_lr=1e-3, batch_size=256, min_lr=1e-4)

    rates = [settings.lr_multiplier(step, 100) for step in range(100)]
    cosine = [0.5 * (1 + np.cos(np.pi * (step - 20) / 80)) for step in range(20, 100)]
    np.testing.assert_allclose(rates[:20], np.arange(1, 21) / 21)
    np.testing.assert_allclose(rates[20:], [0.1 + 0.9 * value for value in cosine])
