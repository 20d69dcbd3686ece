"""What is checked in: declared imports, a complete lock file, nothing large."""

import re
import runpy
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import maect
from maect.data.retrieve import CATALOGUE

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")


def lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    words = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_an_import_against_the_arrows_is_found(tmp_path: Path) -> None:
    """`make check` holds the contracts of pyproject.toml; here, that they hold anything."""
    (tmp_path / "maect").symlink_to(ROOT / "maect")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(settings)
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / "maect").unlink()
    for name in ("__init__", "__main__", "cli"):
        (tmp_path / f"maect/{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"maect/{name}.py").touch()
    contracts = tomllib.loads(settings)["tool"]["importlinter"]["contracts"]
    floors = re.findall(r"\w+", " ".join(contracts[0]["layers"]))
    for floor in {*floors} - {"__main__", "cli"}:
        (tmp_path / "maect" / floor).mkdir()
        (tmp_path / "maect" / floor / "__init__.py").touch()
    (tmp_path / "maect/data/__init__.py").write_text("def f():\n    import maect.evaluate\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "maect.data is not allowed to import maect.evaluate" in done.stdout


def test_the_lock_file_names_no_index() -> None:
    assert "://" not in LOCK and "--index" not in LOCK
    for block in re.split(r"\n(?=[A-Za-z0-9])", LOCK.strip()):
        assert "--hash=sha256:" in block, block


def test_the_lock_file_has_what_the_project_asks_for() -> None:
    pinned = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", LOCK, flags=re.M))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for text in [*asked["project"]["dependencies"], *asked["dependency-groups"]["dev"]]:
        wanted = Requirement(text)
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        assert name in pinned, f"{text}: run `make lock`"
        assert wanted.specifier.contains(pinned[name]), f"{text}: run `make lock`"


def test_git_has_no_large_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "README.md" in listed.stdout
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        assert not file.exists() or file.stat().st_size < 2**21, name


def test_a_clone_that_was_moved_gets_a_new_environment(tmp_path: Path) -> None:
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


def test_the_version_is_in_one_place() -> None:
    """The package's own; what cites it says the same."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert str(citation["version"]) == maect.__version__


def test_address_and_names_are_in_one_place(tmp_path: Path) -> None:
    """In CITATION.cff: the wheel's authors and links, and the documentation's."""
    text = (ROOT / "CITATION.cff").read_text()
    filled = text.replace("# repository-code: https://ADDRESS", "repository-code: https://a.org/b")
    filled = filled.replace("  - name: The maect authors", "  - {family-names: B, given-names: A}")
    assert filled.count("a.org") == 1
    (tmp_path / "CITATION.cff").write_text(filled)
    packaging = runpy.run_path(str(ROOT / "setup.py"))
    cited = packaging["cited"]
    told = cited(tmp_path / "CITATION.cff")
    assert told["author"] == "A B" and told["project_urls"]["Source"] == "https://a.org/b"
    assert cited(ROOT / "CITATION.cff") == {"author": "The maect authors", "project_urls": {}}
    for needed in ("Makefile", "pyproject.toml", "envs", "maect/data/native"):
        (tmp_path / needed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / needed).symlink_to(ROOT / needed)
    make = ["make", "--dry-run", "--directory", str(tmp_path), "docs"]
    done = subprocess.run(make, capture_output=True, text=True)
    assert "MAECT_ADDRESS=https://a.org/b " in done.stdout, done.stderr


def test_an_index_of_packages_shows_links_that_lead_somewhere() -> None:
    """README.md's own are relative; there, they are to the repository's files of this version."""
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert described(readme, None, "1.0") == readme
    shown = described(readme, "https://a.org/b", "1.0")
    assert "git clone https://a.org/b maect" in shown and "ADDRESS" not in shown
    assert "](https://a.org/b/raw/v1.0/docs/images/method.svg)" in shown
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme))
    for link in links:
        assert link.startswith(("#", "https://a.org/b/")), link


def test_the_record_of_a_run_is_known_by_name_in_one_place() -> None:
    """All others ask `RunRecord` where it is."""
    named = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "maect").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"""run\.json["']""", line)
    ]
    assert named == ['maect/core/files.py: RUN = "run.json"']


def test_the_container_is_made_of_what_is_here() -> None:
    """No builder is needed for that: what it copies is there and not ignored; one lock file."""
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    names = [name for name, _ in steps]
    assert names[:2] == ["ARG", "FROM"] and {*names} <= {
        "ARG",
        "FROM",
        "RUN",
        "COPY",
        "WORKDIR",
        "ENV",
        "ENTRYPOINT",
        "CMD",
    }
    ignored = (ROOT / ".dockerignore").read_text().split()
    of_git = (ROOT / ".gitignore").read_text().split()
    assert {name.strip("/") for name in of_git} <= {name.removeprefix("**/") for name in ignored}
    for copied in (words.split()[:-1] for name, words in steps if name == "COPY"):
        for source in copied:
            assert (ROOT / source).exists() and source not in ignored
    installed = [words for name, words in steps if name == "RUN"]
    assert any("--require-hashes -r envs/requirements.lock" in words for words in installed)
    for packages in re.findall(r"pip install (.*?)(?=&&|$)", " ".join(installed)):
        assert "--require-hashes" in packages or packages.split()[-1] == "."
    for packages in re.findall(r"apt-get install .*?(?=&&|$)", " ".join(installed)):
        assert "--no-install-recommends" in packages
    assert ("ENTRYPOINT", '["maect"]') in [tuple(step) for step in steps]


def test_metadata_files_say_what_the_citation_says(tmp_path: Path) -> None:
    """`make metadata` writes them; CITATION.cff alone is edited by hand."""
    written = runpy.run_path(str(ROOT / "docs/metadata.py"))
    about = written["citation"](), written["project"]()
    for name in ("codemeta", "zenodo"):
        file = ROOT / {"codemeta": "codemeta.json", "zenodo": ".zenodo.json"}[name]
        assert file.read_text(encoding="utf-8") == written["as_text"](written[name](*about)), (
            f"{file.name}: run `make metadata`"
        )
    filled = (ROOT / "CITATION.cff").read_text()
    filled = filled.replace(
        "# repository-code: https://ADDRESS", "repository-code: https://a.org/b"
    )
    person = "{family-names: B, given-names: A, orcid: https://orcid.org/0000-0001}"
    (tmp_path / "CITATION.cff").write_text(
        filled.replace("  - name: The maect authors", f"  - {person}")
    )
    cited = written["citation"](tmp_path)
    assert written["codemeta"](cited, about[1])["codeRepository"] == "https://a.org/b"
    assert written["zenodo"](cited, about[1])["creators"] == [
        {"name": "B, A", "orcid": "0000-0001"}
    ]


def test_the_crate_describes_files_that_are_there() -> None:
    written = runpy.run_path(str(ROOT / "docs/metadata.py"))
    graph = written["crate"](written["citation"](), written["project"]())["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    assert len(entities) == len(graph)
    assert "workflow-ro-crate" in str(entities["ro-crate-metadata.json"]["conformsTo"])
    for part in entities["./"]["hasPart"]:
        assert part["@id"] in entities and (ROOT / part["@id"]).exists()
    main = entities[entities["./"]["mainEntity"]["@id"]]
    assert {*main["@type"]} == {"File", "SoftwareSourceCode", "ComputationalWorkflow"}
    rules = {part["@id"] for part in main["hasPart"]}
    included = re.findall(r'include: "(.*)"', (ROOT / "workflow/Snakefile").read_text())
    assert rules == {f"workflow/{name}" for name in included}


def test_hosted_workflows_call_targets_of_the_makefile() -> None:
    """What they run is here; `make` and the tools of .venv are all that they call."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
        lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        for target in re.findall(r"\bmake ([a-z-]+)", " ".join(lines)):
            assert target in targets, f"{file.name}: make {target}"
        for path in re.findall(r"(?:tests|workflow|\.test)/[\w./]+", " ".join(lines)):
            assert (ROOT / path).exists(), f"{file.name}: {path}"


def test_everything_that_can_be_fetched_has_a_licence_in_the_table() -> None:
    table = (ROOT / "docs/licences.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
    licensed = {name for row in rows if row[3].strip() for name in re.findall(r"`(\w+)`", row[1])}
    assert {*CATALOGUE, "digits", "shapes"} <= licensed


def test_everything_that_an_experiment_names_has_a_licence_in_the_table() -> None:
    """Images by the variable that says where they are, weights by their file."""
    table = (ROOT / "docs/licences.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
    named = " ".join(row[1] for row in rows if row[3].strip())
    files = {remote.name for remotes in CATALOGUE.values() for remote in remotes}
    patterns = re.findall(r"`([^`]+)`", named)
    experiments = [
        file.read_text(encoding="utf-8") for file in (ROOT / "workflow/experiments").glob("*.yaml")
    ]
    images = {name for text in experiments for name in re.findall(r"images: \$(\w+)", text)}
    assert {"CIFAR10", "IMAGENETTE"} <= images
    plain = re.sub(r"[^a-z0-9]", "", named.lower())
    for variable in images:
        name = variable.lower().removesuffix("_shifted").replace("_", "")
        assert name in plain, f"docs/licences.md: images in ${variable}"
    weights = {name for text in experiments for name in re.findall(r"\$WEIGHTS/([^\s,}]+)", text)}
    for name in weights - files:
        wanted = name.replace("{size", "*")
        known = [*patterns, *files]
        assert any(fnmatch(name, one) or fnmatch(one, wanted) for one in known), name


def test_the_recipe_for_conda_asks_for_what_the_wheel_asks_for(tmp_path: Path) -> None:
    written = runpy.run_path(str(ROOT / "docs/metadata.py"))
    sdist = tmp_path / "maect.tar.gz"
    sdist.write_bytes(b"a")
    recipe = written["conda"](written["citation"](), written["project"](), sdist)
    needed = [Requirement(text) for text in written["project"]()["dependencies"]]
    run = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    for one in needed:
        assert run[written["CONDA"].get(one.name, one.name)] == str(one.specifier)
    assert len(run) == len(needed) + 1 and run["python"] == written["project"]()["requires-python"]
    assert recipe["source"]["sha256"].startswith("ca978112")
