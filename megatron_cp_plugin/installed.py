"""Finds algorithms and kernels in other installed packages."""

from functools import cache
from importlib.metadata import entry_points

from megatron_cp_plugin.errors import ConfigError


@cache
def load_installed() -> None:
    """Imports the modules that installed packages list as entry points of "megatron_cp_plugin".

    Algorithms that they register have their names from then on.

    Raises: ConfigError that names the package, if one of them cannot be imported.
    """
    for entry in entry_points(group="megatron_cp_plugin"):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "an installed package"
            raise ConfigError(
                f"{package} lists {entry.value} for megatron_cp_plugin, which cannot be imported "
                f"({type(error).__name__}: {error}): mend or uninstall {package}"
            ) from error
