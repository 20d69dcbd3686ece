"""The longest files start first, so that no worker is left alone with one at the end."""

import pytest

FIRST = ("end_to_end", "cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(part in item.path.parts for part in FIRST))
