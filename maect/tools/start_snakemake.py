"""`python -P -m maect.tools.start_snakemake ...`: start Snakemake; Ctrl-C ends that in a line.

`--logger maect` is the plugin of `maect.tools.logger`.
"""

import sys


def import_snakemake() -> None:
    """Import Snakemake without the folder below the working folder that it would import from."""
    import snakemake

    sys.path[:] = [path for path in sys.path if path != snakemake.PIP_DEPLOYMENTS_PATH]


def main() -> None:
    """Run Snakemake's command with its arguments."""
    try:
        import_snakemake()
        from snakemake.cli import main as snakemake

        if "--logger" in sys.argv:
            from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

            from maect.tools import logger

            # By itself Snakemake finds installed packages of such names only.
            LoggerPluginRegistry().register_plugin("snakemake_logger_plugin_maect", logger)
        snakemake()
    except KeyboardInterrupt:
        print("maect: interrupted before any job began", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
