"""`token_log_probs` with a planted fault: faulty_log_probs_job.py FAULT FOLDER [flags].

none        the program as it is
position    positions of rank 1 are off by one in the rotary embedding
state       states of linear attention travel in bfloat16
"""

import sys
from dataclasses import replace
from typing import Any


def plant(fault: str) -> None:
    if fault == "position":
        from megatron_cp_plugin.integration.rope import LayoutRotaryEmbedding

        angles: Any = LayoutRotaryEmbedding._angles

        def off_by_one(self: Any, seq_len: int, offset: int, mask: Any) -> Any:
            return angles(self, seq_len, offset + (self._group.rank() == 1), mask)

        LayoutRotaryEmbedding._angles = off_by_one  # type: ignore[method-assign]
    elif fault == "state":
        from megatron_cp_plugin.algorithms.lasp2 import Lasp2

        carry: Any = Lasp2.carry

        def rounded(self: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
            added = states.added.bfloat16().to(states.added.dtype)
            return carry(self, replace(states, added=added), *args, **kwargs)

        Lasp2.carry = rounded  # type: ignore[method-assign]


if __name__ == "__main__":
    from megatron_cp_plugin.harness import token_log_probs

    # The CPU platform first, as a launcher has it.
    from megatron_cp_plugin.integration import cpu

    cpu.activate()
    plant(sys.argv[1])
    sys.exit(token_log_probs.main(sys.argv[2:]))
