"""A rule for the source of kernels that neither Triton's interpreter nor the emulator can check: both run Python."""

import ast
from collections.abc import Iterator

import pytest

from tests.helpers import PACKAGE

MODULES = [path for path in sorted(PACKAGE.glob("kernels/**/*.py")) if ".jit" in path.read_text()]
ROTATED = """
for t in range(tiles):
    before, flat = flat, t * rows
"""
COUNTED = """
for t in range(tiles):
    before = flat
    flat += rows
"""
COPIED = """
for t in range(tiles):
    new_max = maximum(b_max, t)
    b_max = new_max
"""


def stale_copies(tree: ast.AST) -> Iterator[str]:
    """Yield assignments in loops that copy a variable before the iteration gives it a new value.

    Triton compares a variable's value before a loop with that after its body to find out whether the loop changes it.
    A copy may be the same value, and then the variable keeps its first value in all iterations.
    """
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.While):
            continue
        assignments = [node for node in ast.walk(loop) if isinstance(node, ast.Assign | ast.AugAssign)]
        assignments.sort(key=lambda node: node.lineno)
        changed, current = {name for node in assignments for name in assigned(node)}, set()
        for node in assignments:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            copied = {value.id for value in values if isinstance(value, ast.Name)}
            if isinstance(node, ast.Assign) and copied & changed - current:
                yield ast.unparse(node)
            current |= assigned(node)


def assigned(node: ast.stmt) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def test_stale_copies_are_found():
    assert list(stale_copies(ast.parse(ROTATED))) == ["before, flat = (flat, t * rows)"]
    assert list(stale_copies(ast.parse(COUNTED))) == ["before = flat"]
    assert not list(stale_copies(ast.parse(COPIED)))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_loops_of_kernels_copy_no_variable_of_the_iteration_before(path):
    assert not list(stale_copies(ast.parse(path.read_text())))
