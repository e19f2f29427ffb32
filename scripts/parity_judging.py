"""Whether a run on GPUs is as near as it has to be to the one that it is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_cp_plugin.harness.parity import Recording

# How many times the yardstick's error is allowed. Errors of a gradient are sums over thousands of
# roundings, which vary little; those of ten losses do.
GRADIENT_FACTOR, LOSS_FACTOR = 2.0, 3.0


def check_graphs(recording: Recording, *, captured: bool, attention: bool) -> list[str]:
    """Says whether a run replayed CUDA graphs otherwise than it should have, in its last iteration.

    Args:
        captured: Whether there should have been any. attention: whether in them.
    """
    found = []
    for number, rank in enumerate(recording.ranks):
        last = max(rank.gradients)
        replays, sent = rank.replays[last], rank.sent_bytes[last]
        if bool(replays) != captured:
            found.append(f"rank {number} replayed {replays} CUDA graphs in iteration {last}")
        if attention and sent:
            found.append(f"rank {number} sent {sent} bytes for attention outside of CUDA graphs")
    return found


def check_digests(wanted: Recording, recording: Recording) -> list[str]:
    """Says where gradients of two runs differ by a bit."""
    found = []
    for number, (want, got) in enumerate(zip(wanted.ranks, recording.ranks, strict=True)):
        for step, digests in want.gradients.items():
            names = [n for n, digest in digests.items() if got.gradients[step].get(n) != digest]
            if names:
                found.append(
                    f"{len(names)} of {len(digests)} gradients of rank {number} differ in "
                    f"iteration {step}: {names[0]}"
                )
    return found


def judge(run: Mapping[str, Any], yardstick: Mapping[str, Any] | None) -> list[str]:
    """Says what is wrong with a measured run; nothing, if it is as near as it has to be.

    Args:
        run: As `measure` gave it, of an algorithm.
        yardstick: The same of the yardstick; None if the run was held to tolerances.
    """
    if run["failure"]:
        return [run["failure"]]
    problems = list(run["problems"])
    if yardstick is None:
        return problems
    if yardstick["failure"] or yardstick["problems"]:
        return [*problems, "the yardstick failed"]
    loss, allowed = run["loss_error"], LOSS_FACTOR * yardstick["loss_error"]
    # Not `>`: NaN is above everything.
    if not loss <= allowed:
        problems.append(f"a loss is off by {loss:.1e} (allowed {allowed:.1e})")
    ratio, at = worst_ratio(run, yardstick)
    if not ratio <= GRADIENT_FACTOR:
        off = run["gradient_errors"][at]
        problems.append(f"gradient is off by {off:.1e}, {ratio:.1f} times the yardstick: {at}")
    return problems


def worst_ratio(run: Mapping[str, Any], yardstick: Mapping[str, Any]) -> tuple[float, str]:
    """How many times the yardstick's error a gradient's error is at most, and which gradient's.

    A gradient that the yardstick happens to have nearly right counts as its median one.
    """
    errors = yardstick["gradient_errors"]
    median = sorted(errors.values())[len(errors) // 2]
    worst, at = -math.inf, ""
    for name, error in run["gradient_errors"].items():
        base = max(errors.get(name, 0.0), median)
        ratio = error / base if base else math.inf if error else 0.0
        if math.isnan(ratio) or ratio > worst:
            worst, at = (math.inf if math.isnan(ratio) else ratio), name
    return worst, at
