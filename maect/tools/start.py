"""`python -m maect.tools.start ...`: Snakemake, whose start Ctrl-C ends in a line.

Once jobs run, the pipeline itself says what becomes of them; until then Snakemake ends in the
traceback of whatever it was importing.
"""

import sys


def main() -> None:
    """Snakemake's command, with its arguments."""
    try:
        from snakemake.cli import main as snakemake

        snakemake()
    except KeyboardInterrupt:
        print("maect: interrupted before any job began", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
