"""The command `maect doctor`."""

import argparse

from maect.core.errors import UserError


def doctor(options: argparse.Namespace) -> None:
    """`maect doctor`: whether a site is ready, each fault with a hint.

    The job needs what the other checks look at: it runs only if they have found no fault.
    """
    from maect import experiment
    from maect.launch.devices import count_devices
    from maect.tools.doctor import login
    from maect.tools.doctor.findings import Finding, lines
    from maect.tools.doctor.probe import run_probe
    from maect.tools.doctor.site import TRIAL_MINUTES, read_profile, resources

    found: list[Finding] = []

    def note(findings: list[Finding]) -> None:
        found.extend(findings)
        print(*lines(findings), sep="\n", flush=True)

    rules, chosen = read_profile(options.profile), experiment.load(options.experiment)
    training = rules["pretrain"] | {"runtime": TRIAL_MINUTES}
    slurm = training.get("cluster") == "slurm"
    note(login.software())
    note(login.storage(chosen))
    if slurm:
        note([*login.setup_script(rules), *login.requests(rules)])
    if not options.no_job and not any(finding.kind == "FAIL" for finding in found):
        note(run_probe(chosen.root, resources(training, 2 if slurm else 1, count_devices)))
    failed = sum(finding.kind == "FAIL" for finding in found)
    if failed:
        raise UserError(f"{failed} of {len(found)} checks failed")
