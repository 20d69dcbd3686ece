"""How many nodes a training takes of those that a profile allows."""

import re

from maect.core.errors import UserError

# Operations that a step must leave to each rank: about 90 ms of an A100. With less, what a step
# costs on any number of ranks (gradients, launches) soon is most of it: docs/scaling.md.
WORTH_A_RANK = 1e13


def node_range(nodes: str) -> tuple[int, int]:
    """`4` as (4, 4), `1..16` as (1, 16)."""
    found = re.fullmatch(r"([1-9][0-9]*)(?:\.\.([1-9][0-9]*))?", nodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if least > most:
        raise UserError(f"--nodes {nodes}: a number of nodes, or LEAST..MOST such as 1..16")
    return least, most


def fixed_nodes(nodes: str) -> int:
    """The nodes of a job whose size does not depend on a recipe."""
    least, most = node_range(nodes)
    if least != most:
        raise UserError(f"--nodes {nodes}: a range is for trainings; give one number here")
    return least


def training_nodes(nodes: str, devices: int, batch_size: int, step_flops: float) -> int:
    """Nodes for a training: as many of the range as its batch is worth.

    That is the largest number with which the ranks divide the batch evenly and each has
    `WORTH_A_RANK` operations a step; else the smallest that divides the batch.

    Args:
        nodes: as of `node_range`.
        devices: ranks on a node.
        batch_size: images in the global batch.
        step_flops: operations of a step on all ranks together.

    Raises:
        UserError: no number of the range divides the batch.
    """
    least, most = node_range(nodes)
    fitting = [n for n in range(least, most + 1) if batch_size % (n * devices) == 0]
    if not fitting:
        many = f"{least * devices} ranks" if least == most else f"ranks on {nodes} nodes"
        raise UserError(f"batch_size {batch_size} is not a multiple of {many}")
    worth = [n for n in fitting if step_flops / (n * devices) >= WORTH_A_RANK]
    return max(worth, default=min(fitting))
