"""Optional packages, and the extra of this package that installs each of them."""

from importlib.util import find_spec

from megatron_cp_plugin.errors import ConfigError


def need(extra: str, what: str, *modules: str) -> None:
    """Refuses to go on without the packages of an extra.

    Args:
        extra: Such as "megatron".
        what: The function that needs them, as the error names it.
        modules: Modules of the extra that are needed.

    Raises:
        ConfigError: One is not installed.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}, got none installed: "
            f"pip install 'megatron-cp-plugin[{extra}]'"
        )
