"""Conveniences over everything else; nothing imports them but the command line."""
