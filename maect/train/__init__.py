"""Training that resumes exactly, on any number of ranks."""

from maect.core.imports import make_callable

make_callable(__name__)
