"""One protocol, one file, one interface: `evaluate(context, job, settings) -> dict`."""
