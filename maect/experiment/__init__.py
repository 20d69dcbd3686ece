"""An experiment: which data, runs, evaluations and tables, from one YAML file."""

from maect.experiment.load import Experiment, load

__all__ = ["Experiment", "load"]
