"""An experiment: which data, runs, evaluations and tables, from one YAML file."""

from maect.experiment.load import Experiment, load, names, own_experiments

__all__ = ["Experiment", "load", "names", "own_experiments"]
