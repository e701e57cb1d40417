"""Errors of the adapters go from one process to another, as all others do."""

from __future__ import annotations

import importlib
import pkgutil

from forebay import adapters
from tests.test_errors import CLASSES, FACTS, WAYS, ForebayError, assert_same, classes_below, led_to


def test_classes_of_adapters_go_through_whole() -> None:
    for module in pkgutil.iter_modules(adapters.__path__, "forebay.adapters."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            assert module.name.startswith("forebay.adapters.")
    for cls in set(classes_below(ForebayError)) - set(CLASSES):
        error = led_to(cls("what was wanted", **FACTS))
        for way in WAYS.values():
            assert_same(way(error), error)
