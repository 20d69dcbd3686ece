"""Initialisation of the NNCLR head."""

from pydantic import model_validator

from maect.recipes import Contrastive
from maect.stages.base import Stage, check_contrastive


class Head(Stage):
    """Initialisation of the NNCLR head on the frozen encoder."""

    head: Contrastive

    @model_validator(mode="after")
    def _consistent(self) -> "Head":
        check_contrastive(self, self.head)
        return self
