"""A cluster's packages in releases that the backbone does not work with are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet_sdk.backbones.shared.driver import check_installed
from ajet_sdk.errors import ConfigError, MissingExtra


def install(place: Path, package: str, distribution: str, version: str) -> None:
    """A package of that name and release, as pip leaves it."""
    (place / package).mkdir()
    (place / package / "__init__.py").touch()
    info = place / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("package", "distribution", "good", "bad"),
    [("verl", "verl", "0.8.0", "0.9.1"), ("trinity", "trinity-rft", "0.6.0", "0.7.0")],
)
def test_another_release_is_refused_with_the_one_that_works(
    package: str,
    distribution: str,
    good: str,
    bad: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version in (good, bad):
        (tmp_path / version).mkdir()
        install(tmp_path / version, package, distribution, version)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path / good))
        check_installed(package)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path / bad))
        with pytest.raises(ConfigError) as refused:
            check_installed(package)
    assert {bad, good.rpartition(".")[0]} <= set(str(refused.value).replace(";", " ").split())


def test_a_checkout_without_a_release_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    check_installed("verl")


def test_a_package_that_is_absent_is_named_with_its_command() -> None:
    with pytest.raises(MissingExtra):
        check_installed("surely_not_installed")
