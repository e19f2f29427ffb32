"""The settings of the papers, by name: algorithms of this package with other defaults.

They are for comparisons with the papers. `available` does not list them and `auto` does not try
them; they take the options of the algorithms that they are settings of.
"""

from dataclasses import field, fields, make_dataclass

from megatron_cp_plugin.algorithms.attention2d import Attention2D
from megatron_cp_plugin.algorithms.distflash import DistFlash
from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.registry import register

_SETTINGS: dict[str, tuple[type[Algorithm], dict[str, object]]] = {
    # BurstAttention, Algorithms 1 to 4.
    "burst": (Ring, {"backward": "query", "gradients": "model", "keep": "local", "chunks": 1}),
    # Attention2D, Algorithms 1 to 3 and 4 to 11.
    "attention2d-no": (Attention2D, {"variant": "no", "chunks": 1}),
    "attention2d-o": (Attention2D, {"variant": "overlap"}),
    # DISTFLASHATTN, Algorithm 2; and section 3.2, before its balance.
    "distflash-paper": (DistFlash, {"last_step": "owner", "helpers": "distance"}),
    "distflash-unbalanced": (DistFlash, {"helpers": "none"}),
}


def _with_defaults(cls: type[Algorithm], defaults: dict[str, object]) -> type[Algorithm]:
    changed = [
        (option.name, option.type, field(default=defaults[option.name], metadata=option.metadata))
        for option in fields(cls.Options)
        if option.name in defaults
    ]
    options = make_dataclass("Options", changed, bases=(cls.Options,), frozen=True)
    return type(cls.__name__, (cls,), {"Options": options, "__doc__": cls.__doc__})


for _name, (_algorithm, _defaults) in _SETTINGS.items():
    register(_name, listed=False)(_with_defaults(_algorithm, _defaults))
