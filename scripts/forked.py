"""Imported once by the process that `forks` forks: the CPU platform, and what training needs."""

import argparse
import functools
import gc
import importlib
import inspect
import sys
import warnings
import weakref
from importlib import metadata

import torch

from megatron_cp_plugin import packages
from megatron_cp_plugin.integration import compat, cpu


def _import_megatron() -> None:
    # Each line that a rank prints would go through it, and nobody logs there.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    cpu.activate()
    for name in (
        "megatron_cp_plugin.harness.pretrain",
        # And what is imported in functions.
        "megatron.core.datasets.helpers",
        "megatron.core.models.mimo",
        "megatron.core.tokenizers.text",
        "megatron_cp_plugin.algorithms",
        "megatron_cp_plugin.integration.checks",
        "megatron_cp_plugin.integration.installer",
        "megatron_cp_plugin.harness.recorder",
        "megatron_cp_plugin.integration.spec",
        "megatron_cp_plugin.integration.yaml_config",
        "torch._dynamo",
    ):
        importlib.import_module(name)
    # The process that passes on what a checkpoint's writers say would import all of this anew.
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    inspect.unwrap(writer.get_write_results_queue).__defaults__ = ("fork",)
    _read_sources()
    # A search of the others for Megatron's names would give each rank a copy of their memory.
    theirs = {name.partition(".")[0] for name in sys.modules}
    compat._WITHOUT_MEGATRON |= theirs - {"megatron", "megatron_cp_plugin", "scripts", "__main__"}
    # What is installed is looked up here for all ranks.
    packages.load_installed()
    metadata.entry_points = metadata.entry_points().select
    # Fewer documents than Megatron's: each rank shuffles all samples of them.
    sys.modules["megatron.core.datasets.gpt_dataset"].MockGPTLowLevelDataset.size = 5_000
    # It takes names of Megatron, and has to do so after the plugin has replaced them: once a rank.
    del sys.modules["megatron_cp_plugin.harness.pretrain"]
    delattr(sys.modules["megatron_cp_plugin.harness"], "pretrain")


def _read_sources() -> None:
    """Reads once for all ranks what Megatron looks up in its sources for the help of its flags."""
    from megatron.training.arguments import add_megatron_arguments

    factory = sys.modules["megatron.training.argument_utils"].ArgumentGroupFactory
    read = functools.partial(factory._get_field_docstrings, factory)
    factory._get_field_docstrings = staticmethod(functools.cache(read))
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


# Of forks too. Ranks share the cores, and a fork has no threads of its parent's.
torch.set_num_threads(1)
with warnings.catch_warnings():
    # Megatron says what is not installed.
    warnings.simplefilter("ignore")
    _import_megatron()
# A rank that visited these objects, to collect garbage or at its end, would get a copy of most of
# their memory.
gc.collect()
gc.freeze()
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
