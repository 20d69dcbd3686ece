"""Run a function on N nodes x M devices, here or on SLURM, until its completion record exists."""

from maect.core.resources import Resources
from maect.launch.launcher import clusters, launch
from maect.launch.record import LaunchError, Task

__all__ = ["LaunchError", "Resources", "Task", "clusters", "launch"]
