"""What a wheel holds beside the modules: the workflow, and the native decoder, if it can be built.

Address and names come from `CITATION.cff`, where the owner fills them in. An index of packages
shows README.md, whose links then lead to the repository.

A clone has both where they are: `make install` builds the decoder, an editable install nothing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PIPELINE = ("Snakefile", "workflow", "cluster_profiles", "envs")


class WithPipeline(build_py):
    """Copies the workflow to `maect/pipeline` (`maect.core.files.PIPELINE`), builds the decoder."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "maect"
        shutil.rmtree(package / "pipeline", ignore_errors=True)
        for name in PIPELINE:
            target = package / "pipeline" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if Path(name).is_dir() else shutil.copy)(name, target)
        # Without compiler or headers its line says what is missing, and the wheel is without it.
        command = [sys.executable, "-P", "-m", "maect.data.native.build"]
        own = os.environ | {"PYTHONPATH": str(package.parent.absolute())}
        subprocess.run(command, env=own, check=False)


class ForPlatform(bdist_wheel):
    """One wheel for all versions of Python: ctypes loads the decoder."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Compiled(Distribution):
    """Lets the wheel be one of this platform."""

    def has_ext_modules(self) -> bool:
        return True


def cited(file: Path) -> dict[str, Any]:
    """Return authors and address as `setup` takes them; without an address there are no links."""
    told = yaml.safe_load(file.read_text(encoding="utf-8"))
    names = [
        author.get("name") or f"{author['given-names']} {author['family-names']}"
        for author in told["authors"]
    ]
    address = told.get("repository-code")
    links = {"Source": address, "Changelog": f"{address}/blob/main/CHANGELOG.md"} if address else {}
    return {"author": ", ".join(names), "project_urls": links}


def described(readme: str, address: str | None, version: str) -> str:
    """Return README.md with links to this version's files at the address, if there is one."""
    if not address:
        return readme
    text = readme.replace("git clone ADDRESS maect", f"git clone {address} maect")
    text = text.replace("    # the address of this page", "")
    text = text.replace("](../../", f"]({address}/")  # badges
    text = re.sub(r"(!\[[^]]*\]\()(?=docs/)", rf"\1{address}/raw/v{version}/", text)
    return re.sub(r"(\]\()(?![a-z]+://|#)", rf"\1{address}/blob/v{version}/", text)


if __name__ == "__main__":
    root = Path(__file__).parent
    about = cited(root / "CITATION.cff")
    version = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    readme = (root / "README.md").read_text(encoding="utf-8")
    setup(
        distclass=Compiled,
        cmdclass={"build_py": WithPipeline, "bdist_wheel": ForPlatform},
        long_description=described(readme, about["project_urls"].get("Source"), version),
        long_description_content_type="text/markdown",
        **about,
    )
