"""Training that resumes exactly, on any number of ranks."""

from maect import make_callable

make_callable(__name__)
