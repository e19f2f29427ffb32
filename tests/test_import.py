"""Importing the package needs torch alone and has no side effects."""

import subprocess
import sys

PROGRAM = """
import sys
import torch

threads, modules = torch.get_num_threads(), set(sys.modules)
import megatron_cp_plugin as cp

new = {name.split(".")[0] for name in set(sys.modules) - modules}
foreign = {"megatron", "omegaconf", "rich", "flash_attn", "fla", "transformer_engine"}
assert not new & foreign, new & foreign
assert torch.get_num_threads() == threads
assert not torch.distributed.is_initialized()
assert "zigzag" in cp.available()
q = torch.randn(1, 8, 2, 4)
assert cp.attention(q, q, q, algo="zigzag").shape == q.shape
assert "megatron" not in {name.split(".")[0] for name in sys.modules}
"""


def test_import_is_light():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
