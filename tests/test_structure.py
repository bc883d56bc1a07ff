"""How the package is built: imports go one way, the table of files in CONTRIBUTING.md is true, a name is one thing."""

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trinity_loss"
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
#: The parts of the table, and which parts the files of each may import.
PARTS = {
    "The product": {"The product"},
    "verl on a CPU": {"The product", "verl on a CPU"},
    "The instrument": {"The product", "verl on a CPU", "The instrument"},
}


def file_of(module: str) -> str | None:
    """The file of a module of the package."""
    path = module.removeprefix("trinity_loss").removeprefix(".").replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if name in FILES), None)


def imports(name: str) -> set[str]:
    """The files that a file imports anywhere: at its head, within a function, or for its types only."""
    found: set[str | None] = set()
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: a relative import"
            # What is imported from a package is a module of it, or a name in it.
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [module if file_of(module) else str(node.module) for module in modules]
        else:
            continue
        found |= {file_of(module) for module in modules if module.split(".")[0] == "trinity_loss"}
    return {file for file in found if file is not None} - {name}


IMPORTS = {name: imports(name) for name in FILES}
#: The audit, which is loaded only where it is switched on, loads then what explains its numbers.
LATE = {("verl/audit.py", "invariance/audit_report.py")}


def table() -> dict[str, tuple[str, int]]:
    """Of each file in the table of CONTRIBUTING.md the part that it stands in, and its place.

    A row names files, or a folder: its files have one place.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    placed: dict[str, tuple[str, int]] = {}
    place = 0
    for part in PARTS:
        (section,) = re.findall(rf"^### {part}$(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        for row in re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE):
            for name in re.findall(r"`([^`]+)`", row):
                place += 1
                files = [file for file in FILES if file.startswith(name)] if name.endswith("/") else [name]
                assert files, f"{name} is no folder of the package"
                for file in files:
                    assert file not in placed, f"{file} stands in the table twice"
                    placed[file] = (part, place)
    return placed


@pytest.fixture(scope="module")
def placed() -> dict[str, tuple[str, int]]:
    return table()


def test_every_import_is_read():
    """Else the tests below would hold of anything."""
    assert file_of("trinity_loss") == "__init__.py"
    assert file_of("trinity_loss.verl") == "verl/__init__.py"
    assert "tokens.py" in IMPORTS["kl.py"] | IMPORTS["policy.py"]
    assert "verl/audit.py" in IMPORTS["verl/worker.py"]  # Within a function.
    assert "verl/harness/__init__.py" in IMPORTS["engine_check.py"]  # From a package.
    assert "verl/cpu/platform.py" in IMPORTS["verl/plugin.py"]  # A module imported from its package.
    assert len(list(chain.from_iterable(IMPORTS.values()))) > 150


def test_imports_go_round_in_no_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_table_of_files_is_complete(placed):
    assert set(placed) == set(FILES)


def test_a_file_imports_only_files_above_it(placed):
    wrong = [
        f"{name} imports {imported}"
        for name in placed
        for imported in IMPORTS[name]
        if (name, imported) not in LATE and placed[imported][1] > placed[name][1]
    ]
    assert not wrong, "\n".join(wrong)


def test_a_part_imports_only_its_own_and_those_above(placed):
    """What a training worker loads imports nothing of what judges, measures or demonstrates it."""
    wrong = [
        f"{name} imports {imported}"
        for name, (part, _) in placed.items()
        for imported in IMPORTS[name]
        if (name, imported) not in LATE and placed[imported][0] not in PARTS[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_files_share_a_name():
    by_name = defaultdict(list)
    for file in FILES:
        if not file.endswith("__init__.py"):
            by_name[Path(file).name].append(file)
    # pytest imports two tests of one name as one.
    for file in (ROOT / "tests").rglob("*.py"):
        by_name[file.name].append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in by_name.items() if len(files) > 1}


def test_no_class_name_stands_for_two_things():
    by_name = defaultdict(list)
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                by_name[node.name].append(file)
    assert not {name: files for name, files in by_name.items() if len(files) > 1}
