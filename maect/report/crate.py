"""A results folder as an RO-Crate: inputs and outputs, by the stamps of its jobs.

`python -P -m maect.report.crate results/digits [LICENCE]` writes `ro-crate-metadata.json` there,
which makes the folder a Process Run Crate 0.5.
"""

import mimetypes
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import maect
from maect.core.errors import UserError
from maect.core.files import read_record, write_json
from maect.core.stamps import STAMP
from maect.records import RunRecord

METADATA = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
SOFTWARE = "#maect"


def write_crate(results: Path, licence: str | None = None) -> Path:
    """Write the metadata of the current results folder; return their file.

    Args:
        licence: address of the licence of the results.

    Raises:
        UserError: there is no finished job below the folder.
    """
    jobs = [(stamp, *_files(results, stamp)) for stamp in _stamps(results)]
    actions = [_action(results, *job) for job in jobs]
    if not actions:
        raise UserError(f"{results}: no finished job (a file `done`); name the folder of results")
    named = dict.fromkeys(name for _, inputs, made in jobs for name in (*inputs, *made))
    parts = [_part(results, name) for name in named]
    terms = {"@id": licence or "#licence", "name": licence or "not stated: ask who made these"}
    described = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Results of {results.resolve().name}",
        "description": "Trainings, evaluations, tables and figures of an experiment of maect",
        "datePublished": max(action["endTime"] for action in actions),
        "license": {"@id": terms["@id"]},
        "conformsTo": {"@id": PROFILE},
        "hasPart": _links(part["@id"] for part in parts),
        "mentions": _links(action["@id"] for action in actions),
    }
    software = {
        "@id": SOFTWARE,
        "@type": "SoftwareApplication",
        "name": "maect",
        "softwareVersion": maect.__version__,
        "description": "Contrastive tuning of masked autoencoders as one restartable workflow",
    }
    about = {
        "@id": METADATA,
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
    }
    profile = {"@id": PROFILE, "name": "Process Run Crate", "version": "0.5"}
    works = [{"@type": "CreativeWork", **work} for work in (profile, terms)]
    graph = [about, described, software, *works, *actions, *parts]
    write_json(
        results / METADATA, {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": graph}
    )
    return results / METADATA


def _stamps(results: Path) -> Iterator[Path]:
    """Yield the stamps below a folder, in the order of their paths."""
    yield from sorted([*results.rglob(STAMP), *results.rglob(f"*.{STAMP}")])


def _files(results: Path, stamp: Path) -> tuple[list[str], list[str]]:
    """Return the inputs of the job that left a stamp, with its resolved file, and its outputs.

    Inputs that are gone or outside the folder are left out.
    """
    if stamp.name == STAMP:
        config, made = stamp.with_name("config.yaml"), [stamp.parent]
    else:
        config = stamp.with_suffix(".yaml")
        files = stamp.parent.glob(f"{stamp.stem}.*")
        made = sorted(path for path in files if path not in (config, stamp))
    inputs = [config, *(stamp.parent / name for name in read_record(stamp)["made_of"])]
    names = [_name(results, path) for path in inputs if path.exists()]
    return [n for n in names if not n.startswith("..")], [_name(results, path) for path in made]


def _action(results: Path, stamp: Path, inputs: list[str], made: list[str]) -> dict[str, Any]:
    """Return the job that left a stamp."""
    record = read_record(stamp)
    job = _name(results, stamp.parent if stamp.name == STAMP else stamp.with_suffix(""))
    ended = datetime.fromtimestamp(stamp.stat().st_mtime, UTC)
    return {
        "@id": f"#{job}",
        "@type": "CreateAction",
        "name": job.rstrip("/"),
        "description": f"asked {record['asked']}, made {record['result']}",
        "instrument": {"@id": SOFTWARE},
        "object": _links(inputs),
        "result": _links(made),
        "endTime": ended.isoformat(timespec="seconds"),
        "actionStatus": "http://schema.org/CompletedActionStatus",
    }


def _links(names: Iterable[str]) -> dict[str, str] | list[dict[str, str]]:
    """Return links to entities; one alone is no list in JSON-LD."""
    links = [{"@id": name} for name in names]
    return links[0] if len(links) == 1 else links


def _name(results: Path, path: Path) -> str:
    """Return a path relative to the crate; that of a folder ends in a slash."""
    return os.path.relpath(path, results) + ("/" if path.is_dir() else "")


def _part(results: Path, name: str) -> dict[str, Any]:
    """Return a file or a folder of the crate; of a run with the checksums of its files."""
    path = results / name
    if not path.is_dir():
        size, kind = str(path.stat().st_size), mimetypes.guess_type(name)[0]
        kind = kind or "application/octet-stream"
        about = {"name": name, "contentSize": size, "encodingFormat": kind}
        return {"@id": name, "@type": "File", **about}
    part = {"@id": name, "@type": "Dataset", "name": name.rstrip("/")}
    record = RunRecord.find(path)
    if record is not None and record.sha256:
        sums = ", ".join(f"{file} {digest}" for file, digest in sorted(record.sha256.items()))
        part["description"] = f"sha256: {sums}"
    return part


if __name__ == "__main__":
    try:
        print(write_crate(Path(sys.argv[1]), *sys.argv[2:3]))
    except UserError as error:
        raise SystemExit(f"maect: {error}") from None
