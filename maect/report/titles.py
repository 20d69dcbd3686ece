"""How architectures and methods are printed."""

ARCHITECTURES = {
    "tiny": "ViT-Tiny/4",
    "micro": "ViT-Micro/4",
    "micro8": "ViT-Micro/8",
    "small": "ViT-Small/4",
    "base": "ViT-B/16",
    "large": "ViT-L/16",
    "huge": "ViT-H/16",
    "huge14": "ViT-H/14",
    "small8": "ViT-S/8",
    "base8": "ViT-B/8",
    "large7": "ViT-L/7",
    "large7_bn": "ViT-L/7-BN",
    "huge14_bn": "ViT-H/14-BN",
    "huge_448": "ViT-H/16 (448 px)",
    "twob14": "ViT-2B/14",
}
PUBLISHED = frozenset({"moco_v3", "msn", "ibot", "dino", "i_jepa", "layer_grafting"})
"""Other methods, by their published checkpoints."""
METHODS = {
    "mae": "MAE",
    "mae_public": "MAE (public weights)",
    "moco_v3": "MoCo v3",
    "msn": "MSN",
    "ibot": "iBOT",
    "dino": "DINO",
    "i_jepa": "I-JEPA",
    "simmim": "SimMIM",
    "nnclr": "NNCLR",
    "cmae": "CMAE",
    "layer_grafting": "Layer Grafting",
    "ct_min": "MAE-CT min",
    "ct_aug": "MAE-CT aug",
    "refine": "MIM-Refiner",
    "refine_public": "MIM-Refiner (published weights)",
    "refine_d2v2": "MIM-Refiner of data2vec 2.0",
    "refine_d2v2_public": "MIM-Refiner of data2vec 2.0 (published weights)",
    "dbot": "dBOT",
    "crossmae": "CrossMAE",
    "refine_dbot": "MIM-Refiner of dBOT",
    "refine_dbot_public": "MIM-Refiner of dBOT (published weights)",
    "refine_crossmae": "MIM-Refiner of CrossMAE",
    "refine_crossmae_public": "MIM-Refiner of CrossMAE (published weights)",
    "refine_all": "MIM-Refiner, all pairs",
    "mae_long": "MAE, longer",
    "ct_aug_long": "MAE-CT aug, longer",
    "data2vec2": "data2vec 2.0",
    "mugs": "Mugs",
    "mae_ct": "MAE-CT",
    "ct_min_k1": "MAE-CT min, k = 1",
    "ct_min_k10": "MAE-CT min, k = 10",
    "ct_min_k30": "MAE-CT min, k = 30",
    "ct_min_k1_masked": "… with 75 % masking",
    "ct_min_k1_no_head": "… without head initialisation",
    "ct_min_k1_no_lookup": "… without nearest-neighbour lookup",
    "ct_min_k1_public": "MAE-CT min, k = 1 (public weights)",
    "combined": "combined pre-training",
    "combined_ct": "combined + CT",
    "combined_fine_tuned": "combined + fine-tuning",
    "combined_ct_skip": "combined + CT, its own head",
    "detached_ct_skip": "detached + CT, its own head",
    "ct_oracle": "MAE-CT oracle",
    "crop_flip": "MAE fine-tuned, crop and flip",
    "label_smoothing": "+ label smoothing",
    "mixup": "+ Mixup",
    "cutmix": "+ CutMix",
    "random_erasing": "+ random erasing",
    "randaugment": "+ RandAugment (full recipe)",
}
GLOSSARY = {
    "1 shot": "accuracy with one labelled image per class: logistic regression on the vectors",
    "2 shot": "accuracy with two labelled images per class",
    "5 shot": "accuracy with five labelled images per class",
    "1 %": "accuracy after fine-tuning with 1 % of the labels",
    "10 %": "accuracy after fine-tuning with 10 % of the labels",
    "Linear probing": "accuracy of one linear layer that is trained on the vectors with all labels",
    "k-NN": "accuracy of a vote among the nearest training images, compared by their vectors",
    "k-NN, standardised": "k-NN with every number of the vectors at mean 0 and deviation 1",
    "Accuracy": "accuracy after fine-tuning the whole encoder with labels",
    "Cluster accuracy": "groups found without labels, matched with the classes as well as possible",
    "Silhouette": "how far apart the true classes are: 100 apart, 0 and below overlapping",
    "MAE": "masked autoencoder: the encoder before tuning",
    "MAE-CT min": "after contrastive tuning with crops and flips",
    "MAE-CT aug": "after contrastive tuning with crops, flips and colours",
    "MIM-Refiner": "after tuning with heads on several blocks",
}
"""Words of tables, by a column's or a method's title."""
_SWEEPS = {
    "epochs": "epochs",
    "trainable": "trainable blocks",
    "encoder_ema": "encoder EMA",
    "temperature": "temperature",
    "topk": "k of the lookup",
    "projector_ema": "projector EMA",
}


def method_title(method: str) -> str:
    """How a method is printed; a name that the paper does not have is printed as it is."""
    sweep, _, value = method.rpartition("_")
    if sweep in _SWEEPS:
        return f"{_SWEEPS[sweep]} = {value}"
    return METHODS.get(method, method.replace("_", " "))


def architecture_title(architecture: str) -> str:
    """How an architecture is printed; `tiny_32` is one that sees other images than its own."""
    size, _, pixels = architecture.rpartition("_")
    if architecture not in ARCHITECTURES and size in ARCHITECTURES and pixels.isdecimal():
        return f"{ARCHITECTURES[size]} ({pixels} px)"
    return ARCHITECTURES.get(architecture, architecture)
