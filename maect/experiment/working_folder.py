"""The folder that a pipeline is started in, where Snakemake has files of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

import maect
from maect.core.errors import UserError
from maect.core.files import PIPELINE, check_literal_path
from maect.core.owners import why_public

DEFAULT_PROFILES = (Path("default"), Path("profiles/default"))
"""Where Snakemake searches for settings by default."""


def check_working_folder() -> None:
    """Refuse a working folder where others could put something in Snakemake's way (UserError)."""
    here = Path.cwd()
    check_literal_path(here)
    if reason := why_public(here, sticky=True):
        raise UserError(f"{reason}; or start in a folder of your own")


def check_profiles(words: Sequence[str]) -> None:
    """Refuse settings that Snakemake would take from a profile that nobody named (UserError)."""
    if not is_bare(words) or any(word.startswith("--workflow-profile") for word in words):
        return
    for folder in (*DEFAULT_PROFILES, PIPELINE / DEFAULT_PROFILES[1]):
        if folder.exists():
            raise UserError(
                f"{folder.absolute()}: Snakemake takes this for a profile without being asked; "
                "add --workflow-profile none, or start by `maect run`"
            )


def notes(pipeline: Path, words: Sequence[str]) -> list[str]:
    """Return a sentence for each thing that the working folder suggests and that is not so."""
    clones = [other_clone(folder) for folder in {Path.cwd(), pipeline}]
    profile = os.environ.get("SNAKEMAKE_PROFILE")
    if profile and not any(word.startswith("--profile") for word in words) and is_bare(words):
        clones.append(f"the profile is that of SNAKEMAKE_PROFILE, {profile}: none was named")
    return [*filter(None, clones)]


def is_bare(words: Sequence[str]) -> bool:
    """Return whether Snakemake was called without `maect`, which lets it take no profile."""
    return "snakemake" in (Path(words[0]).name, Path(words[0]).parent.name)


def other_clone(folder: Path) -> str:
    """Return a sentence if a folder is another clone of maect than the one that runs; else ""."""
    ours = Path(maect.__file__).parent
    theirs = folder / "maect"
    is_clone = (theirs / "__init__.py").is_file() and (folder / "Snakefile").is_file()
    if not is_clone or theirs.samefile(ours):
        return ""
    return f"{folder} is another clone of maect: its code is not used, but that of {ours.parent}"
