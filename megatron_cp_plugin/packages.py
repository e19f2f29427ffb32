"""Other packages: those that some functions need, and those that add algorithms and kernels."""

from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec

from megatron_cp_plugin.errors import ConfigError


def need(what: str, *modules: str) -> None:
    """Refuses to go on without modules of the extra "megatron".

    Args: what: the function that needs them, as the error names it.

    Raises: ConfigError if one is not installed.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}, got none installed: "
            "pip install 'megatron-cp-plugin[megatron]'"
        )


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
