"""Write what describes the software from CITATION.cff and pyproject.toml.

`make metadata` writes codemeta.json and .zenodo.json; `make crate` a copy of the repository with
its ro-crate-metadata.json; `make conda` a recipe for conda-forge of the sdist.
"""

import hashlib
import json
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LICENCE = "https://spdx.org/licenses/MIT.html"
WORKFLOW_PROFILE = "https://bioschemas.org/profiles/ComputationalWorkflow/1.0-RELEASE"
CONDA = {
    "huggingface-hub": "huggingface_hub",
    "isal": "python-isal",
    "matplotlib": "matplotlib-base",
    "snakemake": "snakemake-minimal",
    "torch": "pytorch",
}
"""Names that conda-forge (Snakemake: bioconda) has for packages of the index of Python."""
ABOUT = {
    "README.md": "Overview",
    "CONTRIBUTING.md": "How to contribute",
    "CHANGELOG.md": "Changes",
    "CITATION.cff": "How to cite",
    "config/README.md": "Configuration",
    "docs/images/pipeline.svg": "Graph of the rules",
    "envs/requirements.lock": "Versions and hashes of every package",
}
"""Files of the repository that the crate describes, beside the workflow."""


def citation(root: Path = ROOT) -> dict[str, Any]:
    """Read CITATION.cff."""
    return yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))


def project(root: Path = ROOT) -> dict[str, Any]:
    """Read what pyproject.toml says of the package."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def codemeta(cited: dict[str, Any], packaged: dict[str, Any]) -> dict[str, Any]:
    """Return what codemeta.json says (CodeMeta 3.0)."""
    paper = cited["preferred-citation"]
    return {
        "@context": "https://w3id.org/codemeta/3.0",
        "type": "SoftwareSourceCode",
        "name": "maect",
        "description": packaged["description"],
        "author": [_person(author) for author in cited["authors"]],
        "version": cited["version"],
        "datePublished": str(cited["date-released"]),
        "license": "https://spdx.org/licenses/" + cited["license"],
        **({"codeRepository": cited["repository-code"]} if "repository-code" in cited else {}),
        "programmingLanguage": ["Python", "Snakemake"],
        "runtimePlatform": f"Python {packaged['requires-python']}",
        "operatingSystem": "Linux",
        "keywords": cited["keywords"],
        "developmentStatus": "active",
        "referencePublication": {
            "type": "ScholarlyArticle",
            "name": paper["title"],
            "author": [_person(author) for author in paper["authors"]],
            "datePublished": str(paper["year"]),
        },
    }


def _person(author: dict[str, str]) -> dict[str, str]:
    if "name" in author:
        return {"type": "Organization", "name": author["name"]}
    given = {"givenName": author["given-names"], "familyName": author["family-names"]}
    named = {"type": "Person", **given}
    return named | ({"id": author["orcid"]} if "orcid" in author else {})


def zenodo(cited: dict[str, Any], packaged: dict[str, Any]) -> dict[str, Any]:
    """Return what .zenodo.json says; Zenodo reads it at each release on GitHub."""
    creators = []
    for author in cited["authors"]:
        name = author.get("name") or f"{author['family-names']}, {author['given-names']}"
        orcid = author.get("orcid", "").rpartition("/")[2]
        known = {"affiliation": author.get("affiliation"), "orcid": orcid}
        creators.append({"name": name, **{key: value for key, value in known.items() if value}})
    paper = cited["preferred-citation"]
    authors = ", ".join(
        f"{one['given-names'][0]}. {one['family-names']}" for one in paper["authors"]
    )
    return {
        "upload_type": "software",
        "title": cited["title"],
        "description": packaged["description"],
        "creators": creators,
        "version": cited["version"],
        "license": cited["license"].lower(),
        "access_right": "open",
        "keywords": cited["keywords"],
        "references": [
            f"{authors}: {paper['title']}. {paper['collection-title']}, {paper['year']}."
        ],
    }


def crate(cited: dict[str, Any], packaged: dict[str, Any], root: Path = ROOT) -> dict[str, Any]:
    """Return the repository as a Workflow RO-Crate 1.0, which WorkflowHub takes."""
    people = []
    for number, author in enumerate(cited["authors"]):
        person = _person(author)
        kind, identifier = person.pop("type"), person.pop("id", f"#author-{number}")
        name = person.get("name") or f"{person['givenName']} {person['familyName']}"
        people.append({"@id": identifier, "@type": kind, **person, "name": name})
    authors: Any = [{"@id": person["@id"]} for person in people]
    authors = authors if len(authors) > 1 else authors[0]  # JSON-LD wants no list of one
    rules = sorted(
        f"workflow/rules/{path.name}" for path in (root / "workflow/rules").glob("*.smk")
    )
    released = datetime.fromisoformat(str(cited["date-released"])).replace(tzinfo=UTC)
    main = {
        "@id": "workflow/Snakefile",
        "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
        "name": cited["title"],
        "version": cited["version"],
        "license": {"@id": LICENCE},
        "creator": authors,
        "encodingFormat": "text/x-snakemake",
        "conformsTo": {"@id": WORKFLOW_PROFILE},
        "programmingLanguage": {"@id": "#snakemake"},
        "image": {"@id": "docs/images/pipeline.svg"},
        "hasPart": [{"@id": rule} for rule in rules],
    }
    parts = [main["@id"], *rules, *ABOUT, ".test/"]
    described = {
        "@id": "./",
        "@type": "Dataset",
        "name": cited["title"],
        "description": packaged["description"],
        "license": {"@id": LICENCE},
        "datePublished": released.isoformat(),
        "mainEntity": {"@id": main["@id"]},
        "author": authors,
        "hasPart": [{"@id": part} for part in parts],
        **({"url": cited["repository-code"]} if "repository-code" in cited else {}),
    }
    profiles = [
        "https://w3id.org/ro/crate/1.1",
        "https://w3id.org/workflowhub/workflow-ro-crate/1.0",
    ]
    return {
        "@context": "https://w3id.org/ro/crate/1.1/context",
        "@graph": [
            {
                "@id": "ro-crate-metadata.json",
                "@type": "CreativeWork",
                "about": {"@id": "./"},
                "conformsTo": [{"@id": profile} for profile in profiles],
            },
            described,
            main,
            *(
                {
                    "@id": rule,
                    "@type": ["File", "SoftwareSourceCode"],
                    "name": f"Rules: {Path(rule).stem}",
                    "encodingFormat": "text/x-snakemake",
                    "programmingLanguage": {"@id": "#snakemake"},
                }
                for rule in rules
            ),
            *(
                {"@id": name, "@type": ["File", "ImageObject"] if name.endswith(".svg") else "File"}
                | {"name": about, "encodingFormat": _format(name)}
                | ({"about": {"@id": "./"}} if name == "README.md" else {})
                for name, about in ABOUT.items()
            ),
            {"@id": ".test/", "@type": "Dataset", "name": "A run of minutes on handwritten digits"},
            *people,
            {
                "@id": "#snakemake",
                "@type": "ComputerLanguage",
                "name": "Snakemake",
                "identifier": {"@id": "https://doi.org/10.1093/bioinformatics/bts480"},
                "url": {"@id": "https://snakemake.readthedocs.io"},
            },
            {
                "@id": LICENCE,
                "@type": "CreativeWork",
                "name": "MIT License",
                "identifier": cited["license"],
            },
        ],
    }


def _format(name: str) -> str:
    endings = {".md": "text/markdown", ".svg": "image/svg+xml", ".cff": "application/yaml"}
    return endings.get(Path(name).suffix, "text/plain")


def conda(cited: dict[str, Any], packaged: dict[str, Any], sdist: Path) -> dict[str, Any]:
    """Return the recipe (recipe.yaml of rattler-build) of an sdist."""
    needed = [Requirement(text) for text in packaged["dependencies"]]
    run = [f"{CONDA.get(one.name, one.name)} {one.specifier}".strip() for one in needed]
    built = ["pip", "setuptools >=77", "numpy >=1.26", "pyyaml >=6", "libjpeg-turbo"]
    python = f"python {packaged['requires-python']}"
    about = {
        "license": cited["license"],
        "license_file": "LICENSE",
        "summary": packaged["description"],
    }
    return {
        "schema_version": 1,
        "package": {"name": "maect", "version": cited["version"]},
        "source": {
            "path": str(sdist.absolute()),
            "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
        },
        "build": {
            "number": 0,
            "script": "python -m pip install . --no-deps --no-build-isolation -vv",
            "python": {"entry_points": [f"maect = {packaged['scripts']['maect']}"]},
        },
        "requirements": {
            "build": ["${{ compiler('c') }}"],
            "host": [python, *built],
            "run": [python, *sorted(run)],
        },
        "tests": [
            {"python": {"imports": ["maect"], "pip_check": False}},
            {"script": ["maect --version", "maect plan --experiment digits"]},
        ],
        "about": about
        | ({"repository": cited["repository-code"]} if "repository-code" in cited else {}),
    }


def as_text(told: dict[str, Any]) -> str:
    """Return JSON as the files hold it."""
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    about = citation(), project()
    if sys.argv[1:2] == ["conda"]:
        (sdist,) = (ROOT / "dist").glob(f"maect-{about[0]['version']}.tar.gz")
        text = yaml.safe_dump(conda(*about, sdist), sort_keys=False, width=1000)
        Path(sys.argv[2], "recipe.yaml").write_text(text, encoding="utf-8")
    elif len(sys.argv) == 2:
        file = Path(sys.argv[1]) / "ro-crate-metadata.json"
        file.write_text(as_text(crate(*about)), encoding="utf-8")
    else:
        (ROOT / "codemeta.json").write_text(as_text(codemeta(*about)), encoding="utf-8")
        (ROOT / ".zenodo.json").write_text(as_text(zenodo(*about)), encoding="utf-8")
