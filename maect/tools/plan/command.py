"""The command `maect plan`."""

import argparse


def plan(options: argparse.Namespace) -> None:
    """`maect plan`: what is left to run, what it takes, and how long the longest chain is."""
    from maect import experiment
    from maect.launch.devices import count_devices
    from maect.tools.plan import dag, jobs, text
    from maect.tools.plan.speed import Device

    changes = dict(pair.partition("=")[::2] for pair in options.config)
    found = experiment.load(options.experiment, **changes)
    config = [f"experiment={options.experiment}", *options.config]
    words = dag.commands_to_run(options.target, config, options.profile)
    commands = [options.parser.parse_args(line) for line in words]
    for command in commands:
        if hasattr(command, "devices"):
            command.devices = count_devices(command.devices)
    left = jobs.make_plan(commands, found, Device(options.device, options.utilisation))
    print(f"{options.experiment} on {options.profile}", *text.lines(left), sep="\n")
