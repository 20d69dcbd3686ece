"""A folder that becomes a repository of the Hugging Face hub; nothing here needs the network."""

from pathlib import Path

from maect.answers.card import card_of
from maect.core.files import read_json, write_text
from maect.models.export import export_run
from maect.stages.run import resize_of

LARGE = "*.safetensors filter=lfs diff=lfs merge=lfs -text"


def publish(
    run: Path,
    out: Path,
    repository: str,
    licence: str | None = None,
    base_model: str | None = None,
    resize: int | None = None,
) -> int:
    """Write weights, `config.json`, model card and `.gitattributes`; return the number of classes.

    A fine-tuned run is published with its classifier, any other as an encoder. Other files of the
    folder, such as those of a clone, stay.

    Args:
        repository: its name on the hub, USER/NAME, for the model card.
        base_model: of the hub, that the weights come from; by default timm's, of weights of timm.
        resize: shorter side of images before the centre crop, if not the run's.

    Raises:
        UserError: the run is not finished or damaged, or the hub takes no such name or licence.
    """
    card = card_of(run, licence, repository, base_model)
    head = run / "head.safetensors" if card.labelled else None
    export_run(run, out, resize or resize_of(run), card, head)
    rules = out / ".gitattributes"
    lines = rules.read_text(encoding="utf-8").splitlines() if rules.exists() else []
    if LARGE not in lines:
        write_text(rules, "".join(f"{line}\n" for line in [*lines, LARGE]))
    return int(read_json(out / "config.json")["num_classes"])
