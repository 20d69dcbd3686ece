"""Evaluations of an encoder, each protocol a module of its own."""

from maect.evaluate.protocols import PROTOCOLS, Protocol
from maect.evaluate.registry import evaluation_names, load_evaluation

__all__ = ["PROTOCOLS", "Protocol", "evaluation_names", "load_evaluation"]
