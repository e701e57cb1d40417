"""What the package shows: each name can be had, is written about, and nothing else is public by accident."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import _config, errors
from forebay.remote import RemoteOptions

REPO = Path(__file__).parents[2]
ERRORS = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.ForebayError)]


@pytest.mark.parametrize("name", forebay.__all__)
def test_each_public_name_can_be_had(name: str) -> None:
    assert getattr(forebay, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        forebay.nonsense  # noqa: B018


def public_members(cls: type) -> Iterator[tuple[str, object]]:
    for name, member in vars(cls).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))):
            yield name, member


@pytest.mark.parametrize("name", [n for n in forebay.__all__ if n not in ("__version__", "errors")])
def test_each_public_name_is_written_about(name: str) -> None:
    public = getattr(forebay, name)
    assert public.__doc__
    assert [member for member, value in public_members(public) if not value.__doc__] == []


@pytest.mark.parametrize("cls", ERRORS)
def test_each_error_is_ours_and_is_written_about(cls: type[errors.ForebayError]) -> None:
    assert cls.__doc__
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", [c for c in ERRORS if c is not errors.ForebayError])
def test_each_error_is_a_built_in_one_too(cls: type[errors.ForebayError]) -> None:
    assert any(base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in cls.__mro__)


@pytest.mark.parametrize("cls", ERRORS)
def test_each_error_survives_pickling(cls: type[errors.ForebayError]) -> None:
    error = cls("what was wanted, what was found", key="k", url="u", path="p", done=1, attempts=2)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.facts) == (cls, str(error), error.facts)
    assert again.key == "k"


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))], ids=lambda page: str(page.relative_to(REPO)))
def test_the_python_in_the_pages_is_python(page: Path) -> None:
    for block in python_blocks(page.read_text()):
        assert compile(block, str(page), "exec")


def named_for_the_invariants() -> list[str]:
    page = (REPO / "docs" / "internals" / "invariants.md").read_text()
    return sorted(set(re.findall(r"^- `([\w/]+\.py(?:::\w+)?)`$", page, re.MULTILINE)))


def is_a_test(name: str) -> bool:
    file, _, test = name.partition("::")
    return (REPO / "tests" / file).exists() and f"def {test or 'test_'}" in (REPO / "tests" / file).read_text()


def test_the_tests_that_the_invariants_name_are_there() -> None:
    names = named_for_the_invariants()
    assert len(names) > 100
    assert [name for name in names if not is_a_test(name)] == []


def test_the_settings_in_the_code_are_those_on_the_page() -> None:
    page = (REPO / "docs" / "reference" / "settings.md").read_text()
    code = "\n".join(file.read_text() for file in (REPO / "src" / "forebay").rglob("*.py"))
    fields = {field.name for field in dataclasses.fields(RemoteOptions)}
    arguments = set(inspect.signature(forebay.Cache).parameters) - {"remote_options"}
    variables = set(re.findall(r"FOREBAY_[A-Z0-9_]*[A-Z0-9]", code)) - {"FOREBAY_COMPLETE"} | {f"FOREBAY_{name}" for name in _config.KNOWN}
    assert sorted(fields | arguments | variables) == sorted(set(re.findall(r"`(\w+)`", page)) & (fields | arguments | variables))
    assert set(re.findall(r"FOREBAY_\w+", page)) <= variables


def verbs_in_the_pages() -> list[str]:
    pages = "\n".join(page.read_text() for page in [REPO / "README.md", *(REPO / "docs").rglob("*.md")])
    return sorted(set(re.findall(r"^(?:\$ )?forebay ([a-z]+)\b", pages, re.MULTILINE)))


@pytest.mark.parametrize("verb", verbs_in_the_pages())
def test_the_verbs_in_the_pages_are_there(verb: str) -> None:
    done = subprocess.run([sys.executable, "-m", "forebay.cli", verb, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PAGES = "\n".join(page.read_text() for page in sorted((REPO / "docs").rglob("*.md")))
CLASSES = re.findall(r"^::: (forebay\.[\w.]+\.[A-Z]\w+)$(?=((?:\n    .*)*))", PAGES, re.MULTILINE)


@pytest.mark.parametrize(("name", "options"), CLASSES, ids=[name for name, _ in CLASSES])
def test_what_a_class_inherits_from_ours_is_on_its_page(name: str, options: str) -> None:
    module, _, own = name.rpartition(".")
    if module.startswith("forebay.adapters"):
        return  # those stand in for classes of others, whose members are told there
    cls = getattr(importlib.import_module(module), own)
    above = [base for base in cls.__mro__[1:] if base.__module__.startswith("forebay.")]
    inherited = {member for base in above for member in vars(base) if not member.startswith("_") and callable(getattr(cls, member))}
    assert "inherited_members: true" in options or not inherited - set(vars(cls))
