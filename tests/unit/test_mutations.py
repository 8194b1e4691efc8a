"""The list of ``make mutate`` fits the code: a stale entry is red here, not after an hour."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutation.__main__ import MUTATIONS, PROJECT
from mutation.catalog import Mutation


def test_names_are_unique() -> None:
    """A name on the command line means one mutation."""
    names = [mutation.name for mutation in MUTATIONS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_code(mutation: Mutation) -> None:
    """Its text is there exactly once, it changes something, and its tests exist."""
    assert mutation.old != mutation.new
    assert (PROJECT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.tests
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert (PROJECT / path).exists(), test
        assert not name or name.partition("[")[0] in functions(PROJECT / path), test


def functions(path: Path) -> set[str]:
    """The names of a test file's functions, those in classes as ``Class::name``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inside = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}::{part.name}" for part in inside}
    return found
