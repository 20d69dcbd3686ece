"""What is checked in: declared imports, a complete lock file, nothing large."""

import re
import runpy
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import maect
from maect.data.retrieve import CATALOGUE

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")


def test_the_lock_file_has_what_the_project_asks_for_and_names_no_index():
    assert "://" not in LOCK and "--index" not in LOCK
    for block in re.split(r"\n(?=[A-Za-z0-9])", LOCK.strip()):
        assert "--hash=sha256:" in block, block
    pinned = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", LOCK, flags=re.M))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for text in [*asked["project"]["dependencies"], *asked["dependency-groups"]["dev"]]:
        wanted = Requirement(text)
        version = pinned.get(re.sub(r"[-_.]+", "-", wanted.name).lower())
        assert version and wanted.specifier.contains(version), f"{text}: run `make lock`"


def test_a_clone_that_was_moved_gets_a_new_environment(tmp_path):
    for name in ("Makefile", "pyproject.toml", "envs/requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    make = ["make", "--dry-run", "--directory", str(tmp_path), ".venv/.installed"]
    for place, again in ((tmp_path, False), ("/elsewhere", True)):
        command = f"command = /usr/bin/python3 -m venv {place}/.venv\n"
        (tmp_path / ".venv/pyvenv.cfg").write_text(command)
        done = subprocess.run(make, capture_output=True, text=True, check=True)
        assert ("the clone was moved from /elsewhere/.venv" in done.stdout) == again
        assert ("-m venv --clear" in done.stdout) == again


def test_the_version_is_in_one_place():
    """The package's own; what cites it says the same."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert str(citation["version"]) == maect.__version__


def test_address_and_names_are_in_one_place(tmp_path):
    """In CITATION.cff: the wheel's authors and links, and the documentation's."""
    text = (ROOT / "CITATION.cff").read_text()
    filled = text.replace("# repository-code: https://ADDRESS", "repository-code: https://a.org/b")
    filled = filled.replace("  - name: The maect authors", "  - {family-names: B, given-names: A}")
    assert filled.count("a.org") == 1
    (tmp_path / "CITATION.cff").write_text(filled)
    cited = runpy.run_path(str(ROOT / "setup.py"))["cited"]
    told = cited(tmp_path / "CITATION.cff")
    assert told["author"] == "A B" and told["project_urls"]["Source"] == "https://a.org/b"
    assert cited(ROOT / "CITATION.cff") == {"author": "The maect authors", "project_urls": {}}
    for needed in ("Makefile", "pyproject.toml", "envs", "maect/data/native"):
        (tmp_path / needed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / needed).symlink_to(ROOT / needed)
    make = ["make", "--dry-run", "--directory", str(tmp_path), "docs"]
    done = subprocess.run(make, capture_output=True, text=True)
    assert "MAECT_ADDRESS=https://a.org/b " in done.stdout, done.stderr


def test_the_container_is_made_of_what_is_here():
    """What it copies is there and not ignored; of packages it takes those of the lock file."""
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    ignored = (ROOT / ".dockerignore").read_text().split()
    of_git = (ROOT / ".gitignore").read_text().split()
    assert {name.strip("/") for name in of_git} <= {name.removeprefix("**/") for name in ignored}
    for copied in (line.split()[1:-1] for line in lines if line.startswith("COPY ")):
        for source in copied:
            assert (ROOT / source).exists() and source not in ignored
    installed = " ".join(line for line in lines if line.startswith("RUN "))
    assert "--require-hashes -r envs/requirements.lock" in installed
    for packages in re.findall(r"pip install (.*?)(?=&&|$)", installed):
        assert "--require-hashes" in packages or packages.split()[-1] == "."


METADATA = runpy.run_path(str(ROOT / "docs/metadata.py"))
ABOUT = METADATA["citation"](), METADATA["project"]()


def test_metadata_files_say_what_the_citation_says():
    """`make metadata` writes them; CITATION.cff alone is edited by hand."""
    for name, file in {"codemeta": "codemeta.json", "zenodo": ".zenodo.json"}.items():
        written = METADATA["as_text"](METADATA[name](*ABOUT))
        assert (ROOT / file).read_text(encoding="utf-8") == written, f"{file}: run `make metadata`"


def test_the_crate_describes_files_that_are_there():
    graph = METADATA["crate"](*ABOUT)["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    assert len(entities) == len(graph)
    for part in entities["./"]["hasPart"]:
        assert part["@id"] in entities and (ROOT / part["@id"]).exists()
    rules = {part["@id"] for part in entities[entities["./"]["mainEntity"]["@id"]]["hasPart"]}
    included = re.findall(r'include: "(.*)"', (ROOT / "workflow/Snakefile").read_text())
    assert rules == {f"workflow/{name}" for name in included}


def test_the_recipe_for_conda_asks_for_what_the_wheel_asks_for(tmp_path):
    sdist = tmp_path / "maect.tar.gz"
    sdist.write_bytes(b"a")
    recipe = METADATA["conda"](*ABOUT, sdist)
    run = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    for one in map(Requirement, ABOUT[1]["dependencies"]):
        assert run[METADATA["CONDA"].get(one.name, one.name)] == str(one.specifier)
    assert run["python"] == ABOUT[1]["requires-python"]
    assert recipe["source"]["sha256"].startswith("ca978112")


def test_everything_that_is_fetched_or_named_has_a_licence_in_the_table():
    """Images by the variable that says where they are, weights by their file."""
    table = (ROOT / "docs/licences.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
    named = " ".join(row[1] for row in rows if row[3].strip())
    assert {*CATALOGUE, "digits", "shapes"} <= {*re.findall(r"`(\w+)`", named)}
    files = {remote.name for remotes in CATALOGUE.values() for remote in remotes}
    experiments = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "workflow/experiments").glob("*.yaml")
    )
    plain = re.sub(r"[^a-z0-9]", "", named.lower())
    for variable in re.findall(r"images: \$(\w+)", experiments):
        name = variable.lower().removesuffix("_shifted").replace("_", "")
        assert name in plain, f"docs/licences.md: images in ${variable}"
    for name in {*re.findall(r"\$WEIGHTS/([^\s,}]+)", experiments)} - files:
        known = [*re.findall(r"`([^`]+)`", named), *files]
        wanted = name.replace("{size", "*")
        assert any(fnmatch(name, one) or fnmatch(one, wanted) for one in known), name
