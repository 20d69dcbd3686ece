"""`maect demo`: the few lines that it prints."""

import subprocess
import sys

RULES = """
rule table:
    input: "a"
    output: "b"
    log: "b.log"
    shell: "false"

rule knn:
    output: "a"
    shell: "echo said; touch {output}"
"""


def test_the_terminal_has_the_plugins_lines_and_the_log_has_all(tmp_path):
    """Snakemake loads the plugin by its name, with the setting of the command line."""
    (tmp_path / "Snakefile").write_text(RULES)
    with open(tmp_path / "terminal", "wb") as terminal, open(tmp_path / "log", "wb") as log:
        words = ["--logger", "maect", "--logger-maect-terminal", str(terminal.fileno())]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "maect.tools.start_snakemake", "--cores", "1", *words],
            cwd=tmp_path, stdout=log, stderr=log, pass_fds=[terminal.fileno()], check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert (tmp_path / "terminal").read_text().splitlines() == [
        "    [0/2] Evaluating",
        "    [1/2] Drawing tables and figures",
        "table failed; see b.log",
    ]
    assert "said" in (tmp_path / "log").read_text() and "rule knn" in (tmp_path / "log").read_text()
