"""The dependency direction of docs/design.md, read from the sources; a new file needs no edit here."""

from __future__ import annotations

import ast
from pathlib import Path

import headstart

SOURCE = Path(headstart.__file__).parent
LAYERS: list[set[str]] = [
    {"core", "errors", "memory", "config", "_version"},
    {"sampling", "tree", "stopping", "prompts"},
    {"targets", "vocab", "heads", "policies", "verify", "objectives"},
    {"drafting", "drafters", "unroll"},
    {"decode", "train", "replay"},
    {"requests", "generation", "session", "tune", "serve", "export", "testing"},
    {"catalogue", "recipes", "show", "heldout"},
    {"checkpoint"},
    {"learn", "prove"},
    {"forecast", "evaluate"},
    {"doctor"},
    {"cli_common"},
    {"cli_train", "cli_prove", "cli_eval", "cli_doctor"},
    {"cli", "__init__"},
    {"__main__"},
]
# Siblings that may import each other; `drafters` use policies and targets through their contracts.
ALLOWED = {("verify", "targets"), ("generation", "requests"), ("session", "generation"), ("session", "requests")}


def layer(part: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if part in names]
    assert found, f"{part} stands in no layer: add it to LAYERS and to docs/design.md"
    return found[0]


def imports() -> list[tuple[str, str, Path]]:
    out = []
    for path in SOURCE.rglob("*.py"):
        importer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headstart."):
                out.append((importer, node.module.split(".")[1], path))
    return out


def test_modules_import_lower_layers_only() -> None:
    seen = imports()
    assert len(seen) > 50
    for importer, imported, path in seen:
        fine = (
            importer == imported
            or (importer, imported) in ALLOWED
            or layer(imported) < layer(importer)
            or imported == "_version"
        )
        assert fine, f"{path.relative_to(SOURCE)} imports headstart.{imported}, which is not below it"


def test_nothing_in_the_package_imports_the_test_kit() -> None:
    assert not [path for importer, imported, path in imports() if imported == "testing" and importer != "testing"]


def test_the_checker_would_notice() -> None:
    assert layer("cli") > layer("generation") > layer("decode") > layer("drafters") > layer("targets") > layer("core")
