"""Evaluations of an encoder, each protocol a module of its own."""

from maect.evaluate.base import Features, Input, Left, Protocol, Shards, Trained
from maect.evaluate.registry import PROTOCOLS, evaluation_names, load_evaluation

__all__ = [
    "PROTOCOLS",
    "Features",
    "Input",
    "Left",
    "Protocol",
    "Shards",
    "Trained",
    "evaluation_names",
    "load_evaluation",
]
