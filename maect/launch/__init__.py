"""Run a function on N nodes x M devices, here or on SLURM, until its completion record exists."""

from maect.launch.launcher import clusters, launch
from maect.launch.resources import LaunchError, Resources, Task

__all__ = ["LaunchError", "Resources", "Task", "clusters", "launch"]
