"""Lines that `maect plan` prints: a table by stage, storage, critical path, unknown values."""

from collections import defaultdict

from maect.core.errors import counted
from maect.core.log import aligned
from maect.launch.progress import rough
from maect.recipes.cost import GIB
from maect.stages import STAGES
from maect.tools.plan import TUNED_BEST, Plan, PlannedJob, critical_path, wall

ORDER = (*STAGES, "features")


def lines(plan: Plan) -> list[str]:
    """Return a table by stage, then storage, critical path, and the unknown."""
    if not plan.jobs:
        rest = f"; {counted(plan.others, 'command')} on this machine" if plan.others else ""
        return [f"no job to run{rest}"]
    groups: dict[str, list[PlannedJob]] = defaultdict(list)
    for job in plan.jobs:
        groups[job.stage].append(job)
    order = sorted(groups, key=lambda s: (ORDER.index(s) if s in ORDER else len(ORDER), s))
    unit, in_an_hour = ("h", 1) if _device_hours(plan.jobs) >= 1 else ("min", 60)
    times = (f"device {unit}", f"node {unit}")
    rows: list[tuple[str, ...]] = [
        ("stage", "jobs", "nodes x devices", "GPU GiB", *times, "times from")
    ]
    rows += [_row(stage, groups[stage], in_an_hour) for stage in order]
    rows.append(_row("total", plan.jobs, in_an_hour))
    out = [*aligned(rows, (1, 3, 4, 5)), "", *_storage(plan), *_path(plan), *_tuned(plan)]
    out += _fitting(plan)
    if plan.others:
        commands = counted(plan.others, "short command")
        out.append(f"on this machine: {commands} (shards, tables, figures)")
    out += [f"not known, and not counted: {what}" for what in sorted(plan.unknown)]
    return out


def _device_hours(jobs: list[PlannedJob]) -> float:
    """Return the hours of jobs, times the devices of a node."""
    return sum(job.node_hours * job.devices for job in jobs)


def _row(stage: str, jobs: list[PlannedJob], in_an_hour: int) -> tuple[str, ...]:
    """Return a line of the table: a stage, its jobs, and their times in units of `in_an_hour`."""
    sizes = sorted({(job.nodes, job.devices) for job in jobs})
    shapes = [f"{nodes} x {devices}" for nodes, devices in sizes]
    node_hours = sum(job.node_hours for job in jobs)
    known = [job for job in jobs if job.seconds is not None]
    sources = sorted({job.source for job in known}) if stage != "total" else []
    shape = ", ".join(shapes) if stage != "total" else ""
    if len(known) < len(jobs):
        sources.append(f"no time known of {counted(len(jobs) - len(known), 'job')}")
    memory = max(job.memory for job in jobs) if stage != "total" else 0
    return (
        stage, str(len(jobs)), shape, f"{memory / GIB:.1f}" if memory else "",
        f"{_device_hours(jobs) * in_an_hour:,.1f}", f"{node_hours * in_an_hour:,.1f}",
        "; ".join(sources[:2]) + (" ..." if len(sources) > 2 else ""),
    )  # fmt: skip


def _fitting(plan: Plan) -> list[str]:
    """Return how trainings are split to fit into GPU memory, grouped by run."""
    names: dict[str, list[str]] = defaultdict(list)
    for job in plan.jobs:
        if job.fitted:
            names[f"{job.stage}: {job.fitted}"].append(job.name)
    return [
        f"{what} ({', '.join(runs[:3])}{' ...' if len(runs) > 3 else ''})"
        for what, runs in names.items()
    ]


def _tuned(plan: Plan) -> list[str]:
    """Return how much of a model's operations tuning takes, if any is tuned."""
    if not plan.tuned:
        return []
    by_part = sorted(plan.tuned, key=lambda name: plan.tuned[name])
    ends = dict.fromkeys((by_part[0], by_part[-1]))
    parts = " to ".join(f"{plan.tuned[name]:.0%} ({name})" for name in ends)
    low, high = TUNED_BEST
    best = f"with few epochs on CIFAR-10 {low:.0%} to {high:.0%} did best"
    return [f"head and tuning take {parts} of a model's operations; {best}"]


def _storage(plan: Plan) -> list[str]:
    parts = {
        "shards": sum(plan.shard_bytes.values()),
        "runs (states, encoders, heads)": sum(j.bytes for j in plan.jobs if j.stage != "features"),
        "features": sum(job.bytes for job in plan.jobs if job.stage == "features"),
    }
    text = ", ".join(f"{what} {size_text(size)}" for what, size in parts.items() if size)
    return [f"storage: {size_text(sum(parts.values()))}: {text}"]


def _path(plan: Plan) -> list[str]:
    path = critical_path(plan.jobs)
    names = " -> ".join(job.name for job in path)
    requeues = sum(job.pieces - 1 for job in path)
    longest = f", {requeues} of them after a wall limit" if requeues else ""
    if all(job.here for job in plan.jobs):
        return [f"all of it on this machine, one job after another: {rough(wall(plan.jobs))}"]
    return [
        f"critical path: {rough(wall(path))}, without waiting in the queue, in "
        f"{sum(job.pieces for job in path)} jobs{longest}:",
        f"  {names}",
    ]


def size_text(size: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
