"""Fixtures of several test files."""

import pytest

import shadow_mask
from shadow_mask import visible


@pytest.fixture
def masks(monkeypatch):
    """Every mask that the learner builds."""
    built = []

    def spy(*args):
        built.append(visible(*args))
        return built[-1]

    monkeypatch.setattr(shadow_mask, "visible", spy)
    return built
