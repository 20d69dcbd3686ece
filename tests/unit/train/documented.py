"""The stage with several heads and local views that docs/reference/several_heads.md writes out."""

import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from maect.stages.base import SelfSupervised

PAGE = Path(__file__).parents[3] / "docs/reference/several_heads.md"


@cache
def _stage() -> type[SelfSupervised]:
    title = 'python title="maect/stages/multicrop.py"'
    code = re.search(rf"^```{re.escape(title)}\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert code is not None
    module = ModuleType("multicrop")
    sys.modules["multicrop"] = module  # where pydantic looks for names in annotations
    exec(compile(code[1], str(PAGE), "exec"), vars(module))
    return module.Multicrop


def multicrop(**changes: Any) -> SelfSupervised:
    """Its settings, with some values of its own."""
    values: dict[str, Any] = {
        "epochs": 1, "batch_size": 64, "augmentation": "aug", "warmup_fraction": 0.2,
        "base_lr": 1e-4, "weight_decay": 0.05, "encoder_ema": 0.99, "local_views": 4,
    }  # fmt: skip
    return _stage().model_validate(values | changes)
